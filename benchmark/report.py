"""The table and the line of JSON that every benchmark ends with."""

import importlib.metadata
import os
import platform
import statistics
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any


def spread_of(values: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {"median": _round(statistics.median(values)), "min": _round(min(values)), "max": _round(max(values))}


def aligned(rows: Iterable[Sequence[str]], *, num_left: int) -> str:
    """Rows as columns, the first `num_left` to the left and the others to the right."""
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column < num_left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Iterable[Sequence[str]], *, num_left: int) -> str:
    """Rows, the first of which is the head, as a table that is readable as text too."""
    rows = list(rows)
    widths = [max(3, *(len(row[column]) for row in rows)) for column in range(len(rows[0]))]
    lines = [
        [cell.ljust(n) if i < num_left else cell.rjust(n) for i, (cell, n) in enumerate(zip(row, widths, strict=True))]
        for row in rows
    ]
    lines.insert(1, ["-" * n if i < num_left else "-" * (n - 1) + ":" for i, n in enumerate(widths)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


_WRITTEN = ("benchmark/results", "recipes/guides/benchmarks.md")


def commit(root: Path) -> str | None:
    """The commit that is measured, with ``-dirty`` if the code differs from it; None outside a repository.

    Results that benchmarks have written do not count as a difference.
    """
    try:
        found, changed = (
            subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()
            for arguments in (
                ["rev-parse", "--short", "HEAD"],
                ["status", "--porcelain", "--untracked-files=no", "--", ".", *(f":!{place}" for place in _WRITTEN)],
            )
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return f"{found}-dirty" if changed else found


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Of Python and of each package, None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def machine() -> dict[str, Any]:
    """What the figures depend on; no names."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.machine()


def _round(value: float) -> float:
    return float(f"{value:.5g}")
