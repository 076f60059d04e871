"""A finished corpus: its documents by number, with their metadata and origin. `opening.py` opens one."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.forking import cached_property
from tokshard.format import names
from tokshard.format.decode import Decode, load_decoder
from tokshard.format.files import LoadFile, map_file
from tokshard.format.generations import combined_manifest
from tokshard.format.loss import has_spans, kept_columns
from tokshard.format.manifest import Manifest, decode_manifest, shard_schema
from tokshard.format.schema import HASH_GROUP
from tokshard.format.shard import Shard
from tokshard.format.shard_table import ShardTable
from tokshard.format.stride_hashes import group_hashes, read_stride_hashes
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SourceInfo, all_sources, first_sources, open_tables
from tokshard.store import Store

REPLACED = (
    "restore the files that the job began with, or start a new run on the current ones; 'tokshard verify' tells "
    "whether the corpus is intact"
)
"""The hint for a corpus that was replaced after it was opened."""

_MAX_OPEN_SHARDS = 256
"""Shards kept mapped; a map holds address space, not a file descriptor."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a document.

    Args:
        source: index of its source in `Corpus.sources`.
        record: its record in that source, counted from 1, as in messages and in ``rejects.jsonl``.
    """

    source: int
    record: int


class Corpus:
    """A finished corpus, as `open_corpus` returns it. Documents are numbered in manifest order.

    Opening costs the same at any number of tokens. Arrays are read-only views of memory maps, valid after `close` as
    long as they are referenced. Instances may be shared by threads for reading.

    Args:
        store: holds its files.
        manifests: the manifests of its generations, in order; all generations are read as one corpus.
        load_table: how the tables next to the manifest are read: `map_file` or `read_file`.

    Raises:
        DamagedCorpusError: a shard table is missing or does not match its manifest.
    """

    def __init__(self, store: Store, manifests: Sequence[Manifest], *, load_table: LoadFile = map_file) -> None:
        self.store = store
        self.manifests = tuple(manifests)
        """One for each generation."""
        self.manifest = manifest = combined_manifest(manifests)
        """The manifest of the corpus; if it grew, with the sums over all generations."""
        self.location = store.location
        """Its location: a path or a URI."""
        self.directory = Path(store.location)
        """The local directory; of a corpus elsewhere, a path that does not exist."""
        self.num_documents = manifest.num_documents
        self.num_tokens = manifest.num_tokens
        """The number of tokens, delimiters included."""
        self.vocab_size = manifest.tokenizer.vocab_size
        """1 + the largest id of the tokenizer."""
        self.dtype: np.dtype[Any] = np.dtype(manifest.dtype)
        """Type of a stored token id: uint16 or uint32."""
        self.eos_id = manifest.tokenizer.eos_id
        """The delimiter that ends every document."""
        self.bos_id = manifest.tokenizer.bos_id
        """The token that starts every document, if the corpus was built with one."""
        self.fingerprint = manifest.fingerprints.content
        """The content fingerprint: equal when tokens and loss spans are, however they are cut into shards."""
        self.has_spans = has_spans(manifest.columns)
        """Whether loss spans say which tokens are targets; if not, all but each document's first are."""
        self._load_table = load_table
        self.num_generations = len(self.manifests)
        """1, and 1 more for each append that it includes."""
        self.content_fingerprints = _content_fingerprints(self.manifests)
        """The content fingerprint of the documents up to each generation."""
        self.generations = _places(store, self.manifests)
        """The store of each generation, and its manifest."""
        self.shards = self._shard_table()
        """The shards in order, with everything that the shard table says about them."""
        self.shard_schema = shard_schema(manifest.tokenizer, manifest.columns)
        """The Arrow schema of every shard."""
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._forms: set[bytes] = set()
        self._versions: dict[int, str] = {}
        self._first_sources: list[int] | None = None

    def _shard_table(self) -> ShardTable:
        tables = open_tables(self.generations, names.SHARD_TABLE, SHARD_TABLE_SCHEMA, self._load_table)
        return ShardTable(list(zip(tables, self.manifests, strict=True)))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Corpus {self.location!r}: {self.num_documents:,} documents, {self.num_tokens:,} tokens>"

    def __len__(self) -> int:
        return self.num_documents

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

    __getitem__ = document

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

    @cached_property
    def decode(self) -> Decode:
        """Turns token ids [tokens] into text, in which special tokens appear by their spelling.

        The first use loads the tokenizer of the corpus, which takes up to a second.

        Raises:
            DamagedCorpusError: the tokenizer is missing or does not match the manifest.
            TokenizerError: the installed version of tokenizers cannot load the tokenizer.
        """
        return load_decoder(self.store, self.manifest)

    def text(self, index: int) -> str:
        """The text of one document, without the EOS and BOS that the build added.

        It is the text of the record, except for changes by a normalizer of the tokenizer. The first call loads the
        tokenizer of the corpus, which takes up to a second.

        Raises:
            IndexError: the index is outside ``[-num_documents, num_documents)``.
            DamagedCorpusError: the shard or the tokenizer is missing or does not match the manifest.
            TokenizerError: the installed version of tokenizers cannot load the tokenizer.
        """
        tokens = self.document(index)
        return self.decode(tokens[int(self.bos_id is not None) : -1])

    def metadata(self, index: int) -> dict[str, Any]:
        """The kept columns of one document; empty if the corpus was built without any.

        Raises the errors of `loss_spans`.
        """
        number, row = self.shards.find(index)
        return self.shard(number).metadata(row) if kept_columns(self.manifest.columns) else {}

    def loss_spans(self, index: int) -> NDArray[np.int64]:
        """The targets of one document: int64 [spans, 2], start and stop of each span, counted from its first token.

        In a corpus without loss spans these are all tokens but the first.

        Raises:
            IndexError: the index is outside ``[-num_documents, num_documents)``.
            DamagedCorpusError: the shard that holds it is missing or does not match the manifest.
        """
        number, row = self.shards.find(index)
        return self.shard(number).loss_spans(row)

    def target_weights(self, index: int) -> NDArray[np.float32]:
        """The weight of each token of one document in the loss, 0 if it is not a target: float32 [tokens].

        Raises the errors of `loss_spans`.
        """
        number, row = self.shards.find(index)
        return self.shard(number).target_weights(row)

    def provenance(self, index: int) -> Provenance:
        """Source and record number of one document; `sources` has the paths."""
        shard_index, row = self.shards.find(index)
        runs = self.shards.runs(shard_index)
        run = int(np.searchsorted(runs.document, row, "right")) - 1
        if run < 0:
            raise DamagedCorpusError(
                f"{self.store.where(names.SHARD_TABLE)}: the runs of shard {self.shards[shard_index].name} do not "
                f"cover document {row}"
            )
        if self._first_sources is None:
            self._first_sources = first_sources(self.generations, load=self._load_table)
        first_source = self._first_sources[self.shards.generation(shard_index)]
        return Provenance(
            first_source + int(runs.source[run]), 1 + int(runs.record[run]) + row - int(runs.document[run])
        )

    def sources(self) -> list[SourceInfo]:
        """The inputs of all builds in order, with counts of records read, written and left out."""
        return all_sources(self.generations, load=self._load_table)

    def shard(self, index: int) -> Shard:
        """One shard, mapped, its size checked, when it is first touched; its structure is checked at its first batch.

        Raises:
            DamagedCorpusError: the file is missing or does not match the manifest.
        """
        # every step is atomic: threads that race for a shard may map it twice, which is harmless
        shard = self._open.pop(index, None)
        if shard is None:
            corpus, number = self.stored(index)
            places = corpus.shards.batch_places(number)
            info, schema = corpus.shards[number], corpus.shard_schema
            shard = self.part_of(index, Shard(corpus.store, info, places, schema, forms=self._forms))
        self._open[index] = shard
        if len(self._open) > _MAX_OPEN_SHARDS:
            with contextlib.suppress(KeyError):
                self._open.popitem(last=False)
        return shard

    def stored(self, index: int) -> tuple[Corpus, int]:
        """The corpus that stores a shard, and the index there: itself, unless it is a view."""
        return self, index

    @property
    def shard_store(self) -> Store:
        """The store of its shards."""
        return self.store

    def part_of(self, index: int, shard: Shard) -> Shard:  # noqa: ARG002 - a view needs it
        """The part of a stored shard that this corpus has: all of it, unless it is a view."""
        return shard

    def check_in_place(self, shards: Iterable[int]) -> None:
        """Refuse another corpus in the place of this one, after reading files of some shards that no hash covers.

        Costs a stat, or a request, for each generation that they belong to. A manifest is compared if its file has
        changed since the last check.

        Raises:
            CorpusError: a manifest is gone, or another one.
        """
        for number in set(map(self.shards.generation, shards)):
            store, manifest = self.generations[number]
            try:
                version = store.stat(names.MANIFEST).version
                if version == self._versions.get(number):
                    continue
                found = store.get(names.MANIFEST)
            except OSError as error:
                raise DamagedCorpusError(
                    f"{store.where(names.MANIFEST)} cannot be read any more ({error.strerror or error}): the corpus "
                    "was removed or replaced under the running job",
                    hint=REPLACED,
                ) from error
            path = store.where(names.MANIFEST)
            if decode_manifest(found, file=path) != manifest:
                raise DamagedCorpusError(
                    f"{path} is not the one that was opened: the corpus was replaced during the run", hint=REPLACED
                )
            self._versions[number] = version

    def stride_hashes(self, shard: int, group: int | None = None, *, is_checked: bool = True) -> NDArray[np.uint32]:
        """The CRC-32 of every `HASH_STRIDE` tokens of one shard: uint32 [strides]; the last stride may be short.

        The hashes cover the bytes of the tokens from the start of the shard, across record batches. Each call
        reads the hashes from the store, 4 bytes for every 8,192 tokens.

        Args:
            group: read this group of `HASH_GROUP` hashes only.
            is_checked: compare them with the shard table.

        Raises:
            IndexError: the corpus has no such shard.
            DamagedCorpusError: the file of the hashes is missing or too short, or does not match the shard table as it
                was opened.
            StoreError: the store does not answer.
        """
        index = range(len(self.shards))[shard]
        below, _ = self.generations[self.shards.generation(index)]
        strides, first = self.shards.strides(index), group or 0
        if group is not None:
            strides = strides[group * HASH_GROUP : (group + 1) * HASH_GROUP]
        found = read_stride_hashes(below, strides.start, strides.stop)
        if is_checked:
            hashes = group_hashes(found)
            wrong = np.flatnonzero(hashes != self.shards.group_hashes(index)[first : first + len(hashes)])
            if len(wrong):
                raise DamagedCorpusError(
                    f"{below.where(names.STRIDE_HASHES)}: group {first + wrong[0]} of {self.shards[index].name} has "
                    f"the CRC-32 {hashes[wrong[0]]:08x}, not the one in {names.SHARD_TABLE} as it was opened: the file "
                    "is damaged, or the corpus was replaced during the run",
                    hint=REPLACED,
                )
        return found

    def close(self) -> None:
        """Drop the mapped shards. Views that are still referenced stay valid."""
        self._open.clear()


def _places(store: Store, manifests: Sequence[Manifest]) -> list[tuple[Store, Manifest]]:
    """The store of each generation, and its manifest."""
    folders = map(names.generation_folder, range(len(manifests)))
    return [
        (store.below(folder) if folder else store, manifest)
        for folder, manifest in zip(folders, manifests, strict=True)
    ]


def _content_fingerprints(manifests: Sequence[Manifest]) -> tuple[str, ...]:
    first, *later = manifests
    return first.fingerprints.content, *(each.generation.content for each in later if each.generation is not None)
