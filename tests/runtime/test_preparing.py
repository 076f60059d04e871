"""The table of the next window is made before the current one ends, and once."""

from __future__ import annotations

import gc
import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest.mock import PropertyMock

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.examples import some
from tests.ranks import forked, worst_of
from tests.runtime.disk import small_units, write
from tests.runtime.loaders import expected_rows, rows_of, take
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import DamagedCorpusError
from tokshard.runtime.bytes import mapped
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.loader import NumpyLoader, narrow_batches
from tokshard.runtime.order import pieces
from tokshard.runtime.order.pieces import AHEAD, PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Shape
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import steps
from tokshard.runtime.rows.steps import RankRows

SEQ_LEN, BLOCK, WINDOW = 8, 64, 32
BATCH = 4


class Watch:
    """The windows of the tables that are made, and how many of them are made before they are needed."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made: list[int] = []
        self.ahead = 0
        make, prepare = pieces.table_steps, PieceReader._look_ahead

        def counted(order: Any, window: Any, *blocks: Any) -> Any:
            yield from make(order, window, *blocks)
            self.made.append(window.index)

        def watched(*arguments: Any) -> None:
            before = len(self.made)
            prepare(*arguments)
            self.ahead += len(self.made) - before

        patch.setattr(pieces, "table_steps", counted)
        patch.setattr(PieceReader, "_look_ahead", watched)
        # layouts of four steps, in windows of 64
        patch.setattr(steps, "_MAX_LAYOUT_ROWS", 4 * BATCH)
        patch.setattr(steps, "_ROWS_PER_CORPUS", 1)

    @property
    def late(self) -> int:
        return len(self.made) - self.ahead


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def plan_of(*sources: Any, **options: Any) -> StreamPlan:
    named = {f"corpus {number}": source for number, source in enumerate(sources)}
    return StreamPlan(named, seq_len=SEQ_LEN, block_tokens=BLOCK, window_blocks=WINDOW, seed=2, **options)


FULL = WINDOW * BLOCK


@pytest.mark.slow
@some(
    "sizes",
    [
        [3 * FULL + 13, 2 * FULL + 16 * BLOCK + 1, FULL + 5],
        [2 * FULL + 20 * BLOCK + 13],  # epochs end in a smaller window, and in the middle of a sample
        [2 * FULL + 1],  # a last window of one token
        [2 * FULL + BLOCK],  # or of one block
        [FULL + 3],  # every window is an epoch
        [2 * FULL + 20 * BLOCK],
        [3 * FULL],
    ],
    default=3,
)
def test_no_step_waits_for_a_table(watch: Watch, sizes: list[int]) -> None:
    plan = plan_of(*(PeriodicSource(size, 9 + number) for number, size in enumerate(sizes)))
    made = narrow_batches(plan, RankRows(global_batch_size=BATCH), plan.cursor())
    for _ in zip(range(1500), made, strict=False):
        pass
    assert watch.late == len(sizes), "only the first table of each corpus is waited for"
    assert watch.ahead >= len(sizes) * 5


@pytest.mark.parametrize("begun", [0.25, 0.5, 0.875])
def test_a_job_that_begins_in_a_window_makes_the_next_table_late_in_what_is_left_of_it(
    watch: Watch, begun: float
) -> None:
    plan, window = plan_of(PeriodicSource(3 * FULL, 9)), FULL // SEQ_LEN
    first = int(begun * window)
    made = narrow_batches(plan, RankRows(global_batch_size=BATCH), plan.cursor().advanced(first))
    tables_made = [len(watch.made) for _ in zip(range((window - first) // BATCH), made, strict=False)]
    assert watch.late == 1, "only the first table is waited for"
    assert tables_made[0] == 1
    assert tables_made[-1] == 2


def test_samples_that_are_asked_for_alone_prepare_nothing(watch: Watch) -> None:
    plan = plan_of(PeriodicSource(3 * FULL, 9))
    for sample in range(0, 600, 10):
        plan.sample(sample)
    assert (watch.late, watch.ahead) == (3, 0)


@pytest.mark.slow
def test_other_threads_and_another_loader_that_read_anywhere_change_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They push each other's record batches out."""
    monkeypatch.setattr(mapped, "MAX_BATCHES", 1)
    sources = {"one": ListSource([9, 14, 30, 1, 12] * 100), "other": ListSource([17, 5] * 150, first_token=9000)}
    with small_units(batch_tokens=30, stride=16):
        paths = [write(tmp_path / name, source, shard_tokens=60) for name, source in sources.items()]
        plan = plan_of(*map(CorpusSource, paths))
        expected = expected_rows(plan.copy(), range(800))

        def ask(seed: int) -> None:
            for sample in random.Random(seed).choices(range(800), k=100):
                assert plan.sample(sample)["input_ids"].tolist() == expected[sample]["input_ids"]

        with (
            NumpyLoader(plan, global_batch_size=4) as one,
            NumpyLoader(plan, global_batch_size=4) as other,
            ThreadPoolExecutor(4) as pool,
        ):
            other.skip(400)
            asked = pool.map(ask, range(4))
            assert rows_of(take(one, 100)) == expected[:400]
            assert rows_of(take(other, 100)) == expected[400:]
            assert list(asked) == [None] * 4


def test_a_thread_that_reads_between_two_steps_of_another_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_of(PeriodicSource(3 * FULL, 9))
    expected = plan.sample(0)["input_ids"].tolist()
    of_another: Any = [], []
    seen = PropertyMock(side_effect=[plan.readers[0]._last, of_another])
    monkeypatch.setattr(PieceReader, "_last", seen, raising=False)
    assert plan.sample(0)["input_ids"].tolist() == expected


class BrokenSource(ListSource):
    """A source of which some blocks cannot be read for a while."""

    broken = False

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        if self.broken and start > 1500:
            raise DamagedCorpusError("shard-7 is not there", hint="restore it")
        return super().ends_of(start, stop)


def test_damage_that_is_met_while_preparing_is_raised_and_the_job_goes_on_when_it_is_repaired() -> None:
    source = BrokenSource([9, 14, 30, 1, 12] * 100)
    plan = StreamPlan({"a": source}, seq_len=8, block_tokens=32, window_blocks=8, seed=2)
    loader = NumpyLoader(plan, global_batch_size=2, prefetch_factor=1)
    take(loader, 1)
    source.broken = True
    with pytest.raises(DamagedCorpusError, match="shard-7"):
        take(loader, 1000)
    assert (position := loader.cursor.sample) > 0
    source.broken = False
    rows = rows_of(take(loader, 60))
    loader.close()
    assert rows == expected_rows(plan, range(position, position + 120))


def test_samples_beside_a_loader_and_changed_weights_do_not_make_its_tables_again(watch: Watch) -> None:
    plan = plan_of(PeriodicSource(20 * FULL, 9))
    loader, other = (NumpyLoader(plan, global_batch_size=BATCH) for _ in range(2))
    other.skip(1_000 * BATCH)
    for step in range(60):
        take(loader, 1)
        take(other, 1)
        plan.sample(3_000)
        loader.set_weights({"corpus 0": 1.0 + step})
    for one in (loader, other):
        one.close()
    assert {0, 11, 15} <= set(watch.made)  # each reads elsewhere
    assert len(watch.made) == len(set(watch.made))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("num_calls", [5, 40], ids=["the first table", "the next table"])
def test_a_forked_child_reads_while_a_thread_of_its_parent_makes_a_table(
    monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    source, reached, go_on = PeriodicSource(3 * FULL, 9), threading.Event(), threading.Event()
    plan, ends_of, calls = plan_of(source), source.ends_of, itertools.count(1)
    expected = expected_rows(plan.copy(), [7, 300])

    def slow(start: int, stop: int) -> Any:
        if threading.current_thread() is thread and next(calls) == num_calls:
            reached.set()
            assert go_on.wait(30)
        return ends_of(start, stop)

    def make() -> None:
        for first in range(0, 240, 40):
            read_on(plan.readers[0], *range(first, first + 40))

    thread = threading.Thread(target=make)
    monkeypatch.setattr(source, "ends_of", slow)
    thread.start()
    assert reached.wait(30)
    child = forked(lambda: int(expected_rows(plan, [7, 300]) != expected), seconds=20)
    go_on.set()
    thread.join()
    assert worst_of([child]) == 0


def reader_of(source: Any, window_blocks: int, **options: Any) -> PieceReader:
    shape = Shape(seq_len=8, block_tokens=50, window_blocks=window_blocks)
    return PieceReader(CorpusOrder(source=source, shape=shape, seed=3, **options))


def read_on(reader: PieceReader, *samples: int) -> None:
    reader.pieces_of(np.zeros(len(samples), np.int64), np.array(samples), is_sequential=True)


class AskedSource(ListSource):
    """Remembers what it was asked."""

    is_in_memory = False  # others need no hints

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.asked: list[tuple[str, list[tuple[int, int]]]] = []

    def noted(self, name: str, starts: Any, stops: Any) -> None:
        self.asked.append((name, list(zip(starts.tolist(), stops.tolist(), strict=True))))

    def ends(self, starts: Any, stops: Any) -> Any:
        self.noted("ends", starts, stops)
        return super().ends(starts, stops)

    def will_read(self, starts: Any, stops: Any) -> None:
        self.noted("will_read", starts, stops)

    def has_read(self, starts: Any, stops: Any) -> None:
        self.noted("has_read", starts, stops)


def test_a_source_is_told_the_blocks_of_a_window_asked_for_their_documents_and_told_when_they_are_read() -> None:
    source = AskedSource([9, 14, 30, 1, 12] * 10)
    reader = reader_of(source, 8)
    reader.table(reader.order.window(0, 0, 1))
    blocks = source.asked[0][1]
    assert source.asked == [("will_read", blocks), ("ends", blocks)]
    assert len(blocks) == 13 % 8 + 1
    assert blocks[-1] == (650, 660), "the tail"
    assert {stop - start for start, stop in blocks[:-1]} == {50}
    del reader
    gc.collect()
    assert source.asked[2:] == [("has_read", blocks)]


def test_where_reading_begins_a_source_of_two_windows_is_told_all_of_its_blocks_those_read_first_before() -> None:
    source = AskedSource([9, 14, 30, 1, 12] * 10)
    reader = reader_of(source, 8)
    read_on(reader, 0, 1)
    (_, told), (_, first) = source.asked
    assert told[:8] == first
    assert sorted(told) == [(start, min(660, start + 50)) for start in range(0, 660, 50)]
    del reader
    gc.collect()
    assert sorted(block for _, blocks in source.asked[2:] for block in blocks) == sorted(told)


@pytest.mark.parametrize("is_in_memory", [False, True])
def test_a_source_is_asked_for_the_next_window_late_in_small_steps_and_told_its_blocks_before_if_it_is_slow(
    monkeypatch: pytest.MonkeyPatch, is_in_memory: bool
) -> None:
    monkeypatch.setattr(pieces, "STEP_TOKENS", 4 * 50)
    source = AskedSource([9] * 800)
    source.is_in_memory = is_in_memory
    reader = reader_of(source, 48)
    samples = 48 * 50 // 8
    blocks = [
        tuple(stretch)
        for index in (1, 2)
        for stretch in np.stack(reader.order.blocks(reader.order.window(0, 0, index)), axis=1).tolist()
    ]
    reader.table(reader.order.window(0, 0, 0))
    told: list[tuple[int, float]] = []
    asked: list[tuple[int, float]] = []
    for sample in range(samples):
        source.asked.clear()
        read_on(reader, sample)
        for name, stretches in source.asked:
            assert name in ("will_read", "ends")
            done = told if name == "will_read" else asked
            start = done[-1][0] if done else 0
            assert stretches == blocks[start : start + len(stretches)]
            done.append((start + len(stretches), sample / samples))
    assert asked[-1][0] == 48
    assert 0.6 <= asked[0][1] < asked[-1][1] < 0.82
    assert max(now - before for (before, _), (now, _) in itertools.pairwise(asked)) == 4, "in small steps"
    assert len({at for _, at in asked}) == 12, "and one step at a time"
    if is_in_memory:
        assert not told
        return
    assert told[-1][0] == 48 * AHEAD
    assert max(now - before for (before, _), (now, _) in itertools.pairwise(told)) == 1
    assert min(at for number, at in told if number >= 48) < 0.52
    assert all(number <= 48 * min(2 * at, at + AHEAD - 1) + 1.5 for number, at in told)
    source.asked.clear()
    for sample in range(samples, samples + 3):
        read_on(reader, sample)
    released = [stretches for name, stretches in source.asked if name == "has_read"]
    assert len(released) == 1
    assert len(released[0]) == 48
    assert not set(released[0]) & set(blocks), "the window that is read now stays, and what is ahead"


def test_nothing_beyond_the_end_of_a_finite_pass_is_announced() -> None:
    source = AskedSource([9] * 800)
    reader = reader_of(source, 48, epochs=Fraction(2, 3))
    samples = 2 * 48 * 50 // 8
    for sample in range(samples):
        read_on(reader, sample)
    told = [stretch for name, stretches in source.asked if name == "will_read" for stretch in stretches]
    assert len(told) == len(set(told)) == 2 * 48


def test_the_first_batches_make_tables_of_the_corpora_in_their_own_step_only() -> None:
    corpora = {str(number): ListSource([30] * 40, name=str(number)) for number in range(20)}
    plan = StreamPlan(corpora, seq_len=8, block_tokens=32, window_blocks=100)
    with NumpyLoader(plan, global_batch_size=4, dp_rank=1, dp_world_size=2, prefetch_factor=0) as loader:
        for step, _ in zip(range(1, 6), loader, strict=False):
            assert loader._memory is not None
            assert sum(len(kept) for reader in loader._memory[0].readers for kept in reader._kept.values()) <= 4 * step


class FailingSource(ListSource):
    """Cannot be read after some reads."""

    left = 1 << 62

    def ends_of(self, start: int, stop: int) -> NDArray[np.int64]:
        self.left -= 1
        if self.left < 0:
            raise DamagedCorpusError("shard-7 is not there", hint="restore it")
        return super().ends_of(start, stop)


@pytest.mark.filterwarnings("ignore:the change of seq_len")
def test_a_state_that_cannot_be_loaded_changes_nothing_wherever_that_ends() -> None:
    options: dict[str, Any] = {"pack": "whole", "block_tokens": 256, "allow_small_blocks": True, "max_epochs": 2}

    def loader_of(seq_len: int) -> tuple[FailingSource, NumpyLoader]:
        source = FailingSource([9, 4, 30, 1] * 20)
        plan = StreamPlan(source, seq_len=seq_len, on_max_epochs="warn", **options)
        return source, NumpyLoader(plan, global_batch_size=2)

    _, before = loader_of(2)
    take(before, 5)
    for reads in itertools.count():
        source, loader = loader_of(1)
        take(loader, 1)
        source.left = reads
        try:
            loader.load_state_dict(before.state_dict(), seq_len="plan")
            break
        except DamagedCorpusError:
            source.left = 1 << 62
        assert [batch["sample_index"].tolist() for batch in take(loader, 1)] == [[2, 3]]
        assert loader.cursor.sample == 4
        loader.close()
    for one in (before, loader):
        one.close()
    assert reads > 1
