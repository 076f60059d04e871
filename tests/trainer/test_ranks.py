"""An error on one rank ends the run on all ranks with that error. Two gloo ranks, forked by a separate process."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save_file
from torch import distributed

from tests.contract import small
from tests.contract.faults import Launcher
from tests.trainer.checkpoints import FIRST, alone, initialised, save, trained
from tests.trainer.runs import SMALL, configuration, corpora, on_ranks, steps_of
from tokshard.errors import LoaderError, TokshardError, TrainerError
from tokshard.run_files import checkpoint_directory
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Parallel, resolve
from tokshard.runtime.tensors import StreamingLoader
from tokshard.store import PosixStore
from tokshard.trainer import checkpoint, loop, metrics
from tokshard.trainer.hugging_face import WEIGHTS, load_weights, name_of, write_config
from tokshard.trainer.loop import train
from tokshard.trainer.parallel import make_mesh, sharded_model
from tokshard.trainer.run_directory import run_directory

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

Case = tuple[str, Callable[[], object]]
NO_SPACE = "could not be saved: .*No space left"
ERRORS = {
    "rank 0 cannot commit": f"TrainerError: rank 0: .*{FIRST}.partial {NO_SPACE}",
    "rank 1 cannot write": f"TrainerError: rank 1: .*{FIRST}.partial {NO_SPACE}",
    "a flipped bit in a file of rank 1's part": f"TrainerError: rank 1: .*{FIRST} is damaged",
    "the disks differ at the start": "TrainerError: rank 1: .*run.lock on .* differs from what rank 0 wrote",
    "the disks differ in a save": "TrainerError: rank 0: .*: rank 0 does not see __1_0.distcp",
    "rank 1 cannot write while training goes on": f"TrainerError: rank 1: .*step-00000010.partial {NO_SPACE}",
    "the loader of rank 1 fails": "LoaderError: rank 1: a read hangs",
    "the loader of rank 1 fails at the last batch of a pass": "LoaderError: rank 1: a read hangs",
    "rank 1 gets a signal in step 2": "TrainerError: signal 15, steps 1, 2, 3, the last saved",
    "rank 1 lists other documents": "TrainerError: rank 1: the masked documents differ from rank 0",
    "rank 1 lacks a list of the checkpoint": "PlanMismatchError: rank 1: the run masks documents .* No such file",
    "the corpora of rank 1 are others": "TrainerError: rank 1: the plan of .data. differs from rank 0",
    "the corpora of rank 1 are elsewhere": r"\w+Error: rank 1: .*nowhere",
    "no error: weights of Hugging Face are on two ranks what they are in their file": "none of 12 differs",
    "a group is not destroyed after a failure": "it is left",
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def errors(directory: Path, forks: Launcher) -> list[dict[str, str]]:
    """What each rank raised, by case."""
    corpora(directory / "corpora")
    on_ranks(forks, 2, run_rank, directory, seconds=110)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize("case", ERRORS)
def test_an_error_on_one_rank_is_raised_on_all(errors: list[dict[str, str]], case: str) -> None:
    first, second = (of_rank[case] for of_rank in errors)
    assert first == second
    assert re.match(ERRORS[case], first), first


def test_an_asynchronous_save_that_fails_ends_the_run_within_two_steps(
    errors: list[dict[str, str]], directory: Path
) -> None:
    assert errors
    assert steps_of(directory / "asynchronous")[-1]["step"] in (11, 12)  # failures are read a step later


def test_a_rank_that_does_not_answer_or_is_gone_is_an_error_on_the_others(errors: list[dict[str, str]]) -> None:
    """Rank 0 waits for the time that a step may take; rank 1 has no batch until rank 0 has ended."""
    is_gone = "another rank is gone or did not answer: "
    assert re.match(rf"rank 0: {is_gone}.*Timed out waiting 1000ms", errors[0]["hangs"])
    assert re.match(rf"rank 1: {is_gone}", errors[1]["hangs"])


def on_rank(rank: int, target: Any, name: str, replacement: object) -> AbstractContextManager[object]:
    """A fault of one rank."""
    return patch.object(target, name, replacement if distributed.get_rank() == rank else getattr(target, name))


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def run_of(directory: Path, name: str, **changes: Any) -> dict[str, Any]:
    paths = {corpus: str(directory / "corpora" / corpus) for corpus in ("code", "prose")}
    return configuration(paths, directory / name, **changes) | {"model": SMALL}


def cases_of_saves(rank: int, directory: Path) -> Iterator[Case]:
    with on_rank(0, checkpoint_directory, "commit", full):
        yield "rank 0 cannot commit", lambda: save(directory / "commit", 1)
    with on_rank(1, checkpoint_directory, "synced", full):
        yield "rank 1 cannot write", lambda: save(directory / "write", 1)
    path = save(directory / "flipped", 1)
    (_, damaged, *_) = sorted(json.loads((path / "COMPLETE").read_text()))
    if rank == 1:
        with (path / damaged).open("r+b") as file:  # never shorter: rank 0 may look at its size already
            content = file.read()
            file.seek(len(content) // 2)
            file.write(bytes([content[len(content) // 2] ^ 1]))
    yield "a flipped bit in a file of rank 1's part", lambda: checkpoint.load(str(path), *trained(seed=1))
    with patch("tokshard.trainer.run_directory.SEEN_SECONDS", 0):
        yield "the disks differ at the start", lambda: run_directory(str(directory / f"disk-{rank}")).__enter__()
    yield "the disks differ in a save", lambda: save(directory / f"disk-{rank}", 1)


def cases_of_asynchronous_saves(_: int, directory: Path) -> Iterator[Case]:
    savers: list[checkpoint.Saver] = []
    save, batches = checkpoint.Saver.save, StreamingLoader.__iter__

    def note(saver: checkpoint.Saver, *arguments: Any) -> None:
        savers.append(saver)
        save(saver, *arguments)

    def until_failed(loader: StreamingLoader) -> Iterator[object]:
        for batch in batches(loader):
            yield batch
            while savers and not savers[0].has_failed:
                time.sleep(0.01)

    changes = {"train__steps": 99, "checkpoint__every": 10, "checkpoint__asynchronous": True}
    fields = run_of(directory, "asynchronous", **changes)
    with (
        patch.object(checkpoint.Saver, "save", note),
        on_rank(1, StreamingLoader, "__iter__", until_failed),
        on_rank(1, checkpoint_directory, "synced", full),
    ):
        yield "rank 1 cannot write while training goes on", lambda: train(resolve(fields))


def cases_of_loaders(_: int, directory: Path) -> Iterator[Case]:
    batches = StreamingLoader.__iter__

    def fail_after(num_batches: int, loader: StreamingLoader) -> Iterator[object]:
        yield from islice(batches(loader), num_batches)
        raise LoaderError("a read hangs", hint="look at the disk")

    one_pass = run_of(directory, "pass", train__steps=5, data__epochs=1, data__weights={}, data__global_batch_size=300)
    del one_pass["data"]["corpora"]["prose"]  # two steps
    for what, fields, fail in (
        ("", run_of(directory, "out", train__steps=5), lambda loader: fail_after(0, loader)),
        (" at the last batch of a pass", one_pass, lambda loader: fail_after(1, loader)),
    ):
        with on_rank(1, StreamingLoader, "__iter__", fail):
            yield f"the loader of rank 1 fails{what}", partial(train, resolve(fields))


def cases_of_signals(_: int, directory: Path) -> Iterator[Case]:
    make, calls = loop._Run.forward_backward, iter((1, 2))

    def make_and_get_a_signal(run: loop._Run, batch: Any) -> Any:
        if next(calls, 0) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return make(run, batch)

    def stop_in_step_2() -> None:
        with (
            on_rank(1, loop._Run, "forward_backward", make_and_get_a_signal),
            on_rank(1, metrics, "memory_bytes", lambda _: 10**15),
        ):
            number = train(resolve(run_of(directory, "out", train__steps=5)))
        steps = [str(step["step"]) for step in steps_of(directory / "out")]
        assert {step["memory_bytes"] for step in steps_of(directory / "out")} == {10**15}
        (saved,) = (directory / "out" / "checkpoints").glob("step-????????")
        kept = "the last saved" if int(saved.name[5:]) == int(steps[-1]) else f"{saved.name} saved"
        raise TrainerError(f"signal {number}, steps {', '.join(steps)}, {kept}", hint="none")

    yield "rank 1 gets a signal in step 2", stop_in_step_2


def cases_of_data(rank: int, directory: Path) -> Iterator[Case]:
    lists = [directory / f"list-{number}" for number in (0, 1)]
    lists[rank].write_text(f"{rank}\n2\n")
    fields = run_of(directory, "masked", train__steps=5, train__stop_after=1, data__mask={"code": [str(lists[rank])]})
    yield "rank 1 lists other documents", lambda: train(resolve(fields))
    fields["data"]["mask"] = {"code": [str(lists[0])]}
    train(resolve(fields))
    if rank == 1:
        fields["data"]["mask"] = {}
    get = PosixStore.get

    def get_but_the_list(store: PosixStore, name: str) -> Any:
        if rank == 1 and name.endswith("list-0"):
            raise FileNotFoundError(2, "No such file or directory")
        return get(store, name)

    with pytest.MonkeyPatch.context() as monkeypatch:
        small.on_disk(monkeypatch.setattr, get=get_but_the_list)
        yield "rank 1 lacks a list of the checkpoint", lambda: train(resolve(fields))

    fields = run_of(directory, "out", train__steps=5)
    paths = fields["data"]["corpora"]
    if rank == 1:
        paths["code"], paths["prose"] = paths["prose"], paths["code"]
    yield "the corpora of rank 1 are others", lambda: train(resolve(fields))
    if rank == 1:
        paths["code"] = str(directory / "nowhere")
    yield "the corpora of rank 1 are elsewhere", lambda: train(resolve(fields))


def differences_of_an_import(directory: Path) -> str:
    """The names of parameters that two ranks have other values of than the file that rank 0 writes."""
    shape = Shape(dim=12, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=10, vocab_size=21)
    expected = {name_of(name): value.detach() for name, value in initialised(shape, seed=1).named_parameters()}
    if distributed.get_rank() == 0:
        directory.mkdir()
        save_file(expected, directory / WEIGHTS)
        write_config(str(directory), shape, seq_len=8, dtype="fp32", special={})
    distributed.barrier()
    padded = dataclasses.replace(shape, vocab_size=32)
    sharded = sharded_model(padded, make_mesh(Parallel(), torch.device("cpu")), Parallel(), Compute())
    load_weights(str(directory), sharded, num_ids=21)
    different = []
    for name, parameter in sharded.named_parameters():
        value, of_file = parameter.full_tensor(), expected[name_of(name)]
        if not torch.equal(value[: len(of_file)], of_file) or value[len(of_file) :].any():
            different.append(name)
    return f"{', '.join(different) or 'none'} of {len(expected)} differs"


def wait_for_a_rank_that_hangs(directory: Path) -> None:
    """Rank 1 has no batch for the third step until rank 0 has ended with an error."""
    batches = StreamingLoader.__iter__

    def hang(loader: StreamingLoader) -> Iterator[object]:
        yield from islice(batches(loader), 2)
        while not (directory / "rank-0.json").exists():
            time.sleep(0.05)
        yield from batches(loader)

    with on_rank(1, StreamingLoader, "__iter__", hang):
        train(resolve(run_of(directory, "hangs", parallel__step_timeout_seconds=1)))


CASES = cases_of_saves, cases_of_asynchronous_saves, cases_of_loaders, cases_of_signals, cases_of_data


def run_rank(rank: int, place: str) -> None:
    raised, directory = {}, Path(place)
    try:
        with alone():
            for cases in CASES:
                for name, act in cases(rank, directory):
                    try:
                        act()
                    except TokshardError as error:
                        raised[name] = f"{type(error).__name__}: {error}"
            (name,) = (case for case in ERRORS if case.startswith("no error: "))
            raised[name] = differences_of_an_import(directory / "llama")
            wait_for_a_rank_that_hangs(directory)
    except TrainerError as error:
        raised["hangs"] = error.problem
        raised["a group is not destroyed after a failure"] = (
            "it is left" if distributed.is_initialized() else "it is not"
        )
    (directory / f"rank-{rank}.json").write_text(json.dumps(raised))
