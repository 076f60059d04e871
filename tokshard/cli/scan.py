"""``tokshard scan``: find documents that contain items of benchmarks, or that are on a list."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
from click.core import ParameterSource
from numpy.typing import NDArray

from tokshard.cli.options import debug_option, json_line, json_option
from tokshard.cli.output_file import OutputFile, is_stdout, output_file
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import POSITIVE_COUNT
from tokshard.cli.tables import shorten, table
from tokshard.errors import UsageError
from tokshard.forking import cpu_count
from tokshard.format.corpus import Corpus
from tokshard.format.decode import read_tokenizer
from tokshard.format.document_list import find_listed
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.scan import (
    Benchmarks,
    Encode,
    ScanReport,
    SharedItems,
    Tally,
    read_benchmarks,
    scan_corpus,
)
from tokshard.pipeline.encode.encoder import Encoder, EncodingError
from tokshard.pipeline.sources.chats import COMPLETION, MESSAGES, PROMPT, TURNS
from tokshard.wording import counted, one_line

_DEFAULT_NGRAM = 13
_SHOWN_ITEMS = 10
_NAME_WIDTH = 50
_TEXT = "text"
_CONVERSATION = (MESSAGES, TURNS, PROMPT, COMPLETION)
"""Fields of an item that has no text: those that ``build --chat`` reads."""
_OF_ITEMS = ("fields", "ngram", "workers")
"""Parameters that say how items of a benchmark are read and compared."""


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option(
    "--against",
    multiple=True,
    metavar="FILE",
    help="A benchmark: JSON lines, csv, tsv or parquet, or a text with an item in each line; may be given again.",
)
@click.option(
    "--text-field",
    "fields",
    multiple=True,
    metavar="FIELD",
    help="Field of an item that holds a text, or texts at any depth, such as choices or messages.content; may be given "
    "again.  [default: text, or the conversation]",
)
@click.option(
    "--ngram",
    type=click.IntRange(min=2, max=1024),
    default=_DEFAULT_NGRAM,
    show_default=True,
    metavar="N",
    help="Tokens in a row that a document has to share with an item.",
)
@click.option("--ids", metavar="FILE", help="In place of --against: find the documents that FILE lists by their ids.")
@click.option(
    "--out", metavar="FILE", help="Write a line of JSON for each document found, as select --drop-ids takes it."
)
@click.option("--numbers", metavar="FILE", help="Write the number of each document found, as loader.mask takes it.")
@click.option("--workers", type=POSITIVE_COUNT, metavar="N", help="Number of processes.  [default: one per CPU]")
@json_option
@debug_option
def scan(
    *,
    corpora: tuple[str, ...],
    against: tuple[str, ...],
    fields: tuple[str, ...],
    ngram: int,
    ids: str | None,
    out: str | None,
    numbers: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Find the documents of each CORPUS that share N tokens in a row with an item of a benchmark, or are on a list.

    Items are encoded with the tokenizer of the corpus. Matches are exact: tokens are compared, not only hashes.
    Items of fewer than N tokens are not scanned, only counted.

    \b
    tokshard scan shards/web --against evals.jsonl --text-field question --out leaked.jsonl
    tokshard select shards/web --out views/clean --drop-ids leaked.jsonl
    tokshard scan shards/web --ids opted-out.txt --numbers opted-out-numbers.txt
    """  # noqa: D301 - click's mark for lines that are kept
    if bool(against) == (ids is not None):
        problem = "--against and --ids exclude each other" if against else "scan needs something to find"
        raise UsageError(problem, hint="give either --against FILE, or --ids FILE")
    if ids is not None and (ignored := [name for name in _OF_ITEMS if _is_given(name)]):
        option = "--text-field" if ignored[0] == "fields" else f"--{ignored[0]}"
        raise UsageError(f"{option} has no meaning for a list of ids", hint=f"leave {option} out, or give --against")
    if numbers is not None and len(corpora) > 1:
        raise UsageError("--numbers is for one corpus: numbers do not say of which", hint="give one CORPUS, or --out")
    if out is not None and numbers is not None and os.path.realpath(out) == os.path.realpath(numbers):
        raise UsageError("--out and --numbers are the same file", hint="give each a FILE of its own")
    with contextlib.ExitStack() as stack:
        inputs = [*corpora, *against, *([] if ids is None else [ids])]
        rows, lines = (
            None if path is None else stack.enter_context(output_file(path, option=option, inputs=inputs))
            for path, option in ((out, "--out"), (numbers, "--numbers"))
        )
        if ids is not None:
            results = [_find(location, ids, rows, lines) for location in corpora]
            shown = json.dumps(results) if as_json else "\n".join(map(_listed_text, results))
        else:
            tally, processes = Tally(ngram), workers or cpu_count()
            for location in corpora:
                _scan(location, against, tally, rows, lines, fields=fields, workers=processes)
            report = tally.report()
            shown = json_line(report) if as_json else _text(report)
    click.echo(shown, err=any(path is not None and is_stdout(path) for path in (out, numbers)))


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is ParameterSource.COMMANDLINE


def _find(location: str, ids: str, rows: OutputFile | None, lines: OutputFile | None) -> dict[str, Any]:
    with open_corpus(location) as corpus, byte_progress(f"ids of {location}", unit="documents") as on_progress:
        found = find_listed(corpus, ids, on_progress)
        for document in found.documents.tolist():
            own = corpus.metadata(document).get("id") if rows is not None else None
            _write(
                rows, lines, {"document": document, "id": own, "fingerprint": corpus.fingerprint, "corpus": location}
            )
    return {
        "corpus": location,
        "documents": len(found.documents),
        "num_missing": found.num_missing,
        "missing": list(found.missing),
    }


def _listed_text(result: dict[str, Any]) -> str:
    text = f"{one_line(result['corpus'])}: {counted(result['documents'], 'document')} listed"
    if result["num_missing"]:
        shown = ", ".join(map(one_line, result["missing"]))
        more = "" if result["num_missing"] == len(result["missing"]) else ", ..."
        text += f"\n{counted(result['num_missing'], 'row')} without a document: {shown}{more}"
    return text


def _scan(
    location: str,
    against: Sequence[str],
    tally: Tally,
    rows: OutputFile | None,
    lines: OutputFile | None,
    *,
    fields: Sequence[str],
    workers: int,
) -> None:
    with open_corpus(location) as corpus:
        benchmarks = read_benchmarks(
            against,
            corpus,
            _encoder(corpus),
            fields=fields or (_TEXT,),
            other_fields=() if fields else _CONVERSATION,
            n=tally.ngram,
        )
        tally.begin(location, corpus, benchmarks)
        fingerprint = corpus.fingerprint
    with byte_progress(f"scan {location}", unit="tokens") as on_progress:
        for found in scan_corpus(location, benchmarks.grams, on_progress, workers=workers):
            tally.add(found)
            row = {"document": found.document, "id": found.id, "fingerprint": fingerprint, "corpus": location}
            _write(rows, lines, {**row, "items": list(_items(benchmarks, found))} if rows is not None else row)


def _encoder(corpus: Corpus) -> Encode:
    encode = Encoder(read_tokenizer(corpus.store, corpus.manifest))

    def encoded(text: str) -> NDArray[np.uint32]:
        try:
            return encode([text])[0]
        except EncodingError as error:
            raise UsageError(f"{error}: {text[:60]!r}", hint="leave this item out") from error

    return encoded


def _items(benchmarks: Benchmarks, found: SharedItems) -> Iterator[dict[str, Any]]:
    for index, shared in zip(found.items.tolist(), found.num_grams.tolist(), strict=True):
        item = benchmarks.items[index]
        yield {
            "benchmark": benchmarks.files[item.benchmark],
            "row": item.row,
            "id": item.id,
            "shared": shared,
            "ngrams": int(benchmarks.grams.num_of_item[index]),
        }


def _write(rows: OutputFile | None, lines: OutputFile | None, row: dict[str, Any]) -> None:
    if rows is not None:
        shown = {name: value for name, value in row.items() if name != "id" or value is not None}
        rows.write(json.dumps(shown, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")
    if lines is not None:
        lines.write(b"%d\n" % row["document"])


def _text(found: ScanReport) -> str:
    """A table of the benchmarks, and the items that most documents share."""
    header = ["benchmark", "items", f"under {found.ngram} tokens", "found", "in documents"]
    rows = [
        [_name(one.benchmark), *(f"{number:,}" for number in (one.items, one.not_scanned, one.found, one.documents))]
        for one in found.benchmarks
    ]
    parts = [
        "\n".join(
            f"{one_line(one.corpus)}: {counted(one.documents, 'document')} "
            f"{'shares' if one.documents == 1 else 'share'} {found.ngram} tokens in a row"
            for one in found.corpora
        ),
        table([header, *rows], width=None),
    ]
    most = sorted(found.items, key=lambda item: -item.documents)
    if most:
        named = [
            [_name(item.benchmark), str(item.row), _name(item.id or ""), f"{item.documents:,}"]
            for item in most[:_SHOWN_ITEMS]
        ]
        parts.append(table([["benchmark", "row", "id", "documents"], *named], width=None, left=(0, 2)))
    if len(most) > _SHOWN_ITEMS:
        parts.append(f"and {counted(len(most) - _SHOWN_ITEMS, 'more item')}: --json lists all")
    return "\n\n".join(parts)


def _name(text: str) -> str:
    return shorten(one_line(text), _NAME_WIDTH)
