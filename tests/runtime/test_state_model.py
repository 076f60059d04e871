"""Runs against a model of ORDER.md and STATE.md that was written by someone who had never seen the code."""

from __future__ import annotations

import json
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime import page_model
from tests.runtime.histories import EVENTS, Held, Job, T
from tests.runtime.page_model import Plan, Run, Used
from tests.runtime.sources import ListSource, SpannedSource
from tests.runtime.state_model import resumed, saved
from tests.runtime.test_page_model import documents_of_source, documents_of_vector, transforms_of_vector
from tests.vectors import runs

PARTS = {"a": [7, 30, 11, 2] * 9, "b": [5, 17, 40, 1, 1] * 7, "c": [3], "d": [60, 2] * 12}
SOURCES = {name: ListSource(part, name=name) for name, part in PARTS.items()}
SOURCES |= {"longer": ListSource([9, 30, 1, 5, 12, 2, 1] * 60, name="longer")}
SOURCES |= {"spans": SpannedSource([[0, 0, 1, 1, 0.1, 0], [0], [0, *[1] * 25], [0] * 9, [0, 3]] * 12, name="spans")}
HELD = {
    name: Held(source=source, documents=documents_of_source(source), lengths=source.lengths)
    for name, source in SOURCES.items()
}
VECTORS = json.loads(runs.FILE.read_text(encoding="utf-8"))


@dataclass(frozen=True)
class Drawn:
    """Draws by hypothesis."""

    data: st.DataObject

    def integer(self, low: int, high: int) -> int:
        return self.data.draw(st.integers(low, high))

    def one(self, values: Sequence[T]) -> T:
        return self.data.draw(st.sampled_from(values))

    def some(self, values: Sequence[T], most: int) -> list[T]:
        return self.data.draw(st.lists(st.sampled_from(values), max_size=most, unique=True))


def job_of(data: st.DataObject, folder: str) -> Job:
    packs = {name: data.draw(st.sampled_from(["cut", "whole"])) for name in HELD}
    if not data.draw(st.booleans()):
        packs = dict.fromkeys(HELD, "cut")
    return Job(Drawn(data), Path(folder).resolve(), HELD, packs)


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_whatever_happens_to_a_run_the_pages_alone_say_what_it_reads_and_saves(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # passes end
        job = job_of(data, folder)
        for event in data.draw(st.lists(st.sampled_from(EVENTS), max_size=12)):
            getattr(job, event)()
        job.read()
        job.resume()


@pytest.mark.slow
@settings(max_examples=examples(20), deadline=None)
@given(data=st.data())
def test_a_long_run_is_in_the_pages_too(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = job_of(data, folder)
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
    transforms = transforms_of_vector(facts)
    plan = Plan(used, weights=weights, changes=facts.get("changes", ()), transforms=transforms, **arguments)
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
        keys = ("sample_index", "corpus_index", "input_ids", "labels", "loss_weights")
        found = zip(*(batch[key] for key in keys if key in batch), strict=True)
        rows |= {str(sample): row for sample, *row in found if sample >= 0}
    return {"steps": steps, "rows": rows}


@pytest.mark.slow
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
            others = ("corpora",) if "plan" in event else ("corpora", "changes", "fill_in_the_middle")
            kept = {key: facts[key] for key in others if key in facts}
            facts = {**kept, "arguments": arguments} | ({"corpora": event["plan"]} if "plan" in event else {})
            plan, most = model_of(facts)
            run = resumed(plan, line, max_epochs=most, **event["resume"])
