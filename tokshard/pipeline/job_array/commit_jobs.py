"""The end of a build by jobs: one process judges what only all receipts decide, and commits."""

from __future__ import annotations

import os
import secrets

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.opening import read_manifest
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.commit import commit
from tokshard.pipeline.executors.surroundings import leaving_the_program_alone
from tokshard.pipeline.job_array.missing import explained
from tokshard.pipeline.job_array.saved_build import load_build
from tokshard.pipeline.options import path_option
from tokshard.pipeline.prepare import prepared_before
from tokshard.pipeline.progress import Observer, ignore
from tokshard.pipeline.result import BuildResult
from tokshard.pipeline.run import run
from tokshard.pipeline.stage import Access
from tokshard.pipeline.workspace.lease import lock
from tokshard.pipeline.workspace.output_directory import BuiltCorpus
from tokshard.pipeline.workspace.places import Workspace, open_workspace
from tokshard.store import present


@leaving_the_program_alone()
def commit_jobs(out: str | os.PathLike[str], *, workers: int | None = None, observer: Observer = ignore) -> BuildResult:
    """Make the corpus of the tasks that jobs ran: the bytes and the errors are those of a build by one process.

    Runs what only all receipts decide: the task at which a limit falls, and those that jobs gave up.

    Raises:
        UsageError: no jobs have begun a build in `out`.
        SourceError: the lowest failure of any job.
        BuildError: tasks are missing, or jobs still run; it says which.
    """
    workspace = open_workspace(path_option("out", out), attempt=secrets.token_hex(8))
    if load_build(workspace, workers=workers) is None:
        return _complete(workspace)
    with explained(workspace), lock(workspace):
        saved = load_build(workspace, workers=workers)
        if saved is None:
            return _complete(workspace)
        outputs = saved.resolved.context.outputs
        if all(names.MANIFEST in present(output.store) for output in outputs):
            workspace.remove()  # a commit was killed between its manifest and its last step
            return _complete(workspace)
        workspace.take_over()
        prepared = prepared_before(saved.resolved, saved.tasks)
        return commit(prepared, run(prepared, observer=observer, access=Access.JUDGE))


def _complete(workspace: Workspace) -> BuildResult:
    """The result where another process has committed.

    Raises:
        UsageError: there is no corpus.
    """
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            outputs = workspace.outputs(is_split=is_split, generation=newest_generation(outputs))
            corpora = [
                BuiltCorpus(directory=output.store.location, manifest=read_manifest(output.store)) for output in outputs
            ]
            return BuildResult(directory=workspace.out, corpora=tuple(corpora), is_new=False, ignored={}, notes=())
    raise UsageError(
        f"{workspace.out} holds no build that jobs have begun",
        hint="run the jobs first: tokshard build ... --job-index I --num-jobs N",
    )
