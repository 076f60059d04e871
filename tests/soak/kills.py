"""Trials of builds, imports and copies that something happens to: in the end they have the bytes of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.contract.faults import Launcher
from tests.contract.table import ACTS, KINDS, OPTIONS_OF, Table
from tests.contract.test_promise_01_product import cluster_of_two, try_history
from tests.pipeline.inputs import write_byte_tokenizer


def prepare(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """The table of the whole product."""
    found = table_of(folder, stack)

    def try_(seed: int) -> None:
        kind = KINDS[seed % len(KINDS)]
        try_history(found, kind, seed=seed, max_examples=3, stateful_step_count=6)

    return try_


def prepare_ray(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """The same table on a cluster."""
    found = table_of(folder, stack)
    found.ray_address = stack.enter_context(cluster_of_two())

    def try_(seed: int) -> None:
        rng = random.Random(f"ray {seed}")
        kind = rng.choice(KINDS)
        command = found.command(kind, rng.choice([option for option in OPTIONS_OF[kind] if "source" not in option]))
        found.steps(command)
        found.begin(command)
        what = [
            found.happen(command, "ray", rng.choice(list(ACTS)), rng.random()) for _ in range(rng.choice([1, 1, 2]))
        ]
        found.check(command, what, "ray")

    return try_


def table_of(folder: Path, stack: ExitStack) -> Table:
    """The table, in a folder of its own."""
    launcher = stack.enter_context(Launcher(folder / "runs"))
    (folder / "table").mkdir()
    return Table(launcher, folder / "table", write_byte_tokenizer(folder / "tokenizer"))
