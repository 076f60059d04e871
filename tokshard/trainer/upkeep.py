"""What a run does besides training: its directory, signals, garbage collection, a profiler window, lines for people."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress

from torch import distributed
from torch.profiler import profile

from tokshard.run_files.recipe import Train
from tokshard.trainer.parallel import together
from tokshard.trainer.run_lock import locked, look_for


class Upkeep(AbstractContextManager["Upkeep"]):
    """What happens between two steps: garbage collection, on all ranks at once so that none waits, and the profiler."""

    def __init__(self, settings: Train) -> None:
        self._settings, self._was_on = settings, gc.isenabled()
        self._profile: profile | None = None
        if settings.gc_every:
            gc.disable()
            gc.freeze()  # model and plan stay: a collection does not look at them again

    def before(self, step: int) -> None:
        """Between two steps; counted from 1."""
        if self._settings.gc_every and step % self._settings.gc_every == 0:
            gc.collect()
        first, stop = self._settings.profile_steps or (0, 0)
        if step >= stop:
            self._end_profile()
        elif step >= first and distributed.get_rank() == 0 and self._profile is None:
            self._profile = profile()
            self._profile.start()

    def __exit__(self, *_: object) -> None:
        self._end_profile()
        if self._settings.gc_every:
            gc.unfreeze()
        if self._was_on:
            gc.enable()

    def _end_profile(self) -> None:
        if self._profile is not None and self._settings.profile_steps is not None:
            self._profile.stop()
            path = os.path.join(self._settings.out, f"trace-step-{self._settings.profile_steps[0]}.json")
            finished, self._profile = self._profile, None
            try:
                finished.export_chrome_trace(path)
                say(f"wrote {path}")
            except OSError as error:
                say(f"warning: {path} could not be written: {error.strerror}")


@contextmanager
def held(out: str) -> Iterator[None]:
    """Make the directory of a run, and lock it. Every rank calls this.

    Raises:
        TrainerError: the directory cannot be made, another job holds it, or a rank sees a different directory.
    """
    holder = [""]
    with ExitStack() as stack:
        with together(f"{out} cannot be the directory of a run", hint="give a train.out that can be made and written"):
            if distributed.get_rank() == 0:
                holder = [stack.enter_context(locked(out))]
        distributed.broadcast_object_list(holder)
        with together():
            look_for(out, holder[0])
        yield


def say(line: str) -> None:
    """A line for people, from rank 0. A closed or full stdout does not end a run."""
    if distributed.get_rank() == 0:
        with suppress(OSError, ValueError, AttributeError):
            sys.stdout.write(line + "\n")
            sys.stdout.flush()
