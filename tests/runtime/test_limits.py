"""`max_epochs`: a corpus is read so often and no more, or the job says that it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import naive
from tests.runtime.sources import ListSource
from tests.runtime.test_loader import SIZES, Batch, expected_rows, rows_of, rows_of_ranks, take
from tokshard.errors import PlanError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

A, B = ListSource([9, 4, 30, 1, 12, 3]), ListSource([5, 17, 2, 7], first_token=1000)
A_TOKENS, B_TOKENS = 59, 31


def plan_of(**options: Any) -> StreamPlan:
    return StreamPlan({"a": A, "b": B}, **{"weights": {"a": 0.5, "b": 0.5}, "seed": 4, **SIZES, **options})


def to_the_end(loader: Any, match: str = "the pass ends") -> list[Batch]:
    with pytest.warns(UserWarning, match=match):
        return list(loader)


def samples_of(rows: list[dict[str, Any]], corpus: int) -> int:
    return sum(row["corpus_index"] == corpus for row in rows)


def most_samples(epochs: float, num_tokens: int) -> int:
    """Samples that so many passes over a corpus have, the last one begun included."""
    return math.ceil(Fraction(epochs) * num_tokens / SIZES["seq_len"])


def corpora_of(plan: StreamPlan, count: int) -> list[int]:
    weights = [(segment.start, list(segment.weights)) for segment in plan.cursor().segments]
    return naive.mixture(weights, count)


@given(epochs=st.floats(0.3, 4), batch=st.integers(1, 9), weight=st.floats(0.1, 0.9), change=st.integers(1, 40))
def test_the_pass_ends_before_the_first_step_that_would_read_more_of_a_corpus(
    epochs: float, batch: int, weight: float, change: int
) -> None:
    plan = plan_of(
        weights={"a": weight, "b": 1 - weight},
        schedule=[(change, {"a": 1 - weight, "b": weight})],
        max_epochs={"b": epochs},
    )
    loader = StreamingLoader(plan, global_batch_size=batch)
    rows = rows_of(to_the_end(loader))
    loader.close()
    most = most_samples(epochs, B_TOKENS)
    assert rows == expected_rows(plan, range(len(rows)))
    assert samples_of(rows, 1) <= most
    assert corpora_of(plan, len(rows) + batch).count(1) > most
    assert len(rows) % batch == 0


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_pass_ends_at_the_same_step_on_every_rank(ranks: int) -> None:
    plan = plan_of(max_epochs=2.5)
    per_rank = []
    for rank in range(ranks):
        loader = StreamingLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=ranks)
        per_rank.append(to_the_end(loader))
        assert list(loader_again(loader)) == []
        loader.close()
    rows = rows_of_ranks(per_rank)
    # b is read half of the time: 13 samples of it are there after 26 or so
    assert samples_of(rows, 1) <= most_samples(2.5, B_TOKENS) == 13
    assert rows == expected_rows(plan, range(24))


def loader_again(loader: StreamingLoader) -> Iterator[Batch]:
    """What a loader at its end gives when it is iterated once more."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield from loader


def test_the_warning_names_the_corpus_that_is_used_up_and_the_line_that_reads() -> None:
    loader = StreamingLoader(plan_of(max_epochs={"b": 1}), global_batch_size=2)
    with pytest.warns(UserWarning, match="would read corpus 'b' more than max_epochs times") as caught:
        list(loader)
    assert caught[0].filename == __file__
    loader.close()


def test_a_state_saved_at_the_end_goes_on_without_the_corpus_that_is_used_up() -> None:
    plan = plan_of(max_epochs={"b": 1})
    loader = StreamingLoader(plan, global_batch_size=2)
    end = len(rows_of(to_the_end(loader)))
    state = loader.state_dict()
    loader.close()
    resumed = StreamingLoader(plan, global_batch_size=2)
    resumed.load_state_dict(state)
    assert to_the_end(resumed) == []
    resumed.set_weights({"a": 1, "b": 0})
    rows = rows_of(take(resumed, 5))
    assert rows == expected_rows(plan_of(schedule=[(end, {"a": 1, "b": 0})]), range(end, end + 10))
    resumed.close()


def test_a_pass_goes_on_without_a_corpus_that_was_read_more_than_a_smaller_limit_allows() -> None:
    loader = StreamingLoader(plan_of(), global_batch_size=2)
    take(loader, 20)
    state = loader.state_dict()
    loader.close()
    resumed = StreamingLoader(plan_of(max_epochs={"b": 1}), global_batch_size=2)
    resumed.load_state_dict(state)
    assert to_the_end(resumed) == []
    resumed.set_weights({"a": 1, "b": 0})
    assert samples_of(rows_of(take(resumed, 5)), 0) == 10
    resumed.close()


def test_skipped_samples_count_and_what_is_read_later_is_the_limit() -> None:
    loader = StreamingLoader(plan_of(max_epochs={"b": 1}), global_batch_size=2)
    loader.skip(100)
    assert to_the_end(loader) == []
    loader.set_weights({"a": 1, "b": 0})
    assert len(take(loader, 3)) == 3
    loader.close()


def test_other_weights_move_the_end_of_the_pass() -> None:
    lengths = []
    for weight in (0.1, 0.5):
        loader = StreamingLoader(plan_of(max_epochs={"b": 1}), global_batch_size=1)
        take(loader, 4)
        loader.set_weights({"a": 1 - weight, "b": weight})
        lengths.append(len(to_the_end(loader)))
        loader.close()
    assert lengths[0] > 3 * lengths[1]


def test_a_limit_in_a_scheduled_future_is_found() -> None:
    plan = plan_of(weights={"a": 1, "b": 0}, schedule=[(50, {"a": 0.5, "b": 0.5})], max_epochs={"b": 1})
    (limit,) = used_up(plan, plan.cursor())
    corpora = corpora_of(plan, limit.sample + 1)
    assert (limit.corpus, corpora.count(1), corpora[-1]) == ("b", most_samples(1, B_TOKENS) + 1, 1)


def test_a_corpus_that_is_never_read_has_no_limit() -> None:
    plan = plan_of(weights={"a": 1, "b": 0}, max_epochs={"b": 1})
    assert used_up(plan, plan.cursor()) == []


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("batch", [1, 4, 7])
def test_a_finite_pass_of_as_many_epochs_as_are_allowed_is_read_to_its_end_without_a_warning(
    epochs: int, batch: int
) -> None:
    plan = StreamPlan(A, epochs=epochs, max_epochs=epochs, seed=4, **SIZES)
    loader = StreamingLoader(plan, global_batch_size=batch)
    real = [row for row in rows_of(list(loader)) if row["sample_index"] >= 0]
    loader.close()
    assert real == expected_rows(plan, range(plan.num_samples or 0))


def test_a_finite_pass_of_more_epochs_than_are_allowed_ends_early() -> None:
    plan = StreamPlan(A, epochs=3, max_epochs=1.5, seed=4, **SIZES)
    loader = StreamingLoader(plan, global_batch_size=1)
    rows = rows_of(to_the_end(loader))
    assert rows == expected_rows(plan, range(most_samples(1.5, A_TOKENS)))
    assert to_the_end(loader) == []
    loader.close()
    dataset = StreamDataset(plan, global_batch_size=1)
    assert rows_of(to_the_end(dataset)) == rows
    assert to_the_end(dataset) == []


# a job that is only warned


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert {warning.filename for warning in caught} <= {__file__, take.__code__.co_filename}
    return [str(warning.message) for warning in caught]


@given(epochs=st.floats(0.3, 8), batch=st.integers(1, 9))
def test_a_job_that_only_warns_reads_on_and_says_once_of_each_corpus_that_it_is_used_up(
    epochs: float, batch: int
) -> None:
    plan = plan_of(max_epochs=epochs, on_max_epochs="warn")
    loader = StreamingLoader(plan, global_batch_size=batch)
    batches: list[Batch] = []
    messages = warned(lambda: batches.extend(take(loader, 20)))
    loader.close()
    corpora = corpora_of(plan, 20 * batch)
    assert [int(corpus) for batch in batches for corpus in batch["corpus_index"]] == corpora
    for number, (name, tokens) in enumerate((("a", A_TOKENS), ("b", B_TOKENS))):
        places = [sample for sample, corpus in enumerate(corpora) if corpus == number]
        most = most_samples(epochs, tokens)
        mine = [message for message in messages if f"corpus '{name}' is used up" in message]
        assert len(mine) == (len(places) > most)
        if mine:
            assert f"used up at sample {places[most]}:" in mine[0]


def test_a_job_is_warned_with_the_step_that_reads_more_of_a_corpus_and_not_before() -> None:
    plan = plan_of(max_epochs={"b": 1}, on_max_epochs="warn")
    (limit,) = used_up(plan, plan.cursor())
    loader = StreamingLoader(plan, global_batch_size=1)
    assert warned(lambda: take(loader, limit.sample)) == []
    assert len(warned(lambda: take(loader, 1))) == 1
    loader.close()


def test_a_corpus_is_told_once_however_often_weights_change_after_it_was_used_up() -> None:
    loader = StreamingLoader(plan_of(max_epochs={"b": 1}, on_max_epochs="warn"), global_batch_size=2)

    def run() -> None:
        for step in range(60):
            take(loader, 1)
            loader.set_weights({"a": 1 + step % 3, "b": 1})

    assert len(warned(run)) == 1
    loader.close()


def test_a_resumed_job_is_told_again_when_it_reads_more_of_a_corpus_that_is_used_up() -> None:
    plan = plan_of(max_epochs={"b": 1}, on_max_epochs="warn")
    loader = StreamingLoader(plan, global_batch_size=2)
    assert len(warned(lambda: take(loader, 20))) == 1
    resumed = StreamingLoader(plan, global_batch_size=2)
    resumed.load_state_dict(loader.state_dict())
    assert len(warned(lambda: take(resumed, 20))) == 1
    loader.close()
    resumed.close()


# other loaders


def test_a_dataset_ends_and_warns_as_the_loader_does() -> None:
    plan = plan_of(max_epochs={"b": 1.5})
    loader = StreamingLoader(plan, global_batch_size=3)
    rows = rows_of(to_the_end(loader))
    loader.close()
    dataset = StreamDataset(plan, global_batch_size=3)
    assert rows_of(to_the_end(dataset, "corpus 'b'")) == rows
    assert to_the_end(dataset) == []
    told = StreamDataset(plan_of(max_epochs={"b": 1.5}, on_max_epochs="warn"), global_batch_size=3)
    batches = iter(told)
    assert len(warned(lambda: [next(batches) for _ in range(30)])) == 1


def worker_rows(plan: StreamPlan, states: list[Any], workers: int, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    """What DataLoader workers give in turn, made in this process."""
    found: list[list[Batch]] = []
    for worker in range(workers):
        place = torch.utils.data._utils.worker.WorkerInfo(id=worker, num_workers=workers, seed=0, dataset=None)
        monkeypatch.setattr("tokshard.runtime.tensors.get_worker_info", lambda place=place: place)
        dataset = StreamDataset(plan, global_batch_size=3)
        if states:
            dataset.load_state_dict(states[worker])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            found.append(list(dataset))
    steps = max(map(len, found))
    return [part[step] for step in range(steps) for part in found if step < len(part)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("epochs", [0.5, 1.5, 4])
def test_dataloader_workers_all_end_at_the_step_of_the_loader(
    workers: int, epochs: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_of(max_epochs={"b": epochs})
    loader = StreamingLoader(plan, global_batch_size=3)
    expected = rows_of(to_the_end(loader))
    assert rows_of(worker_rows(plan, [], workers, monkeypatch)) == expected
    # and from a state of the loader
    first = StreamingLoader(plan, global_batch_size=3)
    take(first, 1)
    state = first.state_dict()
    assert rows_of(worker_rows(plan, [state] * workers, workers, monkeypatch)) == expected[3:]
    loader.close()
    first.close()


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_end_where_a_thread_does(workers: int) -> None:
    plan = plan_of(max_epochs=2)
    expected = rows_of(to_the_end(StreamingLoader(plan, global_batch_size=2)))
    loader = StreamingLoader(plan, global_batch_size=2, num_workers=workers)
    assert rows_of(to_the_end(loader)) == expected
    loader.set_weights({"a": 1, "b": 0})
    end = len(expected)
    assert rows_of(take(loader, 2)) == expected_rows(plan, range(end, end + 4), loader.cursor)
    loader.close()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"max_epochs": -1.0}, "max_epochs is -1.0"),
        ({"max_epochs": {"a": float("nan")}}, "max_epochs is {'a': nan}"),
        ({"max_epochs": {"x": 1}}, "max_epochs is for x; the plan has a, b"),
        ({"max_epochs": 1, "on_max_epochs": "repeat"}, "on_max_epochs is 'repeat'"),
    ],
)
def test_limits_that_say_nothing_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(**options)
    assert problem in caught.value.problem
    assert caught.value.hint


class Workers:
    """DataLoader workers that make their steps in turn, in this process.

    Args:
        states: of each worker, to resume from.
    """

    def __init__(self, plan: StreamPlan, workers: int, states: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
        self.datasets = [StreamDataset(plan, global_batch_size=1) for _ in range(workers)]
        for dataset, state in zip(self.datasets, states, strict=False):
            dataset.load_state_dict(state)
        self.loops = [iter(dataset) for dataset in self.datasets]
        self.messages: list[str] = []
        self._patch = monkeypatch

    def make(self, step: int) -> list[int]:
        """The sample of a step, if there is one."""
        worker = step % len(self.loops)
        place: Any = torch.utils.data._utils.worker.WorkerInfo(
            id=worker, num_workers=len(self.loops), seed=0, dataset=self.datasets[worker]
        )
        self._patch.setattr("tokshard.runtime.tensors.get_worker_info", lambda: place)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            batch = next(self.loops[worker], None)
        self.messages += [text for warning in caught if "is used up" in (text := str(warning.message))]
        return [] if batch is None else batch["sample_index"].tolist()

    def states(self) -> list[Any]:
        return [dataset.state_dict() for dataset in self.datasets]


@pytest.mark.parametrize("workers", [2, 3])
def test_dataloader_workers_that_resume_around_the_end_of_a_corpus_stop_and_warn_where_one_alone_does(
    workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopping, telling = (plan_of(max_epochs={"b": 1}, on_max_epochs=what) for what in ("stop", "warn"))
    (limit,) = used_up(stopping, stopping.cursor())
    for plan in (stopping, telling):
        first = Workers(plan, workers, [], monkeypatch)
        for step in range(limit.sample + 8):
            first.make(step)
            second = Workers(plan, workers, first.states(), monkeypatch)
            found = [sample for later in range(step + 1, limit.sample + 30) for sample in second.make(later)]
            if plan is stopping:
                assert found == list(range(step + 1, limit.sample))
                continue
            assert found == list(range(step + 1, limit.sample + 30))
            told = [f"sample {limit.sample}:" in message for message in second.messages]
            assert sum(told) == (step < limit.sample)
            assert told, "a caller who reads on must be told"
        assert len(first.messages) == (plan is telling)
