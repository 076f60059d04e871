"""Training runs of the 10M model on a tiny vocabulary, on real gloo ranks.

    python -m tests.trainer.runs NUM_RANKS MODULE FUNCTION ARGUMENTS...

This process forks the ranks of a job, and each calls the function.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tests.contract.faults import ROOT, Launcher
from tests.corpora import TINY_TOKENIZER, Source, write_corpus
from tests.ranks import forked, free_port
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS

VOCABULARY = 64
SMALL = {"preset": "10M", "dim": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 16}
UNTIMED = ("tokens_per_second", "loader_wait_seconds", "memory_bytes", "mfu", "mfu_full_rows")
"""What differs from run to run."""


def tokenizer() -> bytes:
    fields = json.loads(TINY_TOKENIZER)
    fields["model"]["vocab"] |= {f"word{index}": index for index in range(4, VOCABULARY)}
    return json.dumps(fields).encode()


def corpora(directory: Path) -> dict[str, str]:
    """Two corpora of Markov chains, which a model can learn: documents of 2 to 89 tokens."""
    return {name: corpus(directory / name, step=step, seed=step) for name, step in (("code", 3), ("prose", 5))}


def corpus(path: Path, *, step: int, seed: int, num_documents: int = 300) -> str:
    rng = np.random.default_rng(seed)
    documents = []
    for length in rng.integers(1, 89, num_documents).tolist():
        ids = 1 + (rng.integers(0, 63) + step * np.arange(length) + (rng.random(length) < 0.1)) % 63
        documents.append([*ids.tolist(), 0])
    return str(write_corpus(path, documents, tokenizer=tokenizer()))


def chat(path: Path, lengths: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """A corpus of conversations: two answers in each that has room, the second of them with another weight.

    Returns:
        Tokens, and how much each counts, by document.
    """
    rng = np.random.default_rng(1)
    documents, spans, weights, counts = [], [], [], []
    for index, length in enumerate(lengths):
        documents.append([*rng.integers(1, 64, length - 1).tolist(), 0])
        first = [1, 1 + length // 4, length // 2, length - 1] if length > 8 else []
        spans.append(first)
        weights.append([1.0, 0.25 + index % 5 / 8][: len(first) // 2])
        each = np.zeros(length)
        for weight, start, stop in zip(weights[-1], first[::2], first[1::2], strict=True):
            each[start:stop] = weight
        counts.append(each.tolist())
    metadata = {LOSS: spans, WEIGHTS: weights}
    sources = [Source(documents=documents, metadata=metadata)]
    write_corpus(path, sources=sources, columns=LOSS_COLUMNS, tokenizer=tokenizer())
    return documents, counts


def configuration(paths: dict[str, str], out: Path, **changes: Any) -> dict[str, Any]:
    """A recipe; ``changes`` are ``section__key=value``."""
    fields: dict[str, Any] = {
        "data": {
            "corpora": paths,
            "weights": {"code": 0.7, "prose": 0.3},
            "seq_len": 32,
            "global_batch_size": 9,  # the fourth of four ranks holds only padding
            "uneven": "pad",
            "seed": 7,
        },
        "model": {"preset": "10M"},
        "parallel": {"device": "cpu"},
        "compute": {},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4},
        "train": {"out": str(out), "steps": 20},
        "checkpoint": {"every": 10},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        fields.setdefault(section, {})[name] = value
    return fields


def as_toml(fields: dict[str, dict[str, Any]]) -> str:
    lines = []
    for section, values in fields.items():
        lines.append(f"[{section}]")
        lines += [f"{key} = {toml(value)}" for key, value in values.items()]
    return "\n".join(lines)


def toml(value: Any) -> str:
    """A value as TOML, where it has one."""
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {toml(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "") if isinstance(value, str) else repr(value)


def lines_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [line for line in lines_of(out) if "evaluation" not in line]


def evaluations_of(out: Path) -> dict[int, dict[str, dict[str, float]]]:
    """Step to the losses of each corpus."""
    return {line["step"]: line["evaluation"] for line in lines_of(out) if "evaluation" in line}


@dataclass(frozen=True)
class Runs:
    """Runs of a tiny model in this process, on one rank: four rows of 16 tokens a step, saved at the end alone."""

    paths: dict[str, str]
    directory: Path
    usual: dict[str, Any] = field(default_factory=dict)
    """What else their recipes have, unless they say otherwise."""

    def fields(self, out: str = "out", **changes: Any) -> dict[str, Any]:
        """The recipe of a run in a directory of that name."""
        sizes = {
            "data__global_batch_size": 4,
            "data__seq_len": 16,
            "checkpoint__every": 0,
            "optimizer__warmup_steps": 0,
        }
        return configuration(self.paths, self.directory / out, **sizes | self.usual | changes) | {"model": SMALL}

    def recipe(self, out: str = "out", **changes: Any) -> Any:
        from tokshard.run_files.recipe import resolve

        return resolve(self.fields(out, **changes))

    def end_of(self, out: str = "out", *, on_record: Any = None, **changes: Any) -> int:
        """Train; the number of the signal that ended it, or 0."""
        from tokshard.trainer.loop import train

        return train(self.recipe(out, **changes), on_record=on_record)

    def __call__(self, out: str = "out", *, on_record: Any = None, **changes: Any) -> list[dict[str, Any]]:
        """Train to the end; the steps on record, without what differs from run to run."""
        assert self.end_of(out, on_record=on_record, **changes) == 0
        return [{key: of[key] for key in of if key not in UNTIMED} for of in steps_of(self.directory / out)]

    def saved(self, out: str = "out") -> list[str]:
        folder = self.directory / out / "checkpoints"
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def tensors(self, step: int, out: str = "out") -> dict[str, Any]:
        """Those of a checkpoint, by name."""
        import torch
        from torch.distributed.checkpoint import FileSystemReader, load

        path = self.directory / out / "checkpoints" / f"step-{step:08}"
        index = FileSystemReader(path).read_metadata().state_dict_metadata
        tensors = {name: torch.empty(of.size, dtype=of.properties.dtype) for name, of in index.items()}
        load(tensors, checkpoint_id=path, no_dist=True)
        return tensors


def on_ranks(forks: Launcher, num_ranks: int, act: Callable[..., object], *arguments: object, seconds: int) -> None:
    """Call a function of a module on all ranks of a job, with the rank and with arguments as texts."""
    words = (num_ranks, act.__module__, act.__name__, *arguments)
    forks.run(["python", "-m", "tests.trainer.runs", *map(str, words)], ROOT, seconds=seconds)


def train_jobs(_: int, path: str) -> bool:
    """Train the recipes of a file one after another, on this rank."""
    from tokshard.run_files.recipe import Parallel, resolve
    from tokshard.trainer.loop import train
    from tokshard.trainer.parallel import process_group

    with process_group(Parallel(device="cpu")):
        return any(train(resolve(job)) for job in json.loads(Path(path).read_text()))


def main(num_ranks: str, module: str, name: str, *arguments: str) -> None:
    """Call a function on all ranks, as forks of this process, and wait for them."""
    warnings.simplefilter("ignore")
    act = getattr(importlib.import_module(module), name)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": num_ranks}

    def run(rank: int) -> object:
        os.environ["RANK"] = str(rank)
        return act(rank, *arguments)

    ranks = {forked(partial(run, rank)) for rank in range(int(num_ranks))}
    while ranks:
        pid, status = os.wait()
        ranks.discard(pid)
        if status:  # the others wait for it; whoever started this process ends them
            sys.exit(f"a rank of {num_ranks} ended with {os.waitstatus_to_exitcode(status)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
