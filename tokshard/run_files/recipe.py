"""The recipe of a training run as one frozen value: strict TOML, then ``section.key=value`` from the command line.

An unknown key, a wrong type or a value out of range is an error that names it. Paths in the file are relative to the
file, those of the command line to the working directory.
"""

from __future__ import annotations

import dataclasses
import math
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date, time
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from tokshard.errors import PlanError, PlanMismatchError, UsageError
from tokshard.forking import decodable
from tokshard.format.corpus import Corpus
from tokshard.numbers import read_count
from tokshard.run_files.checkpoint_directory import is_checkpoint, state_of
from tokshard.run_files.model_shape import Model, Positive, Real, model_shape
from tokshard.run_files.plan_file import Mix
from tokshard.run_files.plan_file import TrainerData as Data
from tokshard.run_files.strict_toml import change_paths, convert, key, path_beside, read_toml
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.steps import RankRows
from tokshard.store import absolute_location, is_uri

Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[int, Meta(ge=1, le=1_000_000)]
NotNegative = Annotated[float, Meta(ge=0, le=1e38)]  # of fp32, and finite
Decay = Annotated[float, Meta(ge=0, lt=1)]

_ON_RESUME = re.compile(r"load_state_dict\(state, (corpora|seq_len)='plan'\)")
_KEYS = "|".join(item.name for item in dataclasses.fields(Data))
_ARGUMENT = re.compile(rf"\b({_KEYS})=('[^']*'|\{{[^{{}}]*\}}|\d+|True)")
"""Words of hints that are written for Python."""

StepRange = tuple[Positive, Positive]
"""The first step, and the one after the last; steps count from 1, as in metrics.jsonl."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model is distributed over ranks.

    Args:
        replicas: copies of the sharded model (HSDP); 1: FSDP over all ranks.
        precision: dtype of the forward and backward pass; parameters and optimizer stay fp32.
        reduce: dtype in which gradients are summed between ranks.
        device: where the model is; auto: CUDA if the process sees a GPU.
        init_timeout_seconds: the longest wait for another rank until the first step is done, and in a save.
        step_timeout_seconds: the same after the first step. Longer than the loader waits for a batch (600 s), so that
            a rank without data can say so.
    """

    replicas: Positive = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    reduce: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    init_timeout_seconds: Seconds = 1800
    step_timeout_seconds: Seconds = 900


@dataclass(frozen=True, slots=True, kw_only=True)
class Compute:
    """Speed against memory. Names, initial values and checkpoints are the same with any of it.

    Args:
        compile: the backend of torch.compile for every block and for the loss: ``"inductor"`` makes kernels, the
            others are for debugging.
        recompute: activation checkpointing. ``"selective"`` keeps the results of matrix products and of attention in a
            block, and computes the rest again in the backward pass; ``"full"`` keeps only the inputs of blocks.
        loss_chunk: tokens whose logits are in memory at a time; 0: all of a micro-batch.
        float8: torchao's recipe for the linear layers of blocks; needs a GPU of compute capability 8.9. The CPU
            emulates it.
    """

    compile: Literal["off", "inductor", "aot_eager", "eager"] = "off"
    recompute: Literal["none", "selective", "full"] = "none"
    loss_chunk: Count = 2_048
    float8: Literal["off", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "off"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW or Muon, and the learning rate over the run.

    Args:
        name: adamw; or muon for the matrices of blocks, and AdamW for the rest. Updates of Muon are scaled to the size
            of AdamW's, so that both take the same `lr` and `weight_decay`.
        lr: the highest learning rate.
        beta1: decay of the mean of gradients.
        beta2: decay of the mean of their squares.
        eps: added to the divisor of an update.
        momentum: decay of the mean of gradients in Muon.
        weight_decay: of matrices; norms and the embedding have none.
        clip_norm: largest norm of the gradient; 0: no limit.
        schedule: how the rate falls: all the way, as a cosine or linearly, or late (wsd: warmup, stable, decay).
        warmup_steps: steps in which the rate rises from 0.
        decay_steps: length of the decay of WSD, at the end of the run.
        decay: how the rate of WSD falls: linearly, or as 1 minus the square root of how much of the decay is done.
        final_fraction: the last step's rate as a fraction of `lr`.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: NotNegative = 3e-4
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: NotNegative = 1e-8
    momentum: Decay = 0.95
    weight_decay: NotNegative = 0.1
    clip_norm: NotNegative = 1.0
    schedule: Literal["cosine", "linear", "wsd"] = "cosine"
    warmup_steps: Count = 0
    decay_steps: Count = 0
    decay: Literal["linear", "1-sqrt"] = "linear"
    final_fraction: NotNegative = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The run.

    Args:
        out: directory of metrics and checkpoints.
        steps: optimizer steps; the learning rate schedule ends there.
        stop_after: save and exit after this step; 0: after the last.
        micro_batch_size: rows that a rank has in memory at once, a divisor of its rows; 0: all, without accumulation.
        seed: for the initial parameters.
        log_every: steps between progress lines; metrics.jsonl has every step.
        on_non_finite: a loss or gradient that is not finite ends the run, or its step changes no parameter.
        skip: ranges of steps whose samples are not read. Later steps read what they would have read anyway.
        profile_steps: steps that torch.profiler traces, into files in `out`.
        profile_ranks: which ranks trace them, each into a file of its own.
        peak_tflops: of one device in `precision`, for MFU; default: the peak of a known GPU.
    """

    out: str = field(metadata=key('out = "runs/first"', is_path=True))
    steps: Positive
    stop_after: Count = 0
    micro_batch_size: Count = 0
    seed: Count = 0
    log_every: Positive = 10
    on_non_finite: Literal["stop", "skip"] = "stop"
    skip: list[StepRange] = field(default_factory=list)
    profile_steps: StepRange | None = None
    profile_ranks: list[Count] = field(default_factory=lambda: [0])
    peak_tflops: Real | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """When to save, and what to start from.

    Args:
        every: steps between saves; 0: only at the end.
        keep: how many of the newest to keep; 0: all.
        asynchronous: train on while a save is written; needs memory for a copy of this rank's tensors.
        load: a checkpoint to start from; default: a new run. A run continues from its own checkpoints.
        load_weights: a checkpoint or a Hugging Face directory. A new run starts with its weights alone; step, data and
            optimizer begin anew.
    """

    every: Count = 0
    keep: Count = 0
    asynchronous: bool = False
    load: str = field(default="", metadata=key('load = "runs/first/checkpoints/step-00001000"', is_path=True))
    load_weights: str = field(default="", metadata=key('load_weights = "models/llama"', is_path=True))


@decodable
@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The loss on corpora that are not trained on, each read once, with the seq_len and batch size of [data].

    Args:
        corpora: name to corpus directory; empty: no evaluation.
        every: steps between evaluations; 0: only when the job ends.
        tokens: tokens to read of each corpus, rounded up to whole blocks; default: all.
    """

    corpora: dict[str, str] = field(
        default_factory=dict, metadata=key('corpora = { code = "shards/code/validation" }', is_path=True)
    )
    every: Count = 0
    tokens: Positive | None = field(default=None, metadata=key('tokens = "200k"', read=read_count))


@decodable
@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A resolved recipe."""

    data: Data
    train: Train
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    compute: Compute = field(default_factory=Compute)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    evaluation: Evaluation = field(default_factory=Evaluation)


def corpora_of(plan: StreamPlan) -> dict[str, Corpus]:
    """The corpora of a plan by their names in it."""
    sources = zip(plan.names, plan.sources, strict=True)
    return {name: source.corpus for name, source in sources if isinstance(source, CorpusSource)}


def evaluated_on(location: str) -> dict[str, str]:
    """The evaluation corpora of a trainer's recipe or checkpoint, name to directory; none for any other plan.

    Raises:
        UsageError: ``[evaluation]`` has an unknown key, or a wrong type.
    """
    if is_checkpoint(location):
        fields = state_of(location).config
    elif os.path.isfile(location):
        fields = change_paths(read_toml(location, hint=""), Config, partial(path_beside, location))
    else:
        return {}
    hint, found = "python -m tokshard.trainer --help lists all keys", fields.get("evaluation", {})
    return convert(found, Evaluation, where=location, hint=hint, prefix="evaluation.").corpora


def vocabulary_of(plan: StreamPlan) -> int:
    """Ids that the corpora of a plan may hold."""
    return max((corpus.vocab_size for corpus in corpora_of(plan).values()), default=1)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe.

    Args:
        overrides: ``section.key=value``; the value as in TOML, or a bare word.

    Raises:
        UsageError: the file does not exist or is not TOML, or has an unknown key, a wrong type or a value out of range.
    """
    fields = read_toml(path, hint="give a recipe, such as recipes/*.toml")
    fields = change_paths(fields, Config, partial(path_beside, path))
    for override in overrides:
        _apply(fields, override)
    return resolve(fields, where=path)


def resolve(fields: Mapping[str, Any], *, where: str = "configuration") -> Config:
    """A configuration from nested mappings.

    Raises:
        UsageError: as for `load_config`.
    """
    config = convert(fields, Config, where=where, hint="python -m tokshard.trainer --help lists all keys")
    for problem, hint in _faults(config):
        raise UsageError(f"{where}: {problem}", hint=hint)
    return config


def saved_form(settings: Config) -> dict[str, dict[str, Any]]:
    """A recipe as checkpoints hold it: tables, with paths that mean the same in every working directory."""
    return change_paths(dataclasses.asdict(settings), Config, absolute_location)


@contextmanager
def errors_in_keys(prefix: str = "data.") -> Iterator[None]:
    """Raise errors of plans and loaders, whose hints name arguments of Python, with the keys of a recipe or a mix."""
    try:
        yield
    except (PlanError, PlanMismatchError) as error:
        raise type(error)(error.problem, hint=in_keys(error.hint, prefix)) from error


def plan_of(mix: Mix) -> StreamPlan:
    """The plan of a file.

    Raises:
        PlanError: a value is refused; the hint is in keys of the file.
        CorpusError: a corpus cannot be opened.
    """
    with errors_in_keys("data." if isinstance(mix, Data) else ""):
        return StreamPlan(**mix.arguments())


def check_ranks(settings: Config, num_ranks: int) -> None:
    """Refuse a recipe whose sizes do not fit a number of ranks.

    A smaller last micro-batch would be compiled once more.

    Raises:
        UsageError: ranks or streams do not divide a batch, a rank's part of it is too large, or
            `train.micro_batch_size` does not divide that part, at some step of the batch ramp.
    """
    data = settings.data
    for size in (data.global_batch_size, *(size for _, size in data.batch_ramp)):
        ranks = RankRows(global_batch_size=size, world_size=num_ranks, uneven=data.uneven, num_streams=data.num_streams)
        ranks.check_size(data.seq_len)
    num_rows, rows = settings.train.micro_batch_size, data.rows_of_rank(num_ranks)
    common = math.gcd(*rows)
    if num_rows and common % num_rows:
        raise UsageError(
            f"train.micro_batch_size is {num_rows}, but a rank's batches have {' and '.join(map(str, rows))} rows",
            hint=f"give a divisor: {', '.join(str(number) for number in range(1, common + 1) if common % number == 0)}",
        )


def check_start(settings: Checkpoint, saved: Mapping[str, Any], path: str) -> None:
    """Refuse to continue a run if the recipe names another start than the run had.

    Args:
        saved: the recipe in its latest checkpoint.
        path: of that checkpoint.

    Raises:
        UsageError: names the key.
    """
    for name in ("load", "load_weights"):
        start = getattr(settings, name)
        if start and saved.get("checkpoint", {}).get(name) != absolute_location(start):
            raise UsageError(
                f"checkpoint.{name} is {start}, but {path} was saved by a command without it",
                hint=f"leave checkpoint.{name} out to continue that run, or give another train.out",
            )


_CHANGEABLE = {"train": ["steps"], "data": ["max_epochs"], "parallel": ["precision", "reduce"]}
"""Keys that decide what a run computes, besides those of the order and all of ``[model]`` and ``[optimizer]``."""


def changed_keys(before: Mapping[str, Mapping[str, Any]], settings: Config) -> Iterator[str]:
    """What a recipe computes in another way than that of a checkpoint, a text for each key; the order is not compared.

    Args:
        before: the recipe in the checkpoint.
    """
    for section, values in msgspec.to_builtins(saved_form(settings)).items():
        for name in values if section in ("model", "optimizer") else _CHANGEABLE.get(section, []):
            new = values[name]
            if (old := before.get(section, {}).get(name, new)) != new:
                yield f"{section}.{name} " + " -> ".join("not given" if one is None else f"{one}" for one in (old, new))


def in_keys(text: str, prefix: str = "data.") -> str:
    """A message in which arguments of Python are keys of a recipe, or of a mix, which have no prefix."""
    text = _ON_RESUME.sub(lambda found: f'data.on_resume = ["{found[1]}"]', text)

    def in_toml(found: re.Match[str]) -> str:
        return f"{prefix}{found[1]} = " + found[2].replace("': ", "' = ").replace("'", '"').replace("True", "true")

    return _ARGUMENT.sub(in_toml, text)


def _apply(fields: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"{override!r} is not an override", hint="write section.key=value, such as train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # as `read_toml`
        value = text
    if isinstance(value, date | time):
        value = text  # a path such as 2026-11-22; nothing in a recipe is a date
    *sections, name = key.split(".")
    for section in sections:
        fields = fields.setdefault(section, {})
        if not isinstance(fields, dict):
            raise UsageError(f"{override!r}: {section} is not a section", hint="write section.key=value")
    fields[name] = value


def _faults(config: Config) -> Iterator[tuple[str, str]]:
    """Problems that the types of this module do not express, with hints."""
    train, checkpoint, optimizer, ramp = config.train, config.checkpoint, config.optimizer, config.data.batch_ramp
    if not train.out or is_uri(train.out):  # empty: most often from a variable of the shell that is not set
        hint = "give one on a file system that all ranks share, and copy checkpoints to a bucket from there"
        yield f"train.out is {train.out or 'empty'}, expected a directory", hint
    if ramp != sorted(dict(ramp).items()):
        yield f"data.batch_ramp is {ramp}", "give [step, global_batch_size] in ascending order, from 1"
    for name, ranges in (("skip", train.skip), ("profile_steps", [train.profile_steps] if train.profile_steps else [])):
        for first, stop in ranges:
            if first >= stop:
                yield f"train.{name} has the range [{first}, {stop}]", "give its first step and the one after it"
    if checkpoint.load and checkpoint.load_weights:
        yield "checkpoint.load and checkpoint.load_weights are given", "give one of them"
    decay_steps = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if optimizer.warmup_steps + decay_steps > train.steps:
        hint = "lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps"
        yield f"{optimizer.warmup_steps} steps of warmup and {decay_steps} of decay do not fit in {train.steps}", hint
    # the matrix products of blocks have sizes that GPUs can compute in float8, with any number of rows
    shape = model_shape(config.model, 1)
    sizes = {"data.seq_len": config.data.seq_len, "model.dim": shape.dim, "model.hidden_dim": shape.hidden_dim}
    sizes |= {"model.head_dim * num_heads": shape.query_dim, "model.head_dim * num_kv_heads": shape.kv_dim}
    for name, size in sizes.items():
        if size % 16 and config.compute.float8 != "off":
            yield f"{name} is {size}, float8 needs a multiple of 16", "change it, or leave compute.float8 out"
