"""What ``tokshard trace`` shows of steps: a table, lines of JSON, or a parquet file."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokshard.format.schema import SUPPORTED_COLUMN_TYPES
from tokshard.inspect.outputs import output_file
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.trace import ID, DocumentFacts, TraceRow
from tokshard.inspect.terminal import aligned, one_line, wrapped
from tokshard.runtime.shards import CorpusSource
from tokshard.wording import counted

_HEADER = ("step", "rank", "row", "sample", "corpus", "document", "tokens", "shard", "record")
_IS_RIGHT = (True, True, True, True, False, True, True, False, False)
_INDENT = " " * 6


def run_text(run: Run, *, width: int) -> str:
    """The plan and the checkpoint that a trace is of, in two lines."""
    plan = run.plan
    steps = f"{counted(plan.seq_len, 'token')} x {counted(run.global_batch_size, 'sample')} a step"
    lines = [("plan", f"{steps}, seed {plan.seed}: {plan.fingerprint[:12]}")]
    if run.checkpoint:
        done = "" if run.step is None else f"step {run.step:,}, "
        skipped = [f"{start:,} to {stop - 1:,}" for start, stop in run.cursor.skipped]
        without = f", without {', '.join(skipped)}, which were skipped" if skipped else ""
        lines.append(
            ("checkpoint", f"{run.checkpoint}: {done}samples up to {run.cursor.sample - 1:,} are read{without}")
        )
    return aligned(lines, width=width)


def notes_of(run: Run, steps: range | None) -> list[str]:
    """What a reader of steps has to know."""
    if not (steps and run.step and steps[0] <= run.step and run.had_other_batch_size):
        return []
    size = f"{run.global_batch_size:,} a step"
    read = f"{run.checkpoint} has read {counted(run.num_received, 'sample')} in {counted(run.step, 'step')}, not {size}"
    return [f"{read}; earlier steps are counted back from it, and right as far as they had {size}"]


def trace_text(parts: Iterable[Sequence[TraceRow]], *, width: int) -> Iterator[str]:
    """A table of all rows, part after part: a line per document, below it its id and metadata, and its text.

    Args:
        width: characters in a line; columns that do not fit are named below their line.
    """
    widths = [len(name) for name in _HEADER]
    for number, rows in enumerate(parts):
        table = [_cells(row) for row in rows]
        widths = [max(sizes) for sizes in zip(widths, *(map(len, cells) for cells in table), strict=True)]
        ends = itertools.accumulate(size + 2 for size in widths)
        fitting = widths[: sum(end - 2 <= width for end in ends)]
        lines = [] if number else [_line(_HEADER, fitting)]
        for row, cells in zip(rows, table, strict=True):
            lines.append(_line(cells, fitting))
            rest = list(zip(_HEADER, cells, strict=True))[len(fitting) :]
            if rest:
                line = ", ".join(f"{name} {cell}" for name, cell in rest)
                lines += wrapped(_INDENT + line, width=width, indent=_INDENT)
            lines += [_INDENT + _start(line, max(20, width - len(_INDENT))) for line in _details(row)]
        if lines:
            yield "\n".join(lines)


def trace_json(row: TraceRow) -> dict[str, Any]:
    """A row as plain values."""
    return {
        "step": row.step,
        "rank": row.rank,
        "row": row.row,
        "sample": row.sample,
        **facts_json(row.document),
        "start": row.start,
        "stop": row.stop,
        "text": row.text,
    }


def facts_json(facts: DocumentFacts) -> dict[str, Any]:
    """A document as plain values."""
    return {
        "corpus": facts.corpus,
        "shard": facts.shard,
        "document": facts.document,
        "id": facts.id,
        "source": facts.source,
        "record_number": facts.record_number,
        "num_tokens": facts.num_tokens,
        "metadata": {name: _plain(value) for name, value in facts.metadata.items()},
    }


def metadata_text(facts: DocumentFacts) -> str:
    """Id and metadata of a document in a line; empty if it has none."""
    values = {ID: facts.id, **facts.metadata}
    shown = [(name, value) for name, value in values.items() if value is not None]
    return ", ".join(f"{one_line(name)} {one_line(str(value))}" for name, value in shown)


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: it has no word for a number that is not finite, so that is text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_parquet(path: str, run: Run, parts: Iterable[Sequence[TraceRow]], *, inputs: Sequence[str] = ()) -> int:
    """Write all rows, metadata as a struct; a column that corpora have with different types is text.

    Args:
        inputs: what the run was read from; neither that nor a file of its corpora may be the output.

    Returns:
        How many.

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


def _cells(row: TraceRow) -> tuple[str, ...]:
    facts = row.document
    return (
        *("-" if number is None else f"{number:,}" for number in (row.step, row.rank, row.row)),
        f"{row.sample:,}",
        one_line(facts.corpus),
        f"{facts.document:,}",
        f"{row.start:,}-{row.stop:,} of {facts.num_tokens:,}",
        one_line(facts.shard),
        f"{facts.record_number:,} of {one_line(facts.source)}",
    )


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The cells that there are widths for."""
    padded = [
        cell.rjust(width) if is_right else cell.ljust(width)
        for cell, width, is_right in zip(cells, widths, _IS_RIGHT, strict=False)
    ]
    return "  ".join(padded).rstrip()


def _start(line: str, width: int) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."


def _details(row: TraceRow) -> Iterator[str]:
    if metadata := metadata_text(row.document):
        yield metadata
    if row.text is not None:
        yield one_line(row.text)


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
        columns["metadata"] = [
            {
                name: str(value) if kinds[name] == pa.string() and value is not None else value
                for name, value in m.items()
            }
            for m in columns["metadata"]
        ]
    return pa.record_batch([pa.array(columns[field.name], field.type) for field in schema], schema=schema)
