"""The stages of a copy: their tasks run until all have a receipt, by the schedule and the executors of a build."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from tokshard.format.corpus import Corpus
from tokshard.format.schema import ShardFacts
from tokshard.pipeline.copying import planning
from tokshard.pipeline.copying.commit import Origin, Written
from tokshard.pipeline.copying.dealing import DealtFile, bucket_tokens
from tokshard.pipeline.copying.planning import (
    Kind,
    Levels,
    Work,
    deal_levels,
    groups,
    later_works,
    shard_works,
    task_tokens,
)
from tokshard.pipeline.copying.runner import CopyContext, CopyRunner, dealt_path
from tokshard.pipeline.copying.selection import Selection
from tokshard.pipeline.drive import Change, drive
from tokshard.pipeline.executors.base import Executor
from tokshard.pipeline.executors.inline import InlineExecutor
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.executors.surroundings import prepare_workers
from tokshard.pipeline.tasks.planning import Key, Task
from tokshard.pipeline.tasks.schedule import Schedule
from tokshard.pipeline.valid_receipts import discard_receipt
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import Progress, Receipt, read_receipts
from tokshard.store import Store, side_by_side

Works = Mapping[Key, Work]


class CopyStages:
    """The tasks of a copy, and who runs them.

    Args:
        on_progress: called with the tokens that are read by now, and with all that will be.
    """

    def __init__(
        self,
        workspace: Workspace,
        corpora: Sequence[Corpus],
        origin: Origin,
        selection: Selection,
        *,
        workers: int,
        on_progress: Callable[[int, int], None] | None,
    ) -> None:
        copied = origin.build.copied
        assert copied is not None
        self._workspace, self._workers, self._on_progress = workspace, workers, on_progress
        self._num_tokens = sum(corpus.num_tokens for corpus in corpora)
        self._levels = None if copied.shuffle is None else deal_levels(sum(c.manifest.num_bytes for c in corpora))
        facts = shard_facts(origin)
        self._context = CopyContext(
            workspace=workspace,
            corpora=[(corpus.location, corpus.num_generations - 1) for corpus in corpora],
            selection=selection,
            facts=facts,
            shard_tokens=origin.build.shard_tokens,
            works={},
            seed=copied.shuffle or 0,
            levels=self._levels,
        )
        self._task_tokens = task_tokens(origin.build.shard_tokens)
        works = shard_works(
            Kind.COPY if self._levels is None else Kind.DEAL,
            [info.sha256 for corpus in corpora for info in corpus.shards],
            np.concatenate([np.diff(corpus.shards.first_tokens) for corpus in corpora]).tolist(),
            self._task_tokens if self._levels is None else planning.TASK_TOKENS,
            (origin.build, facts, self._levels),
        )
        self._first = {_key(self._levels, index): work for index, work in enumerate(works)}

    @property
    def num_tasks(self) -> int:
        """Tasks that read the corpora."""
        return len(self._first)

    def run(self) -> Written:
        """Run the tasks that left no receipt yet.

        Raises:
            CorpusError: a corpus is damaged.
            BuildError: a worker died twice on the same task, or the disk takes no more.
        """
        if self._workers > 1:
            prepare_workers()
        if self._levels is None:
            receipts = self._run(replace(self._context, works=self._first), number=0, moved=self._moved())
            return self._merged([receipt.tokens for receipt in receipts])
        dealt, digests = self._deal(self._levels)
        ranges = groups(_bucket_tokens(self._workspace.store, dealt, self._levels), self._task_tokens)
        works = {(index, 0): work for index, work in enumerate(later_works(Kind.GATHER, ranges, digests))}
        is_dealt_again = self._levels.depth > 1
        context = replace(self._context, works=works, dealt=dealt, is_dealt_again=is_dealt_again)
        self._run(context, number=self._levels.depth)
        # the documents of one task come from all sources: the receipts of those that read them have shorter counts
        return Written(shards=list(works), counted=list(self._first), counting=self._workspace.dealing)

    def _merged(self, tokens: Sequence[int]) -> Written:
        """Make one shard of those that consecutive tasks wrote, where they fit into one.

        Args:
            tokens: that each task wrote.
        """
        works = self._merges(tokens)
        self._run(replace(self._context, works=works), number=1)
        merged = {(index, 0) for work in works.values() for index in range(work.start, work.stop)}
        shards = sorted(works.keys() | (self._first.keys() - merged))
        return Written(shards=shards, counted=sorted(merged), counting=self._workspace)

    def _merges(self, tokens: Sequence[int]) -> Works:
        fitting = groups(tokens, self._context.shard_tokens)
        ranges = [(start, stop) for start, stop in fitting if np.count_nonzero(tokens[start:stop]) > 1]
        digests = [work.digest for work in self._first.values()]
        return {(work.start, 1): work for work in later_works(Kind.MERGE, ranges, digests)}

    def _moved(self) -> set[Key]:
        """The tasks whose shards are in others now, and may be gone: they are removed before the manifest is there."""
        workspace = self._workspace
        if not any(True for _ in read_receipts(workspace, lambda key: key[1] == 1)):
            return set()
        receipts = [receipt for receipt, _ in read_receipts(workspace, self._first.__contains__)]
        tokens = [receipt.tokens for receipt in receipts if receipt.merge == self._first[receipt.key].digest]
        if len(tokens) < len(self._first):
            return set()
        merges = self._merges(tokens)
        done = [merges[receipt.key] for receipt in _done(workspace, merges)]
        return {(index, 0) for work in done for index in range(work.start, work.stop)}

    def _deal(self, levels: Levels) -> tuple[list[DealtFile], list[str]]:
        """Deal the documents to the buckets of the last level; its files, and the digests of its tasks."""
        workspace = self._workspace.dealing
        works: list[Works] = [self._first]
        for level in range(1, levels.depth):
            digests = [work.digest for work in works[-1].values()]
            again = later_works(Kind.REDEAL, ((one, one + 1) for one in range(levels.fan_out**level)), digests)
            works.append({(level, index): work for index, work in enumerate(again)})
        # the files of a level go when the next one is complete: below that one nothing is looked at
        first = levels.depth - 1
        while first and len(_done(workspace, works[first])) < len(works[first]):
            first -= 1
        dealt: list[DealtFile] = []
        for level in range(first, levels.depth):
            context = replace(
                self._context, workspace=workspace, works=works[level], dealt=dealt, is_dealt_again=level > 1
            )
            receipts = self._run(context, number=level)
            dealt = [
                DealtFile(name=dealt_path(workspace, each.key), num_bytes=each.dealt_bytes, rounds=each.rows)
                for each in receipts
            ]
            if level:
                workspace.store.delete(*(dealt_path(workspace, key) for key in works[level - 1]))
        return dealt, [work.digest for work in works[-1].values()]

    def _run(self, context: CopyContext, *, number: int, moved: Collection[Key] = ()) -> list[Receipt]:
        """Run what one stage lacks; its receipts, in order.

        Args:
            number: of the stage.
            moved: tasks whose shards need not be there any more.
        """
        tasks = [Task(key=key, parts=()) for key in context.works]
        done = _done(context.workspace, context.works, moved)
        schedule = Schedule(tasks, done)
        read = self._num_tokens * number + self._num_tokens * len(done) // max(1, len(tasks))
        stages = 1 if self._levels is None else self._levels.depth + 1

        def show(progress: Progress) -> None:
            nonlocal read
            read += progress.tokens
            if self._on_progress is not None and number < stages:  # what is merged was read before
                self._on_progress(read, self._num_tokens * stages)

        with self._executor(context, show, len(tasks) - len(done)) as executor:
            failure = drive(schedule, executor, carry_out=_refuse, on_finished=lambda _: None)
        if failure is not None:
            raise failure[1]
        return schedule.receipts_in_order()

    def _executor(self, context: CopyContext, show: Callable[[Progress], None], num_tasks: int) -> Executor:
        num_workers = min(self._workers, num_tasks)
        if num_workers <= 1:
            return InlineExecutor(context, show, make_runner=CopyRunner)
        return ProcessExecutor(context, show, num_workers=num_workers, make_runner=CopyRunner)


def shard_facts(origin: Origin) -> ShardFacts:
    """What each shard of a copy repeats about it."""
    tokenizer = origin.first.manifest.tokenizer
    return ShardFacts(
        dtype=origin.first.dtype.name,
        tokenizer_sha256=tokenizer.canonical_sha256,
        eos_id=tokenizer.eos_id,
        bos_id=tokenizer.bos_id,
        columns=origin.columns,
    )


def _key(levels: Levels | None, index: int) -> Key:
    """The key of a task that reads the corpora: its shards are called by it, or the level of its file is in it."""
    return (index, 0) if levels is None else (0, index)


def _done(workspace: Workspace, works: Works, moved: Collection[Key] = ()) -> list[Receipt]:
    """The receipts of these tasks that hold: their files are there, or have moved. The others are discarded."""
    shards = {entry.name: entry.size for entry in workspace.store.list() if not entry.name.endswith("/")}
    dealt = {entry.name: entry.size for entry in workspace.store.list(workspace.dealt)}
    done = []
    for receipt, (rows, *_) in read_receipts(workspace, works.__contains__):
        named = dict(zip(rows.column("name").to_pylist(), rows.column("num_bytes").to_pylist(), strict=True))
        has_files = all(shards.get(name) == num_bytes for name, num_bytes in named.items())
        if receipt.dealt_bytes:
            has_files = dealt.get(dealt_path(workspace, receipt.key)) == receipt.dealt_bytes
        if (has_files or receipt.key in moved) and receipt.merge == works[receipt.key].digest:
            done.append(receipt.without_sources())
        else:
            discard_receipt(workspace, receipt.key)
    return done


def _bucket_tokens(store: Store, dealt: Sequence[DealtFile], levels: Levels) -> list[int]:
    """The tokens of every bucket of the last level."""
    of_each = list(side_by_side(store, partial(bucket_tokens, store, fan_out=levels.fan_out), dealt))
    if levels.depth > 1:
        return [int(tokens) for of_file in of_each for tokens in of_file]
    return [int(tokens) for tokens in sum(of_each, np.zeros(levels.fan_out, np.int64))]


def _refuse(decision: Change) -> None:
    raise AssertionError(f"{decision} is about an input, and these tasks read none")
