"""The options that override a plan, shared by all commands that take one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from tokshard.cli.sizes import COUNT, LENGTH

Command = TypeVar("Command", bound=Callable[..., Any])


def plan_options(defaults: Mapping[str, int]) -> Callable[[Command], Command]:
    """Add ``--seq-len``, ``--seed`` and ``--global-batch-size`` to a command.

    Args:
        defaults: key to the default value if neither file nor option gives one; shown in the help.
    """

    def default_text(key: str) -> str:
        return f"  [default: {defaults[key]:,} unless the file says otherwise]" if key in defaults else ""

    def add(command: Command) -> Command:
        for option in reversed(
            [
                click.option(
                    "--seq-len", type=LENGTH, metavar="N", help=f"Tokens per sample.{default_text('seq_len')}"
                ),
                click.option(
                    "--seed",
                    type=click.IntRange(min=0),
                    metavar="N",
                    help="Seed for shuffling.  [default: 0 unless the file says otherwise]",
                ),
                click.option(
                    "--global-batch-size",
                    type=COUNT,
                    metavar="N",
                    help=f"Samples per step, over all ranks.{default_text('global_batch_size')}",
                ),
            ]
        ):
            command = option(command)
        return command

    return add
