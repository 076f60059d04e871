"""The keys of a recipe, for ``--help`` and on the page of the room.

``python -m tests.run_files.test_keys`` writes the page.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from tokshard.run_files.keys import help_text, keys_of, page, sections

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "tokshard" / "run_files" / "README.md"
KINDS = sections()


@pytest.mark.parametrize("section", KINDS)
def test_every_key_has_a_meaning_and_every_meaning_has_a_key(section: str) -> None:
    keys = keys_of(KINDS[section])
    assert sorted(key.name for key in keys) == sorted(item.name for item in dataclasses.fields(KINDS[section]))
    assert all(len(key.meaning) > 5 for key in keys), [key for key in keys if len(key.meaning) <= 5]


def test_the_page_has_all_keys_as_the_code_has_them() -> None:
    assert PAGE.read_text(encoding="utf-8").endswith(page() + "\n"), "run python -m tests.run_files.test_keys"


def test_help_says_what_a_key_is_if_nothing_is_said() -> None:
    lines = [" ".join(line.split()) for line in help_text().splitlines()]
    assert "seq_len (required) tokens of a sample." in lines
    assert (
        'memory_bytes = "2GiB" how much of corpora in buckets and on web servers each process keeps in memory,' in lines
    )
    assert (
        "asynchronous = false train on while a save is written; needs memory for a copy of this rank's tensors."
        in lines
    )
    assert max(map(len, help_text().splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "exit_code"), [(["--help"], 0), ([], 2)])
def test_the_trainer_lists_the_keys_of_a_recipe(arguments: list[str], exit_code: int) -> None:
    """Without torch: it answers at once."""
    command = [sys.executable, "-X", "importtime", "-m", "tokshard.trainer", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == exit_code
    assert "| torch\n" not in done.stderr
    said = done.stdout if exit_code == 0 else done.stderr
    assert "usage: torchrun --nproc-per-node N -m tokshard.trainer RECIPE.toml [section.key=value ...]\n" in said
    assert done.stdout.endswith(help_text() + "\n") == (exit_code == 0)


if __name__ == "__main__":
    head = PAGE.read_text(encoding="utf-8").partition("### A mix.toml")[0]
    PAGE.write_text(head + page() + "\n", encoding="utf-8")
