"""Sorted rows on disk, and merging many files of them in bounded memory.

Rows are uint64 [n, width], ascending by their first column, the *key*. On disk a *run* of them is followed by its
*fences*: the key of every `FENCE_ROWS`-th row, which tells a reader of a range of keys which bytes to read. In the work
folder of a build, checksums follow the fences: the CRC-32 of each block of `FENCE_ROWS` rows, then the CRC-32 of the
fences, as uint64. Runs are merged slice by slice, each slice a range of keys with about `SLICE_ROWS` rows.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import IO

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BuildError
from tokshard.format.files import HashingFile
from tokshard.store import Store

Rows = NDArray[np.uint64]

FENCE_ROWS = 1 << 10
"""A range of keys is read with up to as many more rows at each end. Fences add 8 bytes per so many rows, and so do
checksums."""

SLICE_ROWS = 1 << 21
"""Rows that are merged at once: with the three columns of hashes, a process has 200 MB at the peak."""

FAN_IN = 256
"""Files that one task merges. A slice is cut to `SLICE_ROWS` and at most ``FAN_IN * FENCE_ROWS`` rows, an eighth."""

AGAIN = "run the same command again: the task that left it runs again"


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The place of sorted rows.

    Args:
        name: the name of the file, which has `file_bytes` and may hold several runs.
        offset: byte of the file where the first row starts.
        count: rows.
        width: columns.
        base: what to add to the last column.
        is_checked: whether it has checksums. The hashes of a corpus have none: its manifest has a hash of the file.
    """

    name: str
    file_bytes: int
    offset: int
    count: int
    width: int
    base: int = 0
    is_checked: bool = True

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return 8 * self.width

    @property
    def num_blocks(self) -> int:
        """Blocks of `FENCE_ROWS` rows; the last may have fewer."""
        return -(-self.count // FENCE_ROWS)

    @property
    def fences_at(self) -> int:
        """Byte of the file where the fences start."""
        return self.offset + self.count * self.row_bytes


def run_bytes(count: int, width: int, *, is_checked: bool = True) -> int:
    """Bytes of a run with its fences and checksums."""
    blocks = -(-count // FENCE_ROWS)
    return 8 * (count * width + blocks + (blocks + 1 if is_checked else 0))


def run_count(num_bytes: int, width: int) -> int:
    """Rows of a run of so many bytes without checksums: the inverse of `run_bytes`."""
    blocks, rest = divmod(num_bytes, run_bytes(FENCE_ROWS, width, is_checked=False))
    return blocks * FENCE_ROWS + max(0, rest - 8) // (8 * width)


class RunWriter:
    """Writes one run into a file, from rows in order.

    Args:
        name: the name of the file, which the checksums cover, too. None: the run has no checksums.
    """

    def __init__(self, file: IO[bytes] | HashingFile, name: str | None) -> None:
        self._file, self._name = file, name
        self._fences: list[NDArray[np.uint64]] = []
        self._crcs: list[int] = []
        self._crc = 0
        self.count = 0

    def append(self, rows: Rows) -> None:
        """Write the next rows: uint64 [n, width]."""
        self._fences.append(rows[-self.count % FENCE_ROWS :: FENCE_ROWS, 0].copy())
        if self._name is not None:
            self._add_crcs(rows, self._name)
        self.count += len(rows)
        self._write(rows)

    def finish(self) -> None:
        """Write the fences and the checksums."""
        fences = np.concatenate([np.empty(0, np.uint64), *self._fences])
        self._write(fences)
        if self._name is not None:
            if self.count % FENCE_ROWS:
                self._crcs.append(self._crc)
            self._write(np.array([*self._crcs, _crc32(self._name, fences)], np.uint64))

    def _add_crcs(self, rows: Rows, name: str) -> None:
        start = 0
        while start < len(rows):
            before = (self.count + start) % FENCE_ROWS
            part = rows[start : start + FENCE_ROWS - before]
            self._crc = _crc32(name, part) if before == 0 else zlib.crc32(_bytes(part), self._crc)
            start += len(part)
            if before + len(part) == FENCE_ROWS:
                self._crcs.append(self._crc)

    def _write(self, values: NDArray[np.uint64]) -> None:
        if values.size:  # a view of nothing cannot be cast
            self._file.write(_bytes(values))


def _bytes(values: NDArray[np.uint64]) -> memoryview | bytes:
    return np.ascontiguousarray(values, "<u8").data.cast("B") if values.size else b""


def _crc32(name: str, values: NDArray[np.uint64]) -> int:
    """The checksum of values in a file of this name."""
    return zlib.crc32(_bytes(values), zlib.crc32(name.encode()))


def read_fences(store: Store, runs: Sequence[Run]) -> list[NDArray[np.uint64]]:
    """The fences of each run. Consecutive runs of one file open it once.

    Raises:
        BuildError: a file is missing, has another size, or is damaged.
    """
    fences: list[NDArray[np.uint64]] = []
    for name, found in groupby(runs, lambda run: run.name):
        same_file = list(found)
        try:
            size = store.stat(name).size
        except OSError as error:
            raise cannot_read(store, name, error) from error
        if size != same_file[0].file_bytes:
            raise BuildError(
                f"{store.where(name)} is damaged: it has {size} bytes, expected {same_file[0].file_bytes}", hint=AGAIN
            )
        places = [(run.fences_at, 8 * (run.num_blocks * (1 + run.is_checked) + run.is_checked)) for run in same_file]
        for run, content in zip(same_file, read_parts(store, name, places), strict=True):
            values = np.frombuffer(content, "<u8")
            fences.append(values[: run.num_blocks].copy())  # a view would keep the checksums, too
            if run.is_checked and _crc32(name, fences[-1]) != int(values[-1]):
                raise damaged(store, name, f"the fences at byte {run.fences_at} do not have their checksum")
    return fences


def row_ranges(fences: NDArray[np.uint64], count: int, lows: NDArray[np.uint64]) -> NDArray[np.int64]:
    """The rows of a run that may hold consecutive ranges of keys: int64 [n, 2], start and stop of each.

    Args:
        count: rows of the run.
        lows: the lowest key of each range, ascending: uint64 [n]; the last range is open.
    """
    blocks = np.searchsorted(fences, lows)
    starts = np.maximum(blocks - 1, 0) * FENCE_ROWS
    stops = np.append(np.minimum(blocks[1:] * FENCE_ROWS, count), count)
    return np.stack([np.minimum(starts, stops), stops], axis=1).astype(np.int64)


def slice_lows(fences: Sequence[NDArray[np.uint64]]) -> NDArray[np.uint64]:
    """The lowest key of each slice: uint64 [n], ascending from 0.

    Args:
        fences: fences of all merged runs.
    """
    keys = np.sort(np.concatenate([np.zeros(1, np.uint64), *fences]))
    return np.unique(keys[:: max(1, SLICE_ROWS // FENCE_ROWS)])


def read_slice(
    store: Store, runs: Sequence[Run], ranges: NDArray[np.int64], low: np.uint64, high: np.uint64 | None
) -> Rows:
    """The rows with a key in ``[low, high)``, run after run, each run in order. Each file is opened once.

    If runs have fewer columns than others, their missing columns are 0 before `base` is added to the last column.

    Args:
        ranges: the rows of each run that may hold them, as `row_ranges` gives them: int64 [runs, 2].
        high: None: no limit.

    Raises:
        BuildError: a file cannot be read, or is damaged.
    """
    width = max(run.width for run in runs)
    rows: Rows = np.zeros((int((ranges[:, 1] - ranges[:, 0]).sum()), width), np.uint64)
    filled = 0
    wanted = ((run, *bounds) for run, bounds in zip(runs, ranges.tolist(), strict=True) if bounds[0] < bounds[1])
    for name, found in groupby(wanted, lambda part: part[0].name):
        parts = list(found)
        contents = iter(read_parts(store, name, [place for part in parts for place in _places(*part)]))
        for run, start, _ in parts:
            read = np.frombuffer(next(contents), "<u8").reshape(-1, run.width)
            if run.is_checked:
                _check(store, run, start, read, np.frombuffer(next(contents), "<u8"))
            first = int(np.searchsorted(read[:, 0], low))
            last = len(read) if high is None else int(np.searchsorted(read[:, 0], high))
            rows[filled : filled + last - first, : run.width] = read[first:last]
            rows[filled : filled + last - first, -1] += np.uint64(run.base)
            filled += last - first
    return rows[:filled]


def _places(run: Run, start: int, stop: int) -> list[tuple[int, int]]:
    """Where the rows of some blocks are, and their checksums."""
    places = [(run.offset + start * run.row_bytes, (stop - start) * run.row_bytes)]
    if run.is_checked:
        first, num_blocks = start // FENCE_ROWS, -(-stop // FENCE_ROWS) - start // FENCE_ROWS
        places.append((run.fences_at + 8 * (run.num_blocks + first), 8 * num_blocks))
    return places


def _check(store: Store, run: Run, start: int, rows: Rows, crcs: NDArray[np.uint64]) -> None:
    """Compare the checksums of blocks.

    Raises:
        BuildError: one differs.
    """
    for number, crc in enumerate(crcs.tolist()):
        if _crc32(run.name, rows[number * FENCE_ROWS : (number + 1) * FENCE_ROWS]) != crc:
            first = run.offset + (start + number * FENCE_ROWS) * run.row_bytes
            raise damaged(store, run.name, f"the rows from byte {first} on do not have their checksum")


def merged(store: Store, runs: Sequence[Run]) -> Iterator[Rows]:
    """All rows of several runs in the order of their keys, slice by slice; equal keys in the order of the runs.

    Raises:
        BuildError: a file cannot be read.
    """
    fences = read_fences(store, runs)
    lows = slice_lows(fences)
    ranges = np.stack([row_ranges(each, run.count, lows) for each, run in zip(fences, runs, strict=True)], axis=1)
    for low, high, of_runs in zip(lows, [*lows[1:], None], ranges, strict=True):
        rows = read_slice(store, runs, of_runs, low, high)
        yield rows[np.argsort(rows[:, 0], kind="stable")]


def read_parts(store: Store, name: str, places: Sequence[tuple[int, int]]) -> Sequence[bytes]:
    """Parts of a file of an unfinished build.

    Raises:
        BuildError: the file cannot be read, or ends before.
    """
    try:
        return store.read(name, places)
    except OSError as error:
        raise cannot_read(store, name, error) from error


def damaged(store: Store, name: str, problem: str) -> BuildError:
    """The error for a file of an earlier task of this build that holds something else than that task wrote."""
    return BuildError(f"{store.where(name)} is damaged: {problem}", hint=f"delete that file and {AGAIN}")


def cannot_read(store: Store, name: str, error: OSError) -> BuildError:
    """The error for a file of an earlier task of this build that is now missing or short."""
    return BuildError(f"{store.where(name)} cannot be read: {error.strerror or error}", hint=AGAIN)
