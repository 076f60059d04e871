"""The page of a room names its modules: each one, and none that is gone."""

import ast
import functools
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SECURITY = (ROOT / "recipes/guides/security.md").read_text(encoding="utf-8")
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


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


EXAMPLES = re.findall(r"^\| (an? [^|]+) \| (\d+) \| `(\w+)` \|", CONTRIBUTING, re.MULTILINE)


@functools.cache
def names_in(module):
    """The identifiers of a module, its texts that are identifiers, and its own name."""
    nodes = list(ast.walk(ast.parse(module.read_text(encoding="utf-8"))))
    found = (getattr(node, name, None) for node in nodes for name in ("id", "attr", "arg", "name", "value"))
    return {module.stem, *(name for name in found if isinstance(name, str))}


assert len(EXAMPLES) == 7, "the page counts the modules of seven things"


@pytest.mark.parametrize(("what", "number", "example"), EXAMPLES, ids=[what for what, *_ in EXAMPLES])
def test_adding_a_thing_like_the_example_changes_as_many_modules_as_the_page_says(what, number, example):
    named = [path.name for path in (ROOT / "tokshard").rglob("*.py") if example in names_in(path)]
    assert len(named) == int(number), f"{what}: {example} is in {named}"


def test_every_line_on_what_is_trusted_names_tests_that_exist():
    promises, _, _ = SECURITY.partition("## Lowest versions")
    rows = [row for row in promises.splitlines() if re.match(r"\| (?!what )\w", row)]
    assert len(rows) > 30
    assert [row for row in rows if "[`test_" not in row] == []
    for name, path in re.findall(r"\[`(\w+)`\]\(([^)]+)\)", promises):
        source = (ROOT / "recipes/guides" / path).read_text(encoding="utf-8")
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{path} has no {name}"


def test_the_lowest_versions_of_the_page_on_trust_are_those_that_are_declared_and_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    # where tokshard is installed; what it is compared with has environments of its own
    paths = [path for path in (ROOT / "constraints").glob("*.txt") if not path.name.startswith("peers-")]
    pins = "".join(path.read_text(encoding="utf-8") for path in paths)
    rows = re.findall(r"^\| (\w+) \| ([\d.]+) \| ([\d.]+) \|", SECURITY, re.MULTILINE)
    assert len(rows) > 5
    for package, lowest, tested in rows:
        assert any(re.match(rf"{package}>={re.escape(lowest)}(,|$)", line) for line in declared), package
        versions = re.findall(rf"^{package}==([\d.]+)(?:\s|$)", pins, re.MULTILINE | re.IGNORECASE)
        assert tested == min(versions, key=lambda version: [int(part) for part in version.split(".")]), package


def test_contributing_names_files_and_rooms_that_exist():
    names = re.findall(r"`((?:tokshard|tests)/[\w/.]+)`", CONTRIBUTING) + re.findall(r"\]\(([\w/.]+)", CONTRIBUTING)
    assert len(names) > 20
    assert [name for name in names if not (ROOT / name).exists()] == []
    rooms = {path.parent.name for path in ROOT.glob("tokshard/*/__init__.py")}
    assert rooms <= set(re.findall(r"^\| `(\w+)` \|", CONTRIBUTING, re.MULTILINE))
