"""How an error is shown: one problem line, one hint line, an exit code."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from difflib import get_close_matches

import click

from tokshard.cli.options import print_json
from tokshard.cli.sizes import WrongNumber
from tokshard.errors import TokshardError
from tokshard.wording import one_line

INTERRUPTED = 130
TERMINATED = 143


class Terminated(KeyboardInterrupt):
    """SIGTERM."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error as it is shown.

    Args:
        error: the problem, one line.
        hint: the next step, one line; may be empty.
        exit_code: of the process.
    """

    error: str
    hint: str
    exit_code: int


def describe(error: BaseException, *, command: str = "tokshard") -> Failure:
    """Describe any exception to the user.

    Args:
        command: the command whose help is named after wrong usage.
    """
    help_page = f"see '{command} --help'"
    match error:
        case TokshardError():
            return Failure(error.problem, error.hint, error.exit_code)
        case click.NoSuchOption():
            known = [] if error.ctx is None else _options(error.ctx)
            return Failure(f"no option {error.option_name}", did_you_mean(error.option_name, known) or help_page, 2)
        case click.UsageError():
            hint = error.hint if isinstance(error, WrongNumber) else help_page
            return Failure(_as_problem(error.format_message()), hint, error.exit_code)
        case click.ClickException():
            return Failure(_as_problem(error.format_message()), "", error.exit_code)
        case KeyboardInterrupt() | click.Abort():
            name, exit_code = (
                ("terminated", TERMINATED) if isinstance(error, Terminated) else ("interrupted", INTERRUPTED)
            )
            # a build adds a note on how it continues
            return Failure(name, "; ".join(getattr(error, "__notes__", ())), exit_code)
        case MemoryError():
            problem = ": ".join(filter(None, ["there is not enough memory", str(error)]))
            hint = "ask for less at once, or use a machine with more memory"
        case RuntimeError() if str(error) == "can't start new thread":
            problem, hint = "the system starts no more threads", "raise its limit (ulimit -u, or pids of a container)"
        case _:
            problem = ": ".join(filter(None, ["internal", type(error).__name__, str(error)]))
            hint = "this is a bug in tokshard; --debug shows the traceback to report it with"
    return Failure(problem, hint, 1)


def unwritten(error: OSError) -> Failure:
    """The failure of a command that did its work but could not print the result."""
    return Failure(
        f"standard output cannot be written: {error.strerror}", "make room, or send the output to another place", 1
    )


def show(failure: Failure, *, as_json: bool) -> None:
    """Print a failure on stderr, and with ``--json`` as a line on stdout. A terminal gets only the line."""
    if not (as_json and sys.stdout.isatty()):
        with contextlib.suppress(OSError):  # stderr may be closed: then only the exit code remains
            label = "" if failure.exit_code in (INTERRUPTED, TERMINATED) else "error: "
            click.echo(label + one_line(failure.error), err=True)
            if failure.hint:
                click.echo(f"hint: {one_line(failure.hint)}", err=True)
    with contextlib.suppress(OSError):
        if as_json:
            print_json(failure)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``did you mean X?`` with the nearest known name; empty if none is near."""
    named = {each.lstrip("-"): each for each in known}  # dashes would make all options similar
    near = get_close_matches(name.lstrip("-"), named, n=1)
    return f"did you mean {named[near[0]]}?" if near else ""


def _options(context: click.Context) -> list[str]:
    params = context.command.get_params(context)
    return [
        name for param in params if isinstance(param, click.Option) for name in (*param.opts, *param.secondary_opts)
    ]


def _as_problem(message: str) -> str:
    """Click's sentence in the form of tokshard's own messages."""
    message = " ".join(message.split()).removesuffix(".")  # click lists choices in lines
    return message[:1].lower() + message[1:]
