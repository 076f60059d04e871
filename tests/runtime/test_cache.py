"""The memory of a cache: a slot holds what was put there, as long as a reader wants it.

The strides that are put there, and their places: test_reader.py and test_reading_by_range.py.
"""

from __future__ import annotations

import numpy as np

from tokshard.runtime.bytes.cache import Memory


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
