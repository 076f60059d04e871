"""JSON lines of documents that another tool has tokenized: ids, and a mask or labels beside them."""

from __future__ import annotations

import codecs
import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UNDECODABLE, UsageError
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec
from tokshard.interop.tokens.lists import USUAL_FIELDS, find_name
from tokshard.interop.tokens.loss import STARTS, WRONG_LOSS, LossField, find_loss, weights_of
from tokshard.interop.tokens.rows import LENGTHS, MASK, ROW_FIELDS, WRONG_ROW, RowValues, documents_of_rows
from tokshard.pipeline.options import TOKENS
from tokshard.pipeline.sources import json_lines
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.lines import lines_of
from tokshard.pipeline.sources.records import MALFORMED, MISSING_IDS, Problem, Records, RecordSpec

_MAX_FIRST_BYTES = 1 << 30
"""The most bytes of the line in which an import looks for its fields."""


def batch(records: Records, spec: RecordSpec) -> TokenBatch:
    """The documents of parsed lines, whose texts are the JSON of `RecordSpec.object_fields`."""
    assert spec.tokens is not None
    none = np.empty(0, np.int64), np.empty(0, np.float32)
    found = [none] * records.count
    said: dict[int, Mapping[str, NDArray[np.int64]]] = {}
    problems: dict[int, Problem] = {bad.position: (bad.reason, bad.detail) for bad in records.bad}
    for position, text in zip(records.positions, records.texts, strict=True):
        try:
            record = msgspec.json.decode(text)
            found[position] = _document(record, spec.tokens)
            said[position] = _said(record, spec.tokens)
        except (_RecordError, *UNDECODABLE) as error:  # as a number that is out of range
            problems[position] = error.problem if isinstance(error, _RecordError) else (MALFORMED, str(error))
            found[position] = none
    lengths = np.fromiter((len(ids) for ids, _ in found), np.int64, len(found))
    columns: dict[str, list[Any]] = {name: [None] * records.count for name in spec.columns}
    for name, values in records.columns.items():
        for position, value in zip(records.positions, values, strict=True):
            columns[name][position] = value
    tokens = np.concatenate([ids for ids, _ in found] or [none[0]])
    is_narrow = bool(((tokens >= -(1 << 31)) & (tokens < 1 << 31)).all())
    rows = TokenBatch(
        tokens=tokens.astype(np.int32) if is_narrow else tokens,
        ends=np.cumsum(lengths),
        input_bytes=records.input_bytes,
        columns=columns,
        problems=problems,
        loss=np.concatenate([loss for _, loss in found] or [none[1]]) if spec.tokens.has_loss else None,
    )
    names = {name for of_row in said.values() for name in of_row}
    of_rows = {name: _row_values([said.get(row, {}).get(name) for row in range(records.count)]) for name in names}
    return documents_of_rows(rows, of_rows, spec.tokens.delimiters) if of_rows else rows


def _row_values(found: Sequence[NDArray[np.int64] | None]) -> RowValues:
    """The values of a field of all records; None where a record lacks it."""
    lists = [np.empty(0, np.int64) if one is None else one for one in found]
    return RowValues(
        values=np.concatenate(lists),
        counts=np.fromiter(map(len, lists), np.int64, len(lists)),
        is_missing=np.array([one is None for one in found]),
    )


class _RecordError(Exception):
    def __init__(self, *problem: str) -> None:
        self.problem = problem[0], problem[1]


def _document(record: Mapping[str, Any], spec: TokenSpec) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """The ids of a record, and the weight of each in the loss; nothing if the corpus has no loss spans.

    Raises:
        _RecordError: they cannot be read.
    """
    name = spec.field or next((usual for usual in USUAL_FIELDS if usual in record), "")
    ids = _numbers(record.get(name), int)
    if ids is None:
        said = f"{name} is {_shown(record[name])}" if name in record else "it has no ids"
        raise _RecordError(MISSING_IDS, f"{said}, expected a list of integers below 2^63")
    if STARTS in record:
        raise _RecordError(WRONG_ROW, f"the record is a pack ({STARTS}); packs are read from parquet")
    try:
        column = find_loss("the record", _columns_of_loss(record), spec.loss_field)
    except UsageError as error:
        raise _RecordError(WRONG_LOSS, error.problem) from error
    if (column is not None) != spec.has_loss:
        has, others = ("no mask or labels", "others do") if column is None else (column, "the first record has none")
        raise _RecordError(WRONG_LOSS, f"the record has {has} to say what is trained, and {others}")
    if column is None:
        return ids, np.empty(0, np.float32)
    field = LossField(name=column, is_weighted=spec.has_weights)
    values = _numbers(record[column], int) if field.is_labels else _numbers(record[column], bool, int, float)
    if values is None:
        expected = "ids" if field.is_labels else "numbers or booleans"
        raise _RecordError(WRONG_LOSS, f"{column} is {_shown(record[column])}, expected a list of {expected}")
    if len(values) != len(ids):
        raise _RecordError(WRONG_LOSS, f"{column} has {len(values):,} values for {len(ids):,} ids")
    weights, problems = weights_of(field, values, ids, np.array([len(ids)]))
    if problems:
        raise _RecordError(*problems[0])
    return ids, weights


def _said(record: Mapping[str, Any], spec: TokenSpec) -> dict[str, NDArray[np.int64]]:
    """The fields of a record that mark padding, and the starts of documents in it.

    Raises:
        _RecordError: it is not a list of integers.
    """
    found = {}
    for name in ROW_FIELDS:
        if name not in record or name == spec.field or (name == LENGTHS and not isinstance(record[name], list)):
            continue
        values = _numbers(record[name], bool, int) if name == MASK else _numbers(record[name], int)
        if values is None:
            raise _RecordError(WRONG_ROW, f"{name} is {_shown(record[name])}, expected a list of integers")
        found[name] = values.astype(np.int64)
    return found


def _numbers(value: Any, *kinds: type) -> NDArray[Any] | None:
    """A list of numbers as an array; None if it is not one.

    Args:
        kinds: types of the numbers. A bool is no int: numpy would turn true into the id 1.
    """
    if not isinstance(value, list) or not set(map(type, value)).issubset(kinds):
        return None
    try:
        found = np.array(value) if value else np.empty(0, np.int64)
    except OverflowError:
        return None
    allowed = {np.bool_, np.int64, np.float64} if float in kinds else {np.bool_, np.int64}
    return found if found.dtype.type in allowed else None  # numpy turns integers above 2^63 into floats


def _shown(value: Any) -> str:
    """The start of a value, as in JSON; of a list from its first item that is no integer."""
    odd = [item for item in value if type(item) is not int][:1] if isinstance(value, list) else []
    what = f"a list with {json.dumps(odd[0])[:80]}" if odd else json.dumps(value)[:80]
    return f"{what} at index {value.index(odd[0]):,}" if odd else what


def _columns_of_loss(record: Mapping[str, Any]) -> list[str]:
    lists = ((name, value) for name, value in record.items() if isinstance(value, list))
    return [name for name, value in lists if not value or isinstance(value[0], int | float)]


def _first(input_: Input) -> dict[str, Any]:
    """The first record; empty if the first lines hold none, which the reader will report."""
    for _, chunk in lines_of(input_, Span(), _MAX_FIRST_BYTES):
        lines = [line for line in chunk.data.split(b"\n") if line.strip()]
        for line in lines:
            with contextlib.suppress(*UNDECODABLE):
                return msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8), type=dict[str, Any])
        if lines:
            break
    return {}


def _other_columns(input_: Input, spec: RecordSpec) -> Sequence[str]:
    assert spec.tokens is not None
    record = _first(input_)
    if not record:
        return ()
    used = find_name(input_.location, list(record), spec.tokens.field)
    loss = find_loss(input_.location, _columns_of_loss(record), spec.tokens.loss_field)
    said = [name for name in ROW_FIELDS if isinstance(record.get(name), list | None)]
    return [name for name in record if name not in (used, loss, *said)]


def _loss_field(input_: Input, wanted: str | None) -> LossField | None:
    record = _first(input_)
    name = find_loss(input_.location, _columns_of_loss(record), wanted) if record else None
    return None if name is None else LossField(name=name, is_weighted=float in set(map(type, record[name])))


FORMAT = replace(
    json_lines.FORMAT,
    reads=TOKENS,
    suffixes=(".jsonl", ".ndjson"),  # folders of data sets have .json files that hold no records
    columns=_other_columns,
    loss=_loss_field,
)
