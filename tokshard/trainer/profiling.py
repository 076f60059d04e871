"""A window of torch.profiler and of the GPU's allocations."""

from __future__ import annotations

import contextlib
import os

import torch
from torch import distributed
from torch.profiler import profile

from tokshard.errors import UsageError
from tokshard.run_files.recipe import Train
from tokshard.trainer.out_of_memory import write_snapshot
from tokshard.trainer.parallel import say

MAX_ALLOCATIONS = 100_000


class Profiler:
    """The ranks of `train.profile_ranks` trace `train.profile_steps`, each into a file in `train.out`.

    On CUDA each writes a second file: the allocations of these steps, with lines of code.

    Raises:
        UsageError: the job has no such rank; the same error on all ranks.
    """

    def __init__(self, settings: Train, device: torch.device) -> None:
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        if settings.profile_steps and max(settings.profile_ranks, default=0) >= num_ranks:
            raise UsageError(
                f"train.profile_ranks is {settings.profile_ranks}, the number of ranks is {num_ranks}",
                hint="ranks count from 0",
            )
        self._first, self._stop = settings.profile_steps or (0, 0)
        self._ranks, self._is_traced = settings.profile_ranks, rank in settings.profile_ranks
        self._path = os.path.join(settings.out, f"trace-step-{self._first}-rank-{rank}.json")
        self._out, self._has_history = settings.out, device.type == "cuda"
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Begin or end the window between two steps; steps count from 1."""
        if step >= self._stop:
            self.close()
        elif step >= self._first and self._is_traced and self._running is None:
            self._running = profile()
            self._running.start()
            if self._has_history:
                torch.cuda.memory._record_memory_history(max_entries=MAX_ALLOCATIONS)  # noqa: SLF001 - as torch says

    def close(self) -> None:
        """Write the trace, also where the run ends within the window."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            try:
                running.export_chrome_trace(self._path)
                os.stat(self._path)  # on a full disk torch only logs it, and leaves what it wrote
                say(f"wrote {self._path}", ranks=self._ranks)
            except OSError as error:
                say(f"warning: {self._path} could not be written: {error.strerror}", ranks=self._ranks)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(f"{self._path}.tmp")
            if self._has_history:
                say(write_snapshot(self._out, f"step-{self._first}"), ranks=self._ranks)
                torch.cuda.memory._record_memory_history(enabled=None)  # noqa: SLF001
