"""``python -m tokshard.trainer.document_losses RUN --steps A:B --out FILE``: losses of the documents of some steps.

One checkpoint, the newest before the steps, judges all of them, so that documents of different steps can be compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from tokshard.errors import UNDECODABLE, UsageError
from tokshard.run_files.checkpoint_directory import STATE_FILE, checkpoints_by_step, state_of
from tokshard.run_files.model_shape import model_shape
from tokshard.run_files.recipe import resolve, vocabulary_of
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.narrow import IGNORED
from tokshard.runtime.state import load_state, other_weights, plan_of_run
from tokshard.store import open_store, written
from tokshard.trainer import checkpoint
from tokshard.trainer.attention import Documents
from tokshard.trainer.launcher import exit_code_of
from tokshard.trainer.metrics_file import Line
from tokshard.trainer.model import Transformer
from tokshard.trainer.parallel import make_mesh, process_group, say, sharded_model

SCHEMA = pa.schema(
    [
        ("step", pa.int64()),
        ("sample", pa.int64()),
        ("corpus", pa.string()),
        ("shard", pa.string()),
        ("document", pa.int64()),
        ("start", pa.int64()),
        ("stop", pa.int64()),
        ("targets", pa.int64()),
        ("loss_weights", pa.float64()),
        ("loss", pa.float64()),
    ]
)
"""A row for each part of a document in a sample: tokens `start` to `stop` of it, how many of them are targets, the sum
of the weights of these, and their weighted mean loss; null if there are none. Without loss spans every weight is 1."""


def document_losses(run: str, steps: range) -> Iterator[pa.RecordBatch]:
    """The losses of documents, step by step, on this process alone. Takes a forward pass over the samples of the steps.

    Args:
        run: directory of a run of the trainer.
        steps: as in its metrics.jsonl. Those that the recipe left out have no rows.

    Yields:
        A batch of `SCHEMA` for each step.

    Raises:
        UsageError: the run has no checkpoint before the steps, or has not done them.
        TokshardError: a checkpoint or a corpus is damaged.
    """
    samples = _samples_of(os.path.join(run, "metrics.jsonl"), steps)
    saved = checkpoints_by_step(os.path.join(run, "checkpoints"))
    before = [path for step, path in saved.items() if step < steps.start]
    if not before:
        raise UsageError(
            f"{run} has no checkpoint before step {steps.start}",
            hint=f"ask for later steps; checkpoints are at {', '.join(map(str, saved)) or 'no step'}",
        )
    # what was masked, and which weights the samples have, is on record in a state from after the steps
    after = [path for step, path in saved.items() if step >= steps.stop - 1]
    settings = resolve(state_of(before[-1]).config, where=os.path.join(before[-1], STATE_FILE))
    plan = StreamPlan(**settings.data.arguments())
    saved_state = state_of([*after[:1], before[-1]][0]).loader
    plan = plan_of_run(plan, saved_state)
    # the recipe may have been edited between the two; samples so far are on record in any case
    edited = other_weights(plan, saved_state) is not None
    cursor = load_state(plan, saved_state, weights="plan" if edited else "same")
    parallel, compute = replace(settings.parallel, replicas=1), replace(settings.compute, compile="off")
    with process_group(parallel) as device:
        model = sharded_model(
            model_shape(settings.model, vocabulary_of(plan)), make_mesh(parallel, device), parallel, compute
        )
        checkpoint.load(before[-1], model, None)
        say(f"{before[-1]}: weights for the losses of {len(samples):,} steps")
        for step, (start, stop) in samples.items():
            rows = [row for sample in range(start, stop) for row in _rows(model, plan, cursor, sample, device)]
            columns = zip(*((step, *row) for row in rows), strict=True)
            yield pa.record_batch([pa.array(of, kind.type) for of, kind in zip(columns, SCHEMA, strict=True)], SCHEMA)


def _samples_of(path: str, steps: range) -> dict[int, tuple[int, int]]:
    """The samples of each step that trained on some, from the metrics of the run."""
    try:
        with open(path, "rb") as file:
            lines = [line for text in file if (line := msgspec.json.decode(text, type=Line)).step in steps]
    except (OSError, *UNDECODABLE) as error:
        raise UsageError(
            f"{path} cannot be read: {error}", hint="give the directory of a run of the trainer"
        ) from error
    found = {line.step: line for line in lines if line.samples is not None}
    if missing := [step for step in steps if step not in found]:
        raise UsageError(
            f"{path} has no step {missing[0]}", hint="ask for steps that the run has done, such as 4000:4100"
        )
    return {step: line.samples for step, line in found.items() if line.samples and line.skipped != "train.skip"}


@torch.no_grad()
def _rows(
    model: Transformer, plan: StreamPlan, cursor: Cursor, sample: int, device: torch.device
) -> Iterator[tuple[int, str, str, int, int, int, int, float, float | None]]:
    """The rows of a sample, without the step."""
    row, pieces = plan.sample(sample, cursor), plan.trace(sample, cursor)
    tensors = {
        name: torch.from_numpy(np.asarray(row[name]).astype(np.int64))[None].to(device)
        for name in ("input_ids", "labels", "position_ids")
    }
    bounds = torch.from_numpy(np.asarray(row["cu_seqlens"]).astype(np.int32)).to(device)
    documents = Documents(cu_seqlens=bounds, max_seqlen=plan.seq_len)
    losses = model(tensors["input_ids"], tensors["position_ids"], documents, tensors["labels"]).double().cpu().numpy()
    is_target = np.asarray(row["labels"]) != IGNORED
    weights = np.asarray(row.get("loss_weights", is_target), dtype=np.float64)
    place = 0
    for piece in pieces:
        here = slice(place, place := place + piece.stop - piece.start)
        targets, weight = int(is_target[here].sum()), float(weights[here].sum())
        loss = float(losses[here] @ weights[here]) / weight if targets else None
        yield sample, piece.corpus, piece.shard, piece.document, piece.start, piece.stop, targets, weight, loss


def _span(text: str) -> range:
    first, colon, stop = text.partition(":")
    try:
        steps = range(int(first), int(stop) if colon else int(first) + 1)
    except ValueError:
        steps = range(0)
    if not steps or steps.start < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a range of steps, such as 4000:4100, which count from 1")
    return steps


def _is_parquet(path: str) -> bool:
    """Whether a file may be replaced by losses: earlier ones may, metrics and lists of documents may not."""
    if not os.path.isfile(path):
        return False
    with open(path, "rb") as file:
        return file.read(4) == b"PAR1"


def main(arguments: list[str]) -> int:
    """Write the losses as parquet. Exit codes: 0, 1 a checkpoint or corpus is damaged, 2 wrong usage."""
    parser = argparse.ArgumentParser(
        prog="python -m tokshard.trainer.document_losses",
        description="Write the loss of each document that some steps read, under the newest checkpoint before them.",
    )
    parser.add_argument("run", help="directory of a run of the trainer")
    parser.add_argument("--steps", type=_span, required=True, metavar="A[:B]", help="step A, or steps A to B - 1")
    parser.add_argument("--out", required=True, metavar="FILE", help="a parquet file; it appears when it is complete")
    given = parser.parse_args(arguments)

    def run() -> int:
        folder, name = os.path.split(os.path.abspath(given.out))
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is not a directory", hint="give another --out FILE")
        if os.path.lexists(given.out) and not _is_parquet(given.out):
            raise UsageError(f"{given.out} is there, and is no parquet file", hint="give another --out FILE")
        num_rows = 0
        with written(open_store(folder), name) as file, pq.ParquetWriter(file, SCHEMA) as writer:
            for batch in document_losses(given.run, given.steps):
                writer.write_batch(batch)
                num_rows += batch.num_rows
        sys.stdout.write(f"wrote {given.out}, {num_rows:,} parts of documents\n")
        return 0

    return exit_code_of(run)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
