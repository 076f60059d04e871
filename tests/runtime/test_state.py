"""The state of a loader: small whatever is planned, and checked when it is loaded."""

from __future__ import annotations

import json
import pickle
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.loaders import expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import ListSource
from tests.runtime.states import State, edited, sealed, values_of
from tests.runtime.test_weight_changes import long_schedule
from tokshard.errors import PlanMismatchError
from tokshard.runtime.bytes.source import DocumentSpan, TokenSource
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

CHANGES: list[tuple[int, dict[str, float]]] = [(6, {"a": 0, "b": 1}), (14, {"a": 1, "b": 1})]


def state_after(plan: StreamPlan, steps: int) -> State:
    loader = StreamingLoader(plan, global_batch_size=2)
    if steps:
        take(loader, steps)
    loader.close()
    return loader.state_dict()


def resumed(plan: StreamPlan, state: State, **options: Any) -> StreamingLoader:
    loader = StreamingLoader(plan, global_batch_size=2)
    loader.load_state_dict(state, **options)
    return loader


# what is planned


@pytest.mark.soak
def test_two_thousand_planned_changes_are_a_small_state_that_is_saved_and_loaded_at_once() -> None:
    plan = long_schedule(2_000, 5, 8)
    for place in (0, 8, 8_000, 15_992, 20_000):
        loader = StreamingLoader(plan, global_batch_size=8)
        loader.skip(place)
        state = loader.state_dict()
        assert len(state["cursor"]) < 4_000
        seconds = []
        for _ in range(3):  # the best of three, of the time of this process: other work may slow down one
            started = time.process_time()
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            seconds.append(time.process_time() - started)
        assert min(seconds) < 0.1  # 3 ms on a quiet machine
        rows = rows_of(take(loader, 2))
        assert rows == expected_rows(plan, range(place, place + 16))
        loader.close()


@pytest.mark.parametrize("steps", range(10))
def test_a_planned_schedule_is_followed_from_every_step_on(steps: int) -> None:
    plan = two_corpora(schedule=CHANGES)
    loader = resumed(two_corpora(schedule=CHANGES), state_after(plan, steps))
    assert rows_of(take(loader, 10)) == expected_rows(plan, range(2 * steps, 2 * steps + 20))
    loader.close()


@pytest.mark.parametrize(
    "other", [[], CHANGES[:1], [(6, {"a": 0, "b": 1}), (14, {"a": 1, "b": 2})], [CHANGES[0], (15, CHANGES[1][1])]]
)
def test_a_plan_with_other_changes_to_come_is_refused_unless_its_weights_are_asked_for(other: Any) -> None:
    state = state_after(two_corpora(schedule=CHANGES), 2)
    plan = two_corpora(schedule=other)
    with pytest.raises(PlanMismatchError, match=r"other weights after sample 4 .* and other changes later") as caught:
        resumed(plan, state)
    assert "weights='plan'" in caught.value.hint
    with pytest.raises(PlanMismatchError, match="the run planned other changes of weights after sample 4"):
        resumed(plan, state, weights="cursor")
    with pytest.raises(PlanMismatchError, match="after sample 4"):
        StreamDataset(plan, global_batch_size=2).sampler.load_state_dict(state)
    loader = resumed(plan, state, weights="plan")
    assert rows_of(take(loader, 8)) == expected_rows(plan, range(4, 20))  # the weights so far were the same
    loader.close()


def test_changes_that_are_past_do_not_matter() -> None:
    plan = two_corpora(schedule=CHANGES)
    loader = resumed(two_corpora(weights=CHANGES[1][1]), state_after(plan, 8))
    assert rows_of(take(loader, 4)) == expected_rows(plan, range(16, 24))
    loader.close()


def test_weights_that_a_run_has_set_stay_in_force_over_changes_that_were_planned() -> None:
    plan = two_corpora(schedule=CHANGES)
    first = StreamingLoader(plan, global_batch_size=2)
    take(first, 2)
    first.set_weights({"a": 1, "b": 0})
    state = first.state_dict()
    first.close()
    for other in (plan, two_corpora(), two_corpora(schedule=CHANGES[1:])):
        loader = resumed(other, state, weights="same" if other is plan else "cursor")
        assert [row["corpus_index"] for row in rows_of(take(loader, 8))] == [0] * 16
        assert resumed(other, loader.state_dict()).cursor == loader.cursor
        loader.close()


@pytest.mark.parametrize(
    "other",
    [
        {"weights": {"a": 0.1, "b": 0.9}},
        {"weights": None},
        {"schedule": [(4, {"a": 1, "b": 0})]},
        {"schedule": [(2, {"a": 1, "b": 0})]},
        {"schedule": [(5, {"a": 1, "b": 0})]},
    ],
    ids=str,
)
@pytest.mark.parametrize("has_set", [False, True], ids=["as planned", "with weights that the run has set"])
def test_a_plan_whose_weights_or_schedule_were_edited_is_never_overruled_in_silence(other: Any, has_set: bool) -> None:
    first, plan = NumpyLoader(two_corpora(), global_batch_size=2), two_corpora(**other)
    first.skip(4)
    if has_set:
        first.set_weights({"a": 2, "b": 1})
    state = first.state_dict()
    with pytest.raises(PlanMismatchError, match=f"the run has {'a=2, b=1' if has_set else 'a=0.7, b=0.3'}") as caught:
        NumpyLoader(plan, global_batch_size=2).load_state_dict(state)
    assert "weights='plan'" in caught.value.hint
    assert "weights='cursor'" in caught.value.hint
    loader = NumpyLoader(plan, global_batch_size=2)
    loader.load_state_dict(state, weights="plan")
    later = [segment for segment in plan.schedule.segments if segment.start > 4]
    assert [one.weights for one in loader.cursor.segments if one.start >= 4] == [
        plan.schedule.at(4).weights,
        *(segment.weights for segment in later),
    ]
    again = NumpyLoader(plan, global_batch_size=2)
    again.load_state_dict(loader.state_dict())  # the plan that is in force now
    assert again.cursor == loader.cursor


@pytest.mark.parametrize("steps", [2, 3, 4, 7])
def test_a_resume_with_the_weights_of_the_plan_at_a_planned_change_can_be_resumed_again(steps: int) -> None:
    """Samples 6 and 14, at which the plan changes, are the beginnings of steps 3 and 7."""
    plan = two_corpora(schedule=CHANGES)
    state = state_after(plan, steps)
    for _ in range(3):
        loader = resumed(plan, state, weights="plan")
        state = loader.state_dict()
    loader = resumed(plan, state)
    starts = [segment.start for segment in loader.cursor.segments]
    assert starts == sorted(set(starts))
    assert rows_of(take(loader, 6)) == expected_rows(plan, range(2 * steps, 2 * steps + 12))
    loader.close()


# the corpora of the plan


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["cursor", pytest.param("plan", marks=pytest.mark.soak)])
def test_a_hundred_restarts_with_the_corpora_of_the_plan_are_as_if_there_were_none(weights: str) -> None:
    sources = {name: ListSource([10] * 50, first_token=1 + 1000 * number) for number, name in enumerate("abc")}
    plan = StreamPlan(
        sources, weights={"a": 0.5, "b": 0.3, "c": 0.2}, seq_len=8, seed=5, block_tokens=64, window_blocks=2
    )
    loader = StreamingLoader(plan, global_batch_size=1)
    state, found = loader.state_dict(), []
    for _ in range(100):
        loader.load_state_dict(state, corpora="plan", weights=weights)  # type: ignore[arg-type]
        found += rows_of(take(loader, 1))
        state = loader.state_dict()
    loader.close()
    assert found == expected_rows(plan, range(100))
    assert len(state["cursor"]) < 4_000
    assert (
        max(
            abs(count - share)
            for count, share in zip(
                [Counter(row["corpus_index"] for row in found)[number] for number in range(3)],
                (50, 30, 20),
                strict=True,
            )
        )
        <= 2
    )


def test_weights_that_a_run_has_set_stay_in_force_with_the_corpora_of_the_plan_if_these_are_the_same() -> None:
    first = StreamingLoader(two_corpora(), global_batch_size=2)
    first.set_weights({"a": 0, "b": 1})
    loader = resumed(two_corpora(), first.state_dict(), corpora="plan")
    assert loader.cursor == first.cursor
    with pytest.raises(PlanMismatchError, match="sets other weights"):
        resumed(two_corpora(), state_after(two_corpora(schedule=CHANGES), 1), corpora="plan")


# what is refused


def test_a_state_whose_plan_hash_is_not_that_of_its_fields_is_refused() -> None:
    state = state_after(two_corpora(), 2)
    for bad in ("x", None, "0" * 64):
        for corpora in ("same", "plan"):
            with pytest.raises(PlanMismatchError, match=r"damaged: (the rest of it contradicts plan|.* at `\$\.plan`)"):
                resumed(two_corpora(), edited(state, plan=bad), corpora=corpora)
    with pytest.raises(PlanMismatchError, match="damaged: the rest of it contradicts plan"):
        resumed(two_corpora(), edited(state, seed=5))


@pytest.mark.parametrize(
    "fields",
    [
        {"sample": 2**63},
        {"seed": 2**64},
        {"num_streams": 2**64},
        {"sample": 4.0},
        {"sample": True},
        {"counts": [2**63, 0]},
        {"counts": [0]},
        {"remainders": [2**70]},
        {"skipped": [[5, 3]]},
        {"skipped": [[3, 3]]},
        {"skipped": [[2, 5]]},
        {"skipped": [[2, 3], [1, 2]]},
        {"skipped": [[0, 2], [1, 3]]},
        {"skipped": [[-1, 2]]},
        {"skipped": 5},
        {"weights": [[5, [1, 1]]]},
        {"weights": [[5, [1, 1]]], "schedule": None},
        {"weights": [[0, [1, 1]], [0, [1, 2]]]},
        {"weights": [[0, [1, 1]], [5, [1, 2]]]},  # a schedule is named, so what is still to come is not listed
        {"weights": [[0, [float("nan"), 1]]]},
        {"weights": []},
        {"schedule": 5},
        {"schedule": ["x"]},
        {"planned": None},
        {"counts": [[1, 1]], "remainders": [[2**64]]},
        {"counts": [[2**62 + 2, 1]], "remainders": [[1]]},
        {"masks": [5]},
        {"corpora": []},
        {"unknown": 5},
    ],
    ids=str,
)
def test_a_state_that_no_loader_has_saved_is_refused_as_damaged(fields: State) -> None:
    state = state_after(two_corpora(), 2)
    with pytest.raises(PlanMismatchError, match="damaged") as caught:
        resumed(two_corpora(), edited(state, **fields))
    assert caught.value.hint


def test_a_state_without_a_field_is_refused_as_damaged_or_as_none() -> None:
    saved = values_of(state_after(two_corpora(), 2))
    for name in saved:
        with pytest.raises(PlanMismatchError, match="not a state" if name == "tokshard_cursor" else f"damaged.*{name}"):
            resumed(two_corpora(), sealed({key: saved[key] for key in saved if key != name}))


def long_state(folder: Path) -> tuple[StreamPlan, State]:
    """A state in which every key has a value: counts, skips, other corpora and masks."""
    sources = {name: ListSource([9, 4, 30, 1, 12, 3] * 5, first_token=1 + 500 * at) for at, name in enumerate("abc")}
    sizes: Any = {"seq_len": 6, "block_tokens": 24, "window_blocks": 2, "seed": 3}
    with StreamingLoader(StreamPlan({name: sources[name] for name in "ab"}, **sizes), global_batch_size=2) as before:
        before.skip(6)
        (folder / "masked").write_text("1\n3\n")
        before.mask("a", folder / "masked")
        state = before.state_dict()
    plan = StreamPlan({name: sources[name] for name in "bc"}, schedule=[(40, {"b": 1, "c": 3})], **sizes)
    with resumed(plan, state, corpora="plan") as after:
        take(after, 2)
        return plan, after.state_dict()


def test_a_state_of_which_any_byte_was_changed_is_refused(tmp_path: Path) -> None:
    plan, state = long_state(tmp_path)
    line = state["cursor"]
    with StreamingLoader(plan, global_batch_size=2) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state
        for at, char in enumerate(line):
            for other in {"0", "1", '"', " ", "", char + char, "\udc80", chr(ord(char) ^ 1)} - {char}:
                with pytest.raises(PlanMismatchError):
                    loader.load_state_dict({"cursor": line[:at] + other + line[at + 1 :]})
            with pytest.raises(PlanMismatchError):
                loader.load_state_dict({"cursor": line[:at]})


def test_a_state_of_which_any_key_was_changed_is_refused_in_words(tmp_path: Path) -> None:
    plan, state = long_state(tmp_path)
    values = json.loads(state["cursor"])
    assert all(values[key] for key in values), values
    changed = [{key: values[key] for key in values if key != gone} for gone in values if gone != "tokshard_cursor"]
    changed += [{**values, key: json.loads(other)} for key in values for other in ("0", "[]", '""', "null", "-1")]
    changed += [{**values, "sample": values["sample"] + 2}, {**values, "more": 1}]
    with StreamingLoader(plan, global_batch_size=2) as loader:
        for one in changed:
            if one["tokshard_cursor"] == 1:
                with pytest.raises(PlanMismatchError, match="was changed after it was saved") as caught:
                    loader.load_state_dict({"cursor": json.dumps(one, separators=(",", ":"))})
                assert "older checkpoint" in caught.value.hint


def test_a_state_of_another_version_is_refused_by_its_number() -> None:
    state = edited(state_after(two_corpora(), 2), tokshard_cursor=2)
    with pytest.raises(PlanMismatchError, match="the state has version 2, this tokshard reads 1"):
        resumed(two_corpora(), state)


# ends and several cursors


def test_a_skip_beyond_a_finite_pass_ends_at_its_last_sample() -> None:
    plan = one_corpus(epochs=2)
    assert plan.num_samples is not None
    loader = StreamingLoader(plan, global_batch_size=4)
    take(loader, 1)
    loader.skip(10**9)
    assert loader.cursor.sample == plan.num_samples
    assert loader.cursor.skipped == ((4, plan.num_samples),)
    assert loader.stats()["skipped_samples"] == plan.num_samples - 4
    assert resumed(plan, loader.state_dict()).cursor == loader.cursor
    loader.skip(1)
    assert loader.cursor.sample == plan.num_samples
    with pytest.warns(UserWarning, match="this loop gives nothing"):
        assert take(loader, 1) == []
    assert len(take(loader, 1)) == 1  # another pass
    assert loader.cursor.sample == 4
    loader.close()


def test_one_plan_reads_under_two_histories_that_differ_in_between_and_agree_again() -> None:
    """What a plan has counted of one history is not taken for the other's."""
    histories = [
        two_corpora(schedule=[(8, weights), (16, {"a": 1, "b": 1})]) for weights in ({"a": 1, "b": 9}, {"a": 9, "b": 1})
    ]
    shared = two_corpora()
    for _ in range(2):
        for plan in histories:
            cursor = plan.cursor().advanced(30)
            moved = type(cursor)(sample=30, segments=cursor.segments)
            assert shared.mixture(moved).counts_before(30) == plan.mixture(cursor).counts_before(30)
            assert expected_rows(shared, range(20, 30), moved) == expected_rows(plan, range(20, 30), cursor)


def test_a_state_stays_small_however_many_skips_are_on_record() -> None:
    plan, gaps = two_corpora(), random.Random(4)
    loader = StreamingLoader(plan, global_batch_size=4)
    for number in range(3_000):
        loader._walk.cursor = loader.cursor.advanced(4 * gaps.randrange(1, 500))  # as a loop does
        loader.skip(4 * gaps.choice([1, 1, 1, 2, 50]))
        if number == 999:
            assert len(loader.state_dict()["cursor"]) < 4_096
    assert len(loader.cursor.skipped) > 2_900
    assert resumed(plan, loader.state_dict()).cursor == loader.cursor


@pytest.mark.parametrize("change", ["AAAA", "not base64", lambda text: text[:-8], lambda text: text + text])
def test_damaged_skips_are_refused(change: Any) -> None:
    plan = two_corpora()
    loader = StreamingLoader(plan, global_batch_size=4)
    for _ in range(40):
        loader._walk.cursor = loader.cursor.advanced(4)
        loader.skip(4)
    state = loader.state_dict()
    skipped = change(values_of(state)["skipped"]) if callable(change) else change
    with pytest.raises(PlanMismatchError, match="damaged"):
        resumed(plan, edited(state, skipped=skipped))


class Bare(TokenSource):
    """A source of someone else, which has only what it must have."""

    def __init__(self) -> None:
        inner = ListSource([9, 4, 30, 1, 12, 3] * 5)
        for name in ("num_tokens", "fingerprint", "dtype", "tokenizer"):
            setattr(self, name, getattr(inner, name))
        self.inner = inner

    def document_at(self, position: int) -> DocumentSpan:
        return self.inner.document_at(position)

    def place_of(self, document: int) -> DocumentSpan:
        return self.inner.place_of(document)

    def ends(self, starts: Any, stops: Any) -> Any:
        return self.inner.ends(starts, stops)

    def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
        self.inner.read(starts, lengths, out, at)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Bare, ())


def test_a_source_without_hints_is_read_traced_masked_and_pickled(tmp_path: Path) -> None:
    source: Any = Bare()
    plan = StreamPlan({"bare": source}, seq_len=6, block_tokens=24, window_blocks=2)
    expected = StreamPlan({"full": ListSource([9, 4, 30, 1, 12, 3] * 5)}, seq_len=6, block_tokens=24, window_blocks=2)
    (tmp_path / "masked").write_text("1\n")
    with StreamingLoader(pickle.loads(pickle.dumps(plan)), global_batch_size=4) as loader:
        assert rows_of(take(loader, 10)) == expected_rows(expected, range(40))
        loader.mask("bare", tmp_path / "masked")
        state = loader.state_dict()
        assert rows_of(take(loader, 4)) == expected_rows(plan, range(40, 56), loader.cursor)
    assert resumed(plan, state).stats()["masked_documents"] == 1


def test_the_bytes_that_were_read_are_those_of_tokens_and_labels_without_padding() -> None:
    asked = []

    class Counting(ListSource):
        def read(self, starts: Any, lengths: Any, out: Any, at: Any) -> None:
            asked.append(int(lengths.sum()))
            super().read(starts, lengths, out, at)

        is_in_memory = False

    plan = StreamPlan(Counting([9, 4, 30, 1, 12, 3, 7] * 9), seq_len=6, block_tokens=24, window_blocks=2, epochs=1)
    with StreamingLoader(plan, global_batch_size=5, uneven="pad") as loader:
        batches = list(loader)
        assert loader.stats()["bytes_read"] == sum(asked) * plan.sources[0].dtype.itemsize
    assert int((batches[-1]["sample_index"] < 0).sum())
