"""What the programs of the section on growth measure: how long and with what memory a peer comes to its first rows."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def started(work: Callable[[], Any], folder: str) -> dict[str, Any]:
    """Run what comes to the first rows and returns the state that a resume needs.

    Returns:
        Seconds, CPU-seconds, the growth of the peak of memory in MB without pages of mapped files, the MB of such
        pages, the bytes of the state, and the MB that were written to the folder.
    """
    disk, memory, mapped = _bytes_below(folder), _status("VmRSS"), _status("RssFile")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the peak begins anew
    begun, cpu = time.perf_counter(), sum(os.times()[:4])
    state = work()
    mapped = max(0.0, _status("RssFile") - mapped)
    return {
        "start_seconds": time.perf_counter() - begun,
        "start_cpu_seconds": sum(os.times()[:4]) - cpu,
        "memory_mb": max(0.0, _status("VmHWM") - memory - mapped) / 1e6,
        "mapped_mb": mapped / 1e6,
        "state_bytes": len(json.dumps(state).encode()),
        "written_mb": (_bytes_below(folder) - disk) / 1e6,
    }


def _status(name: str) -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * float(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def _bytes_below(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())
