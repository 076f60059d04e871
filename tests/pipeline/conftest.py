"""Fixtures of several modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.contract import small
from tests.pipeline.inputs import write_byte_tokenizer
from tests.pipeline.places import TEXTS, StoppedError, build, write
from tests.store.conftest import s3, s3_port, seaweedfs, seaweedfs_port, small_s3  # noqa: F401 -- fixtures


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with a tokenizer ``tok`` and a source ``a.jsonl``."""
    write_byte_tokenizer(tmp_path / "tok")
    write(tmp_path / "a.jsonl", TEXTS)
    return tmp_path


@pytest.fixture
def stop(place: Path) -> Callable[..., None]:
    """Runs a build that is stopped when its tasks are done, before it is put together."""

    def stopped(*sources: Path, **options: Any) -> None:
        with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
            build(place, *sources, **options)

    return stopped


BUCKETS = ["in_memory", *(pytest.param(name, marks=pytest.mark.remote) for name in ("small_s3", "seaweedfs"))]


@pytest.fixture(params=BUCKETS)
def bucket(request: pytest.FixtureRequest) -> str:
    """An empty location in an object store."""
    found: str = request.getfixturevalue(request.param)
    return found
