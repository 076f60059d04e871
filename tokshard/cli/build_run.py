"""What ``tokshard build``, ``import`` and ``copy`` do once their options are parsed: estimate, run a job, or build."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from tokshard.cli.build_progress import BuildDisplay
from tokshard.cli.build_text import build_json, build_lines, estimate_json, estimate_lines, job_json, job_lines
from tokshard.cli.corpus_text import brief_text, summary_text
from tokshard.cli.job_array import job_of
from tokshard.cli.recipe import CorpusRequest
from tokshard.errors import UsageError
from tokshard.format.source_table import read_sources
from tokshard.pipeline.build import options_of, run_build
from tokshard.pipeline.commit import BuildResult
from tokshard.pipeline.estimate import estimate_build
from tokshard.pipeline.executors.worker import leaving_the_program_alone
from tokshard.pipeline.jobs import Job, run_job
from tokshard.store import open_store
from tokshard.wording import aligned, one_line

_RUN_OPTIONS = ("as_json", "dry_run", "job_index", "num_jobs", "quiet", "verbose")
"""Options of the command line that say nothing of the corpus."""

MoreLines = Callable[[BuildResult], Mapping[str, str]]
"""What else a command says of a result, as labels and values."""


def run_all(
    context: click.Context, requests: Sequence[CorpusRequest], *, reads: str, more: MoreLines = lambda _: {}
) -> None:
    """Build corpora one after another, or estimate them, or run a job of one; print the result.

    Raises:
        UsageError: options contradict each other.
    """
    given = {name: context.params.get(name) for name in _RUN_OPTIONS}
    is_recipe = bool(requests[0].name)
    job = _job(given, is_recipe=is_recipe)
    fits = True
    display = BuildDisplay(is_quiet=bool(given["quiet"]), is_verbose=bool(given["verbose"]))
    for number, request in enumerate(requests):
        if is_recipe and not given["as_json"]:
            click.echo(f"{'' if not number else chr(10)}{one_line(request.name)}")
        options = {name: value for name, value in request.options.items() if name not in _RUN_OPTIONS}
        tokenizer, out = options.pop("tokenizer", ""), options.pop("out")
        asked = options_of(tokenizer, out, {**options, "reads": reads})
        with leaving_the_program_alone():
            if given["dry_run"]:
                estimate = estimate_build(request.sources, asked)
                display.say_speed(reads, estimate.input_bytes)
                _show(estimate_lines(estimate), estimate_json(estimate), given)
                fits = fits and estimate.fits
            elif job is not None:
                done = run_job(request.sources, asked, job, display)
                _show(job_lines(done), job_json(done), given)
            else:
                result = run_build(list(request.sources), asked, display)
                show_result(
                    result,
                    display,
                    as_json=bool(given["as_json"]),
                    is_verbose=bool(given["verbose"]),
                    more=more(result),
                )
    if not fits:
        context.exit(1)


def _job(given: Mapping[str, Any], *, is_recipe: bool) -> Job | None:
    job = job_of(given["job_index"], given["num_jobs"])
    if job is not None and (is_recipe or given["dry_run"]):
        other = "--dry-run" if given["dry_run"] else "a recipe"
        raise UsageError(f"{other} cannot be divided among jobs", hint="leave out --job-index and --num-jobs")
    return job


def _show(lines: list[tuple[str, str]], value: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    if given["as_json"]:
        click.echo(json.dumps(value))
    else:
        click.echo(aligned(lines, width=shutil.get_terminal_size().columns))


def show_result(
    result: BuildResult,
    display: BuildDisplay,
    *,
    as_json: bool,
    is_verbose: bool = False,
    more: Mapping[str, str] | None = None,
) -> None:
    """Print a result: a short summary, the whole one (`is_verbose`), or JSON. Warnings and notes go to stderr."""
    more = more or {}
    if as_json:
        for warning in result.warnings:
            click.echo(f"warning: {one_line(warning)}", err=True)
        click.echo(json.dumps({**build_json(result), **more}))
        return
    for note in result.notes:
        if note not in display.notes:
            click.echo(f"note: {one_line(note)}", err=True)
    width = shutil.get_terminal_size().columns
    lines = [] if result.is_new else [f"nothing to do: {one_line(result.directory)} is complete"]
    if is_verbose:
        for corpus in result.corpora:
            counts = read_sources(open_store(corpus.directory), corpus.manifest)
            if len(result.corpora) > 1:
                lines.append(aligned([("corpus", corpus.directory)], width=width))
            lines.append(summary_text(corpus.manifest, counts, width=width))
    else:
        lines.append(brief_text([corpus.manifest for corpus in result.corpora], width=width))
    click.echo("\n".join([*lines, aligned([*build_lines(result), *more.items()], width=width)]))
