"""The shards of a corpus, only from its shard table: names, sizes, record batches, origin of documents."""

from __future__ import annotations

import operator
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from typing import overload

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.format.content import Content
from tokshard.format.loss import has_spans
from tokshard.format.manifest import Manifest
from tokshard.format.schema import HASH_GROUP, ORDINAL_STRIDE
from tokshard.format.stride_hashes import HASH_BYTES, num_strides
from tokshard.format.tables import SHARDS_PER_BATCH, BatchPlace, ShardInfo, Table, contents
from tokshard.numbers import ceil_div

_BATCH_COLUMNS = ("batch_documents", "batch_tokens", "batch_offsets_position", "batch_values_position")
_LOSS_COLUMNS = ("batch_loss_position", "batch_loss_bytes", "batch_loss_hash")
_PLACE_FIELDS = tuple(one.name for one in fields(BatchPlace))
_MAX_KNOWN_RUNS = 256
"""Shards whose runs are kept."""


@dataclass(frozen=True, slots=True)
class Runs:
    """Documents of one shard that are consecutive records of one source; int64 arrays [runs].

    Args:
        document: ordinal in the shard of the first document of each run; ascends from 0.
        source: index of its source.
        record: its record there, counted from 0, as in the shard table.
    """

    document: NDArray[np.int64]
    source: NDArray[np.int64]
    record: NDArray[np.int64]


class ShardTable(Sequence[ShardInfo]):
    """The shards of a corpus in order. Each is made from its table on demand; no shard is opened.

    Args:
        generations: ``shards.arrow`` and the manifest of each.

    Raises:
        DamagedCorpusError: a table does not match its manifest.
    """

    def __init__(self, generations: Sequence[tuple[Table, Manifest]]) -> None:
        self._tables = [table for table, _ in generations]
        self._folders = [names.generation_folder(number) for number in range(len(generations))]
        self._place_columns = _BATCH_COLUMNS + (_LOSS_COLUMNS if has_spans(generations[0][1].columns) else ())
        for table, manifest in generations:
            _check_table(table, manifest)
        self._first_shards = list(accumulate((manifest.num_shards for _, manifest in generations), initial=0))
        self._length = self._first_shards[-1]
        self._num_documents = sum(manifest.num_documents for _, manifest in generations)
        tables = self._tables
        self.first_documents = _starts(_numbers(tables, "num_documents"))
        """int64 [shards + 1], the number in the corpus of each shard's first document, and the total."""
        self.first_tokens = _starts(_numbers(tables, "num_tokens"))
        """int64 [shards + 1], the position in the corpus of each shard's first token, and the total."""
        self.sizes = _numbers(tables, "num_bytes")
        """int64 [shards], bytes of each."""
        self._first_strides = _starts(num_strides(np.diff(self.first_tokens)))
        self.is_whole = all(table.is_whole for table in tables)
        """Whether the whole tables are at hand; if not, the lists of a shard cost a request each."""
        self._runs: dict[int, Runs] = {}

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShardInfo]: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | list[ShardInfo]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        return self._row(range(self._length)[index])

    def _row(self, index: int) -> ShardInfo:
        table, position = self._place(index)
        row = position % SHARDS_PER_BATCH
        batch = table.batch(position // SHARDS_PER_BATCH)
        return ShardInfo(
            name=names.in_folder(self._folders[self.generation(index)], batch.column("name")[row].as_py()),
            num_documents=int(self.first_documents[index + 1] - self.first_documents[index]),
            num_tokens=int(self.first_tokens[index + 1] - self.first_tokens[index]),
            num_bytes=int(self.sizes[index]),
            sha256=batch.column("sha256")[row].as_py().hex(),
        )

    def contents(self) -> Iterator[Content]:
        """The content of each shard, in order."""
        for table in self._tables:
            for batch in table.batches():
                yield from contents(batch)

    def content(self, index: int) -> Content:
        """The content of one shard."""
        table, position = self._place(index)
        row = position % SHARDS_PER_BATCH
        return contents(table.batch(position // SHARDS_PER_BATCH).slice(row, 1))[0]

    def names(self) -> Iterator[str]:
        """The names of all shards in order, quicker than the shards themselves."""
        for folder, table in zip(self._folders, self._tables, strict=True):
            for batch in table.batches():
                yield from (names.in_folder(folder, name) for name in batch.column("name").to_pylist())

    def generation(self, index: int) -> int:
        """The generation that one shard belongs to."""
        return bisect_right(self._first_shards, index) - 1

    def find(self, document: int) -> tuple[int, int]:
        """The shard that holds a document, and the row there.

        Raises:
            IndexError: the number is outside ``[-num_documents, num_documents)``.
        """
        try:
            position = range(self._num_documents)[operator.index(document)]
        except IndexError:
            raise IndexError(f"document {document} of a corpus of {self._num_documents} documents") from None
        index = bisect_right(self.first_documents, position) - 1
        return index, position - int(self.first_documents[index])

    def batch_places(self, index: int) -> list[BatchPlace]:
        """The places of the record batches of one shard."""
        table, row = self._place(index)
        columns = [column.tolist() for column in table.lists_at(self._place_columns, row)]
        num_documents = int(self.first_documents[index + 1] - self.first_documents[index])
        num_tokens = int(self.first_tokens[index + 1] - self.first_tokens[index])
        if (
            len(set(map(len, columns))) != 1
            or sum(columns[0]) != num_documents
            or sum(columns[1]) != num_tokens
            or min(*columns[0], *columns[1]) < 1
        ):
            raise DamagedCorpusError(
                f"{table.path}: the batches of {self[index].name} hold {sum(columns[0])} documents and "
                f"{sum(columns[1])} tokens, the shard {num_documents} and {num_tokens}; "
                "every batch holds at least 1"
            )
        return [BatchPlace(**dict(zip(_PLACE_FIELDS, place, strict=False))) for place in zip(*columns, strict=True)]

    def batch_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of every record batch of the corpus.

        Returns:
            int64 [shards + 1], the first record batch of each shard, and int64 [batches], the tokens of each.

        Raises:
            DamagedCorpusError: they do not add up to the tokens of the shards.
        """
        lists = [table.lists("batch_tokens") for table in self._tables]
        counts, tokens = (np.concatenate(parts) for parts in zip(*lists, strict=True))
        first = _starts(counts)
        totals = np.diff(_starts(tokens)[first])
        wrong = np.flatnonzero(totals != np.diff(self.first_tokens))
        if len(wrong) or (len(tokens) and int(tokens.min()) < 1):
            index = int(wrong[0]) if len(wrong) else 0
            raise DamagedCorpusError(
                f"{self._place(index)[0].path}: the batches of {self[index].name} do not hold the tokens of the shard"
            )
        return first, tokens

    def stride_documents(self, index: int) -> NDArray[np.int64]:
        """For one shard, the ordinal of the document that holds token ``k * ORDINAL_STRIDE``, for every k."""
        num_tokens = int(self.first_tokens[index + 1] - self.first_tokens[index])
        return self._list(index, "stride_documents", ceil_div(num_tokens, ORDINAL_STRIDE))

    def group_hashes(self, index: int) -> NDArray[np.uint32]:
        """For one shard, the CRC-32 of every `HASH_GROUP` stride hashes: uint32 [groups]."""
        num_groups = ceil_div(len(self.strides(index)), HASH_GROUP)
        return self._list(index, "group_hashes", num_groups).astype(np.uint32)

    def strides(self, index: int) -> range:
        """The hashes of one shard in the ``stride-hashes.bin`` of its generation."""
        first = int(self._first_strides[self._first_shards[self.generation(index)]])
        return range(int(self._first_strides[index]) - first, int(self._first_strides[index + 1]) - first)

    def runs(self, index: int) -> Runs:
        """The origin of the documents of one shard. Sources are counted within its generation."""
        known = self._runs.get(index)
        if known is not None:
            return known
        document = self._list(index, "run_document")
        others = (self._list(index, name, len(document)) for name in ("run_source", "run_record"))
        runs = Runs(document, *others)
        if len(self._runs) >= _MAX_KNOWN_RUNS:
            self._runs.clear()
        self._runs[index] = runs
        return runs

    def _place(self, index: int) -> tuple[Table, int]:
        """The table that describes one shard, and the row there."""
        number = self.generation(index)
        return self._tables[number], index - self._first_shards[number]

    def _list(self, index: int, column: str, length: int | None = None) -> NDArray[np.int64]:
        """The list in the row of one shard, which has this length."""
        table, row = self._place(index)
        (found,) = table.lists_at([column], row)
        if length is not None and len(found) != length:
            raise DamagedCorpusError(
                f"{table.path}: {self[index].name} has {len(found)} entries of {column}, expected {length}"
            )
        return found


def _numbers(tables: Sequence[Table], column: str) -> NDArray[np.int64]:
    """An int64 column of all tables, one after the other."""
    return np.concatenate([table.numbers(column) for table in tables])


def _check_table(table: Table, manifest: Manifest) -> None:
    path = table.path
    sizes = [batch.num_rows for batch in table.batches()]
    if any(size != SHARDS_PER_BATCH for size in sizes[:-1]) or sum(sizes) != manifest.num_shards:
        raise DamagedCorpusError(
            f"{path} has batches of {sizes[:5]} rows, {sum(sizes)} in all; "
            f"expected {manifest.num_shards} in batches of {SHARDS_PER_BATCH}"
        )
    for column in ("num_documents", "num_tokens", "num_bytes"):
        values = table.numbers(column)
        total = int(values.sum())
        if total != getattr(manifest, column) or (len(values) and int(values.min()) < 1):
            raise DamagedCorpusError(
                f"{path}: column {column} adds up to {total} with a smallest entry of {values.min(initial=total)}; "
                f"the manifest says {getattr(manifest, column)}, and every shard holds at least 1"
            )
    targets, tokens = table.numbers("num_targets"), table.numbers("num_tokens")
    most = tokens - table.numbers("num_documents")
    stated = int(most.sum()) if manifest.num_targets is None else manifest.num_targets
    if int(targets.sum()) != stated or bool(((targets < 0) | (targets > most)).any()):
        raise DamagedCorpusError(
            f"{path}: column num_targets adds up to {targets.sum()}, expected {stated}, in no shard below 0 or above "
            "its tokens without its documents"
        )
    expected = HASH_BYTES * int(num_strides(tokens).sum())
    if manifest.files[names.STRIDE_HASHES].num_bytes != expected:
        raise DamagedCorpusError(
            f"{path}: the hashes of its shards take {expected} bytes, the manifest says "
            f"{manifest.files[names.STRIDE_HASHES].num_bytes} of {names.STRIDE_HASHES}"
        )
    for batch in table.batches():
        # in Python: importing `pyarrow.compute` takes a process as long as 100,000 names do
        for name in batch.column("name").to_pylist():
            if not names.is_shard_name(name):
                raise DamagedCorpusError(f"{path} names the shard {name!r}, which is not a shard's name")


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
