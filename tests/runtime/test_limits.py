"""`max_epochs`: a corpus is read so often and no more, or the job says that it is."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime import page_model
from tests.runtime.loaders import SIZES, Batch, dataloader, expected_rows, rows_of, rows_of_ranks, take
from tests.runtime.sources import ListSource
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


def real(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that are not padding."""
    return [row for row in rows if row["sample_index"] >= 0]


def most_samples(epochs: float, num_tokens: int) -> int:
    """Samples that so many passes over a corpus have, the last one begun included."""
    return math.ceil(Fraction(epochs) * num_tokens / SIZES["seq_len"])


def corpora_of(plan: StreamPlan, count: int) -> list[int]:
    segments = [(segment.start, segment.weights) for segment in plan.cursor().segments]
    model = page_model.Mixture.of_start(plan.seed, 1, segments)
    return [model.located(sample)[0] for sample in range(count)]


@given(epochs=st.floats(0.3, 4), batch=st.integers(1, 9), weight=st.floats(0.1, 0.9), change=st.integers(1, 40))
def test_the_pass_ends_before_the_first_sample_that_would_read_more_of_a_corpus(
    epochs: float, batch: int, weight: float, change: int
) -> None:
    plan = plan_of(
        weights={"a": weight, "b": 1 - weight},
        schedule=[(change, {"a": 1 - weight, "b": weight})],
        max_epochs={"b": epochs},
    )
    loader = StreamingLoader(plan, global_batch_size=batch)
    padded = rows_of(to_the_end(loader))
    loader.close()
    rows = real(padded)
    assert len(padded) == -(-len(rows) // batch) * batch
    assert rows == expected_rows(plan, range(len(rows)))
    corpora = corpora_of(plan, len(rows) + 1)
    assert corpora.count(1) == samples_of(rows, 1) + 1 == most_samples(epochs, B_TOKENS) + 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_pass_ends_at_the_same_step_on_every_rank(ranks: int) -> None:
    plan = plan_of(max_epochs=2.5)
    per_rank = []
    for rank in range(ranks):
        loader = StreamingLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=ranks)
        per_rank.append(to_the_end(loader))
        assert list(loader_again(loader)) == []
        loader.close()
    rows = real(rows_of_ranks(per_rank))
    assert samples_of(rows, 1) == most_samples(2.5, B_TOKENS) == 13
    assert rows == expected_rows(plan, range(len(rows)))
    assert len(rows) in (26, 27)  # b is read half of the time


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
    end = len(real(rows_of(to_the_end(loader))))
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
    assert samples_of(rows_of(to_the_end(resumed)), 1) == 0
    resumed.set_weights({"a": 1, "b": 0})
    assert samples_of(rows_of(take(resumed, 5)), 0) == 10
    resumed.close()


def test_skipped_samples_count_and_what_is_read_later_is_the_limit() -> None:
    loader = StreamingLoader(plan_of(max_epochs={"b": 1}), global_batch_size=2)
    loader.skip(100)
    assert samples_of(rows_of(to_the_end(loader)), 1) == 0
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
    ((limit, corpus),) = used_up(plan, plan.cursor())
    corpora = corpora_of(plan, limit + 1)
    assert (corpus, corpora.count(1), corpora[-1]) == ("b", most_samples(1, B_TOKENS) + 1, 1)


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
    rows = real(rows_of(list(loader)))
    loader.close()
    assert rows == expected_rows(plan, range(plan.num_samples or 0))


def test_a_finite_pass_of_more_epochs_than_are_allowed_ends_early() -> None:
    plan = StreamPlan(A, epochs=3, max_epochs=1.5, seed=4, **SIZES)
    loader = StreamingLoader(plan, global_batch_size=1)
    rows = rows_of(to_the_end(loader))
    assert rows == expected_rows(plan, range(most_samples(1.5, A_TOKENS)))
    assert to_the_end(loader) == []
    loader.close()
    dataset = StreamDataset(plan, global_batch_size=1)
    assert rows_of(to_the_end(dataloader(dataset))) == rows
    assert to_the_end(dataloader(dataset)) == []


# a job that is only warned


def warned(action: Callable[[], Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        action()
    assert {warning.filename for warning in caught} <= {__file__, take.__code__.co_filename}
    return [str(warning.message) for warning in caught]


@settings(max_examples=examples(16))
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
    ((limit, _),) = used_up(plan, plan.cursor())
    loader = StreamingLoader(plan, global_batch_size=1)
    assert warned(lambda: take(loader, limit)) == []
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
    assert rows_of(to_the_end(dataloader(dataset), "corpus 'b'")) == rows
    assert to_the_end(dataloader(dataset)) == []
    told = StreamDataset(plan_of(max_epochs={"b": 1.5}, on_max_epochs="warn"), global_batch_size=3)
    with pytest.warns(UserWarning, match="'b' is used up") as caught:
        assert len(take(dataloader(told), 30)) == 30
    assert len(caught) == 1


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"max_epochs": 0}, "max_epochs is 0"),
        ({"max_epochs": -1.0}, "max_epochs is -1.0"),
        ({"max_epochs": {"a": float("nan")}}, "max_epochs is {'a': nan}"),
        ({"max_epochs": {"x": 1}}, "max_epochs is {'x': 1}; the plan has a, b"),
        ({"max_epochs": 1, "on_max_epochs": "repeat"}, "on_max_epochs is 'repeat'"),
    ],
)
def test_limits_that_say_nothing_are_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(**options)
    assert problem in caught.value.problem
    assert caught.value.hint


def test_a_sampler_that_resumes_around_the_end_of_a_corpus_stops_and_warns_where_one_alone_does() -> None:
    stopping, telling = (plan_of(max_epochs={"b": 1}, on_max_epochs=what) for what in ("stop", "warn"))
    ((limit, _),) = used_up(stopping, stopping.cursor())
    for plan in (stopping, telling):
        first = iter(StreamDataset(plan, global_batch_size=1).sampler)
        for step in range(limit + 8):
            second = StreamDataset(plan, global_batch_size=1).sampler
            second.load_state_dict(first.state_dict())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = [each.cursor.sample for each, _ in zip(iter(second), range(limit + 30), strict=False)]
            told = [str(warning.message) for warning in caught]
            if plan is stopping:
                assert found == list(range(step, limit))
                assert any("the pass ends before" in text for text in told)
            else:
                assert found == list(range(step, step + limit + 30))
                assert told, "a caller who reads on must be told"
                assert (f"sample {limit}:" in told[0]) == (step <= limit)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                next(first, None)
