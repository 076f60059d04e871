"""Ends of a run that are not its last step, on one rank in this process."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.trainer.runs import SMALL, configuration, corpora, steps_of
from tests.trainer.test_steps import with_an_infinite_gradient
from tokshard.errors import LoaderError, TokshardError, TrainerError, UsageError
from tokshard.run_files.recipe import Parallel, resolve
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import loop
from tokshard.trainer.loop import gradient_scale, squared_norm, train
from tokshard.trainer.metrics_file import MetricsFile
from tokshard.trainer.parallel import process_group
from tokshard.trainer.profiling import Profiler
from tokshard.trainer.run_directory import run_directory

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


def small(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    return configuration(corpora(tmp_path / "corpora"), tmp_path / "out", **changes) | {"model": SMALL}


def test_a_finite_pass_ends_after_its_short_batch_and_is_not_begun_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = small(tmp_path, train__steps=1_000, data__epochs=1, data__weights={}, data__global_batch_size=100)
    del fields["data"]["corpora"]["prose"]
    assert train(resolve(fields)) == 0
    steps = steps_of(tmp_path / "out")
    assert [step["num_samples"] for step in steps[:-1]] == [100] * (len(steps) - 1)
    assert 0 < steps[-1]["num_samples"] < 100
    assert 1 <= steps[-1]["corpora"]["code"]["epoch"] < 1.01
    capsys.readouterr()
    assert train(resolve(fields)) == 0
    assert f"step {len(steps)}: nothing is left to do" in capsys.readouterr().out
    assert steps_of(tmp_path / "out") == steps


def test_the_norm_of_a_gradient_does_not_depend_on_how_many_ranks_hold_it() -> None:
    gradient = torch.randn(16_384, 128, generator=torch.Generator().manual_seed(17)) * 1e-4
    expected = gradient.double().square().sum().item()
    for ranks in (1, 2, 3):
        parts = [squared_norm([part]) for part in gradient.chunk(ranks)]
        assert sum(parts).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_the_step_that_was_made_and_is_what_the_run_returns(
    tmp_path: Path, number: signal.Signals
) -> None:
    log = tmp_path / "out" / "metrics.jsonl"

    def stop_when_steps_are_made() -> None:
        deadline = time.monotonic() + 60
        while not (log.exists() and log.read_bytes().count(b"\n") >= 2) and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    stopper = threading.Thread(target=stop_when_steps_are_made)
    stopper.start()
    try:
        assert train(resolve(small(tmp_path, train__steps=100_000, checkpoint__every=0, train__log_every=1))) == number
    finally:
        stopper.join()
    (saved,) = (tmp_path / "out" / "checkpoints").iterdir()
    assert saved.name == f"step-{steps_of(tmp_path / 'out')[-1]['step']:08d}"


def test_a_loss_that_is_not_finite_stops_the_run_before_it_is_saved(tmp_path: Path) -> None:
    fields = small(tmp_path, optimizer__lr=1e30, optimizer__warmup_steps=0)
    with pytest.raises(TrainerError, match=r"step 2: loss is (nan|inf)"):
        train(resolve(fields))
    assert [step["step"] for step in steps_of(tmp_path / "out")] == [1]
    assert not (tmp_path / "out" / "checkpoints").exists()


@pytest.mark.parametrize(("clip_norm", "expected"), [(0.0, 5.0), (1.0, 1.0), (7.0, 5.0)])
def test_a_gradient_is_clipped_to_the_largest_norm_and_0_means_no_limit(clip_norm: float, expected: float) -> None:
    gradient, targets = torch.tensor([30.0, 40.0]), torch.tensor(10.0, dtype=torch.float64)
    scale = gradient_scale(targets, gradient.double().norm() / targets, clip_norm)
    assert (gradient / scale).norm().item() == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_memory_that_runs_out_is_explained_by_settings_and_an_estimate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines of torch.")

    monkeypatch.setattr(loop._Run, "forward_backward", exhausted)
    with pytest.raises(TrainerError, match="memory ran out") as error:
        train(resolve(small(tmp_path, train__micro_batch_size=3, compute__recompute="selective")))
    assert "Tried to allocate 2.00 GiB. A micro-batch has 3 rows of 32 tokens" in error.value.problem
    assert "compute.recompute is selective" in error.value.problem
    assert "train.micro_batch_size" in error.value.hint
    with pytest.raises(TrainerError, match="memory ran out") as of_another_rank:
        train(resolve(small(tmp_path, train__micro_batch_size=3, compute__recompute="selective")))
    assert of_another_rank.value.problem == error.value.problem
    (path,) = (tmp_path / "out").glob("memory-estimate-*.txt")  # one in all
    assert str(path) in error.value.problem
    deadline = time.monotonic() + 100
    while not path.read_text().endswith("\n") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert re.match(r"\d\.\d\d GiB for a rank \(.*parameters", path.read_text())


def test_allocations_of_profiled_steps_are_in_a_snapshot_where_there_is_cuda(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU torch has neither function: what they are given is all that can be seen."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **of: calls.append(of))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    settings = resolve(small(tmp_path, train__profile_steps=[2, 3], train__out=str(tmp_path))).train
    with process_group(Parallel(device="cpu")):
        profiler = Profiler(settings, torch.device("cuda"))
        for step in (1, 2, 3, 4):
            profiler.before(step)
    path = str(tmp_path / "memory-step-2-rank-0.pickle")
    assert calls == [{"max_entries": 100_000}, path, {"enabled": None}]
    assert f"{path} has what was in memory" in capsys.readouterr().out


def test_a_gradient_that_is_not_finite_ends_the_run_although_the_loss_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_an_infinite_gradient(monkeypatch, at=1)
    with pytest.raises(TrainerError, match=r"step 1: loss is \d+\.\d+, gradient norm inf"):
        train(resolve(small(tmp_path)))
    assert steps_of(tmp_path / "out") == []
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_run_whose_only_checkpoint_is_damaged_does_not_start_anew(tmp_path: Path) -> None:
    fields = small(tmp_path, train__stop_after=2)
    assert train(resolve(fields)) == 0
    before = steps_of(tmp_path / "out")
    marker = tmp_path / "out" / "checkpoints" / "step-00000002" / "COMPLETE"
    marker.write_bytes(marker.read_bytes()[:-1])
    with pytest.raises(TrainerError, match="step-00000002 is damaged") as error:
        train(resolve(fields))
    assert error.value.hint.endswith("to start a new run")
    assert steps_of(tmp_path / "out") == before


def test_a_full_disk_under_the_metrics_ends_the_run_after_a_save_and_the_next_one_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: MetricsFile, record: dict[str, Any]) -> None:
        if record["step"] >= 2:
            log.failure = TrainerError("metrics.jsonl cannot be written: No space left on device", hint="make room")

    fields = small(tmp_path, train__steps=9)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", full)
        with pytest.raises(TrainerError, match="No space left"):
            train(resolve(fields))
    assert os.listdir(tmp_path / "out" / "checkpoints") == ["step-00000005"]
    assert train(resolve(fields)) == 0
    assert steps_of(tmp_path / "out")[-1]["step"] == 9


def test_a_loader_that_fails_ends_the_run_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: StreamingLoader) -> Iterator[object]:
        yield from ()
        raise LoaderError("a read hangs", hint="look at the disk")

    monkeypatch.setattr(StreamingLoader, "__iter__", fail)
    with pytest.raises(LoaderError, match="a read hangs"):
        train(resolve(small(tmp_path)))


@pytest.mark.parametrize("how", ["full", "closed", "missing"])
def test_a_run_continues_without_an_output_that_takes_its_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        if how == "closed":
            stream.close()
        monkeypatch.setattr(sys, "stdout", None if how == "missing" else stream)
        assert train(resolve(small(tmp_path, train__stop_after=1))) == 0
        with contextlib.suppress(OSError):
            stream.close()
    assert len(steps_of(tmp_path / "out")) == 1


def test_a_second_job_with_the_same_out_is_refused_while_the_first_one_runs(tmp_path: Path) -> None:
    fields = small(tmp_path, train__stop_after=1)
    with process_group(Parallel(device="cpu")), run_directory(str(tmp_path / "out")):
        with pytest.raises(TrainerError, match=rf"in use by another job: process {os.getpid()} on "):
            train(resolve(fields))
        assert os.listdir(tmp_path / "out") == ["run.lock"]
    assert train(resolve(fields)) == 0


def test_metrics_that_cannot_be_written_are_an_error_with_their_name(tmp_path: Path) -> None:
    (tmp_path / "out" / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(TrainerError, match=r"metrics\.jsonl cannot be written: .*Is a directory"):
        train(resolve(small(tmp_path)))


def test_an_out_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    for name in ("file", "file/out"):
        with pytest.raises(TrainerError, match=rf"{name} cannot be the directory of a run"):
            train(resolve(small(tmp_path, train__out=str(tmp_path / name))))
    assert (tmp_path / "file").read_text() == "content"


def test_a_run_continues_from_its_own_checkpoint_and_refuses_one_to_start_from_that_it_did_not(
    tmp_path: Path,
) -> None:
    first = small(tmp_path, train__steps=4, train__stop_after=1)
    assert train(resolve(first)) == 0
    start = str(tmp_path / "out" / "checkpoints" / "step-00000001")
    second = small(tmp_path / "2", train__steps=4, train__stop_after=2, checkpoint__load=start)
    second["data"]["corpora"] = first["data"]["corpora"]
    assert train(resolve(second)) == 0
    second["train"]["stop_after"] = 3
    assert train(resolve(second)) == 0  # the same command, as of a job that is queued again
    assert [step["step"] for step in steps_of(tmp_path / "2" / "out")] == [2, 3]
    second["checkpoint"]["load"] = str(tmp_path / "2" / "out" / "checkpoints" / "step-00000002")
    with pytest.raises(UsageError, match=r"step-00000003 was saved by a command without it"):
        train(resolve(second))


def test_a_run_in_another_thread_trains_and_leaves_signals_alone(tmp_path: Path) -> None:
    ended: list[int | TokshardError] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: ended.append(train(resolve(small(tmp_path, train__stop_after=1)))))
    thread.start()
    thread.join()
    assert ended == [0]
    assert signal.getsignal(signal.SIGTERM) is before


def test_unsaved_steps_are_repeated_and_appear_once_in_the_metrics(tmp_path: Path) -> None:
    fields = small(tmp_path, train__steps=7, checkpoint__every=3, optimizer__lr=1e-3)
    assert train(resolve(fields)) == 0
    straight = steps_of(tmp_path / "out")
    for name in ("step-00000007", "step-00000006"):
        shutil.rmtree(tmp_path / "out" / "checkpoints" / name)
    assert train(resolve(fields)) == 0
    again = steps_of(tmp_path / "out")
    assert [step["step"] for step in again] == [1, 2, 3, 4, 5, 6, 7]
    assert [(step["loss"], step["digest"]) for step in again] == [(step["loss"], step["digest"]) for step in straight]


def test_bf16_follows_fp32_and_keeps_its_parameters_in_fp32(tmp_path: Path) -> None:
    losses = {}
    for precision in ("fp32", "bf16"):
        changes = {"train__out": str(tmp_path / precision), "train__steps": 5, "parallel__precision": precision}
        assert train(resolve(small(tmp_path / "of" / precision, **changes))) == 0
        losses[precision] = [step["loss"] for step in steps_of(tmp_path / precision)]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.01)
    (saved,) = (tmp_path / "bf16" / "checkpoints").iterdir()
    tensors = FileSystemReader(saved).read_metadata().state_dict_metadata
    assert tensors["model.head.weight"].properties.dtype == torch.float32


def test_initial_values_are_not_drawn_before_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = small(tmp_path, train__stop_after=1)
    assert train(resolve(fields)) == 0
    monkeypatch.setattr(loop, "initialise", None)
    assert train(resolve(fields | {"train": fields["train"] | {"stop_after": 2}})) == 0
    assert len(steps_of(tmp_path / "out")) == 2
