"""Corpora on disk are the same tokens as in memory: through a memory map, through pread and from a store."""

from __future__ import annotations

import itertools
import os
import pickle
import resource
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.small import shrink
from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.examples import examples
from tests.runtime.disk import ACCESS, small_units, stored, write
from tests.runtime.plans import target_weights
from tests.runtime.sources import ListSource, SpannedSource
from tests.store import memory
from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.runtime.bytes import copying, fetch, mapped, targets
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource, RangedSource
from tokshard.runtime.bytes.fetch import joined_ranges
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.steps import RankRows

lengths = st.lists(st.integers(1, 40) | st.integers(1, 200), min_size=1, max_size=40)


def spans_of(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Ranges of tokens, short and long."""
    span = st.tuples(st.integers(0, size - 1), st.integers(1, size)).map(lambda pair: (pair[0], min(size, sum(pair))))
    return st.lists(span, min_size=1, max_size=20).map(lambda drawn: [*drawn, (0, size), (size - 1, size)])


def read(source: Any, starts: Any, lengths: Any) -> list[list[int]]:
    """The tokens of pieces, put down in their order and in reverse order."""
    out, ends = np.zeros((2, int(lengths.sum())), source.dtype), np.cumsum(lengths)
    source.read(starts, lengths, out[0], ends - lengths)
    source.read(starts, lengths, out[1], ends[-1] - ends)
    found: list[list[int]] = out.tolist()
    return found


def assert_same_stream(found: CorpusSource, memory: ListSource, spans: list[tuple[int, int]]) -> None:
    assert found.num_tokens == memory.num_tokens
    pieces = []
    for start, stop in spans:
        _, ends = found.ends(np.array([start]), np.array([stop]))
        assert ends.tolist() == memory.ends_of(start, stop).tolist(), (start, stop)
        place, expected = found.document_at(start), memory.document_at(start)
        assert (place.document, place.start, place.stop) == (expected.document, expected.start, expected.stop)
        assert found.place_of(place.document) == place
        (index,) = [at for at, shard in enumerate(found.corpus.shards) if shard.name == place.shard]
        first = int(found.corpus.shards.first_documents[index])
        assert first <= place.document < first + found.corpus.shards[index].num_documents
        pieces.append((start, min(stop, expected.stop) - start))
    starts, counts = np.array(pieces, np.int64).T
    assert read(found, starts, counts) == read(memory, starts, counts)
    stretches = np.array(spans).T
    assert all(map(np.array_equal, found.ends(*stretches), memory.ends(*stretches)))
    assert found.has_spans == memory.has_spans
    if memory.has_spans:
        assert all(map(np.array_equal, found.targets(starts, starts + counts), memory.targets(starts, starts + counts)))
    documents = np.arange(len(memory.lengths))
    bounds = [memory.place_of(document) for document in documents.tolist()]
    found_bounds = zip(*(bound.tolist() for bound in found.spans_of(documents)), strict=True)
    assert list(found_bounds) == [(bound.start, bound.stop) for bound in bounds]
    for wrong in (-1, len(documents)):
        with pytest.raises(IndexError, match=f"document {wrong} of a corpus of {len(documents)}"):
            found.spans_of(np.array(sorted([0, wrong])))
        with pytest.raises(IndexError, match=f"document {wrong}"):
            found.place_of(wrong)


WAYS: list[dict[str, int]] = [
    {"GATHER_BELOW": 0, "MANY": 1 << 60},
    {"GATHER_BELOW": 1 << 60, "MANY": 1 << 60},
    {"MANY": 0, "HALVES_FROM": 0, "HALVES_BELOW": 1 << 60},
]
"""Pieces are copied as slices, gathered, and copied as halves."""


@settings(max_examples=examples(80))
@given(
    lengths=lengths,
    shard_tokens=st.integers(1, 300),
    units=st.fixed_dictionaries({"batch_tokens": st.integers(1, 120), "stride": st.integers(1, 50)}),
    wide=st.booleans(),
    kind=st.sampled_from(["plain", "inner delimiters", "loss spans"]),
    open_batches=st.sampled_from([1, 2, 8_192]),
    kept_bytes=st.sampled_from([16, 1 << 20]),
    way=st.sampled_from(WAYS),
    data=st.data(),
)
def test_a_corpus_on_disk_is_the_same_stream_as_in_memory_whatever_its_shards_and_batches(
    lengths: list[int],
    shard_tokens: int,
    units: dict[str, int],
    wide: bool,
    kind: str,
    open_batches: int,
    kept_bytes: int,
    way: dict[str, int],
    data: st.DataObject,
) -> None:
    first, inner = 90_000 if wide else 1, kind == "inner delimiters"
    memory = (
        SpannedSource(data.draw(target_weights(lengths)), first_token=first)
        if kind == "loss spans"
        else ListSource(lengths, first_token=first, inner_delimiters=inner)
    )
    spans = data.draw(spans_of(memory.num_tokens))
    with tempfile.TemporaryDirectory() as folder, small_units(**units) as patch:
        patch.setattr(mapped, "MAX_BATCHES", open_batches)
        patch.setattr(targets, "KEPT_BYTES", kept_bytes)
        for name, value in way.items():
            patch.setattr(copying, name, value)
        corpus = write(Path(folder) / "corpus", memory, shard_tokens=shard_tokens, wide=wide)
        for access in ["mmap"] if inner else [*ACCESS, "store"]:  # by range, documents are found by their delimiters
            source = CorpusSource(stored(corpus)) if access == "store" else CorpusSource(corpus, access=access)
            assert source.dtype == (np.uint32 if wide else np.uint16)
            assert source.is_in_memory == (access == "mmap")
            assert_same_stream(source, memory, spans)
            if access == "mmap":
                assert len(source._kept) <= open_batches  # type: ignore[attr-defined]


def test_a_document_that_begins_and_ends_with_the_same_token_is_found_by_its_offsets(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    documents = [[0, *rng.integers(1, 4, length).tolist(), 0] for length in rng.integers(0, 50, 200).tolist()]
    corpus = write_corpus(tmp_path / "corpus", documents, shard_tokens=2_000, tokenizer=TINY_TOKENIZER, bos="<eos>")
    one, other = (CorpusSource(corpus, access=access) for access in ACCESS)
    assert other.corpus.bos_id == other.corpus.eos_id
    places = np.arange(0, one.num_tokens - 50, 37)
    assert list(map(one.document_at, places)) == list(map(other.document_at, places))
    for found, expected in zip(other.ends(places, places + 50), one.ends(places, places + 50), strict=True):
        assert found.tolist() == expected.tolist()


def samples_of(plan: StreamPlan, step: int = 7) -> list[list[int]]:
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(0, 400, step)]


@pytest.fixture
def corpora(tmp_path: Path) -> Any:
    """One corpus twice, on this machine and in a store."""
    documents = ListSource(np.random.default_rng(0).integers(1, 200, 300).tolist())
    documents.tokens = documents.tokens % 3 + 1
    documents.tokens[documents.stops - 1] = 0
    with small_units(batch_tokens=2_000, stride=256) as patch:
        local = write(tmp_path / "corpus", documents, shard_tokens=3_000)
        yield str(local), stored(local), patch


def plan_at(location: str, **options: Any) -> StreamPlan:
    sizes = {"seq_len": 64, "block_tokens": 256, "window_blocks": 8}
    return StreamPlan({"corpus": CorpusSource(location, **options)}, **sizes)


def test_tables_and_hashes_that_are_too_large_to_keep_give_the_same_samples(corpora: Any) -> None:
    local, remote, patch = corpora
    expected = samples_of(plan_at(local))
    patch.setattr(fetch, "_MAX_HASHES", fetch.HASH_GROUP)
    assert samples_of(plan_at(remote)) == expected
    shrink(patch.setattr, whole_table_bytes=0)
    plan = plan_at(remote)
    memory.READS.clear()
    assert samples_of(plan) == expected
    assert memory.READS
    assert {names.SHARD_TABLE, names.SOURCE_TABLE}.isdisjoint(name for name, _, _ in memory.READS)


@given(places=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 17)), max_size=30))
def test_joined_ranges_cover_all_that_is_wanted_and_have_no_short_gaps(places: list[tuple[int, int]]) -> None:
    joined = joined_ranges(places, fetch._GAP_BYTES)
    assert all(
        any(start <= position and position + length <= start + size for start, size in joined)
        for position, length in places
    )
    assert all(start + size + fetch._GAP_BYTES < after for (start, size), (after, _) in itertools.pairwise(joined))
    assert {start for start, _ in joined} <= {position for position, _ in places}


@pytest.mark.parametrize("access", ACCESS)
def test_a_plan_pickles_with_the_paths_of_its_corpora_and_their_caches_into_a_process_that_runs_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, access: str
) -> None:
    write(tmp_path / "corpus", ListSource([5, 9, 30, 1]))
    monkeypatch.chdir(tmp_path)
    options: dict[str, Any] = {"memory_bytes": 1 << 20, "cache_dir": str(tmp_path / "cache"), "cache_bytes": 1 << 30}
    cache = Cache(**options)
    sources = {str(at): CorpusSource("corpus", access=access, cache=cache) for at in range(2)}
    plan = StreamPlan(sources, seq_len=8, seed=2, start_epoch={"1": 1})
    expected = plan.sample(3)["input_ids"].tolist()  # with open shards
    content = pickle.dumps(sources["0"])
    assert len(content) < 700
    assert pickle.loads(content).access == access
    monkeypatch.chdir("/")
    for again in (pickle.loads(pickle.dumps(plan)), plan.copy(reopened=True)):
        one, other = (source.cache for source in again.sources)  # type: ignore[attr-defined]
        assert one is other
        assert {**one._arguments, **options} == one._arguments
        assert again.fingerprint == plan.fingerprint
        assert again.sample(3)["input_ids"].tolist() == expected
    assert pickle.loads(content).cache.counts.hits == 0


def test_a_moved_and_renamed_corpus_resumes_from_its_new_place(tmp_path: Path) -> None:
    from tests.runtime.loaders import expected_rows, rows_of, take
    from tokshard.runtime import NumpyLoader

    sizes: dict[str, Any] = {"seq_len": 8, "block_tokens": 32, "window_blocks": 3, "seed": 4}
    corpus = write(tmp_path / "before", ListSource([9, 4, 30, 1, 12, 3]), shard_tokens=20)
    with NumpyLoader(StreamPlan({"not UTF-8: \udcff": corpus}, **sizes), global_batch_size=2) as loader:
        rows, state = rows_of(take(loader, 3)), loader.state_dict()
    plan = StreamPlan({"renamed": corpus.rename(tmp_path / "after")}, **sizes)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        loader.load_state_dict(state)
        assert rows + rows_of(take(loader, 3)) == expected_rows(plan, range(12))


@pytest.mark.parametrize("at_once", [0, 65])
def test_pread_reads_a_step_when_it_is_made_with_few_tokens_of_the_steps_that_are_laid_out_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    source = CorpusSource(write(tmp_path / "corpus", ListSource([10] * 400), shard_tokens=100), access="pread")
    asked: list[int] = []
    read_pieces, find_ends = RangedSource.read, RangedSource.ends

    def watched(source: RangedSource, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        asked.append(int(lengths.sum()))
        read_pieces(source, starts, lengths, out, at)

    def ends(source: RangedSource, starts: Any, stops: Any) -> Any:
        before = asked.copy()
        found = find_ends(source, starts, stops)
        asked[:] = before  # it reads tokens, too
        return found

    monkeypatch.setattr(RangedSource, "read", watched)
    monkeypatch.setattr(RangedSource, "ends", ends)
    monkeypatch.setattr(RangedSource, "tokens_at_once", at_once)
    mapped = write(tmp_path / "mapped", ListSource([9] * 300))  # which would be read ahead
    plan = StreamPlan({"read": source, "mapped": mapped}, seq_len=10, block_tokens=100)
    steps = narrow_batches(plan, RankRows(global_batch_size=2), plan.cursor())
    for _, narrow in zip(range(100), steps, strict=False):
        assert sum(asked) <= max(narrow.num_read_tokens, at_once)
        del asked[:]


@pytest.mark.parametrize("access", ACCESS)
def test_reading_keeps_no_descriptor_and_says_when_the_process_has_none(tmp_path: Path, access: str) -> None:
    corpus = write(tmp_path / "corpus", ListSource([10] * 40), shard_tokens=10)
    source = CorpusSource(corpus, access=access, cache=Cache(memory_bytes=0))
    before = len(os.listdir("/proc/self/fd"))
    read(source, np.arange(0, 400, 10), np.full(40, 10))
    assert len(os.listdir("/proc/self/fd")) == before
    if access == "mmap":
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
        with pytest.raises(CorpusError, match=r"Too many open files") as caught:
            read(source, np.array([0]), np.array([10]))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "ulimit -n" in caught.value.hint
