"""Corpora in the format of tokshard as token sources; only this module and those it imports know the format."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.corpus import REPLACED
from tokshard.format.opening import open_corpus
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.listed import numbers_of_list
from tokshard.runtime.bytes.mapped import MappedCorpus
from tokshard.runtime.bytes.ranged import RangedCorpus, stride_tokens_of
from tokshard.runtime.bytes.source import DocumentSpan, ReadCounts, SpansIn, TokenSource
from tokshard.store import absolute_location

_SHARDS_AT_ONCE = 32


class CorpusSource(TokenSource):
    """A corpus as one sequence of tokens, shard after shard.

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
        cache: for reads by range; corpora may share one. Default: one of its own.

    Attributes:
        corpus: the open corpus.
        num_tokens, dtype, fingerprint, tokenizer, is_in_memory, earlier_fingerprints, has_spans: as `TokenSource` says.
        eos_id: the token that ends every document.
        cache: the cache of its reads, unless it is mapped.

    Raises:
        CorpusError: the corpus cannot be opened.
    """

    def __init__(
        self,
        location: str | os.PathLike[str],
        *,
        access: str = "mmap",
        generation: int | None = None,
        cache: Cache | None = None,
    ) -> None:
        if access not in ("mmap", "pread"):
            raise ValueError(f"access must be 'mmap' or 'pread', got {access!r}")
        # absolute: a worker process may work in another directory
        self.location, self.access = absolute_location(location), access
        self.corpus = open_corpus(self.location, generation=generation)
        self.num_tokens = self.corpus.num_tokens
        self.dtype = self.corpus.dtype
        self.eos_id = self.corpus.eos_id
        self.fingerprint = self.corpus.fingerprint
        self.tokenizer = self.corpus.manifest.tokenizer.canonical_sha256
        self.is_in_memory = access == "mmap" and self.corpus.store.local_path(names.MANIFEST) is not None
        self.earlier_fingerprints = self.corpus.content_fingerprints[:-1]
        self.has_spans = self.corpus.has_spans
        self.cache = Cache() if cache is None else cache
        self._opened: tuple[int, MappedCorpus | RangedCorpus] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        generation = self.corpus.num_generations - 1
        return (_reopened, (self.location, self.access, generation, self.cache, self.fingerprint))

    def __repr__(self) -> str:
        return repr(self.corpus)

    @property
    def reading(self) -> str | None:
        """Path of the shard that was read last. A read that hangs, hangs there."""
        return self._reader.reading

    @property
    def counts(self) -> ReadCounts | None:
        """Counts of reads through the cache; None: the corpus is mapped."""
        return None if self.is_in_memory else self.cache.counts

    @property
    def memory_bytes(self) -> int:
        """Bytes that the cache may keep in memory."""
        return 0 if self.is_in_memory else self.cache.memory_bytes

    def ends(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where documents end in stretches of the corpus, as `TokenSource.ends` does.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        return self._reader.ends(starts, stops)

    def read(
        self, starts: NDArray[np.int64], lengths: NDArray[np.int64], out: NDArray[Any], at: NDArray[np.int64]
    ) -> None:
        """Copy the tokens of pieces, as `TokenSource.read` does.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        self._reader.read(starts, lengths, out, at)

    def targets(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> SpansIn:
        """The loss spans in stretches of the corpus, as `TokenSource.targets` gives them.

        Raises:
            DamagedCorpusError: they are missing, or differ from the manifest.
        """
        return self._reader.targets(starts, stops)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Fetch these blocks in the background. Does nothing with maps, because the kernel reads ahead."""
        self._reader.will_read(starts, stops)

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Forget blocks that were announced to `will_read`. Opens nothing, so it is safe at interpreter exit."""
        if self._opened is not None and self._opened[0] == os.getpid():
            self._opened[1].has_read(starts, stops)

    def kept_bytes(self, num_blocks: int, block_tokens: int) -> int:
        """Bytes that so many blocks take in the memory of the cache; 0 if they are mapped."""
        return 0 if self.is_in_memory else num_blocks * stride_tokens_of(block_tokens) * self.dtype.itemsize

    def numbers_file(self, name: str, ids_file: str | os.PathLike[str]) -> str | None:
        """The file of document numbers for a list of ids; see `numbers_of_list`."""
        with open_corpus(self.location, generation=self.corpus.num_generations - 1) as corpus:  # apart from the reader
            return numbers_of_list(corpus, name, ids_file)

    def document_at(self, position: int) -> DocumentSpan:
        """The document that holds a token.

        Raises:
            DamagedCorpusError: a shard is missing, or differs from the manifest.
        """
        document, start, stop = self._reader.document_at(position)
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
        starts, stops = self._reader.bounds_of(shard, np.array([row]))
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
        reader = self._reader

        def of_shard(start: int, stop: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
            shard = int(shards[start])
            return reader.bounds_of(shard, documents[start:stop] - first_documents[shard])

        with ThreadPoolExecutor(1 if self.is_in_memory else _SHARDS_AT_ONCE) as pool:
            found = list(pool.map(of_shard, bounds[:-1].tolist(), bounds[1:].tolist()))
        starts, stops = zip(*found, strict=True)
        return np.concatenate(starts), np.concatenate(stops)

    def _span(self, document: int, start: int, stop: int) -> DocumentSpan:
        shard, _ = self.corpus.shards.find(document)
        return DocumentSpan(shard=self.corpus.shards[shard].name, document=document, start=start, stop=stop)

    @property
    def _reader(self) -> MappedCorpus | RangedCorpus:
        """The reader of this process. A forked process makes a new one: a lock may have been held at the fork."""
        opened = self._opened
        if opened is None or opened[0] != os.getpid():
            reader = MappedCorpus(self.corpus) if self.is_in_memory else RangedCorpus(self.corpus, self.cache)
            self._opened = opened = os.getpid(), reader
        return opened[1]


def _reopened(location: str, access: str, generation: int, cache: Cache, fingerprint: str) -> CorpusSource:
    source = CorpusSource(location, access=access, generation=generation, cache=cache)
    if source.fingerprint != fingerprint:
        raise DamagedCorpusError(
            f"{location} has the content {source.fingerprint[:12]}, expected {fingerprint[:12]}: the corpus was "
            "replaced during the run",
            hint=REPLACED,
        )
    return source
