"""Corpora and plans in the code and in the models of ORDER.md and STATE.md: both read the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tests.runtime.sources import ListSource, SpannedSource
from tests.spec import order
from tests.spec.order import Documents, Used
from tokshard.runtime import StreamPlan

ROW = ("input_ids", "labels", "loss_weights", "position_ids")
NOT_OF_THE_ORDER = {"allow_small_blocks", "max_epochs", "on_max_epochs"}


def documents_of_source(source: ListSource, fingerprint: str = "") -> Documents:
    tokens: Callable[[int], int] = source.tokens.tolist().__getitem__
    weights = source.target_weights if isinstance(source, SpannedSource) else None
    return Documents.of_lengths(bytes.fromhex(fingerprint or source.fingerprint), source.lengths, tokens, weights)


def model_of(corpora: Mapping[str, ListSource | Documents], **options: Any) -> order.Plan:
    """The plan of the model with the arguments of a `StreamPlan`; transforms are those of the model."""

    def of(option: str, name: str, otherwise: Any) -> Any:
        given = options.get(option) or {}
        return given.get(name, otherwise) if isinstance(given, Mapping) else given

    used = [
        Used(
            documents_of_source(source) if isinstance(source, ListSource) else source,
            take=of("take", name, 1.0),
            start_epoch=of("start_epoch", name, 0),
            name=name,
            pack=of("pack", name, "cut"),
        )
        for name, source in corpora.items()
    ]

    def listed(weights: Mapping[str, float] | None) -> list[float] | None:
        return None if weights is None else [weights[name] for name in corpora]

    changes: Any = [(start, listed(weights)) for start, weights in options.get("schedule", ())]
    others = options.keys() - NOT_OF_THE_ORDER - {"take", "start_epoch", "pack", "weights", "schedule"}
    shared = {name: options[name] for name in others}
    return order.Plan(used, weights=listed(options.get("weights")), changes=changes, **shared)


def stirred(sample: order.Sample, random: order.Random) -> order.Sample:
    """What `stir` of transforms.py does, in the model."""
    if not sample.tokens:
        return sample
    at = -random.integer(100) % len(sample.tokens)
    return replace(sample, tokens=sample.tokens[at:] + sample.tokens[:at], nexts=[order.NO_LABEL, *sample.nexts[1:]])


def assert_equal(plan: StreamPlan, model: order.Plan, sample: int) -> None:
    """A sample alone, and the pieces of documents that it reads, are those of the model."""
    assert [(piece.document, piece.start, piece.stop) for piece in plan.trace(sample)] == model.pieces(sample)
    assert listed(plan.sample(sample)) == alone(model.row(sample))


def alone(row: order.Row) -> dict[str, Any]:
    """A row of the model as a batch, without the dimension of rows."""
    return {key: value[0] if key in ROW else value for key, value in order.as_batch([row]).items()}


def listed(batch: dict[str, Any]) -> dict[str, Any]:
    """The values of a batch as lists."""
    return {key: np.asarray(value).tolist() for key, value in batch.items()}
