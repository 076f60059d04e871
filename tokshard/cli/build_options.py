"""The options of a build on the command line: made of what `BuildOptions` says of each."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

import click

from tokshard.cli.help_groups import DISPLAY, GroupedOption
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.sizes import BYTES, COUNT, POSITIVE_COUNT
from tokshard.pipeline.options import (
    CLUSTER,
    ENCODING,
    INPUT,
    LEFT_OUT,
    OPTIONS,
    OUTPUT,
    BuildOptions,
    check_ray,
    check_template,
    flag,
    help_of,
)

SLURM, KUBERNETES = "slurm", "kubernetes"
"""Schedulers that number the jobs of an array."""


def _job_index(text: str) -> int | str:
    """The number of a job, or the name of the scheduler that knows it; a ValueError is a usage error for click."""
    if text in (SLURM, KUBERNETES):
        return text
    if not text.isdecimal():
        raise ValueError(f"{text!r} is not a number from 0 on, {SLURM} or {KUBERNETES}")
    return int(text)


def _share(text: str) -> tuple[float, float]:
    """The bounds of a half-open part of [0, 1): ``0:0.9``."""
    low, _, high = text.partition(":")
    with contextlib.suppress(ValueError):
        if 0 <= float(low) < float(high) <= 1:
            return float(low), float(high)
    raise ValueError(f"{text!r} is not a part of 0:1 such as 0:0.9")


def _early(check: Callable[[str | None], None]) -> Callable[..., str | None]:
    """Check an option where it is parsed: a SOURCE behind it would be taken for its value, and be missing."""

    def checked(_: click.Context, __: click.Parameter, value: str | None) -> str | None:
        check(value)
        return value

    return checked


HEADINGS = (INPUT, ENCODING, OUTPUT, LEFT_OUT, CLUSTER)
"""Of the help of a build."""

_CHECKS = {"chat": check_template, "ray": check_ray}


def options_of_build(reads: str) -> Callable[[click.Command], click.Command]:
    """Add the options of a build that reads this kind of sources, and those of the commands that run one."""

    def add(command: click.Command) -> click.Command:
        hints = get_type_hints(BuildOptions)
        found = [_option(name, hints[name], reads) for name, option in OPTIONS.items() if reads in option.reads]
        command.params = [*found, *command.params, *_of_runs()]
        return debug_option(json_option(command))

    return add


def _option(name: str, hint: Any, reads: str) -> click.Option:
    option, kinds = OPTIONS[name], get_args(hint)
    choices = option.choices or (kinds if get_origin(hint) is Literal else ())
    usual = option.usual.get(reads) or getattr(BuildOptions(tokenizer="", out=""), name)
    more: dict[str, Any] = {"metavar": option.unit or None, "help": help_of(name, reads), "group": option.group}
    if isinstance(usual, str) and usual:
        more |= {"default": usual, "show_default": True}
    if name in _CHECKS:
        more |= {"is_flag": False, "flag_value": option.bare, "callback": _early(_CHECKS[name])}
    elif hint is bool:
        more["is_flag"] = True
    elif Sequence[str] in kinds:
        more["multiple"] = True
    else:
        more["type"] = click.Choice(choices) if choices else _TYPES.get(option.unit)
    return GroupedOption([flag(name), name], **more)


_TYPES: Mapping[str, Any] = {
    "N": POSITIVE_COUNT,
    "SIZE": BYTES,
    "SEED": COUNT,
    "ID": COUNT,
    "X": float,
    "A:B": _share,
}
"""The kinds of values, by the unit that an option names. Others are texts."""


def _of_runs() -> list[click.Option]:
    """The options of the commands that say nothing of the corpus."""
    return [
        GroupedOption(
            ["--dry-run"], is_flag=True, help="Write nothing; estimate tokens, time, disk space.", group=OUTPUT
        ),
        GroupedOption(
            ["--job-index"],
            type=_job_index,
            metavar="I",
            help="Run share I of N of the tasks, then help with the others; 'slurm' or 'kubernetes' reads I from the "
            "job's variables.",
            group=CLUSTER,
        ),
        GroupedOption(
            ["--num-jobs"],
            type=POSITIVE_COUNT,
            metavar="N",
            help="Number of jobs that share the build.",
            group=CLUSTER,
        ),
        GroupedOption(["-q", "--quiet"], is_flag=True, help="Show no progress, only the summary.", group=DISPLAY),
        GroupedOption(
            ["-v", "--verbose"], is_flag=True, help="Show a line for every task, and all settings.", group=DISPLAY
        ),
    ]
