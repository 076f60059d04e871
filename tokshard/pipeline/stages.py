"""The stages of a build. Each stage begins after the receipts of the stage before are judged.

plain build, import, copy     write
with --dedup exact            hash, find, write
a shuffled copy               deal, write
both                          hash, find, deal, write

Hash, find and deal have levels: `tokshard.pipeline.tasks.exchange`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from tokshard.format.manifest import shard_schema
from tokshard.pipeline.append import earlier_texts
from tokshard.pipeline.judge import Judge, is_divided
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.duplicates import (
    MAX_DROP_FILES,
    Drops,
    bucket_groups,
    drop_levels,
    hash_levels,
    number_of,
    text_levels,
)
from tokshard.pipeline.tasks.exchange import FAN_IN, Dealt, Levels, digest_of, join_tasks
from tokshard.pipeline.tasks.planning import AnyTask, group_tokens, groups, step_tasks
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.tasks.shuffle import deal_levels
from tokshard.pipeline.workspace.places import DEAL, FIND, HASH, WRITE
from tokshard.pipeline.workspace.receipts import Failure, Receipt, files_there, receipt_keys, write_receipt

RunStage = Callable[[Stage], Judge]
"""Runs the tasks of a stage, and judges the stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageResults:
    """The results of the stages of a build.

    Args:
        counts: name of the stage whose receipts count records and documents, and its receipts, in order.
        shards: receipts of the stage that writes shards, in order.
        left_out: index of each input that was left out as damaged, with its damage.
        texts: with ``--dedup exact``, the hashes of all texts.
        is_limited: whether the limit on documents was reached.
    """

    counts: tuple[str, Sequence[Receipt]]
    shards: Sequence[Receipt]
    left_out: dict[int, str] = field(default_factory=dict)
    texts: Dealt | None = None
    is_limited: bool = False


def run_stages(build: Build, tasks: Sequence[AnyTask], run: RunStage) -> StageResults:
    """Run the stages of a build, one after another.

    Args:
        tasks: the tasks that read inputs.
    """
    left_out: dict[int, str] = {}
    while True:
        drops = None
        if build.options.is_dedup:
            hashed = run(Stage(name=HASH, tasks=tasks, left_out=left_out, inputs_digest=build.inputs.cuts))
            left_out = hashed.left_out
            drops = _duplicates(build, hashed.counted, run)
        reading = Stage(
            name=WRITE if build.options.shuffle is None else DEAL,
            tasks=tasks,
            limit=build.options.max_documents,
            inputs_digest="" if drops is None else drops.digest,
            left_out=left_out,
            drops=drops,
        )
        if reading.name == WRITE:
            read = shards = run(reading)
        else:
            read, shards = _shuffled(build, reading, run)
        # an input that was damaged after it was hashed may hold the first copy of a text: find the duplicates again
        if drops is None or read.left_out.keys() <= left_out.keys():
            return StageResults(
                counts=(reading.name, read.counted),
                shards=shards.counted,
                left_out=read.left_out,
                texts=None if drops is None else drops.texts,
                is_limited=read.is_full,
            )
        left_out = read.left_out
        _leave_out_of_hashing(build, tasks, left_out)


def _leave_out_of_hashing(build: Build, tasks: Sequence[AnyTask], left_out: Mapping[int, str]) -> None:
    """Fail the hashing of divided inputs that were damaged since, so every process begins with the same knowledge.

    The receipt of a group lists the inputs that it left out, once it has run again.
    """
    for task in tasks:
        index, segment = task.key
        if index in left_out and not segment and is_divided(task):
            failure = Failure(kind="input", source=index, problem=left_out[index])
            write_receipt(build.workspace.store, HASH, Receipt(key=task.key, failure=failure))


def _duplicates(build: Build, hashed: Sequence[Receipt], run: RunStage) -> Drops:
    """Find the duplicates among the hashes that tasks have dealt."""
    earlier = earlier_texts(build.outputs)
    digest = digest_of(hashed, [texts.sha256 for texts in earlier])
    tasks = np.array([number_of(receipt.key) for receipt in hashed], np.int64)
    num_texts = sum(receipt.documents for receipt in hashed)
    texts = _dealt(
        build, run, HASH, hashed, begun=hash_levels(), levels=text_levels(num_texts), digest=digest, most=FAN_IN
    )
    drops = drop_levels(num_texts, len(tasks))
    steps = step_tasks("find", bucket_groups(texts), digest)
    found = run(Stage(name=FIND, tasks=steps, levels=drops, dealt=texts, earlier=earlier, hashed=tasks)).counted
    most = MAX_DROP_FILES if drops.depth == 1 else FAN_IN  # after a later level, a bucket is in one file
    places = _dealt(build, run, FIND, found, begun=drops, levels=drops, digest=digest, most=most)
    return Drops(tasks=tasks, places=places, digest=digest, texts=texts)


def _shuffled(build: Build, reading: Stage, run: RunStage) -> tuple[Judge, Judge]:
    """Deal documents to buckets, level by level, and gather them. Returns the first stage and the last."""
    store, levels = (
        build.workspace.store,
        deal_levels(build.inputs.num_bytes, shard_schema(build.tokenizer, build.columns)),
    )
    # a level's files are removed when the next level is complete: of earlier ones, only the first's counts are read
    complete = [
        n
        for n in range(1, levels.depth)
        if len(receipt_keys(store, f"{DEAL}-{n}")) == len(files_there(store, f"{DEAL}-{n}")) == levels.fan_out**n
    ]
    first = max(complete, default=0)
    read = run(replace(reading, levels=levels, has_files=not first))
    digest = digest_of(read.counted)
    dealt = _dealt(build, run, DEAL, read.counted, begun=levels, levels=levels, digest=digest, first=max(1, first))
    tasks = step_tasks("gather", groups(dealt.sizes(), group_tokens(build.config.shard_tokens)), digest)
    return read, run(Stage(name=WRITE, tasks=tasks, dealt=dealt))


def _dealt(
    build: Build,
    run: RunStage,
    name: str,
    receipts: Sequence[Receipt],
    *,
    begun: Levels,
    levels: Levels,
    digest: str,
    first: int = 1,
    most: int | None = None,
) -> Dealt:
    """Join the files of a first level, deal their rows level by level, and return the rows of the last level.

    Args:
        name: the stage of the first level; later ones are numbered.
        receipts: its receipts.
        begun: how its tasks dealt the rows.
        levels: how the rows have to be dealt in the end.
        first: the first later level that is not done.
        most: files that a task of a later stage may open; None: any number.
    """
    store, joins = build.workspace.store, 0
    receipts = [receipt for receipt in receipts if receipt.rounds]
    dealt = Dealt.by(store, begun, name, receipts)
    while receipts and (dealt.levels != levels or (most is not None and len(receipts) > most)):
        joins += 1
        tasks = join_tasks(receipts, most or FAN_IN)
        receipts = run(Stage(name=f"{name}-{joins}", tasks=tasks, levels=levels, dealt=dealt)).counted
        dealt = Dealt.by(store, levels, f"{name}-{joins}", receipts)
    for level in range(first, levels.depth):
        stage, tasks = (
            f"{name}-{joins + level}",
            step_tasks("redeal", pairwise(range(levels.fan_out**level + 1)), digest),
        )
        dealing = Stage(name=stage, tasks=tasks, levels=levels, dealt=dealt)
        before, dealt = dealt, Dealt.by(store, levels, stage, run(dealing).counted, level + 1)
        if name == DEAL and not build.is_array:  # documents are large; a job may still read them
            store.delete(*(file.name for file in before.files))
    return dealt
