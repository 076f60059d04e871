"""The benchmark of imports runs and says everything it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


def test_one_run_ends_in_a_table_and_a_line_of_json():
    command = [sys.executable, "-m", "tests.benchmark.importing", "--megabytes", "2", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert [line.split()[0] for line in table] == ["wall", "copy", "import"]
    line = json.loads(last)
    assert 1_900_000 < line["bytes"] < 2_100_000
    for name in ("copy", "import"):
        assert set(line[name]) == {"wall_seconds", "cpu_seconds", "mb_per_second"}
        assert 0 < line[name]["wall_seconds"]["min"] <= line[name]["wall_seconds"]["max"]
