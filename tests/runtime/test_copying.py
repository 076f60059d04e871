"""Tokens are the same whether they are copied as slices, gathered by their addresses, or read in ranges."""

from __future__ import annotations

import random
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.corpora import change_table
from tests.examples import examples
from tests.runtime.loaders import rows_of, take
from tests.runtime.sources import ListSource
from tests.runtime.test_reader import small_units, write
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.runtime.bytes import copying, mapped
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.mapped import MappedCorpus, MappedTokens
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import narrow as narrow_rows
from tokshard.runtime.rows.narrow import PADDING_INDEX
from tokshard.runtime.tensors import StreamingLoader

WAYS: dict[str, dict[str, int]] = {
    "slices": {"GATHER_BELOW": 0},
    "gathered": {"GATHER_BELOW": 1 << 60},
    "halves": {"MANY": 0, "HALVES_FROM": 0, "HALVES_BELOW": 1 << 60},
}


def copy_as(patch: pytest.MonkeyPatch, way: str) -> None:
    """Copy all pieces in one way."""
    for name, value in {"MANY": 1 << 60, **WAYS[way]}.items():
        patch.setattr(copying, name, value)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
sizes = st.fixed_dictionaries(
    {"seq_len": st.integers(1, 30), "block_tokens": st.integers(1, 64), "window_blocks": st.integers(1, 6)}
)


def plan_of(sources: list[Any], **options: Any) -> StreamPlan:
    named = {f"corpus {number}": source for number, source in enumerate(sources)}
    return StreamPlan(named, weights=dict.fromkeys(named, 1.0), allow_small_blocks=True, **options)


class MappedSource(ListSource):
    """Documents in memory, copied as those of memory maps are: record batches of four documents."""

    def __init__(self, lengths: list[int], **options: Any) -> None:
        super().__init__(lengths, **options)
        starts = np.unique(np.concatenate([[0], self.stops[3::4], self.stops[-1:]]))
        self.mapped = MappedTokens(starts, self.dtype)
        for batch in reversed(range(len(starts) - 1)):
            self.mapped.add(batch, self.tokens[starts[batch] : starts[batch + 1]])
        self.starts = starts

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        batches = np.searchsorted(self.starts, starts, "right") - 1
        self.mapped.read(batches, starts, lengths, out, at)


class NarrowSource(MappedSource):
    """The same of 16 bits per token, at an address that is a multiple of no more than that."""

    dtype = np.dtype(np.uint16)

    def __init__(self, lengths: list[int], **options: Any) -> None:
        ListSource.__init__(self, lengths, **options)
        memory = np.zeros(len(self.tokens) + 3, np.uint16)
        memory[3:] = self.tokens
        self.tokens = memory[3:]
        self.starts = np.array([0, len(self.tokens)])
        self.mapped = MappedTokens(self.starts, self.dtype)
        self.mapped.add(0, self.tokens)


def packed_as(kind: str, plan: StreamPlan, samples: list[int], parts: list[tuple[int, int]]) -> list[NDArray[Any]]:
    """The tokens of some stretches of one layout."""
    with pytest.MonkeyPatch.context() as patch:
        copy_as(patch, kind)
        layout = plan.lay_out(plan.cursor(), np.array(samples, np.int64))
        return [layout.read(start, stop).tokens for start, stop in parts]


@given(
    documents=st.lists(lengths, min_size=1, max_size=3),
    sizes=sizes,
    narrow=st.booleans(),
    samples=st.sets(st.integers(0, 60), min_size=1, max_size=20),
    padding=st.integers(0, 3),
    data=st.data(),
)
def test_every_way_of_copying_gives_the_same_rows_for_every_layout(
    documents: list[list[int]],
    sizes: dict[str, int],
    narrow: bool,
    samples: set[int],
    padding: int,
    data: st.DataObject,
) -> None:
    kind = NarrowSource if narrow else MappedSource
    sources = [kind(parts, first_token=1 + 5000 * number, name=str(number)) for number, parts in enumerate(documents)]
    plan = plan_of(sources, **sizes)
    rows = sorted(samples) + [PADDING_INDEX] * padding
    stretch = st.lists(st.integers(0, len(rows)), min_size=2, max_size=2, unique=True).map(sorted)
    parts = [(0, len(rows)), *data.draw(st.lists(stretch, max_size=4))]
    slices, gathered, halves = (packed_as(name, plan, rows, parts) for name in WAYS)
    for one, *others in zip(slices, gathered, halves, strict=True):
        for other in others:
            assert one.dtype == other.dtype == (np.uint16 if narrow else np.uint32)
            assert one.tolist() == other.tolist()
    for row, sample in enumerate(rows):
        if sample != PADDING_INDEX:
            assert gathered[0][row].tolist() == plan.sample(sample)["input_ids"].tolist()


@given(documents=lengths, sizes=sizes, epochs=st.integers(1, 2))
def test_the_filled_end_of_a_pass_is_the_same_in_every_way(
    documents: list[int], sizes: dict[str, int], epochs: int
) -> None:
    plan = StreamPlan(MappedSource(documents), epochs=epochs, allow_small_blocks=True, **sizes)
    count = plan.num_samples or 0
    rows = [*range(max(0, count - 4), count), PADDING_INDEX]
    slices, gathered, halves = (packed_as(name, plan, rows, [(0, len(rows))]) for name in WAYS)
    assert slices[0].tolist() == gathered[0].tolist() == halves[0].tolist()


def test_more_tokens_than_are_numbered_at_once_are_gathered_too() -> None:
    source = MappedSource([7] * 30_000)
    plan = plan_of([source], seq_len=50_000)
    slices, gathered, halves = (packed_as(name, plan, [0, 1, 2], [(0, 3)]) for name in WAYS)
    assert np.array_equal(slices[0], gathered[0])
    assert np.array_equal(slices[0], halves[0])


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_pieces_are_gathered_from_memory_that_lies_far_apart_in_any_order(dtype: Any) -> None:
    owners = [np.arange(number, number + size).astype(dtype) for number, size in ((0, 10), (500, 1), (90, 300_000))]
    first_tokens = np.array([0, 10, 11, 300_011])
    memory = MappedTokens(first_tokens, np.dtype(dtype))
    for number in (1, 2, 0):
        memory.add(number, owners[number])
    rng = random.Random(2)
    for _ in range(50):
        pieces = [(rng.randrange(3), rng.random(), rng.random()) for _ in range(rng.randint(1, 30))]
        expected = []
        chosen, starts = [], []
        for owner, low, high in pieces:
            start = int(low * len(owners[owner]))
            stop = start + 1 + int(high * (min(len(owners[owner]), start + 50) - start - 1))
            expected.append(owners[owner][start:stop])
            chosen.append(owner)
            starts.append(first_tokens[owner] + start)
        counts = np.array([len(one) for one in expected], np.int64)
        gaps = np.array([rng.choice([0, 0, 3]) for _ in pieces])
        places = np.cumsum(gaps + counts) - counts
        found, right = (np.zeros(int((gaps + counts).sum()), dtype) for _ in range(2))
        for place, tokens in zip(places.tolist(), expected, strict=True):
            right[place : place + len(tokens)] = tokens
        for way in WAYS:
            with pytest.MonkeyPatch.context() as patch:
                copy_as(patch, way)
                found[:] = 0
                memory.read(np.array(chosen), np.array(starts), counts, found, places)
            assert found.tolist() == right.tolist()


def test_halves_touch_nothing_outside_of_their_pieces() -> None:
    memory = np.arange(1, 101, dtype=np.uint16)
    lengths = np.array([1, 2, 3, 8, 20, 33])
    starts, places = 100 - lengths, np.cumsum(lengths + 2) - lengths  # up to the end of memory, with gaps in between
    out = np.zeros(int(places[-1] + lengths[-1]) + 2, np.uint16)
    copying.copy_halves(memory, starts, lengths, out, places)
    expected = np.zeros_like(out)
    for start, length, place in zip(starts.tolist(), lengths.tolist(), places.tolist(), strict=True):
        expected[place : place + length] = memory[start : start + length]
    assert out.tolist() == expected.tolist()


def test_many_pieces_of_middle_length_are_copied_as_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    monkeypatch.setattr(copying, "copy_halves", lambda *_: found.append("halves"))
    monkeypatch.setattr(copying, "gather", lambda *_: found.append("gather"))
    monkeypatch.setattr(copying, "copy_slices", lambda *_: found.append("slices"))
    none = np.zeros(2_000, np.int64)
    for count, length in ((2_000, 29), (2_000, 30), (2_000, 1_499), (2_000, 1_500), (999, 349), (999, 350)):
        copying.copy_pieces(none, none[:count], np.full(count, length), none, none[:count])
    assert found == ["gather", "halves", "halves", "slices", "gather", "slices"]


# corpora on disk


@settings(max_examples=examples(10))
@given(
    # a plan refuses two corpora of the same content
    documents=st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=60), min_size=1, max_size=2, unique_by=tuple),
    shard_tokens=st.integers(1, 200),
    batch_tokens=st.integers(1, 60),
    open_shards=st.sampled_from([1, 2, 8_192]),
    wide=st.booleans(),
    seq_len=st.integers(1, 50),
)
def test_mapped_and_read_corpora_of_many_shards_and_batches_give_the_same_batches(
    documents: list[list[int]], shard_tokens: int, batch_tokens: int, open_shards: int, wide: bool, seq_len: int
) -> None:
    first = 90_000 if wide else 1
    memories = [
        ListSource(parts, first_token=first + 3000 * number, name=str(number)) for number, parts in enumerate(documents)
    ]
    options = {"seq_len": seq_len, "block_tokens": 4 * seq_len, "window_blocks": 3, "seed": 6}
    with (
        tempfile.TemporaryDirectory() as folder,
        small_units(batch_tokens=batch_tokens, stride=16),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(mapped, "MAX_BATCHES", open_shards)
        corpora = [
            write(Path(folder) / str(number), memory, shard_tokens=shard_tokens, wide=wide)
            for number, memory in enumerate(memories)
        ]
        rows = []
        for access in ("mmap", "pread"):
            plan = plan_of([CorpusSource(corpus, access=access) for corpus in corpora], **options)
            patch.setattr(narrow_rows, "READ_TOKENS", 20 * seq_len)
            loader = StreamingLoader(plan, global_batch_size=3)
            rows.append(rows_of(take(loader, 8)))
            loader.close()
            if access == "mmap":
                for source in map(CorpusSource, corpora):
                    for start in range(source.num_tokens):
                        source.ends(np.array([start]), np.array([start + 1]))
                        assert len(source._reader._offsets) <= open_shards
    assert rows[0] == rows[1]
    known = {token for memory in memories for token in memory.tokens.tolist()}
    assert {token for row in rows[0] for token in row["input_ids"]} <= known


def test_threads_that_push_each_others_shards_out_read_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mapped, "MAX_BATCHES", 1)
    memory = ListSource([6] * 120)
    with small_units(batch_tokens=30, stride=16):
        source = CorpusSource(write(tmp_path / "corpus", memory, shard_tokens=60))
        plan = plan_of([source], seq_len=24, block_tokens=96)
        expected = [plan.sample(sample)["input_ids"].tolist() for sample in range(60)]
        failures: list[Any] = []

        def read(seed: int) -> None:
            rng = random.Random(seed)
            try:
                for _ in range(60):
                    sample = rng.randrange(60)
                    if plan.sample(sample)["input_ids"].tolist() != expected[sample]:
                        failures.append(sample)
            except Exception as error:  # noqa: BLE001 - the main thread fails with it
                failures.append(error)

        threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []


COLUMNS = ["batch_tokens", "batch_documents", "batch_values_position", "batch_offsets_position"]


LIES = [
    (column, wrong, access) for column in COLUMNS for wrong in (-16, -2, 2, 16, 1 << 40) for access in ("mmap", "pread")
]


@pytest.mark.slow
@pytest.mark.parametrize(("column", "wrong", "access"), LIES)
def test_a_shard_table_that_lies_about_record_batches_is_refused(
    tmp_path: Path, column: str, wrong: int, access: str
) -> None:
    with small_units(batch_tokens=100, stride=20):
        corpus = write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=300)

        def change(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
            rows[column][0][0] += wrong
            if column in ("batch_tokens", "batch_documents"):  # the sum stays what it was
                rows[column][0][1] -= wrong
            return rows

        change_table(corpus, names.SHARD_TABLE, change)
        source = CorpusSource(corpus, access=access)
        with pytest.raises(DamagedCorpusError):
            read_and_trace(source)


def read_and_trace(source: CorpusSource) -> None:
    """Read tokens and offsets: with pread, only a trace needs these."""
    read_all(source)
    plan_of([source], seq_len=60, block_tokens=120).traces(np.arange(10))


def read_all(source: CorpusSource) -> list[list[int]]:
    plan = plan_of([source], seq_len=60, block_tokens=120)
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(12)]


def test_a_piece_beyond_its_record_batch_is_refused(tmp_path: Path) -> None:
    with small_units(batch_tokens=100, stride=20):
        source = CorpusSource(write(tmp_path / "corpus", ListSource([20] * 30), shard_tokens=300))
        inside = np.array([80]), np.array([20])
        beyond = np.array([80]), np.array([21])
        out, at = np.zeros(21, source.dtype), np.array([0])
        source.read(*inside, out, at)
        assert out[:19].all()
        assert out[19] == 0
        for wrong in (beyond, (np.array([-1]), np.array([3])), (np.array([600]), np.array([1]))):
            with pytest.raises(DamagedCorpusError, match="a document extends beyond its record batch"):
                source.read(*wrong, out, at)


def test_a_shard_that_does_not_align_its_tokens_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = CorpusSource(write(tmp_path / "corpus", ListSource([6] * 50)))
    opened = MappedCorpus._values

    def misaligned(corpus: MappedCorpus, shard: int, batch: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        offsets, values = opened(corpus, shard, batch)
        return offsets, np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1)

    monkeypatch.setattr(MappedCorpus, "_values", misaligned)
    with pytest.raises(DamagedCorpusError, match=r"shard-.*\.arrow, batch 0: its tokens are not aligned"):
        read_all(source)
