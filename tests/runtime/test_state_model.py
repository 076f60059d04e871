"""Runs against a model of ORDER.md and STATE.md that was written by someone who had never seen the code."""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.runtime import page_model
from tests.runtime.page_model import Plan, Run, Used
from tests.runtime.sources import ListSource
from tests.runtime.state_model import resumed, saved
from tests.runtime.test_page_model import documents_of_source, documents_of_vector
from tests.vectors import runs
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

PARTS = {"a": [7, 30, 11, 2] * 9, "b": [5, 17, 40, 1, 1] * 7, "c": [3], "d": [60, 2] * 12}
SOURCES = {name: ListSource(part, name=name) for name, part in PARTS.items()}
SOURCES |= {"longer": ListSource([9, 30, 1, 5, 12, 2, 1] * 60, name="longer")}
SIZES = {"block_tokens": 16, "window_blocks": 2}
SIZES_OF_WHOLE = {"block_tokens": 1024, "window_blocks": 1}

EVENTS = ["read", "set_weights", "skip", "mask", "resume"]
VECTORS = json.loads(runs.FILE.read_text(encoding="utf-8"))

names = st.lists(st.sampled_from(sorted(SOURCES)), min_size=1, max_size=3, unique=True)
weight = st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0, 3.0])
seq_lens = st.sampled_from([1, 3, 4, 8, 20])
seq_lens_of_whole = st.sampled_from([1, 2, 4, 8])


class Job:
    """The same job in the code and in the model."""

    def __init__(self, data: st.DataObject, folder: Path) -> None:
        self.data, self.folder = data, folder
        self.seed, self.streams = data.draw(st.integers(0, 2**64 - 1)), data.draw(st.integers(1, 3))
        self.packs = {name: data.draw(st.sampled_from(["cut", "whole"])) for name in SOURCES}
        if not data.draw(st.booleans()):
            self.packs = dict.fromkeys(SOURCES, "cut")
        self.has_whole = "whole" in self.packs.values()
        self.seq_lens, self.sizes = (seq_lens_of_whole, SIZES_OF_WHOLE) if self.has_whole else (seq_lens, SIZES)
        long = [name for name, source in SOURCES.items() if source.num_tokens > self.sizes["block_tokens"]]
        self.takes = {name: data.draw(st.sampled_from([1.0, 0.7])) for name in long}
        self.names, self.seq_len = data.draw(names), data.draw(self.seq_lens)
        self.most = data.draw(st.sampled_from([None, 0.4, 1.0])) if self.streams == 1 else None
        self.plans()
        self.run = Run(self.model, self.limits())
        self.divide()

    def limits(self) -> list[float | None]:
        return [self.most] * len(self.names)

    def weights(self) -> list[float]:
        count = len(self.names)
        return self.data.draw(st.lists(weight, min_size=count, max_size=count).filter(any))

    def plans(self) -> None:
        """Plans with the names, the length and some weights."""
        first = self.weights()
        starts = sorted(self.data.draw(st.sets(st.integers(1, 60), max_size=4)))
        changes = [(start, self.weights()) for start in starts]
        takes = [self.takes.get(name, 1.0) for name in self.names]
        used = [
            Used(documents_of_source(SOURCES[name]), take, name=name, pack=self.packs[name])
            for name, take in zip(self.names, takes, strict=True)
        ]
        shared: dict[str, Any] = {"seq_len": self.seq_len, "seed": self.seed, "num_streams": self.streams, **self.sizes}
        self.model = Plan(used, weights=first, changes=changes, **shared)
        self.plan = StreamPlan(
            {name: SOURCES[name] for name in self.names},
            weights=dict(zip(self.names, first, strict=True)),
            schedule=[(start, dict(zip(self.names, values, strict=True))) for start, values in changes],
            take=dict(zip(self.names, takes, strict=True)),
            pack={name: self.packs[name] for name in self.names},
            max_epochs=self.most,
            allow_small_blocks=True,
            **shared,
        )

    def divide(self, state: dict[str, Any] | None = None, **choices: Any) -> None:
        """Go on with a batch size on a rank."""
        ranks = self.data.draw(st.integers(1, 3))
        self.place = self.data.draw(st.integers(0, ranks - 1)), ranks
        self.size = self.streams * self.data.draw(st.integers(1, 4))
        self.loader = NumpyLoader(
            self.plan, global_batch_size=self.size, dp_rank=self.place[0], dp_world_size=ranks, uneven="pad"
        )
        if state is not None:
            self.loader.load_state_dict(state, **choices)

    def read(self) -> None:
        for _, batch in zip(range(self.data.draw(st.integers(1, 4))), self.loader, strict=False):
            expected = self.run.step(self.size, *self.place)
            assert {key: value.tolist() for key, value in batch.items()} == expected
        assert self.loader.cursor.sample == self.run.sample

    def set_weights(self) -> None:
        values = self.weights()
        self.loader.set_weights(dict(zip(self.names, values, strict=True)))
        self.run.set_weights(values)

    def skip(self) -> None:
        count = self.data.draw(st.integers(0, 30))
        self.loader.skip(count)
        self.run.skip(count)

    def mask(self) -> None:
        name = self.data.draw(st.sampled_from(self.names))
        number = self.data.draw(st.integers(0, len(SOURCES[name].lengths) - 1))
        file = self.folder / name
        with file.open("a") as lines:
            lines.write(f"{number}\n")
        self.loader.mask(name, file)
        self.run.mask(self.names.index(name), str(file))

    def resume(self) -> None:
        state, line = self.loader.state_dict(), saved(self.run)
        assert state["cursor"] == line
        choices: dict[str, Any] = {}
        for choice in self.data.draw(st.sets(st.sampled_from(["weights", "corpora", "seq_len"]))):
            choices[choice] = "plan"
        if "seq_len" in choices:
            self.seq_len = self.data.draw(self.seq_lens)
        before = self.names
        if "corpora" in choices:
            self.names = self.data.draw(names)
        if choices:
            if self.names == before:
                choices["weights"] = "plan"  # the plans have other changes
            self.plans()
        self.divide(state, **choices)
        self.run = resumed(self.model, line, max_epochs=self.limits(), **choices)
        assert self.loader.state_dict()["cursor"] == saved(self.run)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_whatever_happens_to_a_run_the_pages_alone_say_what_it_reads_and_saves(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # passes end
        job = Job(data, Path(folder).resolve())
        for event in data.draw(
            st.lists(st.sampled_from(["read", "set_weights", "skip", "mask", "resume"]), max_size=12)
        ):
            getattr(job, event)()
        job.read()
        job.resume()


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_long_run_is_in_the_pages_too(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = Job(data, Path(folder).resolve())
        for _ in range(60):
            getattr(job, data.draw(st.sampled_from(EVENTS[:-1])))()
        job.resume()


# the vectors


def model_of(facts: dict[str, Any]) -> tuple[Plan, list[float | None]]:
    """A plan of the vectors, and its `max_epochs`."""
    arguments = {key: value for key, value in facts["arguments"].items() if key != "allow_small_blocks"}
    most = arguments.pop("max_epochs", {})
    used = [
        Used(
            documents_of_vector(VECTORS["corpora"][entry["corpus"]]),
            entry.get("take", 1.0),
            name=name,
            pack=entry.get("pack", "cut"),
        )
        for name, entry in facts["corpora"].items()
    ]
    weights = [entry.get("weight", 1.0) for entry in facts["corpora"].values()]
    plan = Plan(used, weights=weights, changes=facts.get("changes", ()), **arguments)
    return plan, [most.get(name) for name in facts["corpora"]]


def read(run: Run, event: dict[str, Any]) -> dict[str, Any]:
    if run.is_over and run.plan.epochs is not None:
        run.begin()
    steps: list[list[int]] = []
    rows: dict[str, Any] = {}
    while len(steps) < event["read"]:
        batch = run.step(event["global_batch_size"], event.get("rank", 0), event.get("ranks", 1))
        if batch is None:
            break
        steps.append(batch["sample_index"])
        found = zip(*(batch[key] for key in ("sample_index", "corpus_index", "input_ids", "labels")), strict=True)
        rows |= {str(sample): row for sample, *row in found if sample >= 0}
    return {"steps": steps, "rows": rows}


@pytest.mark.parametrize("name", VECTORS["runs"])
def test_the_pages_alone_give_every_value_of_the_vectors_of_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    files: dict[str, bytes] = {}
    monkeypatch.setattr(page_model, "content_of", files.__getitem__)
    facts, line = VECTORS["runs"][name]["plan"], ""
    run = Run(*model_of(facts))
    for event in VECTORS["runs"][name]["events"]:
        if "read" in event:
            assert read(run, event) == event["gives"]
        elif "save" in event:
            line = saved(run)
            assert line == event["gives"]
        elif "set_weights" in event:
            run.set_weights([event["set_weights"][used.name] for used in run.plan.used])
        elif "skip" in event:
            run.skip(event["skip"])
        elif "mask" in event:
            file = f"{runs.FOLDER}/{event['file']}"
            files[file] = event["content"].encode()
            run.mask([used.name for used in run.plan.used].index(event["mask"]), file)
        else:
            arguments = facts["arguments"] | ({"seq_len": event["seq_len"]} if "seq_len" in event else {})
            changes = {} if "plan" in event or "changes" not in facts else {"changes": facts["changes"]}
            facts = {"corpora": event.get("plan", facts["corpora"]), "arguments": arguments, **changes}
            plan, most = model_of(facts)
            run = resumed(plan, line, max_epochs=most, **event["resume"])
