"""Receipts: a small file with the result of a task, or of a segment of a stream: *written* or *failed*.

A task is a pure function of its inputs and the settings, and so is its failure. The judge of a build reads failures
instead of running tasks again. A receipt is MessagePack with a CRC-32 at its end. The files that it names are written
before it, so a receipt promises them.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal, TypeVar

import msgspec
import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import UNDECODABLE, BuildError
from tokshard.forking import decodable
from tokshard.format import names
from tokshard.format.arrays import table_batch
from tokshard.format.manifest import NO_LENGTHS, DocumentLengths, joined_lengths
from tokshard.format.schema import ARROW_ERRORS
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.pipeline.workspace.places import SPOOL
from tokshard.store import Store, present, side_by_side

Key = tuple[int, int]
"""(index of the first input, segment): names a task and its shards, and orders the tasks of a stage."""

Value = TypeVar("Value")

_SUFFIX = ".receipt"
_CRC_BYTES = 4


class SourceCounts(msgspec.Struct, array_like=True):
    """The counts of a task for one source and one corpus. ``records_read = documents + sum of left_out``.

    Args:
        omitted: kind of what a chat template left out, to its count, and to the record (from the task's start, from 0)
            and the message of the first.
    """

    index: int
    records_read: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    with_special_text: int = 0
    padding_ids: int = 0
    left_out: dict[str, int] = msgspec.field(default_factory=dict)
    omitted: dict[str, tuple[int, int, int]] = msgspec.field(default_factory=dict)


class OutputCounts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The counts and shards of a task in one corpus.

    Args:
        sources: one entry per source that the task read, in order.
        lengths: of its documents.
        shards: name to bytes of each shard that the task wrote.
        table: their rows of the shard table, as an Arrow record batch of `WRITTEN_SHARD_SCHEMA`; empty without shards.
    """

    sources: list[SourceCounts] = msgspec.field(default_factory=list)
    lengths: DocumentLengths = NO_LENGTHS
    shards: dict[str, int] = msgspec.field(default_factory=dict)
    table: bytes = b""

    @property
    def documents(self) -> int:
        """Documents written into this corpus."""
        return sum(source.documents for source in self.sources)


class CellCounts(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The documents of a task in a view, or in one of its cells.

    Args:
        documents, tokens, targets: their totals; targets only in a corpus with loss spans.
        lengths: of the documents.
        sources: source of the corpus to documents and tokens.
        stretches: int64 [stretches, 4], little-endian: see `tokshard.format.view`.
    """

    documents: int = 0
    tokens: int = 0
    targets: int = 0
    lengths: DocumentLengths = NO_LENGTHS
    sources: dict[int, tuple[int, int]] = msgspec.field(default_factory=dict)
    stretches: bytes = b""

    def add(self, other: CellCounts) -> None:
        """Add the counts of other documents; stretches stay."""
        self.documents += other.documents
        self.tokens += other.tokens
        self.targets += other.targets
        self.lengths = joined_lengths([self.lengths, other.lengths])
        for source, (documents, tokens) in other.sources.items():
            before = self.sources.get(source, (0, 0))
            self.sources[source] = before[0] + documents, before[1] + tokens


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The failure of a task, which would recur. Records count from the task's start: earlier receipts give the line.

    Args:
        kind: a bad ``record``, a damaged or missing ``input``, or an error of another kind.
        source: index of the input.
        record: for a bad record, its number within the task in that input, from 0.
        reason: for a bad record, a constant of `tokshard.pipeline.sources.records`.
        place: the name of the input, written before `problem`; `problem` does not depend on the location. May be empty.
        problem, hint: the problem, and the next step; for a bad record, the detail and an empty hint.
        error: the name of its class in `tokshard.errors`.
    """

    kind: Literal["record", "input", "other"]
    problem: str
    hint: str = ""
    source: int = -1
    record: int = 0
    reason: str = ""
    place: str = ""
    error: str = ""


class TaskFailedError(Exception):
    """A task failed, and would fail again."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure)
        self.failure = failure


@decodable
class Receipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The result of a task.

    Args:
        key: the task, or the segment of a stream.
        failure: why it failed; None if it is written.
        is_last: whether this is the last segment of the stream.
        max_documents: the most documents that it was allowed to write, or None.
        most_documents: the most documents that it had written, at its end or before a restart.
        input_bytes: bytes of input that it read, for the progress bar.
        outputs: one entry per corpus of the build: two with a validation split. Records read are the same in each.
        num_rejects, rejects_bytes, rejects_crc32: lines, bytes and checksum of its list of bad records.
        fields: the kept columns whose field at least one record has.
        changes: changes on the way from records to documents, with counts.
        listed: rows of the ``--drop-ids`` list that name a document of the task, as little-endian uint32.
        left_out: index of each input of a group that was left out as damaged, with its damage.
        inputs_digest: digest of all that the task read besides its sources: another digest invalidates the receipt.
        file_bytes: size of the file of dealt rows that the task left for later stages.
        rounds: record batches that each bucket of that file may have.
        cells: of a view: label to the documents of the task; see `tokshard.pipeline.tasks.cells`.
    """

    key: Key
    failure: Failure | None = None
    is_last: bool = True
    max_documents: int | None = None
    most_documents: int = 0
    input_bytes: int = 0
    outputs: list[OutputCounts] = msgspec.field(default_factory=list)
    num_rejects: int = 0
    rejects_bytes: int = 0
    rejects_crc32: int = 0
    fields: list[str] = msgspec.field(default_factory=list)
    changes: dict[str, int] = msgspec.field(default_factory=dict)
    listed: bytes = b""
    left_out: dict[int, str] = msgspec.field(default_factory=dict)
    inputs_digest: str = ""
    file_bytes: int = 0
    rounds: int = 0
    kept: int = 0
    cells: dict[str, CellCounts] = msgspec.field(default_factory=dict)

    def holds_for(self, room: int | None) -> bool:
        """Whether the task would have the same result with room for `room` documents; None for any number."""
        if room == self.max_documents:
            return True
        bounds = [bound for bound in (room, self.max_documents) if bound is not None]
        return self.most_documents < min(bounds)

    @property
    def documents(self) -> int:
        """Documents written, over all corpora."""
        return sum(output.documents for output in self.outputs)

    @property
    def tokens(self) -> int:
        """Tokens written, over all corpora."""
        return sum(source.tokens for output in self.outputs for source in output.sources)

    @property
    def records_read(self) -> int:
        """Records of all sources."""
        return sum(source.records_read for source in self.outputs[0].sources) if self.outputs else 0

    def records_of(self, index: int) -> int:
        """Records read of one source."""
        sources = self.outputs[0].sources if self.outputs else ()
        return sum(source.records_read for source in sources if source.index == index)

    def without_details(self) -> Receipt:
        """The receipt without details that stay in its file, for a process that keeps many receipts.

        The counts of its sources are added up. Inputs that share a task are read whole, so no later task needs to know
        how many of their records came before.
        """
        outputs = []
        for output in self.outputs:
            total = SourceCounts(output.sources[0].index if output.sources else 0)
            for counts in output.sources:
                total.records_read += counts.records_read
                total.documents += counts.documents
                total.tokens += counts.tokens
            outputs.append(OutputCounts(sources=[total]))
        return msgspec.structs.replace(self, outputs=outputs, cells={})


class Progress(msgspec.Struct, frozen=True):
    """The progress since the last report.

    Args:
        input_bytes: bytes of input read.
        documents, tokens: documents and tokens written.
        records: records read.
        bad: records left out as bad.
        example: the problem of one of these.
    """

    input_bytes: int = 0
    documents: int = 0
    tokens: int = 0
    records: int = 0
    bad: int = 0
    example: str = ""


def progress_of(receipts: Iterable[Receipt]) -> Progress:
    """The summed progress of finished tasks."""
    input_bytes = documents = tokens = records = bad = 0
    for receipt in receipts:
        input_bytes += receipt.input_bytes
        documents += receipt.documents
        tokens += receipt.tokens
        records += receipt.records_read
        bad += receipt.num_rejects
    return Progress(input_bytes, documents, tokens, records, bad)


def written_rows(outputs: Iterable[OutputCounts]) -> pa.RecordBatch:
    """The rows of the shard table of some tasks, in order, with `WRITTEN_SHARD_SCHEMA`."""
    # an Arrow stream is its schema, then its batches
    stream = b"".join([WRITTEN_SHARD_SCHEMA.serialize(), *(output.table for output in outputs)])
    table = ipc.open_stream(stream).read_all().combine_chunks()
    batches = table.to_batches()
    return batches[0] if batches else table_batch({name: [] for name in table.schema.names}, table.schema)


def receipts_folder(stage: str) -> str:
    """Folder of the receipts of a stage, in the store of the build."""
    return f"{names.WORK}/{stage}/receipts"


def receipt_path(stage: str, key: Key) -> str:
    """The receipt of a task."""
    return f"{receipts_folder(stage)}/{_file_name(key)}{_SUFFIX}"


def rejects_folder(stage: str) -> str:
    """Folder of the lists of bad records of a stage, in the store of the build."""
    return f"{names.WORK}/{stage}/rejects"


def rejects_path(stage: str, key: Key) -> str:
    """The list of the bad records of a task, as JSON lines."""
    return f"{rejects_folder(stage)}/{_file_name(key)}.jsonl"


def file_path(stage: str, key: Key) -> str:
    """The file that a task leaves for later stages: hashes, places of duplicates, or documents."""
    return f"{names.WORK}/{stage}/files/{_file_name(key)}.bin"


def _file_name(key: Key) -> str:
    return f"{key[0]:07d}-{key[1]:06d}"


def write_receipt(store: Store, stage: str, receipt: Receipt) -> None:
    """Publish a receipt, atomically and durably."""
    save(store, receipt_path(stage, receipt.key), receipt)


def save(store: Store, name: str, value: object) -> None:
    """Put a value as MessagePack, with its CRC-32 at its end."""
    content = msgspec.msgpack.encode(value)
    store.put(name, content + _crc32(content))


def saved(store: Store, name: str, kind: type[Value]) -> Value:
    """A value that was saved.

    Raises:
        OSError: it cannot be read.
        ValueError, msgspec.MsgspecError: it is damaged.
    """
    content = store.get(name)
    if _crc32(content[:-_CRC_BYTES]) != content[-_CRC_BYTES:]:
        raise ValueError("its content does not have its checksum")
    return msgspec.msgpack.decode(content[:-_CRC_BYTES], type=kind)


def _crc32(content: bytes) -> bytes:
    return zlib.crc32(content).to_bytes(_CRC_BYTES, "little")


_AGAIN = "run the same command again: the task that left it runs again"


@contextlib.contextmanager
def readable(store: Store, name: str, *, hint: str = "") -> Iterator[None]:
    """Turn a failure to read a file of an unfinished build into an error that names the file.

    Raises:
        BuildError: with the file.
    """
    try:
        yield
    except (*ARROW_ERRORS, *UNDECODABLE) as error:
        reason = getattr(error, "strerror", None)
        problem = f"is damaged: {error}" if reason is None else f"cannot be read: {reason}"
        # the next run sees by itself that a missing or short file breaks the promise of its receipt
        again = _AGAIN if isinstance(error, OSError) else f"delete that file and {_AGAIN}"
        raise BuildError(f"{store.where(name)} {problem}", hint=hint or again) from error


def delete_receipt(store: Store, stage: str, key: Key) -> None:
    """Delete the receipt of a task."""
    store.delete(receipt_path(stage, key), rejects_path(stage, key))


def receipt_keys(store: Store, stage: str) -> list[Key]:
    """The tasks of a stage that have left a receipt, in order."""
    found = []
    for name in present(store, receipts_folder(stage)):
        first, _, segment = name.removesuffix(_SUFFIX).partition("-")
        if name.endswith(_SUFFIX) and first.isdigit() and segment.isdigit():
            found.append((int(first), int(segment)))
    return sorted(found)


def read_receipts(store: Store, stage: str, keys: Iterable[Key]) -> Iterator[Receipt]:
    """The receipts of some tasks, in the order of `keys`. Missing ones are skipped.

    Raises:
        BuildError: a receipt is damaged.
    """
    return filter(None, side_by_side(store, partial(_read_receipt, store, stage), keys))


def _read_receipt(store: Store, stage: str, key: Key) -> Receipt | None:
    """One receipt; None if it is missing."""
    name = receipt_path(stage, key)
    with readable(store, name):
        try:
            receipt = saved(store, name, Receipt)
        except FileNotFoundError:
            return None
        if receipt.key != key:
            raise ValueError("it is the receipt of another task")
        return receipt


def receipts_of(store: Store, stage: str) -> Iterator[Receipt]:
    """All receipts of a stage, in order.

    Raises:
        BuildError: a receipt is damaged.
    """
    return read_receipts(store, stage, receipt_keys(store, stage))


def read_receipt(store: Store, stage: str, key: Key) -> Receipt:
    """One receipt.

    Raises:
        BuildError: the file is missing or damaged.
    """
    found = _read_receipt(store, stage, key)
    if found is None:
        hint = "run the same command again: its task runs again"
        raise BuildError(f"{store.where(receipt_path(stage, key))} is gone", hint=hint)
    return found


def promised_files(stage: str, receipt: Receipt) -> dict[str, int]:
    """The files of the work folder that a receipt promises, with their sizes."""
    found = {rejects_path(stage, receipt.key): receipt.rejects_bytes, file_path(stage, receipt.key): receipt.file_bytes}
    return {name: size for name, size in found.items() if size}


def files_there(store: Store, stage: str) -> dict[str, int]:
    """The files of a stage that receipts may promise, with their sizes: one request for many of them."""
    folders = (rejects_folder(stage), f"{names.WORK}/{stage}/files")
    return {entry.name: entry.size for folder in folders for entry in store.list(folder)}


@decodable
class Spooled(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a spooled source.

    Args:
        name: the file, in the store of the build.
        settings_digest: digest of what its bytes depend on besides the source.
        num_bytes, sha256: of the content, before it was compressed.
        num_records: complete records in it, at least; counted only for a limit.
        is_cut: whether the source may go on: a limit needed no more of it.
    """

    name: str
    settings_digest: str
    num_bytes: int
    sha256: str
    num_records: int
    is_cut: bool


def spooled_name(index: int, size: int) -> str:
    """The file of an input of which `size` bytes were spooled before: a longer spool has another name."""
    return f"{SPOOL}/{index}-{size}.zst"


def save_spooled(store: Store, index: int, facts: Spooled) -> None:
    """Publish the facts of an input, and remove other files of it."""
    save(store, _receipt(index), facts)
    others = (f"{SPOOL}/{name}" for name in store.names(SPOOL) if name.startswith(f"{index}-"))
    store.delete(*(name for name in others if name != facts.name))


def forget_spooled(store: Store, index: int) -> None:
    """Remove the facts of an input, whose file will be written again."""
    store.delete(_receipt(index))


def load_spooled(store: Store, indices: Iterable[int]) -> dict[int, Spooled]:
    """The facts of some inputs, for those that are spooled."""
    found = {}
    for index in indices:
        try:
            found[index] = saved(store, _receipt(index), Spooled)
        except (FileNotFoundError, NotADirectoryError, ValueError, *UNDECODABLE):
            continue
    return found


def _receipt(index: int) -> str:
    return f"{SPOOL}/{index}.receipt"
