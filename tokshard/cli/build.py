"""``tokshard build``: parse, call `build_corpus`, print."""

from __future__ import annotations

import json
import shutil
from typing import Any

import click

from tokshard.cli.build_text import build_json, build_lines, estimate_json, estimate_lines
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.recipe import CorpusRequest, is_recipe_path, one_corpus, read_recipe
from tokshard.cli.sizes import BYTES, COUNT
from tokshard.format.source_table import read_sources
from tokshard.inspect.corpus.text import summary_text
from tokshard.pipeline.build import build_corpus
from tokshard.pipeline.estimate import estimate_build
from tokshard.pipeline.options import BuildOptions
from tokshard.store import open_store
from tokshard.wording import aligned, one_line


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... | RECIPE.toml")
@click.option(
    "--tokenizer",
    metavar="PATH|OWNER/NAME",
    help="A tokenizer.json, a directory that holds one, or a model of the hub.  [required]",
)
@click.option("--out", metavar="DIR", help="The corpus directory.  [required]")
@click.option(
    "--eos", metavar="TOKEN", help="Token that ends every document.  [default: what tokenizer_config.json says]"
)
@click.option(
    "--bos",
    metavar="TOKEN",
    help="Token that starts every document; 'auto' takes it from tokenizer_config.json.  [default: none]",
)
@click.option(
    "--text-field",
    default="text",
    show_default=True,
    metavar="FIELD",
    help="Field of the text; a dot for a nested one.",
)
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
    "--shard-tokens",
    type=COUNT,
    default="256M",
    show_default=True,
    help="A shard closes before it has more tokens than this.",
)
@click.option(
    "--task-bytes", type=BYTES, help="Input bytes per unit of work.  [default: 16MiB to 512MiB, by input size]"
)
@click.option(
    "--max-document-bytes", type=BYTES, default="16MiB", show_default=True, help="A longer text is a bad record."
)
@click.option(
    "--on-bad-record",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="At a record that cannot become a document: stop, or leave it out, counted and listed in rejects.jsonl.",
)
@click.option(
    "--on-bad-source",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="At an input that is damaged or gone: stop, or leave out all of it, counted and listed.",
)
@click.option(
    "--max-bad-records",
    metavar="N|X%",
    help="Stop when more records than this are skipped: a number, or a share of those read.  [default: no limit]",
)
@click.option("--min-tokens", type=COUNT, metavar="N", help="Leave out shorter documents; delimiters count.")
@click.option("--max-tokens", type=COUNT, metavar="N", help="Leave out longer documents; delimiters count.")
@click.option(
    "--dedup",
    type=click.Choice(["none", "exact"]),
    default="none",
    show_default=True,
    help="Leave out texts equal to an earlier one, over all sources. Reads the sources twice.",
)
@click.option(
    "--validation-fraction",
    type=float,
    metavar="X",
    help="Write DIR/train and DIR/validation; a hash of the text puts a fraction X of the documents into the second.",
)
@click.option("--limit", type=COUNT, metavar="N", help="Stop after N documents.")
@click.option("--workers", type=click.IntRange(min=1), help="Number of processes.  [default: the CPUs of this machine]")
@click.option("--force", is_flag=True, help="Start over: remove the corpus or unfinished build in DIR first.")
@click.option("--dry-run", is_flag=True, help="Write nothing; estimate tokens, time and disk space from a sample.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show a line for every task that is done.")
@json_option
@debug_option
@click.pass_context
def build(context: click.Context, /, sources: tuple[str, ...], as_json: bool, dry_run: bool, **options: Any) -> None:
    """Tokenize SOURCEs into a corpus of Arrow shards.

    A SOURCE is a file, a directory or a quoted glob of jsonl, txt, csv, tsv, tar (each also .gz .zst .bz2 .xz),
    parquet, arrow or feather; a directory saved by datasets; hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]; or - for
    standard input. Documents keep the order of the sources; inside a directory, the bytewise order of the paths.

    To continue a build that was interrupted, run the same command again.

    A RECIPE.toml in place of SOURCEs builds several corpora, one after another. It has a table [corpora.NAME] for each,
    with sources, out and any option by its long name with underscores, and [defaults] for all. Options on the command
    line win over both.
    """
    is_recipe = is_recipe_path(sources)
    fits = True
    requests = read_recipe(sources[0], context) if is_recipe else [one_corpus(sources, options)]
    for number, request in enumerate(requests):
        if is_recipe and not as_json:
            click.echo(f"{'' if not number else chr(10)}{one_line(request.name)}")
        if dry_run:
            estimate = estimate_build(request.sources, BuildOptions(**request.options))
            shown = estimate_json(estimate) if as_json else aligned(estimate_lines(estimate), width=_columns())
            fits = fits and estimate.fits
        else:
            shown = _build(request, as_json)
        # several objects are lines, one is for people too
        click.echo(json.dumps(shown, indent=None if is_recipe else 2) if as_json else shown)
    if not fits:
        context.exit(1)


def _build(request: CorpusRequest, as_json: bool) -> Any:
    result = build_corpus(request.sources, **request.options)
    if as_json:
        for warning in result.warnings:
            click.echo(f"warning: {one_line(warning)}", err=True)
        return build_json(result)
    for note in result.notes:
        click.echo(f"note: {one_line(note)}", err=True)
    width = _columns()
    lines = [] if result.is_new else [f"nothing to do: {one_line(str(result.directory))} is complete"]
    for corpus in result.corpora:
        counts = read_sources(open_store(corpus.directory), corpus.manifest)
        if len(result.corpora) > 1:
            lines.append(aligned([("corpus", str(corpus.directory))], width=width))
        lines.append(summary_text(corpus.manifest, counts, width=width))
    return "\n".join([*lines, aligned(build_lines(result), width=width)])


def _columns() -> int:
    return shutil.get_terminal_size().columns
