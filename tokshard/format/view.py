"""A view: some documents of another corpus, its base, as a corpus. It has a table of the kept documents, and no shards.

The table `names.KEPT` has a row for each *stretch*: consecutive documents of one shard that are all kept. It is mapped,
and searched by bisection, so a view of any size opens at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import IO, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.arrays import number_array, numbers_of
from tokshard.format.content import Content, TokenHash
from tokshard.format.corpus import Corpus, Provenance
from tokshard.format.files import HashingFile, LoadFile, map_file
from tokshard.format.kept import Ascending, Kept
from tokshard.format.loss import LOSS, WEIGHTS, Targets, all_but_first
from tokshard.format.manifest import Manifest, canonical_json
from tokshard.format.schema import FORMAT_VERSION
from tokshard.format.shard import Shard
from tokshard.format.shard_table import Runs, ShardTable
from tokshard.format.tables import BatchPlace, ShardInfo, open_table, write_table
from tokshard.store import Store, temporary_file

COLUMNS = ("document", "position", "number", "token")
KEPT_SCHEMA = pa.schema(
    [pa.field(name, pa.uint32(), nullable=False) for name in COLUMNS],
    metadata={"tokshard.format_version": str(FORMAT_VERSION)},
)
"""Of the first document of each stretch: its number and the position of its first token, in the base and in the view,
each without its high 32 bits; then the ends of the last stretch. All rows are in one record batch."""

_MASKED_BELOW = 1_000
"""Tokens from one stretch to the next, on average, below which a mask of all tokens is faster than a slice for each."""

Stretches = NDArray[np.int64]
"""int64 [stretches, 4]: the first document of each in the base, the position of its first token there, and how many
documents and tokens it has. The documents ascend."""


class ViewTable(ShardTable):
    """The shards of the base that have kept documents, as if they had no others.

    Attributes:
        of_base: int64 [shards], the index of each in the base.
    """

    def __init__(self, base: ShardTable, kept: Kept) -> None:
        self._base, self._kept = base, kept
        bounds = np.minimum(kept.documents.searchsorted(base.first_documents), len(kept))
        self.of_base = np.flatnonzero(np.diff(bounds))
        bounds = np.append(bounds[self.of_base], len(kept))
        self.first_documents = kept.numbers[bounds]
        self.first_tokens = kept.tokens[bounds]
        self.sizes = base.sizes[self.of_base]
        self.is_whole = base.is_whole
        self._length, self._num_documents = len(self.of_base), int(self.first_documents[-1])

    def rows(self, index: int) -> NDArray[np.int64]:
        """The kept documents of a shard, as rows of the shard of the base: int64 [documents]."""
        numbers = np.arange(self.first_documents[index], self.first_documents[index + 1])
        rows: NDArray[np.int64] = self._kept.in_base(numbers) - self._base.first_documents[self.of_base[index]]
        return rows

    def names(self) -> Iterator[str]:
        """The names of the shards of the base."""
        return (self._base[index].name for index in self.of_base.tolist())

    def generation(self, index: int) -> int:
        """The generation of the base that a shard belongs to."""
        return self._base.generation(int(self.of_base[index]))

    def batch_places(self, index: int) -> list[BatchPlace]:
        """The record batches of the shard of the base."""
        return self._base.batch_places(int(self.of_base[index]))

    def runs(self, index: int) -> Runs:
        """The origin of the kept documents of a shard; each is a run of its own."""
        runs, rows = self._base.runs(int(self.of_base[index])), self.rows(index)
        of_row = runs.document.searchsorted(rows, "right") - 1
        return Runs(np.arange(len(rows)), runs.source[of_row], runs.record[of_row] + rows - runs.document[of_row])

    def _row(self, index: int) -> ShardInfo:
        tokens = int(self.first_tokens[index + 1] - self.first_tokens[index])
        documents = int(self.first_documents[index + 1] - self.first_documents[index])
        return replace(self._base[int(self.of_base[index])], num_documents=documents, num_tokens=tokens)

    def contents(self) -> Iterator[Content]:
        """The content of each shard, without the hash of its tokens."""
        return map(self.content, range(len(self)))

    def content(self, index: int) -> Content:
        """The content of one shard, without the hash of its tokens."""
        info = self[index]
        return Content(num_documents=info.num_documents, tokens=TokenHash(info.num_tokens))


class ViewShard(Shard):
    """The kept documents of a shard, batch by batch.

    Args:
        shard: of the base.
        rows: int64 [documents], ascending: which of its documents are kept.
        info: of the shard as the view has it.
    """

    def __init__(self, shard: Shard, rows: NDArray[np.int64], info: ShardInfo) -> None:
        self._shard, self._rows = shard, rows
        self.path, self.info, self.places = shard.path, info, shard.places

    def document(self, row: int) -> NDArray[Any]:
        """The tokens of one kept document: a read-only view."""
        return self._shard.document(int(self._rows[row]))

    def metadata(self, row: int) -> dict[str, Any]:
        """The kept columns of one kept document."""
        return self._shard.metadata(int(self._rows[row]))

    def loss_spans(self, row: int) -> NDArray[np.int64]:
        """The targets of one kept document: int64 [spans, 2]."""
        return self._shard.loss_spans(int(self._rows[row]))

    def target_weights(self, row: int) -> NDArray[np.float32]:
        """The weight of each token of one kept document: float32 [tokens]."""
        return self._shard.target_weights(int(self._rows[row]))

    def bounds(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The kept documents of one record batch, as `Shard.bounds` gives all of them."""
        rows, starts, stops = self._shard.bounds(index)
        kept = self._within(rows)
        return rows[kept], starts[kept], stops[kept]

    def num_tokens_of(self, index: int) -> int:
        """The tokens of the kept documents of one record batch."""
        _, starts, stops = self.bounds(index)
        return int((stops - starts).sum())

    def batch(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Offsets and token ids of the kept documents of one record batch, which may be none."""
        offsets, values = self._shard.batch(index)
        kept = self._within(self._shard.bounds(index)[0])
        if len(kept) == len(offsets) - 1:
            return offsets, values
        found = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.diff(offsets)[kept])])
        starts, stops = _joined(offsets[kept], offsets[kept + 1])
        return found, _pieces(values, starts, stops)

    def columns(self, index: int) -> dict[str, pa.Array]:
        """The columns of the kept documents of one record batch."""
        kept = number_array(self._within(self._shard.bounds(index)[0]))
        return {name: column.take(kept) for name, column in self._shard.columns(index).items()}

    def targets(self, index: int) -> Targets:
        """The targets of the kept documents of one record batch."""
        offsets, columns = self.batch(index)[0], self.columns(index)
        if LOSS not in columns:
            return Targets(borders=all_but_first(offsets))
        spans = columns[LOSS]
        bases = np.repeat(offsets[:-1], np.diff(numbers_of(spans.offsets)))
        weights = numbers_of(columns[WEIGHTS].values) if WEIGHTS in columns else None
        return Targets(borders=numbers_of(spans.values) + bases, weights=weights)

    def _within(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """The places of the kept documents in a record batch: int64."""
        first = int(rows[0])
        low, high = self._rows.searchsorted([first, first + len(rows)])
        return self._rows[low:high] - first


class View(Corpus):
    """Some documents of another corpus, read as a corpus. Documents are numbered as they are kept.

    Args:
        store: holds the manifest and the table of the view.
        base: the open base of the view.

    Attributes:
        base: the corpus whose shards are read.
        kept: the documents of the base that the view has.
    """

    def __init__(self, store: Store, manifest: Manifest, base: Corpus, *, load_table: LoadFile = map_file) -> None:
        self.base, self.kept = base, load_kept(store, manifest, base, load_table)
        super().__init__(store, [manifest], load_table=load_table)

    def _shard_table(self) -> ShardTable:
        return ViewTable(self.base.shards, self.kept)

    def in_base(self, index: int) -> int:
        """The number of a document in the base."""
        return int(self.kept.in_base(np.array([index]))[0])

    def stored(self, index: int) -> tuple[Corpus, int]:
        """The base, and the index of a shard there."""
        return self.base, int(self._view_table.of_base[index])

    @property
    def shard_store(self) -> Store:
        """The store of the shards of the base."""
        return self.base.shard_store

    def part_of(self, index: int, shard: Shard) -> Shard:
        """The kept documents of a shard of the base."""
        return ViewShard(shard, self._view_table.rows(index), self.shards[index])

    @property
    def _view_table(self) -> ViewTable:
        assert isinstance(self.shards, ViewTable)
        return self.shards

    def provenance(self, index: int) -> Provenance:
        """Source and record number of one document, as its base has them."""
        return self.base.provenance(self.in_base(range(self.num_documents)[index]))

    def close(self) -> None:
        """Drop the mapped shards."""
        super().close()
        self.base.close()


def _pieces(values: NDArray[Any], starts: NDArray[np.int64], stops: NDArray[np.int64]) -> NDArray[Any]:
    """Ranges of an array, ascending and apart, as one array."""
    if len(starts) and stops[-1] - starts[0] < _MASKED_BELOW * len(starts):
        runs = np.diff(np.stack([starts, stops], axis=1).ravel())
        is_wanted = np.repeat(np.arange(len(runs)) % 2 == 0, runs)
        found: NDArray[Any] = values[starts[0] : stops[-1]][is_wanted]
        return found
    parts = [values[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]
    return np.concatenate([values[:0], *parts])


def _joined(starts: NDArray[np.int64], stops: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ranges, joined where they follow each other."""
    is_first = np.ones(len(starts), np.bool_)
    is_first[1:] = starts[1:] != stops[:-1]
    return starts[is_first], stops[np.append(is_first[1:], True) if len(stops) else is_first]


def load_kept(store: Store, manifest: Manifest, base: Corpus, load: LoadFile = map_file) -> Kept:
    """The table of a view, checked against its manifest and its base at both ends; see `check_kept` for the rest.

    Raises:
        DamagedCorpusError: it is missing, or does not match the manifest.
    """
    table = open_table(store, names.KEPT, KEPT_SCHEMA, manifest, load)
    if table.num_batches != 1:
        raise DamagedCorpusError(f"{table.path} has {table.num_batches} record batches, expected 1", hint=RESTORE)
    lows = {name: numbers_of(table.batch(0).column(name)) for name in COLUMNS}
    carries = manifest.base.carries if manifest.base is not None else {}
    for name, rows in carries.items():
        if name not in lows or rows != sorted(rows) or rows[-1] >= len(lows[name]):
            raise DamagedCorpusError(f"{table.path} has no carries of {name} at the rows {rows}", hint=RESTORE)
    kept = Kept([Ascending(low, carries.get(name, ())) for name, low in lows.items()])
    if len(kept) < 1:
        raise DamagedCorpusError(f"{table.path} has {len(kept) + 1} rows, expected at least 2", hint=RESTORE)
    ends = np.array([0, len(kept)])
    (first, stop), numbers, tokens = (column[ends].tolist() for column in (kept.documents, kept.numbers, kept.tokens))
    expected = [0, manifest.num_documents], [0, manifest.num_tokens]
    if stop > base.num_documents or (numbers, tokens) != expected:
        raise DamagedCorpusError(
            f"{table.path} has the documents {first} to {stop} of {base.location}, which has {base.num_documents}, as "
            f"the documents {numbers[0]} to {numbers[1]}, tokens {tokens[0]} to {tokens[1]}",
            hint=RESTORE,
        )
    return kept


class KeptDigest:
    """The content fingerprint of a view: a hash of the base's fingerprint and of the kept documents.

    Args:
        content: content fingerprint of the base.
    """

    def __init__(self, content: str) -> None:
        self._digest, self._open = hashlib.sha256(b"tokshard view 1\n" + content.encode()), (-1, -1)

    def add(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        """Add ranges of documents, in order. Ranges that follow each other count as one, so shards mean nothing."""
        first, last = self._open
        begins, ends = _joined(np.append(first, starts), np.append(last, stops))
        self._hash(begins[:-1], ends[:-1])
        self._open = int(begins[-1]), int(ends[-1])

    def finish(self, num_documents: int, num_tokens: int) -> str:
        """The fingerprint, 64 hexadecimal digits."""
        self._hash(*(np.array([bound]) for bound in self._open))
        self._digest.update(canonical_json({"num_documents": num_documents, "num_tokens": num_tokens}))
        return self._digest.hexdigest()

    def _hash(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        pairs = np.stack([starts, stops], axis=1)
        self._digest.update(pairs[pairs[:, 0] >= 0].astype("<i8").tobytes())


class KeptWriter:
    """Writes the table of a view, in memory that does not grow with it. Stretches come in order.

    Args:
        content: content fingerprint of the base.

    Attributes:
        carries: as in the manifest.
    """

    def __init__(self, content: str) -> None:
        self._columns = [temporary_file() for _ in COLUMNS]
        self._digest = KeptDigest(content)
        self._rows = 0
        self._ends: Sequence[int] = (0, 0, 0, 0)
        self.carries: dict[str, list[int]] = {}

    def add(self, stretches: Stretches) -> None:
        """Add some stretches."""
        if not len(stretches):
            return
        documents, positions, counts, lengths = stretches.T
        _, _, num_documents, num_tokens = self._ends
        numbers = num_documents + np.append(0, np.cumsum(counts))
        tokens = num_tokens + np.append(0, np.cumsum(lengths))
        stops = documents + counts
        self._append([documents, positions, numbers[:-1], tokens[:-1]])
        self._ends = int(stops[-1]), int(positions[-1] + lengths[-1]), int(numbers[-1]), int(tokens[-1])
        self._digest.add(documents, stops)

    def _append(self, columns: Sequence[NDArray[np.int64]]) -> None:
        for name, file, values in zip(COLUMNS, self._columns, columns, strict=True):
            carries = self.carries.get(name, [])
            higher = np.arange(len(carries) + 1, (int(values[-1]) >> 32) + 1) << 32
            if len(higher):
                self.carries[name] = carries + (self._rows + values.searchsorted(higher)).tolist()
            file.write(values.astype("<u4").data)
        self._rows += len(columns[0])

    def finish(self, file: HashingFile) -> str:
        """Write the table. Returns the content fingerprint of the view."""
        self._append([np.array([end]) for end in self._ends])
        columns = [_mapped(column, self._rows) for column in self._columns]
        rows = pa.record_batch(columns, schema=KEPT_SCHEMA)
        write_table(file, KEPT_SCHEMA, [rows], rows_per_batch=self._rows)
        return self._digest.finish(*self._ends[2:])

    def close(self) -> None:
        """Remove the temporary files."""
        for file in self._columns:
            file.close()


def _mapped(file: IO[bytes], rows: int) -> pa.Array:
    file.flush()
    return number_array(np.memmap(file, np.uint32, "r", shape=(rows,)))


def stretches_of(documents: NDArray[np.int64], starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> Stretches:
    """The stretches of some documents of one shard.

    Args:
        documents: int64 [n], numbers in the base, ascending, at least one.
        starts, lengths: int64 [n], the position of the first token of each in the base, and its tokens.
    """
    is_first = np.ones(len(documents), np.bool_)
    is_first[1:] = np.diff(documents) != 1
    first = np.flatnonzero(is_first)
    counts = np.diff(first, append=len(documents))
    return np.stack([documents[first], starts[first], counts, np.add.reduceat(lengths, first)], axis=1)
