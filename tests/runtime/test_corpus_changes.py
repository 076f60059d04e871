"""Corpora that are added, removed, reordered and taken up again: each continues at exactly its next sample."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime import page_model
from tests.runtime.loaders import dataloader, expected_rows, rows_of, rows_of_ranks, take
from tests.runtime.page_model import Row, Used
from tests.runtime.sources import ListSource
from tests.runtime.states import replaced
from tests.runtime.test_page_model import documents_of_source
from tokshard.errors import PlanMismatchError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

SOURCES = {
    "x": ListSource([9, 4, 30, 1, 12, 3]),
    "y": ListSource([5, 17, 2, 7], first_token=1000),
    "z": ListSource([25, 1, 1, 6], first_token=2000),
}
SIZES = {"seq_len": 6, "block_tokens": 24, "window_blocks": 2}
State = dict[str, Any]
Corpus = tuple[str, int]
"""The content and the first epoch, by which a run knows a corpus: here how often the content was listed before."""


def corpora_of(contents: Sequence[str]) -> list[Corpus]:
    return [(content, contents[:number].count(content)) for number, content in enumerate(contents)]


def name_of(corpus: Corpus) -> str:
    return f"{corpus[0]} {corpus[1]}"


def plan_of(contents: Sequence[str], **options: Any) -> StreamPlan:
    sources = {name_of(corpus): SOURCES[corpus[0]] for corpus in corpora_of(contents)}
    first_epochs = {name_of(corpus): corpus[1] for corpus in corpora_of(contents)} | options.pop("start_epoch", {})
    return StreamPlan(sources, start_epoch=first_epochs, **{"seed": 3, **SIZES, **options})


@cache
def model(corpus: Corpus) -> list[Row]:
    """Many samples of one corpus."""
    content, first_epoch = corpus
    used = Used(documents_of_source(SOURCES[content]), start_epoch=first_epoch)
    plan = page_model.Plan([used], seed=3, **SIZES)
    return [plan.row(sample) for sample in range(150)]


class Run:
    """A run over changing corpora, held against a model of each."""

    def __init__(self) -> None:
        self.state: State | None = None
        self.reads: Counter[Corpus] = Counter()
        self.samples = 0
        self.contents: list[str] | None = None
        self.changes: list[tuple[int, str, str, int]] = []

    def go_on(self, contents: list[str], steps: int, batch: int, ranks: int = 1) -> None:
        corpora = corpora_of(contents)
        loaders = [
            StreamingLoader(plan_of(contents), global_batch_size=batch * ranks, dp_rank=rank, dp_world_size=ranks)
            for rank in range(ranks)
        ]
        if self.state is not None:
            for loader in loaders:
                loader.load_state_dict(self.state, corpora="plan")
        self.note_changes(corpora)
        per_rank = [take(loader, steps) if steps else [] for loader in loaders]
        for row in rows_of_ranks(per_rank):
            corpus = corpora[row["corpus_index"]]
            expected = model(corpus)[self.reads[corpus]]
            assert row["sample_index"] == self.samples
            for key in ("input_ids", "labels", "position_ids"):
                assert row[key] == getattr(expected, key)
            self.reads[corpus] += 1
            self.samples += 1
        states = [loader.state_dict() for loader in loaders]
        assert all(state == states[0] for state in states)
        self.state, self.contents = states[0], contents
        statistics = loaders[0].stats()
        assert {name: found["samples"] for name, found in statistics["corpora"].items()} == {
            name_of(corpus): self.reads[corpus] for corpus in corpora
        }
        assert statistics["samples"] == self.samples
        for loader in loaders:
            loader.close()
        saved = json.loads(self.state["cursor"])["changes"]
        assert [(one["sample"], one["action"], one["name"], *one["counts"]) for one in saved] == self.changes

    def note_changes(self, corpora: list[Corpus]) -> None:
        before = corpora if self.contents is None else corpora_of(self.contents)
        for action, those, others in (("removed", before, corpora), ("added", corpora, before)):
            gone = [corpus for corpus in those if corpus not in others]
            self.changes += [(self.samples, action, name_of(corpus), self.reads[corpus]) for corpus in gone]


phases = st.lists(
    st.fixed_dictionaries(
        {
            "contents": st.lists(st.sampled_from("xxyz"), min_size=1, max_size=4),
            "steps": st.integers(0, 4),
            "batch": st.integers(1, 3),
            "ranks": st.integers(1, 2),
        }
    ),
    min_size=2,
    max_size=6,
)


@given(history=phases)
def test_over_any_history_of_changes_each_corpus_goes_on_at_exactly_its_next_sample_or_stays_away(
    history: list[dict[str, Any]],
) -> None:
    run = Run()
    for phase in history:
        gone = {name for _, action, name, _ in run.changes if action == "removed"}
        if gone & {name_of(corpus) for corpus in corpora_of(phase["contents"])}:
            with pytest.raises(
                PlanMismatchError, match=r"was removed from the run at sample \d+, and this plan has it"
            ):
                Run.go_on(copy.copy(run), **phase)
        else:
            run.go_on(**phase)


def test_a_corpus_that_was_removed_is_read_anew_from_another_epoch_on_as_the_hint_says() -> None:
    run = Run()
    for contents in (["x", "y"], ["y"]):
        run.go_on(contents, steps=5, batch=2)
    loader = StreamingLoader(plan_of(["x", "y"]), global_batch_size=2)
    with pytest.raises(PlanMismatchError, match="corpus 'x 0' was removed") as error:
        loader.load_state_dict(run.state or {}, corpora="plan")
    assert error.value.hint.startswith("give start_epoch={'x 0': 1} to read it anew")
    loader = StreamingLoader(plan_of(["x", "y"], start_epoch={"x 0": 1}), global_batch_size=2)
    loader.load_state_dict(run.state or {}, corpora="plan")


def test_each_token_is_read_once_per_epoch_over_all_changes() -> None:
    run, read = Run(), []
    for contents in (["x"], ["y", "x"], ["x"], ["x", "z"]):
        before = run.reads["x", 0]
        run.go_on(contents, steps=2, batch=3)
        read += [token for row in model(("x", 0))[before : run.reads["x", 0]] for token in row.input_ids]
    epoch = read[: SOURCES["x"].num_tokens]
    # the last sample of an epoch may hold the first tokens of the next
    assert len(set(epoch) - {0}) >= len(set(SOURCES["x"].tokens.tolist()) - {0}) - SIZES["seq_len"]
    assert max(Counter(token for token in epoch if token).values()) == 1


def test_weights_and_schedule_are_those_of_the_plan_from_the_change_on() -> None:
    first = StreamingLoader(plan_of("xy", weights={"x 0": 1, "y 0": 0}), global_batch_size=5)
    first.set_weights({"x 0": 1, "y 0": 3})
    take(first, 2)
    planned = plan_of(
        "zy", weights={"z 0": 1, "y 0": 0}, schedule=[(4, {"z 0": 0, "y 0": 1}), (15, {"z 0": 1, "y 0": 0})]
    )
    second = StreamingLoader(planned, global_batch_size=5)
    second.load_state_dict(first.state_dict(), corpora="plan")
    corpora = [row["corpus_index"] for row in rows_of(take(second, 2))]
    assert corpora == [1] * 5 + [0] * 5
    first.close()
    second.close()


def test_a_state_after_a_change_is_loaded_as_any_other() -> None:
    run = Run()
    run.go_on(["x", "y"], steps=3, batch=2)
    run.go_on(["y", "z"], steps=3, batch=2)
    loader = StreamingLoader(plan_of("yz"), global_batch_size=4)
    loader.load_state_dict(run.state or {})
    assert rows_of(take(loader, 2)) == expected_rows(loader.plan, range(12, 20), loader.cursor)
    dataset = StreamDataset(plan_of("yz"), global_batch_size=4)
    dataset.sampler.load_state_dict(run.state or {})
    batches = iter(dataloader(dataset))
    assert rows_of([next(batches), next(batches)]) == expected_rows(loader.plan, range(12, 20), loader.cursor)
    loader.close()
    with pytest.raises(IndexError, match="sample 5 was read under weights that the cursor does not keep"):
        loader.plan.sample(5, loader.cursor)


def test_the_plan_unchanged_goes_on_with_nothing_on_record() -> None:
    run = Run()
    run.go_on(["x", "y", "x"], steps=3, batch=2)
    run.go_on(["x", "y", "x"], steps=3, batch=2)
    assert run.changes == []


def test_skipped_samples_stay_on_record_over_a_change() -> None:
    first = StreamingLoader(plan_of("xy"), global_batch_size=2)
    first.skip(6)
    second = StreamingLoader(plan_of("y"), global_batch_size=2)
    second.load_state_dict(first.state_dict(), corpora="plan")
    assert second.cursor.skipped == ((0, 6),)


def state_of(contents: str, steps: int = 3, **options: Any) -> State:
    loader = StreamingLoader(plan_of(contents, **options), global_batch_size=2)
    take(loader, steps)
    loader.close()
    return loader.state_dict()


@pytest.mark.parametrize("after", ["xyz", "x", "yx", "xz"])
def test_other_corpora_are_refused_unless_they_are_asked_for(after: str) -> None:
    loader = StreamingLoader(plan_of(after), global_batch_size=2)
    with pytest.raises(PlanMismatchError) as caught:
        loader.load_state_dict(state_of("xy"))
    assert "corpora='plan'" in caught.value.hint
    expected = f"the number of corpora differs (2, now {len(after)})" if len(after) != 2 else "the content of corpus"
    assert expected in caught.value.problem
    assert loader.cursor.sample == 0


def test_a_reordered_corpus_is_refused_with_both_contents() -> None:
    x, y = (SOURCES[name].fingerprint[:20] for name in "xy")
    with pytest.raises(PlanMismatchError, match=rf"the content of corpus 'x 0' differs \({x}, now {y}\)"):
        StreamingLoader(plan_of("yx"), global_batch_size=2).load_state_dict(state_of("xy"))


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        ({"seed": 4}, r"seed differs \(3, now 4\)"),
        ({"seq_len": 5}, r"seq_len differs \(6, now 5\)"),
        ({"block_tokens": 48}, r"block_tokens differs \(24, now 48\)"),
        ({"window_blocks": 3}, r"window_blocks differs \(2, now 3\)"),
    ],
)
def test_other_sizes_or_seeds_are_refused_also_with_the_corpora_of_the_plan(
    options: dict[str, Any], difference: str
) -> None:
    loader = StreamingLoader(plan_of("yz", **options), global_batch_size=2)
    with pytest.raises(PlanMismatchError, match=difference):
        loader.load_state_dict(state_of("xy"), corpora="plan")


def test_another_part_of_a_corpus_is_another_corpus() -> None:
    loader = StreamingLoader(plan_of("xy", take={"x 0": 0.5}), global_batch_size=2)
    loader.load_state_dict(state_of("xy"), corpora="plan")
    saved = json.loads(loader.state_dict()["cursor"])["changes"]
    assert [(one["action"], one["name"], one["identity"]["take"]) for one in saved] == [
        ("removed", "x 0", 1.0),
        ("added", "x 0", 0.5),
    ]
    assert loader.stats()["corpora"]["x 0"]["samples"] == 0


def test_limits_count_what_was_read_before_a_change() -> None:
    state = state_of("xy", steps=20)
    read = json.loads(state["cursor"])
    assert read["sample"] == 40
    loader = StreamingLoader(plan_of("yz", max_epochs={"y 0": 4}), global_batch_size=1)
    loader.load_state_dict(state, corpora="plan")
    before = loader.stats()["corpora"]["y 0"]["samples"]
    assert before > 0
    with pytest.warns(UserWarning, match="'y 0'"):
        rows = rows_of(list(loader))
    most = -(-4 * SOURCES["y"].num_tokens // SIZES["seq_len"])
    assert before + sum(row["corpus_index"] == 0 for row in rows) == most
    loader.close()


def test_a_finite_pass_after_other_corpora_is_refused_because_its_end_would_be_counted_wrong() -> None:
    finite = StreamPlan({"x": SOURCES["x"]}, epochs=4, seed=3, **SIZES)
    state = state_of("xy")
    message = r"a finite pass of 40 samples, but of the 6 samples of the saved cursor only \d are from corpus 'x'"
    with pytest.raises(PlanMismatchError, match=message):
        StreamingLoader(finite, global_batch_size=2).load_state_dict(state, corpora="plan")
    endless = StreamingLoader(plan_of("x"), global_batch_size=2)
    endless.load_state_dict(state, corpora="plan")
    for reader in (StreamingLoader(finite, global_batch_size=2), StreamDataset(finite, global_batch_size=2).sampler):
        with pytest.raises(PlanMismatchError, match=message):
            reader.load_state_dict(endless.state_dict())


def test_an_endless_plan_of_one_corpus_goes_on_as_a_finite_pass() -> None:
    finite = StreamPlan({"x": SOURCES["x"]}, epochs=4, seed=3, **SIZES)
    loader = StreamingLoader(finite, global_batch_size=2)
    loader.load_state_dict(state_of("x"), corpora="plan")
    assert rows_of(list(loader)) == expected_rows(finite, range(6, 40))


def test_an_argument_that_says_neither_is_refused() -> None:
    loader = StreamingLoader(plan_of("x"), global_batch_size=2)
    with pytest.raises(ValueError, match="corpora must be 'same' or 'plan', got 'new'"):
        loader.load_state_dict(loader.state_dict(), corpora="new")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("old", "new"),
    [('"counts":[4]', '"counts":[-4]'), ('"action":"removed"', '"deed":"removed"'), ('"changes":[{', '"changes":[5,{')],
)
def test_a_state_whose_changes_are_damaged_is_refused(old: str, new: str) -> None:
    loader = StreamingLoader(plan_of("y"), global_batch_size=2)
    loader.load_state_dict(state_of("xy"), corpora="plan")
    state = loader.state_dict()
    with pytest.raises(PlanMismatchError, match="damaged"):
        loader.load_state_dict(replaced(state, old, new))
