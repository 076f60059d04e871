"""The benchmark of conversations runs and says everything it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


def test_one_run_ends_in_a_table_and_a_line_of_json():
    command = [sys.executable, "-m", "tests.benchmark.chat", "--conversations", "200", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    assert len(table) == 7
    line = json.loads(last)
    assert 1_800 < line["bytes_per_conversation"] < 2_400
    assert 0 < line["padding"] < 1
    for name in ("render", "document", "cut", "whole", "share"):
        assert 0 < line[name]["min"] <= line[name]["max"]
