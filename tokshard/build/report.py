"""What a build tells its user at the end, beside what the manifest says."""

from __future__ import annotations

from typing import Any

import msgspec

from tokshard.build.pipeline import BuildResult
from tokshard.build.progress import human


def speed_text(result: BuildResult) -> str:
    """Time and speed of this run, in lines of ``label   value``."""
    lines = [("directory", str(result.directory))]
    if result.is_new:
        workers = "1 process" if result.num_workers == 1 else f"{result.num_workers} workers"
        lines.append(("time", f"{result.seconds:.1f} s with {workers}, {result.cpu_seconds:.1f} CPU-seconds"))
        if result.tokens_encoded:
            rate = result.tokens_encoded / max(result.seconds, 1e-9)
            per_core = result.tokens_encoded / max(result.cpu_seconds, 1e-9)
            lines.append(("speed", f"{human(rate)} tokens/s, {human(per_core)} tokens/s per core"))
    if result.ignored:
        counts = ", ".join(f"{count:,} x {suffix}" for suffix, count in result.ignored.items())
        lines.append(("not read", f"files of unknown format, or hidden: {counts}"))
    return "\n".join(f"{label:<12}{value}" for label, value in lines)


def build_json(result: BuildResult) -> dict[str, Any]:
    """The result for ``--json``."""
    return {
        "directory": str(result.directory),
        "is_new": result.is_new,
        "seconds": result.seconds,
        "cpu_seconds": result.cpu_seconds,
        "tokens_encoded": result.tokens_encoded,
        "workers": result.num_workers,
        "peak_worker_bytes": result.peak_worker_bytes,
        "ignored_files": dict(result.ignored),
        "notes": list(result.notes),
        "manifest": msgspec.to_builtins(result.manifest),
        "corpora": [
            {"directory": str(corpus.directory), "manifest": msgspec.to_builtins(corpus.manifest)}
            for corpus in result.corpora
        ],
    }
