"""Golden values of the order: what any implementation of it has to give. `python -m tests.vectors.order` writes them.

They are read by a test and may be by other implementations, so the file explains itself. They change only when
`ORDER_VERSION` does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tokshard.runtime.order.permutation import ORDER_VERSION
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.infilling import FillInTheMiddle

FILE = Path(__file__).with_name("order.json")

ABOUT = {
    "corpora": "content is the content fingerprint, by which a corpus is known (here only a name that was hashed). "
    "Token p of a corpus has the id first_token + p, but the last of each document is 0. Documents have the lengths "
    "document_lengths, or all of them document_tokens up to num_tokens. loss are loss spans, for each document start, "
    "stop, start, stop, ..., and loss_weights their weights, which are 1 by default",
    "plans": "corpora in the order of the plan, each with its weight, pack and what else differs from the defaults; "
    "changes are [global sample, weights], and fill_in_the_middle has the arguments of a transform",
    "located": "[global sample, index of its corpus in the plan, which sample of that corpus in its stream it is]",
    "pieces": "of a global sample, in order: [document, first token of it, the token after the last]",
    "rows": "of a global sample: what a batch has; -100 is not a label. loss_weights are in plans with loss spans",
}

_LENGTHS = [(13 * k) % 47 + 6 for k in range(80)]


def _spans(number: int, length: int) -> list[int]:
    """Loss spans of a document: none in some, all tokens but the first in some."""
    if number % 4 < 2:
        return [1, length] if number % 4 else []
    return [length // 3, length // 2, length - 2, length]


CORPORA: dict[str, dict[str, Any]] = {
    "a": {"document_lengths": [5, 9, 1, 30, 12, 3, 80, 7, 2, 19, 4, 41, 6, 1, 25, 10], "first_token": 1},
    "b": {"document_lengths": [(7 * k) % 23 + 1 for k in range(60)], "first_token": 1001},
    "c": {"document_lengths": [11] * 20, "first_token": 3001},
    "small": {"document_lengths": [3, 1, 2], "first_token": 5001},
    "many": {"document_lengths": [(11 * k) % 37 + 1 for k in range(170)], "first_token": 6001},
    "more": {"document_lengths": [(11 * k) % 37 + 1 for k in range(600)], "first_token": 20001},
    "halves": {"document_lengths": [9] * 300, "first_token": 40001},
    "halves and less": {"document_lengths": [9, 8, 9] * 100, "first_token": 45001},
    "long": {"document_lengths": [3, 700, 5, 1, 2900, 40, 333], "first_token": 50001},
    "large": {"num_tokens": 10**12 + 7, "document_tokens": 9},
    "chat": {"document_lengths": _LENGTHS, "first_token": 55001, "loss": list(map(_spans, range(80), _LENGTHS))},
    "weighted": {
        "document_lengths": _LENGTHS,
        "first_token": 57001,
        "loss": [[n // 3, n // 2, n // 2, n - 2, n - 1, n] for n in _LENGTHS],
        "loss_weights": [[0.5, 0.1 * (k % 3 + 1), 3.0] for k in range(80)],
    },
}

_SMALL = {"seq_len": 16, "block_tokens": 32, "window_blocks": 3, "allow_small_blocks": True}
_FIRST = list(range(24))

PLANS: dict[str, dict[str, Any]] = {
    "one corpus": {
        "corpora": {"a": {"corpus": "a"}},
        "arguments": {**_SMALL, "seed": 29},
        "pieces": [*_FIRST, 1_000, 10**9, 2**55],
        "rows": [0, 1, 15, 16, 10**9],
    },
    "two epochs": {
        "corpora": {"b": {"corpus": "b"}},
        "arguments": {**_SMALL, "seed": 2**64 - 1, "epochs": 2},
        "pieces": [0, 40, 41, 42, -1],
        "rows": [0, -1],
    },
    "five corpora": {
        "corpora": {
            "a": {"corpus": "a", "weight": 0.5},
            "b": {"corpus": "b", "weight": 0.25, "take": 0.4},
            "c": {"corpus": "c", "weight": 1e-3},
            "a again": {"corpus": "a", "weight": 2.0, "start_epoch": 7},
            "small": {"corpus": "small", "weight": 0.3},
        },
        "arguments": {**_SMALL, "seed": 5},
        "changes": [[1_000, [0.5, 0.25, 1.0, 0.0, 0.3]], [1_500, [0.1, 0.2, 0.3, 0.4, 0.5]]],
        "located": [*range(60), *range(990, 1_010), *range(1_495, 1_505), 10**6, 2**40, 2**50 + 1],
        "pieces": [*_FIRST, *range(998, 1_006), *range(1_498, 1_503), 10**6],
        "rows": [0, 1, 1_003, 1_502],
    },
    "four streams, of which one corpus is dealt to each and one is shared": {
        "corpora": {
            "many": {"corpus": "many", "weight": 0.6},
            "a": {"corpus": "a", "weight": 0.3},
            "many again": {"corpus": "many", "weight": 0.1, "take": 0.7, "start_epoch": 2},
        },
        "arguments": {**_SMALL, "seed": 11, "num_streams": 4},
        "changes": [[41, [0.2, 0.2, 0.6]], [43, [0.0, 0.5, 0.5]], [600, [0.3, 0.3, 0.4]]],
        "located": [*range(60), *range(596, 612), 10**6, 2**40],
        "pieces": [*range(64), *range(600, 604), 10**6 + 3],
        "rows": [0, 1, 2, 3, 603],
    },
    "three streams of one seed": {
        "corpora": {"many": {"corpus": "many"}},
        "arguments": {**_SMALL, "seed": 12, "num_streams": 3},
        "pieces": [*range(12), 190, 191, 10**9],
        "rows": [2, 191],
    },
    "64 streams": {
        "corpora": {"large": {"corpus": "large", "weight": 0.9}, "many": {"corpus": "many", "weight": 0.1}},
        "arguments": {"seq_len": 64, "block_tokens": 4_096, "window_blocks": 1_000, "seed": 4, "num_streams": 64},
        "located": [*range(128), 10**6, 10**12],
        "pieces": [0, 1, 63, 64, 10**9],
        "rows": [],
    },
    "more than 65,536 blocks, pieces and samples": {
        "corpora": {"large": {"corpus": "large"}},
        "arguments": {"seq_len": 8, "block_tokens": 16_384, "window_blocks": 64, "seed": 3},
        "pieces": [0, 1, 2, 131_071, 131_072, 10**11],
        "rows": [],
    },
    "packed whole": {
        "corpora": {"more": {"corpus": "more", "pack": "whole"}},
        "arguments": {"seq_len": 16, "block_tokens": 2_048, "window_blocks": 2, "seed": 31, "epochs": 2},
        "pieces": [*range(12), *range(250, 266), 700, -1],
        "rows": [0, 1, 700, -1],
    },
    "packed whole, with chunks that are put off": {
        "corpora": {"halves": {"corpus": "halves", "pack": "whole"}},
        "arguments": {"seq_len": 16, "block_tokens": 2_048, "window_blocks": 1, "seed": 32},
        "pieces": [*range(8), 128, 129, 10**9],
        "rows": [0, 129],
    },
    "packed whole, with long and short chunks that are put off": {
        "corpora": {"halves and less": {"corpus": "halves and less", "pack": "whole"}},
        "arguments": {"seq_len": 16, "block_tokens": 2_048, "window_blocks": 1, "seed": 32},
        "pieces": [*range(8), 128, 129, 10**9],
        "rows": [0, 129],
    },
    "packed whole beside a corpus that is cut, in two streams": {
        "corpora": {
            "more": {"corpus": "more", "pack": "whole", "weight": 0.5, "take": 0.9},
            "long": {"corpus": "long", "pack": "whole", "weight": 0.3},
            "many": {"corpus": "many", "weight": 0.2, "start_epoch": 3},
        },
        "arguments": {"seq_len": 8, "block_tokens": 1_024, "window_blocks": 1, "seed": 33, "num_streams": 2},
        "located": [*range(20), 10**6],
        "pieces": [*range(40), 1_000, 10**6 + 3],
        "rows": [0, 1, 2, 3, 10**6],
    },
    "loss spans and weights, packed whole, beside a corpus without": {
        "corpora": {
            "chat": {"corpus": "chat", "pack": "whole", "weight": 0.4},
            "weighted": {"corpus": "weighted", "pack": "whole", "weight": 0.4},
            "a": {"corpus": "a", "weight": 0.2},
        },
        "arguments": {"seq_len": 16, "block_tokens": 2_048, "window_blocks": 1, "seed": 41},
        "pieces": [*range(12), 1_000],
        "rows": [*range(12), 1_000],
    },
    "loss spans and weights, cut, with a transform": {
        "corpora": {
            "chat": {"corpus": "chat", "weight": 0.5},
            "weighted": {"corpus": "weighted", "weight": 0.3},
            "a": {"corpus": "a", "weight": 0.2},
        },
        "arguments": {**_SMALL, "seed": 43},
        "fill_in_the_middle": {
            "prefix_id": 60_001,
            "suffix_id": 60_002,
            "middle_id": 60_003,
            "rate": 0.9,
            "spm_rate": 0.5,
        },
        "pieces": list(range(12)),
        "rows": [*range(24), 10**6],
    },
}


class _Documents(ListSource):
    def __init__(self, content: str, document_lengths: Sequence[int], first_token: int) -> None:
        super().__init__(document_lengths, first_token=first_token)
        self.content = content

    @property
    def fingerprint(self) -> str:
        return self.content


class _Spanned(SpannedSource):
    def __init__(self, content: str, **facts: Any) -> None:
        super().__init__(target_weights(facts), first_token=facts["first_token"])
        self.content = content

    @property
    def fingerprint(self) -> str:
        return self.content


class _Periodic(PeriodicSource):
    dtype = np.dtype(np.uint32)

    def __init__(self, content: str, num_tokens: int, document_tokens: int) -> None:
        super().__init__(num_tokens, document_tokens)
        self.fingerprint = content


def _content(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()


def target_weights(facts: dict[str, Any]) -> list[list[float]]:
    """Of each document of a corpus with loss spans, the weights of its tokens."""
    found = [[0.0] * length for length in facts["document_lengths"]]
    for number, (weights, bounds) in enumerate(zip(found, facts["loss"], strict=True)):
        of_spans = facts["loss_weights"][number] if "loss_weights" in facts else [1.0] * (len(bounds) // 2)
        for start, stop, weight in zip(bounds[::2], bounds[1::2], of_spans, strict=True):
            weights[start:stop] = [weight] * (stop - start)
    return found


def _plan(spec: dict[str, Any]) -> StreamPlan:
    entries = spec["corpora"]
    sources: dict[str, Any] = {}
    for name, entry in entries.items():
        facts = CORPORA[entry["corpus"]]
        kind: Any = _Spanned if "loss" in facts else _Documents if "document_lengths" in facts else _Periodic
        sources[name] = kind(_content(entry["corpus"]), **facts)
    names = list(entries)
    return StreamPlan(
        sources,
        weights={name: entry.get("weight", 1.0) for name, entry in entries.items()},
        take={name: entry.get("take", 1.0) for name, entry in entries.items()},
        start_epoch={name: entry.get("start_epoch", 0) for name, entry in entries.items()},
        pack={name: entry.get("pack", "cut") for name, entry in entries.items()},
        schedule=[(start, dict(zip(names, weights, strict=True))) for start, weights in spec.get("changes", [])],
        transforms=[FillInTheMiddle(**spec["fill_in_the_middle"])] if "fill_in_the_middle" in spec else [],
        **spec["arguments"],
    )


def _values(spec: dict[str, Any]) -> dict[str, Any]:
    plan = _plan(spec)
    mixture, located = plan.mixture(plan.cursor()), spec.get("located", [])
    corpora, samples = mixture.locate(np.array(located, np.int64))

    def index(sample: int) -> int:
        return sample if sample >= 0 else (plan.num_samples or 0) + sample

    rows = {}
    for sample in map(index, spec["rows"]):
        row = plan.sample(sample)
        keys = ("input_ids", "labels", "loss_weights", "position_ids")
        rows[str(sample)] = {key: row[key].tolist() for key in keys if key in row}
    return {
        "num_samples": plan.num_samples,
        "located": [list(entry) for entry in zip(located, corpora.tolist(), samples.tolist(), strict=True)],
        "pieces": {
            str(sample): [[piece.document, piece.start, piece.stop] for piece in plan.trace(sample)]
            for sample in map(index, spec["pieces"])
        },
        "rows": rows,
    }


def made() -> dict[str, Any]:
    """The file as the code of now makes it."""
    return {
        "about": ABOUT,
        "order_version": ORDER_VERSION,
        "corpora": {name: {"content": _content(name), **facts} for name, facts in CORPORA.items()},
        "plans": {
            name: {
                **{key: spec[key] for key in ("corpora", "arguments", "changes", "fill_in_the_middle") if key in spec},
                **_values(spec),
            }
            for name, spec in PLANS.items()
        },
    }


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
