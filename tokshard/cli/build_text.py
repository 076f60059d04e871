"""The result of a build, its estimate and its status, in lines for people."""

from __future__ import annotations

import os
import shlex

from tokshard.format import names
from tokshard.pipeline.estimate import Estimate
from tokshard.pipeline.jobs import JobResult
from tokshard.pipeline.progress import BuildResult
from tokshard.pipeline.status import COMPLETE, UNFINISHED, BuildStatus
from tokshard.pipeline.workspace.receipts import progress_of
from tokshard.wording import as_typed_bytes, bytes_text, clock, count_text, counted

_MANY_SHARDS, _SMALL_SHARE = 1_000, 4
"""So many shards of less than this part of ``--shard-tokens`` are explained."""


def build_lines(result: BuildResult) -> list[tuple[str, str]]:
    """The facts of this run, as labels and values: the directory, time and speed, and anything unusual."""
    lines = [("directory", result.directory)]
    if (selected := result.manifest.build.selected) is not None and selected.by:
        mix = os.path.join(result.directory, names.MIX)
        lines.append(("cells", f"by {', '.join(selected.by)}, each a corpus of the mix {mix}"))
    if result.normalizer is not None:
        lines.append(("normalizer", f"{result.normalizer}: text is changed before it is encoded"))
    lines += _shard_lines(result)
    if result.is_new:
        processes = counted(max(1, result.num_workers), "process", "processes")
        speed = ""
        if result.tokens_written and result.seconds >= 1:  # else most of the time is the start of processes
            rate = count_text(result.tokens_written / result.seconds)
            speed = (
                f", {rate} tokens/s, {count_text(result.tokens_written / max(result.cpu_seconds, 1e-9))} per CPU-second"
            )
        lines.append(("time", f"{result.seconds:.1f} s with {processes}{speed}"))
    if result.ignored:
        counts = ", ".join(f"{count:,} x {suffix}" for suffix, count in result.ignored.items())
        lines.append(("not read", f"files of unknown format, or hidden: {counts}"))
    return [*lines, *(("warning", warning) for warning in result.warnings)]


def _shard_lines(result: BuildResult) -> list[tuple[str, str]]:
    """Why there are many small shards, if there are."""
    found = result.manifest
    if found.num_shards < _MANY_SHARDS or found.num_tokens * _SMALL_SHARE > found.num_shards * found.build.shard_tokens:
        return []
    mean, task = count_text(found.num_tokens / found.num_shards), as_typed_bytes(found.build.task_bytes)
    return [("shards", f"{mean} tokens each, because a shard ends with its task: see --task-bytes {task}")]


def estimate_lines(estimate: Estimate) -> list[tuple[str, str]]:
    """The estimate as labels and values."""
    streams = f", {counted(estimate.num_streams, 'stream')} among them" if estimate.num_streams else ""
    of_text = f", {estimate.text_bytes / max(1, estimate.tokens):.2f} bytes of text each" if estimate.text_bytes else ""
    bad = f", and {counted(estimate.sampled_bad, 'bad record')}" if estimate.sampled_bad else ""
    limit = ", by --max-documents" if estimate.is_limited else ""
    inputs = f"{counted(estimate.num_inputs, 'file')}, {bytes_text(estimate.input_bytes)}"
    processes = counted(estimate.num_workers, "process", "processes")
    free = "" if estimate.free_bytes is None else f", {bytes_text(estimate.free_bytes)} free"
    lines = [
        ("inputs", f"{inputs}, in {counted(estimate.num_tasks, 'task')}{streams}"),
        ("sample", f"{counted(estimate.sampled_documents, 'document')}{bad}"),
        ("documents", f"about {count_text(estimate.documents)}{limit}"),
        ("tokens", f"about {count_text(estimate.tokens)}{of_text}"),
        ("time", f"{_about(estimate.seconds)} with {processes}"),
        ("disk", f"about {bytes_text(estimate.disk_bytes)} needed{free}"),
    ]
    if estimate.refused:
        lines.insert(0, ("refused", estimate.refused))
    return [*lines, ("dry run", f"nothing was written to {estimate.directory}")]


def _about(seconds: float) -> str:
    return f"about {clock(seconds)}" if seconds >= 1 else "under a second"


def job_lines(result: JobResult) -> list[tuple[str, str]]:
    """The work of a job, as labels and values."""
    if not result.is_new:
        return [("directory", result.directory), ("state", "complete: nothing to do")]
    total = progress_of(result.written)
    return [
        ("directory", result.directory),
        ("done", f"{counted(len(result.receipts), 'task')} in this run"),
        ("written", f"{counted(total.documents, 'document')}, {counted(total.tokens, 'token')}"),
        ("time", f"{result.seconds:.1f} s"),
        ("next", f"when all jobs are done, tokshard commit {shlex.quote(result.directory)}"),
    ]


def status_lines(status: BuildStatus) -> list[tuple[str, str]]:
    """The status as labels and values."""
    lines = [("directory", status.directory)]
    if status.state == COMPLETE:
        grown = f" in {status.generation + 1} generations" if status.generation else ""
        lines.append(("state", f"complete: {_written(status)}{grown}"))
    else:
        passes = f", pass {status.passes_done + 1} of {status.passes}" if status.passes > 1 else ""
        appended = f" of generation {status.generation}" if status.generation else ""
        doing = f", {status.stage}{appended}{passes}"
        if status.is_built:
            doing = f": all tasks{appended} are done, and the corpus is not published yet"
        more = f", and {counted(status.segments_done, 'segment')} of streams" if status.segments_done else ""
        failed = f"; {counted(status.failed, 'failed task')} to try again" if status.failed else ""
        of_what = " of all passes" if status.passes > 1 else ""
        share = f" of {bytes_text(status.total_bytes)} ({_share(status):.0%}{of_what})"
        total = f" of {status.num_tasks:,}" if status.num_tasks else ""
        lines += [
            ("state", status.state + doing),
            *(("", holder) for holder in status.holders),
            ("tasks", f"{status.tasks_done:,}{total} done{more}{failed}"),
            ("read", bytes_text(status.bytes_done) + share),
            ("written", _written(status)),
        ]
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in status.left_out.items())
    lines.append(("left out", reasons or "nothing"))
    if status.damaged_inputs and status.state != COMPLETE:
        lines.append(("", f"{counted(status.damaged_inputs, 'damaged input')}, whole"))
    if status.is_built:
        lines.append(("next", f"tokshard commit {shlex.quote(status.directory)}"))
    elif status.state == UNFINISHED and not status.command:
        lines.append(("continue", "run the Python program again: the build reads an iterable of it"))
    elif status.state == UNFINISHED:
        lines.append(("continue", f"cd {shlex.quote(status.working_directory)} && {shlex.join(status.command)}"))
        if "--num-jobs" in status.command:
            lines.append(("", f"with any job number, then tokshard commit {shlex.quote(status.directory)}"))
    return lines


def _share(status: BuildStatus) -> float:
    """The finished part of all passes over the inputs."""
    this_pass = min(1.0, status.bytes_done / max(1, status.total_bytes))
    return min(1.0, (status.passes_done + this_pass) / status.passes)


def _written(status: BuildStatus) -> str:
    return f"{counted(status.documents, 'document')}, {counted(status.tokens, 'token')}"
