"""What people see of a build: its result, its estimate, its status; each also as JSON."""

from __future__ import annotations

import dataclasses
import shlex
from collections import Counter
from typing import Any

import msgspec

from tokshard.pipeline.estimate import Estimate
from tokshard.pipeline.job_array.stages import DUPLICATES, HASH, WRITE
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.status import COMPLETE, UNFINISHED, BuildStatus
from tokshard.wording import bytes_text, clock, count_text, counted

_SMALL_SHARE = 4
"""Shards of less than this part of ``--shard-tokens`` are explained."""
_STAGES = {"hashing": HASH, "finding duplicates": DUPLICATES, "encoding": WRITE}
"""The ``--stage`` that continues a build with ``--dedup exact``, by `BuildStatus.stage`."""


def build_lines(result: BuildResult) -> list[tuple[str, str]]:
    """What is to be said of this run, as labels and values: the directory, time and speed, and what is unusual."""
    lines = [("directory", result.directory)]
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
        "directory": result.directory,
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
            {"directory": corpus.directory, "manifest": msgspec.to_builtins(corpus.manifest)}
            for corpus in result.corpora
        ],
    }


def estimate_lines(estimate: Estimate) -> list[tuple[str, str]]:
    """The estimate as labels and values."""
    streams = f", {counted(estimate.num_streams, 'stream')} among them" if estimate.num_streams else ""
    per_token = estimate.text_bytes / max(1, estimate.tokens)
    limit = ", by --limit" if estimate.is_limited else ""
    inputs = f"{counted(estimate.num_inputs, 'file')}, {bytes_text(estimate.input_bytes)}"
    processes = "1 process" if estimate.num_workers == 1 else f"{estimate.num_workers:,} processes"
    free = "" if estimate.free_bytes is None else f", {bytes_text(estimate.free_bytes)} free"
    lines = [
        ("inputs", f"{inputs}, in {counted(estimate.num_tasks, 'task')}{streams}"),
        (
            "sample",
            f"{counted(estimate.sampled_documents, 'document')}, and {counted(estimate.sampled_bad, 'bad record')}",
        ),
        ("documents", f"about {count_text(estimate.documents)}{limit}"),
        ("tokens", f"about {count_text(estimate.tokens)}, {per_token:.2f} bytes of text each"),
        ("time", f"about {clock(estimate.seconds)} with {processes} ({estimate.cpu_seconds:.3g} CPU-seconds)"),
        ("disk", f"about {bytes_text(estimate.disk_bytes)} needed{free}"),
    ]
    if not estimate.fits:
        lines.append(("", "the disk is too small for this build"))
    lines.append(("", f"nothing was written to {estimate.directory}"))
    return lines


def estimate_json(estimate: Estimate) -> dict[str, Any]:
    """The estimate for ``--json``."""
    return {**dataclasses.asdict(estimate), "fits": estimate.fits}


def status_lines(status: BuildStatus) -> list[tuple[str, str]]:
    """The status as labels and values."""
    lines = [("directory", status.directory)]
    if status.state == COMPLETE:
        grown = f" in {status.generation + 1} generations" if status.generation else ""
        lines.append(("state", f"complete: {_written(status)}{grown}"))
    else:
        by = f" by {status.holder}" if status.holder else ""
        more = f", and {counted(status.segments_done, 'segment')} of streams" if status.segments_done else ""
        share = status.bytes_done / max(1, status.total_bytes)
        size = f" of {bytes_text(status.total_bytes)} ({min(1.0, share):.0%})"
        total = f" of {status.num_tasks:,}" if status.num_tasks else ""
        appended = f" of generation {status.generation}" if status.generation else ""
        lines += [
            ("state", f"{status.state}{by}, {status.stage}{appended}"),
            ("tasks", f"{status.tasks_done:,}{total} done{more}"),
            ("read", bytes_text(status.bytes_done) + ("" if status.read_once else size)),
            ("written", _written(status)),
            *_job_lines(status),
        ]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in status.left_out.items())
    lines.append(("left out", reasons or "nothing"))
    if status.damaged_inputs and status.state != COMPLETE:
        lines.append(("", f"{counted(status.damaged_inputs, 'damaged input')}, whole"))
    if status.config is not None and status.state != COMPLETE:
        config = msgspec.structs.asdict(status.config)
        if (copied := status.config.copied) is not None:
            asked = msgspec.structs.asdict(copied)
            config = {name: value for name, value in asked.items() if name not in {"corpora", "recipes"}}
        if status.config.reads != "text":
            config = {name: value for name, value in config.items() if not name.startswith("text_")}
        given = ", ".join(f"{name} {value}" for name, value in config.items() if value not in (None, {}))
        lines.append(("settings", given or "all documents, in order"))
    if status.state == UNFINISHED and status.read_once:
        once = ", ".join(status.read_once)
        lines.append(("continue", f"not possible: {once} can be read once only; start over with --force"))
    if status.state == UNFINISHED and status.jobs and all(job.state == "done" for job in status.jobs):
        lines.append(("next", f"tokshard build --commit {shlex.quote(status.directory)}"))
    elif status.state == UNFINISHED and status.command:
        words, num_jobs_left = _of_next_job(status)
        command = shlex.join([*status.command, *words])
        lines.append(("continue", f"cd {shlex.quote(status.working_directory)} && {command}"))
        if num_jobs_left > 1:
            lines.append(("", "and likewise each other job that is not done"))
    return lines


def _of_next_job(status: BuildStatus) -> tuple[list[str], int]:
    """The options of the job of an array that is to be run next, and how many jobs there are to run."""
    if not status.jobs:
        return [], 0
    stage = ["--stage", _STAGES[status.stage]] if status.config and status.config.dedup == "exact" else []
    if stage[1:] == [DUPLICATES]:
        return stage, 1
    left = [job for job in status.jobs if job.state != "done"]
    words = ["--job-index", str(left[0].job_index), "--num-jobs", str(left[0].num_jobs)]
    return [*stage, *words], len(left)


def _job_lines(status: BuildStatus) -> list[tuple[str, str]]:
    """How many jobs are in which state, when they will be done, and a line on each that has begun."""
    if not status.jobs:
        return []
    counts = Counter(job.state for job in status.jobs)
    left = [] if status.seconds_left is None else [f"about {clock(status.seconds_left)} left"]
    summary = ", ".join([*(f"{count:,} {state}" for state, count in counts.items()), *left])
    lines = [("jobs", f"{len(status.jobs):,}: {summary}")]
    for job in status.jobs:
        if job.state == "not begun":
            continue
        facts = [f"{job.tasks_done:,} of {counted(job.num_tasks, 'task')}", bytes_text(job.bytes_done)]
        if status.stage == "encoding":
            facts.append(counted(job.documents, "document"))
        if job.state == "running":
            facts.append(f"{bytes_text(job.bytes_per_second)}/s")
        if job.state in {"running", "stopped"}:
            facts.append(f"last heard of {clock(job.silent_seconds)} ago, {job.process}")
        lines.append(("", f"job {job.job_index}: {job.state}, {', '.join([*facts, *filter(None, [job.problem])])}"))
    return lines


def _written(status: BuildStatus) -> str:
    return f"{counted(status.documents, 'document')}, {counted(status.tokens, 'token')}"


def status_json(status: BuildStatus) -> dict[str, Any]:
    """The status for ``--json``."""
    config = None if status.config is None else msgspec.to_builtins(status.config)
    fields = {field.name: getattr(status, field.name) for field in dataclasses.fields(status)}
    jobs = [dataclasses.asdict(job) for job in status.jobs]
    return {**fields, "config": config, "command": list(status.command), "jobs": jobs}
