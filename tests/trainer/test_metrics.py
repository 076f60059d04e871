"""The metrics of a run are in one file, each step once."""

from __future__ import annotations

import resource
from pathlib import Path

import msgspec
import numpy as np
import pytest
from msgspec.json import decode

from tokshard.errors import TrainerError
from tokshard.trainer.metrics_file import MetricsFile, progress_line, row_digest


def lines(*steps: int) -> str:
    return "".join(f'{{"step": {step}, "loss": 1.5}}\n' for step in steps)


def resumed(path: Path, content: str, *, last_step: int) -> str:
    path.write_text(content)
    MetricsFile(str(path), last_step=last_step)
    return path.read_text()


@pytest.mark.parametrize(
    "tail", [lines(4, 5), "", lines(4)[:9], "garbage\n", "{}\n" + lines(5), "\0" * 9, '{"step": "x"}\n', "[\n"]
)
def test_everything_after_the_saved_step_is_cut_off(tmp_path: Path, tail: str) -> None:
    assert resumed(tmp_path / "metrics.jsonl", lines(1, 2, 3) + tail, last_step=3) == lines(1, 2, 3)


@pytest.mark.parametrize("broken", ["garbage\n", "{}\n", "\n", "[]\n", '{"step": null}\n', "\xff\n"])
def test_a_broken_line_after_which_a_saved_step_is_missing_is_named_and_nothing_is_cut(
    tmp_path: Path, broken: str
) -> None:
    path, content = tmp_path / "metrics.jsonl", lines(1) + broken + lines(4)
    with pytest.raises(TrainerError, match=r"metrics\.jsonl: the line at byte 25 is not a step of a run") as error:
        resumed(path, content, last_step=3)
    assert "remove that line, or move the file away" in error.value.hint
    assert path.read_text() == content


EVALUATED = '{"step": 3, "evaluation": {"code": 1.5}}\n'


@pytest.mark.parametrize(
    ("content", "last_step", "is_evaluated"),
    [("", 0, False), (lines(1, 2, 3), 3, False), (lines(3) + EVALUATED + lines(4), 3, True), (EVALUATED, 4, False)],
)
def test_a_file_knows_whether_the_saved_step_was_evaluated(
    tmp_path: Path, content: str, last_step: int, is_evaluated: bool
) -> None:
    (tmp_path / "metrics.jsonl").write_text(content)
    assert MetricsFile(str(tmp_path / "metrics.jsonl"), last_step=last_step).is_evaluated == is_evaluated


def test_of_a_long_file_only_the_end_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[bytes] = []
    monkeypatch.setattr(msgspec.json, "decode", lambda line, **how: decoded.append(line) or decode(line, **how))
    assert resumed(tmp_path / "metrics.jsonl", lines(*range(1, 1_004)), last_step=1_000) == lines(*range(1, 1_001))
    assert decoded == [lines(step).encode() for step in (1_003, 1_002, 1_001, 1_000)]


def test_a_file_that_is_shorter_than_the_run_is_continued(tmp_path: Path) -> None:
    assert resumed(tmp_path / "metrics.jsonl", lines(1), last_step=3) == lines(1)


def test_a_disk_that_is_full_for_a_while_loses_no_metrics(tmp_path: Path) -> None:
    log = MetricsFile(str(tmp_path / "metrics.jsonl"), last_step=0)
    log.write({"step": 1})
    _, hard = limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, hard))
    try:
        for step in (2, 3):
            log.write({"step": step})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").stat().st_size == 20
    assert "metrics.jsonl cannot be written: File too large" in str(log.failure)
    log.write({"step": 4})
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4))


def test_the_digest_of_a_sample_covers_its_number_tokens_labels_and_weights() -> None:
    ids, weights = np.arange(4), np.ones(4, np.float32)
    samples = [(1, ids, ids), (2, ids, ids), (1, ids + 1, ids), (1, ids, ids + 1)]
    samples += [(1, ids, ids, weights), (1, ids, ids, 2 * weights)]
    assert len({row_digest(*sample) for sample in samples}) == len(samples)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({}, "1,000 tokens/s  memory 0.50 GB"),
        ({"loader_wait_seconds": 0.5}, "1,000 tokens/s  memory 0.50 GB  waiting for data 25%"),
        ({"mfu": 0.5}, "1,000 tokens/s  MFU 50.0%  memory 0.50 GB"),
    ],
)
def test_the_line_of_a_step_says_how_long_it_waited_for_data_if_that_matters(
    changes: dict[str, float], end: str
) -> None:
    record = {"step": 9, "loss": 1.5, "loss_by_corpus": {"a": 1.25, "b": None}, "grad_norm": 2.0, "lr": 1e-3}
    record |= {"tokens": 2_000, "tokens_per_second": 1_000.0, "mfu": None, "memory_bytes": 5e8}
    line = progress_line({**record, "loader_wait_seconds": 0.01, **changes}, 100)
    assert line == f"step   9/100  loss 1.500 (a 1.250)  grad 2.00  lr 1.0e-03  {end}"
    of_cells = {"loss_by_corpus": {f"{number}": 2.0 for number in range(1_000)}, "loader_wait_seconds": 0.01}
    assert "(0 2.000, 1 2.000, " in (line := progress_line(record | of_cells, 100))
    assert ", 7 2.000, and 992 more)" in line
