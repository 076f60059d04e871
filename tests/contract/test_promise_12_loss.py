"""Promise 12: the labels of an epoch are exactly the tokens of the loss spans, however a corpus is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.conversations import Hand, built, targets_of
from tests.examples import crossed
from tokshard import open_corpus
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan, expand

SIZES: dict[str, Any] = {"seq_len": 8, "block_tokens": 1024, "window_blocks": 1, "seed": 5, "epochs": 1}
"""Of windows that are many, whole or cut."""


@pytest.fixture(scope="module")
def held(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Hand]]:
    return built(tmp_path_factory.mktemp("built"), 20)


def plan_of(corpus: Path, pack: str, **sizes: Any) -> StreamPlan:
    return StreamPlan({"chat": corpus}, pack=pack, allow_small_blocks=True, **{**SIZES, **sizes})


def inputs_of(batch: Any, plan: StreamPlan, loader: Any) -> list[list[tuple[int, int]]]:
    """What the plan says that each row of a batch reads: (document, place in it). Nothing, of a row that is padding."""
    samples = np.asarray(batch["sample_index"])
    traces = iter(plan.traces(samples[samples >= 0], loader.cursor))
    return [
        [(piece.document, place) for piece in next(traces) for place in range(piece.start, piece.stop)]
        if sample >= 0
        else []
        for sample in samples
    ]


def targets_in(batches: Iterable[Any], plan: StreamPlan, loader: Any, documents: list[Hand]) -> Counter[Any]:
    """The targets that batches ask for, as (document, place in it), each checked against the document."""
    found: Counter[tuple[int, int]] = Counter()
    for batch in batches:
        rows = (np.asarray(batch[key]).tolist() for key in ("input_ids", "labels"))
        for places, row, asked in zip(inputs_of(batch, plan, loader), *rows, strict=True):
            assert [documents[document].ids[place] for document, place in places] == row[: len(places)]
            assert set(asked[len(places) :]) <= {-100}  # padding is no target
            for (document, place), label in zip(places, asked, strict=False):
                if label != -100:
                    assert documents[document].ids[place + 1] == label
                    found[document, place + 1] += 1
    return found


def read(plan: StreamPlan, form: str, documents: list[Hand], *, ranks: int = 1) -> Counter[Any]:
    """The targets of an epoch, over all ranks, through one form of batches."""
    found: Counter[Any] = Counter()
    for rank in range(ranks):
        options: dict[str, Any] = {"global_batch_size": 6, "dp_rank": rank, "dp_world_size": ranks}
        if form == "numpy":
            with NumpyLoader(plan, **options) as loader:
                found += targets_in(loader, plan, loader, documents)
            continue
        is_compact = form == "compact"
        with StreamingLoader(plan, compact=is_compact, **options) as loader:
            batches = map(expand, loader) if is_compact else loader
            found += targets_in(batches, plan, loader, documents)
    return found


def test_a_manifest_counts_the_targets_of_the_records(held: tuple[Path, list[Hand]]) -> None:
    path, documents = held
    with open_corpus(path) as corpus:
        assert corpus.manifest.num_shards > 2
        assert corpus.manifest.num_targets == targets_of(documents).total()
        for index, document in enumerate(documents):
            assert corpus.document(index).tolist() == document.ids
            spans = corpus.loss_spans(index).reshape(-1, 2).tolist()
            assert {place for start, stop in spans for place in range(start, stop)} == document.targets


@crossed("pack, form, ranks", ["whole", "cut"], ["numpy", "full", "compact"], [3, 1, 2])
def test_the_targets_of_an_epoch_are_the_answers(
    held: tuple[Path, list[Hand]], pack: str, form: str, ranks: int
) -> None:
    path, documents = held
    assert read(plan_of(path, pack), form, documents, ranks=ranks) == targets_of(documents)
