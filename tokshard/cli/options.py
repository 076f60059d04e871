"""Options that several commands have, and the JSON that they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from tokshard.cli.sizes import COUNT, LENGTH
from tokshard.errors import PlanError

if TYPE_CHECKING:
    from tokshard.inspect.plan.run import Run

Command = TypeVar("Command", bound=Callable[..., Any])

json_option = click.option("--json", "as_json", is_flag=True, help="Print results and errors as JSON.")

# `main.run` takes it from the raw arguments, so that it also works if they cannot be parsed
debug_option = click.option("--debug", is_flag=True, expose_value=False, help="Show the traceback of an error.")


def plan_options(defaults: Mapping[str, int]) -> Callable[[Command], Command]:
    """Add ``--seq-len``, ``--seed`` and ``--global-batch-size``: keys of a file of a plan, which they override.

    Args:
        defaults: key to the default value if neither file nor option gives one; shown in the help.
    """
    shown = {key: f"  [default: {value:,} unless the file says otherwise]" for key, value in defaults.items()}
    length = click.option("--seq-len", type=LENGTH, metavar="N", help=f"Tokens per sample.{shown.get('seq_len', '')}")
    seed = click.option(
        "--seed",
        type=click.IntRange(min=0),
        metavar="N",
        help="Seed for shuffling.  [default: 0 unless the file says otherwise]",
    )
    size = click.option(
        "--global-batch-size",
        type=COUNT,
        metavar="N",
        help=f"Samples per step, over all ranks.{shown.get('global_batch_size', '')}",
    )
    return lambda command: length(seed(size(command)))


def print_json(*values: Any, **more: Any) -> None:
    """Print reports as one line of JSON: the fields of all of them, in this order, and some more."""
    click.echo(json_line(*values, more))


def json_line(*values: Any) -> str:
    """Reports as one line of JSON: the fields of all of them, in this order."""
    plain = [msgspec.to_builtins(value, str_keys=True, enc_hook=_plain) for value in values]
    return json.dumps({name: value for fields in plain for name, value in fields.items()})


def _plain(value: Any) -> Any:
    return [value.start, value.stop] if isinstance(value, range) else str(value)


def check_ranks(run: Run, pads: str) -> None:
    """Refuse a world size that the loader would refuse.

    Args:
        pads: how to say that ranks are padded.

    Raises:
        PlanError: the world size does not divide the batch, and ranks are not padded; or streams do not divide it.
    """
    for size in run.batch_sizes:
        run.ranks(size)
        try:
            run.ranks(size, rank=0)
        except PlanError as error:
            raise PlanError(error.problem, hint=f"give another --dp-world-size, or {pads}") from error
