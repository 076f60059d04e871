"""Receipts: a small file with the result of a task, or of a segment of a stream: *written* or *failed*.

A task is a pure function of its inputs and the settings, and so is its failure. The judge of a build reads failures
instead of running tasks again. A receipt is MessagePack with a CRC-32 at its end. The files that it names are written
before it, so a receipt promises them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Literal

import msgspec
import pyarrow as pa
from pyarrow import ipc

from tokshard.errors import UNDECODABLE, BuildError
from tokshard.format import names
from tokshard.format.tables import WRITTEN_SHARD_SCHEMA
from tokshard.store import Store, present, side_by_side

Key = tuple[int, int]
"""(index of the first input, segment): names a task and its shards, and orders the tasks of a stage."""

_SUFFIX = ".receipt"
_CRC_BYTES = 4


class SourceCounts(msgspec.Struct, array_like=True):
    """The counts of a task for one source and one corpus. ``records_read = documents + sum of left_out``.

    Args:
        omitted: what a chat template left out, to how often, and to the record (from the task's start, from 0) and the
            message of the first one.
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
        length_counts: documents by length in tokens, as in `DocumentLengths`.
        shortest, longest: document lengths in tokens; 0 without documents.
        shards: name to bytes of each shard that the task wrote.
        table: their rows of the shard table, as an Arrow record batch of `WRITTEN_SHARD_SCHEMA`; empty without shards.
    """

    sources: list[SourceCounts] = msgspec.field(default_factory=list)
    length_counts: list[int] = msgspec.field(default_factory=list)
    shortest: int = 0
    longest: int = 0
    shards: dict[str, int] = msgspec.field(default_factory=dict)
    table: bytes = b""

    @property
    def documents(self) -> int:
        """Documents written into this corpus."""
        return sum(source.documents for source in self.sources)


class Failure(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Why a task failed, and would fail again. Records count from the task's start: earlier receipts give the line.

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
        made_of: digest of all that the task read besides inputs: another digest invalidates the receipt.
        file_bytes, file_sha256: size and hash of the file that the task left for later stages.
        parts: the content of that file. For hashes: distinct hashes and repeats of each part. Else (rows or rounds, 0).
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
    made_of: str = ""
    file_bytes: int = 0
    file_sha256: str = ""
    parts: list[tuple[int, int]] = msgspec.field(default_factory=list)

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
        return msgspec.structs.replace(self, outputs=outputs)


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
    # a stream of Arrow is its schema and then the batches
    stream = b"".join([WRITTEN_SHARD_SCHEMA.serialize(), *(output.table for output in outputs)])
    table = ipc.open_stream(stream).read_all().combine_chunks()
    return next(iter(table.to_batches()), pa.RecordBatch.from_pylist([], WRITTEN_SHARD_SCHEMA))


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
    """The file that a task leaves for later stages: sorted hashes, places of duplicates, or dealt documents."""
    return f"{names.WORK}/{stage}/files/{_file_name(key)}.bin"


def _file_name(key: Key) -> str:
    return f"{key[0]:07d}-{key[1]:06d}"


def write_receipt(store: Store, stage: str, receipt: Receipt) -> None:
    """Publish a receipt, atomically and durably."""
    store.put(receipt_path(stage, receipt.key), sealed(msgspec.msgpack.encode(receipt)))


def sealed(content: bytes) -> bytes:
    """Content of a file, with its CRC-32 at its end."""
    return content + zlib.crc32(content).to_bytes(_CRC_BYTES, "little")


def unsealed(saved: bytes) -> bytes:
    """The content of a file that has its CRC-32 at its end.

    Raises:
        ValueError: it is another.
    """
    content, crc = saved[:-_CRC_BYTES], saved[-_CRC_BYTES:]
    if zlib.crc32(content).to_bytes(_CRC_BYTES, "little") != crc:
        raise ValueError("its content does not have its checksum")
    return content


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
    paths = (receipt_path(stage, key) for key in keys)
    return (receipt for receipt in side_by_side(store, partial(_read, store), paths) if receipt is not None)


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
    name = receipt_path(stage, key)
    receipt = _read(store, name)
    if receipt is None:
        raise BuildError(f"{store.where(name)} is gone", hint="run the same command again: its task runs again")
    return receipt


def _read(store: Store, name: str) -> Receipt | None:
    try:
        saved = store.get(name)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _damaged(store, name, error.strerror or str(error)) from error
    try:
        receipt = msgspec.msgpack.decode(unsealed(saved), type=Receipt)
    except (ValueError, *UNDECODABLE) as error:
        raise _damaged(store, name, str(error)) from error
    if not name.endswith(f"/{_file_name(receipt.key)}{_SUFFIX}"):
        raise _damaged(store, name, "it is the receipt of another task")
    return receipt


def _damaged(store: Store, name: str, reason: str) -> BuildError:
    return BuildError(
        f"{store.where(name)} is damaged: {reason}",
        hint="delete that file and run the same command again: its task runs again",
    )


def promised_files(stage: str, receipt: Receipt) -> dict[str, int]:
    """The files of the work folder that a receipt promises, with their sizes."""
    found = {rejects_path(stage, receipt.key): receipt.rejects_bytes, file_path(stage, receipt.key): receipt.file_bytes}
    return {name: size for name, size in found.items() if size}


def files_there(store: Store, stage: str) -> dict[str, int]:
    """The files of a stage that receipts may promise, with their sizes: one request for many of them."""
    folders = (rejects_folder(stage), f"{names.WORK}/{stage}/files")
    return {entry.name: entry.size for folder in folders for entry in store.list(folder)}
