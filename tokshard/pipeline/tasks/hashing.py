"""The first stage of ``--dedup exact``: each task leaves the sorted hashes of its texts.

The file of a task is a sequence of *parts* of at most `PART_TEXTS` texts each. A part is a run of rows (see
`sorted_rows`) with the high and the low half of each distinct hash of the part and the place of its first text,
followed by the places of the texts that repeat an earlier one of the part (uint32). A place is the number of a text
within its task, without empty and bad records. If no text is read, the tokens of a document are hashed instead.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.encode.documents import Documents
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.sorted_rows import Run, RunWriter, damaged, read_parts, run_bytes
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import Key, Receipt, file_path
from tokshard.store import Store, written

PART_TEXTS = 1 << 20
"""Texts that a task holds the hashes of: 16 MiB of hashes, and 100 MB at the peak while they are sorted."""

ROW_WIDTH = 3
"""High and low half of the hash, and the place."""

_HASH_BYTES = 16


def hashes_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """Size of the file of a task with these parts, given the distinct hashes and repeats of each."""
    return sum(run_bytes(distinct, ROW_WIDTH) + _repeats_bytes(repeats) for distinct, repeats in parts)


def _repeats_bytes(repeats: int) -> int:
    """Bytes of the places of repeats, and of their CRC-32."""
    return 4 * (repeats + 1)


def hash_runs(name: str, parts: Sequence[tuple[int, int]], base: int) -> list[Run]:
    """The runs of the file of a task.

    Args:
        base: added to their places.
    """
    runs, offset, file_bytes = [], 0, hashes_bytes(parts)
    for distinct, repeats in parts:
        runs.append(Run(name=name, file_bytes=file_bytes, offset=offset, count=distinct, width=ROW_WIDTH, base=base))
        offset += run_bytes(distinct, ROW_WIDTH) + _repeats_bytes(repeats)
    return runs


def read_repeats(store: Store, name: str, parts: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """The places of the texts of a task that repeat an earlier one of the same part: uint32, ascending.

    Raises:
        BuildError: the file cannot be read, or is damaged.
    """
    places, offset = [], 0
    for distinct, repeats in parts:
        offset += run_bytes(distinct, ROW_WIDTH)
        if repeats:
            places.append((offset, _repeats_bytes(repeats)))
        offset += _repeats_bytes(repeats)
    found = [np.empty(0, np.uint32)]
    for (start, _), content in zip(places, read_parts(store, name, places) if places else (), strict=True):
        values = np.frombuffer(content, "<u4")
        found.append(values[:-1])
        if zlib.crc32(content[:-4]) != int(values[-1]):
            raise damaged(store, name, f"the places from byte {start} on do not have their checksum")
    return np.concatenate(found)


class HashSink:
    """Writes the sorted hashes of the texts of a task into a file, for the search for duplicates."""

    def __init__(self, build: Build, key: Key, stack: contextlib.ExitStack) -> None:
        self._name = file_path(HASH, key)
        self._file = HashingFile(stack.enter_context(written(build.workspace.store, self._name)))
        self._hashes = bytearray()
        self._num_written = 0
        self._parts: list[tuple[int, int]] = []

    def extend(self, parts: Sequence[Documents], source: int, base: int) -> None:  # noqa: ARG002 - a text has a place
        """Take the hashes of texts, in order."""
        for hashes in (part.hashes for part in parts):
            assert hashes is not None, "the texts of this stage are hashed"
            for start in range(0, len(hashes), PART_TEXTS):
                self._hashes += hashes[start : start + PART_TEXTS].tobytes()
                if len(self._hashes) >= PART_TEXTS * _HASH_BYTES:
                    self._flush()

    def finish(self, receipt: Receipt) -> Receipt:
        """Write the rest, and describe the file in the receipt."""
        self._flush()
        facts = self._file.facts
        return msgspec.structs.replace(receipt, parts=self._parts, file_bytes=facts.num_bytes, file_sha256=facts.sha256)

    def _flush(self) -> None:
        high, low = np.frombuffer(bytes(self._hashes), "<u8").reshape(-1, 2).T
        self._hashes = bytearray()
        if not len(high):
            return
        order, is_repeat = sorted_repeats(high, low)
        first = order[~is_repeat]
        repeats = (np.sort(order[is_repeat]) + self._num_written).astype("<u4")
        writer = RunWriter(self._file, self._name)
        writer.append(np.stack([high[first], low[first], (first + self._num_written).astype(np.uint64)], axis=1))
        writer.finish()
        content = repeats.tobytes()
        self._file.write(content + zlib.crc32(content).to_bytes(4, "little"))
        self._parts.append((len(first), len(repeats)))
        self._num_written += len(order)


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
