"""The search of ``--dedup exact`` for texts that repeat an earlier one, over all tasks, in bounded memory.

    hash     each task deals the hashes of its texts to buckets; see `tokshard.pipeline.tasks.exchange`
    find     read some buckets of hashes, and deal the places of the texts to drop to buckets by task
    write    each writing task reads the places of its texts

A place is the number of a text within its task, without empty and bad records. If no text is read, the tokens of a
document are hashed instead. The texts of earlier generations come before all others. A hashing task deals each text
once for each million; its file keeps the places of the repeats. So however often a text occurs, a bucket has no more
rows of it than there are tasks.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.format.arrays import number_array, numbers_of
from tokshard.format.files import HashingFile
from tokshard.numbers import ceil_div
from tokshard.pipeline.encode.documents import Documents
from tokshard.pipeline.tasks.exchange import (
    FAN_IN,
    KEY,
    Dealt,
    DealtWriter,
    Levels,
    dealt_file,
    read_kept,
    read_parts,
    spread,
)
from tokshard.pipeline.tasks.planning import StepTask, groups
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import Key, Receipt, file_path, read_receipt
from tokshard.store import Store, written

PART_TEXTS = 1 << 20
"""Texts whose hashes a task holds: 16 MiB of hashes, and 100 MB at the peak while they are sorted."""

HASH_FAN_OUT = 32
"""Buckets that hashing tasks deal to. A task of 100,000 texts writes 88 kB into each."""

BUCKET_ROWS = 1 << 20
"""Approximate number of hashes that are sorted at once: a process has 200 MB at the peak."""

MAX_DROP_FILES = 8
"""Files in which a writing task looks up its duplicates."""

FENCE_ROWS = 1 << 10
"""Rows of ``hashes.bin`` per fence: format/README.md."""

_HASH_BYTES = 16
_LOW, _TASK, _PLACE = "low", "task", "place"
_EARLIER = -1
"""The task of every text of an earlier generation."""

_HASHES = pa.schema({KEY: pa.uint64(), _LOW: pa.uint64(), _TASK: pa.int64(), _PLACE: pa.uint32()})
_DROPS = pa.schema({KEY: pa.uint64(), _PLACE: pa.uint32()})
_PLACES = pa.schema({_PLACE: pa.uint32()})


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
        blocks, rest = divmod(self.num_bytes, _HASH_BYTES * FENCE_ROWS + 8)
        return blocks * FENCE_ROWS + max(0, rest - 8) // _HASH_BYTES

    def between(self, store: Store, low: int, high: int) -> NDArray[np.uint64]:
        """The hashes whose high halves are in ``[low, high)``: uint64 [n, 2].

        Raises:
            BuildError: the file cannot be read.
        """
        at = self.count * _HASH_BYTES
        (fences,) = read_parts(store, self.name, [(at, self.num_bytes - at)])
        bounds = np.array([low, high - 1], np.uint64)
        blocks = np.frombuffer(fences, "<u8")
        start = max(0, int(blocks.searchsorted(bounds[0])) - 1) * FENCE_ROWS
        stop = min(self.count, int(blocks.searchsorted(bounds[1], "right")) * FENCE_ROWS)
        (content,) = read_parts(store, self.name, [(_HASH_BYTES * start, _HASH_BYTES * (stop - start))])
        rows: NDArray[np.uint64] = np.frombuffer(content, "<u8").reshape(-1, 2)
        first, last = rows[:, 0].searchsorted(bounds[0]), rows[:, 0].searchsorted(bounds[1], "right")
        return rows[first:last]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drops:
    """Finds the texts that each task has to drop.

    Args:
        tasks: every hashing task as a number, in order: int64 [tasks].
        places: the places of all duplicates but those that tasks have kept.
        digest: identifies these tasks and their hashes, and so these lists.
        texts: the hashes of all texts of the build.
    """

    tasks: NDArray[np.int64]
    places: Dealt
    digest: str
    texts: Dealt

    def of(self, key: Key) -> NDArray[np.uint32]:
        """The places of the texts of one task that repeat an earlier one, ascending: uint32 [n].

        Opens its receipt, its hashes and at most `MAX_DROP_FILES` files.

        Raises:
            BuildError: a file cannot be read.
        """
        index = np.searchsorted(self.tasks, number_of(key))
        assert self.tasks[index] == number_of(key), "encoding has a task that hashing has not"
        own = spread(np.array([index]), len(self.tasks))
        (bucket,) = self.places.levels.buckets(own, self.places.level).tolist()
        found = pa.Table.from_batches(self.places.buckets(bucket, bucket + 1), _DROPS)
        hashed = dealt_file(HASH, read_receipt(self.places.store, HASH, key))
        kept = read_kept(self.places.store, hashed, hash_levels(), _PLACES)
        places = [_column(found, _PLACE)[_column(found, KEY) == own], _column(kept, _PLACE)]
        return np.sort(np.concatenate(places))


def number_of(key: Key) -> int:
    """A key as a number of 64 bits, in the same order."""
    return key[0] << 32 | key[1]


def _hash_rows(hashes: NDArray[np.uint64], task: int, places: NDArray[np.int64]) -> pa.RecordBatch:
    """Hashes of texts of a task, uint64 [n, 2], with their places."""
    columns = *hashes.T, np.full(len(hashes), task), places.astype(np.uint32)
    return pa.record_batch([number_array(column) for column in columns], schema=_HASHES)


def _column(rows: pa.Table, name: str) -> NDArray[Any]:
    return numbers_of(rows.column(name))


class HashSink:
    """Deals the hashes of the texts of a task into a file, for the search for duplicates."""

    def __init__(self, store: Store, key: Key, stack: contextlib.ExitStack) -> None:
        name = file_path(HASH, key)
        self._writer = DealtWriter(stack.enter_context(written(store, name)), name, hash_levels())
        self._task, self._num_texts = number_of(key), 0
        self._hashes = bytearray()

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:  # noqa: ARG002 - a text has a place
        """Take the hashes of texts, in order."""
        for hashes in (part.hashes for part in parts):
            assert hashes is not None, "the texts of this stage are hashed"
            self.add(hashes)

    def add(self, hashes: NDArray[np.uint64]) -> None:
        """Add the hashes of the next texts: uint64 [n, 2]."""
        for start in range(0, len(hashes), PART_TEXTS):
            self._hashes += hashes[start : start + PART_TEXTS].tobytes()
            if len(self._hashes) >= PART_TEXTS * _HASH_BYTES:
                self._deal()

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and describe the file in the receipt."""
        self._deal()
        return self._writer.finish(receipt)

    def _deal(self) -> None:
        hashes = np.frombuffer(bytes(self._hashes), "<u8").reshape(-1, 2)
        self._hashes = bytearray()
        order, is_repeat = sorted_repeats(*hashes.T)
        first, repeats = order[~is_repeat], np.sort(order[is_repeat])
        self._writer.add(_hash_rows(hashes[first], self._task, first + self._num_texts))
        places = (repeats + self._num_texts).astype(np.uint32)
        self._writer.keep(pa.record_batch([number_array(places)], schema=_PLACES))
        self._num_texts += len(hashes)


def hash_levels() -> Levels:
    """How hashing tasks deal: the same for all builds, because the number of texts is not known yet."""
    return Levels(fan_out=HASH_FAN_OUT, depth=1, schema=_HASHES)


def text_levels(num_texts: int) -> Levels:
    """How the hashes of so many texts are dealt before they are read: as by the hashing tasks, if that is enough."""
    num_buckets = ceil_div(num_texts, BUCKET_ROWS)
    return hash_levels() if num_buckets <= HASH_FAN_OUT else Levels.of(num_buckets, _HASHES)


def drop_levels(num_texts: int, num_tasks: int) -> Levels:
    """How the places of duplicates are dealt: a bucket for each task, or for several with about a bucket of texts."""
    return Levels.of(max(1, min(num_tasks, ceil_div(num_texts, BUCKET_ROWS))), _DROPS)


def bytes_per_text(num_tasks: int, num_texts: int) -> int:
    """Bytes of disk for each text until the build is done; a duplicate takes 12 to 24 more.

    Args:
        num_tasks: number of hashing tasks; segments of streams count one each.
    """
    levels = text_levels(num_texts)
    return 28 * (levels.depth + (num_tasks > FAN_IN or levels != hash_levels()))


def find(
    name: str,
    task: StepTask,
    texts: Dealt,
    drops: Levels,
    *,
    earlier: Sequence[EarlierTexts],
    hashed: NDArray[np.int64],
) -> Receipt:
    """Find the duplicates in some buckets, and deal their places by task into a file, which is in the receipt.

    Args:
        hashed: as `Drops.tasks`.

    Raises:
        BuildError: a file that it reads is damaged or gone.
    """
    with written(texts.store, name) as file:
        writer = DealtWriter(file, name, drops)
        rows = _texts_in(texts, task.start, task.stop, earlier)
        order, is_repeat = sorted_repeats(_column(rows, KEY), _column(rows, _LOW))
        repeats = order[is_repeat]
        tasks, places = _column(rows, _TASK)[repeats], _column(rows, _PLACE)[repeats]
        is_new = tasks != _EARLIER
        keys = spread(np.searchsorted(hashed, tasks[is_new]), len(hashed))
        writer.add(pa.record_batch([number_array(keys), number_array(places[is_new])], schema=_DROPS))
        return writer.finish(Receipt(key=task.key))


def bucket_groups(texts: Dealt) -> list[tuple[int, int]]:
    """Buckets that are read at once: ``(start, stop)`` of each group, with at most `BUCKET_ROWS` or one bucket.

    After a later level they are in one file, so that few files are opened.
    """
    sizes = texts.sizes()
    step = len(sizes) if texts.level == 1 else texts.levels.fan_out
    return [
        (first + start, first + stop)
        for first in range(0, len(sizes), step)
        for start, stop in groups(sizes[first : first + step], BUCKET_ROWS)
    ]


def _texts_in(texts: Dealt, start: int, stop: int, earlier: Sequence[EarlierTexts] = ()) -> pa.Table:
    """The hashes of the buckets ``[start, stop)``; equal ones in the order of the texts, earlier ones first."""
    low, high = map(texts.levels.first_key, (start, stop))
    hashes = (each.between(texts.store, low, high) for each in earlier)
    before = (_hash_rows(each, _EARLIER, np.zeros(len(each), np.int64)) for each in hashes)
    return pa.Table.from_batches([*before, *texts.buckets(start, stop)], _HASHES)


def write_text_hashes(texts: Dealt, file: HashingFile) -> None:
    """Write the distinct hashes of all texts of a build, sorted: 16 bytes each, and fences.

    Raises:
        BuildError: a file cannot be read.
    """
    fences, count = [np.empty(0, np.uint64)], 0
    for start, stop in bucket_groups(texts):
        rows = _texts_in(texts, start, stop)
        hashes = np.stack([_column(rows, KEY), _column(rows, _LOW)], axis=1)
        order, is_repeat = sorted_repeats(*hashes.T)
        hashes = hashes[order[~is_repeat]]
        fences.append(hashes[-count % FENCE_ROWS :: FENCE_ROWS, 0])
        count += len(hashes)
        file.write(hashes.astype("<u8").tobytes())
    file.write(np.concatenate(fences).astype("<u8").tobytes())


def sorted_repeats(high: NDArray[Any], low: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The stable order that sorts hashes, and for each hash in this order, whether it repeats the one before."""
    order = np.argsort(high, kind="stable")
    is_repeat, is_equal_high = _repeats(high, low, order)
    if is_repeat.sum() != is_equal_high.sum():  # two hashes with the same high half: by chance, once in 10^9 texts
        order = np.lexsort((low, high))
        is_repeat, _ = _repeats(high, low, order)
    return order, is_repeat


def _repeats(
    high: NDArray[Any], low: NDArray[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each hash in this order, whether it equals the one before, and whether its high half does."""
    is_equal_high, is_repeat = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    high = high[order]
    is_equal_high[1:] = high[1:] == high[:-1]
    low = low[order]
    is_repeat[1:] = is_equal_high[1:] & (low[1:] == low[:-1])
    return is_repeat, is_equal_high
