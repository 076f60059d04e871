"""``build-report.json``: what may differ between two builds of one corpus, such as times, machine, absolute paths."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from tokshard import __version__
from tokshard.pipeline.resolve import ResolvedBuild
from tokshard.pipeline.result import BuildResult

_MAX_LISTED_SOURCES = 10_000
"""With more sources, the report has a hash of their versions instead of a list."""

_LISTED = ("argument", "path", "location", "num_bytes", "version")


def build_report(resolved: ResolvedBuild, result: BuildResult, bad_inputs: Mapping[int, str]) -> dict[str, Any]:
    """The report of a build.

    Args:
        bad_inputs: index of each input that was left out whole, and what is wrong with it.
    """
    settings, inputs = resolved.settings, resolved.found.inputs
    report = {
        "tokshard": __version__,
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "host": platform.node(),
        "python": platform.python_version(),
        "pyarrow": pa.__version__,
        "seconds": round(result.seconds, 3),
        "cpu_seconds": round(result.cpu_seconds, 3),
        "workers": result.num_workers,
        "peak_worker_bytes": result.peak_worker_bytes,
        "tokens_encoded": result.tokens_encoded,
        "on_bad_record": settings.on_bad_record,
        "on_bad_source": settings.on_bad_source,
        "damaged_inputs": {inputs[index].location: problem for index, problem in sorted(bad_inputs.items())},
        "ignored_files": dict(resolved.found.ignored),
        "notes": list(result.notes),
        "roots": settings.sources.roots,
    }
    if len(settings.sources) > _MAX_LISTED_SOURCES:
        versions = settings.sources.versions_sha256
        return {**report, "sources": [], "num_sources": len(settings.sources), "source_times_sha256": versions}
    return {**report, "sources": [{name: getattr(input_, name) for name in _LISTED} for input_ in settings.sources]}
