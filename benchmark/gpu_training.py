"""Training runs on a device, whole: as on the CPU, stopped and continued, traced, out of memory.

Checks of gpu_checks.py, which calls them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmark.gpu_attention import WrongError
from benchmark.gpu_children import lines_of
from tests.trainer.runs import chat, configuration, corpora
from tokshard.errors import TrainerError
from tokshard.run_files.recipe import resolve
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.expand import expand
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import loop

MODEL = {"preset": "10M", "dim": 128, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 256}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, norms of heads": {
        "model__tied_embeddings": True,
        "model__qk_norm": True,
        "model__rope_factor": 8.0,
        "model__rope_original_length": 64,
    },
    "Muon": {"optimizer__name": "muon"},
    "full recomputation, chunks": {"compute__recompute": "full", "compute__loss_chunk": 50},
    "compiled, selective, micro-batches": {
        "compute__compile": "inductor",
        "compute__recompute": "selective",
        "train__micro_batch_size": 3,
    },
}
STEPS = 12
LARGEST_DIFFERENCE = {"loss": 0.003, "evaluation": 0.003, "grad_norm": 0.05}
"""Between bf16 on the device and fp32 on the CPU, relative."""


def as_on_cpu(device: str, directory: Path) -> dict[str, Any]:
    """Losses and norms of gradients in bf16 on the device, next to fp32 on the CPU: text, answers, an evaluation.

    The loss must fall by a tenth, or a gradient that changes nothing would pass.
    """
    paths = texts_and_answers(directory)
    worst: dict[str, dict[str, float]] = {}
    for number, (name, changes) in enumerate(VARIANTS.items()):
        found = metrics(paths, directory / f"{number}-there", device, **changes)
        plain = {key: of for key, of in changes.items() if not key.startswith("compute__")}
        expected = metrics(paths, directory / f"{number}-cpu", "cpu", parallel__precision="fp32", **plain)
        if not expected["loss"][-1] < 0.9 * expected["loss"][0]:
            raise WrongError(f"{name}: nothing was learned: {expected['loss'].tolist()}")
        worst[name] = {}
        for key, limit in LARGEST_DIFFERENCE.items():
            worst[name][key] = difference(found[key], expected[key])
            if not worst[name][key] < limit:
                raise WrongError(f"{name}: {key} is {found[key].tolist()}, on the CPU {expected[key].tolist()}")
    return {"variants": len(VARIANTS), "largest_difference": worst}


def continued(device: str, directory: Path) -> dict[str, Any]:
    """A run that is stopped and continued has the losses of one that is not.

    They may differ a little: the gradient of attention is added up in an order that CUDA does not promise.
    """
    paths = texts_and_answers(directory)
    whole = metrics(paths, directory / "whole", device)["loss"]
    metrics(paths, directory / "parts", device, train__stop_after=STEPS // 2)
    parts = metrics(paths, directory / "parts", device)["loss"]
    largest = difference(parts, whole)
    if not largest < 1e-3:
        raise WrongError(f"losses {parts.tolist()}, without a stop {whole.tolist()}")
    return {"steps": len(whole), "identical": int(np.sum(parts == whole)), "largest_difference": largest}


def compact(device: str, directory: Path) -> dict[str, Any]:
    """Compact batches from pinned memory, made full on the device, are the full batches, bit for bit."""
    plan = StreamPlan(texts_and_answers(directory), seq_len=128)
    pinned = device == "cuda"
    with (
        StreamingLoader(plan, global_batch_size=4, compact=True, pin_memory=pinned) as loader,
        NumpyLoader(plan, global_batch_size=4) as plain,
    ):
        for number, batch, of in zip(range(200), loader, plain, strict=False):
            there = expand(batch, device)
            if there.keys() != of.keys():
                raise WrongError(f"batch {number} has {sorted(there)}, expected {sorted(of)}")
            for name, expected in of.items():
                if name not in ("max_seqlen", "cu_seqlens") and there[name].device.type != device:
                    raise WrongError(f"{name} is on {there[name].device}")
                if not np.array_equal(there[name].cpu().numpy(), expected):
                    raise WrongError(f"{name} of batch {number} differs")
    return {"batches": number + 1, "arrays": len(of)}


def traced(device: str, directory: Path) -> dict[str, Any]:
    """A trace of two steps, with kernels on CUDA, and there a snapshot of memory."""
    metrics(texts_and_answers(directory), directory / "out", device, train__profile_steps=[2, 4], train__stop_after=5)
    trace = (directory / "out" / "trace-step-2-rank-0.json").read_text()
    kernels, snapshot = trace.count('"cat": "kernel"'), directory / "out" / "memory-step-2-rank-0.pickle"
    if device == "cuda" and (not kernels or not snapshot.stat().st_size):
        raise WrongError(f"{kernels} kernels in the trace")
    return {"bytes": len(trace), "kernels": kernels, **({"snapshot": snapshot.stat().st_size} if kernels else {})}


def out_of_memory(directory: Path) -> dict[str, Any]:
    """A run that needs more memory than there is says so, and what to change. CUDA only."""
    paths, out = texts_and_answers(directory), directory / "out"
    with memory_of(64 << 20):
        try:
            metrics(paths, out, "cuda", model__dim=1024, model__hidden_dim=4096)
        except TrainerError as error:
            said = f"{error.problem}; {error.hint}"
        else:
            raise WrongError("64 MiB were enough")
    for expected in ("memory ran out: CUDA out of memory", "9 rows of 128 tokens", "train.micro_batch_size"):
        if expected not in said:
            raise WrongError(f"{expected!r} is not in {said!r}")
    if not (out / "memory-out-of-memory-rank-0.pickle").stat().st_size:
        raise WrongError("the snapshot is empty")
    (path,) = out.glob("memory-estimate-*.txt")
    if "GiB for a rank" not in path.read_text():
        raise WrongError(f"no estimate: {path.read_text()!r}")
    return {"estimate": path.read_text().strip()}


@contextlib.contextmanager
def memory_of(num_bytes: int) -> Iterator[None]:
    """The process may allocate no more on the GPU."""
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def texts_and_answers(directory: Path) -> dict[str, str]:
    """Two corpora that a model can learn, and one of conversations whose answers alone are in the loss."""
    chat(directory / "chat", np.random.default_rng(3).integers(2, 200, 300).tolist())
    return corpora(directory) | {"chat": str(directory / "chat")}


def metrics(paths: dict[str, str], out: Path, device: str, **changes: Any) -> dict[str, NDArray[Any]]:
    """Train the small model; returns the series of `LARGEST_DIFFERENCE`, from the first step of the run."""
    changes = {
        **{f"model__{key}": value for key, value in MODEL.items()},
        "data__weights": {"code": 0.5, "prose": 0.3, "chat": 0.2},
        "data__seq_len": 128,
        "parallel__device": device,
        "parallel__precision": "bf16",
        "optimizer__lr": 3e-3,
        "train__steps": STEPS,
        "checkpoint__every": 0,
        "evaluation__corpora": {"code": paths["code"]},
        "evaluation__every": 5,
        "evaluation__tokens": 2_000,
        **changes,
    }
    if status := loop.train(resolve(configuration(paths, out, **changes))):
        raise WrongError(f"the run ended with {status}")
    lines = lines_of(out / "metrics.jsonl")
    evaluations = [line["evaluation"]["code"]["loss"] for line in lines if "evaluation" in line]
    steps = [line for line in lines if "evaluation" not in line]
    return {"evaluation": np.array(evaluations)} | {
        key: np.array([step[key] for step in steps]) for key in ("loss", "grad_norm")
    }


def difference(found: NDArray[Any], expected: NDArray[Any]) -> float:
    """The largest, relative; NaN if one is, or if there are fewer."""
    return float(np.max(np.abs(found / expected - 1))) if found.shape == expected.shape else np.nan
