"""``tokshard verify``: check corpora and list their problems."""

from __future__ import annotations

import re
import time

import click

from tokshard.cli.failures import Failure, describe, show
from tokshard.cli.options import debug_option, json_option, print_json
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import POSITIVE_COUNT
from tokshard.errors import CorpusError
from tokshard.inspect.corpus.places import corpora_at, with_cells
from tokshard.inspect.verify.verification import VerifyReport, base_of, verify_corpus
from tokshard.wording import bytes_text, counted, one_line

_SHA256 = re.compile("([0-9a-f]{12})[0-9a-f]{52}")


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--quick", is_flag=True, help="Only check the structure: hash no shard and read no token.")
@click.option(
    "--workers", type=POSITIVE_COUNT, metavar="N", help="Number of threads.  [default: one per CPU, at most 8]"
)
@click.option("--base", is_flag=True, help="Of a view, check the corpus that it is of, too.")
@json_option
@debug_option
@click.pass_context
def verify(
    context: click.Context, /, corpora: tuple[str, ...], *, quick: bool, workers: int | None, base: bool, as_json: bool
) -> None:
    """Check every byte of each CORPUS: hashes, structure, and the rules of the format.

    CORPUS may also be the folder of a corpus with a validation split, or a folder of corpora; the cells of a view are
    checked, too. Exits with 1 if a corpus is damaged or not finished, with 2 if there is none. --json prints one line
    per corpus.
    """
    corpora = tuple(dict.fromkeys(with_cells(corpora_at(corpora))))
    if base:
        corpora = tuple(dict.fromkeys((*corpora, *filter(None, map(base_of, corpora)))))
    damaged, exit_code, hints = 0, 0, dict[str, None]()
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
            print_json({"ok": report.is_ok}, report, seconds=seconds)
        else:
            click.echo(_text(report, seconds, is_quick=quick))
        damaged += not report.is_ok
        hints.update((problem.hint, None) for problem in report.problems)
    if damaged:
        failure = Failure(
            f"{damaged} of {counted(len(corpora), 'corpus', 'corpora')} {'is' if damaged == 1 else 'are'} damaged",
            "; ".join(hints),
            1,
        )
        show(failure, as_json=False)  # the reports have said so
        exit_code = max(exit_code, failure.exit_code)
    context.exit(exit_code)


def _text(report: VerifyReport, seconds: float, *, is_quick: bool) -> str:
    """One line for a corpus without problems, otherwise one line per problem."""
    directory = one_line(report.directory)
    if not report.is_ok:
        lines = [f"damaged: {directory}: {counted(len(report.problems), 'problem')}"]
        problems = (f"  {one_line(one.file)} {one_line(one.message)}" for one in report.problems)
        return "\n".join([*lines, *(_SHA256.sub(r"\1...", problem) for problem in problems)])
    counts = [
        counted(report.num_documents, "document"),
        counted(report.num_tokens, "token"),
        counted(report.num_shards, "shard"),
    ]
    if report.num_generations > 1:
        counts.append(counted(report.num_generations, "generation"))
    verdict = "structure ok" if is_quick else "ok"
    size = f"{bytes_text(report.checked_bytes)} checked"
    if seconds >= 1:  # else most of the time is the start of threads
        size += f" at {bytes_text(report.checked_bytes / seconds)}/s"
    return f"{verdict}: {directory}: {', '.join(counts)}, {size}"
