"""``tokshard trace``: from steps to documents, and from a document to its steps."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

import click

from tokshard.cli.help_groups import DISPLAY, GroupedCommand, GroupedOption
from tokshard.cli.options import check_ranks, debug_option, json_option, plan_options, print_json
from tokshard.cli.sizes import COUNT, POSITIVE_COUNT, span
from tokshard.cli.trace_text import notes_of, occurrences_text, run_text, trace_text
from tokshard.inspect.plan.occurrences import DocumentOccurrences, find_documents
from tokshard.inspect.plan.run import Run, open_run
from tokshard.inspect.plan.trace import DocumentFacts, TraceRow, trace_samples, trace_steps
from tokshard.wording import one_line

_WHAT, _RANKS = "What to trace", "Ranks"

_option = functools.partial(click.option, cls=GroupedOption)
"""Advanced, without a group, are the options that the files of a plan usually say."""


@click.command(cls=GroupedCommand, groups=(_WHAT, _RANKS))
@click.argument("plan", required=False, metavar="[PLAN]")
@_option(
    "--step",
    "steps",
    group=_WHAT,
    type=span,
    metavar="N[:M]",
    help="Trace step N, or steps N to M - 1, counted from 1.",
)
@_option(
    "--sample",
    "samples",
    group=_WHAT,
    type=span,
    metavar="N[:M]",
    help="Trace global sample N, or samples N to M - 1, counted from 0.",
)
@_option("--document", group=_WHAT, metavar="CORPUS:ID", help="List the steps that read a document; see above.")
@click.option("--epochs", type=span, metavar="N[:M]", help="With --document: search only these epochs, counted from 0.")
@_option(
    "--checkpoint",
    group=_WHAT,
    metavar="PATH",
    help="Take weights, skipped samples and steps from a checkpoint of the run.",
)
@_option(
    "--mask",
    "mask_files",
    group=_WHAT,
    multiple=True,
    metavar="FILE",
    help="Find a list of masked documents of the checkpoint here, if it moved; may be given again.",
)
@_option(
    "--dp-rank",
    group=_RANKS,
    type=COUNT,
    metavar="R",
    help="Only show rows of this data-parallel rank.",
)
@_option(
    "--dp-world-size",
    group=_RANKS,
    type=POSITIVE_COUNT,
    default=1,
    show_default=True,
    metavar="W",
    help="Number of data-parallel ranks that share the rows of a step.",
)
@click.option(
    "--uneven",
    type=click.Choice(["refuse", "pad"]),
    help="If the world size does not divide the batch: refuse it, or pad as the loader does.  "
    "[default: refuse, unless the file says otherwise]",
)
@_option(
    "--deal",
    group=_RANKS,
    type=click.Choice(["order", "cost"]),
    help="How the loader deals the rows of a step to ranks.  [default: order, unless the file says otherwise]",
)
@plan_options({})
@_option(
    "--text",
    "num_characters",
    group=DISPLAY,
    type=POSITIVE_COUNT,
    default=200,
    show_default=True,
    metavar="N",
    help="Number of characters to show of each document.",
)
@_option("--no-text", group=DISPLAY, is_flag=True, help="Show no text, and do not load the tokenizer.")
@json_option
@debug_option
def trace(
    *,
    plan: str | None,
    steps: range | None,
    samples: range | None,
    document: str | None,
    epochs: range | None,
    checkpoint: str | None,
    mask_files: tuple[str, ...],
    dp_rank: int | None,
    dp_world_size: int,
    num_characters: int,
    no_text: bool,
    as_json: bool,
    **of_file: Any,
) -> None:
    """Show every document that a training step reads, or every step that reads a document.

    PLAN is a mix.toml, a recipe, a run or a checkpoint of the trainer, or a corpus directory with --seq-len, --seed and
    --global-batch-size; options override the file. Nothing is replayed: step 1,000,000,000 takes as long as step 1.

    \b
    tokshard trace mix.toml --step 1200
    tokshard trace run/checkpoints/step-00002000 --step 1990:2010 --dp-rank 3 --dp-world-size 64
    tokshard trace mix.toml --checkpoint checkpoint.pt --document code:1234

    Steps count from 1, as in the trainer's log: step n is the n-th batch that the training loop received, so skipped
    samples belong to no step. Steps up to a checkpoint of the trainer come from its run's metrics.jsonl. All others
    are counted from the checkpoint, in batches of the plan's sizes. A checkpoint is a directory written by the trainer
    or by torch.distributed.checkpoint, a file written by torch.save, or the loader's state as JSON.

    A document is given as CORPUS:ID, where ID is its number in the corpus, from 0. If the corpus was built with
    --id-field, ID is the document's id, or its number if none has that id; CORPUS:#N is always the number.

    --json prints one line per row or, with --document, per document.
    """  # noqa: D301 - click reads the escape
    _check_options({"--step": steps, "--sample": samples, "--document": document}, epochs)
    if dp_rank is not None and dp_rank >= dp_world_size:
        raise click.BadParameter(
            f"rank {dp_rank} is not below --dp-world-size {dp_world_size}", param_hint="'--dp-rank'"
        )
    run = open_run(plan, of_file, checkpoint=checkpoint, world_size=dp_world_size, mask_files=mask_files)
    check_ranks(run, "--uneven pad for a job that pads")
    for note in notes_of(run, steps):
        click.echo(f"note: {one_line(note)}", err=True)
    if document is not None:
        _show_occurrences(run, document, epochs, dp_rank, as_json=as_json)
        return
    length = None if no_text else num_characters
    if steps is not None:
        parts = trace_steps(run, steps, rank=dp_rank, num_characters=length)
    else:
        assert samples is not None
        parts = trace_samples(run, samples, rank=dp_rank, num_characters=length)
    _show_rows(run, parts, as_json=as_json)


def _check_options(asked: Mapping[str, object], epochs: range | None) -> None:
    if sum(value is not None for value in asked.values()) != 1:
        raise click.UsageError(f"give one of {', '.join(asked)}.")
    if asked["--document"] is None and epochs is not None:
        raise click.UsageError("--epochs goes with --document.")


def _show_rows(run: Run, parts: Iterator[Sequence[TraceRow]], *, as_json: bool) -> None:
    if as_json:
        for row in itertools.chain.from_iterable(parts):
            print_json(*_parts(row))
    else:
        width = shutil.get_terminal_size().columns
        for number, part in enumerate(trace_text(parts, width=width)):
            click.echo(part if number else f"{run_text(run, width=width)}\n\n{part}")


def _parts(value: TraceRow | DocumentOccurrences) -> tuple[dict[str, Any], DocumentFacts]:
    """A value without its document, and the document, for one line of JSON."""
    return {one.name: getattr(value, one.name) for one in fields(value) if one.name != "document"}, value.document


def _show_occurrences(run: Run, document: str, epochs: range | None, rank: int | None, *, as_json: bool) -> None:
    width = shutil.get_terminal_size().columns
    for number, found in enumerate(find_documents(run, document, epochs=epochs, rank=rank)):
        if as_json:
            print_json(*_parts(found))
        else:
            head = "" if number else run_text(run, width=width) + "\n"
            click.echo(("\n" if number else head) + occurrences_text(found, width=width, run=run))
