"""The examples of README.md run as they are written."""

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
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a reader tries the examples, with the recipes of the repository."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", path / "recipes")
    return path


def examples() -> list[tuple[str, str]]:
    """Commands and Python examples, in the order in which a reader meets them."""
    blocks = re.findall(r"^```(console|python)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
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


def test_the_commands_and_the_python_examples_of_the_readme_run_one_after_another(directory: Path) -> None:
    assert {kind for kind, _ in examples()} == {"console", "python"}
    for number, (kind, example) in enumerate(examples()):
        if kind == "console":
            run(example, directory)
        else:
            script = directory / f"example_{number}.py"
            script.write_text(example, encoding="utf-8")
            run([sys.executable, str(script)], directory)


def test_every_block_says_what_it_is() -> None:
    kinds = re.findall(r"^```(.*)\n", README, re.MULTILINE)[::2]
    assert set(kinds) == {"console", "python", "py", "text"}


def test_the_table_of_keys_names_every_key_of_a_mix_in_toml() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", README.partition("| key of a `mix.toml`")[2], re.MULTILINE)
    assert sorted(keys) == sorted(item.name for item in dataclasses.fields(Mix))
    assert keys[:3] == ["corpora", "seq_len", "global_batch_size"]


def test_every_file_that_the_readme_links_to_exists() -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link
