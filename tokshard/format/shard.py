"""One shard of a corpus, checked before its data is used."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError
from tokshard.forking import cached_property
from tokshard.format.arrow_file import ArrowFile
from tokshard.format.files import map_file, readable
from tokshard.format.loss import Targets, all_but_first, has_spans, has_weights, kept_columns, read_section, stored_hash
from tokshard.format.schema import check_shard_schema, column_kinds, token_type
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.store import Store

_BATCH_FACTS = (
    *("documents:", "tokens:", "offsets at byte", "tokens at byte", "lists:", "nulls:"),
    *("bytes of offsets:", "bytes of tokens:"),
)
"""What is known of a record batch before it is read, as errors name it."""


class Shard:
    """One mapped shard. Its size is checked at once, its structure (schema, batches) before its first batch is read.

    Args:
        store: the store of the corpus.
        places: the places of its record batches, from the shard table.
        schema: the schema of every shard of the corpus.
        content: the bytes of the file, at least where they are read; default: a map of the file.
        forms: `ArrowFile.form` of files that have the schema; this file's is added to them. None: the structure is
            checked at once.
    """

    def __init__(
        self,
        store: Store,
        info: ShardInfo,
        places: list[BatchPlace],
        schema: pa.Schema,
        *,
        content: pa.Buffer | None = None,
        forms: set[bytes] | None = None,
    ) -> None:
        self.path = path = store.where(info.name)
        self.info = info
        self.places = places
        with readable(path):
            self._mapped = map_file(store, info.name) if content is None else content
        if self._mapped.size != info.num_bytes:
            raise DamagedCorpusError(f"{path} has {self._mapped.size} bytes, expected {info.num_bytes}")
        self._schema, self._forms = schema, forms
        self._dtype = token_type(schema)
        self._batches: dict[int, tuple[NDArray[np.int64], NDArray[Any]]] = {}
        self._columns: dict[int, dict[str, pa.Array]] = {}
        self._targets: tuple[int, Targets] | None = None
        self._first_documents = [0, *itertools.accumulate(place.num_documents for place in places)]
        self._first_tokens = [0, *itertools.accumulate(place.num_tokens for place in places)]
        if forms is None:
            _ = self._file

    @cached_property
    def _file(self) -> ArrowFile:
        with readable(self.path, " is not an Arrow file"):
            file = ArrowFile(self._mapped)
            found = None if self._forms is not None and file.form in self._forms else file.schema
        if found is not None:
            check_shard_schema(found, self._schema, file=self.path)
        if self._forms is not None:
            self._forms.add(file.form)
        if file.num_batches != len(self.places):
            raise DamagedCorpusError(f"{self.path} has {file.num_batches} record batches, expected {len(self.places)}")
        return file

    @cached_property
    def _kinds(self) -> dict[str, str]:
        return column_kinds(self._schema)

    def document(self, row: int) -> NDArray[Any]:
        """The tokens of one document of this shard: a read-only view."""
        index, within = self._place(row)
        offsets, values = self.batch(index)
        start, stop = offsets[within : within + 2].tolist()
        # a map shows later writes to the file, after the offsets were checked
        if not 0 <= start < stop <= len(values):
            raise DamagedCorpusError(
                f"{self.path}, batch {index}: document {within} is at {start} to {stop}, expected within "
                f"[0, {len(values)}]: the file was changed while it was mapped"
            )
        return values[start:stop]

    def metadata(self, row: int) -> dict[str, Any]:
        """The kept columns of one document of this shard."""
        index, within = self._place(row)
        columns = self.columns(index)
        return {name: columns[name][within].as_py() for name in kept_columns(self._kinds)}

    def loss_spans(self, row: int) -> NDArray[np.int64]:
        """The targets of one document of this shard: int64 [spans, 2]."""
        targets, start, stop = self._targets_of(row)
        borders = targets.borders
        first, last = np.searchsorted(borders, [start, stop], "right").tolist()
        spans: NDArray[np.int64] = borders[first:last].reshape(-1, 2) - start
        return spans

    def target_weights(self, row: int) -> NDArray[np.float32]:
        """The weight of each token of one document of this shard, 0 if it is not a target: float32 [tokens]."""
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
        if not has_spans(self._kinds):
            return Targets(borders=all_but_first(offsets))
        section = memoryview(self._mapped)[place.loss_position : place.loss_position + place.loss_bytes]
        return checked_targets(
            section, offsets, place, is_weighted=has_weights(self._kinds), where=f"{self.path}, batch {index}"
        )

    @property
    def num_batches(self) -> int:
        """Record batches in this shard."""
        return len(self.places)

    def num_tokens_of(self, index: int) -> int:
        """The tokens of one record batch."""
        return self.places[index].num_tokens

    def batch(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        """Offsets int64 [documents + 1] and token ids [tokens] of one record batch: read-only views.

        Raises:
            DamagedCorpusError: the batch does not match the manifest, or its offsets do not ascend.
        """
        if index not in self._batches:
            with readable(f"{self.path}, batch {index}", ""):
                self._batches[index] = self._checked(index)
        return self._batches[index]

    def bounds(self, index: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """The documents of one record batch: number, first token and end of each in the shard, int64 [documents].

        Reads no token.
        """
        offsets = self.batch(index)[0] + self._first_tokens[index]
        return np.arange(*self._first_documents[index : index + 2]), offsets[:-1], offsets[1:]

    def columns(self, index: int) -> dict[str, pa.Array]:
        """The loss spans and kept columns of one record batch, checked to the last value when they are first asked for.

        Raises:
            DamagedCorpusError: a column is not valid Arrow data, or a text in it not UTF-8.
        """
        if index not in self._columns:
            self.batch(index)
            if has_spans(self._kinds):
                self.targets(index)  # valid Arrow data may still not be spans
            with readable(f"{self.path}, batch {index}", ""):
                batch = self._file.batch(index)
                columns = {name: batch.column(name) for name in self._kinds}
            for name, column in columns.items():
                with readable(f"{self.path}, batch {index}, column {name}", ""):
                    column.validate(full=True)
            self._columns[index] = columns
        return self._columns[index]

    def _checked(self, index: int) -> tuple[NDArray[np.int64], NDArray[Any]]:
        place = self.places[index]
        num_rows, nodes, buffers = self._file.description(index)
        # of `TOKENS`: a list of each document, and the tokens in them
        (num_lists, null_lists), (num_tokens, null_tokens) = nodes[:2]
        (offsets_position, offsets_bytes), _, (values_position, values_bytes) = buffers[1:4]
        found = num_rows, num_tokens, offsets_position, values_position, num_lists, null_lists + null_tokens
        num_documents = place.num_documents
        expected = num_documents, place.num_tokens, place.offsets_position, place.values_position, num_documents, 0
        room, needed = (offsets_bytes, values_bytes), (8 * (num_lists + 1), num_tokens * self._dtype.itemsize)
        if found != expected or room[0] < needed[0] or room[1] < needed[1]:
            facts = zip(_BATCH_FACTS, (*found, *map(min, room, needed)), (*expected, *needed), strict=True)
            wrong = [f"{name} {one:,}, expected {other:,}" for name, one, other in facts if one != other]
            raise DamagedCorpusError(f"{self.path}, batch {index} has {'; '.join(wrong)}")
        return self._offsets(index), np.frombuffer(self._mapped, self._dtype, num_tokens, values_position)

    def _offsets(self, index: int) -> NDArray[np.int64]:
        place = self.places[index]
        offsets = np.frombuffer(self._mapped, np.int64, place.num_documents + 1, place.offsets_position)
        if offsets[0] != 0 or offsets[-1] != place.num_tokens or not bool(np.all(offsets[1:] > offsets[:-1])):
            broken = int(np.argmin(offsets[1:] > offsets[:-1]))
            raise DamagedCorpusError(
                f"{self.path}, batch {index}: offsets must ascend from 0 to {place.num_tokens}, found {offsets[0]}, "
                f"... {offsets[broken]}, {offsets[broken + 1]}, ... {offsets[-1]} at document {broken}"
            )
        return offsets


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
        raise DamagedCorpusError(f"{where}: its loss spans have CRC-32 {found:08x}, expected {place.loss_hash:08x}")
    with readable(where, ""):
        return read_section(section, offsets, is_weighted=is_weighted)
