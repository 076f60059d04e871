"""Receipts: a small file per finished task or segment, which says what it did.

A receipt is an Arrow file: it has a record batch per corpus that the build writes, with a row of `WRITTEN_SHARD_SCHEMA`
for each shard that the task wrote, and its metadata holds a `Receipt` as JSON. One file, so that all appear together or
not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec
import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import BuildError
from tokshard.format.files import map_file
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.places import Workspace
from tokshard.store import Store, present, side_by_side, written

_METADATA_KEY = "tokshard.receipt"


class SourceCounts(msgspec.Struct, kw_only=True):
    """What a task did with one input, as one corpus sees it. ``records_read = documents + sum of left_out``."""

    index: int
    records_read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    with_special_text: int = 0
    left_out: dict[str, int] = msgspec.field(default_factory=dict)


class OutputCounts(msgspec.Struct, frozen=True, kw_only=True):
    """What a task wrote into one corpus.

    Args:
        sources: one entry per input of the task, in order.
        length_counts: documents by length in tokens, as in `DocumentLengths`.
        shortest, longest: document lengths in tokens; 0 without documents.
    """

    sources: list[SourceCounts]
    length_counts: list[int] = msgspec.field(default_factory=list)
    shortest: int = 0
    longest: int = 0

    @property
    def documents(self) -> int:
        """Documents written into this corpus."""
        return sum(source.documents for source in self.sources)

    def without_sources(self) -> OutputCounts:
        """Records, documents and tokens of all inputs added up, under the index of the first."""
        if not self.sources:
            return self
        total = SourceCounts(index=self.sources[0].index)
        for counts in self.sources:
            total.records_read += counts.records_read
            total.documents += counts.documents
            total.tokens += counts.tokens
        return OutputCounts(sources=[total])


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """What a task did.

    Args:
        key: the task.
        previous: segment of the receipt before this one in the same stream; None for the first.
        is_last: nothing of the input follows this segment.
        max_documents: documents that the task was allowed to write, or None.
        input_bytes: bytes of input it read, for the progress bar.
        outputs: one entry per corpus of the build: two with a validation split. Records read are the same in each.
        num_rejects, rejects_bytes: lines and bytes that it wrote to its rejects file.
        fields: the kept columns that some record of it has a field for.
        num_marks: byte order marks that were dropped.
        changes: what was done to tokens of other tools, to how many documents.
        drops: digest of the `DropLists` by which it left out duplicates; empty if it had none.
        parts: of a hashing task: how many distinct hashes and how many repeats each part of its file holds.
        hashes: of a hashing task: SHA-256 of its file.
        rows: of a task that merges: how many rows its file holds.
        merge: of such a task: digest of the `Merge`, and so of its file; of a task of a copy that of its `Work`.
        dealt_bytes: of a task that deals documents: size of its file, which has so many `rows` for each bucket.
    """

    key: Key
    previous: int | None
    is_last: bool
    max_documents: int | None
    input_bytes: int
    outputs: list[OutputCounts]
    num_rejects: int
    rejects_bytes: int = 0
    fields: list[str] = msgspec.field(default_factory=list)
    num_marks: int = 0
    changes: dict[str, int] = msgspec.field(default_factory=dict)
    drops: str = ""
    parts: list[tuple[int, int]] = msgspec.field(default_factory=list)
    hashes: str = ""
    rows: int = 0
    merge: str = ""
    dealt_bytes: int = 0

    @property
    def documents(self) -> int:
        """Documents written, over all corpora."""
        return sum(output.documents for output in self.outputs)

    @property
    def tokens(self) -> int:
        """Tokens written, over all corpora."""
        return sum(source.tokens for output in self.outputs for source in output.sources)

    @property
    def inputs(self) -> list[int]:
        """Indices of the inputs that the task read."""
        return [source.index for source in self.outputs[0].sources]

    @property
    def records_read(self) -> int:
        """Records of all inputs."""
        return sum(source.records_read for source in self.outputs[0].sources)

    def records_of(self, index: int) -> int:
        """Records read of one input."""
        return sum(source.records_read for source in self.outputs[0].sources if source.index == index)

    def without_sources(self) -> Receipt:
        """The receipt without what only its file has to say, for a coordinator that keeps many receipts.

        The counts of its inputs are added up: inputs that share a task are read whole, so no later task needs to know
        how many of their records came before.
        """
        return msgspec.structs.replace(self, outputs=[output.without_sources() for output in self.outputs])


@dataclass(frozen=True, slots=True)
class Progress:
    """What was done since the last report.

    Args:
        records: read, of which
        bad: are left out because they cannot become documents, and
        example: is what is wrong with one of them.
    """

    input_bytes: int
    documents: int
    tokens: int
    records: int = 0
    bad: int = 0
    example: str = ""

    def __add__(self, other: Progress) -> Progress:
        """Both; the example is of the later one, if it has any."""
        return Progress(
            self.input_bytes + other.input_bytes,
            self.documents + other.documents,
            self.tokens + other.tokens,
            self.records + other.records,
            self.bad + other.bad,
            other.example or self.example,
        )


def progress_of(receipts: Iterable[Receipt]) -> Progress:
    """The sum of what finished tasks did."""
    input_bytes = documents = tokens = records = bad = 0
    for receipt in receipts:
        input_bytes += receipt.input_bytes
        documents += receipt.documents
        tokens += receipt.tokens
        records += receipt.records_read
        bad += receipt.num_rejects
    return Progress(input_bytes, documents, tokens, records, bad)


def receipt_name(key: Key) -> str:
    """File name of the receipt of a task."""
    return f"{key[0]:07d}-{key[1]:06d}"


def _key(name: str) -> Key:
    """The task of a receipt, by its file name."""
    try:
        first, segment = map(int, name.removesuffix(".arrow").split("-"))
    except ValueError:  # of another kind
        return -1, -1
    return first, segment


def receipt_path(workspace: Workspace, key: Key) -> str:
    """File name of the receipt of a task, in the store."""
    return f"{workspace.receipts}/{receipt_name(key)}.arrow"


def write_receipt(workspace: Workspace, receipt: Receipt, shards: Sequence[pa.RecordBatch]) -> None:
    """Publish a receipt, whole and durable.

    Args:
        shards: per corpus of the build, a row of `WRITTEN_SHARD_SCHEMA` for each of its shards.
    """
    schema = WRITTEN_SHARD_SCHEMA.with_metadata({_METADATA_KEY: msgspec.json.encode(receipt)})
    name = receipt_path(workspace, receipt.key)
    with written(workspace.store, name) as file, ipc.new_file(file, schema) as writer:
        for rows in shards:
            writer.write_batch(rows.replace_schema_metadata(schema.metadata))


def read_receipts(
    workspace: Workspace, is_wanted: Callable[[Key], bool] | None = None
) -> Iterator[tuple[Receipt, list[pa.RecordBatch]]]:
    """The receipts of a stage, by key, each with the shards that it wrote. Those that vanish meanwhile are skipped.

    Args:
        is_wanted: whether the receipt of a task is; default: all.

    Raises:
        BuildError: a receipt is damaged.
    """
    found = sorted(name for name in present(workspace.store, workspace.receipts) if name.endswith(".arrow"))
    wanted = (name for name in found if is_wanted is None or is_wanted(_key(name)))
    paths = (f"{workspace.receipts}/{name}" for name in wanted)
    receipts = side_by_side(workspace.store, partial(_read_if_there, workspace.store), paths)
    return (receipt for receipt in receipts if receipt is not None)


def receipts_of(workspace: Workspace, keys: Iterable[Key]) -> Iterator[tuple[Receipt, list[pa.RecordBatch]]]:
    """Receipts in the order of `keys`, and per corpus of the build the shards of each.

    Raises:
        BuildError: a file is gone or damaged.
    """
    paths = (receipt_path(workspace, key) for key in keys)
    return side_by_side(workspace.store, partial(_read_or_raise, workspace.store), paths)


def read_receipt(workspace: Workspace, key: Key) -> tuple[Receipt, list[pa.RecordBatch]]:
    """One receipt, and per corpus of the build the shards that it wrote.

    Raises:
        BuildError: the file is gone or damaged.
    """
    return _read_or_raise(workspace.store, receipt_path(workspace, key))


def _read_if_there(store: Store, name: str) -> tuple[Receipt, list[pa.RecordBatch]] | None:
    try:
        return _read(store, name)
    except FileNotFoundError:
        return None


def _read_or_raise(store: Store, name: str) -> tuple[Receipt, list[pa.RecordBatch]]:
    try:
        return _read(store, name)
    except FileNotFoundError as error:
        raise BuildError(
            f"{store.where(name)} is gone", hint="run the same command again: its task runs again"
        ) from error


def _read(store: Store, name: str) -> tuple[Receipt, list[pa.RecordBatch]]:
    try:
        reader = ipc.open_file(map_file(store, name))
        receipt = msgspec.json.decode(reader.schema.metadata[_METADATA_KEY.encode()], type=Receipt)
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        for batch in batches:
            batch.validate()
        if len(batches) != len(receipt.outputs):
            raise ValueError(f"{len(batches)} batches of shards for {len(receipt.outputs)} corpora")
    except FileNotFoundError:
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError, TypeError, msgspec.MsgspecError) as error:
        raise BuildError(
            f"{store.where(name)} is damaged: {error}",
            hint="delete that file and run the same command again: its task runs again",
        ) from error
    return receipt, [batch.replace_schema_metadata(WRITTEN_SHARD_SCHEMA.metadata) for batch in batches]
