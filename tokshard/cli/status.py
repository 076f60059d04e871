"""``tokshard status``: show the progress of a build."""

from __future__ import annotations

import os
import sys

import click

from tokshard.cli.build_text import status_lines
from tokshard.cli.options import debug_option, json_option, print_json
from tokshard.errors import UsageError
from tokshard.pipeline.status import read_status
from tokshard.wording import aligned


@click.command()
@click.argument("directory", metavar="DIR")
@json_option
@debug_option
def status(directory: str, as_json: bool) -> None:
    """Show the progress of the build in DIR, the records left out so far, and the command that continues it."""
    if os.path.isfile(directory):
        raise UsageError(f"{directory} is a file", hint="give the directory of 'tokshard build --out'")
    found = read_status(directory)
    if as_json:
        print_json(found)
    else:  # not wrapped, so that the command that continues the build can be copied
        click.echo(aligned(status_lines(found), width=sys.maxsize))
