"""A file of record batches: the parquet and Arrow files of several formats."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import IO, Any

import pyarrow as pa
from pyarrow import parquet

from tokshard.interop.export.documents import Documents
from tokshard.store import Store

open_parquet = partial(parquet.ParquetWriter, compression="zstd", write_page_checksum=True)
"""Opens a parquet file whose pages have checksums."""


class BatchFile:
    """A file that a writer of pyarrow fills.

    Args:
        open_writer: from an open file and the schema to a writer of record batches.
        batches: the record batches of some documents, each as its columns in the order of the schema.
    """

    def __init__(
        self,
        store: Store,
        name: str,
        schema: pa.Schema,
        *,
        open_writer: Callable[[IO[bytes], pa.Schema], Any],
        batches: Callable[[Documents], Iterable[list[pa.Array]]],
    ) -> None:
        self.name, self._schema, self._batches = name, schema, batches
        self._spool = store.spool(name)
        self._writer = open_writer(self._spool.file, schema)

    def write(self, documents: Documents) -> None:
        for columns in self._batches(documents):
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))

    def close(self) -> int:
        self._writer.close()
        num_bytes = self._spool.file.tell()
        self._spool.put()
        return num_bytes

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        self._spool.discard()
