"""``tokshard build``: parse, call `build_corpus`, print."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import click

from tokshard.cli.build_run import run_all
from tokshard.cli.help_groups import OF_BUILDS, GroupedCommand
from tokshard.cli.job_array import JobIndex
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.recipe import is_recipe_path, one_corpus, read_recipe
from tokshard.cli.sizes import BYTES, COUNT
from tokshard.pipeline.options import check_ray, check_template
from tokshard.pipeline.sources.chats import OWN
from tokshard.pipeline.sources.inputs import TEXT


def _address(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """The address, refused here because a SOURCE behind ``--ray`` is taken for one, and would be missing."""
    check_ray(value)
    return value


def _template(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
    """The template, refused here because a SOURCE behind ``--chat`` is taken for one, and would be missing."""
    check_template(value)
    return value


@click.command(cls=GroupedCommand, groups=OF_BUILDS)
@click.argument("sources", nargs=-1, required=True, metavar="SOURCE... | RECIPE.toml [NAME...]")
@click.option(
    "--tokenizer",
    metavar="PATH",
    help="A tokenizer.json, a directory or URI that holds one, or OWNER/NAME on the Hugging Face hub.  [required]",
)
@click.option(
    "--out",
    metavar="DIR",
    help="The corpus: a directory, or a URI (s3://, gs://, az://).  [required]",
)
@click.option(
    "--eos", metavar="TOKEN", help="Token that ends every document.  [default: what tokenizer_config.json says]"
)
@click.option(
    "--bos",
    metavar="TOKEN",
    help="Token that starts every document, or 'auto'.  [default: none]",
)
@click.option(
    "--text-field",
    default="text",
    show_default=True,
    metavar="FIELD",
    help="Field of the text; a dot for a nested one.",
)
@click.option(
    "--chat",
    is_flag=False,
    flag_value=OWN,
    metavar="[TEMPLATE]",
    callback=_template,
    help="Read conversations with the template FILE.jinja, or with the tokenizer's own.",
)
@click.option("--chat-date", metavar="DATE", help="Date that the template writes as today.")
@click.option(
    "--loss",
    type=click.Choice(["assistant", "last", "all", "weighted"]),
    default="assistant",
    show_default=True,
    help="Tokens to train on.",
)
@click.option("--document-end", metavar="TOKEN", help="Special token that ends a conversation.")
@click.option(
    "--overlong",
    type=click.Choice(["skip", "head"]),
    default="skip",
    show_default=True,
    help="Leave out long conversations, or cut them.",
)
@click.option(
    "--template-drops",
    type=click.Choice(["count", "fail"]),
    default="count",
    show_default=True,
    help="Where a template leaves something out: count, or stop.",
)
@click.option(
    "--special-tokens",
    metavar="parse=TOKENS",
    help="Encode these special tokens found in texts.",
)
@click.option("--id-field", metavar="FIELD", help="Field to store as column 'id'.")
@click.option(
    "--keep-field",
    multiple=True,
    metavar="FIELD[:TYPE]",
    help="Field to store as a column: string, int64, float64 or bool.",
)
@click.option(
    "--format",
    metavar="FORMAT",
    help="Read every input as jsonl, parquet, arrow, txt, csv, tsv or tar.  [default: by name]",
)
@click.option(
    "--text-unit",
    type=click.Choice(["file", "line", "paragraph"]),
    default="file",
    show_default=True,
    help="What becomes one document.",
)
@click.option(
    "--shard-tokens",
    type=COUNT,
    metavar="N",
    help="Close a shard before the document that would exceed N tokens.  [default: 256M]",
)
@click.option(
    "--task-bytes",
    type=BYTES,
    metavar="SIZE",
    help="Input bytes per unit of work.  [default: 16MiB to 512MiB, by input size]",
)
@click.option(
    "--max-document-bytes",
    type=BYTES,
    default="16MiB",
    show_default=True,
    metavar="SIZE",
    help="Reject longer texts.",
)
@click.option(
    "--on-bad-record",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="Stop at a bad record, or list it in rejects.jsonl.",
)
@click.option(
    "--on-bad-source",
    type=click.Choice(["fail", "skip"]),
    default="fail",
    show_default=True,
    help="What to do with an input that is damaged or gone: stop, or skip all of it.",
)
@click.option(
    "--max-bad-records",
    metavar="N|X%",
    help="Most records to skip.  [default: no limit]",
)
@click.option("--min-tokens", type=COUNT, metavar="N", help="Leave out shorter documents.")
@click.option("--max-tokens", type=COUNT, metavar="N", help="Leave out longer documents; delimiters count.")
@click.option(
    "--dedup",
    type=click.Choice(["none", "exact"]),
    default="none",
    show_default=True,
    help="Leave out documents that equal an earlier one. Reads the input twice.",
)
@click.option(
    "--validation-fraction",
    type=float,
    metavar="X",
    help="Write DIR/train and DIR/validation; a hash of each text puts the fraction X into DIR/validation.",
)
@click.option("--max-documents", type=COUNT, metavar="N", help="Stop after N documents.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of processes; with Ray, of tasks under way.  [default: by the CPUs]",
)
@click.option(
    "--ray",
    is_flag=False,
    flag_value="auto",
    metavar="[ADDRESS]",
    callback=_address,
    help="Run the tasks on a Ray cluster whose nodes share DIR and the sources: auto (this machine's, or RAY_ADDRESS), "
    "local (started for this build), or HOST:PORT.  [auto if no ADDRESS is given]",
)
@click.option("--append", is_flag=True, help="Add a generation of input to the corpus in DIR.")
@click.option("--force", is_flag=True, help="Start over: first remove what a build left in DIR.")
@click.option("--dry-run", is_flag=True, help="Write nothing; estimate tokens, time, disk space.")
@click.option(
    "--job-index",
    type=JobIndex(),
    metavar="I",
    help="Run share I of N of the tasks, then help with the others; 'slurm' or 'kubernetes' reads I from the job's "
    "variables.",
)
@click.option("--num-jobs", type=click.IntRange(min=1), metavar="N", help="Number of jobs that share the build.")
@click.option("-q", "--quiet", is_flag=True, help="Show no progress, only the summary.")
@click.option("-v", "--verbose", is_flag=True, help="Show a line for every task, and all settings.")
@json_option
@debug_option
@click.pass_context
def build(context: click.Context, /, sources: tuple[str, ...], **options: Any) -> None:
    """Tokenize SOURCEs into a corpus of Arrow shards.

    A SOURCE is a file, a directory or a quoted glob of jsonl, txt, csv, tsv, tar (each also .gz .zst .bz2 .xz),
    parquet, arrow or feather; a directory saved by datasets; a URI of any of these (s3://, gs://, az://; https:// for
    single files); hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]; or - for standard input. Documents keep the order of the
    sources; inside a directory, the bytewise order of the paths.

    A RECIPE.toml in place of SOURCEs builds several corpora, one after another; NAMEs after it choose some of them. It
    has a table [corpora.NAME] for each, with sources, out and any option by its long name with underscores, and
    [defaults] for all. Options on the command line win over both. --force needs the NAMEs of what is to start over.

    The same command continues a build that was interrupted. Several machines share one with --job-index and --num-jobs;
    'tokshard commit DIR' ends it.
    """
    if is_recipe_path(sources):
        requests = read_recipe(sources[0], sources[1:], context)
    else:
        requests = [one_corpus(sources, options)]
    run_all(context, requests, reads=TEXT)


def with_options_of_build(names: Collection[str]) -> Callable[[click.Command], click.Command]:
    """Add options of a build to a command in which they mean the same."""

    def add(command: click.Command) -> click.Command:
        command.params += [option for option in build.params if option.name in names]
        return command

    return add
