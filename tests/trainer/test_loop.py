"""Ends of a run that are not its last step, on one rank in this process."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed

from tests.trainer.runs import Runs, steps_of
from tests.trainer.test_steps import with_an_infinite_gradient
from tokshard.errors import TokshardError, TrainerError
from tokshard.run_files.recipe import Parallel
from tokshard.runtime import Sample, SampleRandom, StreamPlan
from tokshard.trainer import loop
from tokshard.trainer.metrics import StepSums
from tokshard.trainer.metrics_file import MetricsFile
from tokshard.trainer.parallel import process_group, say
from tokshard.trainer.profiling import Profiler


def test_a_finite_pass_ends_after_its_short_batch_and_is_not_begun_again(
    paths: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Runs({"code": paths["code"]}, tmp_path)
    plan: dict[str, Any] = {"data__epochs": 1, "data__weights": {}, "data__global_batch_size": 100}
    steps = run(**plan, train__steps=1_000)
    assert [step["num_samples"] for step in steps[:-1]] == [100] * (len(steps) - 1)
    assert 0 < steps[-1]["num_samples"] < 100
    assert steps[-1]["corpora"]["code"]["epoch"] == 1  # the last row is padded
    last = f"step {len(steps)}: "
    assert f"{last}the pass is over, before step 1000\n" in capsys.readouterr().out
    assert run(**plan, train__steps=1_000) == steps
    assert f"{last}nothing is left to do, the pass is over\n" in capsys.readouterr().out
    assert not distributed.is_initialized()
    read = steps[-1]["samples"][1]
    assert run(**plan | {"data__epochs": 2}, train__steps=len(steps) + 1)[-1]["samples"] == [read, read + 100]
    said = capsys.readouterr().out
    assert f"epochs 1 -> 2 from sample {read} on, without the tokens that would fill the padded end of" in said
    run("ramp", **plan, train__steps=1_000, data__batch_ramp=[[len(steps) + 1, 50]])  # in a step that does not come
    assert "warning" not in capsys.readouterr().out


def test_a_pass_that_ends_at_a_used_up_corpus_says_so_once_in_the_keys_of_the_recipe(
    run: Runs, capfd: pytest.CaptureFixture[str]
) -> None:
    plan: dict[str, Any] = {"data__max_epochs": {"code": 0.01}, "train__steps": 50}
    with warnings.catch_warnings():
        warnings.filterwarnings("default", "the pass ends")
        (step,) = {len(run(**plan)) for _ in range(2)}
    said, errors = capfd.readouterr()
    (warning,) = re.findall(r"^warning: (.*)\n", said, re.MULTILINE)
    assert warning.startswith("the pass ends before sample ")
    assert warning.endswith('a weight of 0 leaves it out, data.on_max_epochs = "warn" reads on')
    assert f"step {step}: the pass is over, before step 50\n" in said
    why = "the pass is over: corpus 'code' was read data.max_epochs times"
    assert said.endswith(f"step {step}: nothing is left to do, {why}\n")
    assert not errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_the_loop_waits_for_data_saves_the_step_that_they_make_and_is_what_the_run_returns(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    log, samples, before = tmp_path / "out" / "metrics.jsonl", itertools.count(), signal.getsignal(number)

    def come_after_a_signal(sample: Sample, _: SampleRandom) -> Sample:
        if next(samples) == 4 * 4:  # the first of step 5
            while not log.exists() or log.read_bytes().count(b"\n") < 3:  # the line of a step follows in the next one
                time.sleep(0.01)
            os.kill(os.getpid(), number)
            time.sleep(0.2)
        return sample

    monkeypatch.setattr(loop, "StreamPlan", partial(StreamPlan, transforms=[come_after_a_signal]))
    assert run.end_of(train__steps=100) == number
    assert signal.getsignal(number) is before
    assert run.saved() == [f"step-{steps_of(tmp_path / 'out')[-1]['step']:08d}"] == ["step-00000006"]


def test_a_run_in_another_thread_trains_and_leaves_signals_alone(run: Runs) -> None:
    ended: list[int | TokshardError] = []
    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=lambda: ended.append(run.end_of(train__stop_after=1)))
    thread.start()
    thread.join()
    assert ended == [0]
    assert signal.getsignal(signal.SIGTERM) is before


def diverges(run: Runs, _: pytest.MonkeyPatch) -> None:
    run(optimizer__lr=1e30)


def has_an_infinite_gradient(run: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    with_an_infinite_gradient(monkeypatch, at=2)
    run()


@pytest.mark.parametrize(
    ("act", "problem"),
    [(diverges, "loss is (nan|inf)"), (has_an_infinite_gradient, r"loss is \d\.\d+, gradient norm inf")],
)
def test_what_is_not_finite_ends_the_run_before_it_is_on_record_or_saved(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[..., None], problem: str
) -> None:
    with pytest.raises(TrainerError, match=f"step 2: {problem}"):
        act(run, monkeypatch)
    assert not distributed.is_initialized()
    assert [step["step"] for step in steps_of(tmp_path / "out")] == [1]
    assert run.saved() == []


def test_the_gradient_of_a_step_of_one_target_of_half_a_weight_is_that_of_its_mean_loss() -> None:
    figures = {"loss_weights": np.array([0.5]), "has_no_batch": np.zeros(1)}
    with process_group(Parallel(device="cpu")):
        sums = StepSums(torch.tensor([1.0]).double(), torch.tensor(4.0).double(), figures)
    assert (float(sums.weight), float(sums.norm)) == (0.5, 4.0)


def test_an_error_of_a_step_is_not_taken_for_a_rank_that_is_gone() -> None:
    with pytest.raises(RuntimeError, match=r"^a shape$"), process_group(Parallel(device="cpu")):
        raise RuntimeError("a shape")


def test_memory_that_runs_out_is_explained_by_settings_and_an_estimate(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def exhausted(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore lines of torch.")

    monkeypatch.setattr(loop._Run, "forward_backward", exhausted)
    problems = []
    for _ in range(2):  # as two ranks
        with pytest.raises(TrainerError, match="memory ran out") as error:
            run(train__micro_batch_size=2, compute__recompute="selective")
        problems.append(error.value.problem)
    assert "Tried to allocate 2.00 GiB. A micro-batch has 2 rows of 16 tokens" in problems[0]
    assert "compute.recompute is selective" in problems[0]
    assert "train.micro_batch_size" in error.value.hint
    (path,) = (tmp_path / "out").glob("memory-estimate-*.txt")  # one in all
    assert problems[0] == problems[1]
    assert str(path) in problems[0]
    assert re.fullmatch(r"\d\.\d\d GiB for a rank \(.*parameters.*\)\n", path.read_text())


def test_allocations_of_profiled_steps_are_in_a_snapshot_where_there_is_cuda(
    run: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a GPU torch has neither function: what they are given is all that can be seen."""
    calls: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda **of: calls.append(of))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", calls.append)
    settings = run.recipe(train__profile_steps=[2, 3], train__out=str(tmp_path)).train
    with process_group(Parallel(device="cpu")):
        profiler = Profiler(settings, torch.device("cuda"))
        for step in (1, 2, 3, 4):
            profiler.before(step)
    path = str(tmp_path / "memory-step-2-rank-0.pickle")
    assert calls == [{"max_entries": 100_000}, path, {"enabled": None}]
    assert f"{path} has what was in memory" in capsys.readouterr().out


def test_a_full_disk_under_the_metrics_ends_the_run_after_a_save_without_an_evaluation_and_the_next_one_continues(
    run: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(log: MetricsFile, record: dict[str, Any]) -> None:
        assert "evaluation" not in record  # nobody could read it, and it may take a whole pass over its corpora
        if record["step"] >= 2:
            log.failure = TrainerError("metrics.jsonl cannot be written: No space left on device", hint="make room")

    plan = {"train__steps": 9, "evaluation__corpora": {"held out": run.paths["code"]}}
    with monkeypatch.context() as patch:
        patch.setattr(MetricsFile, "write", full)
        with pytest.raises(TrainerError, match="No space left"):
            run(**plan)
    assert run.saved() == ["step-00000005"]
    assert run(**plan)[-1]["step"] == 9


@pytest.mark.parametrize("how", ["full", "closed", "missing"])
def test_a_run_continues_without_an_output_that_takes_its_lines(
    run: Runs, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        if how == "closed":
            stream.close()
        monkeypatch.setattr(sys, "stdout", None if how == "missing" else stream)
        assert len(run(train__stop_after=1)) == 1
        with contextlib.suppress(OSError):
            stream.close()


def test_a_line_for_people_is_there_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    monkeypatch.setattr(sys, "stdout", stream)
    with process_group(Parallel(device="cpu")):
        say("step 1")
    assert stream.buffer.getvalue() == b"step 1\n"  # type: ignore[attr-defined]
