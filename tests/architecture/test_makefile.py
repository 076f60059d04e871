"""The Makefile names files of tests, and no test fails where a name means nothing any more."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("variable", "fewest"), [("LIBRARIES", 29), ("TORCH_LIBRARIES", 4)])
def test_the_files_that_run_with_the_lowest_versions_are_there(variable: str, fewest: int):
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    found = re.search(rf"^{variable} := \$\(addprefix tests/,((?:[^)\\]|\\\n)+)\)$", makefile, re.MULTILINE)
    assert found
    names = found[1].replace("\\\n", " ").split()
    assert len(names) > fewest
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []
