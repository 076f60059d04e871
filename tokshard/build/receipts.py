"""Receipts: one small file that says a task or segment is done, and what it did.

A receipt is an Arrow file: its rows are the rows of the shard table for the shards that the task wrote, its metadata
holds a `Receipt` as JSON. One file, so that both appear together or not at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pyarrow as pa
from pyarrow import ipc

from tokshard.build.tasks import Key
from tokshard.errors import BuildError
from tokshard.format.storage import atomic_file, map_file
from tokshard.format.tables import SHARD_TABLE_SCHEMA

_METADATA_KEY = "tokshard.receipt"


class SourceCounts(msgspec.Struct, kw_only=True):
    """What a task did with one input. ``records_read = documents + sum of left_out``."""

    index: int
    records_read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    left_out: dict[str, int] = msgspec.field(default_factory=dict)


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a task did.

    Args:
        key: the task.
        previous: segment of the receipt before this one in the same stream; None for the first.
        is_last: nothing of the input follows this segment.
        cap: documents that the task was allowed to write, or None.
        input_bytes: bytes of input it read, for the progress bar.
        sources: one entry per input of the task, in order.
        length_counts: documents by length in tokens, as in `DocumentLengths`.
        shortest, longest: document lengths in tokens; 0 without documents.
        num_rejects: lines it wrote to its rejects file.
    """

    key: Key
    previous: int | None
    is_last: bool
    cap: int | None
    input_bytes: int
    sources: list[SourceCounts]
    length_counts: list[int]
    shortest: int
    longest: int
    num_rejects: int

    @property
    def documents(self) -> int:
        """Documents written."""
        return sum(source.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        """Tokens written."""
        return sum(source.tokens for source in self.sources)

    def without_sources(self) -> Receipt:
        """The receipt with the counts of several inputs in one: what a coordinator that has seen many should keep.

        Inputs that share a task are whole, so nobody asks what came before in one of them.
        """
        if len(self.sources) < 2:
            return self
        total = SourceCounts(index=self.key[0])
        for counts in self.sources:
            total.records_read += counts.records_read
            total.documents += counts.documents
            total.tokens += counts.tokens
        return msgspec.structs.replace(self, sources=[total])


def receipt_name(key: Key) -> str:
    """File name of the receipt of a task."""
    return f"{key[0]:07d}-{key[1]:06d}"


def write_receipt(directory: Path, receipt: Receipt, shards: pa.RecordBatch) -> None:
    """Publish a receipt, whole and durable."""
    schema = SHARD_TABLE_SCHEMA.with_metadata({_METADATA_KEY: msgspec.json.encode(receipt)})
    final = directory / f"{receipt_name(receipt.key)}.arrow"
    with atomic_file(final) as file, ipc.new_file(file, schema) as writer:
        writer.write_batch(shards.replace_schema_metadata(schema.metadata))


def read_receipts(directory: Path) -> Iterator[Receipt]:
    """All receipts of a build, by key.

    Raises:
        BuildError: a receipt is damaged.
    """
    for path in sorted(directory.glob("*.arrow")):
        yield read_receipt(path)[0]


def read_receipt(path: Path) -> tuple[Receipt, pa.RecordBatch]:
    """One receipt, and its rows of the shard table.

    Raises:
        BuildError: the file is damaged.
    """
    try:
        reader = ipc.open_file(map_file(path))
        receipt = msgspec.json.decode(reader.schema.metadata[_METADATA_KEY.encode()], type=Receipt)
        batch = reader.get_batch(0)
        batch.validate()
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise BuildError(
            f"{path} is damaged: {error}", hint="delete that file and run the same command again: its task runs again"
        ) from error
    return receipt, batch.replace_schema_metadata(SHARD_TABLE_SCHEMA.metadata)
