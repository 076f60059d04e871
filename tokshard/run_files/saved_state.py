"""The state of a loader, read from any kind of checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokshard.errors import UsageError
from tokshard.extras import extra_module
from tokshard.run_files.checkpoint_directory import STATE_FILE, is_checkpoint, refuse_uri

_KEY = "cursor"
_SINCE = "_steps_since_snapshot"
_MARK = '{"tokshard_cursor":'
_HINT = "give a checkpoint of the trainer, one that torch saved with the loader's state in it, or the state as JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedState:
    """The position of a job in its plan.

    Args:
        cursor: the line of JSON in `StreamingLoader.state_dict`.
        step: optimizer steps done; None if the checkpoint does not say.
    """

    cursor: str
    step: int | None


def read_state(path: str) -> SavedState:
    """The state in a checkpoint of the trainer, torch.distributed.checkpoint or torch.save.

    Nothing in it is executed, and no tensor is loaded. Also reads a text file with ``json.dumps(loader.state_dict())``,
    or with only the cursor. Only files of torch need torch.

    Raises:
        UsageError: the checkpoint lacks a state, or holds several that differ, or one that is older than it.
        LoaderError: a directory that torch wrote is damaged, or could only be read by executing what is in it.
    """
    saved = _read(path)
    cursors = sorted(set(_cursors(saved, path)))
    if len(cursors) != 1:
        found = "no state" if not cursors else f"{len(cursors)} states, of several loaders or workers,"
        raise UsageError(f"{path} holds {found} of a tokshard loader", hint=_HINT)
    step = saved.get("step") if isinstance(saved, Mapping) else None
    return SavedState(cursor=cursors[0], step=step if isinstance(step, int) else None)


def _read(path: str) -> Any:
    try:
        if is_checkpoint(path):
            path = os.path.join(path, STATE_FILE)
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if file.read(1) in (b"{", b'"'):
                    file.seek(0)
                    return json.load(file)
        elif not os.path.isdir(path):
            refuse_uri(path)
            raise UsageError(f"{path}: no such checkpoint", hint=_HINT)
        extra_module("torch", f"{path} was saved by torch, which is not installed", extra="torch")
        from tokshard.run_files.torch_checkpoints import read_values

        return read_values(path, (_KEY, _SINCE))
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"{path} is not a checkpoint: {str(error).splitlines()[0]}", hint=_HINT) from error


def _cursors(saved: Any, path: str) -> Iterator[str]:
    """Every cursor in nested values, as a line of JSON.

    Raises:
        UsageError: one is older than the values around it.
    """
    waiting, seen = [saved], set[int]()
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue  # a small file may hold the same list in very many places
        seen.add(id(value))
        if isinstance(value, str):
            if value.startswith(_MARK):
                yield value
        elif isinstance(value, Mapping):
            if since := [value[name] for name in value if str(name).endswith(_SINCE) and value[name]]:
                raise UsageError(
                    f"{path} has a state of a StatefulDataLoader from {since[0]} steps before it was saved",
                    hint="give one that was saved with snapshot_every_n_steps=1",
                )
            if "tokshard_cursor" in value:
                yield json.dumps(value, separators=(",", ":"))
            else:
                waiting += value.values()
        elif isinstance(value, Sequence) and not isinstance(value, bytes):
            waiting += value
