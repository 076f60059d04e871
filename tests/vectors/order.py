"""Golden values of the order: what any implementation of it has to give. `python -m tests.vectors.order` writes them.

They are read by a test and may be by other implementations, so the file explains itself. They change only when
`ORDER_VERSION` does. To add a plan, write its corpora, its arguments and the samples of interest, with empty values.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from recipes.fill_in_the_middle import FillInTheMiddle
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tokshard.runtime import TokenSource
from tokshard.runtime.order.permutation import ORDER_VERSION
from tokshard.runtime.plan import StreamPlan

FILE = Path(__file__).with_name("order.json")

FACTS: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
"""The file itself says what is planned: another plan is a new entry, whose values the program fills in."""


def target_weights(facts: dict[str, Any]) -> list[list[float]]:
    """Of each document of a corpus with loss spans, the weights of its tokens."""
    found = [[0.0] * length for length in facts["document_lengths"]]
    for number, (weights, bounds) in enumerate(zip(found, facts["loss"], strict=True)):
        of_spans = facts["loss_weights"][number] if "loss_weights" in facts else [1.0] * (len(bounds) // 2)
        for start, stop, weight in zip(bounds[::2], bounds[1::2], of_spans, strict=True):
            weights[start:stop] = [weight] * (stop - start)
    return found


def source_of(facts: dict[str, Any]) -> TokenSource:
    """A corpus of the file, with its fingerprint."""
    if "num_tokens" in facts:
        periodic = PeriodicSource(facts["num_tokens"], facts["document_tokens"])
        periodic.dtype, periodic.fingerprint = np.dtype(np.uint32), facts["content"]
        return periodic
    kind, documents = (
        (SpannedSource, target_weights(facts)) if "loss" in facts else (ListSource, facts["document_lengths"])
    )
    of_content: Any = type("OfContent", (kind,), {"fingerprint": facts["content"]})
    source: TokenSource = of_content(documents, first_token=facts["first_token"])
    return source


def plan_of(facts: dict[str, Any]) -> StreamPlan:
    """A plan of the file."""
    entries = facts["corpora"]
    names = list(entries)
    return StreamPlan(
        {name: source_of(FACTS["corpora"][entry["corpus"]]) for name, entry in entries.items()},
        weights={name: entry.get("weight", 1.0) for name, entry in entries.items()},
        take={name: entry.get("take", 1.0) for name, entry in entries.items()},
        start_epoch={name: entry.get("start_epoch", 0) for name, entry in entries.items()},
        pack={name: entry.get("pack", "cut") for name, entry in entries.items()},
        schedule=[(start, dict(zip(names, weights, strict=True))) for start, weights in facts.get("changes", [])],
        transforms=[FillInTheMiddle(**facts["fill_in_the_middle"])] if "fill_in_the_middle" in facts else [],
        **facts["arguments"],
    )


def values_of(facts: dict[str, Any]) -> dict[str, Any]:
    """What a plan of the file gives, for the samples of the file."""
    plan = plan_of(facts)
    located = [sample for sample, *_ in facts["located"]]
    corpora, samples = plan.mixture(plan.cursor()).locate(np.array(located, np.int64))
    rows = {}
    for sample in facts["rows"]:
        row = plan.sample(int(sample))
        keys = ("input_ids", "labels", "loss_weights", "position_ids")
        rows[sample] = {key: row[key].tolist() for key in keys if key in row}
    return {
        "num_samples": plan.num_samples,
        "located": [list(entry) for entry in zip(located, corpora.tolist(), samples.tolist(), strict=True)],
        "pieces": {
            sample: [[piece.document, piece.start, piece.stop] for piece in plan.trace(int(sample))]
            for sample in facts["pieces"]
        },
        "rows": rows,
    }


def made() -> dict[str, Any]:
    """The file as the code of now makes it."""
    plans = {name: {**facts, **values_of(facts)} for name, facts in FACTS["plans"].items()}
    return {**FACTS, "order_version": ORDER_VERSION, "plans": plans}


def text(value: Any, depth: int = 0) -> str:
    """JSON in which lists of numbers, and what is short or deep, are one line."""
    plain = json.dumps(value)
    is_row = isinstance(value, list) and not any(isinstance(entry, list) for entry in value)
    if depth == 4 or is_row or not isinstance(value, dict | list) or len(plain) < 100:
        return plain
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {text(part, depth + 1)}" for key, part in value.items()]
    else:
        parts = [text(part, depth + 1) for part in value]
    lines = ",\n".join(" " * (depth + 1) + part for part in parts)
    opened, closed = "{}" if isinstance(value, dict) else "[]"
    return f"{opened}\n{lines}\n{' ' * depth}{closed}"


if __name__ == "__main__":
    FILE.write_text(text(made()) + "\n")
