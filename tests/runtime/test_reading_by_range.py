"""Corpora that are read by range: the same batches, checked, from few requests, with as much memory as there is."""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import shutil
import signal
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.examples import crossed, some
from tests.runtime.sources import ListSource
from tests.runtime.test_reader import LARGE_VOCABULARY
from tests.store import memory
from tests.store.memory import SCHEME, MemoryStore
from tokshard.errors import DamagedCorpusError, PlanError, StoreError, UsageError
from tokshard.format import stride_hashes
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes import ranged
from tokshard.runtime.bytes.cache import Cache, Memory
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.source import DocumentSpan
from tokshard.runtime.order.pieces import AHEAD
from tokshard.runtime.rows import steps
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

pytestmark = pytest.mark.filterwarnings("ignore:the current windows and the windows fetched")

STRIDE, BLOCK, WINDOW = 32, 256, 8
SIZES: dict[str, Any] = {"seq_len": 64, "block_tokens": BLOCK, "window_blocks": WINDOW, "allow_small_blocks": True}
STRIDE_BYTES = 2 * STRIDE
ONE_WINDOW = WINDOW * (BLOCK + STRIDE) * 2
KEPT_BYTES = int((1 + AHEAD) * ONE_WINDOW)


@pytest.fixture(autouse=True)
def small_strides(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    for module in (stride_hashes, ranged):
        monkeypatch.setattr(module, "HASH_STRIDE", STRIDE)
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
    uri = f"{SCHEME}:/{local}"
    for name in files_below(open_store(local), ""):
        open_store(uri).put(name, (local / name).read_bytes())
    memory.READS.clear()
    return uri


def shards_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("shard-*.arrow"))


def rows_of(source: CorpusSource, count: int = 40, **options: Any) -> list[dict[str, Any]]:
    with NumpyLoader(StreamPlan({"corpus": source}, **{**SIZES, **options}), global_batch_size=4) as loader:
        return [{name: array.tolist() for name, array in batch.items()} for batch in itertools.islice(loader, count)]


@pytest.mark.slow
@crossed(
    "memory_bytes, is_remote",
    [0, STRIDE_BYTES, 5 * STRIDE_BYTES, ONE_WINDOW, 3 * ONE_WINDOW, 1 << 20],
    [True, False],
)
def test_batches_are_those_of_a_mapped_corpus_however_little_memory_there_is(local, remote, memory_bytes, is_remote):
    source = CorpusSource(remote if is_remote else local, access="pread", cache=Cache(memory_bytes=memory_bytes))
    assert not source.is_in_memory
    assert rows_of(source) == rows_of(CorpusSource(local))


@pytest.mark.slow
@some("is_remote", [True, False])
def test_rows_that_are_packed_whole_are_those_of_a_mapped_corpus(local, remote, is_remote):
    options: dict[str, Any] = {"seq_len": 16, "block_tokens": 2048, "window_blocks": 4, "pack": "whole"}
    source = CorpusSource(remote if is_remote else local, access="pread")
    assert rows_of(source, 600, **options) == rows_of(CorpusSource(local), 600, **options)


def test_a_reader_waits_for_what_another_thread_is_about_to_keep(local, remote, monkeypatch):
    fill = Memory.fill

    def slowly(memory: Memory, slot: int, tokens: Any) -> None:
        time.sleep(0.005)
        fill(memory, slot, tokens)

    expected = rows_of(CorpusSource(local))
    monkeypatch.setattr(Memory, "fill", slowly)
    assert rows_of(CorpusSource(remote, cache=Cache())) == expected


def test_streams_are_read_by_range_as_from_maps_and_every_block_once(local, remote):
    cache = Cache()
    options: dict[str, Any] = {"num_streams": 4, "window_blocks": 2}
    expected = rows_of(CorpusSource(local), 100, **options)
    assert rows_of(CorpusSource(remote, cache=cache), 100, **options) == expected
    assert expected != rows_of(CorpusSource(local), 100, window_blocks=2)
    reads = Counter((name, start) for name, start, _ in memory.READS if name.startswith("shard-"))
    assert sum(reads.values()) < 1.3 * len(reads), "most are read once"


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
            assert not [name for name, _, _ in memory.READS if name.startswith("shard-")]


def test_a_window_is_asked_for_once_with_a_request_for_each_block_and_none_for_offsets(local, remote):
    plan = StreamPlan({"corpus": CorpusSource(remote)}, **SIZES)
    num_blocks = 3 * WINDOW
    with NumpyLoader(plan, global_batch_size=4, prefetch_factor=1) as loader:
        for _ in itertools.islice(loader, 8):  # a window; 1.5 more are fetched ahead
            time.sleep(0.005)
    reads = [(name, start, length) for name, start, length in memory.READS if name.startswith("shard-")]
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


def test_memory_stays_within_its_limit_over_many_windows(local):
    cache = Cache(memory_bytes=3 * ONE_WINDOW)
    rows_of(CorpusSource(local, access="pread", cache=cache), 200)
    assert cache._memory.content.nbytes <= 3 * ONE_WINDOW
    assert cache.counts.fetched_bytes < 3 * 60_000, "the corpus is read twice, and every stride about once in an epoch"


def test_no_more_is_fetched_ahead_than_there_is_room_for_with_what_is_on_its_way(remote, monkeypatch):
    read, may_go_on = MemoryStore.read, threading.Event()

    def waiting(*arguments: Any, **options: Any) -> Any:
        if arguments[1].startswith("shard-"):
            may_go_on.wait(60)
        return read(*arguments, **options)

    source = CorpusSource(remote, cache=Cache(memory_bytes=4 * STRIDE_BYTES))
    bounds = np.arange(9) * STRIDE
    monkeypatch.setattr(MemoryStore, "read", waiting)
    for number in range(8):
        source.will_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    may_go_on.set()
    out = np.zeros(STRIDE, source.dtype)
    for number in range(8):
        source.read(bounds[number : number + 1], np.array([STRIDE]), out, np.zeros(1, np.int64))
        source.has_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    reads = [(name, start) for name, start, _ in memory.READS if name.startswith("shard-")]
    assert max(Counter(reads).values()) == 1


@pytest.mark.parametrize("edge", [BLOCK, BLOCK + STRIDE // 2])
def test_blocks_that_are_announced_apart_and_released_together_are_not_kept(local, edge):
    cache = Cache()
    source, bounds = CorpusSource(local, access="pread", cache=cache), np.array([0, edge, 2 * edge, 3 * edge])
    for number in range(3):
        source.will_read(bounds[number : number + 1], bounds[number + 1 : number + 2])
    source.will_read(bounds[1:3], bounds[2:])  # by another reader
    source.has_read(bounds[:3], bounds[1:])
    kept = cache._current()._readers
    assert set(kept) == set(source._reader._chunks_of_blocks(bounds[1:3], bounds[2:]).tolist())
    source.has_read(bounds[1:2], bounds[2:3])
    source.has_read(bounds[2:3], bounds[3:])
    assert not cache._current()._readers


def test_a_slot_for_a_chunk_that_another_fetch_brought_first_is_used_again():
    kept = Memory(2, chunk_bytes=8)
    fetches = [kept.reserve([1]), kept.reserve([1])]
    for fetch in fetches:
        kept.publish(fetch)
    assert len(kept.reserve([2, 3])) == 2


def test_corpora_of_16_and_32_bits_share_one_memory(local, tmp_path):
    documents = CorpusSource(local).corpus
    wide = write_corpus(
        tmp_path / "wide", [part.tolist() for part in documents], shard_tokens=9_000, tokenizer=LARGE_VOCABULARY
    )
    cache = Cache(memory_bytes=6 * ONE_WINDOW)
    for directory in (local, wide, local):
        assert rows_of(CorpusSource(directory, access="pread", cache=cache)) == rows_of(CorpusSource(directory))
    assert cache._memory.content.nbytes <= 6 * ONE_WINDOW, "of both, not of each"


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_forked_child_reads_anew_whatever_threads_of_its_parent_hold(local, access):
    source = CorpusSource(local, access=access)
    lengths, out = np.array([64]), np.zeros(64, source.dtype)
    source.read(np.array([0]), lengths, out, np.array([0]))
    lock = source._reader._lock if access == "mmap" else source.cache._lock
    with lock:  # as if another thread had it
        child = os.fork()
        if not child:
            found = np.zeros(64, source.dtype)
            source.read(np.array([0]), lengths, found, np.array([0]))
            source.ends(np.array([9_000]), np.array([10_000]))
            os._exit(7 if found.tolist() == out.tolist() else 1)
    until = time.monotonic() + 60
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0) and time.monotonic() < until:
        time.sleep(0.01)
    if done == (0, 0):
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(done[1]) == 7


def flip(content: bytes) -> bytes:
    changed = bytearray(content)
    changed[len(changed) // 2] ^= 1
    return bytes(changed)


def test_a_bit_that_flips_on_the_way_is_asked_for_again_and_never_reaches_a_batch(local, remote):
    left = 20

    def sometimes(content: bytes) -> bytes:
        nonlocal left
        left -= 1
        return flip(content) if left % 2 else content

    memory.CHANGES.update(dict.fromkeys(shards_of(local), sometimes))
    cache = Cache(connections=1)  # so that the second try is the next request
    source = CorpusSource(remote, cache=cache)
    assert rows_of(source) == rows_of(CorpusSource(local))
    assert cache.counts.wrong_strides >= 5


@some("is_remote", [True, False])
def test_a_flipped_bit_of_a_token_is_damage_with_its_place(local, remote, is_remote):
    (first, *_), expected = shards_of(local), rows_of(CorpusSource(local), 100)
    content = (local / first).read_bytes()
    corpus = CorpusSource(local).corpus
    position = corpus.shards.batch_places(0)[0].values_position + 2 * 1_000
    changed = bytearray(content)
    changed[position] ^= 2
    (local / first).write_bytes(changed)
    open_store(remote).put(first, bytes(changed))
    source = CorpusSource(remote if is_remote else local, access="pread")
    start = 1_000 // STRIDE * STRIDE
    found = []
    with (
        NumpyLoader(StreamPlan({"corpus": source}, **SIZES), global_batch_size=4) as loader,
        pytest.raises(
            DamagedCorpusError, match=rf"{first}: tokens {start} to {start + STRIDE}, from byte \d+ on"
        ) as error,
    ):
        found.extend(batch["input_ids"].tolist() for batch in itertools.islice(loader, 200))
    assert "verify" in error.value.hint or "restore" in error.value.hint
    assert found == [row["input_ids"] for row in expected[: len(found)]]


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
@pytest.mark.parametrize(
    "damage", ["flipped", *(pytest.param(n, marks=pytest.mark.soak) for n in ("truncated", "foreign"))]
)
def test_a_damaged_cache_on_disk_is_repaired(local, remote, tmp_path, damage):
    expected = rows_of(CorpusSource(local), 100)
    options: dict[str, Any] = {"memory_bytes": 0, "cache_dir": tmp_path / "cache"}
    rows_of(CorpusSource(remote, cache=Cache(**options)), 100)
    files = sorted(path for path in (tmp_path / "cache").rglob("*") if path.is_file())
    assert len(files) == len(shards_of(local))
    for path, other in zip(files, files[1:] + files[:1], strict=True):
        content = bytearray(path.read_bytes())
        if damage == "flipped":
            content[100::500] = bytes(byte ^ 1 for byte in content[100::500])
        elif damage == "truncated":
            del content[len(content) // 3 :]
        else:
            content = bytearray(other.read_bytes())
        path.with_suffix(".new").write_bytes(content)
    for path in files:
        path.with_suffix(".new").replace(path)
    for is_repaired in (False, True):
        cache = Cache(**options)
        assert rows_of(CorpusSource(remote, cache=cache), 100) == expected
        if is_repaired:
            assert cache.counts.fetched_bytes < 20_000, "tables and hashes"


def test_a_document_that_begins_and_ends_with_the_same_token_is_found_by_its_offsets(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    documents = [[0, *rng.integers(1, 4, length).tolist(), 0] for length in rng.integers(0, 50, 200).tolist()]
    corpus = write_corpus(tmp_path / "corpus", documents, shard_tokens=2_000, tokenizer=TINY_TOKENIZER, bos="<eos>")
    source = CorpusSource(corpus, access="pread")
    assert source.corpus.bos_id == source.corpus.eos_id
    assert rows_of(source) == rows_of(CorpusSource(corpus))
    shutil.rmtree(corpus)


def test_a_delimiter_inside_a_document_that_begins_with_one_is_damage(tmp_path):
    documents = [[0, 1, 2, 0], [0, 3, 0, 1, 0], [0, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, bos="<eos>")
    with pytest.raises(DamagedCorpusError, match="do not begin and end at delimiters"):
        rows_of(CorpusSource(corpus, access="pread"))


def test_a_source_pickles_with_the_options_of_its_cache_and_not_with_what_is_in_it(local, tmp_path):
    options: dict[str, Any] = {"memory_bytes": 1 << 20, "cache_dir": str(tmp_path / "cache"), "cache_bytes": 1 << 30}
    source = CorpusSource(local, access="pread", cache=Cache(**options))
    rows_of(source)
    content = pickle.dumps([source, CorpusSource(local, access="pread", cache=source.cache)])
    assert len(content) < 1_000
    one, other = pickle.loads(content)
    assert one.cache is other.cache
    assert one.cache.counts.hits == 0
    assert {**one.cache._arguments, **options} == one.cache._arguments


def test_the_corpora_of_a_plan_share_a_cache_also_in_another_process(local, remote, tmp_path):
    shutil.copytree(local, tmp_path / "other")
    corpora = {"a": remote, "b": str(tmp_path / "other")}
    plan = StreamPlan(corpora, start_epoch={"b": 1}, cache=Cache(memory_bytes=1 << 20), **SIZES)
    for each in (plan, pickle.loads(pickle.dumps(plan)), plan.reopened()):
        caches = {id(source.cache) for source in each.sources}  # type: ignore[attr-defined]
        assert len(caches) == 1
        assert each.sources[0].cache.memory_bytes == 1 << 20  # type: ignore[attr-defined]


def test_a_cache_in_another_store_is_refused(tmp_path, local):
    with pytest.raises(UsageError, match="cache_dir is s3://bucket/kept, expected a directory of this machine"):
        Cache(cache_dir="s3://bucket/kept")
    (tmp_path / "mix.toml").write_text(
        f'seq_len = 64\nglobal_batch_size = 4\ncache_dir = "s3://bucket/kept"\n[corpora]\na = "{local}"\n'
    )
    with pytest.raises(UsageError, match="cache_dir is s3://bucket/kept"):
        StreamPlan.load(str(tmp_path / "mix.toml"))
    assert not (tmp_path / "s3:").exists()


def test_a_mix_file_says_how_much_is_kept_and_where(local, tmp_path):
    mix = tmp_path / "mix.toml"
    keys = 'seq_len = 64\nglobal_batch_size = 4\nmemory_bytes = "64MiB"\ncache_dir = "kept"\ncache_bytes = "2GiB"\n'
    mix.write_text(f'corpora = {{ a = "{local.name}" }}\n{keys}')
    plan = StreamPlan.load(str(mix))
    cache = plan.sources[0].cache  # type: ignore[attr-defined]
    assert cache.memory_bytes == 64 << 20
    assert cache._arguments["cache_dir"] == str(tmp_path / "kept")
    assert cache._arguments["cache_bytes"] == 2 << 30
    assert plan.fingerprint == StreamPlan(str(local), seq_len=64).fingerprint, "it does not belong to the plan"


@pytest.mark.parametrize(
    "option", [{"memory_bytes": -1}, {"cache_bytes": 0}, {"connections": 0}, {"memory_bytes": 1.5}]
)
def test_impossible_sizes_are_refused(option):
    with pytest.raises(PlanError, match=next(iter(option))):
        Cache(**option)


def test_a_cache_that_no_corpus_of_a_plan_would_use_is_refused(local):
    with pytest.raises(PlanError, match="cache is for corpora that the plan opens") as error:
        StreamPlan({"a": CorpusSource(local, access="pread")}, cache=Cache(), **SIZES)
    assert "CorpusSource" in error.value.hint
    StreamPlan({"a": local, "b": CorpusSource(local)}, start_epoch={"b": 1}, cache=Cache(), **SIZES)


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
    with pytest.warns(UserWarning, match=r"need .*, and .* are allowed: .*memory_bytes=268435456\)"):
        loader_with(needed - 1)
    NumpyLoader(StreamPlan(str(local), cache=Cache(memory_bytes=0), **SIZES), global_batch_size=4)  # it is mapped


@pytest.mark.parametrize("access", ["mmap", "pread", "remote"])
def test_the_bounds_of_many_documents_are_those_of_each(local, remote, access):
    source = CorpusSource(remote) if access == "remote" else CorpusSource(local, access=access)
    assert len(shards_of(local)) > 2
    documents = np.array([0, 1, 5, *range(90, 200, 3), 299])
    starts, stops = source.spans_of(documents)
    places = [CorpusSource(local).place_of(document) for document in documents.tolist()]
    assert list(zip(starts.tolist(), stops.tolist(), strict=True)) == [(place.start, place.stop) for place in places]
    for wrong in (-1, 300):
        with pytest.raises(IndexError, match=f"document {wrong} of a corpus of 300"):
            source.spans_of(np.array([wrong]))


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_masked_documents_are_masked_however_a_corpus_is_read(local, remote, access, tmp_path):
    plan = StreamPlan({"corpus": CorpusSource(remote if access == "pread" else local)}, **SIZES)
    with NumpyLoader(plan, global_batch_size=4) as loader:
        (tmp_path / "masked.txt").write_text("".join(f"{document}\n" for document in range(100)))
        loader.mask("corpus", tmp_path / "masked.txt")
        (batch,) = itertools.islice(loader, 1)
        for row, sample in enumerate(batch["sample_index"].tolist()):
            pieces = StreamPlan(str(local), **SIZES).trace(sample)
            hidden = [piece.document < 100 for piece in pieces for _ in range(piece.start, piece.stop)]
            plain = StreamPlan(str(local), **SIZES).sample(sample)
            assert batch["labels"][row].tolist() == np.where(hidden, -100, plain["labels"]).tolist()
            assert batch["input_ids"][row].tolist() == plain["input_ids"].tolist()
