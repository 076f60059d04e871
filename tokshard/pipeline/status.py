"""``tokshard status``: the progress of a build, from its files. Changes nothing."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.format.generations import combined_manifest
from tokshard.format.manifest import IN_OTHER_SPLIT, BuildConfig, TokenizerInfo
from tokshard.format.opening import read_generations
from tokshard.pipeline.adopt import load_tasks
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.options import command_words
from tokshard.pipeline.request import load_request, placed
from tokshard.pipeline.sources.inputs import RECORDS
from tokshard.pipeline.workspace.lease import lock_holder, running_jobs
from tokshard.pipeline.workspace.ownership import complete_outputs
from tokshard.pipeline.workspace.places import DEAL, FIND, HASH, REQUEST, WRITE, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt, progress_of, receipt_keys, receipts_of
from tokshard.store import present

_OTHER_SPLIT = frozenset(IN_OTHER_SPLIT.values())
_PASSES = {HASH: "hashing", FIND: "finding duplicates", DEAL: "dealing", WRITE: "writing"}
"""Stages in their order, each with its work."""

COMPLETE, RUNNING, UNFINISHED = "complete", "running", "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStatus:
    """The progress of a build.

    Args:
        state: ``complete``, ``running`` (a process holds the lock, or jobs run) or ``unfinished``.
        stage: the work of an unfinished build: ``hashing``, ``finding duplicates``, ``dealing`` or ``writing``.
        passes: how many times an unfinished build reads its inputs; `passes_done` of these are over.
        holders: the processes that run, as they call themselves.
        tasks_done, num_tasks: tasks of the stage; `num_tasks` is 0 where it is not known.
        failed: tasks that failed, and are tried again.
        segments_done: segments of streams that were not read to their end yet.
        bytes_done, total_bytes: bytes of inputs that this pass has read, and all of them.
        generation: the one that an append adds; of a complete corpus, its newest.
        left_out: reason to count, up to now.
        config, tokenizer: the settings of the build.
        is_built: jobs of an array have done all tasks, and the corpus is to be published.
        command, working_directory: how to continue the build; empty if a Python program does, with its iterables.
    """

    directory: str
    state: str
    stage: str = ""
    passes: int = 1
    passes_done: int = 0
    holders: tuple[str, ...] = ()
    tasks_done: int = 0
    num_tasks: int = 0
    failed: int = 0
    segments_done: int = 0
    bytes_done: int = 0
    total_bytes: int = 0
    records: int = 0
    documents: int = 0
    tokens: int = 0
    bad_records: int = 0
    damaged_inputs: int = 0
    left_out: dict[str, int] = field(default_factory=dict)
    config: BuildConfig | None = None
    tokenizer: TokenizerInfo | None = None
    generation: int = 0
    is_built: bool = False
    command: tuple[str, ...] = ()
    working_directory: str = ""


def read_status(location: str | os.PathLike[str]) -> BuildStatus:
    """The progress of the build in a directory.

    Raises:
        UsageError: the directory holds no build.
        TokshardError: its files are damaged.
    """
    workspace = open_workspace(location)
    while True:
        asked = _asked(workspace)
        try:
            return _status(workspace)
        except BuildError:  # of files that a build removed or replaced meanwhile
            if asked == _asked(workspace):
                raise


def _asked(workspace: Workspace) -> bytes | None:
    with contextlib.suppress(OSError):
        return workspace.store.get(REQUEST)
    return None


def _status(workspace: Workspace) -> BuildStatus:
    request = load_request(workspace)
    if request is None:
        return _finished(workspace)
    holders = (*filter(None, [lock_holder(workspace)]), *running_jobs(workspace).values())
    outputs = placed(request, workspace).outputs
    if not holders and all(names.MANIFEST in present(output.store) for output in outputs):
        return _finished(workspace)  # it was stopped after its manifest, while it removed its files
    has_pass = {HASH: request.options.is_dedup, DEAL: request.options.shuffle is not None, WRITE: True}
    passes = [name for name in has_pass if has_pass[name]]
    stage = _newest_stage(workspace, passes[0])
    kind = stage.partition("-")[0]
    receipts = list(receipts_of(workspace.store, stage))
    # documents are counted where inputs are read for the last time, not where they are put into order
    reading = DEAL if has_pass[DEAL] else WRITE
    written = receipts if stage == reading else list(receipts_of(workspace.store, reading))
    tasks = load_tasks(workspace) or []
    if load_request(workspace) is None:
        return _finished(workspace)  # the build ended meanwhile, and its files are gone
    done = [receipt for receipt in receipts if receipt.failure is None]
    tasks_done, segments_done = _tasks_done(done)
    is_reading = stage in (HASH, reading)
    total, made = progress_of(done), progress_of(one for one in written if one.failure is None)
    num_tasks, failed = len(tasks) if is_reading else 0, len(receipts) - len(done)
    is_whole = tasks_done == num_tasks and not failed and not segments_done
    is_built = request.is_array and kind == WRITE and num_tasks > 0 and is_whole and not holders
    command = command_words(request.sources, request.options, is_array=request.is_array)
    if is_built:
        command = ["tokshard", "commit", request.options.out]
    elif RECORDS in request.inputs.formats:
        command = []
    return BuildStatus(
        directory=workspace.out,
        state=RUNNING if holders else UNFINISHED,
        stage=_PASSES[kind],
        passes=len(passes),
        passes_done=passes.index(kind) if kind in passes else passes.index(HASH) + 1,
        holders=holders,
        tasks_done=tasks_done,
        num_tasks=num_tasks,
        failed=failed,
        segments_done=segments_done,
        # other stages read about as many bytes of files
        bytes_done=total.input_bytes if is_reading else min(total.input_bytes, request.inputs.num_bytes),
        total_bytes=request.inputs.num_bytes,
        records=total.records,
        documents=made.documents,
        tokens=made.tokens,
        bad_records=total.bad,
        damaged_inputs=sum(len(receipt.left_out) for receipt in done),
        left_out=_left_out(receipts),
        config=request.config,
        tokenizer=request.tokenizer,
        generation=request.generation,
        is_built=is_built,
        command=tuple(command),
        working_directory=request.directory if command else "",
    )


def _newest_stage(workspace: Workspace, first: str) -> str:
    """The stage that was begun last."""
    order = list(_PASSES)
    begun = [name.rstrip("/") for name in present(workspace.store, names.WORK)]
    known = [name for name in begun if name.partition("-")[0] in order and receipt_keys(workspace.store, name)]
    # numbers as numbers: deal-10 comes after deal-9
    return max(known, key=lambda name: (order.index(name.partition("-")[0]), len(name), name), default=first)


def _left_out(receipts: list[Receipt]) -> dict[str, int]:
    left_out: Counter[str] = Counter()
    for receipt in receipts:
        for source in receipt.outputs[0].sources if receipt.outputs else ():
            left_out.update({reason: n for reason, n in source.left_out.items() if reason not in _OTHER_SPLIT})
    return dict(sorted(left_out.items()))


def _finished(workspace: Workspace) -> BuildStatus:
    outputs = complete_outputs(workspace)
    if not outputs:
        raise UsageError(
            f"{workspace.out} holds neither a build nor a corpus", hint="give the directory of 'tokshard build --out'"
        )
    manifests = [combined_manifest(read_generations(output.store)) for output in outputs]
    return BuildStatus(
        directory=workspace.out,
        state=COMPLETE,
        records=manifests[0].records.read,
        documents=sum(manifest.num_documents for manifest in manifests),
        tokens=sum(manifest.num_tokens for manifest in manifests),
        left_out={reason: n for reason, n in manifests[0].records.left_out.items() if reason not in _OTHER_SPLIT},
        config=msgspec.structs.replace(manifests[0].build, split=None),
        tokenizer=manifests[0].tokenizer,
        generation=newest_generation(outputs),
    )


def _tasks_done(receipts: list[Receipt]) -> tuple[int, int]:
    """Tasks done, where a stream counts as one; and segments of streams that were not read to their end yet."""
    open_streams = {receipt.key[0] for receipt in receipts if not receipt.is_last}
    ended = {receipt.key[0] for receipt in receipts if receipt.is_last and receipt.key[0] in open_streams}
    tasks = sum(receipt.key[0] not in open_streams for receipt in receipts) + len(ended)
    return tasks, sum(receipt.key[0] in open_streams - ended for receipt in receipts)
