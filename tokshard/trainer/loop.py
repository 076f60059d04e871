"""The training loop: start at `train` and read down."""

from __future__ import annotations

import dataclasses
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tokshard.errors import TokshardError, TrainerError, UsageError
from tokshard.runtime.batches import IGNORED
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.shards import CorpusSource
from tokshard.runtime.tensors import Batch, StreamingLoader
from tokshard.trainer import checkpoint, config, metrics
from tokshard.trainer.config import Config
from tokshard.trainer.directory import held
from tokshard.trainer.losses import micro_batches, sum_of_losses
from tokshard.trainer.model import PRESETS, Shape, Transformer
from tokshard.trainer.optimizer import learning_rate, make_optimizer
from tokshard.trainer.parallel import (
    limit_waits,
    make_mesh,
    process_group,
    raise_together,
    sharded_model,
    sum_over_ranks,
    together,
)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def train(settings: Config) -> int:
    """Run a recipe to its end, continuing from its latest checkpoint if it has one.

    Returns:
        0, or the number of the signal that stopped the run after a save.

    Raises:
        TokshardError: the recipe, the corpora or a checkpoint do not fit, or the loss is not finite. An error on one
            rank is raised on all.
    """
    with process_group(settings.parallel) as device, stop_signals() as received:
        with together():
            plan = settings.data.plan()
        mesh = make_mesh(settings.parallel, device)
        shape = model_shape(settings.model, plan)
        with held(settings.train.out):
            model = sharded_model(shape, mesh, settings.parallel, seed=settings.train.seed)
            optimizer = make_optimizer(model, settings.optimizer)
            loader = StreamingLoader(
                plan,
                global_batch_size=settings.data.global_batch_size,
                dp_mesh=mesh,
                num_workers=settings.data.num_workers,
                uneven=settings.data.uneven,
                pin_memory=device.type == "cuda",
            )
            run = _Run(settings, plan, model, optimizer, loader, device, received)
            try:
                return run.run(mesh)
            finally:
                loader.close()
                run.saver.close()


class _Run:
    """One run on one rank."""

    def __init__(  # noqa: PLR0917
        self,
        settings: Config,
        plan: StreamPlan,
        model: Transformer,
        optimizer: torch.optim.AdamW,
        loader: StreamingLoader,
        device: torch.device,
        received: list[int],
    ) -> None:
        self.settings, self.plan, self.model, self.optimizer = settings, plan, model, optimizer
        self.loader, self.device, self.received = loader, device, received
        self.checkpoints = os.path.join(settings.train.out, "checkpoints")
        self.is_first = distributed.get_rank() == 0
        self.waited = 0.0
        self.saver = checkpoint.Saver(
            self.checkpoints,
            keep=settings.checkpoint.keep,
            asynchronous=settings.checkpoint.asynchronous,
            timeout_seconds=settings.parallel.init_timeout_seconds,
            say=self._say,
        )
        self.log: metrics.MetricsFile | None = None

    def run(self, mesh: DeviceMesh) -> int:
        step = saved = self._resume()
        last = min(self.settings.train.steps, self.settings.train.stop_after or self.settings.train.steps)
        is_read = self.plan.num_samples is not None and self.loader.cursor.sample >= self.plan.num_samples
        if step >= last or is_read:
            self._say(f"step {step}: nothing is left to do")
            return 0
        path = os.path.join(self.settings.train.out, "metrics.jsonl")
        with together(f"{path} cannot be written", hint="make room or repair the directory"):
            if self.is_first:
                self.log = metrics.MetricsFile(path, last_step=step)
        started, signal_number, every = time.perf_counter(), 0, self.settings.checkpoint.every
        for batch, targets in self._batches(mesh):
            record, signal_number, has_failed = self._step(batch, targets, step)
            step += 1
            now = time.perf_counter()
            record |= self._timing(record["tokens"], now - started)
            started = now
            if self.log is not None:
                self.log.write(record)
            if step % self.settings.train.log_every == 0 or step == last:
                self._say(metrics.progress_line(record, self.settings.train.steps))
            if step == last or signal_number or has_failed:
                break
            if every and step % every == 0:
                self._save(step)
                saved, started = step, time.perf_counter()
        if saved != step:
            self._save(step)
        self.saver.wait()
        raise_together(self.log.failure if self.log is not None else None)
        if signal_number:
            self._say(f"stopped by {signal.Signals(signal_number).name} after step {step}; the same command continues")
        return signal_number

    def _batches(self, mesh: DeviceMesh) -> Iterator[tuple[Batch, Tensor]]:
        """Each batch of this rank, and the targets of each corpus in it over all ranks.

        The sum also tells every rank whether the loader failed on one of them, so that no rank waits for it.
        """
        batches, is_first = iter(self.loader), True
        while True:
            batch, failure = None, None
            try:
                batch = next(batches, None)
            except TokshardError as error:
                failure = error
            counts = torch.zeros(len(self.plan.names), dtype=torch.float64)
            if batch is not None:
                counts = _by_corpus((batch["labels"] != IGNORED).sum(1), batch, len(counts))
            counts = sum_over_ranks(torch.cat((counts, torch.tensor([float(failure is not None)]))))
            if counts[-1]:
                raise_together(failure)
            if batch is None:
                return
            yield batch, counts[:-1]
            if is_first:
                limit_waits(mesh, self.settings.parallel)
                is_first = False

    def _step(self, batch: Batch, targets: Tensor, step: int) -> tuple[dict[str, Any], int, bool]:
        """One optimizer step. Returns its metrics, a signal that any rank received, and whether a write failed."""
        rate = learning_rate(self.settings.optimizer, step, self.settings.train.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        num_targets = max(1.0, targets.sum().item())
        losses = torch.zeros(len(targets), dtype=torch.float64, device=self.device)
        parts = list(micro_batches(batch, self.settings.train.micro_batch_size))
        for part in parts:
            # replicas of HSDP exchange gradients once, after the last part
            self.model.set_requires_all_reduce(part is parts[-1])  # type: ignore[operator]
            row_losses = sum_of_losses(self.model, part, self.device)
            (row_losses.sum() / num_targets).backward()  # type: ignore[no-untyped-call]
            losses += _by_corpus(row_losses.detach(), part, len(targets))
        norm = clip_gradients(self.model, self.settings.optimizer.clip_norm)
        is_lost = self.saver.has_failed or (self.log is not None and self.log.failure is not None)
        stops = torch.tensor([is_lost, *(number in self.received for number in STOP_SIGNALS)], dtype=torch.float64)
        reduced = sum_over_ranks(torch.cat((losses.cpu(), stops)))
        sums, stops = reduced[: len(losses)], reduced[len(losses) :]
        loss = sums.sum().item() / num_targets
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise TrainerError(
                f"step {step + 1}: loss is {loss}, gradient norm {norm}",
                hint="resume from the last checkpoint with a lower optimizer.lr, or with other data",
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        stats, read = self.loader.stats(), metrics.batch_record(batch)
        names, seen = self.plan.names, zip(sums.tolist(), targets.tolist(), strict=True)
        record = {
            "step": step + 1,
            "loss": loss,
            "loss_by_corpus": {name: s / n if n else None for name, (s, n) in zip(names, seen, strict=True)},
            "targets": int(num_targets),
            "grad_norm": norm,
            "lr": rate,
            "memory_bytes": metrics.memory_bytes(self.device),
            "corpora": {
                name: {key: corpus[key] for key in ("tokens", "epoch")} for name, corpus in stats["corpora"].items()
            },
            "tokens": read["num_samples"] * self.plan.seq_len,
            **read,
        }
        has_failed, *signalled = stops.tolist()
        signal_number = next((number for number, ranks in zip(STOP_SIGNALS, signalled, strict=True) if ranks), 0)
        return record, signal_number, bool(has_failed)

    def _timing(self, tokens: int, seconds: float) -> dict[str, float]:
        waited, self.waited = self.waited, self.loader.stats()["wait_seconds"]
        return {"tokens_per_second": tokens / seconds, "loader_wait_seconds": self.waited - waited}

    def _resume(self) -> int:
        """Load the latest checkpoint, or the one asked for; returns the steps done."""
        latest, start = checkpoint.find_latest(self.checkpoints), self.settings.checkpoint.load
        path = latest or start
        if not path:
            self._say(f"a new run on {_ranks()}: {num_parameters(self.model):,} parameters")
            return 0
        state = checkpoint.load(path, self.model, self.optimizer)
        if latest and start and state.config.get("checkpoint", {}).get("load") != start:
            raise UsageError(
                f"checkpoint.load is {start}, but {latest} is of a run that did not start from it",
                hint="leave checkpoint.load out to continue that run, or give another train.out",
            )
        self.loader.load_state_dict(state.loader)
        self._say(f"{path}: continuing after step {state.step} on {_ranks()}")
        return state.step

    def _save(self, step: int) -> None:
        state = checkpoint.State(step=step, loader=self.loader.state_dict(), config=dataclasses.asdict(self.settings))
        self.saver.save(self.model, self.optimizer, state)

    def _say(self, line: str) -> None:
        if self.is_first:
            with suppress(OSError, ValueError, AttributeError):  # a closed or full stdout does not end a run
                sys.stdout.write(line + "\n")
                sys.stdout.flush()


def model_shape(settings: config.Model, plan: StreamPlan) -> Shape:
    """A preset with the changes of the recipe. Unless it says otherwise, the vocabulary is that of the corpora.

    Raises:
        UsageError: no such preset, sizes that do not divide, or a vocabulary that is too small.
    """
    if settings.preset not in PRESETS:
        raise UsageError(f"no preset {settings.preset!r}", hint=f"known: {', '.join(PRESETS)}")
    needed = max((source.corpus.vocab_size for source in plan.sources if isinstance(source, CorpusSource)), default=1)
    changes = {name: value for name, value in dataclasses.asdict(settings).items() if value is not None}
    del changes["preset"]
    shape = dataclasses.replace(PRESETS[settings.preset], **{"vocab_size": needed, **changes})
    if shape.vocab_size < needed:
        raise UsageError(
            f"model.vocab_size is {shape.vocab_size}, the corpora have {needed} ids", hint="leave it out, or raise it"
        )
    if shape.dim % (2 * shape.num_heads) or shape.num_heads % shape.num_kv_heads:
        raise UsageError(
            f"{shape.dim} wide, {shape.num_heads} heads, {shape.num_kv_heads} KV heads do not divide",
            hint="model.dim is an even multiple of num_heads, num_heads a multiple of num_kv_heads",
        )
    return shape


def clip_gradients(model: nn.Module, longest: float) -> float:
    """Clip the gradient to a norm of at most `longest`, 0: no limit. Returns its norm over all ranks before that."""
    parameters = list(model.parameters())
    norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if isinstance(norm, DTensor):
        norm = norm.full_tensor()
    if longest:
        nn.utils.clip_grads_with_norm_(parameters, longest, norm)
    return norm.item()


def num_parameters(model: nn.Module) -> int:
    """Parameters of the whole model, not only of this rank's shards."""
    return sum(parameter.numel() for parameter in model.parameters())


def _ranks() -> str:
    """``1 rank``, ``2 ranks``."""
    number = distributed.get_world_size()
    return f"{number} rank{'s' * (number != 1)}"


def _by_corpus(values: Tensor, batch: Batch, num_corpora: int) -> Tensor:
    """Values of rows [B] summed by corpus: float64 [C]. Padding rows have values of 0."""
    index = batch["corpus_index"].clamp(min=0).to(values.device)
    return torch.zeros(num_corpora, dtype=torch.float64, device=values.device).index_add(0, index, values.double())


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Collects SIGTERM and SIGINT, so that the step in progress ends before the run stops.

    Further signals change nothing: a terminal or scheduler signals this process, and torchrun does it again, and kills
    what is left after ``--shutdown-timeout`` (30 s). Only the main thread can catch signals; others get an empty list.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    try:
        for number in STOP_SIGNALS:
            signal.signal(number, lambda caught, _: received.append(caught))
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
