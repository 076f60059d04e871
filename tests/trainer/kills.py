"""Jobs that are killed at random moments and go on with other numbers of ranks give the run that was never killed.

Real processes: this module as a program forks the ranks and kills them.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from tests.ranks import free_port
from tests.trainer.runs import ROOT, SMALL, configuration, corpora, fork_rank, steps_of, train_jobs
from tests.trainer.test_equality import assert_equal_training

NUM_STEPS = 100
EVERY = 2
NUM_CHANGES = 1_000
"""Of the mix: one after each step."""


def check_kills(directory: Path, seed: int, num_kills: int, mode: str) -> str:
    """Run a job with kills and one without; their losses and last states have to be equal.

    Returns:
        What was killed.
    """
    command = [sys.executable, "-m", "tests.trainer.kills", str(directory), str(seed), str(num_kills), mode]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    steps, others = steps_of(directory / "killed"), steps_of(directory / "straight")
    if mode == "mix":
        assert len({step["corpora"]["code"]["weight"] for step in steps}) == len(steps) == NUM_CHANGES
        assert_equal_mixes(steps, others)
    else:
        assert_equal_training(steps, others)
    states = [
        json.loads((directory / name / "checkpoints" / f"step-{len(steps):08d}" / "state.json").read_text())
        for name in ("killed", "straight")
    ]
    assert states[0]["loader"] == states[1]["loader"]
    return done.stdout.splitlines()[-1]


def assert_equal_mixes(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Of runs on as many ranks: the same samples, weights and losses, bit for bit."""
    for key in ("step", "digest", "samples", "corpora", "loss_by_corpus"):
        assert [step[key] for step in steps] == [step[key] for step in others], key


class Job:
    """Ranks of a run, in processes of their own."""

    def __init__(self, fields: dict[str, Any], world_size: int, on_record: Any = None) -> None:
        port, train_this = free_port(), partial(train_jobs, [fields], on_record)
        self.running = [fork_rank(rank, world_size, port, train_this) for rank in range(world_size)]

    def is_running(self) -> bool:
        """Whether all ranks are."""
        return len([pid for pid in self.running if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)]) == 0

    def wait(self) -> list[int]:
        """Exit codes, after all ranks have ended."""
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.running]
        self.running = []
        return codes

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)


def steps_saved(out: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*[0-9]/COMPLETE"))


def is_saving(out: Path) -> bool:
    return any(out.glob("checkpoints/*.partial"))


def wait_for(kind: str, job: Job, out: Path, rng: random.Random) -> None:
    """Wait for a moment of a kill: at the start, in a step, or in a save."""
    log, saved = out / "metrics.jsonl", steps_saved(out)

    def num_lines() -> int:
        return log.read_bytes().count(b"\n") if log.exists() else 0

    enough = num_lines() + rng.randint(1, 8)
    is_there, seconds = {
        "start": (lambda: True, 1.5),
        "step": (lambda: num_lines() >= enough, 0.05),
        "save": (lambda: steps_saved(out)[-1:] > (saved[-1:] or [0]) and is_saving(out), 0.15),
    }[kind]
    while not is_there() and job.is_running():
        time.sleep(0.001)
    time.sleep(rng.uniform(0, seconds))


def run_with_kills(start: Callable[[], Job], out: Path, rng: random.Random, num_kills: int) -> str:
    """Run to the end, with kills before; returns what was killed."""
    done, in_saves = Counter[str](), 0
    while done.total() < num_kills:
        kind, saved, job = rng.choice(["start", "step", "save"]), steps_saved(out), start()
        wait_for(kind, job, out, rng)
        if not job.is_running():
            sys.exit(f"a rank ended before it was killed: {job.wait()}")
        victims = rng.sample(job.running, rng.randint(1, len(job.running)))
        job.kill(victims)
        time.sleep(rng.choice((0.0, 0.5)))  # then a launcher ends the others
        job.kill([pid for pid in job.running if pid not in victims])
        in_saves += is_saving(out)
        if all(code == 0 for code in job.wait()):
            sys.exit("all ranks had ended before the kill")
        if steps_saved(out)[-1:] < saved[-1:]:
            sys.exit(f"step {saved[-1]} was saved, {steps_saved(out)} is the newest now")
        done[kind] += 1
    if any(start().wait()):
        sys.exit("the run that was not killed failed")
    return f"killed {dict(done)}, {in_saves} of them left a save unfinished"


def main(directory: Path, seed: int, num_kills: int, mode: str) -> None:
    # once for all ranks
    import torch._dynamo  # noqa: F401

    import tokshard.trainer.loop  # noqa: F401

    warnings.simplefilter("ignore")
    paths, rng, follows = corpora(directory / "corpora"), random.Random(seed), mode == "mix"
    sizes = {"train__steps": NUM_CHANGES if follows else NUM_STEPS, "train__log_every": 1 if follows else 10}
    follow = runpy.run_path(str(ROOT / "recipes/mix_from_losses.py"))["follow"] if follows else None

    def run_of(name: str, **changes: Any) -> dict[str, Any]:
        return configuration(paths, directory / name, **sizes, **changes) | {"model": SMALL}

    if any(Job(run_of("straight", checkpoint__every=0), 2 if follows else 1, follow).wait()):
        sys.exit("the run without kills failed")
    changes = {"checkpoint__every": EVERY, "checkpoint__keep": 2, "checkpoint__asynchronous": mode == "asynchronous"}
    killed = run_of("killed", **changes)
    said = run_with_kills(
        lambda: Job(killed, 2 if follows else rng.randint(1, 4), follow), directory / "killed", rng, num_kills
    )
    sys.stdout.write(f"{said}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
