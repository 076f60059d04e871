"""The page of a room names its modules: each one, and none that is gone."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("room", ["run_files", "runtime", "trainer"])
def test_the_table_of_a_room_names_every_module_once(room):
    folder = ROOT / "tokshard" / room
    page = (folder / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if re.match(r"\| (\[|`)\w+(\.py|/)", line)]
    modules = {path.name for path in folder.glob("*.py") if not path.name.startswith("__")}
    packages = {f"{path.parent.name}/" for path in folder.glob("*/__init__.py")}
    named = [name for row in rows for name in re.findall(r"[`\[](\w+(?:\.py|/))", row)]
    assert sorted(named) == sorted(modules | packages)


def test_the_table_of_inspect_links_to_every_module_once():
    folder = ROOT / "tokshard" / "inspect"
    page = (folder / "README.md").read_text(encoding="utf-8")
    named = re.findall(r"^\| \[[\w.]+\]\(([\w/]+\.py)\)", page, re.MULTILINE)
    modules = [str(path.relative_to(folder)) for path in folder.rglob("*.py") if not path.name.startswith("__")]
    assert sorted(named) == sorted(modules)
