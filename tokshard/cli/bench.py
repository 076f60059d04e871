"""``tokshard bench``: measure how fast a plan is read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence

import click

from tokshard.cli.options import debug_option, json_option, plan_options, print_json
from tokshard.cli.plan_text import step_text
from tokshard.cli.progress import stage_progress
from tokshard.cli.sizes import FloatRange
from tokshard.cli.tables import table
from tokshard.inspect.corpus.places import trained_on
from tokshard.inspect.plan.bench import DOCUMENT_TOKENS, SpeedReport, measure_speed
from tokshard.run_files.plan_file import load_mix
from tokshard.wording import aligned, count_text, counted, one_line

DEFAULTS = {"seq_len": 4_096, "global_batch_size": 8}
"""Good enough for a measurement; for training these must be given."""

_MAX_SHARES = 8


@click.command()
@click.argument("corpus", metavar="CORPUS|MIX.TOML")
@plan_options(DEFAULTS)
@click.option(
    "--seconds",
    type=FloatRange(min=0, min_open=True, max=3600),
    default=3,
    show_default="3",
    metavar="N",
    help="Time to measure each form of batches.",
)
@json_option
@debug_option
def bench(*, corpus: str, seconds: float, as_json: bool, **of_file: int | None) -> None:
    """Measure how fast this machine reads a mix.

    Give a corpus directory, a folder of them, or a file that names corpora with weights: a mix.toml or a recipe of the
    trainer. Options override the file.

    The loader is measured with full batches, with compact batches, and as a rank that has one row of each step. The
    first is compared with a limit: the speed at which one core copies documents of 1,000 tokens from random places of
    memory to int64.

    \b
    tokshard bench shards/code
    tokshard bench mix.toml --seconds 10
    """  # noqa: D301 - click's mark for lines that are kept
    mix = load_mix(corpus, {"corpora": trained_on(corpus) or None, **of_file}, defaults=DEFAULTS)
    with stage_progress("bench") as on_stage:
        report = measure_speed(mix, seconds=seconds, on_stage=on_stage)
    if as_json:
        print_json(report)
    else:
        click.echo(_text(report, width=shutil.get_terminal_size().columns))


def _text(report: SpeedReport, *, width: int) -> str:
    """The result of a benchmark, in lines of `width` characters."""
    full = report.readings[0]
    shares = [f"{one_line(name)} {share:.1%}" for name, share in list(report.shares.items())[:_MAX_SHARES]]
    if more := len(report.shares) - len(shares):
        shares.append(f"and {more} more")
    step = step_text(report.seq_len, report.global_batch_size)
    head = [
        ("speed", f"{count_text(full.tokens_per_second)} tokens/s in one process: {full.of_limit:.0%} of the limit,"),
        ("", f"at which one core copies documents of {DOCUMENT_TOKENS:,} tokens from memory"),
        ("mix", ", ".join(shares)),
        ("plan", f"{step}, seed {report.seed}: {report.plan[:12]}"),
        ("data", f"{counted(report.tokens, 'token')} in documents of {report.mean_document_tokens:,.0f} on average"),
    ]
    rows = table(list(_rows(report)), width=width)
    tail = [("note", note) for note in report.notes]
    return "\n\n".join(filter(None, [aligned(head, width=width), rows, aligned(tail, width=width)]))


def _rows(report: SpeedReport) -> Iterator[Sequence[str]]:
    yield ("batches", "tokens/s", "first batch", "median step", "longest step")
    for reading in report.readings:
        ratio = reading.longest_step_seconds / reading.median_step_seconds
        yield (
            reading.batches,
            count_text(reading.tokens_per_second),
            _milliseconds(reading.first_batch_seconds),
            _milliseconds(reading.median_step_seconds),
            f"{_milliseconds(reading.longest_step_seconds)} ({ratio:,.0f}x)",
        )


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.2f} ms"
