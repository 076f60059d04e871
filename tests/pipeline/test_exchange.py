"""Rows that tasks deal to buckets: evenly, and when there are enough of them.

That every bucket has its rows in their order is seen in shuffled copies (test_copy.py) and duplicates.
"""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.contract import small
from tokshard.pipeline.tasks import exchange
from tokshard.pipeline.tasks.exchange import DealtWriter, Levels
from tokshard.pipeline.workspace.receipts import Receipt

ROWS = pa.schema({exchange.KEY: pa.uint64(), "place": pa.uint32()})


def rows_of(keys: list[int], start: int) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([key << 32 for key in keys], pa.uint64()), pa.array(range(start, start + len(keys)), pa.uint32())],
        ROWS,
    )


@given(count=st.integers(1, 1 << 31), num_buckets=st.integers(1, 40), data=st.data())
def test_numbers_are_spread_over_the_buckets_in_their_order(count, num_buckets, data):
    numbers = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    keys = exchange.spread(numbers, count)
    assert keys.tolist() == sorted(set(keys.tolist())), "different, and ascending"
    buckets = Levels(fan_out=num_buckets, depth=1, schema=ROWS).buckets(keys, 1)
    assert np.abs(buckets.astype(np.int64) - numbers * num_buckets // count).max() <= 1


@pytest.mark.parametrize(("more", "count", "rounds"), [(0, 13, 4), (1, 14, 3)])
def test_rows_are_dealt_when_there_are_enough_of_them_and_no_sooner(monkeypatch, more, count, rounds):
    rows = rows_of([7], 0)
    small.shrink(monkeypatch.setattr, copy_deal_bytes=4 * rows.nbytes + more)
    writer = DealtWriter(io.BytesIO(), "dealt", Levels(fan_out=2, depth=1, schema=ROWS))
    for _ in range(count):
        writer.add(rows)
    assert writer.finish(Receipt(key=(0, 0))).rounds == rounds
