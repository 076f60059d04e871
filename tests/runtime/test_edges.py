"""What breaks other loaders: tiny and huge corpora, odd documents, few descriptors, dead workers, files that change."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.examples import some
from tests.runtime import page_model
from tests.runtime.loaders import expected_rows, global_rows, rows_of, take
from tests.runtime.page_model import Used
from tests.runtime.sources import EOS, ListSource, PeriodicSource
from tests.runtime.states import replaced
from tests.runtime.test_page_model import assert_equal, documents_of_source
from tokshard.errors import DamagedCorpusError, LoaderError, PlanMismatchError
from tokshard.runtime import NumpyLoader, prefetch
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.store.posix import PosixStore

ROOT = Path(__file__).parents[2]
ACCESS = ["mmap", "pread"]


def write(directory: Path, memory: ListSource, *, shard_tokens: int = 1 << 28) -> Path:
    return write_corpus(directory, memory.documents(), shard_tokens=shard_tokens, tokenizer=TINY_TOKENIZER)


def shard_of(source: Any, index: int) -> Path:
    return source.corpus.directory / source.corpus.shards[index].name


def small_plan(source: Any, **options: Any) -> StreamPlan:
    sizes = {"seq_len": 8, "block_tokens": 32, "window_blocks": 3, "seed": 4}
    return StreamPlan(source if isinstance(source, dict) else {"corpus": source}, **{**sizes, **options})


def documents_read(plan: StreamPlan, samples: int) -> list[tuple[int, int, int]]:
    return [(piece.document, piece.start, piece.stop) for k in range(samples) for piece in plan.trace(k)]


# odd corpora


def test_a_corpus_of_one_document_is_read_again_and_again() -> None:
    source = ListSource([50])
    plan = small_plan(source, seq_len=25, allow_small_blocks=True, block_tokens=64)
    rows = rows_of(take(StreamingLoader(plan, global_batch_size=2), 4))
    for epoch in range(4):
        both = sorted(rows[2 * epoch : 2 * epoch + 2], key=lambda row: row["input_ids"][0])
        assert both[0]["input_ids"] + both[1]["input_ids"] == source.tokens.tolist()
        assert both[0]["labels"] + both[1]["labels"] == [*source.tokens.tolist()[1:], -100]


def test_documents_of_one_token_are_inputs_without_a_target() -> None:
    plan = small_plan(ListSource([1] * 100))
    batches = take(StreamingLoader(plan, global_batch_size=5), 3)
    for batch in batches:
        assert set(batch["input_ids"].flatten().tolist()) == {EOS}
        assert set(batch["labels"].flatten().tolist()) == {-100}
        assert set(batch["position_ids"].flatten().tolist()) == {0}
        assert batch["cu_seqlens"][:41].tolist() == list(range(41))
        assert int(batch["max_seqlen"]) == 1
    assert sorted(documents_read(plan, 12)[:96]) == sorted(set(documents_read(plan, 12)))


def test_a_document_longer_than_a_window_is_read_whole_from_several_windows() -> None:
    source = ListSource([3, 1000, 5])
    plan = small_plan(source, epochs=1)
    assert 3 * plan.shape.window_blocks * plan.shape.block_tokens < 1000
    pieces = sorted(documents_read(plan, plan.num_samples or 0))
    read = [token for document, start, stop in pieces for token in range(start, stop) if document == 1]
    assert read == list(range(1000))
    targets = [label for k in range(plan.num_samples or 0) for label in plan.sample(k)["labels"].tolist()]
    assert sorted(label for label in targets if label != -100) == sorted(
        token for document in source.documents() for token in document[1:]
    )


@pytest.mark.slow
@some("lengths", [[10], [1], [3, 1, 2], [1] * 10, [4, 6]], default=3)
def test_a_corpus_far_smaller_than_a_sample_fills_it_with_many_epochs(lengths: list[int]) -> None:
    source = ListSource(lengths)
    plan = StreamPlan({"tiny": source}, seq_len=1_024, seed=3)
    row = plan.sample(1000)
    counts = np.bincount(row["input_ids"], minlength=11)
    epochs = 1_024 / source.num_tokens
    for token in source.tokens.tolist():
        assert counts[token] == pytest.approx(epochs * source.tokens.tolist().count(token), abs=len(lengths) + 1)
    pieces = plan.trace(1000)
    documents = [piece.document for piece in pieces if piece.stop - piece.start == lengths[piece.document]]
    assert len(pieces) - len(documents) <= 2
    orders = {tuple(documents[k * len(lengths) :][: len(lengths)]) for k in range(len(documents) // len(lengths))}
    assert (len(orders) > 1) == (len(lengths) > 1)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seq_len=st.integers(15, 60),
    block=st.integers(1, 64),
    epochs=st.one_of(st.none(), st.integers(1, 30)),
)
def test_samples_of_many_epochs_are_those_of_the_page(
    lengths: list[int], seq_len: int, block: int, epochs: int | None
) -> None:
    source = ListSource(lengths)
    options = {"seed": 9, "seq_len": seq_len, "window_blocks": 2}
    plan = StreamPlan(source, epochs=epochs, block_tokens=block, allow_small_blocks=True, **options)
    model = page_model.Plan([Used(documents_of_source(source))], epochs=epochs, block_tokens=block, **options)
    assert plan.num_samples == model.num_samples
    for sample in range(min(plan.num_samples or 4, 4)):
        assert_equal(plan, model, sample)


def test_a_corpus_smaller_than_a_sample_ends_a_finite_pass_with_one_short_sample() -> None:
    source = ListSource([4, 6])
    plan = StreamPlan({"tiny": source}, seq_len=131_072, epochs=3)
    assert plan.num_samples == 1
    (batch,) = list(StreamingLoader(plan, global_batch_size=2))
    assert batch["sample_index"].tolist() == [0, -1]
    assert sorted(batch["input_ids"][0, :30].tolist()) == sorted(source.tokens.tolist() * 3)
    assert set(batch["input_ids"][0, 30:].tolist()) == {0}
    assert set(batch["labels"][0, 30:].tolist()) == {-100}
    assert int((batch["labels"] != -100).sum()) == 3 * (3 + 5)


def test_fewer_documents_than_ranks_feed_every_rank() -> None:
    plan = small_plan(ListSource([5, 9]))
    assert global_rows(plan, 4, batch=16, ranks=8) == expected_rows(plan, range(64))


def test_delimiter_ids_inside_documents_cut_nothing(tmp_path: Path) -> None:
    documents = [[1, EOS, 2, EOS, EOS, 3, EOS], [EOS, EOS], [2, EOS]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER)
    plan = StreamPlan({"corpus": CorpusSource(corpus)}, seq_len=11, epochs=1)
    row = plan.sample(0)
    bounds = row["cu_seqlens"].tolist()
    for number, piece in enumerate(plan.trace(0)):
        start, stop = bounds[number], bounds[number + 1]
        tokens = documents[piece.document]
        assert row["input_ids"][start:stop].tolist() == tokens
        assert row["labels"][start:stop].tolist() == [*tokens[1:], -100]
        assert row["position_ids"][start:stop].tolist() == list(range(len(tokens)))
    read_by_range = CorpusSource(corpus, access="pread")
    with pytest.raises(DamagedCorpusError, match=r"7 documents end .*, by their delimiters; .* says 3 to 3"):
        StreamPlan({"corpus": read_by_range}, seq_len=11, epochs=1).sample(0)


def test_samples_of_one_token_are_each_token_once() -> None:
    source = ListSource([4, 1, 7])
    plan = StreamPlan({"corpus": source}, seq_len=1, seed=2, block_tokens=4, window_blocks=2)
    rows = rows_of(take(StreamingLoader(plan, global_batch_size=4), 6))
    for epoch in (rows[:12], rows[12:]):
        assert sorted(row["input_ids"] for row in epoch) == sorted([token] for token in source.tokens.tolist())
        followers = {token: after for d in source.documents() for token, after in zip(d, [*d[1:], -100], strict=True)}
        for row in epoch:
            assert row["labels"] == [followers[row["input_ids"][0]]] or row["input_ids"] == [EOS]
            assert row["position_ids"] == [0]


def test_a_document_of_100_000_tokens_keeps_its_whole_context_in_samples_of_131_072() -> None:
    source = ListSource([10_000, 100_000, 20_000, 1072])
    plan = StreamPlan({"corpus": source}, seq_len=131_072, seed=1)
    for sample in range(3):
        row = plan.sample(sample)
        assert sorted(documents_read(plan, 1)) == [(0, 0, 10_000), (1, 0, 100_000), (2, 0, 20_000), (3, 0, 1072)]
        assert int(row["max_seqlen"]) == 100_000
        bounds = row["cu_seqlens"].tolist()
        start = next(a for a, b in pairwise(bounds) if b - a == 100_000)
        assert row["position_ids"][start : start + 100_000].tolist() == list(range(100_000))
        assert row["input_ids"][start : start + 100_000].tolist() == source.documents()[1]
        assert row["labels"][start : start + 100_000].tolist() == [*source.documents()[1][1:], -100]


def test_a_loader_far_beyond_2_to_the_40_goes_on_and_resumes() -> None:
    plan = StreamPlan(
        {"a": PeriodicSource(10**13), "b": PeriodicSource(3 * 10**12)},
        seq_len=64,
        weights={"a": 1, "b": 2},
        window_blocks=2,
    )
    loader = StreamingLoader(plan, global_batch_size=3)
    loader.skip(2**41 + 5)
    rows = rows_of(take(loader, 2))
    assert rows == expected_rows(plan, range(2**41 + 5, 2**41 + 11))
    resumed = StreamingLoader(plan, global_batch_size=4)
    resumed.load_state_dict(loader.state_dict())
    assert rows_of(take(resumed, 1)) == expected_rows(plan, range(2**41 + 11, 2**41 + 15))
    loader.close()
    resumed.close()


def test_a_moved_and_renamed_corpus_resumes_from_its_new_place(tmp_path: Path) -> None:
    corpus = write(tmp_path / "before", ListSource([9, 4, 30, 1, 12, 3]), shard_tokens=20)
    loader = StreamingLoader(small_plan(corpus), global_batch_size=2)
    rows = rows_of(take(loader, 3))
    state = loader.state_dict()
    loader.close()
    moved = tmp_path / "elsewhere" / "after"
    moved.parent.mkdir()
    corpus.rename(moved)
    plan = StreamPlan({"renamed": moved}, seq_len=8, block_tokens=32, window_blocks=3, seed=4)
    resumed = StreamingLoader(plan, global_batch_size=2)
    resumed.load_state_dict(state)
    rows += rows_of(take(resumed, 3))
    resumed.close()
    assert rows == expected_rows(plan, range(12))


def test_a_state_with_another_start_epoch_is_refused_with_both_values() -> None:
    source = ListSource([9, 4, 30])
    state = StreamingLoader(small_plan(source), global_batch_size=2).state_dict()
    later = StreamingLoader(small_plan(source, start_epoch={"corpus": 1}), global_batch_size=2)
    with pytest.raises(PlanMismatchError, match=r"start_epoch of corpus \'corpus\' differs \(0, now 1\)"):
        later.load_state_dict(state)


@pytest.mark.parametrize("weights", ["[-1.0]", "[0.0]", "[NaN]", "[Infinity]"])
def test_a_state_with_impossible_weights_is_refused(weights: str) -> None:
    loader = StreamingLoader(small_plan(ListSource([9, 4, 30])), global_batch_size=2)
    with pytest.raises(PlanMismatchError, match="the state is damaged"):
        loader.load_state_dict(replaced(loader.state_dict(), '"weights":[[0,[43.0]]]', f'"weights":[[0,{weights}]]'))


# processes


def run_python(code: str, *arguments: object) -> str:
    """What a fresh process prints."""
    done = start_python(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def start_python(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)


MANY_SHARDS = r"""
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
from tokshard.runtime import StreamPlan, StreamingLoader
from tokshard.runtime.bytes.corpus import CorpusSource
for access in ("mmap", "pread"):
    source = CorpusSource(sys.argv[1], access=access)
    plan = StreamPlan({"many": source}, seq_len=10, epochs=2, block_tokens=64, window_blocks=500)
    loader = StreamingLoader(plan, global_batch_size=64)
    read = sum(int((batch["labels"] != -100).sum()) for batch in loader)
    loader.close()
    print(access, len(source.corpus.shards), read)
"""


@pytest.mark.soak
def test_hundreds_of_shards_are_read_with_256_descriptors(tmp_path: Path) -> None:
    memory = ListSource([10] * 600)
    memory.tokens = memory.tokens % 3 + 1
    memory.tokens[memory.stops - 1] = EOS
    many_shards = write(tmp_path / "corpus", memory, shard_tokens=10)
    expected = [f"{access} 600 {2 * 600 * 9}" for access in ACCESS]
    assert run_python(MANY_SHARDS, many_shards).splitlines() == expected


READ_ONLY = r"""
import os, sys
written = []
def watch(event, arguments):
    if event == "open":
        path, mode, flags = arguments
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND):
            written.append(str(path))
    elif event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate", "os.link", "os.symlink"):
        written.append(f"{event} {arguments}")
from tokshard.runtime import StreamPlan, StreamingLoader
from tokshard.runtime.bytes.corpus import CorpusSource
def read(access):
    plan = StreamPlan({"corpus": CorpusSource(sys.argv[1], access=access)}, seq_len=8, epochs=1)
    loader = StreamingLoader(plan, global_batch_size=2)
    rows = sum(int((batch["sample_index"] >= 0).sum()) for batch in loader)
    print(rows, loader.state_dict()["cursor"][:20])
    loader.close()
read("mmap")  # imports what is imported late, which another user may not be allowed to
if os.geteuid() == 0:
    os.setgid(65534)
    os.setuid(65534)
try:
    open(os.path.join(sys.argv[1], "probe"), "wb")
    raise SystemExit("the directory can be written to: this test means nothing")
except PermissionError:
    pass
sys.addaudithook(watch)
read("mmap")
read("pread")
print(written)
"""


@pytest.mark.slow
def test_a_corpus_that_may_only_be_read_is_enough_and_nothing_is_written_anywhere() -> None:
    directory = Path(tempfile.mkdtemp())  # tmp_path is closed to other users
    try:
        corpus = write(directory / "corpus", ListSource([9, 4, 30, 1, 12, 8]), shard_tokens=20)
        for path in sorted(corpus.rglob("*")):
            path.chmod(0o444)
        corpus.chmod(0o555)
        directory.chmod(0o555)
        before = {path.name: path.stat().st_mtime_ns for path in corpus.iterdir()}
        *counts, written = run_python(READ_ONLY, corpus).splitlines()
        assert counts == ['8 {"tokshard_cursor":1'] * 3
        assert written == "[]"
        assert {path.name: path.stat().st_mtime_ns for path in corpus.iterdir()} == before
    finally:
        for path in (directory, directory / "corpus"):
            path.chmod(0o755)
        shutil.rmtree(directory)


def take_until_error(batches: Iterator[Any]) -> None:
    deque(batches, maxlen=0)  # workers may have made a thousand ahead


# storage that hangs, files that change


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of files whose reads never come back, in this process and in those that are forked from it."""
    names: list[str] = []
    over = threading.Event()

    read = PosixStore.read

    def hang(store: PosixStore, name: str, *arguments: Any, **options: Any) -> Any:
        if name in names:
            over.wait(100)
        return read(store, name, *arguments, **options)

    monkeypatch.setattr(PosixStore, "read", hang)
    yield names
    over.set()


def test_a_read_that_hangs_is_an_error_that_names_the_shard(
    tmp_path: Path, hanging: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "STOP_SECONDS", 0.05)  # what reads comes back when the test is over
    corpus = write(tmp_path / "corpus", ListSource([9, 4, 30, 1, 12, 3] * 5), shard_tokens=60)
    plan = small_plan(CorpusSource(corpus, access="pread"))
    shard = shard_of(plan.sources[0], 2)
    hanging.append(shard.name)
    loader = StreamingLoader(plan, global_batch_size=2, timeout_seconds=1)
    started = time.monotonic()
    with pytest.raises(LoaderError, match=f"no batch came for 1 s; the last reads were in .*{shard}"):
        take(loader, 1000)
    assert time.monotonic() - started < 60, "the read takes 100 s"


@pytest.mark.parametrize("access", ACCESS)
@pytest.mark.parametrize("change", ["longer", "shorter", "empty", "gone"])
def test_a_shard_that_changed_before_it_was_first_touched_is_reported_by_name(
    tmp_path: Path, access: str, change: str
) -> None:
    corpus = write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=100)
    source = CorpusSource(corpus, access=access)
    loader = StreamingLoader(small_plan(source, epochs=1), global_batch_size=2)
    shard = shard_of(source, 3)
    size = shard.stat().st_size
    if change == "gone":
        shard.unlink()
    else:
        os.truncate(shard, {"longer": size + 8, "shorter": size - 8, "empty": 0}[change])
    expected = {"longer": f"has {size + 8} bytes", "shorter": f"has {size - 8} bytes", "empty": "has 0 bytes"}
    with pytest.raises(DamagedCorpusError, match=shard.name) as caught:
        take(loader, 1000)
    assert expected.get(change, "") in caught.value.problem
    loader.close()


def test_a_shard_whose_last_document_has_no_end_is_damaged_whatever_its_hashes_say(tmp_path: Path) -> None:
    documents = [*ListSource([20] * 7).documents(), [1] * 20]
    corpus = write_corpus(tmp_path / "corpus", documents, shard_tokens=100, tokenizer=TINY_TOKENIZER)
    source = CorpusSource(corpus, access="pread")
    with NumpyLoader(small_plan(source, epochs=1), global_batch_size=2) as loader:
        with pytest.raises(DamagedCorpusError, match=f"the last token is 1, expected the delimiter {EOS}") as caught:
            take(loader, 1000)
        assert str(shard_of(source, 1)) in caught.value.problem


@pytest.mark.filterwarnings("ignore:the current windows and the windows fetched")
def test_a_shard_truncated_under_a_running_job_is_an_error_with_pread(tmp_path: Path) -> None:
    corpus = write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=300)
    source = CorpusSource(corpus, access="pread", cache=Cache(memory_bytes=0))
    plan = small_plan(source)
    loader = StreamingLoader(plan, global_batch_size=2)
    batches = iter(loader)
    for _ in range(60):  # more than an epoch: every shard is open
        next(batches)
    shard = shard_of(source, 1)
    os.truncate(shard, 600)
    with pytest.raises(DamagedCorpusError, match=f"{shard.name}: the file ends at byte .* it was cut during"):
        take_until_error(batches)
    loader.close()
