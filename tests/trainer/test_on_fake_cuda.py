"""The trainer's model, loss, optimizers and batches on a `cuda` device, by fake tensors: no GPU is needed."""

from __future__ import annotations

import pytest

from tests.forks import ROOT, Forks

pytestmark = pytest.mark.timeout(300)


def check(forks: Forks, *names: str) -> None:
    said = forks.run(["python", "-m", "tests.trainer.fake_cuda", *names], ROOT, seconds=280)
    assert [line for line in said.splitlines() if line in names] == list(names)


@pytest.mark.slow
def test_shapes_dtypes_and_devices_fit_on_cuda_in_passes_steps_and_batches(forks: Forks) -> None:
    check(forks, "attention", "model", "optimizers", "expand")


@pytest.mark.soak
def test_compiled_blocks_trace_on_cuda(forks: Forks) -> None:
    check(forks, "compile")


@pytest.mark.interop
def test_float8_traces_on_cuda(forks: Forks) -> None:
    pytest.importorskip("torchao")
    check(forks, "float8")
