"""``tokshard plan``: preview a run."""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Sequence

import click

from tokshard.cli.help_groups import GroupedCommand, GroupedOption
from tokshard.cli.options import check_ranks, debug_option, json_option, plan_options, print_json
from tokshard.cli.plan_text import plan_text
from tokshard.cli.sizes import LENGTH, POSITIVE_COUNT, FloatRange
from tokshard.inspect.corpus.places import corpora_at, short_names
from tokshard.inspect.plan.preview import report_plan
from tokshard.inspect.plan.run import open_run

_WHAT, _JOB = "What to preview", "Nodes and ranks"

_option = functools.partial(click.option, cls=GroupedOption)


@click.command(cls=GroupedCommand, groups=(_WHAT, _JOB))
@click.argument("plan", metavar="PLAN")
@_option(
    "--tokens",
    group=_WHAT,
    type=POSITIVE_COUNT,
    metavar="N",
    help="Tokens to train on, rounded up to whole steps.  [default: as many as the corpora hold, or a finite pass]",
)
@_option("--checkpoint", group=_WHAT, metavar="PATH", help="Take the weights from a checkpoint of a run.")
@_option(
    "--held-out",
    "held_out",
    group=_WHAT,
    multiple=True,
    metavar="CORPUS",
    help="Warn about documents that this corpus shares with the plan; may be given again.",
)
@_option(
    "--nodes",
    "num_nodes",
    group=_JOB,
    type=POSITIVE_COUNT,
    metavar="N",
    help="Recommend a number of streams for a job on N nodes that reads from an object store.",
)
@_option(
    "--dp-world-size",
    group=_JOB,
    type=POSITIVE_COUNT,
    metavar="W",
    help='Show how even the work of so many data-parallel ranks is, with and without deal = "cost".',
)
@_option("--hidden", group=_JOB, type=LENGTH, metavar="N", help="With --dp-world-size: the width of the model.")
@_option(
    "--layers", group=_JOB, type=POSITIVE_COUNT, metavar="N", help="With --dp-world-size: the layers of the model."
)
@click.option(
    "--max-epochs-warn",
    type=FloatRange(min=0),
    default=4,
    show_default="4",
    metavar="N",
    help="Warn about a corpus that is read more than N times.",
)
@plan_options({})
@json_option
@debug_option
def plan(
    *,
    plan: str,
    tokens: int | None,
    max_epochs_warn: float,
    checkpoint: str | None,
    num_nodes: int | None,
    dp_world_size: int | None,
    hidden: int | None,
    layers: int | None,
    held_out: Sequence[str],
    as_json: bool,
    **of_file: int | None,
) -> None:
    """Preview a mix before training: tokens, epochs and documents of each corpus, number of steps, bytes read.

    PLAN is a mix.toml, a recipe or a checkpoint of the trainer, or a corpus directory with --seq-len, --seed and
    --global-batch-size; options override the file. It may also be a folder of corpora, or the folder of a corpus with a
    validation split: then all corpora but those for validation are read, weighted by their tokens. The tree at the top
    shows everything that the order depends on, with a fingerprint: jobs with the same fingerprint and the same weights
    read the same tokens in the same order.

    --held-out compares documents by the hashes that builds with --dedup exact keep, and views of one corpus by their
    tables. The corpora that a recipe evaluates on are compared in any case.

    --nodes recommends a number of streams (num_streams of the mix) for so many nodes, and shows what each node reads
    with them and without.

    --dp-world-size says how much more attention the slowest rank computes than the mean, as rows are dealt now and with
    deal = "cost"; with --hidden and --layers also the time that it saves of a step.

    \b
    tokshard plan mix.toml --tokens 2T
    tokshard plan mix.toml --nodes 64
    tokshard plan shards/code --seq-len 4096 --seed 17 --global-batch-size 512
    """  # noqa: D301 - click's mark for lines that are kept
    if dp_world_size is None and (hidden, layers) != (None, None):
        raise click.UsageError("--hidden and --layers go with --dp-world-size.")
    run = open_run(plan, of_file, checkpoint=checkpoint, world_size=dp_world_size or 1)
    check_ranks(run, 'uneven = "pad" in the file for a job that pads')
    held = corpora_at(held_out)
    report = report_plan(
        run,
        num_tokens=tokens,
        max_epochs_warn=max_epochs_warn,
        num_nodes=num_nodes,
        has_ranks=dp_world_size is not None,
        hidden=hidden,
        layers=layers,
        held_out=dict(zip(short_names(held), held, strict=True)),
    )
    if as_json:
        print_json(report)
    else:
        click.echo(plan_text(report, width=shutil.get_terminal_size().columns, encoding=sys.stdout.encoding))
