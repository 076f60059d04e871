"""A corpus that is replaced in its place during a run is noticed before its first wrong token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, change_table, write_corpus
from tests.store.memory import SCHEME, MemoryStore
from tests.store.servers import copied
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.runtime import Cache, CorpusSource, NumpyLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME
from tokshard.store.record_cache import RecordCache, RecordFile

SIZES: dict[str, Any] = {"seq_len": 64, "block_tokens": 256, "window_blocks": 8, "allow_small_blocks": True}
OLD, NEW = 1, 2


def corpus_of(directory: Path, token: int) -> Path:
    """A corpus of 12 shards in which every token but the delimiters is this one."""
    lengths = np.random.default_rng(0).integers(2, 200, 350).tolist()
    documents = [[token] * (length - 1) + [0] for length in lengths]
    return write_corpus(directory, documents, shard_tokens=3_000, tokenizer=TINY_TOKENIZER)


def swapped(directory: Path, other: Path) -> Callable[[], object]:
    def swap() -> None:
        directory.rename(directory.with_name("before"))
        other.rename(directory)

    return swap


@pytest.mark.parametrize("place", ["mmap", "pread", "memory", "small_s3", "http"])
def test_a_corpus_that_is_swapped_under_a_job_gives_no_wrong_token(
    place: str, files: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    directory, other = corpus_of(files / "corpus", OLD), corpus_of(files / "other", NEW)
    location, swap, access = str(directory), swapped(directory, other), "pread"
    if place == "mmap":
        access = place
    elif place == "http":
        location = f"{request.getfixturevalue(place)}/corpus"
    elif place != "pread":
        root = f"{SCHEME}:/{files}" if place == "memory" else request.getfixturevalue(place)
        location = copied(directory, f"{root}/corpus")
        swap = lambda: copied(other, location)  # noqa: E731
    found: list[int] = []
    plan = StreamPlan({"a": CorpusSource(location, access=access)}, **SIZES)
    with NumpyLoader(plan, global_batch_size=4, prefetch_factor=1) as loader:
        batches = iter(loader)
        found += next(batches)["input_ids"].ravel().tolist()
        swap()
        with pytest.raises(DamagedCorpusError) as error:
            found.extend(token for batch in batches for token in batch["input_ids"].ravel().tolist())
    assert {*found} == {0, OLD}
    assert f"corpus/{names.MANIFEST if place == 'mmap' else names.STRIDE_HASHES}" in error.value.problem
    assert "replaced" in error.value.problem + error.value.hint
    assert "restore the files that the job began with" in error.value.hint


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_folder_that_is_moved_away_and_back_is_read_on(tmp_path: Path, access: str) -> None:
    directory = corpus_of(tmp_path / "corpus", OLD)
    plan = StreamPlan({"a": CorpusSource(directory, access=access)}, **SIZES)
    plan.sample(0)
    shutil.copytree(directory, tmp_path / "copy")
    swapped(directory, tmp_path / "copy")()
    assert tokens_of(plan) == {0, OLD}


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_documents_are_not_looked_up_in_another_corpus(tmp_path: Path, access: str) -> None:
    directory, other = corpus_of(tmp_path / "corpus", OLD), corpus_of(tmp_path / "other", NEW)
    source = CorpusSource(directory, access=access)
    source.place_of(0)
    swapped(directory, other)()
    for look_up in (
        lambda: source.place_of(349),
        lambda: source.document_at(source.num_tokens - 1),
        lambda: source.spans_of(np.array([349])),
    ):
        with pytest.raises(DamagedCorpusError, match=r"manifest\.json is not the one that was opened"):
            look_up()


def ids_of(location: Path, **cache: Any) -> set[int]:
    source = CorpusSource(location, access="pread", cache=Cache(memory_bytes=0, **cache))
    return tokens_of(StreamPlan({"a": source}, **SIZES))


def tokens_of(plan: StreamPlan) -> set[int]:
    return {token for sample in range(0, 400, 7) for token in plan.sample(sample)["input_ids"].tolist()}


def test_records_that_another_program_wrote_into_the_disk_cache_are_not_trained_on(tmp_path: Path) -> None:
    directory, cache_dir = corpus_of(tmp_path / "corpus", OLD), tmp_path / "cache"
    forged = RecordCache(str(cache_dir), 1 << 30)
    for shard in CorpusSource(directory).corpus.shards:
        num_bytes = 2 * shard.num_tokens
        file = RecordFile(content=shard.sha256, num_records=1, record_bytes=2 * 8_192, last_bytes=num_bytes)
        forged.write(file, 0, [np.full(shard.num_tokens, NEW, np.uint16).tobytes()])
    assert ids_of(directory, cache_dir=cache_dir) == {0, OLD}


def test_a_corpus_that_claims_the_hashes_of_another_one_does_not_poison_the_disk_cache(tmp_path: Path) -> None:
    honest, liar = corpus_of(tmp_path / "corpus", OLD), corpus_of(tmp_path / "liar", NEW)
    claimed = [bytes.fromhex(shard.sha256) for shard in CorpusSource(honest).corpus.shards]
    change_table(liar, names.SHARD_TABLE, lambda rows: {**rows, "sha256": claimed})
    assert ids_of(liar, cache_dir=tmp_path / "cache") == {0, NEW}
    assert any(path.is_file() for path in (tmp_path / "cache").rglob("*"))
    assert ids_of(honest, cache_dir=tmp_path / "cache") == {0, OLD}
