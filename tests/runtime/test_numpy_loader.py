"""What needs no torch: the loader of arrays, corpora that may only be read, rows of many documents, pickled plans."""

from __future__ import annotations

import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, append_generation, write_corpus
from tests.runtime.disk import write
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, StreamPlan


def test_it_reads_and_resumes_where_torch_cannot_be_imported() -> None:
    program = """
        import sys

        sys.modules["torch"] = None  # an import of it fails
        from tests.runtime.loaders import expected_rows, one_corpus, rows_of, take
        from tokshard.runtime import NumpyLoader, expand

        plan = one_corpus(epochs=2)
        with NumpyLoader(plan, global_batch_size=4) as loader, NumpyLoader(plan, prefetch_factor=0,
            global_batch_size=4, compact=True) as narrow:
            rows = rows_of(take(loader, 2))
            narrow.load_state_dict(loader.state_dict())
            rows += rows_of(list(map(expand, narrow)))
        assert [row for row in rows if row["sample_index"] >= 0] == expected_rows(plan, range(plan.num_samples))
        try:
            from tokshard.runtime import StreamingLoader
        except ModuleNotFoundError as error:
            print(error.name, "pip install 'tokshard[torch]'" in str(error))
    """
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "torch True\n"), done.stderr


def test_the_file_of_a_plan_gives_the_size_of_batches_the_generations_and_what_is_kept(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tokshard.runtime import StreamDataset, StreamingLoader

    append_generation(write_corpus(tmp_path / "code", [[1, 2, 3, 0]] * 40, tokenizer=TINY_TOKENIZER), [[1, 2, 0]] * 5)
    mix = tmp_path / "mix.toml"
    mix.write_text(
        "global_batch_size = 3\nseq_len = 4\ngenerations = { old = 0 }\n"
        'corpora = { old = "code", new = "code/generation-01" }\n'
        'memory_bytes = "64MiB"\ncache_dir = "kept"\ncache_bytes = "2GiB"\n'
    )
    plan: Any = StreamPlan.load(mix)
    assert [source.num_tokens for source in plan.sources] == [160, 15]
    kept = {"memory_bytes": 64 << 20, "cache_dir": str(tmp_path / "kept"), "cache_bytes": 2 << 30}
    assert {**plan.sources[0].cache._arguments, **kept} == plan.sources[0].cache._arguments
    assert len(next(iter(NumpyLoader(plan, global_batch_size=2)))["input_ids"]) == 2
    assert len(next(iter(NumpyLoader(plan)))["input_ids"]) == 3
    assert len(next(iter(StreamingLoader(plan)))["input_ids"]) == 3
    assert StreamDataset(plan)[next(iter(StreamDataset(plan).sampler))]["input_ids"].shape == (3, 4)


WATCHED = """
import os, sys
from tokshard.runtime import CorpusSource, NumpyLoader, StreamPlan
written = []
def watch(event, arguments):
    if event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
        written.append(str(arguments[0]))
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"):
        written.append(f"{event} {arguments}")
sys.addaudithook(watch)
for access in ("mmap", "pread"):
    plan = StreamPlan({"corpus": CorpusSource(sys.argv[1], access=access)}, seq_len=8, epochs=1)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        print(sum(int((batch["sample_index"] >= 0).sum()) for batch in loader))
print(written)
"""


@pytest.mark.slow
def test_nothing_is_written_anywhere_so_that_a_corpus_may_only_be_read(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", ListSource([9, 4, 30, 1, 12, 8]), shard_tokens=20)
    command = [sys.executable, "-B", "-c", WATCHED, corpus]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout.splitlines() == ["8", "8", "[]"], done.stderr


@pytest.mark.parametrize("seq_len", [1, 63, 64, 65, 128])
def test_the_boundaries_of_any_number_of_pieces_are_there_and_the_end_fills_up_a_power_of_two(seq_len: int) -> None:
    plan = StreamPlan(ListSource([1] * 300), seq_len=seq_len)  # as many pieces as tokens
    bounds = plan.sample(0)["cu_seqlens"].tolist()
    assert bounds[: seq_len + 1] == list(range(seq_len + 1))
    assert set(bounds[seq_len:]) == {seq_len}
    assert len(bounds) >= 64
    assert len(bounds).bit_count() == 1


def test_a_plan_pickles_to_an_equal_plan_without_the_tables_and_permutations_that_it_read_with() -> None:
    corpora = {"a": ListSource([5] * 4_000), "b": ListSource([30], name="b")}
    plan = StreamPlan(corpora, seq_len=4, block_tokens=16, num_streams=4)
    before = len(pickle.dumps(plan))
    expected = plan.sample(3)["input_ids"].tolist()
    next(iter(NumpyLoader(plan, global_batch_size=4, prefetch_factor=0)))
    content = pickle.dumps(plan)
    assert len(content) < before + 1_000
    again = pickle.loads(content)
    assert again.fingerprint == plan.fingerprint
    assert again.sample(3)["input_ids"].tolist() == expected
