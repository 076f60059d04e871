"""The end of a pass: before the first sample that would read a corpus more often than allowed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokshard.errors import PlanMismatchError
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.plan import StreamPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """The end of a pass. Rows of its last step from there on are padding.

    Args:
        sample: the first global sample that is not read; None: the pass is endless.
        corpus: the corpus that `max_epochs` ends; None: `epochs` does.
    """

    sample: int | None
    corpus: str | None = None

    def has_step(self, start: int) -> bool:
        """Whether a step begins at a sample."""
        return self.sample is None or start < self.sample

    def end_of_step(self, start: int, global_batch_size: int) -> int:
        """The sample after the last one of a step."""
        end = start + global_batch_size
        return end if self.sample is None else min(end, self.sample)


def used_up(plan: StreamPlan, cursor: Cursor) -> list[tuple[int, str]]:
    """The samples at which corpora have been read `max_epochs` times, under the weights of a cursor.

    Returns:
        The next global sample that would read more of a corpus, and the corpus, by ascending sample.
    """
    limited = [number for number, epochs in enumerate(plan.max_epochs) if math.isfinite(epochs)]
    if not limited:
        return []
    mixture, corpora_here = plan.mixture(cursor), plan.at(cursor).corpora
    allowed = np.stack([corpora_here[number].num_samples(plan.max_epochs[number]) for number in limited])
    beyond = np.maximum(allowed, mixture.balance_before(cursor.sample).counts[limited])
    corpora, streams = np.repeat(limited, plan.num_streams), np.tile(np.arange(plan.num_streams), len(limited))
    samples = mixture.samples_of(corpora, beyond.ravel(), streams).reshape(beyond.shape)
    return sorted(
        (int(of_corpus[of_corpus >= 0].min()), plan.names[number])
        for number, of_corpus in zip(limited, samples, strict=True)
        if (of_corpus >= 0).any()
    )


def stop_of(plan: StreamPlan, cursor: Cursor) -> Stop:
    """The end of a pass under the weights of a cursor."""
    num_samples = plan.at(cursor).num_samples
    for sample, corpus in used_up(plan, cursor) if plan.on_max_epochs == "stop" else ():
        if num_samples is None or sample < num_samples:
            return Stop(sample=sample, corpus=corpus)
    return Stop(sample=num_samples)


def check_pass(plan: StreamPlan, cursor: Cursor) -> None:
    """Refuse a cursor at which the samples of a finite pass would be miscounted.

    Raises:
        PlanMismatchError: other corpora were read before, so samples of the run are not samples of the pass.
    """
    if plan.num_samples is None:
        return
    (count,) = plan.mixture(cursor).counts_before(cursor.sample)
    if count != cursor.sample:
        raise PlanMismatchError(
            f"the plan is a finite pass of {plan.num_samples} samples, but of the {cursor.sample} samples of the "
            f"saved cursor only {count} are from corpus {plan.names[0]!r}",
            hint="leave epochs out and give max_epochs, or start a new run without the loader's state",
        )


def warn_of_use(found: Sequence[tuple[int, str]], start: int, stop: int, warned: set[str]) -> None:
    """Warn once of each corpus that is used up among the samples ``[start, stop)``."""
    for sample, corpus in found:
        if start <= sample < stop and corpus not in warned:
            warned.add(corpus)
            warnings.warn(
                f"corpus {corpus!r} is used up at sample {sample}: it was read max_epochs times, and is read again; "
                "a weight of 0 leaves it out",
                stacklevel=4,
            )


def warn_of_stop(stop: Stop, sample: int) -> None:
    """Warn that a pass ends because a corpus is used up."""
    warnings.warn(
        f"the pass ends before sample {sample}, which would read corpus {stop.corpus!r} more than max_epochs "
        "times; a weight of 0 leaves it out, on_max_epochs='warn' reads on",
        stacklevel=4,
    )
