"""The machine that is measured: what it is, and how fast it multiplies and copies. Prints one line of JSON.

python -m benchmark.gpu_machine cuda|cpu
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

PACKAGES = ("triton", "torchao", "numpy", "pyarrow", "tokenizers", "msgspec", "zstandard")


def main(arguments: list[str]) -> int:
    (device,) = arguments
    if device == "cuda" and not torch.cuda.is_available():
        sys.stdout.write(json.dumps({"problem": "this process sees no GPU"}) + "\n")
        return 0
    size, copied_bytes = (8_192, 1 << 30) if device == "cuda" else (128, 1 << 20)
    found = {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "driver": driver() if device == "cuda" else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version(name) for name in PACKAGES},
        "product_size": size,
        "product_tflops": product_tflops(size, device),
        **copy_rates(copied_bytes, device),
    }
    if device == "cuda":
        found["card_gib"] = torch.cuda.get_device_properties(0).total_memory / 2**30
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


def product_tflops(size: int, device: str) -> float:
    """The rate of a product of bf16 matrices of random numbers; zeros would need less power, and be faster."""
    left, right = (torch.randn(size, size, dtype=torch.bfloat16, device=device) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / seconds_of(lambda: torch.mm(left, right, out=out), device) / 1e12


def copy_rates(num_bytes: int, device: str) -> dict[str, float]:
    """GB/s between pinned memory and the device; without one, within memory."""
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device == "cuda").random_()
    there = torch.empty_like(host, device=device)
    copies: dict[str, Callable[[], Any]] = {
        "to_device_gb_per_second": lambda: there.copy_(host, non_blocking=True),
        "from_device_gb_per_second": lambda: host.copy_(there, non_blocking=True),
    }
    return {name: num_bytes / seconds_of(copy, device) / 1e9 for name, copy in copies.items()}


def seconds_of(work: Callable[[], Any], device: str, *, warm_up: int = 10, calls: int = 20, repeats: int = 5) -> float:
    """The median, over `repeats`, of the mean over `calls` in a row."""
    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    for _ in range(warm_up):
        work()
    took = []
    for _ in range(repeats):
        wait()
        began = time.perf_counter()
        for _ in range(calls):
            work()
        wait()
        took.append((time.perf_counter() - began) / calls)
    return statistics.median(took)


def driver() -> str | None:
    """The version of the driver; None if nvidia-smi does not say."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        lines = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.split()
        return lines[0] if lines else None
    return None


def version(package: str) -> str | None:
    """Of an installed package."""
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(package)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
