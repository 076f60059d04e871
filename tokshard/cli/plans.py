"""Options of the commands that need a plan: a mix.toml or one corpus directory, and what overrides it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from tokshard.cli.sizes import COUNT, LENGTH

Command = TypeVar("Command", bound=Callable[..., Any])


def plan_options(defaults: Mapping[str, int]) -> Callable[[Command], Command]:
    """``--seq-len``, ``--seed`` and ``--global-batch-size``, as arguments `seq_len`, `seed`, `global_batch_size`.

    Args:
        defaults: key to the value that is used if neither file nor option gives one, for the help.
    """

    def told(key: str) -> str:
        return f"  [default: {defaults[key]:,}, or what the file says]" if key in defaults else ""

    def add(command: Command) -> Command:
        for option in reversed(
            [
                click.option("--seq-len", type=LENGTH, metavar="N", help=f"Tokens of a sample.{told('seq_len')}"),
                click.option(
                    "--seed",
                    type=click.IntRange(min=0),
                    metavar="N",
                    help="Seed for shuffling.  [default: 0, or what the file says]",
                ),
                click.option(
                    "--global-batch-size",
                    type=COUNT,
                    metavar="N",
                    help=f"Samples of a step, over all ranks.{told('global_batch_size')}",
                ),
            ]
        ):
            command = option(command)
        return command

    return add
