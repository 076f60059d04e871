"""The loss on corpora that a run is not trained on: one finite pass over each, the same on any number of ranks."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from tokshard.errors import PlanError, TokshardError, UsageError
from tokshard.numbers import ceil_div
from tokshard.run_files.recipe import Config
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.narrow import IGNORED
from tokshard.runtime.tensors import Batch, StreamingLoader
from tokshard.trainer.batches import compact_loader, has_spans
from tokshard.trainer.launcher import Interrupted
from tokshard.trainer.losses import micro_batches, sum_of_losses
from tokshard.trainer.model import Transformer
from tokshard.trainer.parallel import raise_together, say
from tokshard.wording import clock

PROGRESS_SECONDS = 10.0
"""Seconds between two lines that say how far an evaluation is."""


class Evaluation:
    """One pass over each corpus of ``[evaluation]``, whenever it is due.

    The order has its own seed, so runs with other seeds are evaluated on the same samples. Each pass has its own
    loader; the parameters and the training loader do not change.

    Args:
        trained: the corpora that the run trains on.
        received: signals that this rank receives meanwhile.

    Raises:
        PlanError, CorpusError: a corpus cannot be read.
        UsageError: its tokenizer is not that of the training corpora.
    """

    def __init__(self, settings: Config, trained: StreamPlan, mesh: DeviceMesh, *, received: Sequence[int]) -> None:
        self._settings, self._mesh, self._received = settings, mesh, received
        self._plans = {name: evaluation_plan(name, settings, trained) for name in settings.evaluation.corpora}
        self._last_step = 0
        if distributed.get_rank() == 0:
            for line in shared_texts(self._plans, trained):
                say(f"warning: {line}")

    def is_due(self, step: int, *, is_end: bool) -> bool:
        """Whether an evaluation is due after a step, and has not been done."""
        every = self._settings.evaluation.every
        due = is_end or (every > 0 and step % every == 0)
        return due and bool(self._plans) and step != self._last_step

    def losses(self, model: Transformer, step: int) -> dict[str, dict[str, float | None]]:
        """Mean loss over the targets of each corpus after a step. Every rank calls this.

        Returns:
            By corpus: ``loss``, in nats, None if it is not finite or of no targets; the number of ``targets``; and the
            sum of their ``loss_weights`` if the corpus has loss spans, by which its loss is weighted.

        Raises:
            Interrupted: a rank received a signal; on all ranks.
            TokshardError: the loader of one rank failed; the same error on all ranks.
        """
        found, self._last_step = dict[str, dict[str, float | None]](), step
        size = self._settings.data.global_batch_size
        work = {
            name: f"{name} ({plan.num_samples or 0:,} samples, {(plan.num_samples or 0) * plan.seq_len:,} tokens)"
            for name, plan in self._plans.items()
        }
        say(f"step {step}: evaluating {', '.join(work.values())} in batches of {size:,} samples")
        try:
            for name, plan in self._plans.items():
                total, targets, weight = self._sums(model, plan, f"step {step}: evaluating {name}").tolist()
                loss = total / weight if weight and math.isfinite(total) else None  # JSON has no NaN
                found[name] = {"loss": loss, "targets": int(targets)}
                if has_spans(plan):
                    found[name]["loss_weights"] = weight
        finally:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()  # a forward pass without a backward pass leaves the root's parameters gathered
        return found

    @torch.no_grad()
    def _sums(self, model: Transformer, plan: StreamPlan, what: str) -> Tensor:
        """Losses, targets and their weights over all ranks: float64 [3]. Prints its progress now and then."""
        size = self._settings.data.global_batch_size
        num_batches, started = ceil_div(plan.num_samples or 0, size), time.monotonic()
        said = started
        device, num_rows = torch.device(self._mesh.device_type), self._settings.train.micro_batch_size
        sums = torch.zeros(3, dtype=torch.float64)
        with closing(compact_loader(plan, size, self._mesh, uneven="pad")) as loader:
            for number, batch in enumerate(_agreed(loader, self._received), 1):
                for part in micro_batches(batch, num_rows, device):
                    is_target = part["labels"] != IGNORED
                    figures = (sum_of_losses(model, part), is_target, part.get("loss_weights", is_target))
                    sums += torch.stack([figure.double().sum() for figure in figures]).cpu()
                if (now := time.monotonic()) - said >= PROGRESS_SECONDS and number < num_batches:
                    rate, said = number / (now - started), now
                    speed, left = f"{rate * size * plan.seq_len:,.0f} tokens/s", clock((num_batches - number) / rate)
                    say(f"{what}: {number:,} of {num_batches:,} batches, {speed}, {left} left")
        distributed.all_reduce(sums)
        return sums


def shared_texts(plans: Mapping[str, StreamPlan], trained: StreamPlan) -> Iterator[str]:
    """The corpora that share documents with a training corpus, as far as that is known."""
    pairs = itertools.product(
        ((name, plan.sources[0]) for name, plan in plans.items()), zip(trained.names, trained.sources, strict=True)
    )
    for (name, source), (other, read) in pairs:
        if count := source.num_shared(read):
            yield f"evaluation corpus {name!r} shares {count} with {other!r}"


def evaluation_plan(name: str, settings: Config, trained: StreamPlan) -> StreamPlan:
    """One finite pass over a corpus of ``[evaluation]``, in an order that depends on `data.seq_len` alone.

    With `evaluation.tokens` it reads the fewest whole blocks that have so many, the same ones in every run.

    It shares the memory of the training corpora, so `data.memory_bytes` limits the process.

    Raises:
        TokshardError: the corpus cannot be read, or has another tokenizer.
    """
    data, num_tokens = settings.data, settings.evaluation.tokens
    of_all = partial(
        StreamPlan,
        {name: settings.evaluation.corpora[name]},
        seq_len=data.seq_len,
        epochs=1,
        cache=next((source.cache for source in trained.sources if isinstance(source, CorpusSource)), None),
    )
    try:
        plan = of_all()
    except PlanError as error:
        raise PlanError(f"evaluation.corpora: {name!r}: {error.problem}", hint=error.hint) from error
    if num_tokens is not None:
        block_tokens, num_blocks = plan.shape.block_tokens, plan.corpora[0].num_corpus_blocks
        taken = ceil_div(num_tokens, block_tokens)
        if taken < num_blocks:
            plan = of_all(take=taken / num_blocks)
    if plan.sources[0].tokenizer != trained.sources[0].tokenizer:
        raise UsageError(
            f"evaluation.corpora: {name!r} has another tokenizer than the corpora of [data]",
            hint="build it with the same tokenizer.json",
        )
    return plan


def _agreed(loader: StreamingLoader, received: Sequence[int]) -> Iterator[Batch]:
    """Each batch, until a rank fails or receives a signal: all ranks raise that."""
    batches = iter(loader)
    while True:
        batch, failure = None, None
        try:
            batch = next(batches, None)
        except TokshardError as error:
            failure = error
        ended = torch.tensor([failure is not None, max(received, default=0)])
        distributed.all_reduce(ended, distributed.ReduceOp.MAX)
        has_failed, number = ended.tolist()
        if has_failed:
            raise_together(failure)
        if number:
            raise Interrupted(number)
        if batch is None:
            return
        yield batch
