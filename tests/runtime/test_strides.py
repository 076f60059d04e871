"""Strides of shards: every token has one place, pieces are cut at strides, and slots hold what was put there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard.runtime.bytes import ranged
from tokshard.runtime.bytes.cache import Memory
from tokshard.runtime.bytes.ranged import Strides

shards = st.lists(st.integers(1, 40), min_size=1, max_size=6)


@given(lengths=shards, size=st.integers(1, 6), of_stride=st.integers(1, 2), data=st.data())
def test_parts_of_pieces_are_their_tokens_each_in_its_chunk(
    lengths: list[int], size: int, of_stride: int, data: st.DataObject
) -> None:
    first = np.cumsum([0, *lengths]).astype(np.int64)
    strides = Strides(first, size * of_stride, of_stride)
    bases = np.cumsum([0, *(-(-length // (size * of_stride)) * of_stride for length in lengths)])

    def place_of(token: int) -> tuple[int, int]:
        shard = int(np.searchsorted(first, token, "right")) - 1
        chunk, place = divmod(token - int(first[shard]), size)
        return int(bases[shard]) + chunk, place

    pieces = []
    for _ in range(data.draw(st.integers(1, 8))):
        shard = data.draw(st.integers(0, len(lengths) - 1))
        start = data.draw(st.integers(0, lengths[shard] - 1))
        pieces.append((int(first[shard]) + start, data.draw(st.integers(1, lengths[shard] - start))))
    starts, counts = np.array(pieces, np.int64).T
    parts = strides.cut(starts, counts, np.cumsum(counts) - counts)
    found = [
        (chunk, start + place)
        for chunk, start, length in zip(
            *(each.tolist() for each in (parts.chunks, parts.starts, parts.lengths)), strict=True
        )
        for place in range(length)
    ]
    assert found == [place_of(token) for start, count in pieces for token in range(start, start + count)]
    assert parts.at.tolist() == (np.cumsum(parts.lengths) - parts.lengths).tolist()
    covered = [
        chunk
        for start, count in pieces
        for stride in range(place_of(start)[0] // of_stride, place_of(start + count - 1)[0] // of_stride + 1)
        for chunk in range(stride * of_stride, (stride + 1) * of_stride)
    ]
    assert strides.covering(starts, starts + counts).tolist() == covered


@given(lengths=shards, size=st.integers(1, 12), of_stride=st.integers(1, 2), longest=st.integers(1, 5), data=st.data())
def test_runs_are_the_strides_in_order_and_stay_in_their_shard(
    lengths: list[int], size: int, of_stride: int, longest: int, data: st.DataObject
) -> None:
    counts = [-(-length // (size * of_stride)) for length in lengths]
    strides = Strides(np.cumsum([0, *lengths]).astype(np.int64), size * of_stride, of_stride)
    chunks = data.draw(st.lists(st.integers(0, sum(counts) * of_stride - 1), unique=True, max_size=12))
    found = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranged, "_RUN_STRIDES", longest)
        for shard, first, stop in strides.runs(np.array(chunks, np.int64)):
            assert 0 < stop - first <= longest
            assert strides.first(shard) == sum(counts[:shard]) <= first
            assert stop <= sum(counts[: shard + 1])
            found += range(first, stop)
    assert found == list(dict.fromkeys(chunk // of_stride for chunk in chunks))


def put(memory: Memory, *strides: int) -> None:
    reserved = memory.reserve(strides)
    for stride, slot in reserved:
        memory.fill(slot, np.full(4, stride, np.uint8))
    memory.publish(reserved)


def held(memory: Memory, among: int = 50) -> dict[int, int]:
    """The strides that are there, and the token in the slot of each."""
    found = memory.slots(range(among)).tolist()
    return {stride: int(memory.content[4 * slot]) for stride, slot in enumerate(found) if slot >= 0}


def test_what_was_announced_stays_until_its_last_reader_is_done_with_it() -> None:
    memory = Memory(4, chunk_bytes=4)
    memory.announce([1, 2, 3, 4])
    memory.announce([4])
    put(memory, 1, 2, 3, 4, 5)
    assert held(memory) == {1: 1, 2: 2, 3: 3, 4: 4}
    assert memory.room == 0
    memory.release([3, 4])
    put(memory, 6, 7)
    assert held(memory) == {1: 1, 2: 2, 4: 4, 6: 6}, "one slot was free"
    memory.release([4])
    assert memory.room == 2


def test_memory_that_was_used_is_used_again_before_more_is() -> None:
    memory = Memory(100, chunk_bytes=4)
    for first in range(0, 40, 4):
        window = range(first, first + 4)
        memory.announce(window)
        put(memory, *window)
        memory.release(window)
    assert memory.slots([36, 37, 38, 39]).max() < 8


def test_a_slot_that_is_being_filled_is_nobody_elses_and_not_seen() -> None:
    memory = Memory(2, chunk_bytes=4)
    memory.announce([1, 2])
    first, second = memory.reserve([1]), memory.reserve([1, 2])
    assert len({slot for _, slot in first + second}) == 2
    assert held(memory) == {}
    for reserved in (first, second):
        for stride, slot in reserved:
            memory.fill(slot, np.full(4, stride, np.uint8))
        memory.publish(reserved)
    assert held(memory)[1] == 1


def test_a_slot_for_a_chunk_that_another_fetch_brought_first_is_used_again() -> None:
    memory = Memory(2, chunk_bytes=4)
    for fetch in [memory.reserve([1]), memory.reserve([1])]:
        memory.publish(fetch)
    assert len(memory.reserve([2, 3])) == 2
