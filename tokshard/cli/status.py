"""``tokshard status``: show the progress of a build."""

from __future__ import annotations

import os
import sys

import click

from tokshard.cli.build_text import status_lines
from tokshard.cli.options import debug_option, json_option, print_json
from tokshard.errors import UsageError
from tokshard.inspect.corpus.places import corpora_at
from tokshard.pipeline.status import read_status
from tokshard.wording import aligned


@click.command()
@click.argument("directory", metavar="DIR")
@json_option
@debug_option
def status(directory: str, as_json: bool) -> None:
    """Show the progress of the build in DIR, the records left out so far, and the command that continues it.

    DIR may also be a folder of corpora, or of their cells: then of each.
    """
    if os.path.isfile(directory):
        raise UsageError(f"{directory} is a file", hint="give the directory of 'tokshard build --out'")
    try:
        found = [read_status(directory)]
    except UsageError:
        if (inside := corpora_at([directory])) == [directory]:
            raise
        found = list(map(read_status, inside))
    if as_json:
        for each in found:
            print_json(each)
    else:  # not wrapped, so that the command that continues the build can be copied
        click.echo("\n\n".join(aligned(status_lines(each), width=sys.maxsize) for each in found))
