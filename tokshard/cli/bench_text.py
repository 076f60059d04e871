"""The speeds of a benchmark, as text for people and as plain values for ``--json``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tokshard.cli.plan_text import step_text
from tokshard.cli.tables import table
from tokshard.inspect.plan.bench import CACHED_TOKENS, DOCUMENT_TOKENS, ModeSpeed, SpeedReport
from tokshard.inspect.plan.store_speed import StoreSpeed
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
    mix, memory = report.mix, report.memory
    shares = [f"{one_line(name)} {share:.1%}" for name, share in list(report.shares.items())[:_MAX_SHARES]]
    if more := len(report.shares) - len(shares):
        shares.append(f"and {more} more")
    gather = f"documents of {counted(memory.document_tokens, 'token')} from random places"
    head = [
        ("mix", ", ".join(shares)),
        ("plan", f"{step_text(mix.seq_len, mix.global_batch_size)}, seed {mix.seed}: {report.fingerprint[:12]}"),
        (
            "data",
            f"{counted(report.num_tokens, 'token')} in documents of {report.mean_document_tokens:,.0f} on average",
        ),
        ("limits", f"the most that one core can read, from {_origin(report)} to int64:"),
        ("contiguous", f"{_millions(memory.contiguous)} M tokens/s, one shard after another"),
        ("gather", f"{_millions(memory.gather)} M tokens/s, {gather}"),
    ]
    head += [("store" if number == 0 else "", _store_text(store)) for number, store in enumerate(report.stores)]
    cores = report.rank_cpu_seconds * gpu_tokens
    feeds = f"one loader process per GPU, each of which reads one row of a step, takes {cores * 100:.2g} % of a core"
    default = _default_mode(report)
    tail = [] if default.fetched is None else [("fetched", _fetched_text(default, default.fetched))]
    tail += [("feeds", _feeds_text(default, gpu_tokens, gpu_reason)), ("", feeds)]
    tail += [("note", note) for note in notes_of(report)]
    rows = table(list(_mode_rows(report, gpu_tokens)), width=width)
    return "\n\n".join([aligned(head, width=width), rows, aligned(tail, width=width)])


def _origin(report: SpeedReport) -> str:
    return "memory" if report.stores else "memory-mapped shards"


def _store_text(store: StoreSpeed) -> str:
    return (
        f"{store.location} gives {store.bytes_per_second / 1e6:,.0f} MB/s, {store.requests_per_second:,.0f} requests/s "
        f"of {store.request_bytes / 1e3:,.0f} kB, {store.connections} at once; alone a request takes "
        f"{_milliseconds(store.latency_seconds)}"
    )


def _fetched_text(mode: ModeSpeed, counts: Mapping[str, float]) -> str:
    """What a mode read of stores meanwhile."""
    seconds, tokens, num_bytes = mode.steps.wall_seconds, mode.steps.num_tokens, counts["fetched_bytes"]
    in_memory = counts["hits"] / max(1, counts["hits"] + counts["misses"])
    return (
        f"{mode_name(mode)}: {num_bytes / seconds / 1e6:,.0f} MB/s, {counts['requests'] / seconds:,.0f} requests/s, "
        f"{num_bytes / tokens:.2f} bytes a token; {in_memory:.1%} of the pieces were in memory when they were needed"
    )


def mode_name(mode: ModeSpeed) -> str:
    """The name of a loader mode in tables and JSON."""
    if mode.num_workers is None:
        return "in process"
    return "thread" if mode.num_workers == 0 else counted(mode.num_workers, "worker")


def _default_mode(report: SpeedReport) -> ModeSpeed:
    """The prefetch thread, which is the loader's default; if it was not measured, the fastest mode."""
    threads = [mode for mode in report.modes if mode.num_workers == 0]
    return threads[0] if threads else max(report.modes, key=lambda mode: mode.steps.tokens_per_second)


def _feeds_text(mode: ModeSpeed, gpu_tokens: int, gpu_reason: str) -> str:
    gpus = counted(int(mode.steps.tokens_per_second // gpu_tokens), "GPU")
    reason = f" ({gpu_reason})" if gpu_reason else ""
    return f"one loader process ({mode_name(mode)}) feeds {gpus} of {gpu_tokens:,} tokens/s{reason}"


def _mode_rows(report: SpeedReport, gpu_tokens: int) -> Iterator[Sequence[str]]:
    limits = ("of gather limit", "of contiguous limit")
    yield ("mode", "M tokens/s", *limits, "first batch", "median step", "longest step", "GPUs")
    for mode in report.modes:
        steps, speed = mode.steps, mode.steps.tokens_per_second
        yield (
            mode_name(mode),
            _millions(speed),
            f"{speed / report.memory.gather:.0%}",
            f"{speed / report.memory.contiguous:.0%}",
            _milliseconds(mode.first_batch_seconds),
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
    mix, memory = report.mix, report.memory
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
            "contiguous_tokens_per_second": memory.contiguous,
            "gather_tokens_per_second": memory.gather,
            "gather_document_tokens": memory.document_tokens,
        },
        "stores": [dataclasses.asdict(store) for store in report.stores],
        "modes": [
            {
                "mode": mode_name(mode),
                "num_workers": mode.num_workers,
                "tokens_per_second": (speed := mode.steps.tokens_per_second),
                "of_gather_limit": speed / memory.gather,
                "of_contiguous_limit": speed / memory.contiguous,
                "first_batch_seconds": mode.first_batch_seconds,
                "median_step_seconds": mode.steps.median_seconds,
                "longest_step_seconds": mode.steps.longest_seconds,
                "gpus_fed": int(speed // gpu_tokens),
                "fetched": None if mode.fetched is None else dict(mode.fetched),
            }
            for mode in report.modes
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
    if report.memory.document_tokens < DOCUMENT_TOKENS:
        notes.append(
            f"no shard has {DOCUMENT_TOKENS:,} tokens in a row: the gather limit is that of documents of "
            f"{report.memory.document_tokens:,}"
        )
    if report.memory_tokens < CACHED_TOKENS:
        notes.append(
            f"{report.memory_tokens:,} tokens are few: they may fit into the processor's caches, which raises the "
            "limits, and windows end with their epoch and are made more often, which lowers the speeds"
        )
    return notes
