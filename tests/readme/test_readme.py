"""The examples of the pages for users run as they are written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.contract.faults import Launcher

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "tokshard/cli/README.md",
        "tokshard/run_files/README.md",
        "recipes/README.md",
        "recipes/clusters.md",
    )
]
"""In this order: the later ones use files that the examples of the first have made."""
GUIDES = sorted((ROOT / "recipes/guides").glob("*.md"))
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A directory in which a reader tries the examples, with the recipes of the repository."""
    shutil.copytree(ROOT / "recipes", tmp_path / "recipes")
    return tmp_path


def examples(text: str) -> list[tuple[str, str, list[str]]]:
    """Commands and Python examples, as a reader meets them, each with the lines of output that the page shows."""
    blocks = re.findall(r"^```(console|python)\n(.*?)^```(?:\n\n```output\n(.*?)^```)?", text, re.MULTILINE | re.DOTALL)
    found = []
    for kind, block, output in blocks:
        if kind == "python":
            found.append((kind, block, output.splitlines()))
            continue
        for command in re.findall(r"^\$ (.*\n(?:[^$].*\n|\n)*)", block, re.MULTILINE):
            line, *shown = command.splitlines()
            found.append((kind, line, shown))
    return found


def assert_shown(example: str, shown: list[str], said: str) -> None:
    """Every line that the page shows is a line of what the example printed, in the same order; `...` is any text."""
    lines = iter(" ".join(line.split()) for line in said.splitlines())
    for line in filter(None, (" ".join(line.split()) for line in shown)):
        if line != "...":
            pattern = re.compile(".*".join(map(re.escape, line.split("..."))))
            assert any(pattern.fullmatch(candidate) for candidate in lines), f"{example}: no line {line!r} in\n{said}"


def may_fork(kind: str, example: str) -> bool:
    """Whether an example would spend most of its time on imports."""
    programs = ("tokshard ", "python -m ")
    return kind == "python" or (example.startswith(programs) and ";" not in example)  # that is for the shell


def run(arguments: list[str] | str, directory: Path) -> str:
    """Run a program or a line of shell; gives what it printed."""
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=directory,
        shell=isinstance(arguments, str),
        env={**os.environ, "PATH": tools},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}"
    return done.stdout


def run_page(text: str, directory: Path, forks: Launcher) -> None:
    for number, (kind, example, shown) in enumerate(examples(text)):
        script = directory / f"example_{number}.py"
        script.write_text(example, encoding="utf-8")
        if may_fork(kind, example):
            said = forks.run([str(script)] if kind == "python" else shlex.split(example), directory)
        else:
            said = run([sys.executable, str(script)] if kind == "python" else example, directory)
        assert_shown(example, shown, said)


@pytest.mark.timeout(300)  # some thirty processes, one after another
def test_the_commands_and_the_python_examples_run_one_after_another(directory: Path, forks: Launcher) -> None:
    assert {kind for kind, _, _ in examples(TEXT)} == {"console", "python"}
    run_page(TEXT, directory, forks)


@pytest.mark.parametrize(
    "guide",
    [page for page in GUIDES if page.stem not in {"stream-from-s3", "keys-of-toml-files", "security", "benchmarks"}],
    ids=lambda page: page.stem,
)
def test_a_guide_runs_in_a_new_directory_and_prints_what_it_shows(
    guide: Path, directory: Path, forks: Launcher
) -> None:
    # that for S3 needs a server: tests/store/test_guide.py; pages without commands are compared in
    # tests/run_files/test_keys.py and tests/architecture/test_pages.py
    text = guide.read_text(encoding="utf-8")
    assert any(shown for _, _, shown in examples(text))
    assert len(text.splitlines()) <= 200
    run_page(text, directory, forks)


def test_every_block_says_what_it_is() -> None:
    for page in PAGES + GUIDES:
        kinds = re.findall(r"^```(.*)\n", page.read_text(encoding="utf-8"), re.MULTILINE)[::2]
        assert set(kinds) <= {"console", "output", "python", "py", "text", "toml"}, page


@pytest.mark.parametrize("page", PAGES + GUIDES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_and_section_that_a_page_links_to_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert links
    for link in links:
        name, _, section = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link


def test_the_program_whose_types_are_checked_runs(directory: Path) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    program = Path(__file__).with_name("typed_program.py")
    assert program.relative_to(ROOT).as_posix() in project["tool"]["mypy"]["files"]
    assert (ROOT / "tokshard/py.typed").exists()
    run([sys.executable, str(program)], directory)
