"""The rows of the tables of a corpus, and its rejects, from the receipts of the tasks that wrote it."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import pyarrow as pa

from tokshard.format.arrays import number_array, table_batch
from tokshard.format.content import TokenHash
from tokshard.format.files import HashingFile
from tokshard.format.manifest import DAMAGED_INPUT
from tokshard.format.stride_hashes import stride_hash_bytes
from tokshard.format.tables import SOURCE_TABLE_SCHEMA, shard_rows
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import read_rejects
from tokshard.pipeline.totals import Totals
from tokshard.pipeline.workspace.places import Workspace
from tokshard.pipeline.workspace.receipts import receipts_of

SOURCES_PER_BATCH = 65_536


def table_rows(
    workspace: Workspace, keys: Iterable[Key], totals: Totals, hashes: HashingFile
) -> Iterator[pa.RecordBatch]:
    """The rows of the shard table, task by task, from the receipts with these keys, in order.

    Meanwhile the receipts are added to the totals, and the stride hashes of their shards are written to a file.
    """
    columns = ("name", "num_bytes", "tokens_hash", "num_tokens")
    for receipt, shards in receipts_of(workspace, keys):
        written_shards = shards[totals.number]
        rows = shard_rows(written_shards)
        if rows.num_rows:
            hashes.write(stride_hash_bytes(written_shards))
        totals.add(receipt)
        for name, num_bytes, content, tokens in zip(
            *(rows.column(column).to_pylist() for column in columns), strict=True
        ):
            totals.shard_sizes[name] = num_bytes
            totals.content = totals.content.then(TokenHash.from_bytes(content, tokens))
        before = totals.records_before.get(receipt.key)
        yield rows if before is None else _with_record_base(rows, before)


def _with_record_base(rows: pa.RecordBatch, before: Mapping[int, int]) -> pa.RecordBatch:
    """Record numbers counted from the start of the source rather than of the task."""
    sources, records = rows.column("run_source"), rows.column("run_record")
    values = records.values.to_numpy().copy()
    of_value = sources.values.to_numpy()
    for source, base in before.items():
        values[of_value == source] += base
    kind = rows.schema.field("run_record").type
    moved = pa.LargeListArray.from_arrays(records.offsets, number_array(values), type=kind)
    return rows.set_column(rows.schema.get_field_index("run_record"), rows.schema.field("run_record"), moved)


def source_rows(inputs: Sequence[Input], totals: Totals) -> Iterator[pa.RecordBatch]:
    """The source table, from the totals of all receipts."""
    for start in range(0, len(inputs), SOURCES_PER_BATCH):
        stop = min(start + SOURCES_PER_BATCH, len(inputs))
        part = [totals.source(inputs[index]) for index in range(start, stop)]
        columns = {field.name: [getattr(source, field.name) for source in part] for field in SOURCE_TABLE_SCHEMA}
        yield table_batch(columns, SOURCE_TABLE_SCHEMA)


def rejects(workspace: Workspace, totals: Totals, bad_inputs: Mapping[int, str]) -> Iterator[dict[str, Any]]:
    """Every bad record and damaged input that was left out, in input order.

    Each has a source (its index), a record (counted from 1; None for an input), a reason and a detail.
    """
    damaged = (
        {"source": index, "record": None, "reason": DAMAGED_INPUT, "detail": problem}
        for index, problem in sorted(bad_inputs.items())
    )
    return heapq.merge(_rejected_records(workspace, totals), damaged, key=itemgetter("source"))


def _rejected_records(workspace: Workspace, totals: Totals) -> Iterator[dict[str, Any]]:
    """What the tasks listed, with records counted from the start of their input."""
    for key in totals.with_rejects:
        before = totals.records_before.get(key, {})
        for reject in read_rejects(workspace, key):
            reject["record"] += before.get(reject["source"], 0) + 1
            yield reject
