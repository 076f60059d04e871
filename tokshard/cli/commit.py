"""``tokshard commit``: make the corpus of the tasks that jobs ran."""

from __future__ import annotations

import click

from tokshard.cli.build_progress import BuildDisplay
from tokshard.cli.build_run import show_result
from tokshard.cli.options import debug_option, json_option
from tokshard.pipeline.jobs import commit_corpus


@click.command()
@click.argument("directory", metavar="DIR")
@json_option
@debug_option
def commit(directory: str, as_json: bool) -> None:
    """Publish the corpus in DIR when all jobs are done, or list the missing tasks and the commands that run them.

    Bytes and errors are the same as in a build by one process. The command may be repeated.
    """
    display = BuildDisplay(is_quiet=False, is_verbose=False)
    show_result(commit_corpus(directory), display, as_json=as_json)
