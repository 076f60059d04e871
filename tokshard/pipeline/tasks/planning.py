"""The tasks of a build: a pure function of the inputs and ``task_bytes``, never of workers.

Nothing here reads an input. Only an input's bytes tell how it can be divided, so this is passed as a `Divisibility`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import msgspec

from tokshard.forking import decodable
from tokshard.numbers import ceil_div
from tokshard.pipeline.sources.division import CHUNK_BYTES, INDIVISIBLE, LINES, STREAM, Divisibility, Span
from tokshard.pipeline.workspace.receipts import Key

MIN_TASK_BYTES = 16 << 20
_MAX_TASK_BYTES = 512 << 20
SEGMENT_TASKS = 16
"""A segment of a stream is as large as so many tasks, if it is not larger than any task: segments share out no work,
they only bound what a kill repeats."""
_TASKS_WANTED = 256
TASK_TOKENS = 64 << 20
"""Tokens that a dealing task reads. A task that copies smaller shards writes as many as fit, because a receipt has a
cost."""
_MAX_GROUP_INPUTS = 16_384
"""The most inputs of a task: opening a file costs more than reading a tiny one, and a receipt has a line for each. A
change of this number changes the shards."""


@decodable
class Task(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A task of known extent: consecutive whole inputs, or a part of one.

    Args:
        key: names the task, its receipt and its shards; it begins with the first input.
        stop: index of the input after the last one.
        span: the part of each that is read.
    """

    key: Key
    stop: int
    span: Span = Span()

    @property
    def inputs(self) -> range:
        """The inputs that it reads."""
        return range(self.key[0], self.stop)

    @property
    def is_group(self) -> bool:
        """Whether it reads whole inputs."""
        return self.span == Span()


@decodable
class StreamTask(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """An input that is read from its start and divided into segments, each with a receipt of its own.

    Args:
        key: (index of the input, 0).
    """

    key: Key


StepKind = Literal["join", "redeal", "find", "gather"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTask:
    """Work on files of earlier stages.

    Args:
        kind: ``join``: deal the rows of some files of the first level into one file of that level; ``redeal``: deal the
            rows of a bucket to the buckets of the next level; ``find``: deal the places of the duplicates in some
            buckets, by task; ``gather``: write the documents of some buckets of the last level.
        start, stop: the files or buckets that it reads.
        inputs_digest: digest of all that determines the result.
    """

    key: Key
    kind: StepKind
    start: int
    stop: int
    inputs_digest: str


def step_tasks(kind: StepKind, ranges: Iterable[tuple[int, int]], digest: str) -> list[StepTask]:
    """A task for each range of files or buckets, in order."""
    return [
        StepTask(key=(number, 0), kind=kind, start=start, stop=stop, inputs_digest=digest)
        for number, (start, stop) in enumerate(ranges)
    ]


Planned = Task | StreamTask
"""A task that reads inputs."""

AnyTask = Planned | StepTask


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run of a task.

    Args:
        max_documents: the most documents that it may write: the rest of the limit before it. None: any number.
        num_done: segments of a stream with a receipt, from the first on.
    """

    task: AnyTask
    max_documents: int | None = None
    num_done: int = 0


def default_task_bytes(total_bytes: int) -> int:
    """About `_TASKS_WANTED` tasks, each of 16 to 512 MiB: enough tasks to share, and large shards for large inputs.

    Args:
        total_bytes: size of all inputs.
    """
    wanted = max(MIN_TASK_BYTES, min(_MAX_TASK_BYTES, total_bytes // _TASKS_WANTED))
    return round_task_bytes(wanted)


def segment_bytes(task_bytes: int) -> int:
    """Size of the segments of a stream, in bytes of text."""
    return max(task_bytes, min(SEGMENT_TASKS * task_bytes, _MAX_TASK_BYTES))


def round_task_bytes(task_bytes: int) -> int:
    """The next multiple of `CHUNK_BYTES`, so that no chunk lies in two tasks."""
    return max(1, ceil_div(task_bytes, CHUNK_BYTES)) * CHUNK_BYTES


def plan_tasks(num_bytes: Iterable[int], divisibilities: Iterable[Divisibility], task_bytes: int) -> Iterator[Planned]:
    """Group small inputs up to `task_bytes` or `_MAX_GROUP_INPUTS` inputs; divide large ones.

    Args:
        num_bytes: size of each input, in order.
        divisibilities: how each can be divided; used only for streams, which are never grouped, and inputs larger
            than `task_bytes`.
    """
    start = group_bytes = 0  # the group is [start, index)
    index = -1
    for index, (size, divisibility) in enumerate(zip(num_bytes, divisibilities, strict=True)):
        is_divided = size > task_bytes or divisibility == STREAM
        if is_divided and divisibility != INDIVISIBLE:
            if start < index:
                yield _whole(start, index)
            yield from _divide(index, size, divisibility, task_bytes)
            start, group_bytes = index + 1, 0
            continue
        group_bytes += size
        if group_bytes >= task_bytes or index + 1 - start >= _MAX_GROUP_INPUTS:
            yield _whole(start, index + 1)
            start, group_bytes = index + 1, 0
    if start <= index:
        yield _whole(start, index + 1)


def _whole(start: int, stop: int) -> Task:
    return Task(key=(start, 0), stop=stop)


def _divide(index: int, size: int, divisibility: Divisibility, task_bytes: int) -> Iterator[Planned]:
    if divisibility == LINES:
        starts = range(0, size, task_bytes)
        for segment, start in enumerate(starts):
            # the last range is open, so that a file never loses its end
            stop = None if segment == len(starts) - 1 else start + task_bytes
            yield Task(key=(index, segment), stop=index + 1, span=Span(start, stop))
    elif isinstance(divisibility, tuple):
        for segment, (start, stop) in enumerate(pairwise(_group_bounds(divisibility, task_bytes))):
            yield Task(key=(index, segment), stop=index + 1, span=Span(start, stop))
    else:
        yield StreamTask(key=(index, 0))


def _group_bounds(group_bytes: Sequence[int], task_bytes: int) -> list[int]:
    bounds, filled = [0], 0
    for number, size in enumerate(group_bytes):
        if filled >= task_bytes:
            bounds.append(number)
            filled = 0
        filled += size
    bounds.append(len(group_bytes))
    return bounds


def groups(num_tokens: Sequence[int], most: int) -> Iterator[tuple[int, int]]:
    """Divide items into groups of at most `most` tokens or of one item: ``(start, stop)`` of each, in order."""
    start = filled = 0
    for index, tokens in enumerate(num_tokens):
        if filled and filled + tokens > most:
            yield start, index
            start, filled = index, 0
        filled += tokens
    if start < len(num_tokens):
        yield start, len(num_tokens)


def group_tokens(shard_tokens: int) -> int:
    """The most tokens of a copying task: a whole number of shards of the copy, which end with their task."""
    return shard_tokens * max(1, TASK_TOKENS // shard_tokens)


def plan_groups(num_tokens: Sequence[int], shard_tokens: int | None) -> Iterator[Task]:
    """The tasks of a copy: each reads shards of at most so many tokens together, or one shard.

    Args:
        num_tokens: tokens of each shard, in order.
        shard_tokens: tokens of the shards of the copy; None: the tasks only deal documents.
    """
    most = TASK_TOKENS if shard_tokens is None else group_tokens(shard_tokens)
    return (_whole(start, stop) for start, stop in groups(num_tokens, most))
