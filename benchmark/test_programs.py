"""Every program that a page quotes runs in its smallest form, and ends as the page says. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmark.peers.environments import SECTIONS, stamps

ROOT = Path(__file__).parents[1]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

PROGRAMS = {
    "build": "--repeats 1 --megabytes 0.3 --short-megabytes 0.3",
    "runtime": "--repetitions 1 --tokens 200000 --lengths 40 750 --corpora 1 5 --changes 20 --folder OUT",
    "remote": "--repetitions 1 --window-tokens 200000 --shards 3 --shard-tokens 100000 --rows 4 --milliseconds 1 "
    "--folder OUT",
    "scale": "--tokens 1T --gpus 64",
    "duplicates": "--hashes 3e4 6e4 --per-task 100 --workers 2 --folder OUT",
    "many_tasks": "--tasks 150 300 --milliseconds 1 --folder OUT",
    "amplification": "--nodes 1 4",
    "stream_mixture": "--streams 8 --corpora 2 --positions 2",
    "shuffle": "--seeds 2",
}


def run(program: str, *options: str) -> list[str]:
    command = [sys.executable, "-m", f"benchmark.{program}", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_prints_tables_and_one_line_of_json_without_a_folder_of_this_machine(
    tmp_path: Path, program: str
) -> None:
    *tables, last = run(program, *PROGRAMS[program].replace("OUT", str(tmp_path)).split())
    line = json.loads(last)
    assert {"commit", "versions"} <= set(line)
    assert len(tables) > 2
    assert str(tmp_path) not in last
    assert str(Path.home()) not in last


def test_the_stages_of_a_build_add_up_to_its_time(tmp_path: Path) -> None:
    run("texts", str(tmp_path), "--megabytes", "1", "--short-megabytes", "0.5")
    said = run("stages", str(tmp_path / "code.jsonl.zst"), "--repeats", "1", "--tokenizer", "recipes/tokenizer")
    _, _, *stages, whole = "\n".join(said).strip().splitlines()
    seconds = [float(line.rsplit(maxsplit=3)[1]) for line in stages]
    assert sum(seconds) == pytest.approx(float(whole.rsplit(maxsplit=2)[1]), abs=0.02)


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_of_peers_measures_those_that_are_installed_and_says_who_is_missing(
    tmp_path: Path, section: str
) -> None:
    (tmp_path / ".venv").symlink_to(sys.prefix)
    given = ["--quick", "--repeats", "1", "--megabytes", "0.05", "--environments", str(tmp_path)]
    said = run("peers", "--only", section, *given, "--scratch", str(tmp_path))
    assert any(row.startswith("| tokshard") and "cannot" not in row for row in said)
    assert any("is missing: `make benchmark-peers` installs it" in row for row in said)
    assert stamps([section])
