"""A run as one frozen value: strict TOML, then ``section.key=value`` from the command line.

An unknown key, a wrong type or a value out of range is an error that names it. Paths are relative to the working
directory.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tokshard.errors import UsageError
from tokshard.runtime.mix import TrainerData as Data
from tokshard.runtime.recipes import convert, read_toml


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A preset of model.py, and what differs from it.

    Args:
        vocab_size: default: that of the corpora.
    """

    preset: str = "10M"
    vocab_size: int | None = None
    dim: int | None = None
    num_layers: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    hidden_dim: int | None = None
    rope_theta: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the model lies on the ranks.

    Args:
        replicas: copies of the sharded model (HSDP); 1: FSDP over all ranks.
        precision: of the forward and backward pass; the parameters and the optimizer stay fp32.
        reduce: of gradients between ranks.
    """

    replicas: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    reduce: Literal["fp32", "bf16"] = "fp32"
    device: Literal["auto", "cpu", "cuda"] = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """AdamW, and its learning rate over the run.

    Args:
        clip_norm: longest gradient; 0: no limit.
        decay_steps: of WSD, at the end of the run; cosine decays all the way.
        final_fraction: of `lr`, reached at the last step.
    """

    lr: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    schedule: Literal["cosine", "wsd"] = "cosine"
    warmup_steps: int = 0
    decay_steps: int = 0
    final_fraction: float = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """The run.

    Args:
        out: directory of metrics and checkpoints.
        steps: of the optimizer; the learning rate schedule ends there.
        stop_after: save and leave after this step; 0: after the last.
        micro_batch_size: rows of a rank that are in memory at once; 0: all, no accumulation.
        seed: of the initial parameters.
        log_every: steps between progress lines; metrics.jsonl has every step.
    """

    out: str
    steps: int
    stop_after: int = 0
    micro_batch_size: int = 0
    seed: int = 0
    log_every: int = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """When to save, what to start from.

    Args:
        every: steps; 0: only at the end.
        keep: the newest so many; 0: all.
        load: a checkpoint to start from if `train.out` has none; default: a new run.
    """

    every: int = 0
    keep: int = 0
    load: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """A resolved recipe."""

    data: Data
    train: Train
    model: Model = field(default_factory=Model)
    parallel: Parallel = field(default_factory=Parallel)
    optimizer: Optimizer = field(default_factory=Optimizer)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)


def load_config(path: str, overrides: Sequence[str] = ()) -> Config:
    """Read a recipe.

    Args:
        overrides: ``section.key=value``; the value as in TOML, or a bare word.

    Raises:
        UsageError: no such file, no TOML, an unknown key, a wrong type or a value out of range.
    """
    fields = read_toml(path, hint="give a recipe, such as recipes/*.toml")
    for override in overrides:
        _apply(fields, override)
    return resolve(fields, where=path)


def resolve(fields: Mapping[str, Any], *, where: str = "configuration") -> Config:
    """A configuration from nested mappings.

    Raises:
        UsageError: as for `load_config`.
    """
    config = convert(fields, Config, where=where, hint="see tokshard/trainer/config.py")
    _check_ranges(config, where)
    return config


def _apply(fields: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not all(key.split(".")):
        raise UsageError(f"{override!r} is no override", hint="write section.key=value, such as train.steps=100")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text
    *sections, name = key.split(".")
    for section in sections:
        fields = fields.setdefault(section, {})
        if not isinstance(fields, dict):
            raise UsageError(f"{override!r}: {section} is no section", hint="write section.key=value")
    fields[name] = value


def _check_ranges(config: Config, where: str) -> None:
    least = {"seq_len": 1, "global_batch_size": 1, "steps": 1, "replicas": 1, "log_every": 1, "lr": 0.0}
    for section in dataclasses.fields(config):
        values = getattr(config, section.name)
        for item in dataclasses.fields(values):
            value = getattr(values, item.name)
            low = least.get(item.name, 1 if section.name == "model" else 0)
            if isinstance(value, int | float) and not value >= low:
                raise UsageError(
                    f"{where}: {section.name}.{item.name} is {value}, expected at least {low}", hint="change it"
                )
    if not config.data.corpora:
        raise UsageError(f"{where}: data.corpora is empty", hint='give data.corpora = {name = "directory"}')
    optimizer, steps = config.optimizer, config.train.steps
    decay_steps = optimizer.decay_steps if optimizer.schedule == "wsd" else 0
    if optimizer.warmup_steps + decay_steps > steps:
        raise UsageError(
            f"{where}: {optimizer.warmup_steps} steps of warmup and {decay_steps} of decay do not fit in {steps}",
            hint="lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps",
        )
