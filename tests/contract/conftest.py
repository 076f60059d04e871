"""Fixtures of several modules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.commands import Bench
from tests.contract.faults import Launcher
from tests.contract.table import Table
from tests.pipeline.inputs import write_byte_tokenizer


@pytest.fixture(scope="session")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("launcher") / "runs") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with an id per byte: documents can be read as text, and loading it costs nothing."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def table(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(launcher, tmp_path_factory.mktemp("table"), byte_tokenizer)


@pytest.fixture(scope="session")
def shared_bench(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(launcher, tmp_path_factory.mktemp("bench"), byte_tokenizer)


@pytest.fixture
def bench(shared_bench: Bench) -> Bench:
    """A place for commands, which is empty."""
    shared_bench.clear()
    return shared_bench


@pytest.fixture
def dice(request: pytest.FixtureRequest) -> random.Random:
    """What a test draws from; every day it draws other things, and `--hypothesis-seed` repeats those of a day."""
    return random.Random(f"{request.config.option.hypothesis_seed} {request.node.name}")
