"""A trace as a parquet file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokshard.cli.output_file import output_file
from tokshard.cli.trace_text import trace_json
from tokshard.format.schema import SUPPORTED_COLUMN_TYPES
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.trace import ID, TraceRow
from tokshard.runtime.shards import CorpusSource


def write_parquet(path: str, run: Run, parts: Iterable[Sequence[TraceRow]], *, inputs: Sequence[str] = ()) -> int:
    """Write all rows, metadata as a struct. A metadata column whose type differs between corpora becomes text.

    Args:
        inputs: paths that the run was read from; neither they nor the files of its corpora may be overwritten.

    Returns:
        The number of rows.

    Raises:
        UsageError: the file cannot be written, or is an input.
    """
    schema = _schema(run)
    count = 0
    inputs = [*inputs, *run.directories]
    with output_file(path, option="--parquet", inputs=inputs) as file, pq.ParquetWriter(file, schema) as writer:
        for rows in parts:
            writer.write_batch(_batch(rows, schema))
            count += len(rows)
    return count


def _schema(run: Run) -> pa.Schema:
    types: dict[str, str] = {}
    for source in run.plan.sources:
        if isinstance(source, CorpusSource):
            for name, kind in source.corpus.manifest.columns.items():
                types[name] = kind if types.get(name, kind) == kind else "string"
    types.pop(ID, None)
    metadata = pa.struct([pa.field(name, SUPPORTED_COLUMN_TYPES[kind]) for name, kind in types.items()])
    return pa.schema(
        [
            *((name, pa.int64()) for name in ("step", "rank", "row", "sample")),
            *((name, pa.string()) for name in ("corpus", "shard")),
            ("document", pa.int64()),
            *((name, pa.string()) for name in (ID, "source")),
            *((name, pa.int64()) for name in ("record_number", "num_tokens", "start", "stop")),
            *([("metadata", metadata)] if types else []),
            ("masked", pa.string()),
            ("text", pa.string()),
        ]
    )


def _batch(rows: Sequence[TraceRow], schema: pa.Schema) -> pa.RecordBatch:
    columns: dict[str, list[Any]] = {name: [] for name in schema.names}
    for row in rows:
        values = {**trace_json(row), "metadata": row.document.metadata}
        for name, column in columns.items():
            column.append(values[name])
    if "metadata" in columns:
        kinds = {field.name: field.type for field in schema.field("metadata").type}
        columns["metadata"] = [_with_types(metadata, kinds) for metadata in columns["metadata"]]
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _with_types(metadata: Mapping[str, Any], kinds: Mapping[str, pa.DataType]) -> dict[str, Any]:
    return {
        name: str(value) if kinds[name] == pa.string() and value is not None else value
        for name, value in metadata.items()
    }
