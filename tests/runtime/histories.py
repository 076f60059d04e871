"""Jobs in the code and in the models of ORDER.md and STATE.md: the same happens to both, so both read the same.

Tests run this machine over `HELD`, corpora in memory, soak trials over the same on disk, with a seed and more steps.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from tests.runtime.loaders import targets_in
from tests.runtime.modelled import alone, documents_of_source, listed, model_of, stirred
from tests.runtime.sources import ListSource, SpannedSource
from tests.runtime.transforms import stir
from tests.spec.order import Documents, Plan, Run
from tests.spec.state import RefusedError, resumed, saved
from tokshard.errors import PlanMismatchError
from tokshard.runtime import NumpyLoader, StreamPlan

SIZES = {"block_tokens": 16, "window_blocks": 2}
SIZES_OF_WHOLE = {"block_tokens": 1024, "window_blocks": 1}
WEIGHTS = (0.0, 1e-30, 0.1, 0.25, 1.0, 3.0)
SEQ_LENS, SEQ_LENS_OF_WHOLE = (1, 3, 4, 8, 20), (1, 2, 4, 8)
Corpus = tuple[str, float, int]
"""A corpus of a plan: what is held under this name, the part that is taken, and the first epoch."""

CHOICES = {"weights": ("cursor", "plan"), "corpora": ("plan",), "seq_len": ("plan",)}
"""What a resume can be told, besides "same"."""


@dataclass(frozen=True)
class Held:
    """A corpus in the code, as a plan takes it, and in the model."""

    source: Any
    documents: Documents


SPANS = [[0, 0, 1, 1, 0.1, 0], [0], [0, *[1] * 25], [0] * 9, [0, 3]] * 12
SOURCES = {
    "a": ListSource([7, 30, 11, 2] * 9),
    "b": ListSource([5, 17, 40, 1, 1] * 7, first_token=1_001),
    "c": ListSource([3], first_token=2_001),
    "d": ListSource([60, 2] * 12, first_token=3_001),
    "longer": ListSource([9, 30, 1, 5, 12, 2, 1] * 60, first_token=4_001),
    "halves": ListSource([5, 4, 5, 5] * 70, first_token=8_001),  # in rows of 8, more chunks above half a row than rows
    "spans": SpannedSource(SPANS, first_token=10_001),
    "one weight": SpannedSource([[float(weight > 0) for weight in each] for each in SPANS], first_token=11_001),
}
HELD = {name: Held(source, documents_of_source(source)) for name, source in SOURCES.items()}


@dataclass(frozen=True, kw_only=True)
class Planned:
    """What may differ between two plans of one job.

    Args:
        corpora: by their names in the plan.
        weights: of each corpus; `changes` are weights from global samples on.
        ends: `max_epochs` of every corpus, or `epochs`, or neither.
    """

    corpora: Mapping[str, Corpus]
    seq_len: int
    weights: Sequence[float]
    changes: Sequence[tuple[int, Sequence[float]]]
    ends: Mapping[str, Any]

    @property
    def names(self) -> list[str]:
        return list(self.corpora)


class Histories(RuleBasedStateMachine):
    """A job that reads, changes, stops and goes on, in the code on all of its ranks, and in the model.

    Attributes:
        held: the corpora.
        all_packs: how their rows are filled, in the jobs of a trial.
    """

    held: ClassVar[Mapping[str, Held]] = HELD
    all_packs: ClassVar[Sequence[str]] = ("cut", "whole")

    states = Bundle("states")

    @initialize(data=st.data(), seed=st.integers(0, 2**64 - 1), num_streams=st.integers(1, 3))
    def begin(self, data: st.DataObject, seed: int, num_streams: int) -> None:
        warnings.simplefilter("ignore")  # passes end
        self.folder = tempfile.TemporaryDirectory()
        self.seed, self.num_streams = seed, num_streams
        packs = data.draw(st.sampled_from([["cut"], self.all_packs]))
        self.packs = {name: data.draw(st.sampled_from(packs)) for name in self.held}
        is_whole = "whole" in self.packs.values()
        self.seq_lens, self.sizes = (SEQ_LENS_OF_WHOLE, SIZES_OF_WHOLE) if is_whole else (SEQ_LENS, SIZES)
        self.is_stirred = data.draw(st.sampled_from([False, False, True]))
        self.rows: dict[int, Any] = {}
        self.plan, self.model = self.plans(self.drawn(data))
        self.run = Run(self.model, self.limits())
        self.divide(data)

    def teardown(self) -> None:
        self.folder.cleanup()

    # plans, in both

    def drawn(self, data: st.DataObject, *, corpora: Mapping[str, Corpus] | None = None, seq_len: int = 0) -> Planned:
        """A plan of the job; what is not given is drawn."""
        if corpora is None:
            entries = st.tuples(st.sampled_from(sorted(self.held)), st.sampled_from([0, 0, 0, 1]))
            chosen = data.draw(st.lists(entries, min_size=1, max_size=3, unique=True))
            corpora = {f"{name} {epoch}": (name, self.a_take(data, name), epoch) for name, epoch in chosen}
        some_weights = self.some_weights(len(corpora))
        ends: list[dict[str, Any]] = [{}, {}]
        if self.num_streams == 1:
            ends += [{"max_epochs": 0.4}, {"max_epochs": 1.0}]
            ends += [{"epochs": 1}, {"epochs": 2}] if len(corpora) == 1 else []
        return Planned(
            corpora=corpora,
            seq_len=seq_len or data.draw(st.sampled_from(self.seq_lens)),
            weights=data.draw(some_weights),
            changes=[(start, data.draw(some_weights)) for start in data.draw(starts)],
            ends=data.draw(st.sampled_from(ends)),
        )

    def a_take(self, data: st.DataObject, name: str) -> float:
        is_long = self.held[name].documents.num_tokens > self.sizes["block_tokens"]
        return data.draw(st.sampled_from([1.0, 1.0, 0.7] if is_long else [1.0]))

    def some_weights(self, number: int) -> st.SearchStrategy[list[float]]:
        return st.lists(st.sampled_from(WEIGHTS), min_size=number, max_size=number).filter(any)

    def plans(self, planned: Planned) -> tuple[StreamPlan, Plan]:
        self.planned, names, corpora = planned, planned.names, planned.corpora
        options: dict[str, Any] = {
            "seq_len": planned.seq_len,
            "seed": self.seed,
            "num_streams": self.num_streams,
            "weights": dict(zip(names, planned.weights, strict=True)),
            "schedule": [(start, dict(zip(names, values, strict=True))) for start, values in planned.changes],
            "take": {name: take for name, (_, take, _) in corpora.items()},
            "start_epoch": {name: epoch for name, (_, _, epoch) in corpora.items()},
            "pack": {name: self.packs[held] for name, (held, _, _) in corpora.items()},
            "allow_small_blocks": True,
            **self.sizes,
            **planned.ends,
        }
        held = {name: self.held[of] for name, (of, _, _) in corpora.items()}
        plan = StreamPlan(
            {name: one.source for name, one in held.items()}, transforms=[stir] * self.is_stirred, **options
        )
        return plan, model_of(
            {name: one.documents for name, one in held.items()}, transforms=[stirred] * self.is_stirred, **options
        )

    def limits(self) -> list[float | None]:
        return [self.planned.ends.get("max_epochs")] * len(self.planned.names)

    def divide(self, data: st.DataObject) -> None:
        """Loaders of some ranks, for some batch size."""
        ranks = data.draw(st.integers(1, 3))
        self.size = self.num_streams * data.draw(st.integers(1, 4))
        prefetch = data.draw(st.integers(0, 5))
        self.loaders = [
            NumpyLoader(
                self.plan.copy(),  # as in another process
                global_batch_size=self.size,
                dp_rank=rank,
                dp_world_size=ranks,
                uneven="pad",
                prefetch_factor=prefetch,
            )
            for rank in range(ranks)
        ]
        self.loops: list[Any] = []
        self.was_moved = False

    # what happens

    @rule(steps=st.integers(1, 4), is_new_loop=st.booleans())
    def read(self, steps: int, is_new_loop: bool) -> None:
        if is_new_loop or not self.loops:
            self.loops = [iter(loader) for loader in self.loaders]
            if self.is_over() and self.planned.ends.get("epochs") and not self.was_moved:
                self.run.begin()
                self.rows.clear()
        for _ in range(steps):
            start, run, ranks = self.run.sample, self.run, len(self.loops)
            step: list[Any] = []
            for rank in range(ranks):
                run.sample = start
                step.append(run.step(self.size, rank, ranks))
            targets, weight = targets_in([batch for batch in step if batch is not None])
            sums = {"step_targets": targets, "step_weight": float(weight)} if self.are_known(ranks) else {}
            for loop, expected in zip(self.loops, step, strict=True):
                batch = next(loop, None)
                assert (batch and listed(batch)) == (expected and expected | sums)
                if expected is not None:
                    self.remember(expected)
            self.was_moved = False
            if step[0] is None:
                self.loops = []
                return

    def is_over(self) -> bool:
        end = self.run.end()
        return end is not None and self.run.sample >= end

    def are_known(self, ranks: int) -> bool:
        """Whether ranks know the targets of a whole step."""
        return not self.plan.transforms and (ranks == 1 or not any(corpus.is_dealt for corpus in self.plan.corpora))

    @rule(data=st.data())
    def resize(self, data: st.DataObject) -> None:
        """Some ranks go, and those that stay have other numbers."""
        stay = data.draw(st.lists(st.sampled_from(range(len(self.loaders))), min_size=1, unique=True))
        for rank in set(range(len(self.loaders))).difference(stay):
            self.loaders[rank].close()
        self.loaders = [self.loaders[rank] for rank in stay]
        self.loops = [self.loops[rank] for rank in stay] if self.loops else []
        for rank, loader in enumerate(self.loaders):
            loader.resize(rank, len(stay))

    def remember(self, batch: Mapping[str, Any]) -> None:
        for row, sample in enumerate(batch["sample_index"]):
            if sample >= 0:
                self.rows[sample] = [batch[key][row] for key in ("input_ids", "labels")]

    @rule(data=st.data())
    def set_weights(self, data: st.DataObject) -> None:
        self._weigh(data.draw(self.some_weights(len(self.planned.names))))

    @rule(data=st.data())
    def set_weights_often(self, data: st.DataObject) -> None:
        """More often than a state lists one by one."""
        values = data.draw(self.some_weights(len(self.planned.names)))
        for number in range(18):
            self._weigh([value + number % 2 for value in values])
            self.skip(1 + number % 3)

    def _weigh(self, values: Sequence[float]) -> None:
        for loader in self.loaders:
            loader.set_weights(dict(zip(self.planned.names, values, strict=True)))
        self.run.set_weights(values)

    @rule(count=st.sampled_from([*range(30), 10**9]))
    def skip(self, count: int) -> None:
        before = self.run.sample
        for loader in self.loaders:
            loader.skip(count)
        self.run.skip(count)
        self.was_moved |= self.run.sample > before

    @rule(data=st.data())
    def mask(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.planned.names) - 1))
        name = self.planned.names[index]
        held, *_ = self.planned.corpora[name]
        number = data.draw(st.integers(0, len(self.held[held].documents.starts) - 1))
        file = Path(self.folder.name).resolve() / held
        with file.open("a") as lines:
            lines.write(f"{number}\n")
        for loader in self.loaders:
            loader.mask(name, file)
        self.run.mask(index, str(file))

    @rule(target=states)
    def save(self) -> Any:
        line = saved(self.run)
        for loader in self.loaders:
            assert loader.state_dict() == {"cursor": line}
        return line

    @rule(
        state=st.none() | states,
        data=st.data(),
        other=st.sets(st.sampled_from(sorted(CHOICES))),
        is_asked=st.booleans(),
    )
    def resume(self, state: str | None, data: st.DataObject, other: set[str], is_asked: bool) -> None:
        """Go on with another plan: what the page refuses is refused, and nothing else.

        Args:
            state: of any time; None: of now.
            other: what differs between the plans.
            is_asked: whether the resume is told so, or told anything.
        """
        state = self.save() if state is None else state
        before = self.planned
        if is_asked:
            choices = dict.fromkeys(other, "plan")
        else:
            choices = {key: data.draw(st.sampled_from(("same", *values))) for key, values in CHOICES.items()}
        plan, model = self.plans(self.other(data, other)) if other else (self.plan, self.model)
        try:
            run = resumed(model, state, max_epochs=self.limits(), **choices)
        except RefusedError:
            with pytest.raises(PlanMismatchError):
                NumpyLoader(plan, global_batch_size=self.num_streams).load_state_dict({"cursor": state}, **choices)
            self.planned = before
            return
        self.plan, self.model, self.run = plan, model, run
        if other or data.draw(st.booleans()):
            self.divide(data)
        for loader in self.loaders:
            loader.load_state_dict({"cursor": state}, **choices)
            assert loader.state_dict() == {"cursor": saved(run)}
        self.was_moved = True
        self.rows = {sample: row for sample, row in self.rows.items() if sample < run.sample}

    def other(self, data: st.DataObject, other: set[str]) -> Planned:
        """A plan that differs in some ways from the one of now, and in how its pass ends."""
        before = self.planned
        planned = self.drawn(
            data,
            corpora=None if "corpora" in other else before.corpora,
            seq_len=0 if "seq_len" in other else before.seq_len,
        )
        if "weights" in other or planned.names != before.names:
            return planned
        return replace(planned, weights=before.weights, changes=before.changes)

    @rule()
    def close(self) -> None:
        for loader in self.loaders:
            loader.close()

    @rule(ahead=st.integers(0, 60) | st.integers(0, 2**40), behind=st.integers(0, 100))
    def look(self, ahead: int, behind: int) -> None:
        """A sample alone is the one that the loop will read, or has read, if the state still knows how."""
        plan, cursor = self.loaders[0].plan, self.loaders[0].cursor
        sample, end = self.run.sample + ahead, self.run.end()
        if end is None or sample < end:
            assert listed(plan.sample(sample, cursor)) == alone(self.run.row(sample))
            pieces = [(piece.document, piece.start, piece.stop) for piece in self.plan.trace(sample, cursor)]
            assert pieces == self.run.pieces(sample)
        if (sample := self.run.sample - behind) in self.rows:
            with suppress(IndexError):
                found = plan.sample(sample, cursor)
                assert [found[key].tolist() for key in ("input_ids", "labels")] == self.rows[sample]

    @invariant()
    def all_ranks_are_where_the_model_is_and_count_as_it_does(self) -> None:
        if not hasattr(self, "run"):
            return
        assert all(loader.cursor == self.loaders[0].cursor for loader in self.loaders)
        found = self.loaders[-1].stats()
        counts = [sum(given) for given in zip(*self.run.mixture.counts_before(self.run.sample), strict=True)]
        assert found["samples"] == self.loaders[0].cursor.sample == self.run.sample
        assert found["skipped_samples"] == sum(stop - start for start, stop in self.run.skipped)
        for index, (corpus, given) in enumerate(zip(found["corpora"].values(), counts, strict=True)):
            assert (corpus["samples"], corpus["left_out"]) == (given, self.run.cuts[index].left_out)
            assert corpus["tokens"] == self.tokens(index, given)
            epoch = sum(part.H for part in self.run.plan.corpora[index].parts)
            most = self.loaders[-1].plan.corpora[index].epochs or math.inf
            assert corpus["epoch"] == min((corpus["tokens"] + corpus["left_out"]) / epoch, most)
            weights = [weights for start, weights in self.run.mixture.segments if start <= self.run.sample]
            assert corpus["weight"] == weights[-1][index]

    def tokens(self, index: int, count: int) -> int:
        """Of the samples of a corpus, each as long as samples were when it was read."""
        total, before, seq_len = 0, 0, self.run.first_seq_len
        for entry in self.run.lengths:
            at = sum(of_stream[index] for of_stream in entry["bases"])
            total += (at - before) * seq_len
            before, seq_len = at, entry["seq_len"]
        return total + (count - before) * seq_len


starts = st.lists(st.integers(1, 60), max_size=4, unique=True).map(sorted)
