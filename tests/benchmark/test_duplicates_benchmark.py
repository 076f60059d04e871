"""The benchmark of duplicates runs, checks what it finds, and says everything it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


def test_one_run_ends_in_a_table_for_each_size_and_a_line_of_json():
    command = [sys.executable, "-m", "tests.benchmark.duplicates", "--hashes", "3e4", "6e4", "--per-task", "100"]
    done = subprocess.run([*command, "--workers", "2"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert [run["hashes"] for run in line["runs"]] == [30_000, 60_000]
    steps = ["hashes, made up", "join hashes", "partition", "coordinator", "looked up to encode"]
    for run in line["runs"]:
        assert [cost["step"] for cost in run["steps"]] == steps
        assert all(cost["opens"] and cost["peak_bytes"] for cost in run["steps"])
