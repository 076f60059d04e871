"""The corpus that most tests of other projects read."""

from pathlib import Path

import pytest

from tests.interop.real_text import build


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """The pages of this repository, and their documents."""
    return build(tmp_path_factory.mktemp("corpus") / "corpus")
