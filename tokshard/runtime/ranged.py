"""Shards of a corpus read in ranges, through file descriptors."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import weakref
from bisect import bisect_right
from collections import OrderedDict
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.schema import ORDINAL_STRIDE

_MAX_DESCRIPTORS = 1_024
"""Shards that ``pread`` keeps open in a process, if half of its limit of open files (``ulimit -n``) allows that."""


class _OpenFile:
    """A file descriptor, closed when nobody uses it any more: also by a thread that still reads while others open."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)
        self.num_bytes = os.fstat(self.number).st_size


class OpenFiles:
    """The files of a corpus that were used last. All corpora of a process share the descriptors that it may have."""

    _all: ClassVar[weakref.WeakSet[OpenFiles]] = weakref.WeakSet()

    def __init__(self) -> None:
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._all.add(self)

    def open(self, path: str) -> _OpenFile:
        # every step is atomic: threads that race for a file may open it twice, which is harmless
        file = self._files.get(path)
        if file is not None:
            with contextlib.suppress(KeyError):
                self._files.move_to_end(path)
            return file
        try:
            file = _OpenFile(path)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._files:
                raise
            self._files.clear()  # others of the process have more open than was expected
            file = _OpenFile(path)
        self._files[path] = file
        most = self._most()
        while len(self._files) > most:
            with contextlib.suppress(KeyError):
                self._files.popitem(last=False)
        return file

    def _most(self) -> int:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = _MAX_DESCRIPTORS if limit == resource.RLIM_INFINITY else min(_MAX_DESCRIPTORS, limit // 2)
        return max(1, most // len(self._all))


class RangedShard:
    """Reads what is asked for, and keeps only the places of record batches."""

    def __init__(self, corpus: Corpus, index: int, files: OpenFiles) -> None:
        info = corpus.shards[index]
        self.path = str(corpus.directory / info.name)
        self._num_bytes, self._files = info.num_bytes, files
        self._dtype = corpus.dtype
        self._places = corpus.shards.batch_places(index)
        self._strides = corpus.shards.stride_documents(index)
        self._starts = _starts([place.num_tokens for place in self._places])
        self._first_documents = _starts([place.num_documents for place in self._places])

    def tokens(self, start: int, length: int) -> NDArray[Any]:
        batch = bisect_right(self._starts, start) - 1
        position = self._places[batch].values_position + (start - self._starts[batch]) * self._dtype.itemsize
        return np.frombuffer(self._read(position, length * self._dtype.itemsize), self._dtype)

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        # the documents of the strides that hold the first and the last token bound those in between
        first = int(self._strides[start // ORDINAL_STRIDE])
        beyond = -(-stop // ORDINAL_STRIDE)
        last = int(self._strides[beyond]) if beyond < len(self._strides) else self._first_documents[-1] - 1
        offsets = self._offsets(first, last, start, stop)
        low, high = np.searchsorted(offsets, [start, stop], "right")
        return offsets[low:high]

    def document_at(self, position: int) -> tuple[int, int, int]:
        stride = position // ORDINAL_STRIDE
        first = int(self._strides[stride])
        last = int(self._strides[stride + 1]) if stride + 1 < len(self._strides) else self._first_documents[-1] - 1
        offsets = self._offsets(first, last, position, position + 1)
        row = int(np.searchsorted(offsets, position, "right")) - 1
        return first + row, int(offsets[row]), int(offsets[row + 1])

    def bounds(self, row: int) -> tuple[int, int]:
        batch = bisect_right(self._first_documents, row) - 1
        place, base = self._places[batch], self._starts[batch]
        position = place.offsets_position + 8 * (row - self._first_documents[batch])
        start, stop = np.frombuffer(self._read(position, 16), np.int64).tolist()
        if not 0 <= start < stop <= place.num_tokens:
            raise DamagedCorpusError(
                f"{self.path}, batch {batch}: document {row - self._first_documents[batch]} is at {start} to {stop}, "
                f"expected within [0, {place.num_tokens}]",
                hint=RESTORE,
            )
        return base + start, base + stop

    def _offsets(self, first: int, last: int, start: int, stop: int) -> NDArray[np.int64]:
        """Starts of the documents ``[first, last]``, which hold the tokens ``[start, stop)``, and where they end."""
        parts = [np.empty(0, np.int64)]
        end = 0
        row = first
        while row <= min(last, self._first_documents[-1] - 1):
            batch = bisect_right(self._first_documents, row) - 1
            place, base = self._places[batch], self._first_documents[batch]
            row_stop = min(last + 1, base + place.num_documents)
            raw = self._read(place.offsets_position + 8 * (row - base), 8 * (row_stop - row + 1))
            found = np.frombuffer(raw, np.int64)
            is_whole = (row > base or found[0] == 0) and (
                row_stop - base < place.num_documents or found[-1] == place.num_tokens
            )
            if not is_whole or not bool(np.all(found[1:] > found[:-1])) or found[0] < 0 or found[-1] > place.num_tokens:
                raise DamagedCorpusError(
                    f"{self.path}, batch {batch}: offsets of documents {row - base} to {row_stop - base} must ascend "
                    f"within [0, {place.num_tokens}], found {found[0]} to {found[-1]}",
                    hint=RESTORE,
                )
            parts.append(found[:-1] + self._starts[batch])
            end = int(found[-1]) + self._starts[batch]
            row = row_stop
        offsets = np.append(np.concatenate(parts), end)
        if offsets[0] > start or offsets[-1] < stop:  # else pieces would run over the ends of documents
            raise DamagedCorpusError(
                f"{self.path}: the shard table says that documents {first} to {last} hold tokens {start} to {stop}, "
                f"they hold {offsets[0]} to {offsets[-1]}",
                hint=RESTORE,
            )
        return offsets

    def _open(self) -> _OpenFile:
        try:
            file = self._files.open(self.path)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise CorpusError(
                    f"{self.path} cannot be opened: {error.strerror}", hint="raise the limit of open files: 'ulimit -n'"
                ) from error
            raise DamagedCorpusError(f"{self.path} cannot be opened: {error.strerror}", hint=RESTORE) from error
        if file.num_bytes != self._num_bytes:
            raise DamagedCorpusError(
                f"{self.path} has {file.num_bytes} bytes, expected {self._num_bytes}", hint=RESTORE
            )
        return file

    def _read(self, position: int, length: int) -> bytes:
        if not 0 <= position <= position + length <= self._num_bytes:  # before memory is allocated for it
            raise DamagedCorpusError(
                f"{self.path} has {self._num_bytes} bytes, the shard table names {length} at {position}", hint=RESTORE
            )
        file = self._open()
        try:
            data = os.pread(file.number, length, position)
            while 0 < len(data) < length:
                more = os.pread(file.number, length - len(data), position + len(data))
                if not more:
                    break
                data += more
        except OSError as error:
            raise DamagedCorpusError(f"{self.path} cannot be read: {error.strerror}", hint=RESTORE) from error
        if len(data) != length:
            raise DamagedCorpusError(
                f"{self.path} ends at byte {position + len(data)}, expected {length} bytes at {position}: it was cut "
                "under the running job",
                hint=RESTORE,
            )
        return data


def _starts(counts: list[int]) -> list[int]:
    return [0, *itertools.accumulate(counts)]
