"""A parquet file of documents, as more than one format writes it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pyarrow as pa
from pyarrow import parquet

from tokshard.interop.export.documents import Documents
from tokshard.interop.export.files import WrittenFile
from tokshard.store import Store


class ParquetFile:
    """A file whose pages have checksums.

    Args:
        columns: the columns of some documents, in the order of the schema.
    """

    def __init__(
        self, store: Store, name: str, schema: pa.Schema, columns: Callable[[Documents], list[pa.Array]]
    ) -> None:
        self._name, self._schema, self._columns = name, schema, columns
        self._spool = store.spool(name)
        self._writer = parquet.ParquetWriter(self._spool.file, schema, compression="zstd", write_page_checksum=True)
        self._num_documents = self._num_tokens = 0

    def write(self, documents: Documents) -> None:
        self._writer.write_batch(pa.record_batch(self._columns(documents), schema=self._schema))
        self._num_documents += len(documents)
        self._num_tokens += len(documents.tokens)

    def close(self) -> WrittenFile:
        self._writer.close()
        num_bytes = self._spool.file.tell()
        self._spool.put()
        return WrittenFile(
            name=self._name,
            num_documents=self._num_documents,
            num_tokens=self._num_tokens,
            num_bytes=num_bytes,
        )

    def discard(self) -> None:
        with contextlib.suppress(Exception):
            self._writer.close()
        self._spool.discard()
