"""The speeds of a benchmark, as text for people and as plain values for ``--json``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tokshard.cli.plan_text import step_text
from tokshard.cli.tables import table
from tokshard.inspect.plan.bench import CACHED_TOKENS, DOCUMENT_TOKENS, SpeedReport
from tokshard.runtime.bytes.cache import CONNECTIONS
from tokshard.wording import aligned, counted, one_line

_BUSY = 0.5
_MAX_SHARES = 8


def speed_text(report: SpeedReport, *, gpu_tokens: int, gpu_reason: str, width: int) -> str:
    """The result of a benchmark.

    Args:
        gpu_tokens: tokens per second that one GPU consumes.
        gpu_reason: where that figure comes from.
        width: characters per line.
    """
    mix, full = report.mix, report.readings[0]
    shares = [f"{one_line(name)} {share:.1%}" for name, share in list(report.shares.items())[:_MAX_SHARES]]
    if more := len(report.shares) - len(shares):
        shares.append(f"and {more} more")
    head = [
        ("mix", ", ".join(shares)),
        ("plan", f"{step_text(mix.seq_len, mix.global_batch_size)}, seed {mix.seed}: {report.fingerprint[:12]}"),
        (
            "data",
            f"{counted(report.num_tokens, 'token')} in documents of {report.mean_document_tokens:,.0f} on average",
        ),
        ("limit", f"{_millions(report.limit)} M tokens/s, {_origin(report)}"),
    ]
    if report.store_bytes_per_second is not None:
        fetched, seconds = full.fetched, full.steps.wall_seconds
        in_memory = fetched["hits"] / max(1, fetched["hits"] + fetched["misses"])
        given = f"{report.store_bytes_per_second / 1e6:,.0f} MB/s with {CONNECTIONS} requests at once"
        taken = f"{fetched['fetched_bytes'] / seconds / 1e6:,.0f} MB/s"
        pieces = f"{in_memory:.1%} of the pieces were in memory when they were needed"
        head += [("stores", f"give {given}"), ("", f"the loader fetched {taken}; {pieces}")]
    gpus = counted(int(full.steps.tokens_per_second // gpu_tokens), "GPU")
    reason = f" ({gpu_reason})" if gpu_reason else ""
    cores = f"{report.rank_cpu_seconds * gpu_tokens * 100:.2g} % of a core"
    tail = [
        ("feeds", f"one loader process feeds {gpus} of {gpu_tokens:,} tokens/s{reason}"),
        ("", f"one loader process per GPU, each of which reads one row of a step, takes {cores}"),
        *(("note", note) for note in notes_of(report)),
    ]
    rows = table(list(_rows(report, gpu_tokens)), width=width)
    return "\n\n".join([aligned(head, width=width), rows, aligned(tail, width=width)])


def _origin(report: SpeedReport) -> str:
    if report.limit < report.memory:
        return "at which the stores deliver what the mix reads"
    return f"at which one core copies documents of {DOCUMENT_TOKENS:,} tokens from random places of memory to int64"


def _rows(report: SpeedReport, gpu_tokens: int) -> Iterator[Sequence[str]]:
    yield ("batches", "M tokens/s", "of limit", "first batch", "median step", "longest step", "GPUs")
    for reading in report.readings:
        steps, speed = reading.steps, reading.steps.tokens_per_second
        yield (
            reading.batches,
            _millions(speed),
            f"{speed / report.limit:.0%}",
            _milliseconds(reading.first_batch_seconds),
            _milliseconds(steps.median_seconds),
            f"{_milliseconds(steps.longest_seconds)} ({steps.longest_seconds / steps.median_seconds:,.0f}x)",
            f"{int(speed // gpu_tokens):,}",
        )


def _millions(speed: float) -> str:
    return f"{speed / 1e6:,.0f}" if speed >= 1e8 else f"{speed / 1e6:,.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"


def speed_json(report: SpeedReport, *, gpu_tokens: int) -> dict[str, Any]:
    """A report as plain values."""
    mix = report.mix
    return {
        "corpora": mix.corpora,
        "shares": report.shares,
        "seq_len": mix.seq_len,
        "global_batch_size": mix.global_batch_size,
        "seed": mix.seed,
        "plan": report.fingerprint,
        "tokens": report.num_tokens,
        "mean_document_tokens": report.mean_document_tokens,
        "limit_tokens_per_second": report.limit,
        "memory_tokens_per_second": report.memory,
        "store_bytes_per_second": report.store_bytes_per_second,
        "readings": [
            {
                "batches": reading.batches,
                "tokens_per_second": (speed := reading.steps.tokens_per_second),
                "of_limit": speed / report.limit,
                "first_batch_seconds": reading.first_batch_seconds,
                "median_step_seconds": reading.steps.median_seconds,
                "longest_step_seconds": reading.steps.longest_seconds,
                "gpus_fed": int(speed // gpu_tokens),
                "fetched": dict(reading.fetched),
            }
            for reading in report.readings
        ],
        "gpu_tokens_per_second": gpu_tokens,
        "cores_per_gpu": report.rank_cpu_seconds * gpu_tokens,
        "load": report.load,
        "notes": notes_of(report),
    }


def notes_of(report: SpeedReport) -> list[str]:
    """Reasons to distrust the figures, one sentence each."""
    notes = []
    if report.load >= _BUSY:
        notes.append(
            f"this machine was busy: {report.load:.0%} of its CPUs were in use before the measurement, so the speeds "
            "may be too low"
        )
    if report.num_tokens < CACHED_TOKENS:
        notes.append(
            f"{report.num_tokens:,} tokens are few: they may fit into the processor's caches, which raises the speeds, "
            "and windows end with their epoch and are made more often, which lowers them"
        )
    return notes
