"""The table of the next window is made before the current one ends, and once."""

from __future__ import annotations

import faulthandler
import gc
import itertools
import os
import random
import threading
import warnings
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples, some
from tests.runtime.loaders import expected_rows, rows_of, take
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import DamagedCorpusError
from tokshard.runtime.loader import narrow_batches
from tokshard.runtime.order import pieces
from tokshard.runtime.order.pieces import AHEAD, PieceReader
from tokshard.runtime.order.windows import CorpusOrder, Shape
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows import steps
from tokshard.runtime.rows.steps import RankRows
from tokshard.runtime.tensors import StreamingLoader

SEQ_LEN, BLOCK, WINDOW = 8, 64, 32
BATCH = 4


class Watch:
    """Counts the tables that are made, and those of them that are needed before they are ready."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.made = self.ahead = 0
        make, prepare = pieces.table_steps, PieceReader._look_ahead

        def counted(*arguments: Any) -> Any:
            yield from make(*arguments)
            self.made += 1

        def watched(*arguments: Any) -> None:
            before = self.made
            prepare(*arguments)
            self.ahead += self.made - before

        patch.setattr(pieces, "table_steps", counted)
        patch.setattr(PieceReader, "_look_ahead", watched)
        # layouts of four steps, in windows of 64
        patch.setattr(steps, "_MAX_LAYOUT_ROWS", 4 * BATCH)
        patch.setattr(steps, "_ROWS_PER_CORPUS", 1)

    @property
    def late(self) -> int:
        return self.made - self.ahead


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


def plan_of(*sources: Any, **options: Any) -> StreamPlan:
    named = {f"corpus {number}": source for number, source in enumerate(sources)}
    return StreamPlan(named, seq_len=SEQ_LEN, block_tokens=BLOCK, window_blocks=WINDOW, seed=2, **options)


def steps_of(plan: StreamPlan, count: int) -> Iterator[NDArray[np.int64]]:
    made = narrow_batches(plan, RankRows(global_batch_size=BATCH), plan.cursor())
    for _, narrow in zip(range(count), made, strict=False):
        yield narrow.sample_index


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
    for _ in steps_of(plan, 1500):
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
    tables_made = [watch.made for _ in zip(range((window - first) // BATCH), made, strict=False)]
    assert watch.late == 1, "only the first table is waited for"
    assert tables_made[0] == 1
    assert tables_made[-1] == 2


def test_samples_that_are_asked_for_alone_prepare_nothing(watch: Watch) -> None:
    plan = plan_of(PeriodicSource(3 * FULL, 9))
    for sample in range(0, 600, 10):
        plan.sample(sample)
    assert (watch.late, watch.ahead) == (3, 0)


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=60)


@settings(max_examples=examples(20))
@given(
    lengths=lengths,
    seq_len=st.integers(1, 30),
    block=st.integers(1, 64),
    window=st.integers(1, 5),
    asked=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 10**6)), max_size=20),
)
def test_samples_that_are_asked_for_in_between_change_nothing(
    lengths: list[int], seq_len: int, block: int, window: int, asked: list[tuple[int, int]]
) -> None:
    def plan() -> StreamPlan:
        sources = {"a": ListSource(lengths), "b": ListSource([5, 17, 2], first_token=5000)}
        options = {"seq_len": seq_len, "block_tokens": block, "window_blocks": window}
        return StreamPlan(sources, weights={"a": 2, "b": 1}, seed=1, allow_small_blocks=True, **options)

    reference, read = plan(), plan()
    ranks = RankRows(global_batch_size=2)
    for step, narrow in zip(range(20), narrow_batches(read, ranks, read.cursor()), strict=False):
        for moment, sample in asked:
            if moment == step:
                assert read.sample(sample)["input_ids"].tolist() == plan().sample(sample)["input_ids"].tolist()
        for row in range(2):
            expected = reference.sample(2 * step + row)["input_ids"].tolist()
            assert narrow.tokens[row].tolist() == expected


@pytest.mark.slow
def test_another_thread_and_another_loader_that_read_anywhere_change_nothing() -> None:
    def plan() -> StreamPlan:
        return plan_of(ListSource([9, 14, 30, 1, 12] * 100), ListSource([17, 5] * 150, name="other", first_token=9000))

    shared, expected = plan(), expected_rows(plan(), range(800))
    failures: list[Any] = []

    def ask(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(100):
            sample = rng.randrange(800)
            if shared.sample(sample)["input_ids"].tolist() != expected[sample]["input_ids"]:
                failures.append(sample)

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(2)]
    one, other = StreamingLoader(shared, global_batch_size=4), StreamingLoader(shared, global_batch_size=4)
    other.skip(400)
    for thread in threads:
        thread.start()
    assert rows_of(take(one, 100)) == expected[:400]
    assert rows_of(take(other, 100)) == expected[400:]
    for thread in threads:
        thread.join()
    one.close()
    other.close()
    assert failures == []


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
    loader = StreamingLoader(plan, global_batch_size=2, prefetch_factor=1)
    rows = rows_of(take(loader, 1))
    source.broken = True
    with pytest.raises(DamagedCorpusError, match="shard-7"):
        take(loader, 1000)
    assert loader.cursor.sample > 0
    position = loader.cursor.sample
    source.broken = False
    rows = rows_of(take(loader, 60))
    loader.close()
    fresh = StreamPlan({"a": ListSource(source.lengths)}, seq_len=8, block_tokens=32, window_blocks=8, seed=2)
    assert rows == expected_rows(fresh, range(position, position + 120))


def count_tables(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one for each table that is made from now on."""
    made: list[int] = []
    make = pieces.table_steps

    def counted(order: Any, window: Any, *blocks: Any) -> Any:
        made.append(window.index)
        return make(order, window, *blocks)

    monkeypatch.setattr(pieces, "table_steps", counted)
    return made


def test_samples_that_are_asked_for_beside_a_loader_do_not_make_its_tables_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, made = plan_of(PeriodicSource(20 * FULL, 9)), count_tables(monkeypatch)
    loader, other = (StreamingLoader(plan, global_batch_size=BATCH) for _ in range(2))
    other.skip(1_000 * BATCH)
    for _ in range(60):
        take(loader, 1)
        take(other, 1)
        plan.sample(3_000)
    for one in (loader, other):
        one.close()
    assert {0, 11, 15} <= set(made)  # each reads elsewhere
    assert len(made) == len(set(made))


def test_changed_weights_do_not_make_the_tables_of_a_loader_again(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, made = plan_of(PeriodicSource(20 * FULL, 9), PeriodicSource(20 * FULL, 11)), count_tables(monkeypatch)
    loader = StreamingLoader(plan, global_batch_size=BATCH)
    for step in range(20):
        take(loader, 1)
        loader.set_weights({"corpus 0": 1.0, "corpus 1": 1.0 + step})
    loader.close()
    assert len(made) <= 2 * 3


@pytest.mark.parametrize("num_calls", [5, 40], ids=["the first table", "the next table"])
def test_a_forked_child_reads_while_a_thread_of_its_parent_makes_a_table(
    monkeypatch: pytest.MonkeyPatch, num_calls: int
) -> None:
    source, reached, go_on = PeriodicSource(3 * FULL, 9), threading.Event(), threading.Event()
    plan, ends_of, calls = plan_of(source), source.ends_of, itertools.count(1)
    samples = np.array([7, 300])
    expected = read(plan.reader(), samples)

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
    receiving, sending = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # a fork while there are threads
        child = os.fork()
    if not child:
        faulthandler.dump_traceback_later(20, exit=True)
        os.write(sending, str(read(plan, samples)).encode())
        os._exit(0)
    go_on.set()
    thread.join()
    os.close(sending)
    with os.fdopen(receiving) as pipe:
        assert pipe.read() == str(expected)
    assert os.waitpid(child, 0)[1] == 0


def read(plan: StreamPlan, samples: NDArray[np.int64]) -> list[list[int]]:
    return [plan.sample(sample)["input_ids"].tolist() for sample in samples.tolist()]


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

    def ends(self, starts: Any, stops: Any) -> Any:
        self.asked.append(("ends", list(zip(starts.tolist(), stops.tolist(), strict=True))))
        return super().ends(starts, stops)

    def will_read(self, starts: Any, stops: Any) -> None:
        self.asked.append(("will_read", list(zip(starts.tolist(), stops.tolist(), strict=True))))

    def has_read(self, starts: Any, stops: Any) -> None:
        self.asked.append(("has_read", list(zip(starts.tolist(), stops.tolist(), strict=True))))


def test_a_source_is_told_the_blocks_of_a_window_and_then_asked_for_their_documents_in_one_call() -> None:
    source = AskedSource([9, 14, 30, 1, 12] * 10)
    reader = reader_of(source, 8)
    reader.table(reader.order.window(0, 0, 1))
    blocks = source.asked[0][1]
    assert source.asked == [("will_read", blocks), ("ends", blocks)]
    assert len(blocks) == 13 % 8 + 1
    assert blocks[-1] == (650, 660), "the tail"
    assert {stop - start for start, stop in blocks[:-1]} == {50}


def test_a_slow_source_is_told_the_blocks_of_a_window_little_by_little_and_asked_for_them_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pieces, "STEP_TOKENS", 4 * 50)
    source = AskedSource([9] * 800)
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
    assert (told[-1][0], asked[-1][0]) == (48 * AHEAD, 48)
    assert max(now - before for (before, _), (now, _) in itertools.pairwise(told)) == 1
    assert min(at for number, at in told if number >= 48) < 0.52
    assert all(number <= 48 * min(2 * at, at + AHEAD - 1) + 1.5 for number, at in told)
    assert 0.65 <= asked[0][1] < asked[-1][1] < 0.82
    assert max(now - before for (before, _), (now, _) in itertools.pairwise(asked)) == 4, "in small steps"
    assert len({at for _, at in asked}) == 12, "and one step at a time"
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


def test_a_reader_that_is_gone_needs_its_blocks_no_more() -> None:
    source = AskedSource([9, 14, 30, 1, 12] * 10)
    reader = reader_of(source, 8)
    reader_of(source, 8).table(reader.order.window(0, 0, 0))
    gc.collect()
    (_, announced), _, (name, released) = source.asked
    assert (name, released) == ("has_read", announced)
