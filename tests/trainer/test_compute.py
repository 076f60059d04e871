"""Ways to compute the same losses and gradients: attention, compilation, recomputation, chunks of logits, float8."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.runtime.sources import ListSource
from tests.trainer.checkpoints import initialised
from tests.trainer.runs import configuration
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Parallel, resolve
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.tensors import StreamingLoader
from tokshard.trainer import attention
from tokshard.trainer.attention import Documents, attend
from tokshard.trainer.losses import sum_of_losses
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

# of torch's compiler: it looks at every tensor, and imports what torch calls deprecated
pytestmark = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning", "ignore:.torch.jit:DeprecationWarning"
)

CPU = torch.device("cpu")
SHAPE = Shape(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48, vocab_size=256)
PACKINGS = {
    "one document": [0, 48],
    "documents of one token": [0, 1, 2, 30, 31, 48],
    "only such documents": range(49),
    "a repeated end": [0, 20, 48, 48, 48],
}


model = partial(initialised, SHAPE)


def batches(count: int) -> Iterator[dict[str, Tensor]]:
    """Of 4 rows of 16 tokens, each with other documents, and with another number of them."""
    lengths = np.random.default_rng(0).integers(1, 20, 200).tolist()
    loader = StreamingLoader(StreamPlan(ListSource(lengths), seq_len=16, allow_small_blocks=True), global_batch_size=4)
    for _, batch in zip(range(count), loader, strict=False):
        bounds = batch["cu_seqlens"].unique()
        yield batch | {"input_ids": batch["input_ids"] % 256, "labels": batch["labels"] % 256, "cu_seqlens": bounds}
    loader.close()


def gradients(net: Transformer, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    net.zero_grad()
    (sum_of_losses(net, batch).sum() / 100).backward()
    return {name: parameter.grad for name, parameter in net.named_parameters()}


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert list(found) == list(expected)
    return max((found[name] - expected[name]).abs().max().item() for name in expected)


class Calls(TorchDispatchMode):
    """Counts operators, and the largest result in elements."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.count[str(func)] += 1
        if isinstance(out, Tensor):
            self.largest = max(self.largest, out.numel())
        return out


def document_by_document(query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
    parts = []
    for start, stop in pairwise(sorted(set(bounds))):
        heads = [tensor[start:stop].transpose(0, 1)[None] for tensor in (query, key, value)]
        out = functional.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("takes_groups", [attention.TAKES_GROUPS, False])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("bounds", PACKINGS.values(), ids=PACKINGS)
def test_attention_is_that_of_documents_one_by_one(
    bounds: list[int], kv_heads: int, takes_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "TAKES_GROUPS", takes_groups)
    torch.manual_seed(0)
    inputs = [torch.randn(48, heads, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads)]
    documents = Documents(cu_seqlens=torch.tensor(bounds, dtype=torch.int32), max_seqlen=48)
    out, expected = attend(*inputs, documents), document_by_document(*inputs, list(bounds))
    assert torch.equal(out, expected)
    seed = torch.randn_like(out)
    pairs = zip(torch.autograd.grad(out, inputs, seed), torch.autograd.grad(expected, inputs, seed), strict=True)
    for found, wanted in pairs:
        torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("backend", "recompute"),
    [
        pytest.param("eager", "none", marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.soak)
            for case in product(("aot_eager", "inductor"), ("none", "selective", "full"))
        ),
    ],
)
def test_blocks_are_compiled_once_for_batches_with_different_documents(backend: str, recompute: str) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend  # takes a second in each process

    torch._dynamo.reset()
    counter: Any = CompileCounterWithBackend(backend)
    with process_group(Parallel(device="cpu")) as device:
        mesh = make_mesh(Parallel(), device)
        net = sharded_model(SHAPE, mesh, Parallel(), Compute(compile=counter, recompute=recompute))
        initialise(net, seed=0)
        eager, numbers = model(), set()
        for batch in batches(20):
            numbers.add(len(batch["cu_seqlens"]))
            found = {name: gradient.full_tensor() for name, gradient in gradients(net, batch).items()}
            assert differences(found, gradients(eager, batch)) < 1e-5
    assert counter.frame_count == 2  # both blocks, the losses, all batches; a graph break would have been an error
    assert len(numbers) > 3


@pytest.mark.parametrize(("recompute", "products"), [("none", 45), ("selective", 45), ("full", 57)])
def test_recomputed_gradients_are_the_same_bits_and_cost_the_products_that_are_not_kept(
    recompute: str, products: int
) -> None:
    """15 in the forward pass and 30 in the backward pass; full: 2 x 6 again, as nothing needs a block's last result."""
    (batch,) = batches(1)
    expected = gradients(model(), batch)
    with Calls() as calls:
        found = gradients(model(recompute=recompute), batch)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert list(found) == list(expected)
    assert calls.count["aten.mm.default"] == products
    assert calls.count["torch_attn._varlen_attn.default"] == (4 if recompute == "full" else 2)
    assert calls.count["aten.silu.default"] == (2 if recompute == "none" else 4)


@pytest.mark.parametrize("chunk", [1, 24, 63])
def test_losses_in_chunks_are_equal_and_never_have_all_logits_in_memory(chunk: int) -> None:
    (batch,) = batches(1)
    whole, chunked = model(), model(loss_chunk=chunk)
    losses = sum_of_losses(chunked, batch)
    torch.testing.assert_close(losses, sum_of_losses(whole, batch), atol=1e-6, rtol=1e-6)
    with torch.no_grad(), Calls() as calls:
        assert torch.equal(sum_of_losses(chunked, batch), losses)
    assert calls.count["aten.mm.default"] == 14 + -(-64 // chunk)  # of the forward pass alone
    expected = gradients(whole, batch)
    with Calls() as calls:
        found = gradients(chunked, batch)
    assert differences(found, expected) < 1e-6
    assert calls.largest == max(chunk * SHAPE.vocab_size, SHAPE.vocab_size * SHAPE.dim)
    assert calls.count["aten.mm.default"] == 42 + 3 * -(-64 // chunk)  # no product of the head is computed twice


def test_losses_in_chunks_give_no_gradient_if_rows_do_not_count_the_same() -> None:
    (batch,) = batches(1)
    net = model(loss_chunk=24)
    (sum_of_losses(net, batch) * torch.tensor([1.0, 1.0, 1.0, 2.0])).sum().backward()
    assert net.head.weight.grad.isnan().all()


def made(**compute: Any) -> Transformer:
    settings = resolve(configuration({"a": "a"}, Path("out"), parallel__precision="bf16") | {"compute": compute})
    model = sharded_model(SHAPE, make_mesh(settings.parallel, torch.device("cpu")), settings.parallel, settings.compute)
    initialise(model, seed=0)
    return model


def gradients_of(model: Transformer) -> dict[str, Tensor]:
    (batch,) = batches(1)
    return {name: gradient.full_tensor() for name, gradient in gradients(model, batch).items()}


def norm(tensors: Iterable[Tensor]) -> float:
    return torch.cat([tensor.float().flatten() for tensor in tensors]).norm().item()


@pytest.mark.interop
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_float8_is_near_bf16_and_changes_no_name(recipe: str) -> None:
    with process_group(Parallel(device="cpu")):
        expected = gradients_of(made())
        for options in ({}, {"compile": "aot_eager", "recompute": "selective"}):
            torch._dynamo.reset()
            model = made(float8=recipe, **options)
            assert sum(type(module).__name__ == "Float8Linear" for module in model.modules()) == 2 * 7
            found = gradients_of(model)
            assert list(found) == list(expected)
            assert 0.001 < norm(found[name] - expected[name] for name in expected) / norm(expected.values()) < 0.03
