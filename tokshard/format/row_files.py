"""Small files of rows that users name: texts, JSON lines, csv and parquet, on this machine or elsewhere."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from tokshard.errors import UNDECODABLE, UsageError
from tokshard.format.schema import ARROW_ERRORS
from tokshard.store import local_file, locate

_ROWS_AT_ONCE = 65_536
_MAX_FIELD = 1 << 24
"""The most characters of a value in csv, of which Python allows 131,072: a row may hold a document."""
_COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}


def read_rows(
    location: str, *, columns: Sequence[str] | None = None, of_line: str, hint: str
) -> Iterator[Mapping[str, Any]]:
    """The rows of a file in order: of ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet`` by its name, else lines of text.

    Texts may be compressed (``.gz``, ``.zst``, ``.bz2``). Empty lines do not count.

    Args:
        columns: the columns to read from a table; None: all.
        of_line: the column that holds a line of text.
        hint: the next step, for the error.

    Raises:
        UsageError: the file cannot be read.
    """
    number = 0
    try:
        store, name = locate(location)
        store.stat(name)  # refuses anything but a file, which might never end
        with local_file(store, name) as path:
            for row in _rows(path, name, columns, of_line):
                number += 1
                yield row
    except (*ARROW_ERRORS, *UNDECODABLE, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)[:200]
        where = f" after row {number}" if number else ""
        raise UsageError(f"{location} cannot be read{where}: {reason}", hint=hint) from error


def _wanted(names: Sequence[str], columns: Sequence[str] | None) -> list[str]:
    """The columns of a table to read. Those that are asked for may be there once."""
    wanted = [name for name in names if columns is None or name in columns]
    if twice := next((name for name in columns or () if wanted.count(name) > 1), None):
        raise ValueError(f"it has several columns {twice!r}")
    return wanted


def _rows(path: str, name: str, columns: Sequence[str] | None, of_line: str) -> Iterator[Mapping[str, Any]]:
    stem, _, suffix = name.rpartition(".")
    compression = _COMPRESSION.get(f".{suffix}".lower())
    kind = (stem if compression else name).lower().rpartition(".")[2]
    if kind == "parquet":
        from pyarrow import parquet  # takes 50 ms, and most commands need none

        with parquet.ParquetFile(path) as table:
            known = table.schema_arrow.names
            wanted = _wanted(known, columns)
            if not wanted:
                raise ValueError(f"it has the columns {', '.join(known)}")
            for batch in table.iter_batches(_ROWS_AT_ONCE, columns=wanted):
                yield from batch.to_pylist()
        return
    is_table = kind in {"csv", "tsv"}
    with (
        pa.input_stream(path, compression=compression) as stream,
        io.TextIOWrapper(io.BufferedReader(stream), "utf-8-sig", newline="" if is_table else None) as lines,
    ):
        if is_table:
            csv.field_size_limit(max(csv.field_size_limit(), _MAX_FIELD))
            rows = csv.DictReader(lines, delimiter="\t" if kind == "tsv" else ",", strict=True)
            _wanted(rows.fieldnames or (), columns)
            for row in rows:
                if None in row:
                    raise csv.Error("the next row has more values than there are columns; quote a value with commas")
                yield row
        elif kind in {"jsonl", "ndjson", "json"}:
            yield from (msgspec.json.decode(line, type=dict[str, Any]) for line in lines if not line.isspace())
        else:
            yield from ({of_line: line.rstrip("\n")} for line in lines if not line.isspace())
