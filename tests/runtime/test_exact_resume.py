"""`tokshard.testing`: what resumes exactly passes, and what does not is named."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from tests.runtime.loaders import one_corpus, two_corpora
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, Sample, SampleRandom, StreamPlan
from tokshard.testing import Job, assert_exact_resume

UNEVEN = [Job(2, 5, 2), Job(0, 9, 4), Job(3, 3, 2), Job(1, 1)]


def test_jobs_that_are_given_are_those_that_are_tried() -> None:
    made, closed = [], []

    class Closed(NumpyLoader):
        def close(self) -> None:
            closed.append(self)
            super().close()

    def make(plan: StreamPlan, **options: Any) -> NumpyLoader:
        made.append(tuple(options.values()))
        return Closed(plan, uneven="pad", **options)

    assert_exact_resume(two_corpora(), make, jobs=UNEVEN)
    assert len({*map(id, closed)}) == len(made)
    undisturbed, *of_jobs = made
    assert undisturbed == (4, 0, 1)
    assert of_jobs == [(job.global_batch_size, rank, job.dp_world_size) for job in UNEVEN for rank in range(job[2])]


class Broken(NumpyLoader):
    """Does one thing wrong, `fault`, in what a loader promises."""

    fault = ""

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(super().__iter__()):
            if self.fault == "ends early" and number == 1 and self._was_loaded:
                return
            if self.fault == "repeats" and number and self._was_loaded:
                batch["sample_index"] -= self._size
            yield self._wrong(batch) if self._was_loaded else batch

    def __init__(self, plan: StreamPlan, **options: Any) -> None:
        super().__init__(plan, **options)
        self._was_loaded, self._rank, self._size = False, options["dp_rank"], options["global_batch_size"]

    def _wrong(self, batch: Any) -> Any:
        if self.fault == "other labels":
            batch["labels"][-1, 2] = 7
        if self.fault == "no positions":
            del batch["position_ids"]
        if self.fault == "short rows":
            batch["input_ids"] = batch["input_ids"][:, 1:]
        if self.fault == "pads" and self._rank:
            batch["sample_index"][0] = -1
        return batch

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.fault == "no JSON":
            return {"state": np.int64(3)}
        return {**state, "rank": self._rank} if self.fault == "ranks" else state

    def load_state_dict(self, state: Any, /, **choices: Any) -> None:
        self._was_loaded = True
        if self.fault != "forgets":
            super().load_state_dict(state, **choices)


SINCE = "(resumed at sample 8, 6 samples per step)"
RESUMED = f"step 2 {SINCE}"
FAULTS = {
    "forgets": f"{RESUMED}, rank 0 of 2, row 0: sample * is not of this step, or was read before",
    "repeats": f"step 3 {SINCE}, rank 0 of 2, row 0: sample * is not of this step, or was read before",
    "ends early": f"step 3 {SINCE}, rank 0 of 2: no batch, but sample 14 is still to come",
    "other labels": f"{RESUMED}, rank 0 of 2, row 2: sample *: labels[2] is 7, without a stop *",
    "no positions": f"{RESUMED}, rank 0 of 2, row 0: sample * has ['corpus_index', 'input_ids', 'labels'], without a*",
    "short rows": f"{RESUMED}, rank 0 of 2, row 0: sample *: input_ids has the shape (5,), without a stop (6,)",
    "pads": f"{RESUMED}: no rank has sample *",
    "no JSON": "the state after step 1 is not plain JSON: Object of type int64 is not JSON serializable",
    "ranks": 'the state of rank 1 after step 3 is {*"rank": 1}, that of rank 0 {*"rank": 0}',
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_a_loader_does_wrong_after_a_stop_is_named(fault: str) -> None:
    class Faulty(Broken):
        pass

    Faulty.fault = fault
    with pytest.raises(AssertionError) as caught:
        assert_exact_resume(two_corpora(), Faulty, jobs=[Job(2, 4), Job(2, 6, 2), Job(1, 2)])
    assert re.fullmatch(".*".join(map(re.escape, FAULTS[fault].split("*"))), str(caught.value)), str(caught.value)


def test_a_transform_that_depends_on_what_was_read_before_is_found() -> None:
    seen = []

    def number(sample: Sample, random: SampleRandom) -> Sample:
        seen.append(sample)
        return replace(sample, tokens=np.full_like(sample.tokens, len(seen)))

    with pytest.raises(AssertionError, match=r"input_ids\[0\] is \d+, without a stop \d+"):
        assert_exact_resume(two_corpora(transforms=[number]))


def test_a_pass_may_end_in_any_of_the_jobs() -> None:
    plan = StreamPlan(ListSource([5, 17, 40] * 3), seq_len=8, epochs=1, allow_small_blocks=True)
    assert_exact_resume(plan, partial(NumpyLoader, uneven="pad"))


@pytest.mark.parametrize(
    ("first", "message"),
    [([0, 1, 1], "sample 1 is read twice without a stop"), ([0, 2], "sample 1 is not read without a stop")],
)
def test_a_fault_without_a_stop_is_named(first: list[int], message: str) -> None:
    class Faulty(NumpyLoader):
        def __iter__(self) -> Iterator[Any]:
            batches = list(super().__iter__())
            yield from (batches[number] for number in [*first, *range(first[-1] + 1, len(batches))])

    plan = StreamPlan(ListSource([5, 17, 40] * 3), seq_len=8, epochs=1, allow_small_blocks=True)

    def make(plan: StreamPlan, **options: Any) -> NumpyLoader:
        return Faulty(plan, **options | {"global_batch_size": 1})

    with pytest.raises(AssertionError, match=message):
        assert_exact_resume(plan, make)


@pytest.mark.parametrize("job", [Job(40, 1), Job(5, 5)])
def test_a_batch_after_the_end_of_a_pass_is_named(job: Job) -> None:
    class Endless(NumpyLoader):
        def __iter__(self) -> Iterator[Any]:
            batches = list(super().__iter__())
            yield from batches + batches[-1:] * (len(made) > 1)

    def make(plan: StreamPlan, **options: Any) -> NumpyLoader:
        made.append(Endless(plan, uneven="pad", **options))
        return made[-1]

    made: list[NumpyLoader] = []
    plan = StreamPlan(ListSource([5, 17, 40] * 3), seq_len=8, epochs=1, allow_small_blocks=True)
    with pytest.raises(AssertionError, match=r"the last of the pass, rank 0 of 1 has another batch, with sample \d+"):
        assert_exact_resume(plan, make, jobs=[job])


def test_a_loader_without_a_batch_is_no_test() -> None:
    def make(plan: StreamPlan, **options: Any) -> NumpyLoader:
        loader = NumpyLoader(plan, **options)
        loader.skip(10**6)
        return loader

    with pytest.warns(UserWarning, match="this loop is empty"), pytest.raises(AssertionError, match="has no batch"):
        assert_exact_resume(one_corpus(epochs=1), make)
