"""Reading a corpus: cheap to open at any size, checked before a byte is believed."""

from __future__ import annotations

import contextlib
import operator
import os
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self, overload

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError, MissingCorpusError, UnfinishedCorpusError
from tokshard.format import names
from tokshard.format.arrow_file import ArrowFile
from tokshard.format.content import TokenHash
from tokshard.format.manifest import Manifest, decode_manifest
from tokshard.format.schema import (
    ARROW_ERRORS,
    ORDINAL_STRIDE,
    SUPPORTED_COLUMN_TYPES,
    TOKENS,
    ShardFacts,
    check_shard_schema,
    shard_schema,
    token_dtype,
)
from tokshard.format.storage import local_directory, map_file
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    BatchPlace,
    ShardInfo,
    SourceInfo,
    Table,
)

_MAX_OPEN_SHARDS = 256
"""Shards kept mapped; a map holds address space, not a file descriptor."""

LoadFile = Callable[[Path], pa.Buffer]
"""From a path to the bytes of the file, such as `map_file`."""


def open_corpus(location: str | os.PathLike[str]) -> Corpus:
    """Open a corpus: read its manifest and table, list its directory once, open no shard.

    Costs about 0.3 s and 100 MB for 200,000 shards.

    Raises:
        CorpusError: there is no corpus, it is unfinished, damaged, or of a newer format.
    """
    corpus = Corpus(local_directory(location))
    missing = missing_shards(corpus)
    if missing:
        raise DamagedCorpusError(
            f"{corpus.directory / missing[0]} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f"; the manifest names {len(corpus.shards)} shards",
            hint=RESTORE,
        )
    return corpus


def missing_shards(corpus: Corpus) -> list[str]:
    """The shards that the table names and the directory lacks, in order.

    Raises:
        CorpusError: the directory cannot be listed.
    """
    present = set(list_directory(corpus.directory))
    return [name for name in corpus.shard_names() if name not in present]


def list_directory(directory: Path) -> list[str]:
    """The names in a corpus directory, in no order.

    Raises:
        CorpusError: the directory cannot be listed.
    """
    try:
        return os.listdir(directory)
    except OSError as error:
        raise CorpusError(
            f"{directory} cannot be listed: {error.strerror}", hint="check the path and its permissions"
        ) from error


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a document came from.

    Args:
        source: index of its source in `Corpus.sources`.
        record: its record in that source, counted from 1, as in messages and in ``rejects.jsonl``.
    """

    source: int
    record: int


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


class ShardList(Sequence[ShardInfo]):
    """The shards of a corpus in order, made from the table when asked for."""

    def __init__(self, table: Table, length: int) -> None:
        self._table = table
        self._length = length

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> ShardInfo: ...
    @overload
    def __getitem__(self, index: slice) -> list[ShardInfo]: ...
    def __getitem__(self, index: int | slice) -> ShardInfo | list[ShardInfo]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        position = range(self._length)[index]
        row = position % SHARDS_PER_BATCH
        batch = self._table.batch(position // SHARDS_PER_BATCH)
        return ShardInfo(
            name=batch.column("name")[row].as_py(),
            num_documents=batch.column("num_documents")[row].as_py(),
            num_tokens=batch.column("num_tokens")[row].as_py(),
            num_bytes=batch.column("num_bytes")[row].as_py(),
            sha256=batch.column("sha256")[row].as_py().hex(),
            tokens_hash=TokenHash.from_bytes(
                batch.column("tokens_hash")[row].as_py(), batch.column("num_tokens")[row].as_py()
            ),
        )


class Corpus:
    """A finished corpus, as `open_corpus` gives it. Documents are numbered in manifest order.

    Opening costs the same at any number of tokens. Arrays are read-only views of memory maps, valid after `close` as
    long as they are referenced. Instances may be shared by threads for reading.

    Args:
        load_table: how the tables beside the manifest are read: `map_file` or `read_file`.
    """

    def __init__(self, directory: Path, *, load_table: LoadFile = map_file) -> None:
        self.directory = directory
        self.manifest = read_manifest(directory)
        self._load_table = load_table
        self._table = _open_table(directory, names.SHARD_TABLE, SHARD_TABLE_SCHEMA, self.manifest, load_table)
        self._check_table()
        self.shards: Sequence[ShardInfo] = ShardList(self._table, self.manifest.num_shards)
        self._first_documents = _starts(self._table.numbers("num_documents"))
        self.first_tokens = _starts(self._table.numbers("num_tokens"))
        """int64 [shards + 1], the position in the corpus of each shard's first token, and the total."""
        self.shard_schema = shard_schema(self.facts)
        """Of every shard."""
        self._open: OrderedDict[int, Shard] = OrderedDict()
        self._runs: dict[int, Runs] = {}

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

    @property
    def num_documents(self) -> int:
        """Documents in the corpus."""
        return self.manifest.num_documents

    @property
    def num_tokens(self) -> int:
        """Tokens in the corpus, delimiters included."""
        return self.manifest.num_tokens

    @property
    def vocab_size(self) -> int:
        """1 + the largest id of the tokenizer."""
        return self.manifest.tokenizer.vocab_size

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of a stored token id: uint16 or uint32."""
        return np.dtype(self.manifest.dtype)

    @property
    def eos_id(self) -> int:
        """The delimiter that ends every document."""
        return self.manifest.tokenizer.eos_id

    @property
    def bos_id(self) -> int | None:
        """The token that starts every document, if the corpus was built with one."""
        return self.manifest.tokenizer.bos_id

    @property
    def fingerprint(self) -> str:
        """The content fingerprint: equal when the tokens are, however they are cut into shards."""
        return self.manifest.fingerprints.content

    @property
    def facts(self) -> ShardFacts:
        """What each shard repeats about the corpus."""
        return ShardFacts(
            dtype=self.manifest.dtype,
            tokenizer_sha256=self.manifest.tokenizer.canonical_sha256,
            eos_id=self.eos_id,
            bos_id=self.bos_id,
            columns=self.manifest.columns,
        )

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
            index, row = self.shard_of(position)
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
        shard_index, row = self.shard_of(index)
        runs = self.runs(shard_index)
        run = int(np.searchsorted(runs.document, row, "right")) - 1
        if run < 0:
            raise DamagedCorpusError(
                f"{self._table.path}: the runs of shard {self.shards[shard_index].name} do not cover document {row}",
                hint=RESTORE,
            )
        return Provenance(int(runs.source[run]), 1 + int(runs.record[run]) + row - int(runs.document[run]))

    def runs(self, index: int) -> Runs:
        """Where the documents of one shard come from, from the table alone."""
        known = self._runs.get(index)
        if known is not None:
            return known
        runs = Runs(*(self._table.list_at(name, index) for name in ("run_document", "run_source", "run_record")))
        if not len(runs.document) == len(runs.source) == len(runs.record):
            raise DamagedCorpusError(
                f"{self._table.path}: the runs of shard {self.shards[index].name} have {len(runs.document)} documents, "
                f"{len(runs.source)} sources and {len(runs.record)} records; expected as many of each",
                hint=RESTORE,
            )
        if len(self._runs) >= _MAX_OPEN_SHARDS:
            self._runs.clear()
        self._runs[index] = runs
        return runs

    def sources(self) -> list[SourceInfo]:
        """What became of each input, in input order."""
        return read_sources(self.directory, self.manifest, load=self._load_table)

    def shard_names(self) -> Iterator[str]:
        """The names of all shards in order, from the table alone; quicker than `shards`."""
        for batch in self._table.batches():
            yield from batch.column("name").to_pylist()

    def shard_sizes(self) -> NDArray[np.int64]:
        """Bytes of each shard, int64 [shards], from the table alone."""
        return self._table.numbers("num_bytes")

    def first_document(self, index: int) -> int:
        """The number of the first document of one shard."""
        return int(self._first_documents[index])

    def shard_of(self, document: int) -> tuple[int, int]:
        """Which shard holds a document, and its row there.

        Raises:
            IndexError: the number is outside ``[-num_documents, num_documents)``.
        """
        try:
            position = range(self.num_documents)[operator.index(document)]
        except IndexError:
            raise IndexError(f"document {document} of a corpus of {self.num_documents} documents") from None
        index = bisect_right(self._first_documents, position) - 1
        return index, position - int(self._first_documents[index])

    def shard(self, index: int) -> Shard:
        """One shard, mapped and checked against the manifest when it is first touched.

        Raises:
            DamagedCorpusError: the file is missing or not what the manifest says.
        """
        # every step is atomic: threads that race for a shard may map it twice, which is harmless
        shard = self._open.pop(index, None)
        if shard is None:
            info = self.shards[index]
            shard = Shard(self.directory / info.name, info, self.batch_places(index), self.shard_schema)
        self._open[index] = shard
        if len(self._open) > _MAX_OPEN_SHARDS:
            with contextlib.suppress(KeyError):
                self._open.popitem(last=False)
        return shard

    def batch_places(self, index: int) -> list[BatchPlace]:
        """Where the record batches of one shard lie, from the table alone."""
        columns = [
            self._table.list_at(name, index).tolist()
            for name in ("batch_documents", "batch_tokens", "batch_offsets_position", "batch_values_position")
        ]
        info = self.shards[index]
        if (
            len({len(column) for column in columns}) != 1
            or sum(columns[0]) != info.num_documents
            or sum(columns[1]) != info.num_tokens
            or min(*columns[0], *columns[1]) < 1
        ):
            raise DamagedCorpusError(
                f"{self._table.path}: the batches of {info.name} hold {sum(columns[0])} documents and "
                f"{sum(columns[1])} tokens, the shard {info.num_documents} and {info.num_tokens}; "
                "every batch holds at least 1",
                hint=RESTORE,
            )
        return [
            BatchPlace(num_documents=rows, num_tokens=tokens, offsets_position=offsets, values_position=values)
            for rows, tokens, offsets, values in zip(*columns, strict=True)
        ]

    def batch_tokens(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Tokens of every record batch of the corpus, from the table alone.

        Returns:
            int64 [shards + 1], the first record batch of each shard, and int64 [batches], the tokens of each.

        Raises:
            DamagedCorpusError: they do not add up to the tokens of the shards.
        """
        counts, tokens = self._table.lists("batch_tokens")
        first = _starts(counts)
        totals = np.diff(_starts(tokens)[first])
        wrong = np.flatnonzero(totals != np.diff(self.first_tokens))
        if len(wrong) or (len(tokens) and int(tokens.min()) < 1):
            name = self.shards[int(wrong[0]) if len(wrong) else 0].name
            raise DamagedCorpusError(
                f"{self._table.path}: the batches of {name} do not hold the tokens of the shard", hint=RESTORE
            )
        return first, tokens

    def stride_documents(self, index: int) -> NDArray[np.int64]:
        """For one shard, the ordinal of the document that holds token ``k * ORDINAL_STRIDE``, for every k."""
        ordinals = self._table.list_at("stride_documents", index)
        expected = -(-self.shards[index].num_tokens // ORDINAL_STRIDE)
        if len(ordinals) != expected:
            name = self.shards[index].name
            raise DamagedCorpusError(
                f"{self._table.path}: {name} has {len(ordinals)} stride entries, expected {expected}", hint=RESTORE
            )
        return ordinals

    def close(self) -> None:
        """Forget the mapped shards. Views that are still referenced stay valid."""
        self._open.clear()

    def _locate(self, index: int) -> tuple[Shard, int]:
        shard_index, row = self.shard_of(index)
        return self.shard(shard_index), row

    def _check_table(self) -> None:
        path, manifest = self._table.path, self.manifest
        sizes = [batch.num_rows for batch in self._table.batches()]
        if any(size != SHARDS_PER_BATCH for size in sizes[:-1]) or sum(sizes) != manifest.num_shards:
            raise DamagedCorpusError(
                f"{path} has batches of {sizes[:5]} rows, {sum(sizes)} in all; "
                f"expected {manifest.num_shards} in batches of {SHARDS_PER_BATCH}",
                hint=RESTORE,
            )
        for column in ("num_documents", "num_tokens", "num_bytes"):
            values = self._table.numbers(column)
            total = int(values.sum())
            if total != getattr(manifest, column) or (len(values) and int(values.min()) < 1):
                raise DamagedCorpusError(
                    f"{path}: column {column} adds up to {total} with a smallest entry of {values.min()}; "
                    f"the manifest says {getattr(manifest, column)}, and every shard holds at least 1",
                    hint=RESTORE,
                )
        for batch in self._table.batches():
            # in Python: importing `pyarrow.compute` takes a process as long as 100,000 names do
            for name in _shard_names(batch, path):
                if not names.is_shard_name(name):
                    raise DamagedCorpusError(
                        f"{path} names the shard {name!r}, which is not a shard's name", hint=RESTORE
                    )


def _shard_names(batch: pa.RecordBatch, path: Path) -> list[str]:
    try:
        found = batch.column("name").to_pylist()
    except UnicodeDecodeError as error:
        raise DamagedCorpusError(f"{path} names a shard in bytes that are not UTF-8: {error}", hint=RESTORE) from error
    return [str(name) for name in found]


class Shard:
    """One mapped shard, its structure checked: size, schema, batches. Offsets are checked when first touched.

    Args:
        places: where the shard table says that its record batches lie.
        schema: of every shard of the corpus.
        load: how the file is read; anything that looks like the file, as long as what is asked for is there.
    """

    def __init__(
        self, path: Path, info: ShardInfo, places: list[BatchPlace], schema: pa.Schema, *, load: LoadFile = map_file
    ) -> None:
        self.path = path
        self.info = info
        self.places = places
        try:
            self._mapped = load(path)
        except FileNotFoundError:
            raise DamagedCorpusError(f"{path} is missing", hint=RESTORE) from None
        except ARROW_ERRORS as error:
            raise DamagedCorpusError(f"{path} cannot be opened: {error}", hint=RESTORE) from error
        if self._mapped.size != info.num_bytes:
            raise DamagedCorpusError(f"{path} has {self._mapped.size} bytes, expected {info.num_bytes}", hint=RESTORE)
        try:
            self._file = ArrowFile(self._mapped)
        except ARROW_ERRORS as error:
            raise DamagedCorpusError(f"{path} is not an Arrow file: {error}", hint=RESTORE) from error
        check_shard_schema(self._file.schema, schema, file=str(path))
        if self._file.num_batches != len(places):
            raise DamagedCorpusError(
                f"{path} has {self._file.num_batches} record batches, expected {len(places)}", hint=RESTORE
            )
        self._dtype = np.dtype(str(schema.field(TOKENS).type.value_type))
        self._batches: dict[int, tuple[pa.RecordBatch, NDArray[np.int64], NDArray[Any]]] = {}
        self._batches_of_checked_columns: set[int] = set()
        self._first_documents = _starts(np.array([place.num_documents for place in places], np.int64)).tolist()

    def document(self, row: int) -> NDArray[Any]:
        """The tokens of one document of this shard: a read-only view."""
        index = bisect_right(self._first_documents, row) - 1
        offsets, values = self.batch(index)
        within = row - self._first_documents[index]
        start, stop = offsets[within : within + 2].tolist()
        if (
            not 0 <= start < stop <= len(values)
        ):  # a map shows what is written to the file after the offsets were checked
            raise DamagedCorpusError(
                f"{self.path}, batch {index}: document {within} is at {start} to {stop}, expected within "
                f"[0, {len(values)}]: the file was changed while it was mapped",
                hint=RESTORE,
            )
        return values[start:stop]

    def metadata(self, row: int) -> dict[str, Any]:
        """The kept columns of one document of this shard."""
        index = bisect_right(self._first_documents, row) - 1
        columns = self.columns(index)
        within = row - self._first_documents[index]
        return {name: column[within].as_py() for name, column in columns.items()}

    @property
    def num_batches(self) -> int:
        """Record batches in this shard."""
        return len(self.places)

    def batch(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Offsets int64 [documents + 1] and token ids [tokens] of one record batch: read-only views.

        Raises:
            DamagedCorpusError: the batch is not what the manifest says, or its offsets do not ascend.
        """
        _, offsets, values = self._checked(index)
        return offsets, values

    def columns(self, index: int) -> dict[str, pa.Array]:
        """The kept columns of one record batch, checked to the last value when they are first asked for.

        Raises:
            DamagedCorpusError: a column is not valid Arrow data, or a text in it not UTF-8.
        """
        batch = self._checked(index)[0]
        columns = {name: batch.column(name) for name in batch.schema.names if name != TOKENS}
        if index not in self._batches_of_checked_columns:
            for name, column in columns.items():
                try:
                    column.validate(full=True)
                except ARROW_ERRORS as error:
                    raise DamagedCorpusError(
                        f"{self.path}, batch {index}, column {name}: {error}", hint=RESTORE
                    ) from error
            self._batches_of_checked_columns.add(index)
        return columns

    def _checked(self, index: int) -> tuple[pa.RecordBatch, NDArray[np.int64], NDArray[Any]]:
        if index in self._batches:
            return self._batches[index]
        place = self.places[index]
        where = f"{self.path}, batch {index}"
        try:
            batch = self._file.batch(index)
            column = batch.column(TOKENS)
            _, offsets_buffer, _, values_buffer = column.buffers()
        except ARROW_ERRORS as error:
            raise DamagedCorpusError(f"{where}: {error}", hint=RESTORE) from error
        found = BatchPlace(
            num_documents=batch.num_rows,
            num_tokens=len(column.values),
            offsets_position=offsets_buffer.address - self._mapped.address if offsets_buffer else -1,
            values_position=values_buffer.address - self._mapped.address if values_buffer else -1,
        )
        if found != place or column.null_count or column.offset or column.values.null_count:
            raise DamagedCorpusError(f"{where} is {found}, expected {place}", hint=RESTORE)
        offsets = np.frombuffer(offsets_buffer, np.int64, count=place.num_documents + 1)
        values = np.frombuffer(values_buffer, self._dtype, count=place.num_tokens)
        if offsets[0] != 0 or offsets[-1] != place.num_tokens or not bool(np.all(offsets[1:] > offsets[:-1])):
            broken = int(np.argmin(offsets[1:] > offsets[:-1]))
            raise DamagedCorpusError(
                f"{where}: offsets must ascend from 0 to {place.num_tokens}, found {offsets[0]}, ... "
                f"{offsets[broken]}, {offsets[broken + 1]}, ... {offsets[-1]} at document {broken}",
                hint=RESTORE,
            )
        self._batches[index] = (batch, offsets, values)
        return self._batches[index]


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])


def read_manifest(directory: Path) -> Manifest:
    """The manifest of a corpus, checked by itself.

    Raises:
        CorpusError: there is none, or it is damaged, or of a newer format.
    """
    path = directory / names.MANIFEST
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise _no_manifest(directory) from None
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be read: {error.strerror}", hint="check the path and its permissions"
        ) from error
    manifest = decode_manifest(content, file=str(path))
    if manifest.dtype != token_dtype(manifest.tokenizer.vocab_size):
        raise DamagedCorpusError(
            f"{path}: dtype is {manifest.dtype}, a vocabulary of {manifest.tokenizer.vocab_size} ids has "
            f"{token_dtype(manifest.tokenizer.vocab_size)}",
            hint=RESTORE,
        )
    unknown = set(manifest.columns.values()) - set(SUPPORTED_COLUMN_TYPES)
    if unknown or TOKENS in manifest.columns:
        raise DamagedCorpusError(
            f"{path}: columns are {manifest.columns}, expected none called {TOKENS!r} and types of "
            f"{', '.join(SUPPORTED_COLUMN_TYPES)}",
            hint=RESTORE,
        )
    for delimiter in (manifest.tokenizer.eos_id, manifest.tokenizer.bos_id):
        if delimiter is not None and delimiter >= manifest.tokenizer.vocab_size:
            raise DamagedCorpusError(
                f"{path}: delimiter {delimiter} is outside the vocabulary of {manifest.tokenizer.vocab_size} ids",
                hint=RESTORE,
            )
    if not names.REQUIRED_FILES <= set(manifest.files) <= names.REQUIRED_FILES | {names.REJECTS}:
        raise DamagedCorpusError(
            f"{path} lists the files {sorted(manifest.files)}, expected {sorted(names.REQUIRED_FILES)} "
            f"and perhaps {names.REJECTS}",
            hint=RESTORE,
        )
    return manifest


def read_sources(directory: Path, manifest: Manifest, *, load: LoadFile = map_file) -> list[SourceInfo]:
    """What became of each input of a corpus, in input order.

    Raises:
        DamagedCorpusError: the source table is missing or not what the manifest says.
    """
    table = _open_table(directory, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, manifest, load)
    sources = [
        SourceInfo(**{**row, "left_out": dict(row["left_out"])})
        for batch in table.batches()
        for row in batch.to_pylist()
    ]
    for index, source in enumerate(sources):
        if not 0 <= source.argument < len(manifest.arguments):
            raise DamagedCorpusError(
                f"{table.path}: source {index} comes from argument {source.argument}, "
                f"the manifest has {len(manifest.arguments)}",
                hint=RESTORE,
            )
    return sources


def is_unfinished(directory: Path) -> bool:
    """Whether a directory is one that a build still has work in: its own, or a split below it."""
    if (directory / names.WORK).is_dir():
        return True
    path = Path(os.path.abspath(directory))
    return path.name in {names.TRAIN, names.VALIDATION} and (path.parent / names.WORK).is_dir()


def _no_manifest(directory: Path) -> CorpusError:
    if not directory.exists():
        return MissingCorpusError(
            f"{directory} does not exist", hint="give the directory that 'tokshard build --out' wrote"
        )
    if not directory.is_dir():
        return MissingCorpusError(f"{directory} is a file", hint="give the directory that 'tokshard build --out' wrote")
    if is_unfinished(directory):
        return UnfinishedCorpusError(
            f"{directory} holds an unfinished build: it has no {names.MANIFEST}",
            hint="run the same 'tokshard build' command again; finished tasks are kept",
        )
    splits = [directory / name for name in (names.TRAIN, names.VALIDATION)]
    if all((split / names.MANIFEST).exists() for split in splits):
        return UnfinishedCorpusError(
            f"{directory} is not a corpus, but holds two: a build with a validation split wrote them",
            hint=f"give {splits[0]} or {splits[1]}",
        )
    return UnfinishedCorpusError(
        f"{directory} is not a corpus: it has no {names.MANIFEST}",
        hint="give the directory that 'tokshard build --out' wrote",
    )


def _open_table(directory: Path, name: str, schema: pa.Schema, manifest: Manifest, load: LoadFile) -> Table:
    path = directory / name
    facts = manifest.files[name]
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise DamagedCorpusError(f"{path} is missing", hint=RESTORE) from None
    except OSError as error:
        raise DamagedCorpusError(f"{path} cannot be opened: {error}", hint=RESTORE) from error
    if size != facts.num_bytes:
        raise DamagedCorpusError(f"{path} has {size} bytes, expected {facts.num_bytes}", hint=RESTORE)
    return Table(path, schema, load=load)
