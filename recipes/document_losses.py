"""The loss of each document in some samples of a plan, under a model of transformers: a parquet file for any tool.

    pip install transformers
    python -m tokshard.trainer.hugging_face OUT/checkpoints/step-00040000 --out llama     # a run of tokshard's trainer
    python recipes/document_losses.py recipe.toml llama 2048000:2048512 losses.parquet
    python recipes/document_losses.py mix.toml llama 2048000:2048512 losses.parquet --state loader.json

Samples `A:B` are those of a line of metrics.jsonl, or step x global_batch_size. A state from after them says which
weights and masks they have; without one, those of the plan hold. The names of the columns are those of
`tokshard trace --json`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM

from tokshard.runtime import Cursor, NumpyLoader, StreamPlan

SCHEMA = pa.schema(
    [
        *((name, pa.int64()) for name in ("sample", "document", "start", "stop", "targets")),
        *((name, pa.string()) for name in ("corpus", "shard")),
        *((name, pa.float64()) for name in ("loss_weights", "loss")),  # the sum of the weights, and their mean loss
    ]
)


@torch.no_grad()
def losses(model: Any, plan: StreamPlan, cursor: Cursor, sample: int) -> Iterator[dict[str, Any]]:
    """A row for each part of a document in a sample. A part is read alone: documents of a row do not see each other."""
    row, place = plan.sample(sample, cursor), 0
    weights = np.asarray(row.get("loss_weights", row["labels"] != -100), np.float64)
    ids, labels = torch.from_numpy(row["input_ids"]), torch.from_numpy(row["labels"])
    for piece in plan.trace(sample, cursor):
        here = slice(place, place := place + piece.stop - piece.start)
        logits = model(input_ids=ids[here][None]).logits[0].float()
        each = cross_entropy(logits, labels[here], reduction="none", ignore_index=-100).double().numpy()
        weight = float(weights[here].sum())
        yield {
            **{name: getattr(piece, name) for name in ("corpus", "shard", "document", "start", "stop")},
            "sample": sample,
            "targets": int((labels[here] != -100).sum()),
            "loss_weights": weight,
            "loss": float(each @ weights[here]) / weight if weight else None,
        }


def samples(text: str) -> range:
    """Samples `A:B`."""
    start, stop = map(int, text.split(":"))
    return range(start, stop)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, of in {"plan": str, "model": str, "samples": samples, "out": str}.items():
        parser.add_argument(name, type=of)
    parser.add_argument("--state", type=Path, help="of a loader, as JSON")
    given = parser.parse_args()
    plan, model = StreamPlan.load(given.plan), AutoModelForCausalLM.from_pretrained(given.model).eval()
    with NumpyLoader(plan, global_batch_size=1) as loader:
        if given.state is not None:
            loader.load_state_dict(json.loads(given.state.read_bytes()))
        cursor = loader.cursor
    with pq.ParquetWriter(given.out, SCHEMA) as writer:
        for sample in given.samples:
            writer.write_table(pa.Table.from_pylist(list(losses(model, plan, cursor, sample)), SCHEMA))
