"""``tokshard build``, ``import``, ``copy``, ``select``: what they are asked. Their help needs no numpy or pyarrow."""

from __future__ import annotations

from typing import Any

import click

from tokshard.cli.build_options import HEADINGS, options_of_build
from tokshard.cli.help_groups import GroupedCommand, GroupedOption
from tokshard.errors import UsageError
from tokshard.pipeline.options import DOCUMENTS, OUTPUT, TEXT, TOKENS, VIEW


@options_of_build(TEXT)
@click.command(cls=GroupedCommand, groups=HEADINGS)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... | RECIPE.toml [NAME...]")
@click.pass_context
def build(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Tokenize SOURCEs into a corpus of Arrow shards.

    A SOURCE is a file, a directory or a quoted glob of jsonl, txt, csv, tsv (each also .gz .zst .bz2 .xz), parquet or
    arrow; a directory saved by datasets; a URI of any of these (s3://, gs://, az://; https:// for single files);
    hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]; or - for standard input. Documents keep the order of the sources;
    inside a directory, the bytewise order of the paths.

    A RECIPE.toml in place of SOURCEs builds several corpora, one after another; NAMEs after it choose some of them. It
    has a table [corpora.NAME] for each, with sources, out and any option by its long name with underscores, and
    [defaults] for all. Options on the command line win over both. --force needs NAMEs.

    The same command continues a build that was interrupted. Several machines share one with --job-index and --num-jobs;
    'tokshard commit DIR' ends it.
    """
    _run(context, sources, options, TEXT)


@options_of_build(TOKENS)
@click.command("import", cls=GroupedCommand, groups=HEADINGS)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE...")
@click.pass_context
def import_(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Make a corpus from documents that another tool has tokenized.

    A SOURCE is a file, a directory or a quoted glob, on this machine or a URI: the .bin of Megatron-LM with its .idx,
    or their common prefix; the .ds of datatrove; a directory of MosaicML streaming (mds); a directory of litdata; a
    .npy with offsets; ids cut at a delimiter (flat); lists of ids in JSON lines (jsonl); a table (parquet, arrow,
    feather) with a column of ids; or a data set saved by datasets, or hf://OWNER/NAME.

    Boundaries, order and ids are kept. Every document ends in EOS, once. The tokenizer has to be the one that made
    the ids: they are checked against its vocabulary, and the first document is shown as text. Labels and loss masks
    become loss spans; other columns are left out, unless --keep-field or --id-field names them.

    The same command continues an import that was interrupted. 'tokshard commit DIR' ends one that several jobs share.
    """
    _run(context, sources, options, TOKENS)


@options_of_build(DOCUMENTS)
@click.command(cls=GroupedCommand, groups=HEADINGS)
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--no-columns", cls=GroupedOption, group=OUTPUT, is_flag=True, help="Leave out the kept columns.")
@click.option(
    "--cells",
    "is_of_cells",
    cls=GroupedOption,
    group=OUTPUT,
    is_flag=True,
    help="Copy each cell of a folder that 'select --by' wrote, and their mix.toml, into the same tree.",
)
@click.pass_context
def copy(context: click.Context, /, corpora: tuple[str, ...], **options: Any) -> None:
    """Copy the documents of each CORPUS, in this order, into one corpus, without tokenizing again.

    DIR is a corpus when the copy is complete. The same command continues a stopped copy. All data are checked against
    the hashes of the corpora. CORPUS and DIR may be URIs, and CORPUS may be a view.

    \b
    tokshard copy shards/many-small --out shards/few-large --shard-tokens 1B
    tokshard copy shards/a shards/b --out s3://bucket/both
    tokshard copy views/python --out shards/python
    tokshard copy shards/by-topic --out shards/mixed --shuffle 17
    tokshard copy views/cells --cells --out s3://bucket/cells
    """  # noqa: D301 - click's mark for lines that are kept
    columns = options["columns"]
    no_columns = options.pop("no_columns")
    if no_columns and columns:
        raise UsageError("--no-columns and --keep-columns contradict each other", hint="give one of them")
    options["columns"] = () if no_columns else columns or None
    if options.pop("is_of_cells"):
        from tokshard.cli.build_run import copy_cells

        copy_cells(context, corpora, options)
    else:
        _run(context, corpora, options, DOCUMENTS)


@options_of_build(VIEW)
@click.command(cls=GroupedCommand, groups=HEADINGS)
@click.argument("corpus", metavar="CORPUS")
@click.pass_context
def select(context: click.Context, /, corpus: str, **options: Any) -> None:
    """Make a view: some documents of CORPUS, as a corpus without shards of its own.

    A document is taken if all conditions hold. Only columns and bounds are read. Every command and the loader take
    a view where they take a corpus, as long as CORPUS stays. 'tokshard copy' makes a corpus of it.

    \b
    tokshard select shards/web --out views/python --where lang=python --where 'score>=0.5'
    tokshard select shards/web --out views/good --join scores.parquet --where 'quality>=3'
    tokshard select shards/web --out views/cells --by topic,quality
    tokshard select shards/web --out views/web-without --drop-ids opted-out.txt
    """  # noqa: D301 - click's mark for lines that are kept
    _run(context, (corpus,), options, VIEW)


def _run(context: click.Context, sources: tuple[str, ...], options: dict[str, Any], reads: str) -> None:
    from tokshard.cli.build_run import run_all
    from tokshard.cli.recipe import one_corpus, read_recipe

    if reads == TEXT and sources[0].endswith(".toml"):
        requests = read_recipe(sources[0], sources[1:], context)
    else:
        requests = [one_corpus(sources, options)]
    run_all(context, requests, reads=reads)
