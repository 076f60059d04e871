"""Loss spans: how their corpora are packed, and how they are kept in memory.

That they reach the labels: test_reader.py and test_page_model.py. Every form of batches, ranks, masks and packings:
tests/contract/test_promise_12_loss.py and test_loader.py.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from tests.runtime.sources import ListSource, SpannedSource
from tokshard.format.loss import Targets
from tokshard.runtime import StreamPlan
from tokshard.runtime.bytes import targets
from tokshard.runtime.bytes.fetchers import Fetchers
from tokshard.runtime.bytes.targets import TargetReader

SIZES: dict[str, Any] = {"seq_len": 8, "block_tokens": 1024, "window_blocks": 2, "seed": 5}


def test_packing_of_a_corpus_follows_its_spans_unless_it_is_given() -> None:
    corpora = {"text": ListSource([5, 9]), "chat": SpannedSource([[0, 1.0, 0]], first_token=1000)}
    for pack, expected in (
        (None, ["cut", "whole"]),
        ({"text": "whole"}, ["whole", "whole"]),
        ("cut", ["cut", "cut"]),
    ):
        plan = StreamPlan(corpora, pack=pack, **SIZES)  # type: ignore[arg-type]
        assert [one.pack for one in plan.corpora] == expected


def test_targets_that_are_kept_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "KEPT_BYTES", 3 * 8)
    loaded: list[int] = []

    def load(batch: int) -> Targets:
        loaded.append(batch)
        return Targets(borders=np.array([1, 4]))

    reader = TargetReader(np.arange(0, 60, 6), load)
    for batch in (0, 1, 2, 0, 3, 0, 1, 1):
        reader.find(np.array([6 * batch]), np.array([6 * batch + 6]))
    monkeypatch.setattr(targets, "KEPT_BYTES", 1)  # one stays, however large it is
    for batch in (5, 5):
        reader.find(np.array([6 * batch]), np.array([6 * batch + 6]))
    assert loaded == [0, 1, 2, 3, 1, 5]


def test_the_spans_of_what_is_announced_are_loaded_ahead_and_once() -> None:
    loaded: list[int] = []

    class AtOnce:
        def start(self, load: Callable[[], Any], *, is_urgent: bool) -> Future[Any]:
            found: Future[Any] = Future()
            found.set_result(load())
            return found

    reader = TargetReader(np.arange(0, 60, 6), lambda batch: loaded.append(batch) or Targets(borders=np.array([1, 4])))
    for _ in range(2):
        reader.ask(np.array([0, 20]), np.array([6, 30]), AtOnce())  # type: ignore[arg-type]
    assert loaded == [0, 3, 4]
    reader.find(np.array([0, 20]), np.array([6, 24]))
    assert loaded == [0, 3, 4]


def test_spans_that_are_announced_and_that_no_row_needs_make_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "KEPT_BYTES", 3 * 8)
    loaded: list[int] = []
    reader = TargetReader(np.arange(0, 60, 6), lambda batch: loaded.append(batch) or Targets(borders=np.array([1, 4])))
    fetchers = Fetchers(1)
    for batch in range(9):
        reader.ask(np.array([6 * batch]), np.array([6 * batch + 6]), fetchers)
    for batch in (8, 0):
        reader.find(np.array([6 * batch]), np.array([6 * batch + 6]))
    assert loaded == [*range(9), 0]
