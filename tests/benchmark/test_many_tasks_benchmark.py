"""The benchmark of many tasks runs and says everything it promises. No time is asserted, but requests are."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


def test_one_run_ends_in_a_table_for_each_size_and_a_line_of_json():
    command = [sys.executable, "-m", "tests.benchmark.many_tasks", "--tasks", "150", "300", "--milliseconds", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert line["task_requests"]["put"] == 2
    assert [run["tasks"] for run in line["runs"]] == [150, 300]
    for run in line["runs"]:
        steps = {step["step"]: step["requests"] for step in run["steps"]}
        assert list(steps) == ["prepare", "run", "prepare again", "run, all done", "commit"]
        assert sum(steps["run"].values()) < 20
        for step in ("run, all done", "commit"):
            assert run["tasks"] <= steps[step]["get"] < run["tasks"] + 20
            assert sum(count for verb, count in steps[step].items() if verb != "get") < 40
