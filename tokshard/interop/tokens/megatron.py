"""Megatron-LM's indexed data sets: ids in ``NAME.bin``, and their sequences and documents in ``NAME.idx``.

An index holds, little-endian and without gaps:

    the magic number, the version (uint64, 1) and a code of the dtype (uint8)
    the number of sequences and of document bounds (uint64 each)
    the length of every sequence in tokens (int32)
    the first byte of every sequence in the file of ids (int64)
    the number of the first sequence of every document, ending with the number of sequences (int64)
    in multimodal data sets, a mode for every sequence (int8)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BadSourceError
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec, companion_size, damaged, read_numbers, stored_dtype
from tokshard.interop.tokens.located import check_bounds, read_located
from tokshard.store import Store

SUFFIX, INDEX_SUFFIX = ".bin", ".idx"

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}
_LENGTH, _PLACE = np.dtype("<i4"), np.dtype("<i8")


def index_name(name: str) -> str:
    """The index of a file of ids."""
    return name.removesuffix(SUFFIX) + INDEX_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronIndex:
    """An index whose header is read.

    Args:
        num_bytes: size of the file of ids.
        dtype: of the ids.
    """

    store: Store
    name: str
    num_bytes: int
    dtype: np.dtype[Any]
    num_sequences: int
    num_documents: int

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `DocumentIndex.bounds`; also checks that sequences follow each other without a gap."""
        firsts = self._numbers(_PLACE, self._documents_at, start, stop + 1)
        if int(firsts.min()) < 0 or int(firsts.max()) > self.num_sequences or (np.diff(firsts) < 0).any():
            raise self._damaged(
                f"the documents from {start:,} on begin with sequences {firsts[:3].tolist()}...; expected ascending "
                f"numbers up to {self.num_sequences:,}"
            )
        low, high = int(firsts[0]), int(firsts[-1])
        ends = self._sequence_bounds(low, high)
        return check_bounds(self.store, self.name, ends[firsts - low], self.num_bytes, start)

    def _sequence_bounds(self, low: int, high: int) -> NDArray[np.int64]:
        """The first byte of sequences ``[low, high)``, and the end of the last."""
        if low == high:
            place = self._end() if low == self.num_sequences else int(self._places(low, low + 1)[0])
            return np.array([place], np.int64)
        lengths = self._numbers(_LENGTH, _HEADER.size, low, high).astype(np.int64)
        if int(lengths.min()) < 0:
            at = int(np.argmin(lengths))
            raise self._damaged(f"sequence {low + at:,} has {int(lengths[at]):,} tokens")
        bounds = np.empty(high - low + 1, np.int64)
        bounds[:-1] = self._places(low, high)
        ends = bounds[:-1] + lengths * self.dtype.itemsize
        bounds[-1] = ends[-1]
        if (ends[:-1] != bounds[1:-1]).any():
            at = int(np.argmax(ends[:-1] != bounds[1:-1]))
            raise self._damaged(
                f"sequence {low + at + 1:,} begins at byte {int(bounds[at + 1]):,}, and the one before it ends at "
                f"{int(ends[at]):,}"
            )
        return bounds

    def _end(self) -> int:
        """Where the last sequence ends."""
        return int(self._sequence_bounds(self.num_sequences - 1, self.num_sequences)[-1]) if self.num_sequences else 0

    def check_end(self) -> None:
        """Refuse an index of another file of ids.

        Raises:
            BadSourceError: its last sequence does not end where that file does.
        """
        start = int(self._places(0, 1)[0]) if self.num_sequences else 0
        if (start, self._end()) != (0, self.num_bytes):
            raise self._damaged(
                f"its sequences lie at bytes {start:,} to {self._end():,}, and there are {self.num_bytes:,} bytes of "
                "ids"
            )
        first, last = (int(self._numbers(_PLACE, self._documents_at, at, at + 1)[0]) for at in (0, self.num_documents))
        if (first, last) != (0, self.num_sequences):
            raise self._damaged(f"its documents are sequences {first:,} to {last:,} of {self.num_sequences:,}")

    def _places(self, low: int, high: int) -> NDArray[Any]:
        return self._numbers(_PLACE, _HEADER.size + _LENGTH.itemsize * self.num_sequences, low, high)

    @property
    def _documents_at(self) -> int:
        return _HEADER.size + (_LENGTH.itemsize + _PLACE.itemsize) * self.num_sequences

    def _numbers(self, dtype: np.dtype[Any], at: int, low: int, high: int) -> NDArray[Any]:
        return read_numbers(self.store, self.name, dtype, at + low * dtype.itemsize, high - low)

    def _damaged(self, reason: str) -> BadSourceError:
        return damaged(self.store, self.name, reason)


def read_index(store: Store, name: str) -> MegatronIndex:
    """The index of a file of ids.

    Raises:
        BadSourceError: it is missing, or its sizes contradict each other.
    """
    index = index_name(name)
    size = companion_size(store, index, "the index")
    if size < _HEADER.size:
        raise damaged(store, index, f"it has {size:,} bytes, expected at least {_HEADER.size}")
    (header,) = store.read(index, [(0, _HEADER.size)])
    magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header)
    if magic != MAGIC:
        raise damaged(store, index, f"it begins with {magic!r}, expected {MAGIC!r}")
    if version != 1:
        raise damaged(store, index, f"it has version {version:,}, expected 1")
    if code not in _CODES or _CODES[code].startswith("float"):
        raise damaged(store, index, f"its dtype has the code {code} ({_CODES.get(code, 'unknown')}), expected integers")
    expected = _HEADER.size + (_LENGTH.itemsize + _PLACE.itemsize) * num_sequences + _PLACE.itemsize * num_bounds
    if size not in (expected, expected + num_sequences) or num_bounds < 1:
        raise damaged(
            store,
            index,
            f"it has {size:,} bytes, expected {expected:,} for {num_sequences:,} sequences and {num_bounds:,} bounds "
            "of documents",
        )
    return MegatronIndex(
        store=store,
        name=index,
        num_bytes=store.stat(name).size,
        dtype=stored_dtype(_CODES[code]),
        num_sequences=num_sequences,
        num_documents=num_bounds - 1,
    )


def read(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- the index says it all
    """The documents whose first byte lies in ``[start, stop)`` of a file of ids; with `stop` None, to the end.

    Raises:
        BadSourceError: the files are damaged or do not belong together.
    """
    index = read_index(store, name)
    index.check_end()
    return read_located(store, name, dtype=index.dtype, index=index, start=start, stop=stop)
