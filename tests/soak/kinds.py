"""The kinds of trials. A trial is a number, its seed: from it, and nothing else, follows what is tried."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

Try = Callable[[int], str]
"""Tries a seed. Returns in a few words what came of it; any exception is a defect."""

Prepare = Callable[[Path, ExitStack], Try]
"""Makes what all trials of a kind need in a folder, once in each process; the stack ends with the process."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of trial.

    Args:
        place: ``module:function`` of its `Prepare`; imported in the process that tries.
        about: what is tried, and what has to come of it.
        num_trials: of the long form.
        trial_seconds: about how long one takes on a core.
        share: of the time of the short form.
        limit_seconds: a trial that takes longer hangs.
        needs: a package without which there is nothing to try.
    """

    place: str
    about: str
    num_trials: int
    trial_seconds: float
    share: float
    limit_seconds: float = 120
    needs: str = "tokshard"

    @property
    def is_here(self) -> bool:
        """Whether this environment has what it needs."""
        return importlib.util.find_spec(self.needs) is not None

    def prepare(self, folder: Path, stack: ExitStack) -> Try:
        """Make what its trials need."""
        module, _, name = self.place.partition(":")
        found: Prepare = getattr(import_module(module), name)
        return found(folder, stack)


KINDS = {
    "corpora": Kind(
        place="tests.soak.corpora:prepare",
        about="bytes and values of corpora change (shards, tables, manifests, hashes; text, generations, conversations "
        "with weights), also with hashes made right again: refused by name, or the same tokens",
        num_trials=7_000,
        trial_seconds=0.15,
        share=0.25,
    ),
    "files": Kind(
        place="tests.soak.files:prepare",
        about="states, plans, recipes, checkpoints, lists of documents and build recipes change, also with hashes made "
        "right again: refused by name, or read",
        num_trials=3_000,
        trial_seconds=0.05,
        share=0.15,
    ),
    "histories": Kind(
        place="tests.soak.histories:prepare",
        about="jobs stop, resume, rescale and change batch size, seq_len, weights and corpora, skip and mask, with "
        "streams and packing whole, with and without loss spans: each batch and state is the model's",
        num_trials=1_000,
        trial_seconds=0.4,
        share=0.3,
    ),
    "kills": Kind(
        place="tests.soak.kills:prepare",
        about="builds, imports and copies by one process, by workers and as arrays are killed, stopped, starved of "
        "disk or memory, their clock jumps, their sources change: then they end with the bytes of one process",
        num_trials=1_500,
        trial_seconds=2.7,
        share=0.3,
    ),
    "unfinished": Kind(
        place="tests.soak.unfinished:prepare",
        about="a file that a stopped build, import, copy or array of jobs left changes or goes, then the same command: "
        "refused by name, or the same corpus",
        num_trials=2_000,
        trial_seconds=0.15,
        share=0.15,
    ),
    "ray": Kind(
        place="tests.soak.kills:prepare_ray",
        about="the same on a Ray cluster of two nodes",
        num_trials=100,
        trial_seconds=25.0,
        share=0.1,
        limit_seconds=300,
        needs="ray",
    ),
    "bucket": Kind(
        place="tests.soak.kills:prepare_bucket",
        about="the same into a bucket, killed at a request",
        num_trials=200,
        trial_seconds=10.0,
        share=0.1,
        limit_seconds=300,
        needs="moto",
    ),
    "trainer": Kind(
        place="tests.soak.trainer:prepare",
        about="training jobs are killed at the start, in a step and in the middle of a checkpoint, and continue on "
        "other numbers of ranks: then every loss is that of the run that was not killed",
        num_trials=10,
        trial_seconds=100.0,
        share=0.0,
        limit_seconds=1_200,
        needs="torch",
    ),
}
