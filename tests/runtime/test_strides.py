"""Strides of shards: every token has one place, pieces are cut at strides, and slots hold what was put there."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard.runtime.bytes.strides import Strides
from tokshard.runtime.bytes.token_memory import TokenMemory

shards = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def table_of(lengths: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    return np.cumsum([0, *lengths]).astype(np.int64)


@given(lengths=shards, size=st.integers(1, 12), data=st.data())
def test_parts_of_pieces_are_their_tokens_each_in_its_stride(
    lengths: list[int], size: int, data: st.DataObject
) -> None:
    first, strides = table_of(lengths), Strides(table_of(lengths), size)
    content = np.full((sum(-(-length // size) for length in lengths), size), -1)
    row = 0
    for base, length in zip(first.tolist(), lengths, strict=False):
        for start in range(0, length, size):
            part = np.arange(base + start, base + min(start + size, length))
            content[row, : len(part)] = part
            row += 1
    pieces = []
    for _ in range(data.draw(st.integers(1, 8))):
        shard = data.draw(st.integers(0, len(lengths) - 1))
        start = data.draw(st.integers(0, lengths[shard] - 1))
        pieces.append((int(first[shard]) + start, data.draw(st.integers(1, lengths[shard] - start))))
    starts, counts = np.array(pieces, np.int64).T
    at = np.cumsum(counts) - counts
    parts = strides.cut(starts, counts, at)
    out = np.full(int(counts.sum()), -1)
    for stride, start, length, place in zip(parts.strides, parts.starts, parts.lengths, parts.at, strict=True):
        assert start + length <= size
        out[place : place + length] = content[stride, start : start + length]
    assert out.tolist() == [token for start, count in pieces for token in range(start, start + count)]
    covering = strides.covering(starts, starts + counts)
    assert sorted(covering.tolist()) == sorted(set(parts.strides.tolist()))


@given(lengths=shards, size=st.integers(1, 12), longest=st.integers(1, 5), data=st.data())
def test_runs_are_the_strides_in_order_and_stay_in_their_shard(
    lengths: list[int], size: int, longest: int, data: st.DataObject
) -> None:
    strides, counts = Strides(table_of(lengths), size), [-(-length // size) for length in lengths]
    given_strides = data.draw(st.lists(st.integers(0, sum(counts) - 1), unique=True, max_size=12))
    found = []
    for run in strides.runs(np.array(given_strides, np.int64), longest):
        assert 0 < run.stop - run.first <= longest
        assert run.stop <= counts[run.shard]
        assert run.number == sum(counts[: run.shard]) + run.first
        found += range(run.number, run.number + run.stop - run.first)
    assert found == given_strides


def memory_of(num_slots: int) -> TokenMemory:
    return TokenMemory(num_slots, 4, np.dtype(np.uint16))


def put(memory: TokenMemory, *strides: int) -> None:
    reserved = memory.reserve(strides)
    for stride, slot in reserved:
        memory.fill(slot, np.full(4, stride, np.uint16))
    memory.publish(reserved)


def held(memory: TokenMemory, among: int = 50) -> dict[int, int]:
    """The strides that are there, and the token in the slot of each."""
    found = memory.slots(range(among)).tolist()
    return {stride: int(memory.tokens[4 * slot]) for stride, slot in enumerate(found) if slot >= 0}


def test_what_was_announced_stays_until_its_last_reader_is_done_with_it() -> None:
    memory = memory_of(4)
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
    memory = memory_of(100)
    for first in range(0, 40, 4):
        window = range(first, first + 4)
        memory.announce(window)
        put(memory, *window)
        memory.release(window)
    assert memory.slots([36, 37, 38, 39]).max() < 8


def test_a_slot_that_is_being_filled_is_nobody_elses_and_not_seen() -> None:
    memory = memory_of(2)
    memory.announce([1, 2])
    first, second = memory.reserve([1]), memory.reserve([1, 2])
    assert len({slot for _, slot in first + second}) == 2
    assert held(memory) == {}
    for reserved in (first, second):
        for stride, slot in reserved:
            memory.fill(slot, np.full(4, stride, np.uint16))
        memory.publish(reserved)
    assert held(memory)[1] == 1


@pytest.mark.parametrize("num_slots", [0, 1, 3])
def test_without_room_nothing_is_kept_and_nothing_fails(num_slots: int) -> None:
    memory = memory_of(num_slots)
    memory.announce(range(10))
    put(memory, *range(10))
    assert len(held(memory)) == num_slots
