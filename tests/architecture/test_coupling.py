"""What tests reach into: a test knows the inside of its own room, and of the others only their faces.

`FACES` of `tests/contract/small.py` are the modules that every test may import, besides `tokshard`, `tokshard.errors`
and the packages of the rooms. What is shrunk or replaced in another room is named in `small.py`, too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.contract.small import FACES

ROOT = Path(__file__).parents[2]
TESTS = ROOT / "tests"

THE_INSIDE = "contract/small.py"
"""The only module that may know the inside of every room."""

OF_A_ROOM = {"corpora.py": "format", "soak/corpora.py": "format", "vectors": "runtime"}
"""What writes or signs corpora without the pipeline, and what pins the order, belongs to the room that it describes."""

_SETTERS = {"setattr", "patch", "object", "delattr"}


def offences(source: str, room: str) -> Iterator[str]:
    """What a test of a room reaches into, line by line; late imports count, too."""
    tree = ast.parse(source)
    homes: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                module = _module(alias.name if isinstance(node, ast.Import) else f"{node.module}.{alias.name}")
                homes[(alias.asname or alias.name).partition(".")[0]] = module
                if _is_inner(module, room) and module not in FACES:
                    yield f"line {node.lineno}: imports {module}"
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and ast.unparse(node.func).rpartition(".")[2] in _SETTERS:
            target = node.args[0]
            if isinstance(target, ast.Constant):
                changed = _module(str(target.value))
            else:
                changed = homes.get(ast.unparse(target).partition(".")[0], "")
            if _room(changed) not in {"", room}:
                yield f"line {node.lineno}: changes {changed}"


def _module(name: str) -> str:
    """The module that a dotted name lies in, or is; "" if it is none of tokshard's."""
    words = name.split(".")
    if words[0] != "tokshard":
        return ""
    while not (ROOT / Path(*words)).with_suffix(".py").exists() and not (ROOT / Path(*words)).is_dir():
        words.pop()
    return ".".join(words)


def _room(module: str) -> str:
    """The room of a module; "" for those that belong to none."""
    room = f"{module}..".split(".")[1]
    return room if (ROOT / "tokshard" / room).is_dir() else ""


def _is_inner(module: str, room: str) -> bool:
    return module.count(".") > 1 and _room(module) != room


def room_of(path: Path) -> str:
    """The room that a module of tests belongs to; it may be none of the package."""
    name = path.relative_to(TESTS)
    return OF_A_ROOM.get(name.as_posix(), OF_A_ROOM.get(name.parts[0], name.parts[0]))


def test_a_test_reaches_into_no_other_room() -> None:
    found = {}
    for path in sorted(TESTS.rglob("*.py")):
        name = path.relative_to(TESTS).as_posix()
        of_file = list(offences(path.read_text(encoding="utf-8"), room_of(path)))
        if name != THE_INSIDE and of_file:
            found[name] = of_file
    assert found == {}


def test_every_face_is_imported_by_the_tests_of_another_room() -> None:
    imported: set[str] = set()
    for path in TESTS.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom):
                names = {_module(f"{node.module}.{alias.name}") for alias in node.names}
                imported |= {name for name in names if _is_inner(name, room_of(path))}
    assert sorted(FACES.keys() - imported) == []


@pytest.mark.parametrize(
    "line",
    [
        "from tokshard.store.bucket import Bucket",
        "from tokshard.store import bucket",
        "import tokshard.store.bucket",
        "def late():\n    from tokshard.store.bucket import Bucket",
        "monkeypatch.setattr('tokshard.store.bucket.time.time', None)",
        "from tokshard.store import PosixStore\nmonkeypatch.setattr(PosixStore, 'read', None)",
        "from tokshard.format import names\nwith mock.patch.object(names.os, 'read', None): pass",
        "from tokshard.runtime import StreamPlan\nsetattr(StreamPlan, 'sample', None)",
    ],
)
def test_what_reaches_into_another_room_is_found(line: str) -> None:
    assert len(list(offences(line, "pipeline"))) == 1
