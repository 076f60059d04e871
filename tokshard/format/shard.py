"""One shard of a corpus, checked before its data is used."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format.arrow_file import ArrowFile
from tokshard.format.files import map_file
from tokshard.format.loss import Targets, all_but_first, has_spans, has_weights, kept_columns, read_section, stored_hash
from tokshard.format.schema import ARROW_ERRORS, TOKENS, check_shard_schema, column_kinds
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.store import Store


class Shard:
    """One mapped shard, its structure checked: size, schema, batches. Offsets are checked when first touched.

    Args:
        store: the store of the corpus.
        places: the places of its record batches, from the shard table.
        schema: the schema of every shard of the corpus.
        content: the bytes of the file, at least where they are read; default: a map of the file.
    """

    def __init__(
        self,
        store: Store,
        info: ShardInfo,
        places: list[BatchPlace],
        schema: pa.Schema,
        *,
        content: pa.Buffer | None = None,
    ) -> None:
        self.path = path = store.where(info.name)
        self.info = info
        self.places = places
        try:
            self._mapped = map_file(store, info.name) if content is None else content
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
        check_shard_schema(self._file.schema, schema, file=path)
        if self._file.num_batches != len(places):
            raise DamagedCorpusError(
                f"{path} has {self._file.num_batches} record batches, expected {len(places)}", hint=RESTORE
            )
        columns = column_kinds(schema)
        self._kept = kept_columns(columns)
        self._has_spans, self._has_weights = has_spans(columns), has_weights(columns)
        self._dtype = np.dtype(str(schema.field(TOKENS).type.value_type))
        self._batches: dict[int, tuple[pa.RecordBatch, NDArray[np.int64], NDArray[Any]]] = {}
        self._batches_of_checked_columns: set[int] = set()
        self._targets: tuple[int, Targets] | None = None
        self._first_documents = [0, *itertools.accumulate(place.num_documents for place in places)]

    def document(self, row: int) -> NDArray[Any]:
        """The tokens of one document of this shard: a read-only view."""
        index, within = self._place(row)
        offsets, values = self.batch(index)
        start, stop = offsets[within : within + 2].tolist()
        # a map shows what is written to the file after the offsets were checked
        if not 0 <= start < stop <= len(values):
            raise DamagedCorpusError(
                f"{self.path}, batch {index}: document {within} is at {start} to {stop}, expected within "
                f"[0, {len(values)}]: the file was changed while it was mapped",
                hint=RESTORE,
            )
        return values[start:stop]

    def metadata(self, row: int) -> dict[str, Any]:
        """The kept columns of one document of this shard."""
        index, within = self._place(row)
        columns = self.columns(index)
        return {name: columns[name][within].as_py() for name in self._kept}

    def loss_spans(self, row: int) -> NDArray[np.int64]:
        """Which tokens of one document of this shard are targets: int64 [spans, 2]."""
        targets, start, stop = self._targets_of(row)
        borders = targets.borders
        first, last = np.searchsorted(borders, [start, stop], "right").tolist()
        spans: NDArray[np.int64] = borders[first:last].reshape(-1, 2) - start
        return spans

    def target_weights(self, row: int) -> NDArray[np.float32]:
        """The weight of each token of one document of this shard, 0 where it is no target: float32 [tokens]."""
        targets, start, stop = self._targets_of(row)
        return targets.of_tokens(start, stop)

    def _place(self, row: int) -> tuple[int, int]:
        """The batch of a document, and its row there."""
        index = bisect_right(self._first_documents, row) - 1
        return index, row - self._first_documents[index]

    def _targets_of(self, row: int) -> tuple[Targets, int, int]:
        """The targets of the batch of a document, and its first token there and the end of its last."""
        index, within = self._place(row)
        start, stop = self.batch(index)[0][within : within + 2].tolist()
        held = self._targets  # read once: threads may share a shard
        if held is None or held[0] != index:
            held = self._targets = index, self.targets(index)
        return held[1], start, stop

    def targets(self, index: int) -> Targets:
        """The targets of one record batch, checked each time. In a corpus without loss spans: all but each first token.

        Raises:
            DamagedCorpusError: they are not spans of the documents, or have another hash than in the shard table.
        """
        offsets, place = self.batch(index)[0], self.places[index]
        if not self._has_spans:
            return Targets(borders=all_but_first(offsets))
        section = memoryview(self._mapped)[place.loss_position : place.loss_position + place.loss_bytes]
        return checked_targets(
            section, offsets, place, is_weighted=self._has_weights, where=f"{self.path}, batch {index}"
        )

    @property
    def num_batches(self) -> int:
        """Record batches in this shard."""
        return len(self.places)

    def batch(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Offsets int64 [documents + 1] and token ids [tokens] of one record batch: read-only views.

        Raises:
            DamagedCorpusError: the batch does not match the manifest, or its offsets do not ascend.
        """
        _, offsets, values = self._checked(index)
        return offsets, values

    def columns(self, index: int) -> dict[str, pa.Array]:
        """The loss spans and kept columns of one record batch, checked to the last value when they are first asked for.

        Raises:
            DamagedCorpusError: a column is not valid Arrow data, or a text in it not UTF-8.
        """
        batch = self._checked(index)[0]
        columns = {name: batch.column(name) for name in batch.schema.names if name != TOKENS}
        if index not in self._batches_of_checked_columns:
            if self._has_spans:
                self.targets(index)  # valid Arrow data may still not be spans
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
        found = replace(
            place,
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


def checked_targets(
    section: bytes | memoryview, offsets: NDArray[np.int64], place: BatchPlace, *, is_weighted: bool, where: str
) -> Targets:
    """The targets of one record batch from bytes of its file.

    Args:
        section: as `stored_hash` takes it.
        offsets: where the tokens of each document start in the batch: int64 [documents + 1], from 0.
        place: the place of the batch, from the shard table.
        is_weighted: whether the corpus has `WEIGHTS`.
        where: names the batch in errors.

    Raises:
        DamagedCorpusError: they are not spans of the documents, or have another hash than in the shard table.
    """
    found = stored_hash(offsets, section)
    if found != place.loss_hash:
        raise DamagedCorpusError(
            f"{where}: its loss spans have CRC-32 {found:08x}, expected {place.loss_hash:08x}", hint=RESTORE
        )
    try:
        return read_section(section, offsets, is_weighted=is_weighted)
    except ValueError as error:
        raise DamagedCorpusError(f"{where}: {error}", hint=RESTORE) from error
