"""``tokshard copy``: make a corpus from others, without tokenizing again."""

from __future__ import annotations

from typing import Any

import click

from tokshard.cli.build import with_options_of_build
from tokshard.cli.build_run import run_all
from tokshard.cli.help_groups import OF_BUILDS, GroupedCommand
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.recipe import one_corpus
from tokshard.cli.sizes import COUNT, POSITIVE_COUNT
from tokshard.errors import UsageError
from tokshard.pipeline.sources.inputs import DOCUMENTS

_AS_IN_BUILD = (
    *("dedup", "validation_fraction", "max_documents", "on_bad_source", "workers", "ray", "append", "force"),
    *("dry_run", "job_index", "num_jobs", "quiet", "verbose"),
)
"""Options that mean the same for texts and for documents."""


class Share(click.ParamType):  # type: ignore[type-arg] # not yet generic in click 8.1
    """A half-open part of [0, 1): ``0:0.9``."""

    name = "share"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, float]:
        """The bounds; anything else is a usage error."""
        if isinstance(value, tuple):
            return value
        low, _, high = value.partition(":")
        try:
            bounds = float(low), float(high)
        except ValueError:
            self.fail(f"{value!r} is not a part of 0:1 such as 0:0.9", param, ctx)
        if not 0 <= bounds[0] < bounds[1] <= 1:
            self.fail(f"{value!r} is not a part of 0:1 such as 0:0.9", param, ctx)
        return bounds


@with_options_of_build(_AS_IN_BUILD)
@click.command(cls=GroupedCommand, groups=OF_BUILDS)
@click.argument("corpora", nargs=-1, required=True, metavar="CORPUS...")
@click.option("--out", required=True, metavar="DIR", help="A new directory, or a URI such as s3://bucket/folder.")
@click.option(
    "--shard-tokens",
    type=POSITIVE_COUNT,
    metavar="N",
    help="Close a shard before the document that would exceed N tokens.  [default: as in the first CORPUS]",
)
@click.option("--hash-range", type=Share(), metavar="A:B", help="Take documents whose hash, from 0 to 1, is in [A, B).")
@click.option("--min-tokens", type=COUNT, metavar="N", help="Take documents of at least N tokens.")
@click.option("--max-tokens", type=POSITIVE_COUNT, metavar="N", help="Take documents of at most N tokens.")
@click.option(
    "--where",
    multiple=True,
    metavar="CONDITION",
    help="Take documents by a kept column: lang=en, lang!=en, score<0.5, score>0.5 or 'lang in en,fr'; may be given "
    "again.",
)
@click.option("--source", metavar="PATTERN", help="Take documents of the sources whose names fit, such as '*/wiki-*'.")
@click.option(
    "--drop-ids",
    metavar="FILE",
    help="Leave out documents that FILE lists by id or number: lines, JSON lines or csv.",
)
@click.option("--no-columns", is_flag=True, help="Leave out the kept columns.")
@click.option(
    "--keep-columns",
    "columns",
    multiple=True,
    metavar="COLUMN",
    help="Take this kept column; may be given again.  [default: all, with null where a CORPUS lacks one]",
)
@click.option("--shuffle", type=COUNT, metavar="SEED", help="Write the documents in random order.")
@json_option
@debug_option
@click.pass_context
def copy(context: click.Context, /, corpora: tuple[str, ...], **options: Any) -> None:
    """Copy the documents of each CORPUS, in this order, into one corpus, without tokenizing again.

    DIR is a corpus when the copy is complete. The same command continues a stopped copy. All data are checked against
    the hashes of the corpora. CORPUS and DIR may be URIs. A document is taken if all conditions hold.

    \b
    tokshard copy shards/many-small --out shards/few-large --shard-tokens 1B
    tokshard copy shards/a shards/b --out s3://bucket/both
    tokshard copy shards/code --out shards/python --where lang=python --where 'score>0.5'
    tokshard copy shards/web --out shards/web-without --drop-ids opted-out.txt
    tokshard copy shards/by-topic --out shards/mixed --shuffle 17
    """  # noqa: D301 - click's mark for lines that are kept
    if options.pop("no_columns"):
        if options["columns"]:
            raise UsageError("--no-columns and --keep-columns contradict each other", hint="give one of them")
        options["columns"] = ()
    else:
        options["columns"] = options["columns"] or None
    run_all(context, [one_corpus(corpora, options)], reads=DOCUMENTS)
