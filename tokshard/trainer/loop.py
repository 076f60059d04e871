"""The training loop: start at `train` and read down."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, distributed

from tokshard.errors import warnings_to
from tokshard.run_files.checkpoint_directory import State
from tokshard.run_files.model_shape import model_shape
from tokshard.run_files.recipe import (
    Config,
    changed_keys,
    check_start,
    errors_in_keys,
    in_keys,
    saved_form,
    vocabulary_of,
)
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import Batch
from tokshard.trainer import checkpoint
from tokshard.trainer.batches import Batches
from tokshard.trainer.evaluate import Evaluation
from tokshard.trainer.hugging_face import load_weights
from tokshard.trainer.launcher import Interrupted, stop_signals
from tokshard.trainer.losses import backward, micro_batches
from tokshard.trainer.metrics import OnRecord, Report, StepSums
from tokshard.trainer.model import Transformer, initialise, local, num_parameters
from tokshard.trainer.optimizer import learning_rate, make_optimizer
from tokshard.trainer.out_of_memory import out_of_memory_explained
from tokshard.trainer.parallel import check_same, make_mesh, process_group, say, sharded_model, together
from tokshard.trainer.profiling import Profiler
from tokshard.trainer.run_directory import run_directory
from tokshard.wording import counted

GARBAGE_STEPS = 50
"""Steps between garbage collections, the same on all ranks, so that none waits for another's."""


def train(settings: Config, *, on_record: OnRecord | None = None) -> int:
    """Run a recipe to its end, continuing from its latest checkpoint if it has one.

    Args:
        on_record: gets each line of metrics.jsonl on rank 0, for example for TensorBoard; its exceptions end the run.
            If it returns weights for every `train.log_every`-th step's line, the next step reads with them.

    Returns:
        0, or the number of the signal that stopped the run after a save.

    Raises:
        TokshardError: the recipe, the corpora or a checkpoint do not fit, or the loss is not finite. An error on one
            rank is raised on all.
    """
    with (
        errors_in_keys(),
        process_group(settings.parallel) as device,
        warnings_to(lambda text: say(f"warning: {in_keys(text)}")),
        stop_signals() as received,
    ):
        with together():
            plan = StreamPlan(**settings.data.arguments())
        check_same(
            plan.fingerprint,
            "the plan of [data] differs from rank 0",
            hint="give each rank the same recipe and corpora; data.generations stays with one while a corpus grows",
        )
        mesh = make_mesh(settings.parallel, device)
        shape = model_shape(settings.model, vocabulary_of(plan))
        profiler = Profiler(settings.train, device)
        with run_directory(settings.train.out), closing(profiler), out_of_memory_explained(settings, device):
            model = sharded_model(shape, mesh, settings.parallel, settings.compute)
            optimizer = make_optimizer(model, settings.optimizer)
            with together():
                batches = Batches(settings, plan, mesh)
                evaluation = Evaluation(settings, plan, mesh, received=received)
            report = Report(settings.train, batches, shape, device=device, received=received, on_record=on_record)
            saver = checkpoint.Saver(
                os.path.join(settings.train.out, "checkpoints"),
                settings.checkpoint,
                timeout_seconds=settings.parallel.init_timeout_seconds,
            )
            with closing(batches), closing(saver), collected_between_steps():
                return _Run(settings, model, optimizer, batches, report, saver, profiler, evaluation).run()


@dataclass(frozen=True, slots=True)
class _Run:
    """One run on one rank."""

    settings: Config
    model: Transformer
    optimizer: torch.optim.AdamW
    batches: Batches
    report: Report
    saver: checkpoint.Saver
    profiler: Profiler
    evaluation: Evaluation

    def run(self) -> int:
        step = saved = self._resume()
        last = min(self.settings.train.steps, self.settings.train.stop_after or self.settings.train.steps)
        is_done = step >= last or bool(self.batches.why_over)
        is_evaluated = self.report.open(last_step=step)
        if not is_evaluated and step <= last:  # a signal or a crash may have ended the evaluation after this step
            self._evaluate(step, is_end=is_done)
        if is_done:
            why = f"train.steps or train.stop_after is {last}" * (step > last) or self.batches.why_over * (step < last)
            say(f"step {step}: nothing is left to do{', ' * bool(why)}{why}")
            return self.report.close(step)
        for batch in self.batches.after(step):
            self.profiler.before(step + 1)
            rate = learning_rate(self.settings.optimizer, step, self.settings.train.steps)
            if batch is not None:
                losses = self.forward_backward(batch)
                sums = self.report.add_up(batch, losses, self.squared_norm(), has_failed=self.saver.has_failed)
                self.update(sums, rate)
            step += 1
            self.report.end_step(step, rate)
            if step % GARBAGE_STEPS == 0:
                gc.collect()
            if self.settings.checkpoint.every and step % self.settings.checkpoint.every == 0:
                self._save(step)
                saved = step
            if step != last and not self.report.is_stopped:
                self._evaluate(step)
            if step == last or self.report.is_stopped:
                break
        self.report.flush()
        if saved != step:
            self._save(step)
        self._evaluate(step, is_end=not self.report.is_stopped)
        self.saver.wait()
        return self.report.close(step)

    def forward_backward(self, batch: Batch) -> Tensor:
        """The gradient of the sum of all losses, and this rank's losses summed by corpus: float64 [corpora]."""
        num_corpora = len(self.batches.plan.names)
        losses = torch.zeros(num_corpora, dtype=torch.float64, device=self.report.device)
        parts = list(micro_batches(batch, self.settings.train.micro_batch_size, self.report.device))
        for part, row_losses in backward(self.model, parts):
            losses.index_add_(0, part["corpus_index"].clamp(min=0), row_losses.double())  # padding: losses of 0
        return losses

    def squared_norm(self) -> Tensor:
        """This rank's part of the squared norm of the gradient: float64 []; the parts of all ranks add up to it."""
        gradients = [local(parameter.grad) for parameter in self.model.parameters() if parameter.grad is not None]
        return squared_norm(gradients) / self.settings.parallel.replicas

    def update(self, sums: StepSums, rate: float) -> None:
        """One step of the optimizer with the gradient of the mean loss, clipped. Nothing here waits for the device."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        # fused AdamW divides by `grad_scale`, and changes nothing if `found_inf` is not 0
        self.optimizer.grad_scale = gradient_scale(sums.weight, sums.norm, self.settings.optimizer.clip_norm)  # type: ignore[attr-defined]
        self.optimizer.found_inf = sums.is_lost.float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _resume(self) -> int:
        """Load the latest checkpoint, or the requested one; returns the steps done."""
        latest, settings = checkpoint.find_latest(self.saver.directory), self.settings.checkpoint
        ranks = counted(distributed.get_world_size(), "rank")
        path = latest or settings.load
        if not path and settings.load_weights:
            for line in load_weights(settings.load_weights, self.model, num_ids=vocabulary_of(self.batches.plan)):
                say(line)
            return 0
        if not path:
            initialise(self.model, seed=self.settings.train.seed)
            say(f"a new run on {ranks}: {num_parameters(self.model):,} parameters")
            return 0
        state = checkpoint.load(path, self.model, self.optimizer)
        if latest:
            check_start(settings, state.config, latest)
        changes = self.batches.load_state(state)
        say(f"{path}: continuing after step {state.step} on {ranks}")
        for change in (*changes, *changed_keys(state.config, self.settings)):
            say(f"the recipe differs from that checkpoint: {change}")
        return state.step

    def _save(self, step: int) -> None:
        self.report.flush()
        loader = self.batches.loader.state_dict()
        state = State(step=step, loader=loader, config=saved_form(self.settings))
        self.saver.save(self.model, self.optimizer, state)
        self.report.restart_clock()

    def _evaluate(self, step: int, *, is_end: bool = False) -> None:
        if self.evaluation.is_due(step, is_end=is_end):
            self.report.flush()
            try:
                self.report.write_evaluation(step, self.evaluation.losses(self.model, step))
            except Interrupted as interrupted:
                self.report.stop(step, *interrupted.args)
            self.report.restart_clock()


@contextmanager
def collected_between_steps() -> Iterator[None]:
    """A block in which Python collects no garbage by itself; existing objects are not checked again."""
    was_on = gc.isenabled()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if was_on:
            gc.enable()


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """The sum of all squares: float64 [].

    In fp32 the CPU adds them up one by one, and of two million elements loses a part of 1e-4 that depends on their
    division among ranks. A clipped gradient would then depend on it, too.
    """
    return torch.stack([torch.linalg.vector_norm(each, dtype=torch.float64) for each in tensors]).square().sum()


def gradient_scale(weight: Tensor, norm: Tensor, clip_norm: float) -> Tensor:
    """The divisor of the gradient of the sum of all losses: fp32 [].

    Args:
        weight: of all targets.
        clip_norm: largest norm of the gradient of the mean loss; 0: no limit.
    """
    factor = (clip_norm / (norm + 1e-6)).clamp(max=1) if clip_norm else 1.0
    return (weight / factor).float()
