"""Corpora on disk as the token streams of an order: the only place of the runtime that knows the format."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import resource
import weakref
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format.corpus import Corpus
from tokshard.format.opening import open_corpus
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.runtime.copying import Memory, Spans
from tokshard.runtime.order.forking import ForkLock
from tokshard.runtime.order.windows import DocumentPlace
from tokshard.store import open_store

_MAX_SHARDS = 8_192
"""Shards and record batches kept in use: a map costs about a kilobyte and no descriptor."""

_MAX_DESCRIPTORS = 1_024
"""Shards that ``pread`` keeps open in a process, if half of its limit of open files (``ulimit -n``) allows that."""


class CorpusSource:
    """A corpus as one stream of tokens, shard after shard.

    Shards are memory-mapped, or with ``access="pread"`` read piece by piece through file descriptors, which suits
    network file systems: a shard that is cut or vanishes under a running job is then an error, where a map would kill
    the process with SIGBUS. Sizes are checked when a shard is first touched, offsets whenever they are read.

    Pickles as its arguments, so that a worker process opens the corpus for itself.

    Args:
        location: the corpus directory.
        access: ``"mmap"`` or ``"pread"``.
    """

    def __init__(self, location: str | os.PathLike[str], *, access: str = "mmap") -> None:
        if access not in ("mmap", "pread"):
            raise ValueError(f"access must be 'mmap' or 'pread', got {access!r}")
        self.location, self.access = os.path.abspath(open_store(location).location), access
        self.corpus = open_corpus(self.location)
        self.reading: str | None = None
        """The shard that was touched last: what hangs, if a read hangs."""
        self.on_shard: Callable[[str], None] | None = None
        """Is told the path of a shard before it is touched."""
        self._first_tokens = self.corpus.shards.first_tokens
        self._starts: list[int] = self._first_tokens.tolist()
        self._shards: OrderedDict[int, _Shard] = OrderedDict()
        self._files = _OpenFiles() if access == "pread" else None
        self._lock = ForkLock()

    def __reduce__(self) -> tuple[Any, ...]:
        return (partial(CorpusSource, access=self.access), (self.location,))

    def __repr__(self) -> str:
        return repr(self.corpus)

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus."""
        return self.corpus.num_tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a token id: uint16 or uint32."""
        return self.corpus.dtype

    @property
    def fingerprint(self) -> str:
        """Content fingerprint."""
        return self.corpus.fingerprint

    @property
    def tokenizer(self) -> str:
        """Hash of the tokenizer that made it: corpora of one plan share it."""
        return self.corpus.manifest.tokenizer.canonical_sha256

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents end in ``(start, stop]``: int64, ascending.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        parts = []
        position = start
        while position < stop:
            index = bisect_right(self._starts, position) - 1
            base, end = self._starts[index], min(stop, self._starts[index + 1])
            parts.append(self._shard(index).ends(position - base, end - base) + base)
            position = end
        if len(parts) == 1:
            return parts[0]
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def views(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> list[NDArray[Any]]:
        """The tokens of pieces, each within one document: read-only arrays of `dtype`.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        if self.access == "pread":
            found: list[NDArray[Any]] = [np.empty(0, self.dtype)] * len(starts)
            order = np.argsort(starts)  # shard after shard, so that each is opened once
            starts = starts[order]
            shards = np.searchsorted(self._first_tokens, starts, "right") - 1
            within = starts - self._first_tokens[shards]
            for number, shard, start, length in zip(
                order.tolist(), shards.tolist(), within.tolist(), lengths[order].tolist(), strict=True
            ):
                found[number] = self._shard(shard).tokens(start, length)
            return found
        opened, batches, within = self._mapped(starts, lengths)
        values = opened.values
        return [
            values[batch][start:stop]
            for batch, start, stop in zip(batches.tolist(), within.tolist(), (within + lengths).tolist(), strict=True)
        ]

    def spans(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Spans | None:
        """Where the tokens of pieces lie in memory; None without memory maps, or if a shard does not align its tokens.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        if self.access == "pread":
            return None
        opened, batches, within = self._mapped(starts, lengths)
        if not opened.are_aligned:
            return None
        return Spans(opened.addresses[batches] + within * self.dtype.itemsize, opened.memory)

    def document_at(self, position: int) -> DocumentPlace:
        """The document that holds a token of the stream."""
        index = bisect_right(self._starts, position) - 1
        base = self._starts[index]
        row, start, stop = self._shard(index).document_at(position - base)
        first = self.corpus.shards.first_document(index)
        name = self.corpus.shards[index].name
        return DocumentPlace(shard=name, document=first + row, start=base + start, stop=base + stop)

    def place_of(self, document: int) -> DocumentPlace:
        """A document by its number in the corpus.

        Raises:
            IndexError: there is no such document.
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        if document < 0:
            raise IndexError(f"document {document}; documents are numbered from 0")
        index, row = self.corpus.shards.find(document)
        start, stop = self._shard(index).bounds(row)
        base = self._starts[index]
        name = self.corpus.shards[index].name
        return DocumentPlace(shard=name, document=document, start=base + start, stop=base + stop)

    def changed_shard(self) -> str | None:
        """The first shard that is now gone or has another size than the manifest says. A stat per shard."""
        for shard in self.corpus.shards:
            path = str(self.corpus.directory / shard.name)
            try:
                size = os.stat(path).st_size
            except OSError:
                return path
            if size != shard.num_bytes:
                return path
        return None

    def _mapped(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64]
    ) -> tuple[_OpenBatches, NDArray[np.int64], NDArray[np.int64]]:
        """Open record batches, in which of them each piece lies, and where it starts there."""
        first_tokens, _ = self._record_batches
        # a position beyond the corpus follows from changed offsets: it is beyond the last batch, too
        batches = np.minimum(first_tokens.searchsorted(starts, "right") - 1, len(first_tokens) - 2)
        beyond = np.flatnonzero(starts + lengths > first_tokens[batches + 1])
        if len(beyond):
            raise self._damage(int(batches[beyond[0]]))
        opened = self._opened
        if not opened.addresses[batches].all():
            with self._lock:
                opened = self._open(np.unique(batches))
        return opened, batches, starts - first_tokens[batches]

    def _damage(self, batch: int) -> DamagedCorpusError:
        """A document reaches beyond its record batch: its offsets changed since they were checked."""
        cut = self.changed_shard()
        if cut is not None:
            return DamagedCorpusError(
                f"{cut} is not as long as its manifest says: it was cut under the running job", hint=RESTORE
            )
        index = bisect_right(self._record_batches[1], batch) - 1
        path = self.corpus.directory / self.corpus.shards[index].name
        return DamagedCorpusError(f"{path}: a document reaches beyond its record batch", hint=RESTORE)

    def _open(self, batches: NDArray[np.int64]) -> _OpenBatches:
        """Open record batches that are not open yet."""
        first_tokens, first_batches = self._record_batches
        opened = self._opened
        missing = batches[opened.addresses[batches] == 0]
        if len(opened.values) + len(missing) > _MAX_SHARDS:
            # who still reads from the old ones keeps them
            opened, missing = _OpenBatches(len(first_tokens) - 1), batches
        for batch in missing.tolist():
            index = bisect_right(first_batches, batch) - 1
            shard = self._shard(index)
            assert isinstance(shard, _MappedShard)
            opened.add(batch, shard.values(batch - first_batches[index]))
        self._opened = opened
        return opened

    @cached_property
    def _opened(self) -> _OpenBatches:
        return _OpenBatches(len(self._record_batches[0]) - 1)

    @cached_property
    def _record_batches(self) -> tuple[NDArray[np.int64], list[int]]:
        """The position of each record batch's first token in the corpus, and the first record batch of each shard."""
        first, tokens = self.corpus.shards.batch_tokens()
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(tokens)]), first.tolist()

    def _shard(self, index: int) -> _Shard:
        # every step is atomic: threads that race for a shard may make it twice, which is harmless
        shard = self._shards.get(index)
        if shard is None:
            self._touch(str(self.corpus.directory / self.corpus.shards[index].name))
            files = self._files
            shard = _MappedShard(self.corpus, index) if files is None else _PreadShard(self.corpus, index, files)
            self._shards[index] = shard
            if len(self._shards) > _MAX_SHARDS:
                with contextlib.suppress(KeyError):
                    self._shards.popitem(last=False)
        if shard.path is not self.reading:
            self._touch(shard.path)
        return shard

    def _touch(self, path: str) -> None:
        self.reading = path
        if self.on_shard is not None:
            self.on_shard(path)


class _OpenBatches:
    """The tokens of record batches that were touched, by their number in the corpus."""

    def __init__(self, num_batches: int) -> None:
        self.values: dict[int, NDArray[Any]] = {}
        self.addresses = np.zeros(num_batches, np.int64)
        self.memory = Memory()
        self.are_aligned = True
        """Gathering from a shard whose tokens lie at odd addresses would copy all memory first."""

    def add(self, batch: int, values: NDArray[Any]) -> None:
        self.values[batch] = values
        self.are_aligned &= values.flags.aligned
        self.addresses[batch] = self.memory.add(values)


class _Shard(Protocol):
    """One shard; positions count from its first token."""

    path: str

    def ends(self, start: int, stop: int) -> NDArray[np.int64]: ...

    def tokens(self, start: int, length: int) -> NDArray[Any]: ...

    def document_at(self, position: int) -> tuple[int, int, int]: ...

    def bounds(self, row: int) -> tuple[int, int]: ...


class _MappedShard:
    """Keeps offsets and tokens of the record batches that were touched, and nothing else of Arrow."""

    def __init__(self, corpus: Corpus, index: int) -> None:
        self._corpus, self._index = corpus, index
        shard = corpus.shard(index)
        self.path = str(shard.path)
        self._num_bytes = corpus.shards[index].num_bytes
        self._first_documents = _starts([place.num_documents for place in shard.places])
        self._starts = _starts([place.num_tokens for place in shard.places])
        self._batches: dict[int, tuple[NDArray[np.int64], NDArray[Any]]] = {}

    def values(self, batch: int) -> NDArray[Any]:
        return self._batch(batch)[1]

    def tokens(self, start: int, length: int) -> NDArray[Any]:
        batch = bisect_right(self._starts, start) - 1
        begin = start - self._starts[batch]
        return self._batch(batch)[1][begin : begin + length]

    def _batch(self, batch: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        found = self._batches.get(batch)
        if found is None:
            found = self._batches[batch] = self._corpus.shard(self._index).batch(batch)
        return found

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = []
        while start < stop:
            batch = bisect_right(self._starts, start) - 1
            base, end = self._starts[batch], min(stop, self._starts[batch + 1])
            parts.append(self._ends(batch, start - base, end - base) + base)
            start = end
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _ends(self, batch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Where documents end in ``(start, stop]`` of a record batch.

        The offsets were checked when they were first touched, but a map shows what is written to the file later.
        """
        offsets = self._batch(batch)[0]
        low, high = int(offsets.searchsorted(start, "right")), int(offsets.searchsorted(stop, "right"))
        around = offsets[max(0, low - 1) : high + 1].copy()  # what is checked is what is used
        ends = around[1 : 1 + high - low]
        is_right = (
            0 < low <= high
            and 0 <= around[0] <= start
            and bool(np.all(around[1:] > around[:-1]))
            and (around[-1] == self._num_tokens(batch) if high == len(offsets) else around[-1] > stop)
            and (not len(ends) or (start < ends[0] and ends[-1] <= stop))
        )
        if not is_right:
            raise self._changed(batch)
        return ends

    def document_at(self, position: int) -> tuple[int, int, int]:
        batch = bisect_right(self._starts, position) - 1
        within = position - self._starts[batch]
        row = int(np.searchsorted(self._batch(batch)[0], within, "right")) - 1
        start, stop = self._document(batch, row)
        if not start <= within < stop:
            raise self._changed(batch)
        return self._first_documents[batch] + row, self._starts[batch] + start, self._starts[batch] + stop

    def bounds(self, row: int) -> tuple[int, int]:
        batch = bisect_right(self._first_documents, row) - 1
        start, stop = self._document(batch, row - self._first_documents[batch])
        return self._starts[batch] + start, self._starts[batch] + stop

    def _document(self, batch: int, row: int) -> tuple[int, int]:
        """Where a document starts and ends in its record batch."""
        bounds = self._batch(batch)[0][max(0, row) : row + 2].tolist()
        if len(bounds) != 2 or not 0 <= bounds[0] < bounds[1] <= self._num_tokens(batch):
            raise self._changed(batch)
        return bounds[0], bounds[1]

    def _num_tokens(self, batch: int) -> int:
        return self._starts[batch + 1] - self._starts[batch]

    def _changed(self, batch: int) -> DamagedCorpusError:
        if os.stat(self.path).st_size != self._num_bytes:
            return DamagedCorpusError(
                f"{self.path} is not as long as its manifest says: it was cut under the running job", hint=RESTORE
            )
        return DamagedCorpusError(
            f"{self.path}, batch {batch}: the offsets of its documents no longer ascend from 0 to "
            f"{self._num_tokens(batch)}: the file was changed under the running job",
            hint=RESTORE,
        )


class _OpenFile:
    """A file descriptor, closed when nobody uses it any more: also by a thread that still reads while others open."""

    def __init__(self, path: str) -> None:
        self.number = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.number)
        self.num_bytes = os.fstat(self.number).st_size


class _OpenFiles:
    """The files of a corpus that were used last. All corpora of a process share the descriptors that it may have."""

    _all: ClassVar[weakref.WeakSet[_OpenFiles]] = weakref.WeakSet()

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


class _PreadShard:
    def __init__(self, corpus: Corpus, index: int, files: _OpenFiles) -> None:
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
