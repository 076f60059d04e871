"""The page of the room names types that exist."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import tokshard.pipeline

ROOM = Path(tokshard.pipeline.__file__).parent


def test_the_types_of_the_page_exist() -> None:
    text = (
        (ROOM / "README.md").read_text(encoding="utf-8").partition("looks for every name -->\n")[2].partition("\n\n")[0]
    )
    assert [line.partition(".")[0] for line in text.splitlines()] == [str(number) for number in range(1, 11)]
    modules = (path.relative_to(ROOM.parents[1]).with_suffix("").parts for path in ROOM.rglob("*.py"))
    known = set[str]().union(*(vars(import_module(".".join(parts))) for parts in modules if "ray" not in parts[-1]))
    assert set(re.findall("`([^`]+)`", text)) <= known
