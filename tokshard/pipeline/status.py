"""``tokshard status``: how far a build is, by what it left on disk. Changes nothing."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field

import msgspec

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.generations import combined_manifest
from tokshard.format.manifest import IN_OTHER_SPLIT, BuildConfig
from tokshard.format.opening import read_generations
from tokshard.pipeline.append import newest_generation
from tokshard.pipeline.job_array.status import JobStatus, job_statuses, seconds_left
from tokshard.pipeline.sources.inputs import read_once_name
from tokshard.pipeline.workspace.lease import lock_holder
from tokshard.pipeline.workspace.places import Stage, Workspace, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt, read_receipts
from tokshard.pipeline.workspace.settings import Command, Settings, load_bad_inputs, load_command, load_settings
from tokshard.store import present

_OTHER_SPLIT = frozenset(IN_OTHER_SPLIT.values())

COMPLETE, RUNNING, UNFINISHED = "complete", "running", "unfinished"


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildStatus:
    """How far a build is.

    Args:
        state: ``complete``, ``running`` (a process holds the lock, or jobs run) or ``unfinished``.
        stage: of an unfinished build: ``hashing``, ``finding duplicates`` or ``encoding``; of a copy ``copying``, or of
            a shuffled one ``dealing`` or ``gathering``.
        holder: process and host of a running build, if it said so.
        tasks_done, num_tasks: of the stage; `num_tasks` is 0 where it is not known.
        segments_done: segments of streams that were not read to their end yet.
        generation: that an append adds; of a complete corpus, its newest.
        left_out: reason to count, so far.
        command, working_directory: what continues the build; empty if it is unknown or impossible.
        read_once: inputs that can be read once only, because of which the build cannot be continued.
        jobs: all of the array that shares the build, by index; empty if none does.
        seconds_left: of the stage, at the rate of the jobs that run; None if it is unknown.
    """

    directory: str
    state: str
    stage: str = ""
    holder: str = ""
    tasks_done: int = 0
    num_tasks: int = 0
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
    generation: int = 0
    command: tuple[str, ...] = ()
    working_directory: str = ""
    read_once: tuple[str, ...] = ()
    jobs: tuple[JobStatus, ...] = ()
    seconds_left: float | None = None


def read_status(location: str | os.PathLike[str]) -> BuildStatus:
    """How far the build in a directory is.

    Raises:
        UsageError: the directory holds no build.
        TokshardError: what it left is damaged.
    """
    workspace = open_workspace(location)
    settings = load_settings(workspace)
    if settings is None:
        return _finished(workspace)
    holder = lock_holder(workspace)
    command = load_command(workspace)
    if settings.config.copied is not None:
        return _copy_status(workspace, settings, command, holder)
    read_once = tuple(map(read_once_name, settings.sources.read_once))
    encoding = [receipt for receipt, _ in read_receipts(workspace)]
    num_tasks = 0 if command is None else command.num_tasks
    stage, receipts = "encoding", encoding
    if settings.config.dedup == "exact" and not encoding:
        stage, receipts = "hashing", [receipt for receipt, _ in read_receipts(workspace.hashing)]
    if load_settings(workspace) is None:
        return _finished(workspace)  # the build ended meanwhile, and what it had left is gone
    left_out: Counter[str] = Counter()
    for receipt in receipts:
        for source in receipt.outputs[0].sources:
            left_out.update({reason: n for reason, n in source.left_out.items() if reason not in _OTHER_SPLIT})
    tasks_done, segments_done = _tasks_done(receipts)
    if stage == "hashing" and 0 < num_tasks == tasks_done:
        stage, num_tasks = "finding duplicates", 0  # how many tasks this takes, nothing on disk says
        tasks_done = len(present(workspace.store, workspace.duplicates.receipts))
    bytes_done, total_bytes = sum(receipt.input_bytes for receipt in receipts), settings.sources.num_bytes
    jobs = job_statuses(workspace, Stage.HASHING if stage == "hashing" else Stage.ENCODING)
    is_running = holder is not None or any(job.state == RUNNING for job in jobs)
    return BuildStatus(
        directory=workspace.out,
        state=RUNNING if is_running else UNFINISHED,
        stage=stage,
        holder=holder or "",
        tasks_done=tasks_done,
        num_tasks=num_tasks,
        segments_done=segments_done,
        bytes_done=bytes_done,
        total_bytes=total_bytes,
        records=sum(receipt.records_read for receipt in receipts),
        documents=sum(receipt.documents for receipt in encoding),
        tokens=sum(receipt.tokens for receipt in encoding),
        bad_records=sum(receipt.num_rejects for receipt in receipts),
        damaged_inputs=len(load_bad_inputs(workspace)),
        left_out=dict(sorted(left_out.items())),
        config=settings.config,
        generation=settings.generation,
        command=() if command is None or read_once else tuple(command.words),
        working_directory="" if command is None or read_once else command.directory,
        read_once=read_once,
        jobs=jobs,
        seconds_left=seconds_left(jobs, max(0, total_bytes - bytes_done)),
    )


def _copy_status(workspace: Workspace, settings: Settings, command: Command | None, holder: str | None) -> BuildStatus:
    """How far a copy is: with a shuffle it deals documents first, and how many tasks follow nothing on disk says."""
    copied = settings.config.copied
    is_shuffled = copied is not None and copied.shuffle is not None
    dealing = [receipt for receipt, _ in read_receipts(workspace.dealing, lambda key: key[0] == 0)]
    copying, documents, tokens = list[Receipt](), 0, 0
    for receipt, (rows, *_) in read_receipts(workspace, lambda key: key[1] == 0):  # others write the same again
        copying.append(receipt)
        documents += sum(rows.column("num_documents").to_pylist())
        tokens += sum(rows.column("num_tokens").to_pylist())
    if load_settings(workspace) is None:
        return _finished(workspace)
    num_tasks, total_bytes = (0, 0) if command is None else (command.num_tasks, command.total_bytes)
    is_dealing = is_shuffled and len(dealing) < num_tasks
    done = dealing if is_dealing else copying
    return BuildStatus(
        directory=workspace.out,
        state=UNFINISHED if holder is None else RUNNING,
        stage="dealing" if is_dealing else "gathering" if is_shuffled else "copying",
        holder=holder or "",
        tasks_done=len(done),
        num_tasks=0 if is_shuffled and not is_dealing else num_tasks,
        bytes_done=sum(receipt.input_bytes for receipt in done),
        total_bytes=total_bytes,
        documents=documents,
        tokens=tokens,
        config=settings.config,
        command=() if command is None else tuple(command.words),
        working_directory="" if command is None else command.directory,
    )


def _finished(workspace: Workspace) -> BuildStatus:
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if not all(names.MANIFEST in present(output.store) for output in outputs):
            continue
        manifests = [combined_manifest(read_generations(output.store)) for output in outputs]
        return BuildStatus(
            directory=workspace.out,
            state=COMPLETE,
            records=manifests[0].records.read,
            documents=sum(manifest.num_documents for manifest in manifests),
            tokens=sum(manifest.num_tokens for manifest in manifests),
            left_out={reason: n for reason, n in manifests[0].records.left_out.items() if reason not in _OTHER_SPLIT},
            config=msgspec.structs.replace(manifests[0].build, split=None),
            generation=newest_generation(outputs),
        )
    raise UsageError(
        f"{workspace.out} holds neither a build nor a corpus", hint="give the directory of 'tokshard build --out'"
    )


def _tasks_done(receipts: list[Receipt]) -> tuple[int, int]:
    """Tasks done, where a stream counts as one; and segments of streams that were not read to their end yet."""
    chains: Counter[int] = Counter()
    ended = set()
    tasks = 0
    for receipt in receipts:
        first = receipt.key[0]
        if receipt.previous is None and receipt.is_last:
            tasks += 1  # a task of its own, or a stream of one segment
            continue
        chains[first] += 1
        if receipt.is_last:
            ended.add(first)
    return tasks + len(ended), sum(count for first, count in chains.items() if first not in ended)
