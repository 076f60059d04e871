"""The second stage of ``--dedup exact``: which texts repeat an earlier one, over all tasks, in bounded memory.

Its tasks come in steps, each of which needs the files of the step before:

    join       merge the files of up to `FAN_IN` tasks into one, until no more than `FAN_IN` files are left
    partition  read a range of hashes from each of these files, and write the places of the texts to drop
    join       merge these files, until no more than `MAX_DROP_FILES` are left, of which encoding tasks read their part

So every task opens a bounded number of files, and the number of tasks grows with the number of hashes. A step is one
task or none where little is to be done.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import IO

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.tasks.hashing import (
    ROW_WIDTH,
    hash_runs,
    hashes_path,
    no_shards,
    read_repeats,
    sorted_repeats,
)
from tokshard.pipeline.tasks.planning import Key, Task
from tokshard.pipeline.tasks.sorted_rows import (
    FAN_IN,
    Join,
    Merge,
    Partition,
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
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import OutputCounts, Receipt, read_receipt, write_receipt
from tokshard.store import Store, written

DUPLICATE = "duplicate"
"""Reason for a text that is equal to an earlier one."""

MAX_DROP_FILES = 8
"""Files in which an encoding task looks up its duplicates."""

_PLACE_BITS = 32

_HASH_WIDTH = 2
"""Of the rows of hashes alone: high and low half."""

_EARLIER = (1 << 64) - 1
"""The place of every text of an earlier generation."""

RunTasks = Callable[[Sequence[Task]], Sequence[Receipt]]
"""Runs tasks that may run side by side, those that are done excepted, and returns the receipts of all, in order."""


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
class DropLists:
    """Where the texts to drop of every task are found.

    Args:
        workspace: of the hashing stage.
        tasks: every hashing task, packed by `_packed`: uint64 [tasks], ascending.
        runs: the places of all duplicates: the index of the task in the high half, the place in the low one.
        ranges: the rows of each run among which those of each task lie: int64 [runs, tasks, 2].
        digest: names these tasks and their hashes, and so these lists.
        texts: the hashes of all texts of the build, each with those that repeat it; at most `FAN_IN` files.
    """

    workspace: Workspace
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
        store = self.workspace.store
        receipt, _ = read_receipt(self.workspace, key)
        places = [read_repeats(store, hashes_path(self.workspace, key), receipt.parts)]
        if self.runs:
            low, high = (np.uint64(number << _PLACE_BITS) for number in (index, index + 1))
            found = read_slice(store, self.runs, self.ranges[:, index], low, high)
            places.append(found[:, 0].astype(np.uint32))  # the low half
        return TaskDrops(np.sort(np.concatenate(places)))


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierTexts:
    """The texts of a generation that came before.

    Args:
        name: of the file with their hashes, in the store of the build.
        sha256: of that file.
    """

    name: str
    num_bytes: int
    sha256: str

    @property
    def count(self) -> int:
        """Texts, equal ones counted once."""
        return run_count(self.num_bytes, _HASH_WIDTH)


def find_duplicates(
    workspace: Workspace,
    receipts: Sequence[Receipt],
    run_tasks: RunTasks,
    earlier: Sequence[EarlierTexts] = (),
) -> DropLists:
    """Find the texts that repeat an earlier one.

    Memory is 16 bytes per 1,024 hashes, 16 bytes per partition and file that it reads, and under 1 KB per task.

    Args:
        workspace: of the hashing stage.
        receipts: of all hashing tasks, in order.
        run_tasks: runs the tasks of one step; they belong to `workspace.duplicates`.
        earlier: texts that come before all of these.

    Raises:
        BuildError: a file is damaged or gone.
    """
    steps = _Steps(workspace.duplicates, run_tasks)
    files = [
        _SortedFile(
            digest=receipt.hashes,
            runs=tuple(hash_runs(hashes_path(workspace, receipt.key), receipt.parts, index << _PLACE_BITS)),
        )
        for index, receipt in enumerate(receipts)
        if receipt.parts
    ]
    while len(files) > FAN_IN:
        # the square root, because a join opens each file per slice, and a partition each joined file
        files = steps.join(files, min(FAN_IN, math.isqrt(len(files) - 1) + 1))
    drops = steps.partition(workspace, [*map(_earlier_file, earlier), *files])
    while len(drops) > MAX_DROP_FILES:
        drops = steps.join(drops, min(FAN_IN, -(-len(drops) // MAX_DROP_FILES)))
    runs = tuple(run for file in drops for run in file.runs)
    lows = np.arange(len(receipts), dtype=np.uint64) << np.uint64(_PLACE_BITS)
    fences = read_fences(workspace.store, runs)
    ranges = [row_ranges(each, run.count, lows) for each, run in zip(fences, runs, strict=True)]
    return DropLists(
        workspace=workspace,
        tasks=np.array([_packed(receipt.key) for receipt in receipts], np.uint64),
        runs=runs,
        ranges=np.array(ranges, np.int64).reshape(len(runs), len(receipts), 2),
        digest=_digest([*([texts.sha256] for texts in earlier), *([each.key, each.hashes] for each in receipts)]),
        texts=tuple(run for file in files for run in file.runs),
    )


def write_text_hashes(store: Store, texts: Sequence[Run], file: IO[bytes] | HashingFile) -> None:
    """Write the hashes of all texts of a build, sorted, equal ones once: 16 bytes each, and fences.

    Raises:
        BuildError: a file cannot be read.
    """
    writer = RunWriter(file)
    for rows in merged(store, texts):
        order, is_repeat = sorted_repeats(rows[:, 0], rows[:, 1])
        writer.append(rows[order[~is_repeat], :_HASH_WIDTH])
    writer.finish()


def _earlier_file(texts: EarlierTexts) -> _SortedFile:
    run = Run(
        name=texts.name,
        file_bytes=texts.num_bytes,
        offset=0,
        count=texts.count,
        width=_HASH_WIDTH,
        base=_EARLIER,
    )
    return _SortedFile(digest=texts.sha256, runs=(run,))


@dataclass(frozen=True, slots=True, kw_only=True)
class _SortedFile:
    """A file of sorted rows.

    Args:
        digest: of its bytes, or of what they are a pure function of.
    """

    digest: str
    runs: tuple[Run, ...]


class _Steps:
    """Runs one step after another, and numbers them."""

    def __init__(self, workspace: Workspace, run_tasks: RunTasks) -> None:
        self._workspace, self._run_tasks = workspace, run_tasks
        self._number = 0

    def join(self, files: Sequence[_SortedFile], most: int) -> list[_SortedFile]:
        """Merge every `most` consecutive files into one."""
        merges = []
        for start in range(0, len(files), most):
            group = files[start : start + most]
            runs = tuple(run for file in group for run in file.runs)
            merges.append(Join(runs=runs, digest=_digest(_identity(file) for file in group)))
        return self._run(merges, files[0].runs[0].width)

    def partition(self, workspace: Workspace, files: Sequence[_SortedFile]) -> list[_SortedFile]:
        """Find the duplicates among the hashes of files, partition by partition."""
        runs = tuple(run for file in files for run in file.runs)
        if not runs:
            return []
        fences = read_fences(workspace.store, runs)
        lows = slice_lows(fences)
        ranges = np.stack([row_ranges(each, run.count, lows) for each, run in zip(fences, runs, strict=True)], axis=1)
        del fences
        of_files = _digest(_identity(file) for file in files)
        bounds = [*lows.tolist(), None]
        merges = [
            Partition(
                runs=runs,
                ranges=ranges[number],
                low=low,
                high=high,
                digest=_digest([of_files, low, high]),
            )
            for number, (low, high) in enumerate(pairwise(bounds))
        ]
        return self._run(merges, 1)

    def _run(self, merges: Sequence[Merge], width: int) -> list[_SortedFile]:
        """Run a task for each; returns their files of rows of that width, the empty ones left out."""
        tasks = [Task(key=(self._number, index), parts=(), merge=merge) for index, merge in enumerate(merges)]
        self._number += 1
        files = []
        for receipt in self._run_tasks(tasks):
            run = Run(
                name=hashes_path(self._workspace, receipt.key),
                file_bytes=run_bytes(receipt.rows, width),
                offset=0,
                count=receipt.rows,
                width=width,
            )
            if run.count:
                files.append(_SortedFile(digest=receipt.merge, runs=(run,)))
        return files


def bytes_per_text(num_tasks: int) -> int:
    """Bytes of disk that each text takes until the build is done, without the 8 to 16 of a duplicate.

    Args:
        num_tasks: that hash; segments of streams count one each.
    """
    return 8 * ROW_WIDTH * (1 if num_tasks <= FAN_IN else 2)  # the hashes, and joined ones


def run_merge(workspace: Workspace, key: Key, merge: Merge) -> Receipt:
    """Run one task: write its file, and last its receipt.

    Args:
        workspace: of the stage that finds duplicates.

    Raises:
        BuildError: a file that it reads is damaged or gone.
        OSError: nothing can be written.
    """
    with written(workspace.store, hashes_path(workspace, key)) as file:
        writer = RunWriter(file)
        if isinstance(merge, Join):
            for rows in merged(workspace.store, merge.runs):
                writer.append(rows)
        else:
            writer.append(_repeated_places(workspace, merge))
        writer.finish()
    receipt = Receipt(
        key=key,
        previous=None,
        is_last=True,
        max_documents=None,
        input_bytes=0,
        outputs=[OutputCounts(sources=[])],
        num_rejects=0,
        rows=writer.count,
        merge=merge.digest,
    )
    write_receipt(workspace, receipt, [no_shards()])
    return receipt


def merge_bytes(merge: Merge, rows: int) -> int:
    """Size of the file of a task that wrote so many rows."""
    return run_bytes(rows, merge.runs[0].width if isinstance(merge, Join) else 1)


def _repeated_places(workspace: Workspace, partition: Partition) -> NDArray[np.uint64]:
    """The places of a partition's texts that repeat an earlier one: uint64 [n, 1], ascending."""
    high = None if partition.high is None else np.uint64(partition.high)
    rows = read_slice(workspace.store, partition.runs, partition.ranges, np.uint64(partition.low), high)
    order, is_repeat = sorted_repeats(rows[:, 0], rows[:, 1])
    places = rows[order[is_repeat], 2]
    return np.sort(places[places != np.uint64(_EARLIER)])[:, np.newaxis]


def _identity(file: _SortedFile) -> list[object]:
    return [file.digest, *((run.name, run.base) for run in file.runs)]


def _packed(key: Key) -> int:
    """A key as a number of 64 bits, in the same order."""
    return key[0] << 32 | key[1]


def _digest(facts: Iterable[object]) -> str:
    return hashlib.blake2b(msgspec.json.encode(list(facts)), digest_size=16).hexdigest()
