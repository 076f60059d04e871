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


@dataclass(frozen=True)
class Kind:
    """One kind of trial. The page of the contract says what each tries.

    Args:
        place: ``module:function`` of its `Prepare`; imported in the process that tries.
        num_trials: of the long form.
        trial_seconds: about how long one takes on a core.
        share: of the time of the short form.
        limit_seconds: a trial that takes longer hangs.
        needs: a package without which there is nothing to try.
    """

    place: str
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
    "corpora": Kind("tests.soak.corpora:prepare", 7_000, 0.15, share=0.25),
    "files": Kind("tests.soak.files:prepare", 3_000, 0.05, share=0.15),
    "histories": Kind("tests.soak.histories:prepare", 400, 1.0, share=0.3),
    "kills": Kind("tests.soak.kills:prepare", 1_000, 5.0, share=0.3),
    "ray": Kind("tests.soak.kills:prepare_ray", 100, 25.0, share=0.1, limit_seconds=300, needs="ray"),
    "trainer": Kind("tests.soak.trainer:prepare", 10, 100.0, share=0.0, limit_seconds=1_200, needs="torch"),
}
