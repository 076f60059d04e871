"""The first stage of ``--dedup exact``: each task leaves the sorted hashes of its texts.

The file of a task is a sequence of *parts* of at most `PART_TEXTS` texts each: a run of rows (see `sorted_rows`) with
the high and the low half of each distinct hash of the part and the place of its first text, then the places of the
texts that repeat an earlier one of the part (uint32). A place is the number of a text within its task; empty and bad
records are not counted. Where no text is read, the tokens of a document take the place of its text.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.format.files import HashingFile
from tokshard.pipeline.encode.documents import Made
from tokshard.pipeline.encode.maker import Parsed
from tokshard.pipeline.options import SKIP
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.records import EMPTY, BadRecord
from tokshard.pipeline.tasks.rejects import RejectsFile
from tokshard.pipeline.tasks.sorted_rows import Run, RunWriter, read_parts, run_bytes
from tokshard.pipeline.workspace.receipts import Key, OutputCounts, Progress, Receipt, SourceCounts, file_path
from tokshard.store import Store, written

PART_TEXTS = 1 << 20
"""Texts that a task holds the hashes of: 16 MiB of hashes, and 100 MB at the peak while they are sorted."""

ROW_WIDTH = 3
"""High and low half of the hash, and the place."""

_HASH_BYTES = 16


def hashes_bytes(parts: Sequence[tuple[int, int]]) -> int:
    """Size of the file of a task with these parts, each of so many distinct hashes and repeats."""
    return sum(run_bytes(distinct, ROW_WIDTH) + 4 * repeats for distinct, repeats in parts)


def hash_runs(name: str, parts: Sequence[tuple[int, int]], base: int) -> list[Run]:
    """The runs of the file of a task.

    Args:
        base: of their places.
    """
    runs, offset, file_bytes = [], 0, hashes_bytes(parts)
    for distinct, repeats in parts:
        runs.append(Run(name=name, file_bytes=file_bytes, offset=offset, count=distinct, width=ROW_WIDTH, base=base))
        offset += run_bytes(distinct, ROW_WIDTH) + 4 * repeats
    return runs


def read_repeats(store: Store, name: str, parts: Sequence[tuple[int, int]]) -> NDArray[np.uint32]:
    """The places of the texts of a task that repeat an earlier one of the same part: uint32, ascending.

    Raises:
        BuildError: the file cannot be read.
    """
    places, offset = [], 0
    for distinct, repeats in parts:
        offset += run_bytes(distinct, ROW_WIDTH)
        places.append((offset, 4 * repeats))
        offset += 4 * repeats
    if not any(repeats for _, repeats in parts):
        return np.empty(0, np.uint32)
    return np.frombuffer(b"".join(read_parts(store, name, places)), "<u4")


def content_hashes(contents: Iterable[bytes]) -> bytes:
    """16 bytes of BLAKE2b for each content, one after another; 1 CPU-second per GB, and 0.6 us per content."""
    return b"".join(hashlib.blake2b(content, digest_size=_HASH_BYTES).digest() for content in contents)


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedChunk:
    """The hashes of the texts of a chunk, and what was left out before.

    Args:
        count: all records of the chunk.
        hashes: 16 bytes for each candidate.
        left_out: reason to the number of records.
    """

    count: int
    input_bytes: int
    hashes: bytes
    bad: Sequence[BadRecord] = ()
    left_out: Counter[str] = field(default_factory=Counter)


class Hasher:
    """Hashes the texts of chunks, and makes a `HashingTask` for each task."""

    def __init__(self, build: Build, stage: str) -> None:
        self.build, self.stage = build, stage

    def prepare(self, parsed: Parsed, task: HashingTask | None = None) -> HashedChunk:  # noqa: ARG002 - as `Writer`
        """The hashes of a chunk."""
        found = parsed.records
        if isinstance(found, Made):
            left_out = Counter({reason: len(positions) for reason, positions in found.left_out.items()})
        else:
            left_out = Counter(reason for _, reason in found.passed_over)
        return HashedChunk(
            count=found.count,
            input_bytes=found.input_bytes,
            hashes=content_hashes(parsed.contents()),
            bad=found.bad,
            left_out=left_out,
        )

    def begin(self, key: Key, sources: Sequence[int], max_documents: int | None) -> HashingTask:  # noqa: ARG002 - all
        """A task to hash, as a context. It reads all, whatever the limit on documents."""
        return HashingTask(self.build, self.stage, key, sources)


class HashingTask:
    """The texts of one task become a file of hashes and a receipt."""

    is_full = False
    written = 0

    def __init__(self, build: Build, stage: str, key: Key, sources: Sequence[int]) -> None:
        self._store, self._stage, self._key = build.workspace.store, stage, key
        self._counts = {index: SourceCounts(index) for index in sources}
        self._rejects = RejectsFile(self._store, stage, key, is_skipping=build.options.on_bad_record == SKIP)
        self._hashes = bytearray()
        self._admitted = 0
        self._parts: list[tuple[int, int]] = []
        self._input_bytes = 0
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(self._rejects)
        name = file_path(self._stage, self._key)
        self._file = HashingFile(self._stack.enter_context(written(self._store, name)))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def take(self, index: int, chunk: HashedChunk) -> Progress:
        """Take the hashes of a chunk of an input, which makes no documents yet."""
        counts = self._counts.setdefault(index, SourceCounts(index))
        self._rejects.add(index, counts.records_read, chunk.bad)
        num_texts = len(chunk.hashes) // _HASH_BYTES
        reasons = chunk.left_out + Counter(record.reason for record in chunk.bad)
        reasons[EMPTY] += chunk.count - num_texts - reasons.total()
        for reason, number in (+reasons).items():
            counts.left_out[reason] = counts.left_out.get(reason, 0) + number
        counts.records_read += chunk.count
        counts.documents += num_texts
        self._input_bytes += chunk.input_bytes
        for start in range(0, len(chunk.hashes), PART_TEXTS * _HASH_BYTES):
            self._hashes += chunk.hashes[start : start + PART_TEXTS * _HASH_BYTES]
            if len(self._hashes) >= PART_TEXTS * _HASH_BYTES:
                self._flush()
        bad = chunk.bad
        example = f"{bad[0].reason}: {bad[0].detail}" if bad else ""
        return Progress(chunk.input_bytes, 0, 0, chunk.count, len(bad), example)

    def finish(self) -> Receipt:
        """Publish hashes and rejects; the receipt is still to be written."""
        self._flush()
        self._rejects.publish()
        self._stack.close()
        return Receipt(
            key=self._key,
            input_bytes=self._input_bytes,
            outputs=[OutputCounts(sources=list(self._counts.values()))],
            num_rejects=self._rejects.count,
            rejects_bytes=self._rejects.num_bytes,
            parts=self._parts,
            file_bytes=hashes_bytes(self._parts),
            file_sha256=self._file.digest().hex(),
        )

    def _flush(self) -> None:
        count = len(self._hashes) // _HASH_BYTES
        if not count:
            return
        high, low = np.frombuffer(bytes(self._hashes), "<u8").reshape(-1, 2).T
        order, is_repeat = sorted_repeats(high, low)
        first = order[~is_repeat]
        repeats = (np.sort(order[is_repeat]) + self._admitted).astype("<u4")
        rows = np.stack([high[first], low[first], (first + self._admitted).astype(np.uint64)], axis=1)
        writer = RunWriter(self._file)
        writer.append(rows)
        writer.finish()
        self._file.write(repeats.tobytes())
        self._parts.append((len(first), len(repeats)))
        self._admitted += count
        self._hashes = bytearray()


def sorted_repeats(high: NDArray[Any], low: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The order that sorts hashes, equal ones as they came; and for each, so ordered, if it repeats the one before."""
    order = np.argsort(high, kind="stable")
    is_repeat, is_equal_high = _repeats(high, low, order)
    if is_repeat.sum() != is_equal_high.sum():  # two hashes with the same high half: by chance, once in 10^9 texts
        order = np.lexsort((low, high))
        is_repeat, _ = _repeats(high, low, order)
    return order, is_repeat


def _repeats(
    high: NDArray[Any], low: NDArray[Any], order: NDArray[np.int64]
) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """For each hash in this order, whether it is equal to the one before, and whether its high half is."""
    is_equal_high, is_repeat = np.zeros(len(order), np.bool_), np.zeros(len(order), np.bool_)
    high = high[order]
    is_equal_high[1:] = high[1:] == high[:-1]
    low = low[order]
    is_repeat[1:] = is_equal_high[1:] & (low[1:] == low[:-1])
    return is_repeat, is_equal_high
