"""``tokshard verify``: check corpora and list their problems."""

from __future__ import annotations

import json
import time

import click

from tokshard.cli.failures import Failure, describe, show
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.progress import byte_progress
from tokshard.errors import RESTORE, CorpusError
from tokshard.inspect.verify.text import verify_text
from tokshard.inspect.verify.verification import report_json, verify_corpus
from tokshard.wording import counted


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--quick", is_flag=True, help="Only check the structure: hash no shard and read no token.")
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Number of threads.  [default: one per CPU, at most 8]"
)
@json_option
@debug_option
@click.pass_context
def verify(context: click.Context, corpora: tuple[str, ...], quick: bool, workers: int | None, as_json: bool) -> None:
    """Check every byte of each CORPUS: hashes, structure, and the rules of the format.

    Exits with 1 if a corpus is damaged or not finished. --json prints one line per corpus.
    """
    damaged, exit_code = 0, 0
    for location in corpora:
        started = time.monotonic()
        try:
            with byte_progress(f"verify {location}") as on_progress:
                report = verify_corpus(location, on_progress, is_quick=quick, workers=workers)
        except CorpusError as error:
            failure = describe(error)
            show(failure, as_json=as_json)
            exit_code = max(exit_code, failure.exit_code)
            continue
        seconds = time.monotonic() - started
        if as_json:
            click.echo(json.dumps({**report_json(report), "seconds": seconds}))
        else:
            click.echo(verify_text(report, seconds, is_quick=quick))
        damaged += not report.is_ok
    if damaged:
        failure = Failure(
            f"{damaged} of {counted(len(corpora), 'corpus', 'corpora')} {'is' if damaged == 1 else 'are'} damaged",
            RESTORE,
            1,
        )
        show(failure, as_json=False)  # the reports have said so
        exit_code = max(exit_code, failure.exit_code)
    context.exit(exit_code)
