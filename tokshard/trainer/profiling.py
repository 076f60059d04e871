"""A window of torch.profiler."""

from __future__ import annotations

import os

from torch import distributed
from torch.profiler import profile

from tokshard.run_files.recipe import Train
from tokshard.trainer.parallel import say


class Profiler:
    """Rank 0 traces `train.profile_steps`, and writes the trace into `train.out`."""

    def __init__(self, settings: Train) -> None:
        self._first, self._stop = settings.profile_steps or (0, 0)
        self._path = os.path.join(settings.out, f"trace-step-{self._first}.json")
        self._running: profile | None = None

    def before(self, step: int) -> None:
        """Begin or end the window between two steps; steps count from 1."""
        if step >= self._stop:
            self.close()
        elif step >= self._first and distributed.get_rank() == 0 and self._running is None:
            self._running = profile()
            self._running.start()

    def close(self) -> None:
        """Write the trace, also where the run ends within the window."""
        running, self._running = self._running, None
        if running is not None:
            running.stop()
            try:
                running.export_chrome_trace(self._path)
                say(f"wrote {self._path}")
            except OSError as error:
                say(f"warning: {self._path} could not be written: {error.strerror}")
