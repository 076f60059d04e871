"""``tokshard build``: parse, call `build_corpus`, print."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from tokshard.build.pipeline import build_corpus
from tokshard.build.report import build_json, speed_text
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.sizes import SIZE
from tokshard.format.reader import read_sources
from tokshard.inspect.summary import summary_text


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.option(
    "--tokenizer",
    required=True,
    metavar="PATH|OWNER/NAME",
    help="A tokenizer.json, a directory that holds one, a model of the hub, a SentencePiece .model or tiktoken ranks.",
)
@click.option("--out", required=True, metavar="DIR", help="The corpus directory.")
@click.option(
    "--eos", metavar="TOKEN", help="Token that ends every document.  [default: what tokenizer_config.json says]"
)
@click.option(
    "--bos",
    metavar="TOKEN",
    help="Token that starts every document; 'auto' takes it from tokenizer_config.json.  [default: none]",
)
@click.option("--text-field", default="text", show_default=True, metavar="FIELD", help="Dotted path of the text.")
@click.option("--id-field", metavar="FIELD", help="Field to store as column 'id'.")
@click.option(
    "--keep", multiple=True, metavar="FIELD[:TYPE]", help="Field to store as a column: string, int64, float64 or bool."
)
@click.option(
    "--input-format",
    metavar="FORMAT",
    help="Read every input as jsonl, parquet, arrow, txt, csv, tsv or tar.  [default: by file name]",
)
@click.option(
    "--text-mode",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="What a document is in plain text.",
)
@click.option(
    "--shard-tokens", type=SIZE, default="256M", show_default=True, help="A shard closes before it has more tokens."
)
@click.option(
    "--task-bytes", type=SIZE, help="Input bytes per unit of work.  [default: 16MiB to 128MiB, by input size]"
)
@click.option(
    "--max-document-bytes", type=SIZE, default="16MiB", show_default=True, help="A longer text is a bad record."
)
@click.option(
    "--on-bad-record",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Stop at a record that is no document, or leave it out, counted and listed in rejects.jsonl.",
)
@click.option("--limit", type=SIZE, metavar="N", help="Stop after so many documents.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes.  [default: the CPUs of this machine]")
@click.option("--force", is_flag=True, help="Start over: remove the corpus or unfinished build in DIR first.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@json_option
@debug_option
def build(sources: tuple[str, ...], as_json: bool, **options: Any) -> None:
    """Tokenize SOURCEs into a corpus of Arrow shards.

    A SOURCE is a file, a directory or a quoted glob of jsonl, txt, csv, tsv, tar (each also .gz .zst .bz2 .xz),
    parquet, arrow or feather; a directory saved by datasets; hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]; or - for
    standard input. Documents keep the order of the sources; inside a directory, the bytewise order of the paths.

    A build that was stopped, by whatever, goes on when the same command runs again.
    """
    result = build_corpus(sources, **options)
    if as_json:
        click.echo(json.dumps(build_json(result), indent=2))
    else:
        for note in result.notes:
            click.echo(f"note: {note}", err=True)
        if not result.is_new:
            click.echo(f"nothing to do: {result.directory} is complete")
        counts = read_sources(result.directory, result.manifest)
        click.echo(summary_text(result.manifest, counts, width=shutil.get_terminal_size().columns))
        click.echo(speed_text(result))
