"""The script for a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.benchmark import gpu


def test_figures_leave_the_first_steps_out_and_share_the_wait() -> None:
    step = {"tokens": 100, "tokens_per_second": 50.0, "mfu": 0.4, "mfu_full_rows": 0.5, "memory_bytes": 2**30}
    steps = [step | {"tokens_per_second": 1.0, "loader_wait_seconds": 9.0}, *[step | {"loader_wait_seconds": 0.1}] * 4]
    assert gpu.figures(steps, 1) == {
        "steps": 4,
        "tokens_per_second": 50.0,
        "mfu": 0.5,
        "memory_gib": 1.0,
        "wait_part": pytest.approx(0.05),
        "first_step_seconds": 100.0,
    }


def test_rows_that_the_time_does_not_suffice_for_say_so(tmp_path: Path) -> None:
    machine, *rows = gpu.results(tmp_path, tiny=True, seconds=0)
    assert machine["product_tflops"] > 0
    assert [row["row"] for row in rows] == list(gpu.ROWS)
    assert {row["problem"] for row in rows} == {"not run: the 0 s are over"}


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_every_row_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny", "--out", str(tmp_path), "--seconds", "800"]) == 0
    _, *rows = [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [row["row"] for row in rows] == list(gpu.ROWS)
    for row in rows:  # float8 needs torchao
        assert row.get("tokens_per_second", 0) > 0 or ("float8" in row["row"] and "torchao" in row["problem"]), row
    assert len(capsys.readouterr().out.splitlines()) == 1 + len(rows)
