"""The step of a big job on a small machine: ``python -m tokshard.trainer.estimate RECIPE ranks=64 section.key=value``.

Runs a step of the real model and optimizer on tensors without content, as rank 0 of a process group without other
ranks. It counts what the step communicates and keeps in memory; corpora are needed only if the recipe does not give
model.vocab_size. Compiled code keeps less in memory than this.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tokshard.errors import TokshardError, UsageError
from tokshard.jobs.model_shape import model_shape
from tokshard.jobs.recipe import Config, check_ranks, load_config
from tokshard.trainer.batches import padding, vocabulary_of
from tokshard.trainer.loop import num_parameters
from tokshard.trainer.losses import backward, micro_batches
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import make_mesh, sharded_model

COLLECTIVES = {
    "c10d._allgather_base_.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
    "c10d.allreduce_.default": "all-reduce",
}

GATHERED = "gathered parameters, and gradients on their way"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """What one rank does in one optimizer step.

    Args:
        ranks, replicas, parameters: of the job.
        rows, micro_batches: of this rank, in a step.
        collectives: name to how often, and to the bytes of the whole tensors: all-gather and reduce-scatter run among
            the ranks that share a copy of the model, all-reduce between the copies. A ring of n ranks sends (n - 1) / n
            of them from each rank, and an all-reduce twice that.
        peak_bytes: by kind, at the moment when their sum is largest.
    """

    ranks: int
    replicas: int
    parameters: int
    rows: int
    micro_batches: int
    collectives: dict[str, dict[str, int]]
    peak_bytes: dict[str, int]


def estimate(settings: Config, *, ranks: int) -> Estimate:
    """Run one step without content, with the largest batch of the recipe.

    Raises:
        UsageError: the sizes do not fit, or the vocabulary is not known.
    """
    check_ranks(settings, ranks)
    needed = 1 if settings.model.vocab_size else vocabulary_of(settings.data.plan())
    shape, device = model_shape(settings.model, needed), torch.device("cpu")
    batch = padding(max(settings.data.rows_of_rank(ranks)), settings.data.seq_len)
    parts = list(micro_batches(batch, settings.train.micro_batch_size))
    with _group(ranks):
        mesh = make_mesh(settings.parallel, device)
        with FakeTensorMode(allow_non_fake_inputs=True):
            compute = dataclasses.replace(settings.compute, compile="off")
            model = sharded_model(shape, mesh, settings.parallel, compute)
            optimizer = make_optimizer(model, settings.optimizer)
            states = [tensor for state in optimizer.state.values() for tensor in state.values()]
            ledger = _Ledger(shape.vocab_size)
            ledger.watch("parameters", model.parameters())
            ledger.watch("optimizer", states)
            with ledger:
                for _ in backward(model, parts, device):
                    pass
                ledger.is_update = True
                optimizer.grad_scale, optimizer.found_inf = torch.ones(()), torch.zeros(())  # type: ignore[attr-defined]
                optimizer.step()
        return Estimate(
            ranks=ranks,
            replicas=settings.parallel.replicas,
            parameters=num_parameters(model),
            rows=len(batch["input_ids"]),
            micro_batches=len(parts),
            collectives={
                name: {"count": number, "bytes": ledger.bytes_of[name]} for name, number in ledger.counts.items()
            },
            peak_bytes={kind: size for kind, size in ledger.peak.items() if size},
        )


@contextmanager
def _group(ranks: int) -> Iterator[None]:
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

    distributed.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield
    finally:
        distributed.destroy_process_group()


class _Ledger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts collectives, and the bytes of the storages that are alive, by kind.

    (FSDPMemTracker of torch 2.13 wraps FSDP's hooks, and then units of two modules are gathered twice.)
    """

    def __init__(self, vocab_size: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.vocab_size, self.is_update = vocab_size, False
        self.counts, self.bytes_of, self.alive = Counter[str](), Counter[str](), Counter[str]()
        self.peak: dict[str, int] = {}
        self._storages: dict[int, tuple[str, int, weakref.ref[torch.UntypedStorage]]] = {}
        self._total = self._peak_total = 0
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> Any:
        ledger, resize = self, self._resize

        def resized(storage: torch.UntypedStorage, size: int) -> None:  # how FSDP frees what it gathered
            resize(storage, size)
            ledger._note(storage, GATHERED)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def watch(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._note(local.untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_moved = func.namespace in ("c10d", "fsdp")
        if (name := COLLECTIVES.get(str(func))) is not None:
            self.counts[name] += 1
            self.bytes_of[name] += max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        for leaf in tree_leaves((out, args, kwargs) if is_moved else out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self._note(leaf.untyped_storage(), self._kind(leaf, is_moved=is_moved))
        return out

    def _kind(self, tensor: Tensor, *, is_moved: bool) -> str:
        if is_moved:
            return GATHERED
        if tensor.ndim == 2 and tensor.shape[1] == self.vocab_size:
            return "logits"
        if self.is_update:
            return "update"
        in_backward = torch._C._current_graph_task_id() != -1
        return "gradients, and tensors of the backward pass" if in_backward else "activations"

    def _note(self, storage: torch.UntypedStorage, kind: str) -> None:
        key, size = storage._cdata, storage.nbytes()
        before, old_size, ref = self._storages.get(key, (kind, 0, None))
        if ref is None:
            ref = weakref.ref(storage, lambda _: self._forget(key))
        elif kind != GATHERED or before in ("parameters", "optimizer"):
            kind = before
        self._storages[key] = kind, size, ref
        self.alive[before] -= old_size
        self.alive[kind] += size
        self._total += size - old_size
        if self._total > self._peak_total:
            self._peak_total, self.peak = self._total, dict(self.alive)

    def _forget(self, key: int) -> None:
        kind, size, _ = self._storages.pop(key)
        self.alive[kind] -= size
        self._total -= size


def report(found: Estimate) -> Iterator[str]:
    """Lines for people."""
    job = f"{found.ranks} ranks, {found.replicas} copies" if found.replicas > 1 else f"{found.ranks} ranks"
    rows = f"{found.rows} rows in {found.micro_batches} micro-batches"
    yield f"{found.parameters:,} parameters on {job}; a step of a rank is {rows}"
    for name, of in found.collectives.items():
        yield f"{name:<48} {of['count']:>6,} times {of['bytes'] / 2**30:>9.2f} GiB"
    for kind, size in sorted(found.peak_bytes.items(), key=lambda item: -item[1]):
        yield f"{kind:<48} {size / 2**30:>22.2f} GiB"
    yield f"{'peak memory of a rank':<48} {sum(found.peak_bytes.values()) / 2**30:>22.2f} GiB"


def main(arguments: list[str]) -> int:
    """Print an estimate. Exit codes: 0; 1 a corpus is damaged; 2 a wrong recipe."""
    given = [argument for argument in arguments if argument != "--json"]
    if not given or given[0] in ("-h", "--help"):
        sys.stderr.write(
            "usage: python -m tokshard.trainer.estimate RECIPE.toml [ranks=N] [section.key=value ...] [--json]\n"
        )
        return 0 if given else 2
    sizes = [argument.removeprefix("ranks=") for argument in given if argument.startswith("ranks=")] or ["1"]
    try:
        if not sizes[-1].isdecimal() or int(sizes[-1]) < 1:
            raise UsageError(f"ranks is {sizes[-1]!r}, expected a number", hint="write ranks=64")
        settings = load_config(given[0], [argument for argument in given[1:] if not argument.startswith("ranks=")])
        found = estimate(settings, ranks=int(sizes[-1]))
    except TokshardError as error:
        sys.stderr.write(f"error: {error.problem}\nhint: {error.hint}\n")
        return error.exit_code
    lines = [json.dumps(dataclasses.asdict(found))] if "--json" in arguments else report(found)
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
