"""The run of a build, import or copy after its options are parsed: an estimate, a job, or all of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tokshard.cli.build_progress import BuildDisplay
from tokshard.cli.build_text import build_lines, estimate_lines, job_lines
from tokshard.cli.corpus_text import brief_text, summary_text
from tokshard.cli.job_array import job_of
from tokshard.cli.options import print_json
from tokshard.cli.recipe import CorpusRequest, one_corpus
from tokshard.cli.tables import table
from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.format.tables import read_sources
from tokshard.pipeline.build import run_build
from tokshard.pipeline.estimate import estimate_build
from tokshard.pipeline.executors.worker import restoring_environment
from tokshard.pipeline.jobs import Job, run_job
from tokshard.pipeline.options import DOCUMENTS, TOKENS, VIEW, options_of
from tokshard.pipeline.progress import BuildResult
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.views import CellSize, preview_cells
from tokshard.pipeline.workspace.receipts import progress_of
from tokshard.run_files.strict_toml import read_toml
from tokshard.store import is_uri, joined_location, open_store, present
from tokshard.wording import aligned, one_line

_RUN_OPTIONS = ("as_json", "dry_run", "job_index", "num_jobs", "quiet", "verbose")
"""Options of the command line that say nothing of the corpus."""

_SAMPLE_TOKENS = 32


def run_all(context: click.Context, requests: Sequence[CorpusRequest], *, reads: str, are_cells: bool = False) -> None:
    """Build corpora one after another, or estimate them, or run a job of one; print the result.

    Args:
        are_cells: there may be hundreds of them: by default one table shows all.

    Raises:
        UsageError: options contradict each other.
    """
    given = {name: context.params.get(name) for name in _RUN_OPTIONS}
    is_recipe = bool(requests[0].name)
    as_table = are_cells and not (given["as_json"] or given["verbose"] or given["dry_run"])
    done_cells = [("cell", "documents", "tokens")]
    job = _job(given, are_several=len(requests) > 1 or are_cells)
    is_possible = True
    display = BuildDisplay(is_quiet=bool(given["quiet"]), is_verbose=bool(given["verbose"]))
    for number, request in enumerate(requests):
        if is_recipe and not given["as_json"] and not as_table:
            click.echo(f"{'' if not number else chr(10)}{one_line(request.name)}")
        options = {name: value for name, value in request.options.items() if name not in _RUN_OPTIONS}
        tokenizer, out = options.pop("tokenizer", ""), options.pop("out")
        asked = options_of(tokenizer, out, {**options, "reads": reads})
        with restoring_environment():
            if given["dry_run"] and reads == VIEW:
                cells = preview_cells(resolve(request.sources, asked)[0])
                rows = [("view", "documents", "tokens"), *_cell_rows(asked.out, cells)]
                if given["as_json"]:
                    print_json({"cells": cells})
                else:
                    click.echo(f"{table(rows, width=None)}\n\ndry run: nothing was written to {one_line(asked.out)}")
            elif given["dry_run"]:
                estimate = estimate_build(request.sources, asked)
                display.say_speed(reads, estimate.input_bytes)
                _show(estimate_lines(estimate), given, estimate)
                is_possible = is_possible and estimate.refused is None
            elif job is not None:
                done = run_job(request.sources, asked, job, display)
                facts = {"directory": done.directory, "is_new": done.is_new, "seconds": done.seconds}
                _show(job_lines(done), given, facts, progress_of(done.written), tasks=len(done.receipts))
            else:
                result = run_build(list(request.sources), asked, display)
                if as_table:
                    (made,) = (corpus.manifest for corpus in result.corpora)
                    done_cells.append((one_line(request.name), f"{made.num_documents:,}", f"{made.num_tokens:,}"))
                    continue
                show_result(
                    result,
                    display,
                    as_json=bool(given["as_json"]),
                    is_verbose=bool(given["verbose"]),
                    more=_sample(result) if reads == TOKENS else {},
                )
    if as_table:
        click.echo(table(done_cells, width=None))
    if not is_possible:
        context.exit(1)


def copy_cells(context: click.Context, folders: Sequence[str], options: Mapping[str, Any]) -> None:
    """Copy each cell of a folder of cells, and then their mix, whose paths hold in the copy, too.

    Raises:
        UsageError: there is not one folder, it has no mix of cells, the mix names a corpus elsewhere, or an option
            cannot be for cells.
    """
    if len(folders) != 1:
        raise UsageError(f"--cells copies one folder of cells, and {len(folders)} are given", hint="copy each alone")
    if options["validation_fraction"] is not None:
        raise UsageError(
            "--validation-fraction would divide each cell, and a mix of cells names whole ones",
            hint="copy the corpus with --validation-fraction, and divide its parts with 'tokshard select --by'",
        )
    source, out = open_store(folders[0]), open_store(one_corpus(folders, options).options["out"])
    try:
        mix = source.get(names.MIX)
    except OSError as error:
        raise UsageError(
            f"{folders[0]} is not a folder of cells: {names.MIX} cannot be read: {error.strerror or error}",
            hint="leave out --cells, or divide a corpus with 'tokshard select CORPUS --by COLUMN'",
        ) from error
    cells = _cells(source.where(names.MIX))
    requests = [
        one_corpus([joined_location(folders[0], cell)], {**options, "out": out.where(cell)}, name=cell)
        for cell in cells
    ]
    run_all(context, requests, reads=DOCUMENTS, are_cells=True)
    if options["dry_run"]:
        return
    if options["force"] or names.MIX not in present(out):
        out.put(names.MIX, mix)
    elif out.get(names.MIX) != mix:  # it may have been edited
        click.echo(f"note: kept {out.where(names.MIX)}, although it differs from the one in {folders[0]}", err=True)


def _cells(mix: str) -> list[str]:
    """The cells of a mix. A folder may lack one that was not uploaded, and a web server lists nothing."""
    found = []
    corpora = read_toml(mix, hint="make the cells again").get("corpora")
    for cell in corpora.values() if isinstance(corpora, Mapping) else [corpora]:
        if not isinstance(cell, str) or is_uri(cell) or os.path.isabs(cell) or os.pardir in cell.split("/"):
            raise UsageError(
                f"{mix} names {cell}, expected a cell in its folder",
                hint="give a folder with the mix.toml that 'tokshard select --by' wrote",
            )
        found.append(cell)
    return found


def _cell_rows(out: str, cells: Sequence[CellSize]) -> list[tuple[str, str, str]]:
    places = (os.path.join(out, cell.folder) if cell.folder else out for cell in cells)
    return [
        (one_line(place), f"{cell.documents:,}", f"{cell.tokens:,}") for place, cell in zip(places, cells, strict=True)
    ]


def _sample(result: BuildResult) -> dict[str, str]:
    """The start of the first document of an import as text, in which a wrong tokenizer shows."""
    # all appended documents may go into one part of a split
    directory = next(corpus.directory for corpus in result.corpora if corpus.manifest.num_documents)
    with open_corpus(directory) as corpus:
        return {"begins": corpus.decode(corpus.document(0)[:_SAMPLE_TOKENS])}


def _job(given: Mapping[str, Any], *, are_several: bool) -> Job | None:
    job = job_of(given["job_index"], given["num_jobs"])
    if job is not None and (are_several or given["dry_run"]):
        other = "--dry-run" if given["dry_run"] else "a command for several corpora"
        raise UsageError(f"{other} cannot be divided among jobs", hint="leave out --job-index and --num-jobs")
    return job


def _show(lines: list[tuple[str, str]], given: Mapping[str, Any], *values: Any, **more: Any) -> None:
    if given["as_json"]:
        print_json(*values, **more)
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
        print_json(result, **more)
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
