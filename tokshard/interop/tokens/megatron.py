"""Megatron-LM's indexed data sets: ids in ``NAME.bin``, and their sequences and documents in ``NAME.idx``.

An index holds, little-endian and without gaps:

    the magic number, the version (uint64, 1) and a code of the dtype (uint8)
    the number of sequences and of document bounds (uint64 each)
    the length of every sequence in tokens (int32)
    the first byte of every sequence in the file of ids (int64)
    the number of the first sequence of every document, ending with the number of sequences (int64)
    in multimodal data sets, a mode for every sequence (int8): 0 for text
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BadSourceError
from tokshard.interop.tokens.batches import NumberFile, TokenBatch, TokenSpec, companion_size, damaged, stored_dtype
from tokshard.interop.tokens.located import check_bounds, read_located
from tokshard.store import Store

SUFFIX, INDEX_SUFFIX = ".bin", ".idx"

MAGIC = b"MMIDIDX\0\0"
_HEADER = struct.Struct("<9sQBQQ")
_CODES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


def index_name(name: str) -> str:
    """The index of a file of ids."""
    return name.removesuffix(SUFFIX) + INDEX_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronIndex:
    """An index whose header is read.

    Args:
        ids: the file of ids.
        lengths: of the sequences, in ids.
        places: the first byte of each.
        firsts: the first sequence of each document, and the number of sequences.
    """

    ids: NumberFile
    lengths: NumberFile
    places: NumberFile
    firsts: NumberFile

    @property
    def num_documents(self) -> int:
        """As `DocumentIndex.num_documents`."""
        return self.firsts.count - 1

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `DocumentIndex.bounds`; also checks that sequences follow each other without a gap."""
        firsts = self.firsts.read(start, stop + 1)
        if int(firsts.min()) < 0 or int(firsts.max()) > self.places.count or (np.diff(firsts) < 0).any():
            raise self._damaged(
                f"the documents from {start:,} on begin with sequences {firsts[:3].tolist()}...; expected ascending "
                f"numbers up to {self.places.count:,}"
            )
        low, high = int(firsts[0]), int(firsts[-1])
        ends = self._sequence_bounds(low, high)
        return check_bounds(self.firsts.store, self.firsts.name, ends[firsts - low], self.ids.stop, start)

    def _sequence_bounds(self, low: int, high: int) -> NDArray[np.int64]:
        """The first byte of sequences ``[low, high)``, and the end of the last, where the one after it begins."""
        if low == high:
            place = self._end() if low == self.places.count else int(self.places.read(low, low + 1)[0])
            return np.array([place], np.int64)
        lengths = self.lengths.read(low, high).astype(np.int64)
        if int(lengths.min()) < 0:
            at = int(np.argmin(lengths))
            raise self._damaged(f"sequence {low + at:,} has {int(lengths[at]):,} tokens")
        starts = self.places.read(low, min(high + 1, self.places.count)).astype(np.int64)
        ends = starts[: len(lengths)] + lengths * self.ids.dtype.itemsize
        if len(wrong := np.flatnonzero(ends[: len(starts) - 1] != starts[1:])):
            at = int(wrong[0])
            raise self._damaged(
                f"sequence {low + at + 1:,} begins at byte {int(starts[at + 1]):,}, and the one before it ends at "
                f"{int(ends[at]):,}"
            )
        return np.append(starts[: len(lengths)], ends[-1])

    def _end(self) -> int:
        """Where the last sequence ends."""
        count = self.places.count
        return int(self._sequence_bounds(count - 1, count)[-1]) if count else 0

    def check_end(self, num_bytes: int) -> None:
        """Refuse an index of another file of ids.

        Args:
            num_bytes: size of the file of ids.

        Raises:
            BadSourceError: its last sequence does not end where that file does.
        """
        count = self.places.count
        start = int(self.places.read(0, 1)[0]) if count else 0
        if (start, self._end()) != (0, num_bytes):
            raise self._damaged(
                f"its sequences lie at bytes {start:,} to {self._end():,}, and there are {num_bytes:,} bytes of ids"
            )
        first, last = (int(self.firsts.read(at, at + 1)[0]) for at in (0, self.num_documents))
        if (first, last) != (0, count):
            raise self._damaged(f"its documents are sequences {first:,} to {last:,} of {count:,}")

    def _damaged(self, reason: str) -> BadSourceError:
        return damaged(self.firsts.store, self.firsts.name, reason)


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
    numbers = partial(NumberFile, store=store, name=index)
    lengths = numbers(dtype=np.dtype("<i4"), start=_HEADER.size, count=num_sequences)
    places = numbers(dtype=np.dtype("<i8"), start=lengths.stop, count=num_sequences)
    firsts = numbers(dtype=np.dtype("<i8"), start=places.stop, count=num_bounds)
    if not num_bounds:
        raise damaged(store, index, "it has no bound of a document, expected at least one")
    modes = numbers(dtype=np.dtype("i1"), start=firsts.stop, count=num_sequences)
    if size == modes.stop != firsts.stop and modes.read(0, num_sequences).any():
        raise BadSourceError(
            f"{store.where(index)} has sequences of another mode than 0, which is text",
            hint="write the texts of the multimodal data set as one of their own",
        )
    if size not in (firsts.stop, modes.stop):
        raise damaged(
            store,
            index,
            f"it has {size:,} bytes, expected {firsts.stop:,} for {num_sequences:,} sequences and {num_bounds:,} "
            "bounds of documents",
        )
    dtype = stored_dtype(_CODES[code])
    ids = NumberFile(store=store, name=name, dtype=dtype, count=store.stat(name).size // dtype.itemsize)
    return MegatronIndex(ids=ids, lengths=lengths, places=places, firsts=firsts)


def read(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- the index says it all
    """The documents whose first byte lies in ``[start, stop)`` of a file of ids; with `stop` None, to the end.

    Raises:
        BadSourceError: the files are damaged or do not belong together.
    """
    index = read_index(store, name)
    index.check_end(store.stat(name).size)
    return read_located(index.ids, index=index, start=start, stop=stop)
