"""``tokshard inspect``: parse, read a report, print."""

from __future__ import annotations

import json
import shutil
import sys

import click

from tokshard.cli.options import debug_option, json_option
from tokshard.inspect.documents import view_json, view_text
from tokshard.inspect.report import read_document, read_report, report_json, report_text


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--document", type=click.IntRange(min=0), metavar="N", help="Show document N, counted from 0, whole.")
@click.option(
    "--sample",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="K",
    help="Show the start of K documents, the same distance apart.",
)
@json_option
@debug_option
def inspect(corpora: tuple[str, ...], document: int | None, sample: int, as_json: bool) -> None:
    """Show what each CORPUS holds: counts, tokenizer, settings, what was left out, document lengths, some documents.

    --json prints one object per corpus, in a line.
    """
    width, encoding = shutil.get_terminal_size().columns, sys.stdout.encoding
    for number, location in enumerate(corpora):
        if number and not as_json:
            click.echo()
        if document is not None:
            view = read_document(location, document)
            click.echo(json.dumps(view_json(view)) if as_json else view_text(view))
        else:
            report = read_report(location, num_samples=sample)
            text = json.dumps(report_json(report)) if as_json else report_text(report, width=width, encoding=encoding)
            click.echo(text)
