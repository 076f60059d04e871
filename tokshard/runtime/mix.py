"""A plan from a file: the arguments of `StreamPlan` as TOML, for the commands that need a plan."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from tokshard.errors import UsageError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.recipes import convert, read_toml

STATE_FILE = "state.json"
"""The file of a trainer's checkpoint that holds its recipe and the loader's state."""

_HINT = "a mix has the keys of StreamPlan, and global_batch_size; see tokshard/runtime/mix.py"
_EXAMPLES = {
    "corpora": 'corpora = { code = "shards/code" }',
    "seq_len": "seq_len = 4096",
    "global_batch_size": "global_batch_size = 512",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Corpora and how they are read; all but `global_batch_size` as for `StreamPlan`.

    Args:
        corpora: name to corpus directory, relative to the working directory.
        global_batch_size: samples of an optimizer step, over all ranks.
        weights: name to weight; empty: the corpora's token counts.
        epochs: of a finite pass over one corpus; 0: endless.
        take, max_epochs: one number for all corpora, or name to number.
        schedule: (global sample, weights).
    """

    corpora: dict[str, str]
    seq_len: int
    global_batch_size: int
    weights: dict[str, float] = field(default_factory=dict)
    seed: int = 0
    epochs: int = 0
    block_tokens: int | None = None
    window_blocks: int | None = None
    take: float | dict[str, float] | None = None
    max_epochs: float | dict[str, float] | None = None
    start_epoch: dict[str, int] = field(default_factory=dict)
    schedule: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    loss_across_documents: bool = False
    allow_small_blocks: bool = False

    def plan(self) -> StreamPlan:
        """Open the corpora, and make the plan.

        Raises:
            PlanError: the values make no plan.
            CorpusError: a corpus cannot be opened.
        """
        # what StreamPlan has no neutral value for is given only if the file has it
        given: dict[str, Any] = {
            name: value for name in ("take", "max_epochs") if (value := getattr(self, name)) is not None
        }
        return StreamPlan(
            self.corpora,
            seq_len=self.seq_len,
            seed=self.seed,
            weights=self.weights or None,
            epochs=self.epochs or None,
            block_tokens=self.block_tokens,
            window_blocks=self.window_blocks,
            schedule=self.schedule,
            start_epoch=self.start_epoch,
            loss_across_documents=self.loss_across_documents,
            allow_small_blocks=self.allow_small_blocks,
            **given,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerData(Mix):
    """The ``[data]`` table of a trainer's recipe: a mix, and how the trainer loads it.

    Args:
        uneven, num_workers: as for `StreamingLoader`.
    """

    uneven: Literal["refuse", "pad"] = "refuse"
    num_workers: int = 0


def load_mix(
    location: str, options: Mapping[str, Any] | None = None, *, defaults: Mapping[str, Any] | None = None
) -> Mix:
    """A mix from a TOML file, a trainer's recipe (its ``[data]`` table) or checkpoint, or from one corpus directory.

    Args:
        location: a file, a checkpoint directory or a corpus directory.
        options: key to value; None leaves what the file says.
        defaults: key to value, for keys that neither names.

    Raises:
        UsageError: no such file, no TOML, an unknown or missing key, a wrong type.
    """
    prefix, fields = "", {}
    kind: type[Mix] = Mix
    if location.endswith(".toml") or os.path.isfile(location):
        fields = read_toml(location, hint="give a mix such as mix.toml, or a corpus directory")
        if isinstance(fields.get("data"), Mapping):
            kind, fields, prefix = TrainerData, dict(fields["data"]), "data."
    elif is_checkpoint(location):
        kind, fields, prefix = TrainerData, _recipe_of(location), "data."
    else:
        fields = {"corpora": {os.path.basename(os.path.normpath(location)): location}}
    given = {key: value for key, value in (options or {}).items() if value is not None}
    fields = {**(defaults or {}), **fields, **given}
    for key in ("corpora", "seq_len", "global_batch_size"):
        if key not in fields and not os.path.exists(location):
            raise UsageError(f"{location} does not exist", hint="give a mix.toml, a corpus directory or a checkpoint")
        if key not in fields:
            option = "" if key == "corpora" else f", or --{key.replace('_', '-')} on the command line"
            raise UsageError(f"{location}: no {prefix}{key}", hint=f"give {_EXAMPLES[key]} in a mix.toml{option}")
    found = convert(fields, kind, where=location, hint=_HINT, prefix=prefix)
    for key in ("seq_len", "global_batch_size"):
        if (value := getattr(found, key)) < 1:
            raise UsageError(f"{location}: {prefix}{key} is {value}, expected at least 1", hint="change it")
    return Mix(**{item.name: getattr(found, item.name) for item in dataclasses.fields(Mix)})


def is_checkpoint(location: str) -> bool:
    """Whether a directory is a checkpoint of the trainer."""
    return os.path.isfile(os.path.join(location, STATE_FILE))


def _recipe_of(checkpoint: str) -> dict[str, Any]:
    path = os.path.join(checkpoint, STATE_FILE)
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file)["config"]["data"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} holds no recipe: {error!r}", hint="give a checkpoint of tokshard's trainer, or the mix itself"
        ) from error
