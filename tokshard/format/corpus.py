"""A finished corpus: its documents by number, with their metadata and origin. `opening.py` opens one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.files import LoadFile, map_file
from tokshard.format.generations import combined_manifest
from tokshard.format.manifest import Manifest
from tokshard.format.schema import ShardFacts, shard_schema
from tokshard.format.shard import Shard
from tokshard.format.shard_table import ShardTable
from tokshard.format.source_table import open_table, read_sources
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SOURCE_TABLE_SCHEMA, SourceInfo
from tokshard.store import Store

_MAX_OPEN_SHARDS = 256
"""Shards kept mapped; a map holds address space, not a file descriptor."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a document came from.

    Args:
        source: index of its source in `Corpus.sources`.
        record: its record in that source, counted from 1, as in messages and in ``rejects.jsonl``.
    """

    source: int
    record: int


class Corpus:
    """A finished corpus, as `open_corpus` gives it. Documents are numbered in manifest order.

    Opening costs the same at any number of tokens. Arrays are read-only views of memory maps, valid after `close` as
    long as they are referenced. Instances may be shared by threads for reading.

    Args:
        store: holds its files.
        manifests: of its generations, in order: those of a corpus that grew are read as one corpus.
        load_table: how the tables next to the manifest are read: `map_file` or `read_file`.

    Raises:
        DamagedCorpusError: a shard table is missing or does not match its manifest.
    """

    def __init__(self, store: Store, manifests: Sequence[Manifest], *, load_table: LoadFile = map_file) -> None:
        self.store = store
        self.manifests = tuple(manifests)
        """One for each generation."""
        self.manifest = manifest = combined_manifest(manifests)
        """That of the corpus; if it grew, with the sums over all generations."""
        self.location = store.location
        """Where it is: a path or a URI."""
        self.num_documents = manifest.num_documents
        self.num_tokens = manifest.num_tokens
        """Delimiters included."""
        self.vocab_size = manifest.tokenizer.vocab_size
        """1 + the largest id of the tokenizer."""
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        """Type of a stored token id: uint16 or uint32."""
        self.eos_id = manifest.tokenizer.eos_id
        """The delimiter that ends every document."""
        self.bos_id = manifest.tokenizer.bos_id
        """The token that starts every document, if the corpus was built with one."""
        self.fingerprint = manifest.fingerprints.content
        """The content fingerprint: equal when the tokens are, however they are cut into shards."""
        self._load_table = load_table
        self.shards = ShardTable(
            [
                (open_table(below, names.SHARD_TABLE, SHARD_TABLE_SCHEMA, each, load_table), each)
                for below, each in self._generations()
            ]
        )
        """The shards in order, with everything that the shard table says about them."""
        self.shard_schema = shard_schema(_shard_facts(manifest))
        """The Arrow schema of every shard."""
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._decode: Callable[[NDArray[Any]], str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Corpus {self.location!r}: {self.num_documents:,} documents, {self.num_tokens:,} tokens>"

    @property
    def num_generations(self) -> int:
        """1, and 1 more for each append that is part of it."""
        return len(self.manifests)

    @property
    def content_fingerprints(self) -> tuple[str, ...]:
        """The content fingerprint of the documents up to each generation."""
        first, *later = self.manifests
        return first.fingerprints.content, *(each.generation.content for each in later if each.generation is not None)

    @property
    def directory(self) -> Path:
        """The local directory; of a corpus that is elsewhere, nothing that exists."""
        return Path(self.location)

    def __len__(self) -> int:
        return self.num_documents

    def __getitem__(self, index: int) -> NDArray[Any]:
        """The same as `document`."""
        return self.document(index)

    def __iter__(self) -> Iterator[NDArray[Any]]:
        """All documents in order, one shard mapped at a time."""
        return self.documents()

    def document(self, index: int) -> NDArray[Any]:
        """The tokens of one document, delimiter included: a read-only view [tokens] of `dtype`.

        Raises:
            IndexError: the index is outside ``[-num_documents, num_documents)``.
            DamagedCorpusError: the shard that holds it is missing or does not match the manifest.
        """
        number, row = self.shards.find(index)
        return self.shard(number).document(row)

    def documents(self, start: int = 0, stop: int | None = None) -> Iterator[NDArray[Any]]:
        """The documents ``[start, stop)`` in order, each as `document` gives it, one shard mapped at a time."""
        position, last, _ = slice(start, stop).indices(self.num_documents)
        while position < last:
            index, row = self.shards.find(position)
            was_open = index in self._open
            shard = self.shard(index)
            row_stop = min(row + last - position, shard.info.num_documents)
            for number in range(row, row_stop):
                yield shard.document(number)
            if not was_open:
                self._open.pop(index, None)
            position += row_stop - row

    def text(self, index: int) -> str:
        """The text of one document, without the EOS and BOS that the build added.

        It is the text of the record, except for what a normalizer of the tokenizer changed. The first call loads the
        tokenizer of the corpus, which takes up to a second.

        Raises:
            IndexError: the index is outside ``[-num_documents, num_documents)``.
            DamagedCorpusError: the shard or the tokenizer is missing or does not match the manifest.
            TokenizerError: the installed version of tokenizers cannot load the tokenizer.
        """
        tokens = self.document(index)
        if self._decode is None:
            from tokshard.format.decode import load_decoder  # imports tokenizers, which is not needed to read tokens

            self._decode = load_decoder(self)
        return self._decode(tokens[int(self.bos_id is not None) : -1])

    def metadata(self, index: int) -> dict[str, Any]:
        """The kept columns of one document; empty if the corpus was built without any."""
        number, row = self.shards.find(index)
        return self.shard(number).metadata(row)

    def provenance(self, index: int) -> Provenance:
        """Source and record number of one document; `sources` has the paths."""
        shard_index, row = self.shards.find(index)
        runs = self.shards.runs(shard_index)
        run = int(np.searchsorted(runs.document, row, "right")) - 1
        if run < 0:
            raise DamagedCorpusError(
                f"{self.store.where(names.SHARD_TABLE)}: the runs of shard {self.shards[shard_index].name} do not "
                f"cover document {row}",
                hint=RESTORE,
            )
        first_source = self._first_sources[self.shards.generation(shard_index)]
        return Provenance(
            first_source + int(runs.source[run]), 1 + int(runs.record[run]) + row - int(runs.document[run])
        )

    def sources(self) -> list[SourceInfo]:
        """The inputs of all builds in order, with what was read, written and left out."""
        found: list[SourceInfo] = []
        num_arguments = 0
        for below, manifest in self._generations():
            sources = read_sources(below, manifest, load=self._load_table)
            found += (replace(source, argument=num_arguments + source.argument) for source in sources)
            num_arguments += len(manifest.arguments)
        return found

    @cached_property
    def _first_sources(self) -> list[int]:
        """The index in `sources` of the first input of each generation."""
        counts = [
            open_table(below, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, manifest, self._load_table).num_rows
            for below, manifest in self._generations()[:-1]
        ]
        return list(accumulate(counts, initial=0))

    def _generations(self) -> list[tuple[Store, Manifest]]:
        """Where each generation lies, and its manifest."""
        folders = map(names.generation_folder, range(len(self.manifests)))
        return [
            (self.store.below(folder) if folder else self.store, manifest)
            for folder, manifest in zip(folders, self.manifests, strict=True)
        ]

    def shard(self, index: int) -> Shard:
        """One shard, mapped and checked against the manifest when it is first touched.

        Raises:
            DamagedCorpusError: the file is missing or does not match the manifest.
        """
        # every step is atomic: threads that race for a shard may map it twice, which is harmless
        shard = self._open.pop(index, None)
        if shard is None:
            info = self.shards[index]
            shard = Shard(self.store, info, self.shards.batch_places(index), self.shard_schema)
        self._open[index] = shard
        if len(self._open) > _MAX_OPEN_SHARDS:
            with contextlib.suppress(KeyError):
                self._open.popitem(last=False)
        return shard

    def close(self) -> None:
        """Drop the mapped shards. Views that are still referenced stay valid."""
        self._open.clear()


def _shard_facts(manifest: Manifest) -> ShardFacts:
    """What each shard repeats about the corpus."""
    return ShardFacts(
        dtype=manifest.dtype,
        tokenizer_sha256=manifest.tokenizer.canonical_sha256,
        eos_id=manifest.tokenizer.eos_id,
        bos_id=manifest.tokenizer.bos_id,
        columns=manifest.columns,
    )
