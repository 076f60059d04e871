"""The stages of a build. Each stage begins after the receipts of the stage before are judged.

plain build, import, copy     write
with --dedup exact            hash, join and find, write
a shuffled copy               deal, write
both                          hash, join and find, deal, write
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tokshard.pipeline.append import earlier_texts
from tokshard.pipeline.judge import Judge, is_divided
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.duplicates import Drops, digest_of, find_duplicates
from tokshard.pipeline.tasks.planning import AnyTask, group_tokens
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.tasks.shuffle import deal_levels, dealt_files, gather_tasks, redeal_tasks
from tokshard.pipeline.tasks.sorted_rows import Run as SortedRun
from tokshard.pipeline.workspace.places import DEAL, HASH, WRITE
from tokshard.pipeline.workspace.receipts import Failure, Receipt, files_there, receipt_keys, write_receipt

RunStage = Callable[[Stage], Judge]
"""Has the tasks of a stage run, and judges it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
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
    texts: tuple[SortedRun, ...] = ()
    is_limited: bool = False


def run_stages(build: Build, tasks: Sequence[AnyTask], run: RunStage) -> Settled:
    """Run the stages of a build, one after another.

    Args:
        tasks: the tasks that read inputs.
    """
    left_out: dict[int, str] = {}
    while True:
        drops = None
        if build.options.is_dedup:
            hashed = run(Stage(name=HASH, tasks=tasks, left_out=left_out))
            left_out = hashed.left_out
            drops = _duplicates(build, hashed.counted, run)
        reading = Stage(
            name=WRITE if build.options.shuffle is None else DEAL,
            tasks=tasks,
            limit=build.options.max_documents,
            made_of="" if drops is None else drops.digest,
            left_out=left_out,
            drops=drops,
        )
        if reading.name == WRITE:
            read = shards = run(reading)
        else:
            read, shards = _shuffled(build, reading, run)
        # an input that was damaged after it was hashed may hold the first copy of a text: find the duplicates again
        if drops is None or read.left_out.keys() <= left_out.keys():
            return Settled(
                counts=(reading.name, read.counted),
                shards=shards.counted,
                left_out=read.left_out,
                texts=() if drops is None else drops.texts,
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
    search = find_duplicates(build.workspace.store, hashed, earlier_texts(build.outputs))
    try:
        name, tasks = next(search)
        while True:
            name, tasks = search.send(run(Stage(name=name, tasks=tasks)).counted)
    except StopIteration as end:
        drops: Drops = end.value
        return drops


def _shuffled(build: Build, reading: Stage, run: RunStage) -> tuple[Judge, Judge]:
    """Deal documents to buckets, level by level, and gather them. Returns the first stage and the last."""
    store, levels = build.workspace.store, deal_levels(build.inputs.num_bytes)
    again = [f"{DEAL}-{level}" for level in range(1, levels.depth)]
    # the files of a level go when the next one is complete: below that one only the counts of the first are wanted
    complete = [
        n
        for n, name in enumerate(again, 1)
        if len(receipt_keys(store, name)) == len(files_there(store, name)) == levels.fan_out**n
    ]
    first = max(complete, default=0)
    dealt = run(replace(reading, levels=levels, has_files=not first))
    made_of = digest_of([[one.key, one.made_of, sorted(one.left_out), one.documents] for one in dealt.counted])
    files = dealt_files(DEAL, dealt.counted)
    for level, name in enumerate(again, 1):
        if level >= first:
            tasks = redeal_tasks(levels, level, made_of)
            redealt = run(Stage(name=name, tasks=tasks, levels=levels, dealt=files))
            before, files = files, dealt_files(name, redealt.counted)
            if not build.is_array:  # a job may still read them
                store.delete(*(file.name for file in before))
    tasks = gather_tasks(store, files, levels, group_tokens(build.config.shard_tokens), made_of)
    return dealt, run(Stage(name=WRITE, tasks=tasks, levels=levels, dealt=files))
