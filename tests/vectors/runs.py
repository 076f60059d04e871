"""Golden values of runs: what a job has to read and to save. `python -m tests.vectors.runs` writes them.

They are read by a test and may be by other implementations, so the file explains itself. ORDER.md has the rules of what
is read, STATE.md those of the state.
"""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path
from typing import Any

from tests.runtime.states import sealed, values_of
from tests.vectors.order import CORPORA, _content, _plan, text
from tokshard.runtime.loader import NumpyLoader

FILE = Path(__file__).with_name("runs.json")
FOLDER = "/lists"

ABOUT = {
    "corpora": "as in order.json",
    "runs": "plan: as in order.json. events happen one after the other to a job that begins at sample 0; what is under "
    "'gives' has to come of each",
    "read": "so many steps of global_batch_size samples on a rank of so many ranks, fewer if the pass ends; uneven is "
    "'pad' if the ranks need not divide a step. After a read that came to the end, the next one begins anew. Gives for "
    "each step the rows of the rank: the global sample of each, -1 for padding. What a row has is under 'rows'",
    "set_weights, skip": "as STATE.md has them",
    "mask": f"documents of a corpus, listed in a file of {FOLDER}: this is the whole content of the file at that time",
    "save": "gives the line",
    "resume": "loads the line that was saved last, with other choices if they are given. 'plan', corpora of another "
    "plan without changes of weights or transforms, and 'seq_len' stay for what comes after",
    "rows": "of each event that reads, by global sample: [corpus in the plan, input_ids, labels], then loss_weights in "
    "plans with loss spans",
}

_SMALL = {"block_tokens": 32, "window_blocks": 3, "allow_small_blocks": True}
_A_AND_C = {"a": {"corpus": "a", "weight": 0.7}, "c": {"corpus": "c", "weight": 0.3}}

RUNS: dict[str, dict[str, Any]] = {
    "weights, a skip and another batch size": {
        "plan": {
            "corpora": _A_AND_C,
            "arguments": {**_SMALL, "seq_len": 16, "seed": 7},
            "changes": [[9, [0.5, 0.5]], [30, [1.0, 1e-3]]],
        },
        "events": [
            {"read": 2, "global_batch_size": 4},
            {"save": True},
            {"set_weights": {"a": 0.2, "c": 0.8}},
            {"read": 1, "global_batch_size": 4},
            {"skip": 3},
            {"skip": 2},
            {"save": True},
            {"resume": {}},
            {"read": 2, "global_batch_size": 6, "rank": 1, "ranks": 3},
            {"save": True},
            {"resume": {"weights": "plan"}},
            {"read": 3, "global_batch_size": 5},
            {"save": True},
        ],
    },
    "more than 16 changes of weights": {
        "plan": {"corpora": _A_AND_C, "arguments": {**_SMALL, "seq_len": 16, "seed": 2**64 - 1}},
        "events": [
            *(
                event
                for number in range(18)
                for event in (
                    {"read": 1, "global_batch_size": 1},
                    {"set_weights": {"a": 1.0 + number, "c": 0.1 * number}},
                )
            ),
            {"save": True},
            {"resume": {}},
            {"read": 4, "global_batch_size": 2},
            {"save": True},
        ],
    },
    "a pass that ends with padding, and begins again": {
        "plan": {
            "corpora": {"small": {"corpus": "small"}},
            "arguments": {**_SMALL, "seq_len": 4, "epochs": 3, "seed": 1},
        },
        "events": [
            {"read": 9, "global_batch_size": 3, "rank": 1, "ranks": 2, "uneven": "pad"},
            {"save": True},
            {"resume": {}},
            {"read": 9, "global_batch_size": 3},
            {"read": 1, "global_batch_size": 3},
            {"save": True},
        ],
    },
    "a corpus that is used up": {
        "plan": {
            "corpora": _A_AND_C,
            "arguments": {**_SMALL, "seq_len": 16, "seed": 3, "max_epochs": {"c": 0.55}},
        },
        "events": [
            {"read": 99, "global_batch_size": 5},
            {"save": True},
            {"set_weights": {"a": 1.0, "c": 0.0}},
            {"read": 1, "global_batch_size": 5},
            {"save": True},
        ],
    },
    "masks of lists that grow": {
        "plan": {"corpora": _A_AND_C, "arguments": {**_SMALL, "seq_len": 16, "seed": 5}},
        "events": [
            {"read": 1, "global_batch_size": 2},
            {"mask": "a", "file": "a.txt", "content": "6\n"},
            {"read": 2, "global_batch_size": 4},
            {"mask": "c", "file": "c.txt", "content": "1\n0\n"},
            {"mask": "a", "file": "a.txt", "content": "6\n3\n11\n"},
            {"save": True},
            {"resume": {}},
            {"read": 3, "global_batch_size": 4},
            {"mask": "a", "file": "other.txt", "content": "6\n3\n11\n"},
            {"save": True},
        ],
    },
    "other corpora, in three streams": {
        "plan": {
            "corpora": {"many": {"corpus": "many", "weight": 0.6}, "a": {"corpus": "a", "weight": 0.4}},
            "arguments": {**_SMALL, "seq_len": 16, "seed": 11, "num_streams": 3},
        },
        "events": [
            {"read": 2, "global_batch_size": 6},
            {"save": True},
            {
                "resume": {"corpora": "plan"},
                "plan": {"c": {"corpus": "c", "weight": 0.5}, "many": {"corpus": "many", "weight": 0.5}},
            },
            {"read": 2, "global_batch_size": 3},
            {"save": True},
            {
                "resume": {"corpora": "plan"},
                "plan": {"b": {"corpus": "b", "weight": 0.9}, "many": {"corpus": "many", "weight": 0.1}},
            },
            {"read": 2, "global_batch_size": 6, "rank": 1, "ranks": 2},
            {"save": True},
        ],
    },
    "other lengths of samples": {
        "plan": {
            "corpora": {"b": {"corpus": "b", "weight": 0.5, "take": 0.8}, "c": {"corpus": "c", "weight": 0.5}},
            "arguments": {**_SMALL, "seq_len": 16, "seed": 13},
        },
        "events": [
            {"read": 3, "global_batch_size": 3},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 24},
            {"read": 4, "global_batch_size": 2},
            {"set_weights": {"b": 0.9, "c": 0.1}},
            {"save": True},
            {"resume": {}},
            {"read": 2, "global_batch_size": 2},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 8},
            {"read": 5, "global_batch_size": 4},
            {"save": True},
        ],
    },
    "another length of samples in three streams, with other corpora": {
        "plan": {
            "corpora": {"many": {"corpus": "many", "weight": 0.7}, "a": {"corpus": "a", "weight": 0.3}},
            "arguments": {**_SMALL, "seq_len": 16, "seed": 17, "num_streams": 3},
        },
        "events": [
            {"read": 4, "global_batch_size": 6},
            {"save": True},
            {
                "resume": {"seq_len": "plan", "corpora": "plan"},
                "seq_len": 8,
                "plan": {"many": {"corpus": "many", "weight": 0.5}, "c": {"corpus": "c", "weight": 0.5}},
            },
            {"read": 3, "global_batch_size": 6},
            {"save": True},
            {
                "resume": {"corpora": "plan"},
                "plan": {
                    "c": {"corpus": "c", "weight": 0.2},
                    "b": {"corpus": "b", "weight": 0.4},
                    "many": {"corpus": "many", "weight": 0.4},
                },
            },
            {"read": 4, "global_batch_size": 6},
            {"save": True},
        ],
    },
    "two of each at one sample, and a corpus that is removed after a change of length": {
        "plan": {
            "corpora": {
                "many": {"corpus": "many", "weight": 0.7},
                "a": {"corpus": "a", "weight": 0.3},
                "b": {"corpus": "b", "weight": 0.31},
            },
            "arguments": {**_SMALL, "seq_len": 16, "seed": 2**63 + 5, "num_streams": 3},
        },
        "events": [
            {"save": True},
            {
                "resume": {"corpora": "plan"},
                "plan": {
                    "a": {"corpus": "a", "weight": 0.3},
                    "many": {"corpus": "many", "weight": 0.7},
                    "b": {"corpus": "b", "weight": 0.31},
                },
            },
            {"save": True},
            {"read": 3, "global_batch_size": 9, "rank": 1, "ranks": 2, "uneven": "pad"},
            {"mask": "a", "file": "two.txt", "content": "6\n"},
            {"mask": "a", "file": "two.txt", "content": "6\n2\n"},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 5},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 24},
            {"read": 3, "global_batch_size": 9, "rank": 0, "ranks": 2, "uneven": "pad"},
            {"save": True},
            {
                "resume": {"corpora": "plan"},
                "plan": {"b": {"corpus": "b", "weight": 0.5}, "many": {"corpus": "many", "weight": 0.5}},
            },
            {"read": 2, "global_batch_size": 6},
            {"save": True},
            {
                "resume": {"corpora": "plan", "seq_len": "plan"},
                "seq_len": 12,
                "plan": {"c": {"corpus": "c", "weight": 0.5}, "many": {"corpus": "many", "weight": 0.5}},
            },
            {"read": 2, "global_batch_size": 6},
            {"save": True},
        ],
    },
    "rows that are joined, and joined again": {
        "plan": {
            "corpora": {
                "b": {"corpus": "b", "weight": 0.5, "pack": "whole"},
                "many": {"corpus": "many", "weight": 0.5},
            },
            "arguments": {"block_tokens": 2_048, "window_blocks": 1, "seq_len": 4, "seed": 41},
        },
        "events": [
            {"read": 3, "global_batch_size": 5},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 8},
            {"read": 2, "global_batch_size": 5},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 16},
            {"read": 30, "global_batch_size": 5},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 8},
            {"read": 2, "global_batch_size": 5},
            {"save": True},
        ],
    },
    "planned changes that are many, a skip past the end, and a lower limit": {
        "plan": {
            "corpora": _A_AND_C,
            "arguments": {**_SMALL, "seq_len": 17, "seed": 23, "max_epochs": {"a": 1.3, "c": 2}},
            "changes": [[start, [1.0, 0.25 * start]] for start in range(1, 18)],
        },
        "events": [
            {"read": 6, "global_batch_size": 3},
            {"save": True},
            {"resume": {"weights": "plan"}},
            {"skip": 40},
            {"read": 9, "global_batch_size": 3},
            {"save": True},
        ],
    },
    "other lengths of samples of corpora that are packed whole": {
        "plan": {
            "corpora": {
                "more": {"corpus": "more", "weight": 0.6, "pack": "whole"},
                "long": {"corpus": "long", "weight": 0.3, "pack": "whole"},
                "b": {"corpus": "b", "weight": 0.1},
            },
            "arguments": {"block_tokens": 2_048, "window_blocks": 1, "seq_len": 16, "seed": 37},
        },
        "events": [
            {"read": 2, "global_batch_size": 4},
            {"mask": "more", "file": "more.txt", "content": "3\n4\n"},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 8},
            {"skip": 3_000},
            {"read": 3, "global_batch_size": 4, "rank": 1, "ranks": 3, "uneven": "pad"},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 16},
            {"read": 3, "global_batch_size": 4},
            {"save": True},
        ],
    },
    "loss spans and weights, with masks and a transform, and then text alone": {
        "plan": {
            "corpora": {
                "chat": {"corpus": "chat", "weight": 0.4, "pack": "whole"},
                "weighted": {"corpus": "weighted", "weight": 0.4, "pack": "whole"},
                "a": {"corpus": "a", "weight": 0.2},
            },
            "arguments": {"block_tokens": 2_048, "window_blocks": 1, "seq_len": 16, "seed": 47},
            "fill_in_the_middle": {
                "prefix_id": 60_001,
                "suffix_id": 60_002,
                "middle_id": 60_003,
                "rate": 0.7,
                "spm_rate": 0.5,
            },
        },
        "events": [
            {"read": 2, "global_batch_size": 4},
            {"mask": "weighted", "file": "weighted.txt", "content": "".join(f"{n}\n" for n in range(0, 80, 2))},
            {"mask": "chat", "file": "chat.txt", "content": "".join(f"{n}\n" for n in range(0, 80, 3))},
            {"mask": "a", "file": "text.txt", "content": "6\n11\n"},
            {"read": 4, "global_batch_size": 4, "rank": 1, "ranks": 3, "uneven": "pad"},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 8},
            {"read": 3, "global_batch_size": 4},
            {"save": True},
            {"resume": {"corpora": "plan"}, "plan": {"a": {"corpus": "a"}}},
            {"read": 2, "global_batch_size": 4},
            {"save": True},
        ],
    },
    "a pass whose last samples are longer": {
        "plan": {"corpora": {"b": {"corpus": "b"}}, "arguments": {**_SMALL, "seq_len": 16, "seed": 19, "epochs": 1}},
        "events": [
            {"read": 5, "global_batch_size": 4},
            {"save": True},
            {"resume": {"seq_len": "plan"}, "seq_len": 40},
            {"read": 99, "global_batch_size": 4},
            {"save": True},
        ],
    },
}


class _Job:
    """A job that follows the events of a run.

    Args:
        folder: that stands for `FOLDER`.
    """

    def __init__(self, spec: dict[str, Any], folder: Path) -> None:
        self._spec, self._folder = spec, folder
        self._plan, self._state = _plan(spec), {"cursor": ""}
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
        arguments = dict(self._spec["arguments"])
        if "seq_len" in event:
            arguments["seq_len"] = event["seq_len"]
        self._spec = {**self._spec, "arguments": arguments}
        if "plan" in event:
            self._spec = {"corpora": event["plan"], "arguments": arguments}
        self._plan = _plan(self._spec)
        self._loader = NumpyLoader(self._plan, **self._division)
        self._loader.load_state_dict(self._state, **event["resume"])


def made() -> dict[str, Any]:
    """The file as the code of now makes it."""
    runs = {}
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")  # passes end
        for name, run in RUNS.items():
            job = _Job(run["plan"], Path(folder).resolve())
            events = [
                event | ({} if (found := job.gives(event)) is None else {"gives": found}) for event in run["events"]
            ]
            runs[name] = {"plan": run["plan"], "events": events}
    corpora = {name: {"content": _content(name), **facts} for name, facts in CORPORA.items() if name != "large"}
    return {"about": ABOUT, "corpora": corpora, "runs": runs}


if __name__ == "__main__":
    FILE.write_text(text(made()) + "\n")
