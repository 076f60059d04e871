"""What ``tokshard bench`` shows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tokshard.inspect.plan.limits import CACHED_TOKENS, DOCUMENT_TOKENS
from tokshard.inspect.plan.speed import ModeSpeed, SpeedReport
from tokshard.inspect.terminal import aligned, one_line, table
from tokshard.wording import counted

_MAX_SHARES = 8
_BUSY = 0.5


def speed_text(report: SpeedReport, *, gpu_tokens: int, gpu_reason: str, width: int) -> str:
    """A report as text.

    Args:
        gpu_tokens: tokens per second that one GPU consumes.
        gpu_reason: whose figure that is.
        width: characters in a line.
    """
    mix, limits = report.mix, report.limits
    steps = f"{counted(mix.seq_len, 'token')} x {counted(mix.global_batch_size, 'sample')} a step"
    gather = f"documents of {counted(limits.document_tokens, 'token')} from random places"
    head = [
        ("mix", _shares_text(report.shares)),
        ("plan", f"{steps}, seed {mix.seed}: {report.fingerprint[:12]}"),
        (
            "data",
            f"{counted(report.num_tokens, 'token')} in documents of {report.mean_document_tokens:,.0f} on average",
        ),
        ("limits", "what one core reads at most, from memory-mapped shards to int64:"),
        ("contiguous", f"{_millions(limits.contiguous)} M tokens/s, the shards one after another"),
        ("gather", f"{_millions(limits.gather)} M tokens/s, {gather}"),
    ]
    text = aligned(head, width=width) + "\n\n" + table(list(_rows(report, gpu_tokens)), width=width)
    feeds = [("feeds", _feeds_text(report, gpu_tokens, gpu_reason)), ("", _share_text(report, gpu_tokens))]
    notes = [("note", note) for note in notes_of(report)]
    return text + "\n\n" + aligned([*feeds, *notes], width=width)


def speed_json(report: SpeedReport, *, gpu_tokens: int) -> dict[str, Any]:
    """A report as plain values."""
    mix, limits = report.mix, report.limits
    return {
        "corpora": mix.corpora,
        "shares": report.shares,
        "seq_len": mix.seq_len,
        "global_batch_size": mix.global_batch_size,
        "seed": mix.seed,
        "plan": report.fingerprint,
        "tokens": report.num_tokens,
        "mean_document_tokens": report.mean_document_tokens,
        "limits": {
            "contiguous_tokens_per_second": limits.contiguous,
            "gather_tokens_per_second": limits.gather,
            "gather_document_tokens": limits.document_tokens,
        },
        "modes": [_mode_json(report, mode, gpu_tokens) for mode in report.modes],
        "gpu_tokens_per_second": gpu_tokens,
        "cores_per_gpu": report.rank_cpu_seconds * gpu_tokens,
        "load": report.load,
        "notes": notes_of(report),
    }


def notes_of(report: SpeedReport) -> list[str]:
    """What a reader of the figures has to know."""
    notes = []
    if report.load >= _BUSY:
        notes.append(
            f"this machine was busy: {report.load:.0%} of its CPUs were in use before the measurement, so that the "
            "speeds may be too low"
        )
    if report.limits.document_tokens < DOCUMENT_TOKENS:
        notes.append(
            f"no shard has {DOCUMENT_TOKENS:,} tokens in a row: the gather limit is that of documents of "
            f"{report.limits.document_tokens:,}"
        )
    if report.limit_tokens < CACHED_TOKENS:
        notes.append(
            f"{report.limit_tokens:,} tokens are few: the processor may cache them, which raises the limits, and "
            "windows end with their epoch and are made more often, which lowers the speeds"
        )
    return notes


def default_mode(report: SpeedReport) -> ModeSpeed:
    """The prefetch thread, which is what a loader uses unless it is told otherwise; else the quickest."""
    threads = [mode for mode in report.modes if mode.num_workers == 0]
    return threads[0] if threads else max(report.modes, key=lambda mode: mode.steps.tokens_per_second)


def _feeds_text(report: SpeedReport, gpu_tokens: int, gpu_reason: str) -> str:
    mode = default_mode(report)
    count = int(mode.steps.tokens_per_second // gpu_tokens)
    return f"one loader process ({mode.name}) feeds {counted(count, 'GPU')} of {gpu_tokens:,} tokens/s" + (
        f" ({gpu_reason})" if gpu_reason else ""
    )


def _share_text(report: SpeedReport, gpu_tokens: int) -> str:
    cores = report.rank_cpu_seconds * gpu_tokens
    return f"one loader process per GPU, each of which reads one row of a step, takes {cores * 100:.2g} % of a core"


def _rows(report: SpeedReport, gpu_tokens: int) -> Iterator[list[str]]:
    yield [
        "read",
        "M tokens/s",
        "of gather limit",
        "of contiguous limit",
        "first batch",
        "median step",
        "longest step",
        "GPUs",
    ]
    for mode in report.modes:
        speed = mode.steps.tokens_per_second
        yield [
            mode.name,
            _millions(speed),
            f"{speed / report.limits.gather:.0%}",
            f"{speed / report.limits.contiguous:.0%}",
            _milliseconds(mode.first_batch_seconds),
            _milliseconds(mode.steps.median_seconds),
            f"{_milliseconds(mode.steps.longest_seconds)} ({_times(mode)})",
            f"{int(speed // gpu_tokens):,}",
        ]


def _times(mode: ModeSpeed) -> str:
    return f"{mode.steps.longest_seconds / mode.steps.median_seconds:,.0f}x"


def _mode_json(report: SpeedReport, mode: ModeSpeed, gpu_tokens: int) -> dict[str, Any]:
    speed = mode.steps.tokens_per_second
    return {
        "mode": mode.name,
        "num_workers": mode.num_workers,
        "tokens_per_second": speed,
        "of_gather_limit": speed / report.limits.gather,
        "of_contiguous_limit": speed / report.limits.contiguous,
        "first_batch_seconds": mode.first_batch_seconds,
        "median_step_seconds": mode.steps.median_seconds,
        "longest_step_seconds": mode.steps.longest_seconds,
        "gpus_fed": int(speed // gpu_tokens),
    }


def _shares_text(shares: dict[str, float]) -> str:
    shown = [f"{one_line(name)} {share:.1%}" for name, share in list(shares.items())[:_MAX_SHARES]]
    more = len(shares) - len(shown)
    return ", ".join(shown) + (f", and {more} more" if more else "")


def _millions(speed: float) -> str:
    return f"{speed / 1e6:,.0f}" if speed >= 1e8 else f"{speed / 1e6:,.1f}"


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
