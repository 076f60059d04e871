"""Linear layers in float8 through torchao, which emulates it on the CPU."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.trainer.runs import configuration
from tests.trainer.test_compute import SHAPE, batches, gradients
from tokshard.errors import UsageError
from tokshard.run_files.recipe import Parallel, resolve
from tokshard.trainer.model import Transformer, initialise
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning", "ignore::DeprecationWarning")


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


def test_float8_without_torchao_is_an_error_that_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with (
        process_group(Parallel(device="cpu")),
        pytest.raises(UsageError, match="is rowwise, and torchao") as error,
    ):
        made(float8="rowwise")
    assert error.value.hint == "pip install 'tokshard[float8]'"
