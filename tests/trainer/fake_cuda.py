"""The trainer's code on a `cuda` device without a GPU: shapes, dtypes and devices by fake tensors.

A process of its own runs this (``python -m tests.trainer.fake_cuda CHECK``), because `without_a_gpu` changes torch.
torch for CPUs has no CUDA device, not even a fake one. It lacks two things: a guard, which selects the device before a
kernel, and the streams that the autograd engine synchronizes. The guard of `meta`, which does nothing, replaces the
first, and `gradients` the second: it calls the nodes of the graph itself.

What is not traced: FSDP, whose collectives and streams need a device; so the parameters here are whole, in the
precision in which FSDP gathers them. The code that inductor generates, which triton compiles for a real GPU: backend
"aot_eager" traces forward and backward as inductor gets them. `micro_batches`, which reads boundaries on the host.
"""

from __future__ import annotations

import ctypes
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Optimizer
from tokshard.runtime import expand
from tokshard.trainer.attention import Documents
from tokshard.trainer.backports.chunked_loss import token_losses
from tokshard.trainer.model import Transformer
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import use_float8

SHAPE = Shape(vocab_size=512, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=128)
ROWS, LENGTH = 2, 32
CUDA, META = 1, 14
"""Numbers of devices in torch."""


@contextmanager
def without_a_gpu() -> Iterator[None]:
    """Fake tensors on a `cuda` device, and gradients of them."""
    libc10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * (META + 1)).in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[CUDA] or guards[META]
    with (
        FakeTensorMode(),
        mock.patch.object(torch.autograd, "grad", gradients),
        mock.patch.object(torch._C, "_current_graph_task_id", return_value=1),  # so that a block is computed again once
    ):
        yield


def gradients(
    outputs: Tensor | Sequence[Tensor],
    inputs: Sequence[Tensor],
    grad_outputs: Sequence[Tensor | None] | None = None,
    **_: Any,
) -> tuple[Tensor | None, ...]:
    """Gradients as torch.autograd.grad gives them, node by node, without threads and streams."""
    outputs = [outputs] if isinstance(outputs, Tensor) else list(outputs)
    given = [torch.ones_like(output) for output in outputs] if grad_outputs is None else grad_outputs
    edges = [torch.autograd.graph.get_gradient_edge(output) for output in outputs]
    wanted = [torch.autograd.graph.get_gradient_edge(tensor) for tensor in inputs]
    received: dict[Any, dict[int, Tensor]] = {}

    def receive(node: Any, index: int, gradient: Tensor | None) -> None:
        if node is None or gradient is None:
            return
        facts = node._input_metadata[index]
        gradient = gradient.sum_to_size(facts.shape).to(facts.dtype)
        slots = received.setdefault(node, {})
        slots[index] = slots[index] + gradient if index in slots else gradient

    for edge, gradient in zip(edges, given, strict=True):
        receive(edge.node, edge.output_nr, gradient)
    ends = {edge.node for edge in wanted}
    for node in in_order([edge.node for edge in edges]):
        if node not in received or node in ends or type(node).__name__ == "AccumulateGrad":
            continue
        slots = [received[node].get(index) for index in range(len(node._input_metadata))]
        results, following = call(node, slots)
        for (next_node, index), result in zip(following, results, strict=True):
            receive(next_node, index, result)
    return tuple(received.get(edge.node, {}).get(edge.output_nr) for edge in wanted)


def call(node: Any, given: Sequence[Tensor | None]) -> tuple[tuple[Tensor | None, ...], Sequence[tuple[Any, int]]]:
    """The results of a node, and the node and slot that each goes to."""
    if not hasattr(node, "apply"):
        results, following = node(*given), node.next_functions
    else:  # written in Python, it gives a result for each argument, also for those that are no tensors
        results, following = node.apply(*given), [edge for edge in node.next_functions if edge[0] is not None]
        results = results if isinstance(results, tuple) else (results,)
        results = tuple(result for result, needed in zip(results, node.needs_input_grad, strict=False) if needed)
    return (results if isinstance(results, tuple) else (results,)), following


def in_order(roots: Sequence[Any]) -> list[Any]:
    """The nodes of a graph, each before those that it sends gradients to."""
    done: dict[Any, None] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, is_left = stack.pop()
        if is_left:
            done[node] = None
        elif node is not None and node not in done:
            stack += [(node, True), *((following, False) for following, _ in node.next_functions)]
    return list(done)[::-1]


def on_cuda(shape: Shape, dtype: torch.dtype, *, float8: str = "", **options: Any) -> Transformer:
    """A model whose parameters have no values."""
    with torch.device("meta"):
        model = Transformer(shape, **options)
    if float8:
        use_float8(model.layers, float8, emulate=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            empty = torch.empty(parameter.shape, dtype=dtype, device="cuda")
            setattr(module, name, nn.Parameter(empty))
    return model


def check_gradients(model: Transformer, *, has_weights: bool = False) -> None:
    """A forward and backward pass: fp32 losses, and a gradient for each parameter in its precision."""
    ids = torch.empty(ROWS, LENGTH, dtype=torch.int64, device="cuda")
    weights = torch.empty(ROWS, LENGTH, device="cuda") if has_weights else None
    documents = Documents(cu_seqlens=torch.empty(9, dtype=torch.int32, device="cuda"), max_seqlen=LENGTH)
    losses = model(ids, ids, documents, ids, weights)
    assert facts_of(losses) == ((ROWS * LENGTH,), torch.float32, "cuda")
    named = dict(model.named_parameters())
    for name, gradient in zip(named, gradients(losses.sum(), list(named.values())), strict=True):
        assert gradient is not None, name
        assert facts_of(gradient) == facts_of(named[name]), name


def facts_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(tensor.shape), tensor.dtype, tensor.device.type


def compiled(model: Transformer) -> Transformer:
    """As `sharded_model` compiles it."""
    torch._dynamo.reset()
    model.head.token_losses = torch.compile(token_losses, fullgraph=True, backend="aot_eager")
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    return model


SHAPES = (SHAPE, replace(SHAPE, tied_embeddings=True, qk_norm=True, rope_factor=8.0))
RECOMPUTE = ("none", "selective", "full")


def check_model() -> None:
    for shape, recompute, loss_chunk in product(SHAPES, RECOMPUTE, (0, 16)):
        model = on_cuda(shape, torch.bfloat16, recompute=recompute, loss_chunk=loss_chunk)
        check_gradients(model, has_weights=loss_chunk == 0)


def check_compile() -> None:
    for shape, recompute in zip(SHAPES * 2, (*RECOMPUTE, "none"), strict=False):
        check_gradients(compiled(on_cuda(shape, torch.bfloat16, recompute=recompute, loss_chunk=16)))


def check_float8() -> None:
    """The matrix products of torchao for a GPU, not its emulation."""
    for recipe in ("tensorwise", "rowwise", "rowwise_with_gw_hp"):
        check_gradients(on_cuda(SHAPE, torch.bfloat16, float8=recipe))
        check_gradients(compiled(on_cuda(SHAPE, torch.bfloat16, float8=recipe)))


def check_optimizers() -> None:
    """A step on fp32 parameters, as FSDP keeps them, leaves parameters and states as they were."""
    for name in ("adamw", "muon"):
        model = on_cuda(SHAPE, torch.float32)
        optimizer = make_optimizer(model, Optimizer(name=name))
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        before = {
            id(p): {key: facts_of(state) for key, state in optimizer.state[p].items()} for p in model.parameters()
        }
        optimizer.step()
        for parameter in model.parameters():
            assert facts_of(parameter) == (tuple(parameter.shape), torch.float32, "cuda")
            after = {key: facts_of(state) for key, state in optimizer.state[parameter].items()}
            assert after == before[id(parameter)]
            assert {device for _, _, device in after.values()} == {"cuda"}


def check_expand() -> None:
    """A compact batch becomes the full one on the device, with the shapes and dtypes of the one on the host."""
    for dtype in (torch.uint16, torch.uint32):
        narrow = {
            "input_ids": torch.empty(ROWS, LENGTH, dtype=dtype),
            "next_tokens": torch.empty(63, dtype=torch.int64),
            "num_tokens": torch.empty(ROWS, dtype=torch.int32),
            "cu_seqlens": torch.empty(64, dtype=torch.int32),
            "corpus_index": torch.empty(ROWS, dtype=torch.int64),
            "sample_index": torch.empty(ROWS, dtype=torch.int64),
            "max_seqlen": torch.empty((), dtype=torch.int64),
        }
        spans = {"loss_bounds": torch.empty(65, dtype=torch.int32), "loss_weights": torch.empty(64)}
        for extra in ({}, {"masked": torch.empty(63, dtype=torch.bool)}, spans):
            full = expand({**narrow, **extra}, device="cuda:0")  # the guard of meta gives no index
            host = expand({**narrow, **extra}, device="cpu")
            assert {key: facts_of(tensor)[:2] for key, tensor in full.items()} == {
                key: facts_of(tensor)[:2] for key, tensor in host.items()
            }
            for key in ("input_ids", "labels", "position_ids"):
                assert facts_of(full[key]) == ((ROWS, LENGTH), torch.int64, "cuda"), key


CHECKS: dict[str, Callable[[], None]] = {
    "model": check_model,
    "compile": check_compile,
    "float8": check_float8,
    "optimizers": check_optimizers,
    "expand": check_expand,
}

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    with without_a_gpu():
        for check in sys.argv[1:]:
            CHECKS[check]()
            sys.stdout.write(f"{check}\n")
