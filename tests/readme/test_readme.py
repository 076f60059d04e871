"""The examples of the pages for users run as they are written."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tokshard.jobs.plan_file import Mix

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name for name in ("README.md", "tokshard/cli/README.md", "tokshard/jobs/README.md", "recipes/README.md")
]
"""In this order: the later ones use files that the examples of the first have made."""
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a reader tries the examples, with the recipes of the repository."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", path / "recipes")
    return path


def examples() -> list[tuple[str, str]]:
    """Commands and Python examples, in the order in which a reader meets them."""
    blocks = re.findall(r"^```(console|python)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    found = []
    for kind, block in blocks:
        if kind == "console":
            found += [(kind, line[2:]) for line in block.splitlines() if line.startswith("$ ")]
        else:
            found.append((kind, block))
    return found


def run(arguments: list[str] | str, directory: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=directory,
        shell=isinstance(arguments, str),
        env={**os.environ, "PATH": tools},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"


@pytest.mark.timeout(300)  # some thirty processes, one after another
def test_the_commands_and_the_python_examples_run_one_after_another(directory: Path) -> None:
    assert {kind for kind, _ in examples()} == {"console", "python"}
    for number, (kind, example) in enumerate(examples()):
        if kind == "console":
            run(example, directory)
        else:
            script = directory / f"example_{number}.py"
            script.write_text(example, encoding="utf-8")
            run([sys.executable, str(script)], directory)


def test_every_block_says_what_it_is() -> None:
    kinds = re.findall(r"^```(.*)\n", TEXT, re.MULTILINE)[::2]
    assert set(kinds) == {"console", "python", "py", "text", "toml"}


def test_the_table_of_keys_names_every_key_of_a_mix_in_toml() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", TEXT.partition("| key of a `mix.toml`")[2], re.MULTILINE)
    assert sorted(keys) == sorted(item.name for item in dataclasses.fields(Mix))
    assert keys[:3] == ["corpora", "seq_len", "global_batch_size"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
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
