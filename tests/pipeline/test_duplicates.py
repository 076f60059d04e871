"""Duplicates of a build: whichever tasks texts are in, they are found as by a set."""

from __future__ import annotations

import contextlib

import numpy as np

from tests.contract import small
from tokshard.pipeline.tasks import duplicates, exchange
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import open_store


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
