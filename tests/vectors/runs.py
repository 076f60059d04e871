"""Golden values of runs: what a job has to read and to save. `python -m tests.vectors.runs` writes them.

They are read by a test and may be by other implementations, so the file explains itself. ORDER.md and ROWS.md have the
rules of what is read, STATE.md those of the state. To add a run, write its plan and its events.
"""

from __future__ import annotations

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.runtime.states import sealed, values_of
from tests.vectors.order import plan_of, text
from tokshard.runtime.loader import NumpyLoader

FILE = Path(__file__).with_name("runs.json")
FOLDER = "/lists"

FACTS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
"""The file itself says what happens: another run is a new entry, and the program fills in what its events give."""


class _Job:
    """A job that follows the events of a run.

    Args:
        folder: that stands for `FOLDER`.
    """

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._plan, self._state = plan_of(spec), {"cursor": ""}
        self._division = {"global_batch_size": self._plan.num_streams}
        self._loader = NumpyLoader(self._plan, **self._division)

    def gives(self, event: dict[str, Any]) -> Any:
        """Let something happen, and say what comes of it."""
        if "read" in event:
            return self._read(event)
        if "set_weights" in event:
            self._loader.set_weights(event["set_weights"])
        elif "skip" in event:
            self._loader.skip(event["skip"])
        elif "mask" in event:
            (self._folder / event["file"]).write_bytes(event["content"].encode())
            self._loader.mask(event["mask"], self._folder / event["file"])
        elif "save" in event:
            self._state = self._loader.state_dict()
            values = values_of(self._state)
            for mask in values.get("masks", ()):
                mask["file"] = mask["file"].replace(str(self._folder), FOLDER)
            return sealed(values)["cursor"]
        else:
            self._resume(event)
        return None

    def _read(self, event: dict[str, Any]) -> dict[str, Any]:
        self._divide(event)
        steps, rows = [], {}
        for _, batch in zip(range(event["read"]), self._loader, strict=False):
            steps.append(batch["sample_index"].tolist())
            for row, sample in enumerate(steps[-1]):
                if sample >= 0:
                    keys = ("corpus_index", "input_ids", "labels", "loss_weights")
                    rows[str(sample)] = [batch[key][row].tolist() for key in keys if key in batch]
        return {"steps": steps, "rows": rows}

    def _divide(self, event: dict[str, Any]) -> None:
        """Go on with another batch size or on another rank, if the event says so."""
        names = {
            "global_batch_size": "global_batch_size",
            "rank": "dp_rank",
            "ranks": "dp_world_size",
            "uneven": "uneven",
        }
        division = {names[key]: value for key, value in event.items() if key in names}
        if division != self._division:
            before, self._division = self._loader, division
            self._loader = NumpyLoader(self._plan, **division)
            self._loader.load_state_dict(before.state_dict())

    def _resume(self, event: dict[str, Any]) -> None:
        self._spec = changed(self._spec, event)
        self._plan = plan_of(self._spec)
        self._loader = NumpyLoader(self._plan, **self._division)
        self._loader.load_state_dict(self._state, **event["resume"])


def changed(facts: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """The plan after an event that resumes."""
    arguments = dict(facts["arguments"])
    if "seq_len" in event:
        arguments["seq_len"] = event["seq_len"]
    return {**({"corpora": event["plan"]} if "plan" in event else facts), "arguments": arguments}


def events_of(run: dict[str, Any]) -> list[dict[str, Any]]:
    """The events of a run, with what they give."""
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # passes end
        job, events = _Job(run["plan"], Path(folder).resolve()), []
        for event in run["events"]:
            given = job.gives(event)
            events.append(event if given is None else {**event, "gives": given})
    return events


def made() -> dict[str, Any]:
    """The file as the code of now makes it."""
    return {**FACTS, "runs": {name: {**run, "events": events_of(run)} for name, run in FACTS["runs"].items()}}


if __name__ == "__main__":
    FILE.write_text(text(made()) + "\n")
