"""``tokshard scan``: find documents that contain items of benchmarks."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from tokshard.cli.options import debug_option, json_line, json_option
from tokshard.cli.output_file import Write, is_stdout, output_file
from tokshard.cli.progress import byte_progress
from tokshard.cli.sizes import POSITIVE_COUNT
from tokshard.cli.tables import table
from tokshard.errors import UsageError
from tokshard.forking import cpu_count
from tokshard.format.corpus import Corpus
from tokshard.format.decode import read_tokenizer
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
from tokshard.wording import counted, one_line, shorten

_DEFAULT_NGRAM = 13
_SHOWN_ITEMS = 10
_NAME_WIDTH = 50
_TEXT = "text"
_CONVERSATION = (MESSAGES, TURNS, PROMPT, COMPLETION)
"""Fields of an item that has no text: those that ``build --chat`` reads."""


@click.command()
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option(
    "--against",
    multiple=True,
    required=True,
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
@click.option(
    "--out", metavar="FILE", help="Write a line of JSON for each document found, as select --drop-ids takes it."
)
@click.option("--workers", type=POSITIVE_COUNT, metavar="N", help="Number of processes.  [default: one per CPU]")
@json_option
@debug_option
def scan(
    *,
    corpora: tuple[str, ...],
    against: tuple[str, ...],
    fields: tuple[str, ...],
    ngram: int,
    out: str | None,
    workers: int | None,
    as_json: bool,
) -> None:
    """Find the documents of each CORPUS that share N tokens in a row with an item of a benchmark.

    Items are encoded with the tokenizer of the corpus. Matches are exact: tokens are compared, not only hashes.
    Items of fewer than N tokens are not scanned, only counted.

    \b
    tokshard scan shards/web --against evals.jsonl --text-field question --out leaked.jsonl
    tokshard select shards/web --out views/clean --drop-ids leaked.jsonl
    """  # noqa: D301 - click's mark for lines that are kept
    with contextlib.ExitStack() as stack:
        inputs = [*corpora, *against]
        write = None if out is None else stack.enter_context(output_file(out, option="--out", inputs=inputs))
        tally, processes = Tally(ngram), workers or cpu_count()
        for location in corpora:
            _scan(location, against, tally, write, fields=fields, workers=processes)
    report = tally.report()
    click.echo(json_line(report) if as_json else _text(report), err=out is not None and is_stdout(out))


def _scan(
    location: str,
    against: Sequence[str],
    tally: Tally,
    write: Write | None,
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
            if write is not None:
                own = {} if found.id is None else {"id": found.id}
                place = {"document": found.document, **own, "fingerprint": fingerprint, "corpus": location}
                row = json.dumps({**place, "items": list(_items(benchmarks, found))}, ensure_ascii=False)
                write(row.encode("utf-8", "backslashreplace") + b"\n")


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
            "benchmark": item.benchmark,
            "row": item.row,
            "id": item.id,
            "shared": shared,
            "ngrams": int(benchmarks.grams.num_of_item[index]),
        }


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
    if idle := [_name(one.benchmark) for one in found.benchmarks if one.not_scanned == one.items]:
        parts.append(
            f"warning: all items of {', '.join(idle)} have fewer than {found.ngram} tokens, so none was compared; "
            "give a smaller --ngram"
        )
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
