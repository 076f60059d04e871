"""The trainer's model, loss, optimizers and batches on a `cuda` device, by fake tensors: no GPU is needed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.timeout(300)


def check(*names: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.trainer.fake_cuda", *names],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert (done.returncode, done.stdout.split()) == (0, list(names)), done.stdout + done.stderr


@pytest.mark.slow
def test_shapes_dtypes_and_devices_fit_on_cuda_in_passes_steps_and_batches() -> None:
    check("attention", "model", "optimizers", "expand")


@pytest.mark.soak
def test_compiled_blocks_trace_on_cuda() -> None:
    check("compile")


@pytest.mark.interop
def test_float8_traces_on_cuda() -> None:
    pytest.importorskip("torchao")
    check("float8")
