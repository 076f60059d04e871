"""Jobs that are killed at steps on disk and go on with other numbers of ranks give the run that was never killed."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.contract.faults import ROOT, Fault, Launcher, Running
from tests.ranks import free_port
from tests.trainer.runs import SMALL, as_toml, configuration, corpora, steps_of
from tests.trainer.test_equality import assert_equal_training

NUM_STEPS = 100
EVERY = 2
NUM_CHANGES = 1_000
"""Of the mix: one after each step."""
MOST = 100
"""Steps on disk of a rank before it is killed: rank 0 makes some 30 of them in a save, and one in each step between."""


def check_kills(launcher: Launcher, directory: Path, seed: int, num_kills: int, mode: str) -> None:
    """Run a job with kills and one without; their losses and last states have to be equal.

    Args:
        launcher: one that has imported torch.
        mode: how the job saves, ``synchronous`` or ``asynchronous``; or ``mix``: its losses change its mix.
    """
    paths, rng, follows = corpora(directory / "corpora"), random.Random(seed), mode == "mix"
    program = [str(ROOT / "recipes/mix_from_losses.py")] if follows else ["python", "-m", "tokshard.trainer"]
    sizes = {"train__steps": NUM_CHANGES if follows else NUM_STEPS, "train__log_every": 1 if follows else 10}
    straight, killed = directory / "straight", directory / "killed"

    def start(out: Path, num_ranks: int, faults: Mapping[int, Fault], **changes: Any) -> list[Running]:
        """Start the ranks of a job, to some of which something happens."""
        recipe = directory / f"{out.name}.toml"
        recipe.write_text(as_toml(configuration(paths, out, **sizes, **changes) | {"model": SMALL}))
        place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        words = [*program, str(recipe)]
        return [
            launcher.start(words, out=out, fault=faults.get(rank), environment=place | {"RANK": str(rank)})
            for rank in range(num_ranks)
        ]

    check_ended(start(straight, 2 if follows else 1, {}, checkpoint__every=0))
    saves = {"checkpoint__every": EVERY, "checkpoint__keep": 2, "checkpoint__asynchronous": mode == "asynchronous"}
    for _ in range(num_kills):
        num_ranks, saved = 2 if follows else rng.randint(1, 4), steps_saved(killed)
        victims = rng.sample(range(num_ranks), rng.randint(1, num_ranks))
        faults = {rank: Fault(at=rng.randint(1, MOST), act="die") for rank in victims}
        job = start(killed, num_ranks, faults, **saves)
        while not any(rank.has_ended for rank in job):
            time.sleep(0.01)
        time.sleep(rng.choice((0.0, 0.5)))  # then a launcher ends the others
        for rank in job:
            rank.kill()
            rank.end()
        assert steps_saved(killed)[-1:] >= saved[-1:], "a step that was saved is gone"
    check_ended(start(killed, 2 if follows else rng.randint(1, 4), {}, **saves))
    steps, others = steps_of(killed), steps_of(straight)
    if follows:
        assert len({step["corpora"]["code"]["weight"] for step in steps}) == len(steps) == NUM_CHANGES
        assert_equal_mixes(steps, others)
    else:
        assert_equal_training(steps, others)
    states = [
        json.loads((out / "checkpoints" / f"step-{len(steps):08d}" / "state.json").read_text())["loader"]
        for out in (killed, straight)
    ]
    assert states[0] == states[1]


def check_ended(job: Sequence[Running]) -> None:
    """All ranks end well."""
    for ended in [rank.end() for rank in job]:
        assert ended.exit_code == 0, ended.errors


def assert_equal_mixes(steps: list[dict[str, Any]], others: list[dict[str, Any]]) -> None:
    """Of runs on as many ranks: the same samples, weights and losses, bit for bit."""
    for key in ("step", "digest", "samples", "corpora", "loss_by_corpus"):
        assert [step[key] for step in steps] == [step[key] for step in others], key


def steps_saved(out: Path) -> list[int]:
    """Steps of the complete checkpoints."""
    return sorted(int(path.parent.name.removeprefix("step-")) for path in out.glob("checkpoints/step-*[0-9]/COMPLETE"))
