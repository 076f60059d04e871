"""The second stage of ``--dedup exact``: which texts repeat an earlier one, over all tasks, in bounded memory.

Hashes are cut by their value into partitions of about `PARTITION_TEXTS` texts. Each partition is sorted alone and
leaves one file of the places to drop; the encoding tasks look up theirs. A file that is there is not made again.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BuildError
from tokshard.format.files import map_file
from tokshard.pipeline.tasks.hashing import hashes_bytes, hashes_path, sorted_repeats
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import present

DUPLICATE = "duplicate"
"""Reason for a text that is equal to an earlier one."""

PARTITION_TEXTS = 1 << 22
"""Texts that are sorted at once: at most 350 MB."""

_PLACE_BITS = 32
_AGAIN = "run the same command again: the task that left it runs again"


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
        tasks: key and runs of every hashing task, in order.
        digest: names these tasks and their hashes, and so these lists.
    """

    workspace: Workspace
    tasks: tuple[tuple[Key, tuple[tuple[int, int], ...]], ...]
    num_partitions: int
    digest: str

    def of(self, key: Key) -> TaskDrops:
        """The drops of one task; costs a look into every partition."""
        ordinal = bisect_left(self.tasks, (key,))
        assert self.tasks[ordinal][0] == key, "encoding has a task that hashing has not"
        parts = [run.repeats for run in _runs(self.workspace, *self.tasks[ordinal])]
        bounds = np.array([ordinal, ordinal + 1], np.uint64) << np.uint64(_PLACE_BITS)
        for partition in range(self.num_partitions):
            found = np.frombuffer(_map(self.workspace, _drops_name(self.digest, partition)), "<u8")
            low, high = np.searchsorted(found, bounds)
            parts.append(found[low:high].astype(np.uint32))  # the low half: the place
        return TaskDrops(np.sort(np.concatenate(parts)) if parts else np.empty(0, np.uint32))


def find_duplicates(
    workspace: Workspace, receipts: Sequence[Receipt], on_partition: Callable[[int, int], None]
) -> DropLists:
    """Find the texts that repeat an earlier one; partitions that were done before are not done again.

    Args:
        workspace: of the hashing stage.
        receipts: of all hashing tasks, in order.
        on_partition: is told how many partitions are done, and of how many.

    Raises:
        BuildError: a file of hashes is damaged.
    """
    tasks = tuple((receipt.key, tuple(receipt.runs)) for receipt in receipts)
    facts = [[receipt.key, receipt.runs, receipt.hashes] for receipt in receipts]
    digest = hashlib.blake2b(msgspec.json.encode(facts), digest_size=8).hexdigest()
    total = sum(distinct for _, runs in tasks for distinct, _ in runs)
    num_partitions = -(-total // PARTITION_TEXTS)
    done = present(workspace.store, workspace.hashes)
    for partition in range(num_partitions):
        on_partition(partition, num_partitions)
        name = _drops_name(digest, partition)
        if name not in done:
            drops = _partition_drops(workspace, tasks, partition, num_partitions)
            workspace.store.put(f"{workspace.hashes}/{name}", drops.tobytes())
    return DropLists(workspace=workspace, tasks=tasks, num_partitions=num_partitions, digest=digest)


def _partition_drops(
    workspace: Workspace,
    tasks: Sequence[tuple[Key, tuple[tuple[int, int], ...]]],
    partition: int,
    num_partitions: int,
) -> NDArray[np.uint64]:
    """Task (high half) and place (low half) of every text of a partition that repeats an earlier one; ascending."""
    first, last = ((number << 64) // num_partitions for number in (partition, partition + 1))
    highs, lows, places = [np.empty(0, np.uint64)], [np.empty(0, np.uint64)], [np.empty(0, np.uint64)]
    for ordinal, (key, runs) in enumerate(tasks):
        for run in _runs(workspace, key, runs):
            start = int(np.searchsorted(run.high, np.uint64(first)))
            is_open = partition == num_partitions - 1  # 2**64 is no uint64
            stop = len(run.high) if is_open else int(np.searchsorted(run.high, np.uint64(last)))
            highs.append(run.high[start:stop])
            lows.append(run.low[start:stop])
            places.append(run.places[start:stop].astype(np.uint64) | np.uint64(ordinal << _PLACE_BITS))
    order, is_repeat = sorted_repeats(np.concatenate(highs), np.concatenate(lows))
    return np.sort(np.concatenate(places)[order[is_repeat]])


@dataclass(frozen=True, slots=True)
class _Run:
    """Views of one run of a file of hashes."""

    high: NDArray[Any]
    low: NDArray[Any]
    places: NDArray[Any]
    repeats: NDArray[Any]


def _runs(workspace: Workspace, key: Key, runs: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    content = _map(workspace, hashes_path(workspace, key).rpartition("/")[2], hashes_bytes(runs))
    position = 0
    for distinct, repeats in runs:
        parts = []
        for kind, count in (("<u8", distinct), ("<u8", distinct), ("<u4", distinct), ("<u4", repeats)):
            parts.append(np.frombuffer(content, kind, count, position) if count else np.empty(0, kind))
            position += count * np.dtype(kind).itemsize
        yield _Run(*parts)


def _map(workspace: Workspace, file: str, num_bytes: int | None = None) -> Any:
    name = f"{workspace.hashes}/{file}"
    path = workspace.store.where(name)
    try:
        content = map_file(workspace.store, name)
    except OSError as error:
        raise BuildError(f"{path} cannot be read: {error.strerror or error}", hint=_AGAIN) from error
    if num_bytes not in (None, content.size):
        raise BuildError(f"{path} is damaged: it has {content.size} bytes, expected {num_bytes}", hint=_AGAIN)
    return content


def _drops_name(digest: str, partition: int) -> str:
    return f"drops-{digest}-{partition:06d}.bin"
