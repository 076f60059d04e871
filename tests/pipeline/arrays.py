"""Jobs of an array, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokshard.pipeline.build import ignore
from tokshard.pipeline.jobs import Job, JobResult, commit_corpus
from tokshard.pipeline.jobs import run_job as run_one
from tokshard.pipeline.options import options_of
from tokshard.pipeline.sources.iterables import as_sources

__all__ = ["commit_corpus", "run_job"]


def run_job(
    sources: Any, *, tokenizer: str | Path, out: str | Path, job_index: int = 0, num_jobs: int = 1, **options: Any
) -> JobResult:
    """Run one job of a build."""
    observer = options.pop("observer", ignore)
    job = Job(index=job_index, count=num_jobs)
    return run_one(as_sources(sources), options_of(tokenizer, out, options), job, observer)
