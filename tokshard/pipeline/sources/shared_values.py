"""How many bytes the values of Arrow arrays take as Python objects, counted before those are made.

Views, dictionaries and lists let many rows share one value, so a file of a few kilobytes can stand for gigabytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.records import ROWS_PER_CHUNK

_OBJECT_BYTES = 64.0
"""About what a value inside a list or struct costs as a Python object, in addition to its text."""

_SMALL_OFFSETS = (pa.types.is_string, pa.types.is_binary)
_LARGE_OFFSETS = (pa.types.is_large_string, pa.types.is_large_binary)
_VIEWS = (pa.types.is_string_view, pa.types.is_binary_view)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_map)

Positions = NDArray[np.int64]
Sizes = NDArray[np.float64]
"""Bytes. Floats, because hostile nested lists of nulls have more elements than 64 bits can count bytes of."""


def can_be_read(kind: pa.DataType) -> bool:
    """Whether the values of a type can be counted: scalars, dictionaries of them, and structs, lists and maps of those.

    Others (unions, run-end encoded values, list views) can share values in more ways, and are rare.
    """
    if isinstance(kind, pa.BaseExtensionType):
        return can_be_read(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _is_scalar(kind.value_type)
    if pa.types.is_struct(kind):
        return all(can_be_read(field.type) for field in kind)
    if pa.types.is_map(kind):
        return can_be_read(kind.key_type) and can_be_read(kind.item_type)
    if pa.types.is_fixed_size_list(kind) or _is_any(kind, _LISTS):
        return can_be_read(kind.value_type)
    return _is_scalar(kind)


def is_view(kind: pa.DataType) -> bool:
    return _is_any(kind, _VIEWS)


def row_ranges(columns: Sequence[pa.Array], num_rows: int) -> Iterator[tuple[int, int, float]]:
    """Half-open ranges of rows to decode at once, each with the bytes of those columns whose rows may share values.

    A range has at most `ROWS_PER_CHUNK` rows, and at most `CHUNK_BYTES` of shared values or a single row. Flat columns
    that store a value per row are not counted, nor are flat dictionaries, whose rows also share one Python object.
    """
    counted = [column for column in columns if _may_expand(column.type)]
    if not counted:
        for start in range(0, num_rows, ROWS_PER_CHUNK):
            yield start, min(start + ROWS_PER_CHUNK, num_rows), 0.0
        return
    start, size = 0, 0.0
    for row, num_bytes in enumerate(_bytes_of_rows(counted, num_rows)):
        if row > start and (size + num_bytes > CHUNK_BYTES or row - start == ROWS_PER_CHUNK):
            yield start, row, size
            start, size = row, 0.0
        size += num_bytes
    if start < num_rows:
        yield start, num_rows, size


def _bytes_of_rows(columns: Sequence[pa.Array], num_rows: int) -> Iterator[float]:
    for start in range(0, num_rows, ROWS_PER_CHUNK):
        rows = np.arange(start, min(start + ROWS_PER_CHUNK, num_rows))
        sizes: Sizes = sum((_bytes_between(column, rows, rows + 1) for column in columns), np.zeros(len(rows)))
        yield from sizes.tolist()


def _may_expand(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return is_view(kind.value_type)
    return is_view(kind) or bool(pa.types.is_nested(kind)) or isinstance(kind, pa.BaseExtensionType)


def _bytes_between(array: pa.Array, starts: Positions, stops: Positions) -> Sizes:
    """Bytes of the values in each range ``[starts[i], stops[i])`` of an array that was validated.

    Args:
        starts, stops: int64 [n], ascending.

    Returns:
        float64 [n].
    """
    if isinstance(array, pa.ExtensionArray):
        return _bytes_between(array.storage, starts, stops)
    if not len(array) or not len(starts):
        return np.zeros(len(starts))
    if pa.types.is_nested(array.type):
        return _bytes_inside(array, starts, stops)
    if _may_expand(array.type) or pa.types.is_dictionary(array.type):
        first = int(starts[0])
        ends = np.concatenate([[0.0], np.cumsum(_bytes_of_each(array.slice(first, int(stops[-1]) - first)))])
        return _differences(ends, starts - first, stops - first)
    offsets = _value_ends(array)
    if offsets is not None:
        return _differences(offsets, starts, stops)
    widths: Sizes = np.multiply(stops - starts, _width(array.type) or 0, dtype=np.float64)
    return widths


def _differences(ends: NDArray[Any], starts: Positions, stops: Positions) -> Sizes:
    sizes: Sizes = np.subtract(ends[stops], ends[starts], dtype=np.float64)
    return sizes


def _bytes_inside(array: pa.Array, starts: Positions, stops: Positions) -> Sizes:
    """`_bytes_between` for structs, lists and maps."""
    kind = array.type
    if pa.types.is_struct(kind):
        fields = (_bytes_between(array.field(index), starts, stops) for index in range(kind.num_fields))
        return sum(fields, (stops - starts) * (_OBJECT_BYTES * kind.num_fields))
    if pa.types.is_fixed_size_list(kind):
        starts, stops = (starts + array.offset) * kind.list_size, (stops + array.offset) * kind.list_size
    else:
        offsets = array.offsets.to_numpy()
        starts, stops = offsets[starts].astype(np.int64), offsets[stops].astype(np.int64)
    return _bytes_between(array.values, starts, stops) + (stops - starts) * _OBJECT_BYTES


def _bytes_of_each(array: pa.Array) -> Sizes:
    """Bytes of each value of an array of views or of a dictionary array, float64 [rows]; 0 for nulls."""
    is_dictionary = pa.types.is_dictionary(array.type)
    places = array.indices if is_dictionary else array
    is_valid = places.is_valid().to_numpy(zero_copy_only=False)
    indices = places.drop_null().to_numpy().astype(np.int64) if is_dictionary else np.flatnonzero(is_valid)
    values = array.dictionary if is_dictionary else array
    sizes = np.zeros(len(array))
    if not len(indices):
        return sizes
    if is_view(values.type):
        # a view is 16 bytes, whose first four are its length
        lengths = np.frombuffer(values.buffers()[1], np.int32)[4 * values.offset :: 4][indices]
    elif (ends := _value_ends(values)) is not None:
        lengths = ends[indices + 1] - ends[indices]
    else:
        lengths = np.full(len(indices), _width(values.type) or 0)
    sizes[is_valid] = lengths
    return sizes


def _value_ends(array: pa.Array) -> NDArray[Any] | None:
    """Offsets of an array of strings or binary, one more than it has values; None for other types."""
    if _is_any(array.type, _SMALL_OFFSETS):
        return np.frombuffer(array.buffers()[1], np.int32)[array.offset :]
    if _is_any(array.type, _LARGE_OFFSETS):
        return np.frombuffer(array.buffers()[1], np.int64)[array.offset :]
    return None


def _is_scalar(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    is_text = _is_any(kind, (*_SMALL_OFFSETS, *_LARGE_OFFSETS, *_VIEWS))
    return is_text or bool(pa.types.is_null(kind)) or _width(kind) is not None


def _width(kind: pa.DataType) -> int | None:
    """Bytes per value of a fixed-width type; None for other types."""
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return None


def _is_any(kind: pa.DataType, checks: Sequence[Callable[[pa.DataType], bool]]) -> bool:
    return any(check(kind) for check in checks)
