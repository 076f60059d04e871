"""Corpora in the format of tokshard as token sources; only this module and those it imports know the format."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.corpus import REPLACED, Corpus
from tokshard.format.kept import Shared
from tokshard.format.opening import base_location, open_base, open_corpus, read_generations
from tokshard.format.shared import num_shared
from tokshard.format.view import View
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.mapped import MappedCorpus
from tokshard.runtime.bytes.ranged import RangedCorpus, stride_tokens_of
from tokshard.runtime.bytes.source import DocumentSpan, ReadCounts, TokenSource
from tokshard.runtime.bytes.view import ViewedCorpus
from tokshard.store import Store, absolute_location, is_uri, open_store, side_by_side

_SHARDS_AT_ONCE = 32


class CorpusSource(TokenSource):
    """A corpus as one sequence of tokens, shard after shard. The constructor makes one of the three kinds below.

    Shards on disk are memory-mapped. In an object store, on a web server, or with ``access="pread"``, blocks are read
    by range, many at a time and ahead of need, into a cache; their tokens are checked against the hashes of the corpus.
    ``"pread"`` suits network file systems, too: if a shard is cut or vanishes during the run, it raises an error; a map
    would kill the process with SIGBUS. A shard that is replaced in a store during the run is refused.

    Pickles as its arguments, so that a worker process opens the corpus for itself.

    Args:
        location: the corpus: a directory or a URI.
        access: ``"mmap"`` or ``"pread"``.
        generation: read the documents up to this generation; default: the newest. A copy in another process reads the
            same, whatever is appended meanwhile.
        cache: for reads by range; corpora may share one. Default: its own.

    Attributes:
        corpus: the open corpus.
        num_tokens, dtype, fingerprint, tokenizer, is_in_memory, earlier_fingerprints, has_spans: as `TokenSource` says.
        eos_id: the token that ends every document.
        cache: the cache of its reads, unless it is mapped.

    Raises:
        CorpusError: the corpus cannot be opened.
    """

    def __new__(cls, location: str | os.PathLike[str], *, access: str = "mmap", **_: Any) -> Self:
        if access not in ("mmap", "pread"):
            raise ValueError(f"access must be 'mmap' or 'pread', got {access!r}")
        kind: Any = cls if cls is not CorpusSource else _kind(open_store(location), access)
        made: Self = super().__new__(kind)
        return made

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        access: str = "mmap",
        generation: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        # absolute: a worker process may work in another directory
        self.location, self.access = absolute_location(location), access
        self.cache = Cache() if cache is None else cache
        self.corpus = self._opened(generation)
        self.num_tokens = self.corpus.num_tokens
        self.dtype = self.corpus.dtype
        self.eos_id = self.corpus.eos_id
        self.fingerprint = self.corpus.fingerprint
        self.tokenizer = self.corpus.manifest.tokenizer.canonical_sha256
        self.earlier_fingerprints = self.corpus.content_fingerprints[:-1]
        self.has_spans = self.corpus.has_spans
        self._begin()

    def _opened(self, generation: int | None) -> Corpus:
        return open_corpus(self.location, generation=generation)

    def __reduce__(self) -> tuple[Any, ...]:
        generation = self.corpus.num_generations - 1
        return (_reopened, (self.location, self.access, generation, self.cache, self.fingerprint))

    def __repr__(self) -> str:
        return repr(self.corpus)

    def _of_its_kind(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError("a corpus is a MappedSource or a RangedSource, which __new__ chooses")

    # which both have; here they let type checkers accept the constructor
    _begin = read = ends = targets = _document_at = _bounds_of = _of_its_kind

    def num_shared(self, other: TokenSource) -> Shared | None:
        """The number of documents that another corpus has, too, by `tokshard.format.shared`; None: not known."""
        with contextlib.suppress(OSError):
            return num_shared(self.corpus, other.corpus) if isinstance(other, CorpusSource) else None
        return None

    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        document, start, stop = self._document_at(position)
        return self._span(document, start, stop)

    def place_of(self, document: int) -> DocumentSpan:
        """A document by its number in the corpus.

        Raises:
            IndexError: the corpus has no such document.
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        if document < 0:
            raise IndexError(f"document {document}; documents are numbered from 0")
        shard, row = self.corpus.shards.find(document)
        starts, stops = self._bounds_of(shard, np.array([row]))
        return self._span(document, int(starts[0]), int(stops[0]))

    def spans_of(self, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Starts and stops in the corpus of many documents: int64 [n] each. Documents of one shard are read together.

        Args:
            documents: int64 [n], numbers in the corpus, ascending, at least one.

        Raises:
            IndexError: the corpus has no such document.
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        first_documents = self.corpus.shards.first_documents
        if documents[0] < 0 or documents[-1] >= first_documents[-1]:
            wrong = documents[0] if documents[0] < 0 else documents[-1]
            raise IndexError(f"document {wrong} of a corpus of {first_documents[-1]} documents")
        shards = np.searchsorted(first_documents, documents, "right") - 1
        bounds = np.flatnonzero(np.diff(shards, prepend=-1, append=-1))

        def of_shard(start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            shard = int(shards[start])
            found: tuple[NDArray[np.int64], NDArray[np.int64]]
            found = self._bounds_of(shard, documents[start:stop] - first_documents[shard])
            return found

        with ThreadPoolExecutor(1 if self.is_in_memory else _SHARDS_AT_ONCE) as pool:
            found = list(pool.map(of_shard, bounds[:-1].tolist(), bounds[1:].tolist()))
        starts, stops = zip(*found, strict=True)
        return np.concatenate(starts), np.concatenate(stops)

    def _span(self, document: int, start: int, stop: int) -> DocumentSpan:
        shard, _ = self.corpus.shards.find(document)
        return DocumentSpan(shard=self.corpus.shards[shard].name, document=document, start=start, stop=stop)


def _kind(store: Store, access: str) -> type[CorpusSource]:
    """The class that reads a corpus."""
    try:
        store.stat(names.KEPT)
    except OSError:
        is_mapped = access == "mmap" and store.local_path(names.MANIFEST) is not None
        return MappedSource if is_mapped else RangedSource
    return ViewSource


class MappedSource(MappedCorpus, CorpusSource):
    """A corpus whose shards are memory maps."""

    is_in_memory = True


class RangedSource(RangedCorpus, CorpusSource):
    """A corpus that is read by range."""

    tokens_at_once = 1 << 18

    @property
    def counts(self) -> ReadCounts:
        """Counts of reads through the cache."""
        return self.cache.counts

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache may keep in memory."""
        return self.cache.memory_bytes

    def kept_bytes(self, num_blocks: int, block_tokens: int) -> int:
        """Bytes that so many blocks take in the memory of the cache."""
        return num_blocks * stride_tokens_of(block_tokens) * self.dtype.itemsize


_bases: WeakValueDictionary[tuple[str, str, str, int], CorpusSource] = WeakValueDictionary()
"""The open bases of this process: a thousand cells of one corpus share it, its maps and its cache."""


class ViewSource(ViewedCorpus, CorpusSource):
    """Some documents of a corpus, read through a source of that corpus."""

    corpus: View

    def _opened(self, generation: int | None) -> Corpus:
        store = open_store(self.location)
        (manifest,) = read_generations(store, generation or 0)
        if (base := manifest.base) is None:
            raise DamagedCorpusError(
                f"{store.location} has the table of a view, but its manifest is not of a view",
                hint="make the view again",
            )
        key = base_location(store, base), base.content, self.access, id(self.cache)
        source = _bases.get(key)
        if source is None:
            found = open_base(store, manifest)
            source = CorpusSource(
                found.location, access=self.access, generation=found.num_generations - 1, cache=self.cache
            )
            source = _bases.setdefault(key, source)
        self.base = source
        return View(store, manifest, source.corpus)


def open_sources(
    locations: Mapping[str, str], generations: Mapping[str, int | None], cache: Cache
) -> dict[str, CorpusSource]:
    """Sources that share a cache, by the names of the corpora: of those in a store, many are opened at a time.

    Raises:
        CorpusError: a corpus cannot be opened.
    """

    def opened(name: str) -> CorpusSource:
        return CorpusSource(locations[name], generation=generations[name], cache=cache)

    first, *others = locations  # the first alone: cells then find their base open
    found = {first: opened(first)}
    store = open_store(next(filter(is_uri, locations.values()), locations[first]))
    return found | dict(zip(others, side_by_side(store, opened, others), strict=True))


def _reopened(location: str, access: str, generation: int, cache: Cache, fingerprint: str) -> CorpusSource:
    source = CorpusSource(location, access=access, generation=generation, cache=cache)
    if source.fingerprint != fingerprint:
        raise DamagedCorpusError(
            f"{location} has the content {source.fingerprint[:12]}, expected {fingerprint[:12]}: the corpus was "
            "replaced during the run",
            hint=REPLACED,
        )
    return source
