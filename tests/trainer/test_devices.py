"""The trainer's code on another device than the host, by fake tensors: shapes, dtypes and devices. No GPU is needed.

Fake tensors on the device `meta` have no values. An operator refuses tensors of two devices, as on a GPU.

What is not traced: FSDP, whose collectives need a device; so the parameters here are whole, in the precision in which
FSDP gathers them. The code that inductor generates, which triton compiles for a real GPU: backend "aot_eager" traces
forward and backward as inductor gets them. `micro_batches`, which reads boundaries on the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
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
SHAPES = (SHAPE, replace(SHAPE, tied_embeddings=True, qk_norm=True, rope_factor=8.0))
RECOMPUTE = ("none", "selective", "full")
ROWS, LENGTH = 2, 32


@pytest.fixture
def fake() -> Iterator[None]:
    with FakeTensorMode():
        yield


def on_device(shape: Shape, dtype: torch.dtype, *, float8: str = "", **options: Any) -> Transformer:
    with torch.device("meta"):
        model = Transformer(shape, **options)
    if float8:
        use_float8(model.layers, float8, emulate=False)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(parameter.detach().to(dtype)))
    return model


def losses_of(model: Transformer, *, has_weights: bool = False) -> Tensor:
    """A forward pass."""
    with torch.device("meta"):
        ids, weights = torch.empty(ROWS, LENGTH, dtype=torch.int64), torch.empty(ROWS, LENGTH)
        documents = Documents(cu_seqlens=torch.empty(9, dtype=torch.int32), max_seqlen=LENGTH)
    losses = model(ids, ids, documents, ids, weights if has_weights else None)
    assert facts_of(losses) == ((ROWS * LENGTH,), torch.float32, "meta")
    return losses


def check_gradients(model: Transformer, *, has_weights: bool = False) -> None:
    """A backward pass: a gradient for each parameter in its precision."""
    losses_of(model, has_weights=has_weights).sum().backward()
    for name, parameter in model.named_parameters():
        assert facts_of(parameter.grad) == facts_of(parameter), name


def facts_of(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str]:
    return tuple(tensor.shape), tensor.dtype, tensor.device.type


def check_compiled(model: Transformer) -> None:
    """It is compiled as `sharded_model` does it, which traces both passes, with fake tensors of its own."""
    torch._dynamo.reset()
    model.head.token_losses = torch.compile(token_losses, fullgraph=True, backend="aot_eager")
    for layer in model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    losses_of(model)


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize("loss_chunk", [0, 16])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("shape", SHAPES)
def test_losses_and_gradients_are_on_the_device_of_the_model(shape: Shape, recompute: Any, loss_chunk: int) -> None:
    model = on_device(shape, torch.bfloat16, recompute=recompute, loss_chunk=loss_chunk)
    check_gradients(model, has_weights=loss_chunk == 0)


@pytest.mark.soak
def test_compiled_blocks_trace_on_a_device() -> None:
    for shape, recompute in zip(SHAPES * 2, (*RECOMPUTE, "none"), strict=False):
        check_compiled(on_device(shape, torch.bfloat16, recompute=recompute))


@pytest.mark.interop
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_traces_on_a_device(recipe: str) -> None:
    """The matrix products of torchao for a GPU, not its emulation."""
    pytest.importorskip("torchao")
    with FakeTensorMode():
        check_gradients(on_device(SHAPE, torch.bfloat16, float8=recipe))
    check_compiled(on_device(SHAPE, torch.bfloat16, float8=recipe))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_a_step_on_fp32_parameters_leaves_them_and_states_where_they_were(name: Any) -> None:
    model = on_device(SHAPE, torch.float32)
    optimizer = make_optimizer(model, Optimizer(name=name))
    for parameter in model.parameters():
        parameter.grad = torch.empty_like(parameter)
    before = {p: {key: facts_of(state) for key, state in optimizer.state[p].items()} for p in model.parameters()}
    optimizer.step()
    for parameter in model.parameters():
        assert facts_of(parameter)[1:] == (torch.float32, "meta")
        after = {key: facts_of(state) for key, state in optimizer.state[parameter].items()}
        assert after == before[parameter]
        assert {device for _, _, device in after.values()} == {"meta"}


@pytest.mark.usefixtures("fake")
def test_a_compact_batch_becomes_the_full_one_on_a_device_with_the_shapes_of_the_one_on_the_host() -> None:
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
            full, host = (expand({**narrow, **extra}, device=device) for device in ("meta", "cpu"))
            assert {key: facts_of(tensor)[:2] for key, tensor in full.items()} == {
                key: facts_of(tensor)[:2] for key, tensor in host.items()
            }
            for key in ("input_ids", "labels", "position_ids"):
                assert facts_of(full[key]) == ((ROWS, LENGTH), torch.int64, "meta"), key
