"""Corpora that are read by range: the same batches, checked, from few requests, with as much memory as there is."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.contract.builds import select
from tests.contract.small import shrink
from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.damage import cut, flipped
from tests.examples import crossed
from tests.ranks import forked, worst_of
from tests.runtime.disk import LARGE_VOCABULARY, stored
from tests.runtime.sources import ListSource
from tests.store import memory
from tests.store.memory import SCHEME, MemoryStore
from tokshard.errors import StoreError
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes import ranged
from tokshard.runtime.bytes.cache import Cache, Memory
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.source import DocumentSpan
from tokshard.runtime.order.pieces import AHEAD
from tokshard.runtime.rows import steps
from tokshard.store import STORES_BY_SCHEME

pytestmark = pytest.mark.filterwarnings("ignore:the current windows and the windows fetched")

STRIDE, BLOCK, WINDOW = 32, 256, 8
SIZES: dict[str, Any] = {"seq_len": 64, "block_tokens": BLOCK, "window_blocks": WINDOW, "allow_small_blocks": True}
STRIDE_BYTES = 2 * STRIDE
ONE_WINDOW = WINDOW * (BLOCK + STRIDE) * 2
KEPT_BYTES = int((1 + AHEAD) * ONE_WINDOW)


@pytest.fixture(autouse=True)
def small_strides(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    shrink(monkeypatch.setattr, hash_stride=STRIDE)
    # layouts of a step, in windows of eight
    monkeypatch.setattr(steps, "_MAX_LAYOUT_ROWS", 4)
    monkeypatch.setattr(steps, "_ROWS_PER_CORPUS", 1)
    yield
    memory.CHANGES.clear()


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A corpus of 30,000 tokens in some shards of several record batches."""
    rng = np.random.default_rng(0)
    documents = [[*rng.integers(1, 4, length - 1).tolist(), 0] for length in rng.integers(1, 200, 300).tolist()]
    return write_corpus(tmp_path / "corpus", documents, shard_tokens=9_000, tokenizer=TINY_TOKENIZER)


@pytest.fixture
def remote(local: Path) -> str:
    """The same corpus in a store."""
    uri = stored(local)
    memory.READS.clear()
    return uri


def shards_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("shard-*.arrow"))


def rows_of(source: CorpusSource, count: int = 40, **options: Any) -> list[dict[str, Any]]:
    with NumpyLoader(StreamPlan({"corpus": source}, **{**SIZES, **options}), global_batch_size=4) as loader:
        return [{name: array.tolist() for name, array in batch.items()} for batch in itertools.islice(loader, count)]


def reads_of_shards() -> list[tuple[str, int, int]]:
    """Name, start and length of what was requested."""
    return [read for read in memory.READS if read[0].startswith("shard-")]


WHOLE = {"seq_len": 16, "block_tokens": 2048, "window_blocks": 4, "pack": "whole"}


@pytest.mark.slow
@crossed(
    "memory_bytes, is_remote, options",
    [0, STRIDE_BYTES, 5 * STRIDE_BYTES, ONE_WINDOW, 3 * ONE_WINDOW, 1 << 20],
    [True, False],
    [{}, {}, WHOLE],
)
def test_batches_are_those_of_a_mapped_corpus_however_little_memory_there_is(
    local, remote, memory_bytes, is_remote, options
):
    source = CorpusSource(remote if is_remote else local, access="pread", cache=Cache(memory_bytes=memory_bytes))
    assert rows_of(source, 60, **options) == rows_of(CorpusSource(local), 60, **options)


def test_a_reader_waits_for_what_another_thread_is_about_to_keep(local, remote, monkeypatch):
    fill = Memory.fill

    def slowly(memory: Memory, slot: int, tokens: Any) -> None:
        time.sleep(0.005)
        fill(memory, slot, tokens)

    expected = rows_of(CorpusSource(local))
    monkeypatch.setattr(Memory, "fill", slowly)
    assert rows_of(CorpusSource(remote, cache=Cache())) == expected


@pytest.mark.slow
def test_a_corpus_is_read_from_disk_in_its_second_epoch(local, remote, tmp_path):
    expected = rows_of(CorpusSource(local), 140)
    for store_is_there in (True, False):
        cache = Cache(memory_bytes=2 * ONE_WINDOW, cache_dir=tmp_path / "cache")
        source = CorpusSource(remote, cache=cache)
        if not store_is_there:
            memory.READS.clear()
        assert rows_of(source, 140) == expected, "more than an epoch"
        if not store_is_there:
            assert cache.counts.disk_bytes > 60_000
            assert reads_of_shards() == []


def test_a_window_is_asked_for_once_with_a_request_for_each_block_and_none_for_offsets(local, remote):
    plan = StreamPlan({"corpus": CorpusSource(remote)}, **SIZES)
    num_blocks = 3 * WINDOW
    with NumpyLoader(plan, global_batch_size=4, prefetch_factor=1) as loader:
        for _ in itertools.islice(loader, 8):  # a window; 1.5 more are fetched ahead
            time.sleep(0.005)
    reads = reads_of_shards()
    assert max(Counter(reads).values()) == 1
    assert len(reads) <= num_blocks + len(shards_of(local)) + 1, "a block may lie in two shards"
    most = num_blocks * (BLOCK + STRIDE) * 2
    assert 2 * WINDOW * BLOCK * 2 <= sum(length for _, _, length in reads) <= most
    places = {name: [] for name in shards_of(local)}
    for index, shard in enumerate(plan.sources[0].corpus.shards):  # type: ignore[attr-defined]
        places[shard.name] = plan.sources[0].corpus.shards.batch_places(index)  # type: ignore[attr-defined]
    for name, start, length in reads:
        assert any(
            place.values_position <= start < start + length <= place.values_position + 2 * place.num_tokens
            for place in places[name]
        )


@pytest.mark.parametrize("window_blocks", [64, 1_000])
def test_a_corpus_of_up_to_two_windows_is_requested_once_in_long_ranges_whatever_the_epoch(
    local, remote, window_blocks, monkeypatch
):
    monkeypatch.setattr(ranged, "_RUN_STRIDES", 40)
    source, sizes = CorpusSource(remote), {**SIZES, "window_blocks": window_blocks}
    assert rows_of(source, 300, **sizes) == rows_of(CorpusSource(local), 300, **sizes)  # two epochs and more
    reads, stored_bytes = reads_of_shards(), 2 * source.num_tokens
    assert sum(length for _, _, length in reads) == stored_bytes
    assert len(reads) < stored_bytes / (40 * STRIDE_BYTES) + 2 * len(shards_of(local))


@pytest.mark.parametrize("window_blocks", [64, 1_000])
def test_another_world_at_every_step_requests_nothing_twice(remote, window_blocks):
    source = CorpusSource(remote)
    plan = StreamPlan({"corpus": source}, **{**SIZES, "window_blocks": window_blocks})
    with NumpyLoader(plan, global_batch_size=4) as loader:
        for step, _ in zip(range(140), loader, strict=False):  # an epoch and more
            loader.resize(0, 1 + step % 2)
    reads = reads_of_shards()
    assert max(Counter(reads).values()) == 1
    assert sum(length for _, _, length in reads) == 2 * source.num_tokens


def test_a_stream_requests_nothing_of_a_small_corpus_that_other_streams_read(remote):
    source = CorpusSource(remote)
    plan = StreamPlan({"corpus": source}, **{**SIZES, "block_tokens": 64}, num_streams=8)
    assert plan.corpora[0].num_parts == 8
    with NumpyLoader(plan, global_batch_size=8, dp_rank=0, dp_world_size=8) as loader:
        next(iter(loader))
    assert source.counts.fetched_bytes < source.num_tokens, "half of its bytes"


@pytest.mark.slow
def test_the_blocks_of_the_next_window_are_there_before_they_are_needed(remote):
    cache = Cache()
    with NumpyLoader(StreamPlan({"corpus": remote}, cache=cache, **SIZES), global_batch_size=4) as loader:
        batches = iter(loader)
        next(batches)
        first = cache.counts.misses
        for _ in itertools.islice(batches, 60):
            time.sleep(0.02)  # a step of training
        found = loader.stats()["fetched"]
    assert found["misses"] - first < found["hits"] / 20
    assert found["fetched_bytes"] > 9 * WINDOW * BLOCK
    assert (found["wait_seconds"] > 0) == (found["misses"] > 0)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Reads of shards in the store wait until it is set."""
    read, is_open = MemoryStore.read, threading.Event()

    def waiting(*arguments: Any, **options: Any) -> Any:
        assert not arguments[1].startswith("shard-") or is_open.wait(60)
        return read(*arguments, **options)

    monkeypatch.setattr(MemoryStore, "read", waiting)
    return is_open


def announce(source: CorpusSource, count: int) -> NDArray[np.int64]:
    """Announce so many strides, each by itself; returns their bounds."""
    bounds = np.arange(count + 1) * STRIDE
    for number in range(count):
        source.will_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    return bounds


def test_no_more_is_fetched_ahead_than_there_is_room_for_with_what_is_on_its_way(remote, gate):
    source = CorpusSource(remote, cache=Cache(memory_bytes=4 * STRIDE_BYTES))
    bounds = announce(source, 8)
    gate.set()
    out = np.zeros(STRIDE, source.dtype)
    for number in range(8):
        source.read(bounds[number : number + 1], np.array([STRIDE]), out, np.zeros(1, np.int64))
        source.has_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    assert max(Counter(reads_of_shards()).values()) == 1


def test_what_is_waited_for_is_requested_before_what_is_read_ahead(remote, gate):
    source = CorpusSource(remote, cache=Cache(connections=1))
    announce(source, 8)
    out, far = np.zeros(1, source.dtype), np.array([20_000])
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(source.read, far, np.array([1]), out, np.zeros(1, np.int64))
        while source.reading is None:  # the request is made
            time.sleep(0.001)
        gate.set()
        read.result()
    names = [name for name, _, _ in reads_of_shards()]
    assert names.index(source.document_at(20_000).shard) <= 1, "after the one that was under way"


@pytest.mark.parametrize("edge", [BLOCK, BLOCK + STRIDE // 2])
def test_blocks_that_are_announced_apart_and_released_together_are_not_kept(local, edge):
    cache = Cache()
    source, bounds = CorpusSource(local, access="pread", cache=cache), np.array([0, edge, 2 * edge, 3 * edge])
    for number in range(3):
        source.will_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    source.will_read(bounds[1:3], bounds[2:])  # by another reader
    source.has_read(bounds[:3], bounds[1:])
    kept = cache._current()._readers
    assert set(kept) == set(source._chunks_of_blocks(bounds[1:3], bounds[2:]).tolist())
    source.has_read(bounds[1:2], bounds[2:3])
    source.has_read(bounds[2:3], bounds[3:])
    assert not cache._current()._readers


def test_a_view_releases_in_its_base_what_it_announced(local, tmp_path):
    cache, blocks = Cache(), (np.array([0, BLOCK]), np.array([BLOCK, 2 * BLOCK]))
    view = CorpusSource(select(local, tmp_path / "view", [*range(0, 300, 2)]), access="pread", cache=cache)
    view.will_read(*blocks)
    assert cache._current()._readers
    view.has_read(*blocks)
    assert not cache._current()._readers


def test_corpora_of_16_and_32_bits_share_one_memory(local, tmp_path):
    documents = CorpusSource(local).corpus
    wide = write_corpus(
        tmp_path / "wide", [part.tolist() for part in documents], shard_tokens=9_000, tokenizer=LARGE_VOCABULARY
    )
    cache = Cache(memory_bytes=6 * ONE_WINDOW)
    for directory in (local, wide, local):
        assert rows_of(CorpusSource(directory, access="pread", cache=cache)) == rows_of(CorpusSource(directory))
    assert cache._memory.content.nbytes <= 6 * ONE_WINDOW, "of both, not of each"
    source = CorpusSource(wide, access="pread", cache=Cache())
    source.will_read(np.array([BLOCK]), np.array([2 * BLOCK]))
    of_block = range(2 * BLOCK // STRIDE, 2 * (2 * BLOCK // STRIDE + 1))  # to the stride of the label behind it
    assert sorted(source.cache._current()._readers) == list(of_block), "two chunks for each stride"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_forked_child_reads_anew_whatever_threads_of_its_parent_hold(local, access):
    source = CorpusSource(local, access=access)
    lengths, out = np.array([64]), np.zeros(64, source.dtype)
    source.read(np.array([0]), lengths, out, np.array([0]))
    lock = source._lock.now if access == "mmap" else source.cache._lock

    def read_anew() -> int:
        found = np.zeros(64, source.dtype)
        source.read(np.array([0]), lengths, found, np.array([0]))
        source.ends(np.array([9_000]), np.array([10_000]))
        return int(found.tolist() != out.tolist())

    with lock:  # as if another thread had it
        child = forked(read_anew, seconds=60)
    assert worst_of([child]) == 0


def flipped_often(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[100::500] = bytes(byte ^ 1 for byte in changed[100::500])
    return bytes(changed)


def test_a_bit_that_flips_on_the_way_is_asked_for_again_and_never_reaches_a_batch(local, remote):
    left = 20

    def sometimes(content: bytes) -> bytes:
        nonlocal left
        left -= 1
        return flipped(0.5)(content) if left % 2 else content

    memory.CHANGES.update(dict.fromkeys(shards_of(local), sometimes))
    cache = Cache(connections=1)  # so that the second try is the next request
    source = CorpusSource(remote, cache=cache)
    assert rows_of(source) == rows_of(CorpusSource(local))
    assert cache.counts.wrong_strides >= 5


def test_a_store_that_fails_while_blocks_are_fetched_ahead_fails_the_next_batch(local, remote):
    def fail(_: bytes) -> bytes:
        raise StoreError("memory does not answer", hint="try again")

    with NumpyLoader(StreamPlan({"corpus": CorpusSource(remote)}, **SIZES), global_batch_size=4) as loader:
        batches = iter(loader)
        next(batches)
        memory.CHANGES.update(dict.fromkeys(shards_of(local), fail))
        with pytest.raises(StoreError, match="memory does not answer"):
            for _ in itertools.islice(batches, 400):
                pass
        memory.CHANGES.clear()
        found = []
        while len(found) < 3:  # it continues when the store answers again
            with contextlib.suppress(StoreError):  # of a request that had failed and was not forgotten yet
                found = list(itertools.islice(loader, 3))


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["flipped", *(pytest.param(n, marks=pytest.mark.soak) for n in ("cut", "foreign"))])
def test_a_damaged_cache_on_disk_is_repaired(local, remote, tmp_path, damage):
    expected = rows_of(CorpusSource(local), 100)
    options: dict[str, Any] = {"memory_bytes": 0, "cache_dir": tmp_path / "cache"}
    rows_of(CorpusSource(remote, cache=Cache(**options)), 100)
    files = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert len(files) == len(shards_of(local))
    contents = [path.read_bytes() for path in files]
    for path, content, other in zip(files, contents, contents[1:] + contents[:1], strict=True):
        path.unlink()
        path.write_bytes(other if damage == "foreign" else cut(content) if damage == "cut" else flipped_often(content))
    for is_repaired in (False, True):
        cache = Cache(**options)
        assert rows_of(CorpusSource(remote, cache=cache), 100) == expected
        if is_repaired:
            assert cache.counts.fetched_bytes < 20_000, "tables and hashes"


def test_the_documents_of_a_sample_are_looked_up_side_by_side_where_that_takes_requests():
    both, calls = threading.Event(), itertools.count(1)

    class Slow(ListSource):
        is_in_memory = False

        def document_at(self, position: int) -> DocumentSpan:
            if next(calls) == 2:
                both.set()
            assert both.wait(60), "the other thread never asked"
            return super().document_at(position)

    lengths = [5, 9, 3, 12, 7] * 4
    here, there = (StreamPlan({"a": source(lengths)}, seq_len=16) for source in (ListSource, Slow))
    assert there.trace(1) == here.trace(1)


@pytest.mark.parametrize(
    ("num_corpora", "options", "needed"),
    [(1, {}, KEPT_BYTES), (3, {}, 3 * KEPT_BYTES), (1, {"num_streams": 4, "window_blocks": 2}, KEPT_BYTES)],
)
def test_a_loader_whose_windows_do_not_fit_into_memory_says_how_much_they_need(local, num_corpora, options, needed):
    names = [str(number) for number in range(num_corpora)]

    def loader_with(memory_bytes: int) -> NumpyLoader:
        cache = Cache(memory_bytes=memory_bytes)
        corpora = {name: CorpusSource(local, access="pread", cache=cache) for name in names}
        first_epochs = {name: int(name) for name in names}
        return NumpyLoader(StreamPlan(corpora, start_epoch=first_epochs, **{**SIZES, **options}), global_batch_size=4)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader_with(needed)
    with pytest.warns(UserWarning, match=r"need .*, and .* are allowed: .*memory_bytes=268435456"):
        loader_with(needed - 1)
    NumpyLoader(StreamPlan(str(local), cache=Cache(memory_bytes=0), **SIZES), global_batch_size=4)  # it is mapped
