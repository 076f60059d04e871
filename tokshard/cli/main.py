"""The command ``tokshard``: finds the subcommand, and turns every error into two lines and an exit code."""

from __future__ import annotations

import importlib
import itertools
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import click

from tokshard import __version__
from tokshard.cli.failures import Terminated, describe, did_you_mean, show, unwritten
from tokshard.cli.options import debug_option
from tokshard.cli.streams import ReaderGoneError, open_streams
from tokshard.errors import UsageError, warnings_to
from tokshard.wording import one_line

GROUPS = {
    "Make corpora": {
        "build": ("build:build", "Tokenize text into a corpus of Arrow shards."),
        "import": ("build:import_", "Make a corpus from documents that another tool has tokenized."),
        "copy": ("build:copy", "Copy corpora into one: re-shard, join, move, shuffle."),
        "select": ("build:select", "Make a view: some documents of a corpus, uncopied."),
        "commit": ("commit:commit", "Publish the corpus that several jobs have built."),
        "status": ("status:status", "Show the progress of a build, and how to continue it."),
    },
    "Look at corpora": {
        "inspect": ("inspect:inspect", "Show the contents of a corpus, and some of its documents."),
        "report": ("report:report", "Write an HTML page about corpora, the plan of a mix, or a training run."),
        "diff": ("diff:diff", "List the differences between two corpora, or between two mixes."),
        "scan": ("scan:scan", "Find the documents that share n-grams with a benchmark."),
        "verify": ("verify:verify", "Check every byte of a corpus against its manifest."),
    },
    "Train on them": {
        "plan": ("plan:plan", "Preview a mix before training: tokens, epochs, steps, bytes."),
        "trace": ("trace:trace", "Show every document that a training step read."),
        "bench": ("bench:bench", "Measure how fast this machine reads a mix."),
        "export": ("export:export", "Write a corpus in the format of another loader."),
    },
}
"""Module and function of each command, which is imported only when it runs, and its line in ``tokshard --help``."""

COMMANDS = {name: command for commands in GROUPS.values() for name, command in commands.items()}


class LazyGroup(click.Group):
    """A group over `COMMANDS`; asking for help costs no import."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """All names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - as above
        """Import one command."""
        if cmd_name not in COMMANDS:
            return None
        # numpy's linear algebra, which no command uses, starts a thread for each core, and they spin before they sleep:
        # 0.1 CPU-seconds of every process on two cores
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(f"tokshard.cli.{module}"), attribute)
        assert isinstance(command, click.Command)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Refuse an unknown command with the nearest known one."""
        if args[0] not in COMMANDS and not ctx.resilient_parsing:
            raise UsageError(
                f"no command {args[0]!r}",
                hint=did_you_mean(args[0], COMMANDS) or f"commands are {', '.join(COMMANDS)}; see 'tokshard --help'",
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - as above
        """The lists of commands, from the table."""
        width = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, (_, line) in commands.items()])


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    no_args_is_help=False,
    subcommand_metavar="COMMAND [ARGUMENTS]...",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
@click.version_option(__version__, prog_name="tokshard", message="%(prog)s %(version)s")
@debug_option
@click.pass_context
def cli(context: click.Context) -> None:
    """Tokenize raw text into Arrow shards, and stream them into training runs.

    Results go to stdout; progress and errors go to stderr. Exit codes: 0 done, 1 the data or the run failed, 2 wrong
    usage or a path that does not exist, 130 interrupted, 143 terminated.

    Numbers of tokens, samples, documents and steps: 4096, 1_000, 1e6, 256k, 256M, 1.5B (or G, 10^9), 2T. Sizes in
    bytes: 4096, 256MB, 16MiB.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help(), err=True)
        context.exit(2)


def main() -> NoReturn:
    """Run the command line of this process, and exit."""
    signal.signal(signal.SIGTERM, _terminate)  # schedulers stop jobs with it: the same clean end as Ctrl-C
    stdout = open_streams()
    if "_TOKSHARD_COMPLETE" in os.environ:  # click's shell completion
        from tokshard.cli.completion import complete_files

        complete_files()
        cli(prog_name="tokshard")
    exit_code = run(sys.argv[1:])
    is_known = exit_code > 1 or (exit_code == 1 and isinstance(stdout.error, BrokenPipeError))
    if stdout.error is not None and not is_known:  # 1 also says that two corpora differ
        failure = unwritten(stdout.error)
        show(failure, as_json=False)
        exit_code = failure.exit_code
    sys.exit(exit_code)


def run(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code; errors have been shown.
    """
    # taken from the raw arguments, because options are unknown if parsing fails
    flags = set(itertools.takewhile(lambda argument: argument != "--", arguments))
    try:
        with warnings_to(lambda text: click.echo(f"warning: {one_line(text)}", err=True)):
            return _invoke(arguments)
    except SystemExit:
        raise
    except ReaderGoneError:
        return 1
    except BaseException as error:  # noqa: BLE001 - the process edge; a panic in a library is not an Exception
        if "--debug" in flags:
            traceback.print_exception(error)
        command = next((argument for argument in arguments if argument in COMMANDS), "")
        failure = describe(error, command=f"tokshard {command}".rstrip())
        show(failure, as_json="--json" in flags)
        return failure.exit_code


def _invoke(arguments: Sequence[str]) -> int:
    exit_code = 0
    try:
        os.getcwd()
    except OSError:
        raise UsageError("the current directory does not exist any more", hint="change to one that does") from None
    if (encoding := sys.getfilesystemencoding()) != "utf-8" and not "".join(arguments).isascii():
        raise UsageError(
            f"the arguments are not ASCII, and Python reads them as {encoding}, not as UTF-8", hint="set PYTHONUTF8=1"
        )
    try:
        with cli.make_context("tokshard", list(arguments)) as context:
            cli.invoke(context)
    except click.exceptions.Exit as done:
        exit_code = done.exit_code
    return exit_code


def _terminate(*_: object) -> NoReturn:
    raise Terminated
