"""What has to be right on a GPU before its speed counts: one check per process, one line of JSON.

    python -m benchmark.gpu_checks NAME cuda|cpu CORPUS EMPTY_DIRECTORY

Small models and real parts. The comparisons run on the CPU as well; only syncs and pinned memory need CUDA.
"""

from __future__ import annotations

import json
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from benchmark import gpu_training
from benchmark.gpu_attention import WrongError, flex, varlen
from benchmark.gpu_children import child, last_lines, lines_of, run
from tokshard.run_files.checkpoint_directory import State, check_hashes
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Optimizer, Parallel, resolve
from tokshard.run_files.torch_checkpoints import load_checkpoint
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import checkpoint, loop
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

NUM_BATCHES = 2_000


class NotRun(Exception):  # noqa: N818 - a result, not an error
    """The check needs what this machine lacks."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a check runs."""

    device: str
    corpus: str
    directory: Path

    @property
    def has_gpu(self) -> bool:
        return self.device == "cuda"

    def fields(self, name: str, **changes: Any) -> dict[str, Any]:
        """A recipe of the small model; ``changes`` are ``section__key=value``."""
        fields: dict[str, Any] = {
            "data": {"corpora": {"all": self.corpus}, "seq_len": 128, "global_batch_size": 4},
            "model": dict(gpu_training.MODEL),
            "parallel": {"device": self.device, "precision": "bf16"},
            "train": {"out": str(self.directory / name), "steps": 1_000_000, "log_every": 1_000},
        }
        for key, value in changes.items():
            section, _, option = key.partition("__")
            fields.setdefault(section, {})[option] = value
        return fields


def one_rank(place: Place) -> dict[str, Any]:
    """The process group of the trainer, NCCL on CUDA, with one rank: collectives on the device and of objects."""
    settings = Parallel(device=place.device)  # type: ignore[arg-type]
    with process_group(settings) as device:
        make_mesh(settings, device)
        sent = torch.randn(1 << 16, device=device)
        summed, gathered, scattered = sent.clone(), torch.empty_like(sent), torch.empty_like(sent)
        distributed.all_reduce(summed)
        distributed.all_gather_into_tensor(gathered, sent)
        distributed.reduce_scatter_tensor(scattered, sent)
        objects = ["a path"]
        distributed.broadcast_object_list(objects)
        backend = str(distributed.get_backend_config())
        for name, got in (("all-reduce", summed), ("all-gather", gathered), ("reduce-scatter", scattered)):
            if not torch.equal(got, sent):
                raise WrongError(f"{name} of one rank changed its values")
    if place.has_gpu and "nccl" not in backend:
        raise WrongError(f"the backend is {backend}")
    if distributed.is_initialized():
        raise WrongError("the process group was not destroyed")
    return {"backend": backend}


def batches(place: Place) -> dict[str, Any]:
    """Batches arrive as a plain loader makes them: sums of products with random numbers, modulo 2**64.

    Copies lag behind products of matrices, while the memory of earlier batches is used again.
    """
    rows, number = 8, NUM_BATCHES
    seq_len = 1_024 if place.has_gpu else 64
    shape = (rows, seq_len)
    weights = torch.from_numpy(np.random.default_rng(0).integers(-(2**62), 2**62, (3, *shape)))
    there, names = weights.to(place.device), ("input_ids", "labels", "position_ids")
    size = 4_096 if place.has_gpu else 8
    busy, spare = torch.randn(2, size, size, device=place.device)
    plan = StreamPlan({"all": place.corpus}, seq_len=seq_len)
    sums = torch.zeros(number, len(names), dtype=torch.int64, device=place.device)
    memory = set()
    with StreamingLoader(plan, global_batch_size=rows, pin_memory=place.has_gpu) as loader:
        for index, batch in zip(range(number), loader, strict=False):
            if place.has_gpu and not all(tensor.is_pinned() for tensor in batch.values()):
                raise WrongError("a batch is not in pinned memory")
            memory.add(batch["input_ids"].data_ptr())
            if index % 20 == 0:
                torch.mm(busy, busy, out=spare)
            for column, name in enumerate(names):
                sums[index, column] = (batch[name].to(place.device, non_blocking=True) * there[column]).sum()
    with NumpyLoader(plan, global_batch_size=rows) as plain:
        expected = np.stack(
            [
                [(batch[name] * of).sum() for name, of in zip(names, weights.numpy(), strict=True)]
                for _, batch in zip(range(number), plain, strict=False)
            ]
        )
    wrong = np.flatnonzero((sums.cpu().numpy() != expected).any(1))
    if len(wrong):
        raise WrongError(f"{len(wrong)} of {number} batches arrived changed, the first is number {wrong[0]}")
    if len(np.unique(expected[:, 0])) < number / 2 or len(memory) > number / 2:
        raise WrongError(f"the batches do not differ, or their memory was not reused: {len(memory)} places")
    return {"batches": number, "places_in_memory": len(memory)}


def no_sync(place: Place) -> dict[str, Any]:
    """Five steps of the trainer in which torch raises when the host waits for the device."""
    switched: list[int] = []
    end_step = loop.Report.end_step

    def switch(report: Any, step: int, rate: float) -> None:
        end_step(report, step, rate)
        if step in (3, 8):  # 4 to 8 are strict
            switched.append(step)
            if place.has_gpu:
                torch.cuda.set_sync_debug_mode("error" if step == 3 else "default")

    if place.has_gpu:
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.ones(1, device="cuda").item()
        except RuntimeError:
            torch.cuda.set_sync_debug_mode("default")
        else:
            raise WrongError("torch does not notice a sync")
    with patch.object(loop.Report, "end_step", switch):
        train(place, "out", train__stop_after=10)
    if switched != [3, 8]:
        raise WrongError(f"the mode was switched after steps {switched}")
    if not place.has_gpu:
        raise NotRun("syncs are seen on CUDA only; the steps ran")
    return {"steps": 5}


def devices(place: Place) -> dict[str, Any]:
    """A checkpoint of the CPU loads on the device, and one of the device on the CPU: bit for bit."""
    shape = Shape(**{key: value for key, value in gpu_training.MODEL.items() if key != "preset"}, vocab_size=512)  # type: ignore[arg-type]
    names = ["cpu", place.device, "cpu"]
    with process_group(Parallel(device=place.device)):  # type: ignore[arg-type]
        expected, path = dict[str, Tensor](), ""
        for step, name in enumerate(names):
            settings = Parallel(device=name, precision="bf16")  # type: ignore[arg-type]
            model = sharded_model(shape, make_mesh(settings, torch.device(name)), settings, Compute())
            tensors = checkpoint.tensors_of(model, optimizer := make_optimizer(model, Optimizer()))
            with torch.no_grad():
                for tensor in tensors.values():  # nothing is equal by chance
                    local(tensor).copy_(torch.randn(local(tensor).shape))
            if step:
                checkpoint.load(path, model, optimizer)
                compare({key: local(of).cpu() for key, of in tensors.items()}, expected, f"on {name}")
            else:
                expected = {key: local(of).clone() for key, of in tensors.items()}
            state = State(step=step + 1, loader={}, config={})
            path = checkpoint.save(str(place.directory), tensors, state)
    return {"tensors": len(expected), "bytes": sum(tensor.nbytes for tensor in expected.values())}


def skip(place: Place) -> dict[str, Any]:
    """A step with an infinite gradient changes no parameter and no state of the optimizer, and is on record."""
    forward_backward, update = loop._Run.forward_backward, loop._Run.update
    changed: list[bool] = []

    def infinite(run: Any, batch: Any) -> Tensor:
        losses = forward_backward(run, batch)
        if len(changed) == 2:
            local(next(run.model.parameters()).grad).view(-1)[0] = torch.inf
        return losses

    def compared(run: Any, sums: Any, rate: float) -> None:
        before = copies(run.model, run.optimizer)
        update(run, sums, rate)
        after = copies(run.model, run.optimizer)
        changed.append(not all(torch.equal(after[key], of) for key, of in before.items()))

    with patch.object(loop._Run, "forward_backward", infinite), patch.object(loop._Run, "update", compared):
        steps = train(place, "out", train__stop_after=4, train__on_non_finite="skip")
    if changed != [True, True, False, True]:
        raise WrongError(f"which of the steps changed something: {changed}")
    if [bool(step.get("skipped")) for step in steps] != [False, False, True, False]:
        raise WrongError("the record does not say that step 3 was skipped")
    return {"skipped": steps[2]["skipped"]}


def async_save(place: Place) -> dict[str, Any]:
    """Checkpoints that are written while training goes on hold what was there when the save began."""
    kept: dict[int, dict[str, Tensor]] = {}
    save = checkpoint.Saver.save

    def recorded(saver: Any, model: Any, optimizer: Any, state: Any) -> None:
        kept[state.step] = copies(model, optimizer)
        save(saver, model, optimizer, state)

    with patch.object(checkpoint.Saver, "save", recorded):
        train(place, "out", checkpoint__asynchronous=True, checkpoint__every=2, train__stop_after=9)
    for step, expected in kept.items():
        path = place.directory / "out" / "checkpoints" / f"step-{step:08d}"
        check_hashes(str(path))
        found = {name: torch.empty_like(tensor) for name, tensor in expected.items()}
        load_checkpoint(found, str(path), no_dist=True)
        compare(found, expected, f"in {path.name}")
    if list(kept) != [2, 4, 6, 8, 9]:
        raise WrongError(f"saves after steps {list(kept)}")
    return {"saves": len(kept)}


def sigterm(place: Place) -> dict[str, Any]:
    """A run that gets SIGTERM saves, and the same command continues it with the next sample."""
    recipe, log = place.directory / "recipe.toml", place.directory / "out" / "metrics.jsonl"
    recipe.write_text(f'[data]\ncorpora = {{ all = "{place.corpus}" }}\n')
    fields = place.fields("out")
    del fields["data"]["corpora"]
    changes = [f"{name}.{key}={json.dumps(value)}" for name, of in fields.items() for key, value in of.items()]
    command = ["-m", "tokshard.trainer", str(recipe), *changes]
    began = time.monotonic()
    with tempfile.TemporaryFile("w+", errors="replace") as said, child(command, said, is_leader=False) as process:
        while process.poll() is None and len(lines_of(log)) < 3:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        status = process.wait()
        said.seek(0)
        text = said.read()
    if status != 128 + signal.SIGTERM:
        raise WrongError(f"ended with {status}: {last_lines(text)}")
    stopped = len(lines_of(log))
    status, text = run([*command, f"train.stop_after={stopped + 3}"], seconds=300, is_leader=False)
    if status != 0 or f"continuing after step {stopped} " not in text:
        raise WrongError(f"the second run ended with {status}: {last_lines(text)}")
    steps = lines_of(log)
    if [step["step"] for step in steps] != list(range(1, stopped + 4)):
        raise WrongError(f"steps {[step['step'] for step in steps]}, stopped after {stopped}")
    if any(one["samples"][1] != two["samples"][0] for one, two in pairwise(steps)):
        raise WrongError("samples were read twice or left out")
    return {"stopped_after": stopped, "seconds_of_both": time.monotonic() - began}


def out_of_memory(place: Place) -> dict[str, Any]:
    """A run that needs more memory than there is."""
    if not place.has_gpu:
        raise NotRun("the memory of a process is limited on CUDA only")
    return gpu_training.out_of_memory(place.directory)


CHECKS: dict[str, Callable[[Place], dict[str, Any]]] = {
    "varlen attention": lambda place: varlen(place.device),
    "no sync in 5 steps": no_sync,
    "2,000 pinned batches": batches,
    "checkpoints between devices": devices,
    "non-finite step is skipped": skip,
    "process group of one rank": one_rank,
    "asynchronous save": async_save,
    "SIGTERM and resume": sigterm,
    "flex attention": lambda place: flex(place.device),
    "compact batches": lambda place: gpu_training.compact(place.device, place.directory),
    "losses as on the CPU": lambda place: gpu_training.as_on_cpu(place.device, place.directory),
    "stopped and continued": lambda place: gpu_training.continued(place.device, place.directory),
    "trace and memory snapshot": lambda place: gpu_training.traced(place.device, place.directory),
    "out of memory": out_of_memory,
}


def train(place: Place, name: str, **changes: Any) -> list[dict[str, Any]]:
    """Train, and return the lines of the metrics."""
    status = loop.train(resolve(place.fields(name, **changes)))
    if status:
        raise WrongError(f"the run ended with {status}")
    return lines_of(place.directory / name / "metrics.jsonl")


def local(tensor: Any) -> Any:
    """This rank's part."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def copies(model: Any, optimizer: Any) -> dict[str, Tensor]:
    """Parameters and the optimizer's state, on the CPU."""
    return {key: local(of).detach().cpu().clone() for key, of in checkpoint.tensors_of(model, optimizer).items()}


def compare(found: dict[str, Tensor], expected: dict[str, Tensor], where: str) -> None:
    """Bit for bit."""
    wrong = [key for key, of in expected.items() if not torch.equal(found[key], of)]
    if wrong or found.keys() != expected.keys():
        raise WrongError(f"{len(wrong)} of {len(expected)} tensors differ {where}: {', '.join(wrong[:3])}")


def result(name: str, place: Place) -> dict[str, Any]:
    """``PASS``, ``FAIL`` or ``not run``, with why."""
    try:
        return {"result": "PASS", **CHECKS[name](place)}
    except NotRun as error:
        return {"result": "not run", "why": str(error)}
    except WrongError as error:
        return {"result": "FAIL", "why": str(error)}
    except Exception as error:  # noqa: BLE001 - a process edge: whatever it is, the check did not pass
        traceback.print_exc()
        return {"result": "FAIL", "why": f"{type(error).__name__}: {str(error)[:300]}"}


def main(arguments: list[str]) -> int:
    name, device, corpus, directory = arguments
    sys.stdout.write("\n" + json.dumps(result(name, Place(device, corpus, Path(directory)))) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
