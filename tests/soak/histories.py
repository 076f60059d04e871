"""Trials of the machine of tests/runtime/histories.py, over its corpora on disk: against the models of the pages."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

from hypothesis import Phase, settings
from hypothesis import seed as of_seed
from hypothesis.stateful import run_state_machine_as_test

from tests.runtime.disk import ACCESS, write
from tests.runtime.histories import SOURCES, Held, Histories
from tests.runtime.modelled import documents_of_source
from tests.runtime.sources import SpannedSource
from tokshard.runtime import CorpusSource


def prepare(folder: Path, stack: ExitStack) -> Callable[[int], None]:
    """Write the corpora, each in several shards."""
    paths = {name: write(folder / name, source, wide=True, shard_tokens=300) for name, source in SOURCES.items()}

    def on_disk(name: str, access: str) -> Held:
        source = CorpusSource(paths[name], access=access)
        return Held(source, documents_of_source(SOURCES[name], source.fingerprint))

    def try_(seed: int) -> None:
        rng = random.Random(f"histories {seed}")
        spanned = {name for name, source in SOURCES.items() if isinstance(source, SpannedSource)}
        names = [name for name in SOURCES if name not in spanned or rng.random() < 0.6]
        steps, packs = rng.choice([12, 25, 60]), rng.choice([("cut",), ("cut", "whole")])
        every = settings(
            max_examples=3, stateful_step_count=steps, deadline=None, database=None, phases=[Phase.generate]
        )

        class OnDisk(Histories):
            held: ClassVar = {name: on_disk(name, rng.choice(ACCESS)) for name in names}
            all_packs = packs

        run_state_machine_as_test(of_seed(seed)(OnDisk), settings=every)

    return try_
