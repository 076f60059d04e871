"""``tokshard build`` by several jobs: the options that they need, and what people see of one."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import click
import msgspec
from click.core import ParameterSource

from tokshard.cli.recipe import is_recipe_path
from tokshard.errors import UsageError
from tokshard.pipeline.job_array.run_job import JobResult
from tokshard.pipeline.job_array.stages import DUPLICATES, HASH
from tokshard.wording import counted

_OPTIONS_OF_COMMIT = frozenset({"commit", "workers", "quiet", "verbose", "as_json"})


def check_commit(context: click.Context) -> None:
    """Refuse what means nothing for ``--commit``.

    Raises:
        UsageError: a source or option is given that the build has saved.
    """
    for parameter in context.command.params:
        name = parameter.name or ""
        # an older click says of sources that are not given that they come from the command line
        is_given = context.params.get(name) != () and context.get_parameter_source(name) is ParameterSource.COMMANDLINE
        if is_given and name not in _OPTIONS_OF_COMMIT:
            given = parameter.opts[0] if isinstance(parameter, click.Option) else "a SOURCE"
            raise UsageError(
                f"--commit and {given} are both given, and the build has saved what it was asked for",
                hint="give --commit DIR alone; --workers, --quiet, --verbose and --json may be added",
            )


def job_options(context: click.Context, sources: Sequence[str], array: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `run_job` that say which job it is.

    Raises:
        UsageError: one is missing, or they do not go with a recipe or an estimate.
    """
    if is_recipe_path(sources) or context.params.get("dry_run"):
        other = "--dry-run" if context.params.get("dry_run") else "a recipe"
        raise UsageError(f"{other} cannot be divided among jobs", hint="leave out --job-index, --num-jobs and --stage")
    if array["stage"] == DUPLICATES:
        if array["job_index"] is not None or array["num_jobs"] is not None:
            raise UsageError("--stage duplicates is done by one process", hint="leave out --job-index and --num-jobs")
        return {"stage": DUPLICATES}
    for name in ("job_index", "num_jobs"):
        if array[name] is None:
            raise UsageError(
                f"missing option '--{name.replace('_', '-')}'",
                hint="give --job-index I and --num-jobs N, with I below N",
            )
    return dict(array)


def job_lines(result: JobResult) -> list[tuple[str, str]]:
    """What is to be said of a job, as labels and values."""
    directory = str(result.directory)
    record = result.record
    if record is None:
        if result.stage == DUPLICATES:
            return [("directory", directory), ("next", "jobs with --stage write")]
        return [("directory", directory), ("state", "complete: nothing to do")]
    done = f"{counted(record.num_tasks, 'task')} done"
    written = f"{counted(record.documents, 'document')}, {counted(record.tokens, 'token')}"
    following = (
        "when all jobs are done, one process with --stage duplicates"
        if result.stage == HASH
        else f"when all jobs are done, tokshard build --commit {shlex.quote(directory)}"
    )
    return [
        ("directory", directory),
        ("job", f"{record.job_index} of {record.num_jobs}: {done}"),
        *([] if result.stage == HASH else [("written", written)]),
        ("time", f"{result.seconds:.1f} s"),
        ("next", following),
    ]


def job_json(result: JobResult) -> dict[str, Any]:
    """The job for ``--json``."""
    return {
        "directory": str(result.directory),
        "stage": result.stage,
        "seconds": result.seconds,
        "job": msgspec.to_builtins(result.record),
    }
