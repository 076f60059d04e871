"""A finished corpus: its documents by number, and what is known of them. `opening.py` opens one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.files import LoadFile, map_file
from tokshard.format.manifest import Manifest
from tokshard.format.schema import ShardFacts, shard_schema
from tokshard.format.shard import Shard
from tokshard.format.shard_table import ShardTable
from tokshard.format.source_table import open_table, read_sources
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SourceInfo
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
        store: where its files lie.
        load_table: how the tables next to the manifest are read: `map_file` or `read_file`.

    Raises:
        DamagedCorpusError: the shard table is missing or not what the manifest says.
    """

    def __init__(self, store: Store, manifest: Manifest, *, load_table: LoadFile = map_file) -> None:
        self.store = store
        self.manifest = manifest
        self.directory = Path(store.location)
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
            open_table(store, names.SHARD_TABLE, SHARD_TABLE_SCHEMA, manifest, load_table), manifest
        )
        """The shards in order, and all that the shard table says of them."""
        self.shard_schema = shard_schema(self._facts())
        """Of every shard."""
        self._open: OrderedDict[int, Shard] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Corpus {str(self.directory)!r}: {self.num_documents:,} documents, {self.num_tokens:,} tokens>"

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
            DamagedCorpusError: the shard that holds it is missing or not what the manifest says.
        """
        shard, row = self._locate(index)
        return shard.document(row)

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
        """What the tokens of one document say, without the EOS and BOS that the build added.

        That is the text of the record, but for what a normalizer of the tokenizer changed. The first call loads the
        tokenizer of the corpus, which takes up to a second.

        Raises:
            IndexError: the index is outside ``[-num_documents, num_documents)``.
            DamagedCorpusError: the shard or the tokenizer is missing or not what the manifest says.
            TokenizerError: the installed version of tokenizers cannot load the tokenizer.
        """
        tokens = self.document(index)
        return self._decode(tokens[int(self.bos_id is not None) : -1])

    @cached_property
    def _decode(self) -> Callable[[NDArray[Any]], str]:
        from tokshard.format.decode import load_decoder  # brings tokenizers, which reading tokens does not need

        return load_decoder(self)

    def metadata(self, index: int) -> dict[str, Any]:
        """The kept columns of one document; empty if the corpus was built without any."""
        shard, row = self._locate(index)
        return shard.metadata(row)

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
        return Provenance(int(runs.source[run]), 1 + int(runs.record[run]) + row - int(runs.document[run]))

    def sources(self) -> list[SourceInfo]:
        """What became of each input, in input order."""
        return read_sources(self.store, self.manifest, load=self._load_table)

    def shard(self, index: int) -> Shard:
        """One shard, mapped and checked against the manifest when it is first touched.

        Raises:
            DamagedCorpusError: the file is missing or not what the manifest says.
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
        """Forget the mapped shards. Views that are still referenced stay valid."""
        self._open.clear()

    def _locate(self, index: int) -> tuple[Shard, int]:
        shard_index, row = self.shards.find(index)
        return self.shard(shard_index), row

    def _facts(self) -> ShardFacts:
        """What each shard repeats about the corpus."""
        return ShardFacts(
            dtype=self.manifest.dtype,
            tokenizer_sha256=self.manifest.tokenizer.canonical_sha256,
            eos_id=self.eos_id,
            bos_id=self.bos_id,
            columns=self.manifest.columns,
        )
