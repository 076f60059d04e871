"""``tokshard build``: parse, call `build_corpus`, print."""

from __future__ import annotations

from typing import Any

import click

from tokshard.cli.build_run import run_all
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.recipe import is_recipe_path, one_corpus, read_recipe
from tokshard.cli.sizes import BYTES, COUNT
from tokshard.pipeline.sources.inputs import TEXT


@click.command()
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... | RECIPE.toml [NAME...]")
@click.option(
    "--tokenizer",
    metavar="PATH|URI|OWNER/NAME",
    help="A tokenizer.json, a directory or URI that holds one, or a model of the hub.  [required]",
)
@click.option(
    "--out",
    metavar="DIR",
    help="The corpus: a directory, or a URI: s3://BUCKET/PATH, gs://BUCKET/PATH or az://CONTAINER/PATH.  [required]",
)
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
    help="A shard closes before it has more tokens than this.  [default: 256M]",
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
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    help="Number of processes; with Ray, of tasks under way.  [default: by the CPUs]",
)
@click.option(
    "--executor",
    type=click.Choice(["local", "ray"]),
    default="local",
    show_default=True,
    help="What runs the tasks: processes of this machine, or a Ray cluster whose nodes share DIR and the sources.",
)
@click.option(
    "--ray-address",
    metavar="auto|local|HOST:PORT",
    help="The Ray cluster: the one of this machine or of RAY_ADDRESS, one that is started for this build, or another.  "
    "[default: auto]",
)
@click.option(
    "--append", is_flag=True, help="Add the SOURCEs to the corpus in DIR, as its next generation; the rest stays."
)
@click.option("--force", is_flag=True, help="Start over: remove the corpus or unfinished build in DIR first.")
@click.option("--dry-run", is_flag=True, help="Write nothing; estimate tokens, time and disk space from a sample.")
@click.option(
    "--job-index",
    type=click.IntRange(min=0),
    metavar="I",
    help="Be job I of an array of N: run every N-th task from task I on, then what other jobs left. No result depends "
    "on N. 'tokshard commit DIR' makes the corpus.",
)
@click.option("--num-jobs", type=click.IntRange(min=1), metavar="N", help="Jobs in the array of --job-index.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress.")
@click.option("-v", "--verbose", is_flag=True, help="Show a line for every task that is done.")
@json_option
@debug_option
@click.pass_context
def build(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Tokenize SOURCEs into a corpus of Arrow shards.

    A SOURCE is a file, a directory or a quoted glob of jsonl, txt, csv, tsv, tar (each also .gz .zst .bz2 .xz),
    parquet, arrow or feather; a directory saved by datasets; a URI of any of these (s3://, gs://, az://; https:// for
    single files); hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]; or - for standard input. Documents keep the order of the
    sources; inside a directory, the bytewise order of the paths.

    To continue a build that was interrupted, run the same command again.

    A RECIPE.toml in place of SOURCEs builds several corpora, one after another; NAMEs after it choose some of them. It
    has a table [corpora.NAME] for each, with sources, out and any option by its long name with underscores, and
    [defaults] for all. Options on the command line win over both. --force needs the NAMEs of what is to start over.

    Several machines share a build with --job-index and --num-jobs, and 'tokshard commit DIR' ends it. Both may be run
    again.
    """
    if is_recipe_path(sources):
        requests = read_recipe(sources[0], sources[1:], context)
    else:
        requests = [one_corpus(sources, options)]
    run_all(context, requests, reads=TEXT)
