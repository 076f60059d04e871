"""The communication and memory of one training step, on tensors without content.

The FSDPMemTracker of torch 2.13 wraps hooks of FSDP, and units of two modules are gathered twice: hence this one.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed
from torch.distributed import device_mesh
from torch.distributed.fsdp._fully_shard import _fsdp_param
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

COLLECTIVES = {
    "c10d._allgather_base_.default": "all-gather",
    "c10d._reduce_scatter_base_.default": "reduce-scatter",
    "c10d.allreduce_.default": "all-reduce",
    "c10d.alltoall_base_.default": "all-to-all",
}

GATHERED = "gathered parameters, and gradients on their way"


@contextmanager
def fake_group(num_ranks: int) -> Iterator[None]:
    """A process group that only has this rank, number 0; collectives do nothing.

    Shards and process groups of other ranks are not made, so a million ranks take about as long as one.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore  # its import registers the backend

    distributed.init_process_group("fake", rank=0, world_size=num_ranks, store=FakeStore())
    shards = patch.object(_fsdp_param, "_chunk_with_empty", first_chunk)
    groups = patch.object(device_mesh, "new_group", group_of_rank_0)
    try:
        with shards, groups:
            yield
    finally:
        distributed.destroy_process_group()


def first_chunk(tensor: Tensor, num_chunks: int, dim: int) -> list[Tensor]:
    """The first chunk of torch.chunk, the largest. On rank 0 FSDP uses no other one."""
    return [tensor.narrow(dim, 0, -(-tensor.size(dim) // num_chunks))]


def group_of_rank_0(*, ranks: list[int], **options: Any) -> Any:
    """The process group of these ranks, if rank 0 is one of them. A mesh makes the groups of all ranks."""
    return distributed.new_group(ranks, **options) if ranks[0] == 0 else None


class StepLedger(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the collectives of what runs in its context, and the bytes of the storages that are alive, by kind.

    Args:
        vocab_size: width of logits.

    Attributes:
        is_update: set by the caller when the optimizer begins, which gives what it makes a kind of its own.
        counts, bytes_of: by name of the collective; bytes of the whole tensors.
        peak: bytes by kind, at the moment when their sum was largest.
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
            ledger.note(storage, GATHERED)

        torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign,assignment]
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, *error: object) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def watch(self, kind: str, tensors: Iterable[Tensor]) -> None:
        """Count tensors that exist already."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self.note(local.untyped_storage(), kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        is_moved = func.namespace in ("c10d", "fsdp")
        if (name := COLLECTIVES.get(str(func))) is not None:
            self.counts[name] += 1
            self.bytes_of[name] += max(leaf.nbytes for leaf in tree_leaves(args) if isinstance(leaf, Tensor))
        for leaf in tree_leaves((out, args, kwargs) if is_moved else out):
            if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                self.note(leaf.untyped_storage(), self._kind(leaf, is_moved=is_moved))
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

    def note(self, storage: torch.UntypedStorage, kind: str) -> None:
        """Count a storage that is new or has another size; a counted storage keeps its kind, unless it is gathered."""
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
