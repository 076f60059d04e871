"""The losses of documents in some steps of a run."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.trainer.runs import SMALL, configuration, corpora, steps_of
from tokshard.inspect.plan.run import open_run
from tokshard.inspect.plan.trace import trace_steps
from tokshard.run_files.recipe import resolve
from tokshard.trainer.document_losses import main
from tokshard.trainer.loop import train

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps: the seventh is left out, every third is saved, and a third of a corpus is masked."""
    directory = tmp_path_factory.mktemp("run")
    changes = {"train__steps": 8, "checkpoint__every": 3, "optimizer__warmup_steps": 1, "train__skip": [[7, 8]]}
    (directory / "masked.txt").write_text("\n".join(map(str, range(100))))
    changes |= {"data__mask": {"code": [str(directory / "masked.txt")]}}
    fields = configuration(corpora(directory / "corpora"), directory / "out", **changes) | {"model": SMALL}
    assert train(resolve(fields)) == 0
    return directory / "out"


def test_the_losses_of_the_step_after_a_checkpoint_are_those_that_it_was_trained_with(
    out: Path, tmp_path: Path
) -> None:
    assert main([str(out), "--steps", "4", "--out", str(tmp_path / "losses.parquet")]) == 0
    rows = pq.read_table(tmp_path / "losses.parquet").to_pylist()
    step = steps_of(out)[3]
    assert sum(row["targets"] for row in rows) == step["targets"]
    for name in ("code", "prose"):
        parts = [(row["targets"], row["loss"]) for row in rows if row["corpus"] == name and row["targets"]]
        mean = sum(targets * loss for targets, loss in parts) / sum(targets for targets, _ in parts)
        assert mean == pytest.approx(step["loss_by_corpus"][name], rel=1e-5)


def test_rows_are_those_of_trace_and_a_step_that_was_left_out_has_none(out: Path, tmp_path: Path) -> None:
    assert main([str(out), "--steps", "4:9", "--out", str(tmp_path / "losses.parquet")]) == 0
    rows = pq.read_table(tmp_path / "losses.parquet").to_pylist()
    run = open_run(str(out / "checkpoints" / "step-00000008"), {})
    expected = [
        (of.step, of.sample, of.document.corpus, of.document.shard, of.document.document, of.start, of.stop)
        for step in (4, 5, 6, 8)
        for part in trace_steps(run, range(step, step + 1), num_characters=0)
        for of in part
    ]
    names = ("step", "sample", "corpus", "shard", "document", "start", "stop")
    assert [tuple(row[name] for name in names) for row in rows] == expected


@pytest.mark.parametrize(
    ("steps", "problem"), [("3", "has no checkpoint before step 3"), ("8:10", "has no step 9")], ids=["early", "late"]
)
def test_steps_that_cannot_be_judged_are_refused_and_nothing_is_written(
    out: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], steps: str, problem: str
) -> None:
    assert main([str(out), "--steps", steps, "--out", str(tmp_path / "losses.parquet")]) == 2
    assert problem in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_does_not_exist_is_not_made(out: Path, tmp_path: Path) -> None:
    assert main([str(out), "--steps", "4", "--out", str(tmp_path / "no" / "losses.parquet")]) == 2
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_holds_no_losses_is_not_replaced(out: Path, capsys: pytest.CaptureFixture[str]) -> None:
    metrics = out / "metrics.jsonl"
    before = metrics.read_bytes()
    assert main([str(out), "--steps", "4", "--out", str(metrics)]) == 2
    assert "is there, and is no parquet file" in capsys.readouterr().err
    assert metrics.read_bytes() == before
