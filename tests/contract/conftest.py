"""Fixtures of several modules."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.faults import Launcher
from tests.pipeline.inputs import write_byte_tokenizer


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    with Launcher(tmp_path_factory.mktemp("launcher") / "runs") as launcher:
        yield launcher


@pytest.fixture(scope="session")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with an id per byte: documents can be read as text, and loading it costs nothing."""
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
