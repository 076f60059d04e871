"""Trials of training jobs that are killed."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.contract.faults import Launcher
from tests.trainer.kills import check_kills


def prepare(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """Import torch; each trial writes its corpora."""
    launcher = stack.enter_context(Launcher(folder / "programs", has_torch=True))

    def try_(seed: int) -> None:
        place = folder / "runs"
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        mode = random.Random(f"trainer {seed}").choice(["synchronous", "asynchronous", "mix"])
        check_kills(launcher, place, seed, 8, mode)

    return try_
