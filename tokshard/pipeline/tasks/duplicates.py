"""The search of ``--dedup exact`` for texts that repeat an earlier one, over all tasks, in bounded memory.

Hashing tasks leave sorted hashes. Each of the following stages reads the files of the stage before:

    join   merge the files of up to `FAN_IN` tasks into one, until no more than `FAN_IN` files are left
    find   read a range of hashes from each of these files, and write the places of the texts to drop
    join   merge these files, until no more than `MAX_DROP_FILES` are left, of which encoding tasks read their part

So every task opens a bounded number of files, and the number of tasks grows with the number of hashes. A join stage is
skipped if there is nothing to join.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.tasks.hashing import ROW_WIDTH, hash_runs, read_repeats, sorted_repeats
from tokshard.pipeline.tasks.planning import StepTask
from tokshard.pipeline.tasks.sorted_rows import (
    FAN_IN,
    Run,
    RunWriter,
    merged,
    read_fences,
    read_slice,
    row_ranges,
    run_bytes,
    run_count,
    slice_lows,
)
from tokshard.pipeline.workspace.places import FIND, HASH, JOIN
from tokshard.pipeline.workspace.receipts import Key, Receipt, file_path, read_receipt
from tokshard.store import Store, written

MAX_DROP_FILES = 8
"""Files in which an encoding task looks up its duplicates."""

_PLACE_BITS = 32

_HASH_WIDTH = 2
"""Columns of hashes alone: high and low half."""

_EARLIER = (1 << 64) - 1
"""The place of every text of an earlier generation."""

Step = tuple[str, Sequence[StepTask]]
"""Name and tasks of a stage."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """Merge runs into one."""

    runs: tuple[Run, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partition:
    """Find the duplicates among the hashes whose high halves are in ``[low, high)``.

    Args:
        runs: runs of all hashes, in input order.
        ranges: the rows of each run that may hold them: int64 [runs, 2].
        high: None: no limit.
    """

    runs: tuple[Run, ...]
    ranges: NDArray[np.int64]
    low: int
    high: int | None


@dataclass(frozen=True, slots=True)
class TaskDrops:
    """The texts of one task that repeat an earlier one.

    Args:
        places: ascending, see `tokshard.pipeline.tasks.hashing`.
    """

    places: NDArray[np.uint32]

    def is_kept(self, start: int, count: int) -> NDArray[np.bool_]:
        """Whether each text with a place in ``[start, start + count)`` stays: bool [count]."""
        kept = np.ones(count, np.bool_)
        low, high = np.searchsorted(self.places, np.array([start, start + count], np.uint32))
        kept[self.places[low:high].astype(np.int64) - start] = False
        return kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Finds the texts to drop of every task.

    Args:
        store: the store of the build.
        tasks: every hashing task, packed by `_packed`: uint64 [tasks], ascending.
        runs: the places of all duplicates: the index of the task in the high half, the place in the low one.
        ranges: the rows of each run that may hold the duplicates of each task: int64 [runs, tasks, 2].
        digest: identifies these tasks and their hashes, and so these lists.
        texts: the hashes of all texts of the build, with repeats; at most `FAN_IN` files.
    """

    store: Store
    tasks: NDArray[np.uint64]
    runs: tuple[Run, ...]
    ranges: NDArray[np.int64]
    digest: str
    texts: tuple[Run, ...] = ()

    def of(self, key: Key) -> TaskDrops:
        """The drops of one task. Opens its receipt, its hashes and each of at most `MAX_DROP_FILES` files.

        Raises:
            BuildError: a file cannot be read.
        """
        index = int(np.searchsorted(self.tasks, _packed(key)))
        assert self.tasks[index] == _packed(key), "encoding has a task that hashing has not"
        receipt = read_receipt(self.store, HASH, key)
        places = [read_repeats(self.store, file_path(HASH, key), receipt.parts)]
        if self.runs:
            low, high = (np.uint64(number << _PLACE_BITS) for number in (index, index + 1))
            found = read_slice(self.store, self.runs, self.ranges[:, index], low, high)
            places.append(found[:, 0].astype(np.uint32))  # the low half
        return TaskDrops(np.sort(np.concatenate(places)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTexts:
    """The texts of an earlier generation.

    Args:
        name: name of the file with their hashes, in the store of the build.
        sha256: hash of that file.
    """

    name: str
    num_bytes: int
    sha256: str

    @property
    def count(self) -> int:
        """The number of texts, with equal texts counted once."""
        return run_count(self.num_bytes, _HASH_WIDTH)


@dataclass(frozen=True, slots=True, kw_only=True)
class _SortedFile:
    """A file of sorted rows.

    Args:
        digest: digest of its bytes, or of all that determines them.
    """

    digest: str
    runs: tuple[Run, ...]

    @property
    def identity(self) -> list[object]:
        """The identity of its rows."""
        return [self.digest, *((run.name, run.base) for run in self.runs)]


def find_duplicates(
    store: Store, receipts: Sequence[Receipt], earlier: Sequence[EarlierTexts] = ()
) -> Generator[Step, Sequence[Receipt], Drops]:
    """Find the texts that repeat an earlier one. Yields stages, receives their receipts, and returns the places.

    Memory is 16 bytes per 1,024 hashes, 16 bytes per partition and file that it reads, and under 1 KB per task.

    Args:
        store: the store of the build.
        receipts: receipts of all hashing tasks, in order.
        earlier: texts that come before all others.

    Raises:
        BuildError: a file is damaged or gone.
    """
    joins = (f"{JOIN}-{number}" for number in count(1))
    files = [
        _SortedFile(
            digest=receipt.file_sha256,
            runs=tuple(hash_runs(file_path(HASH, receipt.key), receipt.parts, index << _PLACE_BITS)),
        )
        for index, receipt in enumerate(receipts)
        if receipt.parts
    ]
    while len(files) > FAN_IN:
        # the square root, because a join opens each file per slice, and a partition each joined file
        files = yield from _joined(files, min(FAN_IN, math.isqrt(len(files) - 1) + 1), next(joins))
    partitions = _partitions(store, [*map(_earlier_file, earlier), *files])
    drops = _files(FIND, partitions, (yield FIND, partitions), 1)
    while len(drops) > MAX_DROP_FILES:
        drops = yield from _joined(drops, min(FAN_IN, -(-len(drops) // MAX_DROP_FILES)), next(joins))
    runs = tuple(run for file in drops for run in file.runs)
    lows = np.arange(len(receipts), dtype=np.uint64) << np.uint64(_PLACE_BITS)
    ranges = [row_ranges(each, run.count, lows) for each, run in zip(read_fences(store, runs), runs, strict=True)]
    return Drops(
        store=store,
        tasks=np.array([_packed(receipt.key) for receipt in receipts], np.uint64),
        runs=runs,
        ranges=np.array(ranges, np.int64).reshape(len(runs), len(receipts), 2),
        digest=digest_of([*([texts.sha256] for texts in earlier), *([one.key, one.file_sha256] for one in receipts)]),
        texts=tuple(run for file in files for run in file.runs),
    )


def _joined(
    files: Sequence[_SortedFile], most: int, stage: str
) -> Generator[Step, Sequence[Receipt], list[_SortedFile]]:
    """Merge every `most` consecutive files into one."""
    tasks = []
    for number, start in enumerate(range(0, len(files), most)):
        group = files[start : start + most]
        step = Join(runs=tuple(run for file in group for run in file.runs))
        tasks.append(StepTask(key=(number, 0), step=step, made_of=digest_of(file.identity for file in group)))
    receipts = yield stage, tasks
    return _files(stage, tasks, receipts, files[0].runs[0].width)


def _partitions(store: Store, files: Sequence[_SortedFile]) -> list[StepTask]:
    """The tasks that find the duplicates among the hashes of files, each in a range of hashes."""
    runs = tuple(run for file in files for run in file.runs)
    if not runs:
        return []
    fences = read_fences(store, runs)
    lows = slice_lows(fences)
    ranges = np.stack([row_ranges(each, run.count, lows) for each, run in zip(fences, runs, strict=True)], axis=1)
    of_files = digest_of(file.identity for file in files)
    return [
        StepTask(
            key=(number, 0),
            step=Partition(runs=runs, ranges=ranges[number], low=low, high=high),
            made_of=digest_of([of_files, low, high]),
        )
        for number, (low, high) in enumerate(pairwise([*lows.tolist(), None]))
    ]


def _files(stage: str, tasks: Sequence[StepTask], receipts: Sequence[Receipt], width: int) -> list[_SortedFile]:
    """The files of rows of a width that tasks left, without empty files."""
    files = []
    for task, receipt in zip(tasks, receipts, strict=True):
        ((rows, _),) = receipt.parts
        name = file_path(stage, receipt.key)
        run = Run(name=name, file_bytes=receipt.file_bytes, offset=0, count=rows, width=width)
        if rows:
            files.append(_SortedFile(digest=task.made_of, runs=(run,)))
    return files


def _earlier_file(texts: EarlierTexts) -> _SortedFile:
    run = Run(
        name=texts.name,
        file_bytes=texts.num_bytes,
        offset=0,
        count=texts.count,
        width=_HASH_WIDTH,
        base=_EARLIER,
        is_checked=False,
    )
    return _SortedFile(digest=texts.sha256, runs=(run,))


def run_merge(store: Store, stage: str, key: Key, step: Join | Partition) -> Receipt:
    """Run one task: write its file. The caller writes the receipt.

    Raises:
        BuildError: a file that it reads is damaged or gone.
        OSError: nothing can be written.
    """
    name = file_path(stage, key)
    with written(store, name) as file:
        writer = RunWriter(file, name)
        for rows in merged(store, step.runs) if isinstance(step, Join) else _repeated_places(store, step):
            writer.append(rows)
        writer.finish()
    width = step.runs[0].width if isinstance(step, Join) else 1
    return Receipt(key=key, parts=[(writer.count, 0)], file_bytes=run_bytes(writer.count, width))


def _repeated_places(store: Store, partition: Partition) -> Iterator[NDArray[np.uint64]]:
    """The places of a partition's texts that repeat an earlier one: uint64 [n, 1], ascending."""
    high = None if partition.high is None else np.uint64(partition.high)
    rows = read_slice(store, partition.runs, partition.ranges, np.uint64(partition.low), high)
    order, is_repeat = sorted_repeats(rows[:, 0], rows[:, 1])
    places = rows[order[is_repeat], 2]
    yield np.sort(places[places != np.uint64(_EARLIER)])[:, np.newaxis]


def write_text_hashes(store: Store, texts: Sequence[Run], file: IO[bytes] | HashingFile) -> None:
    """Write the distinct hashes of all texts of a build, sorted: 16 bytes each, and fences.

    Raises:
        BuildError: a file cannot be read.
    """
    writer = RunWriter(file, None)
    for rows in merged(store, texts):
        order, is_repeat = sorted_repeats(rows[:, 0], rows[:, 1])
        writer.append(rows[order[~is_repeat], :_HASH_WIDTH])
    writer.finish()


def bytes_per_text(num_tasks: int) -> int:
    """Bytes of disk for each text until the build is done; a duplicate takes 8 to 16 more.

    Args:
        num_tasks: number of hashing tasks; segments of streams count one each.
    """
    return 8 * ROW_WIDTH * (1 if num_tasks <= FAN_IN else 2)  # the hashes, and joined ones


def _packed(key: Key) -> int:
    """A key as a number of 64 bits, in the same order."""
    return key[0] << 32 | key[1]


def digest_of(facts: Iterable[object]) -> str:
    """A name for some facts: 32 hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode(list(facts)), digest_size=16).hexdigest()
