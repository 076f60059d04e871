"""For tests of loaders: small plans, what batches have, and what a plan says that they have."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.runtime.sources import ListSource
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

if TYPE_CHECKING:
    import torch

    from tokshard.runtime.tensors import StreamDataset, StreamingLoader

# functions import torch themselves: some tests that use this module run without it

Batch = dict[str, Any]  # of tensors, or of arrays
SIZES = {"seq_len": 6, "block_tokens": 16, "window_blocks": 3, "allow_small_blocks": True}


def two_corpora(**options: Any) -> StreamPlan:
    a, b = ListSource([9, 4, 30, 1, 12, 3] * 3), ListSource([5, 17, 2] * 4, first_token=1000)
    return StreamPlan({"a": a, "b": b}, **{"weights": {"a": 0.7, "b": 0.3}, "seed": 4, **SIZES, **options})


def one_corpus(**options: Any) -> StreamPlan:
    return StreamPlan(ListSource([9, 4, 30, 1, 12, 3, 7]), **{"seed": 4, **SIZES, **options})


def take(loader: StreamingLoader, count: int) -> list[Batch]:
    """The next batches: what a loop receives that ends after so many."""
    batches: list[Batch] = []
    for batch in loader if count else ():
        batches.append(batch)
        if len(batches) == count:
            break
    return batches


def state_after(plan: StreamPlan, samples: int) -> dict[str, Any]:
    """The state of a job that has read so many samples."""
    with NumpyLoader(plan, global_batch_size=plan.num_streams) as loader:
        for _, _ in zip(range(samples // plan.num_streams), loader, strict=False):
            pass
        return loader.state_dict()


def resumed(plan: StreamPlan, state: Any, size: int = 0, **choices: Any) -> NumpyLoader:
    """A loader that goes on from a state, in batches of some size."""
    loader = NumpyLoader(plan, global_batch_size=size or plan.num_streams)
    loader.load_state_dict(state, **choices)
    return loader


def rows_of(batches: list[Batch]) -> list[dict[str, Any]]:
    return [
        {
            key: batch[key][row].tolist()
            for key in ("input_ids", "labels", "position_ids", "corpus_index", "sample_index")
        }
        for batch in batches
        for row in range(len(batch["sample_index"]))
    ]


def expected_rows(plan: StreamPlan, samples: Iterable[int], cursor: Any = None) -> list[dict[str, Any]]:
    rows = []
    for sample in samples:
        row = plan.sample(sample, cursor)
        rows.append({key: row[key].tolist() for key in ("input_ids", "labels", "position_ids")})
        rows[-1] |= {"corpus_index": int(row["corpus_index"][0]), "sample_index": sample}
    return rows


def reads_of(plan: StreamPlan, samples: Iterable[int], cursor: Any = None) -> Counter[tuple[str, int, int]]:
    """How often samples read each token, as (corpus, document, place in it)."""
    return Counter(
        (piece.corpus, piece.document, place)
        for pieces in plan.traces(np.array(list(samples), np.int64), cursor)
        for piece in pieces
        for place in range(piece.start, piece.stop)
    )


def targets_in(batches: Sequence[Batch]) -> tuple[int, np.float32]:
    """The labels that are not -100 in the batches of all ranks, and their weights."""
    labels = [np.asarray(batch["labels"]) != -100 for batch in batches]
    weights = [np.asarray(batch.get("loss_weights", here)) for batch, here in zip(batches, labels, strict=True)]
    return int(sum(map(np.sum, labels))), np.float32(sum(each.sum(dtype=np.float64) for each in weights))


def dataloader(dataset: StreamDataset, **options: Any) -> torch.utils.data.DataLoader[Batch]:
    from torch.utils.data import DataLoader

    return DataLoader(dataset, batch_size=None, sampler=dataset.sampler, **options)
