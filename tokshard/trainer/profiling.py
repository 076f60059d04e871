"""A window of torch.profiler."""

from __future__ import annotations

import os

from torch import distributed
from torch.profiler import profile

from tokshard.errors import UsageError
from tokshard.run_files.recipe import Train
from tokshard.trainer.parallel import say


class Profiler:
    """The ranks of `train.profile_ranks` trace `train.profile_steps`, each into a file in `train.out`.

    Raises:
        UsageError: the job has no such rank; the same error on all ranks.
    """

    def __init__(self, settings: Train) -> None:
        rank, num_ranks = distributed.get_rank(), distributed.get_world_size()
        if settings.profile_steps and max(settings.profile_ranks, default=0) >= num_ranks:
            raise UsageError(
                f"train.profile_ranks is {settings.profile_ranks}, the number of ranks is {num_ranks}",
                hint="ranks count from 0",
            )
        self._first, self._stop = settings.profile_steps or (0, 0)
        self._ranks, self._is_traced = settings.profile_ranks, rank in settings.profile_ranks
        self._path = os.path.join(settings.out, f"trace-step-{self._first}-rank-{rank}.json")
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Begin or end the window between two steps; steps count from 1."""
        if step >= self._stop:
            self.close()
        elif step >= self._first and self._is_traced and self._running is None:
            self._running = profile()
            self._running.start()

    def close(self) -> None:
        """Write the trace, also where the run ends within the window."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            try:
                running.export_chrome_trace(self._path)
                say(f"wrote {self._path}", ranks=self._ranks)
            except OSError as error:
                say(f"warning: {self._path} could not be written: {error.strerror}", ranks=self._ranks)
