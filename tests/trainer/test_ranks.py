"""An error on one rank ends the run on all ranks with that error. Two gloo ranks, forked by a separate process."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.forks import Forks
from tests.ranks import forked, free_port, worst_of
from tests.trainer.runs import ROOT, SMALL, configuration, corpora, steps_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def errors(directory: Path, forks: Forks) -> list[dict[str, str]]:
    """What each rank raised, by case."""
    forks.run(["python", "-m", "tests.trainer.test_ranks", str(directory)], ROOT, seconds=110)
    return [json.loads((directory / f"rank-{rank}.json").read_text()) for rank in (0, 1)]


@pytest.mark.parametrize(
    ("case", "error"),
    [
        ("rank 0 cannot commit", "TrainerError: rank 0: .*step-00000001.partial could not be saved: .*No space left"),
        ("rank 1 cannot write", "TrainerError: rank 1: .*step-00000001.partial could not be saved: .*No space left"),
        ("a flipped bit in a file of rank 1's part", "TrainerError: rank 1: .*step-00000001 is damaged"),
        ("the disks differ at the start", "TrainerError: rank 1: .*run.lock on .* differs from what rank 0 wrote"),
        (
            "the disks differ in a save",
            "TrainerError: rank 0: .*: rank 0 does not see __1_0.distcp",
        ),
        (
            "rank 1 cannot write while training goes on",
            "TrainerError: rank 1: .*step-00000010.partial could not be saved: .*No space left",
        ),
        ("the loader of rank 1 fails", "LoaderError: rank 1: a read hangs"),
        ("the loader of rank 1 fails at the last batch of a pass", "LoaderError: rank 1: a read hangs"),
        ("the loader of rank 1 fails where a ramp makes another one", "LoaderError: rank 1: a read hangs"),
        ("rank 1 gets a signal in step 2", "TrainerError: signal 15, steps 1, 2, 3, the last saved"),
        ("rank 1 lists other documents", "TrainerError: rank 1: the masked documents differ from rank 0"),
        ("rank 1 lacks a list of the checkpoint", "PlanMismatchError: rank 1: the run masks documents .* No such file"),
        ("the corpora of rank 1 are others", "TrainerError: rank 1: the plan of .data. differs from rank 0"),
        ("the corpora of rank 1 are elsewhere", r"\w+Error: rank 1: .*nowhere"),
    ],
)
def test_an_error_on_one_rank_is_raised_on_all(errors: list[dict[str, str]], case: str, error: str) -> None:
    first, second = (of_rank[case] for of_rank in errors)
    assert first == second
    assert re.match(error, first), first


def test_an_asynchronous_save_that_fails_ends_the_run_within_two_steps(
    errors: list[dict[str, str]], directory: Path
) -> None:
    assert errors
    assert steps_of(directory / "asynchronous")[-1]["step"] in (11, 12)  # failures are read a step later


def test_a_rank_that_does_not_answer_is_an_error_on_the_others_after_the_timeout_of_a_step(
    errors: list[dict[str, str]],
) -> None:
    assert re.match(r"rank 0: another rank is gone or did not answer: .*Timed out waiting 1000ms", errors[0]["hangs"])


def test_a_rank_that_is_gone_is_an_error_on_the_others(errors: list[dict[str, str]]) -> None:
    assert re.match(r"rank 1: another rank is gone or did not answer: ", errors[1]["hangs"])


def test_a_group_of_several_ranks_is_not_destroyed_after_a_failure(errors: list[dict[str, str]]) -> None:
    assert [of_rank["group"] for of_rank in errors] == ["is left"] * 2


def test_weights_of_hugging_face_are_on_two_ranks_what_they_are_in_their_file(errors: list[dict[str, str]]) -> None:
    assert [of_rank["imported, but different"] for of_rank in errors] == ["none of 12"] * 2


@contextmanager
def on_rank(of: int, target: Any, name: str, replacement: object) -> Iterator[None]:
    with patch.object(target, name, replacement if os.environ["RANK"] == str(of) else getattr(target, name)):
        yield


def full(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def run_of(directory: Path, name: str, **changes: Any) -> dict[str, Any]:
    paths = {corpus: str(directory / "corpora" / corpus) for corpus in ("code", "prose")}
    return configuration(paths, directory / name, **changes) | {"model": SMALL}


def cases(rank: int, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from tests.trainer.test_checkpoint import trained
    from tokshard.run_files import checkpoint_directory
    from tokshard.trainer import checkpoint
    from tokshard.trainer.run_directory import run_directory

    state = checkpoint_directory.State(step=1, loader={}, config={})

    def save(name: str) -> None:
        checkpoint.save(str(directory / name), checkpoint.tensors_of(*trained(seed=1)), state)

    with on_rank(0, checkpoint_directory, "commit", full):
        yield "rank 0 cannot commit", lambda: save("commit")
    with on_rank(1, checkpoint_directory, "synced", full):
        yield "rank 1 cannot write", lambda: save("write")

    save("flipped")
    path = directory / "flipped" / "step-00000001"
    (_, damaged, *_) = sorted(json.loads((path / "COMPLETE").read_text()))
    if rank == 1:
        with (path / damaged).open("r+b") as file:  # never shorter: rank 0 may look at its size already
            content = file.read()
            file.seek(len(content) // 2)
            file.write(bytes([content[len(content) // 2] ^ 1]))
    yield "a flipped bit in a file of rank 1's part", lambda: checkpoint.load(str(path), *trained(seed=1))

    def hold() -> None:
        with run_directory(str(directory / f"disk-{rank}")):
            pass

    with patch("tokshard.trainer.run_directory.SEEN_SECONDS", 0):
        yield "the disks differ at the start", hold
    yield "the disks differ in a save", lambda: save(f"disk-{rank}")
    yield from cases_of_asynchronous_saves(directory)
    yield from cases_of_steps(rank, directory)


def cases_of_asynchronous_saves(directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from tokshard.run_files import checkpoint_directory
    from tokshard.run_files.recipe import resolve
    from tokshard.runtime.tensors import StreamingLoader
    from tokshard.trainer import checkpoint
    from tokshard.trainer.loop import train

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


def cases_of_steps(rank: int, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from tokshard.errors import LoaderError, TrainerError
    from tokshard.run_files.recipe import resolve
    from tokshard.runtime.tensors import StreamingLoader
    from tokshard.trainer import loop, metrics
    from tokshard.trainer.loop import train

    def fail(_: StreamingLoader) -> Iterator[object]:
        yield from ()
        raise LoaderError("a read hangs", hint="look at the disk")

    fields = run_of(directory, "out", train__steps=5)
    with on_rank(1, StreamingLoader, "__iter__", fail):
        yield "the loader of rank 1 fails", lambda: train(resolve(fields))

    batches_of = StreamingLoader.__iter__

    def fail_at_the_end(loader: StreamingLoader) -> Iterator[object]:
        yield next(batches_of(loader))
        yield from fail(loader)

    one_pass = json.loads(json.dumps(fields))
    del one_pass["data"]["corpora"]["prose"]
    one_pass["data"] |= {"epochs": 1, "weights": {}, "global_batch_size": 300}  # two steps
    with on_rank(1, StreamingLoader, "__iter__", fail_at_the_end):
        yield "the loader of rank 1 fails at the last batch of a pass", lambda: train(resolve(one_pass))

    first_calls = iter((1,))

    def fail_after_the_first_call(loader: StreamingLoader) -> Iterator[object]:
        yield from batches_of(loader) if next(first_calls, 0) else fail(loader)

    ramp = run_of(directory, "ramp", train__steps=5, data__batch_ramp=[[3, 18]])
    with on_rank(1, StreamingLoader, "__iter__", fail_after_the_first_call):
        yield "the loader of rank 1 fails where a ramp makes another one", lambda: train(resolve(ramp))

    def stop_in_step_2() -> None:
        make, calls = loop._Run.forward_backward, iter((1, 2))

        def make_and_get_a_signal(run: loop._Run, batch: Any) -> Any:
            if next(calls, 0) == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return make(run, batch)

        with (
            on_rank(1, loop._Run, "forward_backward", make_and_get_a_signal),
            on_rank(1, metrics, "memory_bytes", lambda _: 10**15),
        ):
            number = train(resolve(fields))
        steps = [str(step["step"]) for step in steps_of(directory / "out")]
        assert {step["memory_bytes"] for step in steps_of(directory / "out")} == {10**15}
        (saved,) = (directory / "out" / "checkpoints").glob("step-????????")
        kept = "the last saved" if int(saved.name[5:]) == int(steps[-1]) else f"{saved.name} saved"
        raise TrainerError(f"signal {number}, steps {', '.join(steps)}, {kept}", hint="none")

    yield "rank 1 gets a signal in step 2", stop_in_step_2
    yield from cases_of_masks(rank, directory)
    corpora_of_run = fields["data"]["corpora"]
    if rank == 1:
        corpora_of_run["code"], corpora_of_run["prose"] = corpora_of_run["prose"], corpora_of_run["code"]
    yield "the corpora of rank 1 are others", lambda: train(resolve(fields))
    if rank == 1:
        corpora_of_run["code"] = str(directory / "nowhere")
    yield "the corpora of rank 1 are elsewhere", lambda: train(resolve(fields))


def cases_of_masks(rank: int, directory: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    from tokshard.run_files.recipe import resolve
    from tokshard.runtime.rows import masks
    from tokshard.trainer.loop import train

    lists = [directory / f"list-{number}" for number in (0, 1)]
    lists[rank].write_text(f"{rank}\n2\n")
    fields = run_of(directory, "masked", train__steps=5, train__stop_after=1, data__mask={"code": [str(lists[rank])]})
    yield "rank 1 lists other documents", lambda: train(resolve(fields))

    fields["data"]["mask"] = {"code": [str(lists[0])]}
    train(resolve(fields))
    if rank == 1:
        fields["data"]["mask"] = {}
    with on_rank(1, masks, "_read", missing):
        yield "rank 1 lacks a list of the checkpoint", lambda: train(resolve(fields))


def missing(path: str) -> None:
    from tokshard.errors import PlanError

    raise PlanError(f"{path} cannot be read: No such file or directory", hint="give a file of document numbers")


def differences_of_an_import(directory: Path) -> str:
    """The names of parameters that two ranks have other values of than the file that rank 0 writes."""
    import dataclasses

    import torch
    from safetensors.torch import save_file
    from torch import distributed
    from torch.distributed.tensor import DTensor

    from tokshard.run_files.model_shape import Shape
    from tokshard.run_files.recipe import Compute, Parallel
    from tokshard.trainer.hugging_face import WEIGHTS, load_weights, name_of, write_config
    from tokshard.trainer.model import Transformer, initialise
    from tokshard.trainer.parallel import make_mesh, sharded_model

    shape = Shape(dim=12, num_layers=1, num_heads=2, num_kv_heads=1, hidden_dim=10, vocab_size=21)
    whole = Transformer(shape)
    initialise(whole, seed=1)
    expected = {name_of(name): value.detach() for name, value in whole.named_parameters()}
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
        assert isinstance(parameter, DTensor)
        value, of_file = parameter.full_tensor(), expected[name_of(name)]
        if not torch.equal(value[: len(of_file)], of_file) or value[len(of_file) :].any():
            different.append(name)
    return ", ".join(different) or f"none of {len(expected)}"


def wait_for_a_rank_that_hangs(rank: int, directory: Path) -> None:
    """Rank 1 has no batch for the third step until rank 0 has ended with an error."""
    from tokshard.run_files.recipe import resolve
    from tokshard.runtime.tensors import StreamingLoader
    from tokshard.trainer.loop import train

    batches = StreamingLoader.__iter__

    def hang(loader: StreamingLoader) -> Iterator[object]:
        yield from islice(batches(loader), 2)
        while rank == 1 and not (directory / "rank-0.json").exists():
            time.sleep(0.05)
        yield from batches(loader)

    with patch.object(StreamingLoader, "__iter__", hang):
        train(resolve(run_of(directory, "hangs", parallel__step_timeout_seconds=1)))


def run_rank(rank: int, directory: Path, port: int) -> None:
    from torch import distributed

    from tokshard.errors import TokshardError, TrainerError
    from tokshard.run_files.recipe import Parallel
    from tokshard.trainer.parallel import process_group

    place = {"RANK": rank, "WORLD_SIZE": 2, "MASTER_PORT": port, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in place.items()}
    raised = {}
    try:
        with process_group(Parallel(device="cpu")):
            for name, act in cases(rank, directory):
                try:
                    act()
                except TokshardError as error:
                    raised[name] = f"{type(error).__name__}: {error}"
            raised["imported, but different"] = differences_of_an_import(directory / "llama")
            wait_for_a_rank_that_hangs(rank, directory)
    except TrainerError as error:
        raised["hangs"] = error.problem
        raised["group"] = "is left" if distributed.is_initialized() else "is destroyed"
    (directory / f"rank-{rank}.json").write_text(json.dumps(raised))


def main() -> None:
    warnings.simplefilter("ignore")
    directory = Path(sys.argv[1])
    corpora(directory / "corpora")
    port = free_port()
    sys.exit(worst_of([forked(partial(run_rank, rank, directory, port), seconds=100) for rank in (0, 1)]))


if __name__ == "__main__":
    main()
