"""Corpora on disk as the token streams of an order: the only place of the runtime that knows the format."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.opening import open_corpus
from tokshard.runtime.mapped import MappedShard, MappedTokens
from tokshard.runtime.order.forking import ForkLock
from tokshard.runtime.ranged import OpenFiles, RangedShard
from tokshard.runtime.source import DocumentSpan
from tokshard.store import open_store

_MAX_SHARDS = 8_192
"""Shards and record batches kept in use: a map costs about a kilobyte and no descriptor."""


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
        self._files = OpenFiles() if access == "pread" else None
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

    @property
    def is_in_memory(self) -> bool:
        """Whether shards are memory-mapped."""
        return self._files is None

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus; `TokenSource.ends` says in which form.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        parts: list[NDArray[np.int64]] = []
        counts = [0]
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            position, count = start, 0
            while position < stop:
                index = bisect_right(self._starts, position) - 1
                base, end = self._starts[index], min(stop, self._starts[index + 1])
                parts.append(self._shard(index).ends(position - base, end - base) + base)
                count += len(parts[-1])
                position = end
            counts.append(count)
        values = np.concatenate(parts) if parts else np.empty(0, np.int64)
        return np.cumsum(counts), values

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces; `TokenSource.read` says how.

        Raises:
            DamagedCorpusError: a shard is missing or not what the manifest says.
        """
        if self._files is not None:
            self._read_ranges(starts, lengths, out, at)
        elif len(starts):
            batches = self._batches_of(starts, lengths)
            self._opened(batches).read(batches, starts, lengths, out, at)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Does nothing: the kernel reads ahead by itself."""

    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token of the stream."""
        index = bisect_right(self._starts, position) - 1
        base = self._starts[index]
        row, start, stop = self._shard(index).document_at(position - base)
        first = self.corpus.shards.first_document(index)
        name = self.corpus.shards[index].name
        return DocumentSpan(shard=name, document=first + row, start=base + start, stop=base + stop)

    def place_of(self, document: int) -> DocumentSpan:
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
        return DocumentSpan(shard=name, document=document, start=base + start, stop=base + stop)

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

    def _read_ranges(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        order = np.argsort(starts)  # shard after shard, so that each is opened once
        starts, lengths, at = starts[order], lengths[order], at[order]
        shards = np.searchsorted(self._first_tokens, starts, "right") - 1
        within = starts - self._first_tokens[shards]
        for shard, start, length, place in zip(
            shards.tolist(), within.tolist(), lengths.tolist(), at.tolist(), strict=True
        ):
            found = self._shard(shard)
            assert isinstance(found, RangedShard)
            out[place : place + length] = found.tokens(start, length)

    def _batches_of(self, starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """The record batch that holds each piece."""
        first_tokens, _ = self._record_batches
        # a position beyond the corpus follows from changed offsets: it is beyond the last batch, too
        batches = np.minimum(first_tokens.searchsorted(starts, "right") - 1, len(first_tokens) - 2)
        is_wrong = (starts + lengths > first_tokens[batches + 1]) | (batches < 0)
        if is_wrong.any():
            raise self._damage(int(batches[int(np.argmax(is_wrong))]))
        return batches

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

    def _opened(self, batches: NDArray[np.int64]) -> MappedTokens:
        """The tokens of record batches, some of which may have to be opened."""
        if not len(self._tokens.missing(batches)):
            return self._tokens
        first_tokens, first_batches = self._record_batches
        with self._lock:
            tokens, batches = self._tokens, np.unique(batches)
            missing = tokens.missing(batches)
            if len(tokens) + len(missing) > _MAX_SHARDS:
                # who still reads from the old ones keeps them
                tokens, missing = MappedTokens(first_tokens, self.dtype), batches
            for batch in missing.tolist():
                index = bisect_right(first_batches, batch) - 1
                shard = self._shard(index)
                assert isinstance(shard, MappedShard)
                tokens.add(batch, shard.values(batch - first_batches[index]))
            self._tokens = tokens
            return tokens

    @cached_property
    def _tokens(self) -> MappedTokens:
        return MappedTokens(self._record_batches[0], self.dtype)

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
            shard = MappedShard(self.corpus, index) if files is None else RangedShard(self.corpus, index, files)
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


class _Shard(Protocol):
    """One shard; positions count from its first token."""

    path: str

    def ends(self, start: int, stop: int) -> NDArray[np.int64]: ...

    def document_at(self, position: int) -> tuple[int, int, int]: ...

    def bounds(self, row: int) -> tuple[int, int]: ...
