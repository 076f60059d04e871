"""Settings of the trainer's tests, and the small runs of many of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.runs import Runs, corpora


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The checkpoints of torch 2.13 warn by themselves."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            for kind in ("UserWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Two corpora to train on: never changed."""
    return corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def run(paths: dict[str, str], tmp_path: Path) -> Runs:
    return Runs(paths, tmp_path)
