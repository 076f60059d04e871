"""A corpus that is replaced in its place during a run is noticed before its first wrong token."""

from __future__ import annotations

import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, change_table, write_corpus
from tests.store.memory import SCHEME, MemoryStore
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.runtime import Cache, CorpusSource, NumpyLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME, files_below, open_store
from tokshard.store.record_cache import RecordCache, RecordFile

SIZES: dict[str, Any] = {"seq_len": 64, "block_tokens": 256, "window_blocks": 8, "allow_small_blocks": True}
OLD, NEW = 1, 2


def corpus_of(directory: Path, token: int) -> Path:
    """A corpus of 12 shards in which every token but the delimiters is this one."""
    lengths = np.random.default_rng(0).integers(2, 200, 350).tolist()
    documents = [[token] * (length - 1) + [0] for length in lengths]
    return write_corpus(directory, documents, shard_tokens=3_000, tokenizer=TINY_TOKENIZER)


def swapped(directory: Path, other: Path) -> Callable[[], None]:
    def swap() -> None:
        directory.rename(directory.with_name("before"))
        other.rename(directory)

    return swap


def put(location: str, directory: Path) -> str:
    store = open_store(location)
    for name in files_below(open_store(directory), ""):
        store.put(name, (directory / name).read_bytes())
    return location


def tokens_until_it_is_refused(source: CorpusSource, swap: Callable[[], None]) -> tuple[list[int], int, str]:
    """The ids that were yielded, how many batches those were, and the message with its hint."""
    found, count = set[int](), 0
    with NumpyLoader(StreamPlan({"a": source}, **SIZES), global_batch_size=4, prefetch_factor=1) as loader:
        with pytest.raises(DamagedCorpusError) as error:  # noqa: PT012 - batches are taken until it is raised
            for batch in loader:
                found |= set(batch["input_ids"].ravel().tolist())
                count += 1
                if count == 1:
                    swap()
        return sorted(found), count, f"{error.value} {error.value.hint}"


def check(source: CorpusSource, swap: Callable[[], None], name: str) -> None:
    tokens, count, message = tokens_until_it_is_refused(source, swap)
    assert count >= 1
    assert tokens == [0, OLD]
    assert name in message
    assert "replaced" in message
    assert "put the files back that the job began with" in message


@pytest.mark.parametrize(("access", "name"), [("mmap", names.MANIFEST), ("pread", names.STRIDE_HASHES)])
def test_a_folder_that_is_swapped_under_a_job_gives_no_wrong_token(tmp_path: Path, access: str, name: str) -> None:
    directory, other = corpus_of(tmp_path / "corpus", OLD), corpus_of(tmp_path / "other", NEW)
    check(CorpusSource(directory, access=access), swapped(directory, other), str(directory / name))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_folder_that_is_moved_away_and_back_is_read_on(tmp_path: Path, access: str) -> None:
    directory = corpus_of(tmp_path / "corpus", OLD)
    plan = StreamPlan({"a": CorpusSource(directory, access=access)}, **SIZES)
    plan.sample(0)
    shutil.copytree(directory, tmp_path / "copy")
    swapped(directory, tmp_path / "copy")()
    assert {token for sample in range(0, 400, 7) for token in plan.sample(sample)["input_ids"].tolist()} == {0, OLD}


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


def test_a_corpus_that_is_swapped_in_a_store_without_conditions_gives_no_wrong_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    directory, other = corpus_of(tmp_path / "corpus", OLD), corpus_of(tmp_path / "other", NEW)
    location = put(f"{SCHEME}:/{directory}", directory)
    check(CorpusSource(location), lambda: put(location, other) and None, f"{location}/{names.STRIDE_HASHES}")


@pytest.mark.remote
def test_a_corpus_that_is_swapped_on_a_web_server_gives_no_wrong_token(files: Path, http: str, tmp_path: Path) -> None:
    directory, other = corpus_of(files / "corpus", OLD), corpus_of(tmp_path / "other", NEW)
    check(CorpusSource(f"{http}/corpus"), swapped(directory, other), f"/corpus/{names.STRIDE_HASHES}")


@pytest.mark.remote
def test_a_corpus_that_is_swapped_in_a_bucket_gives_no_wrong_token(moto: str, tmp_path: Path) -> None:
    directory, other = corpus_of(tmp_path / "corpus", OLD), corpus_of(tmp_path / "other", NEW)
    location = put(f"{moto}/corpus", directory)
    check(CorpusSource(location), lambda: put(location, other) and None, f"{location}/{names.STRIDE_HASHES}")


def ids_of(location: Path, **cache: Any) -> set[int]:
    plan = StreamPlan({"a": CorpusSource(location, access="pread", cache=Cache(memory_bytes=0, **cache))}, **SIZES)
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


def test_the_shard_table_vouches_for_the_hashes_of_strides(tmp_path: Path) -> None:
    directory = corpus_of(tmp_path / "corpus", OLD)
    corpus = CorpusSource(directory).corpus
    for index in range(len(corpus.shards)):
        hashes = corpus.stride_hashes(index)
        assert corpus.shards.group_hashes(index).tolist() == [zlib.crc32(hashes.tobytes())]
