"""Rows that tasks deal to buckets: whatever is dealt, joined and dealt again, a bucket has its rows in their order."""

from __future__ import annotations

import contextlib
import io
import itertools

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tokshard.pipeline.tasks import duplicates, exchange
from tokshard.pipeline.tasks.exchange import Dealt, DealtWriter, Levels
from tokshard.pipeline.tasks.planning import step_tasks
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import Receipt, file_path
from tokshard.store import Store, open_store, written

ROWS = pa.schema({exchange.KEY: pa.uint64(), "place": pa.uint32()})
KEPT = pa.schema({"place": pa.uint32()})


def rows_of(keys: list[int], start: int) -> pa.RecordBatch:
    return pa.record_batch(
        [pa.array([key << 32 for key in keys], pa.uint64()), pa.array(range(start, start + len(keys)), pa.uint32())],
        ROWS,
    )


def deal(store: Store, number: int, levels: Levels, keys: list[int], start: int) -> Receipt:
    """Deal rows in two batches; every tenth place is kept."""
    name = file_path("hash", (number, 0))
    with written(store, name) as file:
        writer = DealtWriter(file, name, levels)
        half = len(keys) // 2
        writer.add(rows_of(keys[:half], start))
        writer.add(rows_of(keys[half:], start + half))
        writer.keep(pa.record_batch([pa.array(range(start, start + len(keys), 10), pa.uint32())], KEPT))
        return writer.finish(Receipt(key=(number, 0)))


def run(store: Store, stage: str, tasks: list[exchange.StepTask], dealt: Dealt, levels: Levels) -> list[Receipt]:
    return [exchange.redeal(file_path(stage, task.key), task, dealt, levels) for task in tasks]


def places(dealt: Dealt, start: int, stop: int) -> list[int]:
    return pa.Table.from_batches(dealt.buckets(start, stop), ROWS)["place"].to_pylist()


@settings(max_examples=examples(40))
@example(files=[[1 << 30, 0, 0]], begun=4, num_buckets=1, deal_bytes=1)
@given(
    files=st.lists(st.lists(st.integers(0, (1 << 32) - 1), max_size=20), min_size=1, max_size=7),
    begun=st.integers(1, 4),
    num_buckets=st.integers(1, 30),
    deal_bytes=st.sampled_from([1, 60, 1 << 20]),
)
def test_every_bucket_has_the_rows_of_its_keys_in_order(files, begun, num_buckets, deal_bytes, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("dealt"))
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, copy_deal_bytes=deal_bytes, copy_fan_out=3, fan_in=3)
        first, levels = Levels(fan_out=begun, depth=1, schema=ROWS), Levels.of(num_buckets, ROWS)
        starts = [0, *itertools.accumulate(map(len, files))][:-1]
        receipts = [deal(store, number, first, files[number], start) for number, start in enumerate(starts)]
        hashed = [exchange.dealt_file("hash", receipt) for receipt in receipts]
        dealt, joins = Dealt.by(store, first, "hash", receipts), 0
        while dealt.levels != levels or len(dealt.files) > 2:
            joins += 1
            tasks = exchange.join_tasks(receipts, 2)
            assert all(1 <= task.stop - task.start <= 3 for task in tasks), "files that a join opens"
            receipts = run(store, f"hash-{joins}", tasks, dealt, levels)
            dealt = Dealt.by(store, levels, f"hash-{joins}", receipts)
        for level in range(1, levels.depth):
            stage = f"hash-{joins + level}"
            tasks = step_tasks("redeal", itertools.pairwise(range(levels.fan_out**level + 1)), "digest")
            dealt = Dealt.by(store, levels, stage, run(store, stage, tasks, dealt, levels), level + 1)
    keys = [key for file in files for key in file]
    bounds = [levels.first_key(bucket) >> 32 for bucket in range(levels.num_buckets + 1)]
    expected = [
        [place for place, key in enumerate(keys) if low <= key < high] for low, high in itertools.pairwise(bounds)
    ]
    assert levels.num_buckets >= num_buckets
    found = [places(dealt, bucket, bucket + 1) for bucket in range(levels.num_buckets)]
    if levels.num_buckets % begun:  # a bucket has rows of several that came first: only equal keys are in order
        found, expected = ([sorted(rows, key=keys.__getitem__) for rows in each] for each in (found, expected))
    assert found == expected
    assert dealt.sizes() == [len(rows) for rows in expected]
    assert sorted(places(dealt, 1, levels.num_buckets)) == sorted(itertools.chain(*expected[1:]))
    kept = [exchange.read_kept(store, file, first, KEPT)["place"].to_pylist() for file in hashed]
    assert kept == [list(range(start, start + len(file), 10)) for start, file in zip(starts, files, strict=True)]


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


# duplicates


def test_two_hashes_that_share_their_high_half_are_no_duplicates():
    high, low = np.array([7, 7, 3, 7, 7], np.uint64), np.array([1, 2, 1, 1, 2], np.uint64)
    order, is_repeat = duplicates.sorted_repeats(high, low)
    assert sorted(order[is_repeat].tolist()) == [3, 4]


def test_a_task_deals_a_text_once_for_each_part_however_often_it_occurs(tmp_path, monkeypatch):
    """Otherwise the bucket of a text that most documents have would not fit into memory."""
    small.shrink(monkeypatch.setattr, part_texts=50)
    store = open_store(tmp_path)
    hashes = np.where(np.arange(400) % 4, 7, np.arange(400)).astype(np.uint64)
    with contextlib.ExitStack() as stack:
        writer = duplicates.HashSink(store, (0, 0), stack)
        for start in range(0, 400, 80):
            writer.add(np.stack([hashes[start : start + 80]] * 2, axis=1))
        receipt = writer.finish(Receipt(key=(0, 0)))
    dealt = exchange.Dealt.by(store, duplicates.hash_levels(), HASH, [receipt])
    assert 100 < sum(dealt.sizes()) <= 100 + 400 // 50
