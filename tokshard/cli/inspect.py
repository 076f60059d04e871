"""``tokshard inspect``: show or search corpora."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click

from tokshard.cli.corpus_text import comparison_text, report_text, shard_table, token_lines
from tokshard.cli.document_text import match_text, view_text
from tokshard.cli.options import debug_option, json_option, print_json
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import COUNT, POSITIVE_COUNT
from tokshard.errors import UsageError
from tokshard.forking import cpu_count
from tokshard.format.conditions import parse_conditions
from tokshard.format.loss import kept_columns
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.documents import DocumentView, search
from tokshard.inspect.corpus.places import corpora_at
from tokshard.inspect.corpus.report import CorpusReport, read_documents, read_report
from tokshard.inspect.corpus.vocabulary import load_vocabulary
from tokshard.wording import aligned, one_line

_SAMPLES = 3
_TOKENS_OF_WORKER = 1 << 25
"""A search of fewer ends before a process more has begun."""


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option(
    "--document",
    metavar="N|ID",
    help="Show the whole of document N, counted from 0, with a bar after each token, and loss spans in \u27e6 \u27e7; "
    "where --id-field kept ids, the document with this ID, if there is one. '#N' is always number N.",
)
@click.option(
    "--sample",
    type=COUNT,
    metavar="K",
    help="Show the start of K evenly spaced documents, with a bar after each token.  "
    f"[default: {_SAMPLES}, without bars]",
)
@click.option("--plain", is_flag=True, help="Leave out the bars after tokens.")
@click.option("--grep", "pattern", metavar="TEXT", help="List the documents whose text contains TEXT.")
@click.option("--regex", is_flag=True, help="Treat TEXT as a regular expression.")
@click.option("-i", "--ignore-case", is_flag=True, help="With --grep: find upper and lower case alike.")
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="With --grep: list only documents whose kept columns meet this, as in select: lang=en, 'score>0.5', "
    "'lang in en,fr'; may be given again.",
)
@click.option(
    "--workers",
    type=POSITIVE_COUNT,
    metavar="N",
    help="With --grep: number of processes.  [default: one per CPU, if there is much to search]",
)
@click.option("--limit", type=POSITIVE_COUNT, metavar="N", help="Stop after N matching documents.  [default: list all]")
@click.option("--shards", is_flag=True, help="List every shard.")
@click.option("--full", is_flag=True, help="Count all tokens and read all document lengths, however many there are.")
@json_option
@debug_option
def inspect(
    *,
    corpora: tuple[str, ...],
    document: str | None,
    sample: int | None,
    plain: bool,
    pattern: str | None,
    regex: bool,
    ignore_case: bool,
    where: tuple[str, ...],
    workers: int | None,
    limit: int | None,
    shards: bool,
    full: bool,
    as_json: bool,
) -> None:
    """Show each CORPUS: counts, tokenizer, settings, records left out, document lengths, shards, tokens.

    CORPUS may also be the folder of a corpus with a validation split, or a folder of corpora: then it means all of
    them. Several corpora are shown side by side. Unless --full is given, token statistics come from a sample, and
    percentiles of more than 20M documents are estimates. --grep exits with 0 whatever it finds. In scripts, use --json,
    which prints one line per corpus or document.

    \b
    tokshard inspect shards/code shards/prose
    tokshard inspect shards/code --grep 'def main' --limit 5
    tokshard inspect shards/code --grep todo -i --where lang=py
    """  # noqa: D301 - click's mark for lines that are kept
    corpora = tuple(corpora_at(corpora))
    if document is not None and pattern is not None:
        raise click.UsageError("--document and --grep exclude each other.")
    of_grep = {"--regex": regex, "--ignore-case": ignore_case, "--where": where, "--workers": workers, "--limit": limit}
    if pattern is None and (given := _given(of_grep)):
        raise click.UsageError(f"{given[0]} is for --grep.")
    mode = "--grep" if pattern is not None else "--document"
    of_summary = {"--sample": sample, "--shards": shards, "--full": full, "--plain": plain and mode == "--grep"}
    if (pattern, document) != (None, None) and (given := _given(of_summary)):
        raise click.UsageError(f"{given[0]} does nothing with {mode}.")
    if pattern is not None:
        wanted = compile_pattern(pattern, is_regex=regex, is_any_case=ignore_case)
        _grep(corpora, pattern, wanted, where=where, limit=limit, workers=workers, as_json=as_json)
    elif document is not None:
        _show_document(corpora, document, with_boundaries=not plain, as_json=as_json)
    else:
        options = {"num_samples": _SAMPLES if sample is None else sample, "is_full": full}
        options["with_boundaries"] = sample is not None and not plain
        reports = [corpus_report(location, **options) for location in corpora]
        _show(reports, all_shards=shards, as_json=as_json)


def _given(options: Mapping[str, object]) -> list[str]:
    """The options that are on the command line; 0 is a value."""
    return [name for name, value in options.items() if value is not None and value is not False and value != ()]


def corpus_report(location: str, **options: Any) -> CorpusReport:
    """`read_report` of a corpus, with a progress bar.

    Raises:
        TokshardError: it is a mix, or cannot be read.
    """
    if location.endswith(".toml"):
        raise UsageError(f"{location} is a mix", hint="use tokshard plan, report or diff, or give a corpus")
    with byte_progress(f"tokens of {location}", unit="tokens") as on_progress:
        return read_report(location, on_progress=on_progress, **options)


def _show(reports: list[CorpusReport], *, all_shards: bool, as_json: bool) -> None:
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding
    if as_json:
        for report in reports:
            print_json(report.facts(all_shards=all_shards))
    elif len(reports) == 1:
        click.echo(report_text(reports[0], width=width, encoding=encoding, all_shards=all_shards))
    else:
        click.echo(comparison_text(reports, width=width))
        for report in reports:
            click.echo(f"\n{aligned([('corpus', report.directory), *token_lines(report)], width=width)}")
            if all_shards:
                click.echo(f"\n{shard_table(report.shards, num_rows=len(report.shards))}")
            for view in report.documents:
                click.echo(f"\n{view_text(view)}")


def _show_document(corpora: tuple[str, ...], document: str, *, with_boundaries: bool, as_json: bool) -> None:
    found, missing = list[tuple[str, DocumentView]](), list[UsageError]()
    for location in corpora:
        try:
            views = read_documents(location, document, with_boundaries=with_boundaries)
            found += ((location, view) for view in views)
        except UsageError as error:  # one of several corpora has it
            missing.append(error)
    if missing and not found:
        raise missing[0]
    for one in missing:
        click.echo(f"note: {one_line(one.problem)}", err=True)
    for number, (location, view) in enumerate(found):
        if as_json:
            print_json({"corpus": location}, view)
        else:
            click.echo(("\n" if number else "") + _place(location, corpora) + view_text(view, is_whole=True))


def _grep(
    corpora: tuple[str, ...],
    pattern: str,
    wanted: re.Pattern[str],
    *,
    where: tuple[str, ...],
    limit: int | None,
    workers: int | None,
    as_json: bool,
) -> None:
    normalizers, num_found, columns_of = dict[str, None](), 0, dict[str, dict[str, str]]()
    for location in corpora if where else ():
        with open_corpus(location) as corpus:
            columns_of[location] = kept_columns(corpus.manifest.columns)
    every = {name: kind for columns in columns_of.values() for name, kind in columns.items()}
    # a column may have another type in each corpus, and be missing in some
    conditions = {location: parse_conditions(where, every | columns) for location, columns in columns_of.items()}
    for location in corpora:
        with open_corpus(location) as corpus, byte_progress(f"grep {location}", unit="tokens") as on_progress:
            normalizers |= dict.fromkeys(load_vocabulary(corpus).normalizers)
            most = min(cpu_count(), 1 + corpus.num_tokens // _TOKENS_OF_WORKER)
            for match in search(
                corpus,
                wanted,
                conditions=conditions.get(location, ()),
                limit=None if limit is None else limit - num_found,
                workers=workers or most,
                on_progress=on_progress,
            ):
                num_found += 1
                if as_json:
                    print_json({"corpus": corpus.location}, match)
                else:
                    click.echo(_place(location, corpora) + match_text(match))
                if num_found == limit:
                    return
    if num_found:
        return
    those = " that meets the conditions" if where else ""
    click.echo(f"no document{those} contains {one_line(pattern)}", err=True)
    if normalizers:
        names = one_line(", ".join(normalizers))
        click.echo(f"note: text was changed before it was encoded ({names}): search for the changed text", err=True)


def _place(location: str, corpora: Sequence[str]) -> str:
    """The corpus before a document or match, if there are several."""
    return "" if len(corpora) == 1 else f"{one_line(location)}: "


def compile_pattern(pattern: str, *, is_regex: bool, is_any_case: bool) -> re.Pattern[str]:
    """The pattern of ``--grep``: plain text or a Python regular expression.

    Raises:
        UsageError: it is empty or not a valid regular expression.
    """
    if not pattern:
        raise UsageError("--grep is empty: every document contains it", hint="give a text")
    try:
        return re.compile(pattern if is_regex else re.escape(pattern), re.IGNORECASE if is_any_case else 0)
    except re.error as error:
        raise UsageError(
            f"{pattern!r} is not a regular expression: {error}", hint="leave out --regex to search for the text itself"
        ) from error


def is_mix(location: str) -> bool:
    """Whether a location is a mix, or a recipe, and not a corpus."""
    return location.endswith(".toml") or os.path.isfile(location)
