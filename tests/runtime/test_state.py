"""The state of a loader: small whatever happens to it, and checked when it is loaded.

That states are those of STATE.md: test_histories.py. What is refused: test_refusals_of_states.py.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.runtime.loaders import expected_rows, resumed, rows_of, state_after, take, two_corpora
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.states import State, edited, sealed, values_of
from tokshard.errors import PlanMismatchError
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan
from tokshard.runtime.order.mixture import Mixture
from tokshard.runtime.state import other_weights

# how large it is


def test_a_list_of_one_byte_and_one_that_grew_at_the_next_sample_are_resumed(tmp_path: Path) -> None:
    with NumpyLoader(two_corpora(), global_batch_size=1) as loader:
        for number, content in enumerate(("3", "1\n", "1\n2\n")):
            file = tmp_path / f"list {number > 0}"
            file.write_text(content)
            loader.mask("a", file)
            next(iter(loader))
        assert resumed(two_corpora(), loader.state_dict()).cursor == loader.cursor


def test_a_state_has_few_bytes_for_each_skip_on_record() -> None:
    gaps = random.Random(4)
    loader = NumpyLoader(two_corpora(), global_batch_size=1)
    for _ in range(1_000):
        next(iter(loader))
        loader.skip(4 * gaps.choice([1, 1, 1, 2, 50]))
    assert len(loader.cursor.skipped) == 1_000
    assert len(loader.state_dict()["cursor"]) < 1_024 + 16 * 1_000


def long_schedule(num_segments: int, num_corpora: int, every: int) -> StreamPlan:
    rng = random.Random(1)
    names = [f"corpus {number}" for number in range(num_corpora)]
    sources = {name: PeriodicSource(100_000 + number, 50) for number, name in enumerate(names)}
    schedule = [(every * number, {name: rng.paretovariate(0.5) for name in names}) for number in range(1, num_segments)]
    return StreamPlan(sources, schedule=schedule, seq_len=16, block_tokens=64, window_blocks=4, seed=2)


def test_the_samples_of_a_long_schedule_count_its_past_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    count = Mixture._advanced
    monkeypatch.setattr(Mixture, "_advanced", lambda *arguments: counted.append(1) or count(*arguments))
    plan = long_schedule(300, 3, 4)
    for sample in range(1_300, 1_400):
        plan.sample(sample)
    assert len(counted) < 310


def test_changes_without_a_batch_in_between_leave_no_batches_behind() -> None:
    loader = StreamingLoader(two_corpora(), global_batch_size=3, prefetch_factor=2)
    take(loader, 1)
    for number in range(500):
        loader.set_weights({"a": 1 + number, "b": 1})
    assert rows_of(take(loader, 1)) == expected_rows(loader.plan, range(3, 6), loader.cursor)
    assert loader.stats()["queue"] <= 4
    assert len(loader.cursor.segments) <= 2
    loader.close()


# what is damaged


MASK = {"fingerprint": "0" * 64, "name": "a", "file": "/nowhere", "calls": [[0, 4]], "sha256": "0" * 64}
"""A valid mask. That its list is missing does not matter: damage is found first."""


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
        {"counts": [[0]], "remainders": [[0]]},
        {"counts": [[0.5]]},
        {"num_streams": "4"},
        {"plan": None},
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
        {"weights": [[0, [0.0, 0.0]]]},
        {"weights": [[0, [-1.0, 1.0]]]},
        {"changes": [5]},
        {"changes": [{"more": 1}]},
        {"changes": [{"sample": 2, "deed": "removed"}]},
        {"skipped": "AAAA"},
        {"skipped": "not base64"},
        {"weights": []},
        {"schedule": 5},
        {"schedule": ["x"]},
        {"planned": None},
        {"counts": [[1, 1]], "remainders": [[2**64]]},
        {"counts": [[2**62 + 2, 1]], "remainders": [[1]]},
        {"masks": [5]},
        *(
            {"masks": [{key: value for key, value in (MASK | change).items() if value is not ...}]}
            for change in (
                {"calls": [[99, 4]]},
                {"calls": [["0", 4]]},
                {"calls": [[0, 0]]},
                {"calls": []},
                {"calls": [[0, 2], [0, 4]]},
                {"calls": "AAAA"},
                {"sha256": "0"},
                {"name": ...},
                {"file": ...},
            )
        ),
        {"corpora": []},
        {"unknown": 5},
    ],
    ids=str,
)
def test_a_state_that_no_loader_has_saved_is_refused_as_damaged(fields: State) -> None:
    state = edited(state_after(two_corpora(), 4), **fields)
    for read in (resumed, other_weights):
        with pytest.raises(PlanMismatchError, match="the state is damaged: "):
            read(two_corpora(), state)


@pytest.mark.parametrize("samples", [[4, 5], [4, 3], [10]])
def test_changes_of_corpora_that_do_not_ascend_or_are_still_to_come_are_refused(samples: list[int]) -> None:
    state = state_after(two_corpora(), 4)
    identity = values_of(state)["corpora"][0] | {"start_epoch": 7}
    del identity["name"]
    changes = [
        {"sample": sample, "action": "removed", "name": "x", "identity": identity, "counts": [1]} for sample in samples
    ]
    with pytest.raises(PlanMismatchError, match="the rest of it contradicts changes"):
        resumed(two_corpora(), edited(state, changes=changes))
    ascending = edited(state, changes=[change | {"sample": 4} for change in changes])
    assert resumed(two_corpora(), ascending).cursor.sample == 4


def test_a_state_without_a_field_is_refused_as_damaged_or_as_none() -> None:
    values = values_of(state_after(two_corpora(), 4))
    for name in values:
        with pytest.raises(PlanMismatchError, match="not a state" if name == "tokshard_cursor" else f"damaged.*{name}"):
            resumed(two_corpora(), sealed({key: values[key] for key in values if key != name}))


def long_state(folder: Path) -> tuple[StreamPlan, State]:
    """A state in which every key has a value: counts, skips, other corpora and masks."""
    sources = {name: ListSource([9, 4, 30, 1, 12, 3] * 5, first_token=1 + 500 * at) for at, name in enumerate("abc")}
    sizes: Any = {"seq_len": 6, "block_tokens": 24, "window_blocks": 2, "seed": 3}
    before = NumpyLoader(StreamPlan({name: sources[name] for name in "ab"}, **sizes), global_batch_size=2)
    before.skip(6)
    (folder / "masked").write_text("1\n3\n")
    before.mask("a", folder / "masked")
    plan = StreamPlan({name: sources[name] for name in "bc"}, schedule=[(40, {"b": 1, "c": 3})], **sizes)
    with pytest.warns(UserWarning, match="masks 2 documents of corpus 'a'"):
        after = resumed(plan, before.state_dict(), corpora="plan")
    after.skip(4)
    return plan, after.state_dict()


def test_a_state_of_which_any_byte_was_changed_is_refused(tmp_path: Path) -> None:
    plan, state = long_state(tmp_path)
    loader, line = resumed(plan, state), state["cursor"]
    assert loader.state_dict() == state
    for at, char in enumerate(line):
        others = {"0", "1", '"', " ", "", char + char, "\udc80", chr(ord(char) ^ 1)} - {char}
        for other in (line[:at], *(line[:at] + other + line[at + 1 :] for other in others)):
            with pytest.raises(PlanMismatchError):
                loader.load_state_dict({"cursor": other})


# what was read


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
