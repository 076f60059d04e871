"""What a build tells its user at the end, beside what the manifest says."""

from __future__ import annotations

from typing import Any

import msgspec

from tokshard.pipeline.result import BuildResult
from tokshard.wording import bytes_text, count_text

_SMALL_SHARE = 4
"""Shards of less than this part of ``--shard-tokens`` are explained."""


def build_lines(result: BuildResult) -> list[tuple[str, str]]:
    """What is to be said of this run, as labels and values: the directory, time and speed, and what is unusual."""
    lines = [("directory", str(result.directory))]
    if result.normalizer is not None:
        lines.append(("normalizer", f"{result.normalizer}: text is changed before it is encoded"))
    lines += _shard_lines(result)
    if result.is_new:
        processes = "1 process" if result.num_workers == 1 else f"{result.num_workers} processes"
        lines.append(("time", f"{result.seconds:.1f} s with {processes}, {result.cpu_seconds:.1f} CPU-seconds"))
        if result.tokens_encoded:
            rate = count_text(result.tokens_encoded / max(result.seconds, 1e-9))
            per_second = count_text(result.tokens_encoded / max(result.cpu_seconds, 1e-9))
            lines.append(("speed", f"{rate} tokens/s with {processes}, {per_second} per CPU-second"))
    if result.ignored:
        counts = ", ".join(f"{count:,} x {suffix}" for suffix, count in result.ignored.items())
        lines.append(("not read", f"files of unknown format, or hidden: {counts}"))
    return [*lines, *(("warning", warning) for warning in result.warnings)]


def _shard_lines(result: BuildResult) -> list[tuple[str, str]]:
    """Why there are many small shards, if there are."""
    found = result.manifest
    if found.num_shards < 2 or found.num_tokens * _SMALL_SHARE > found.num_shards * found.build.shard_tokens:
        return []
    mean, task = count_text(found.num_tokens / found.num_shards), bytes_text(found.build.task_bytes)
    return [("shards", f"{mean} tokens each, because a shard ends with its task of {task} of input (--task-bytes)")]


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
        "warnings": list(result.warnings),
        "normalizer": result.normalizer,
        "manifest": msgspec.to_builtins(result.manifest),
        "corpora": [
            {"directory": str(corpus.directory), "manifest": msgspec.to_builtins(corpus.manifest)}
            for corpus in result.corpora
        ],
    }
