"""Arrow arrays from numpy arrays and plain values, and back, through buffers.

``pa.array``, ``from_pylist`` and ``to_numpy`` import pandas wherever it is installed: a quarter of a second and 26 to
42 MB in every process.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray


def number_array(values: NDArray[Any]) -> pa.Array:
    """Numbers, not copied: [n] of a type that Arrow has."""
    contiguous = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(contiguous.dtype)
    return pa.Array.from_buffers(kind, len(contiguous), [None, pa.py_buffer(contiguous)])


def numbers_of(array: pa.Array | pa.ChunkedArray) -> NDArray[Any]:
    """Numbers without nulls as [n], not copied if they are in one piece."""
    if isinstance(array, pa.ChunkedArray):
        parts = [numbers_of(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, _dtype_of(array.type)), *parts])
    dtype = _dtype_of(array.type)
    return np.frombuffer(array.buffers()[-1] or b"", dtype, len(array), dtype.itemsize * array.offset)


def _dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    """``to_pandas_dtype`` needs pandas in old versions of Arrow."""
    return np.dtype(_FLOATS.get(kind) or str(kind))


_FLOATS = {pa.float32(): "float32", pa.float64(): "float64"}


def as_written(array: Any) -> Any:
    """Floats of 32 bits or decimals, an array or a column, as the float64 nearest to how they are written: 0.9 is 0.9.

    The exact value of a float32, 0.89999998, would not meet ``score>=0.9``.
    """
    return array.cast(pa.string()).cast(pa.float64())


def lists_array(offsets: NDArray[np.int64], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Large lists of numbers, not copied: int64 [lists + 1] and [numbers]."""
    return pa.LargeListArray.from_arrays(number_array(offsets), number_array(values), type=kind)


def value_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Plain values, None for null: strings, int64, float64 or bool; or lists of numbers."""
    if pa.types.is_large_list(kind):
        return _array(values, kind)
    is_there = np.array([value is not None for value in values], np.bool_)
    bits = None if is_there.all() else _bits(is_there)
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, len(values), [bits, _bits(np.array(values, np.bool_))])
    filled = values if bits is None else [_FILL[kind] if value is None else value for value in values]
    if pa.types.is_string(kind):
        return pa.Array.from_buffers(kind, len(values), [bits, *_array(filled, kind).buffers()[1:]])
    numbers = np.array(filled, _dtype_of(kind))
    return pa.Array.from_buffers(kind, len(values), [bits, pa.py_buffer(numbers)])


_FILL = {pa.string(): "", pa.int64(): 0, pa.float64(): 0.0}
"""The value stored for a null."""


def _bits(values: NDArray[np.bool_]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(values, bitorder="little"))


def table_batch(columns: Mapping[str, Sequence[Any]], schema: pa.Schema) -> pa.RecordBatch:
    """Rows of the shard table or the source table; no value may be None."""
    return pa.record_batch([_array(columns[field.name], field.type) for field in schema], schema=schema)


def _array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_int64(kind):
        return number_array(np.array(values, np.int64))
    if pa.types.is_string(kind):
        encoded = [value.encode() for value in values]
        buffers = [None, pa.py_buffer(_offsets(encoded, np.int32)), pa.py_buffer(b"".join(encoded))]
        return pa.Array.from_buffers(kind, len(encoded), buffers)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(b"".join(values))])
    if pa.types.is_large_list(kind):
        dtype = _dtype_of(kind.value_type)
        parts = [np.empty(0, dtype), *(np.asarray(value, dtype) for value in values)]
        return lists_array(_offsets(values, np.int64), np.concatenate(parts), kind)
    entries = [entry for value in values for entry in value.items()]
    keys, items = (
        _array([key for key, _ in entries], kind.key_type),
        _array([item for _, item in entries], kind.item_type),
    )
    return pa.MapArray.from_arrays(number_array(_offsets(values, np.int32)), keys, items, type=kind)


def _offsets(values: Sequence[Any], dtype: Any) -> NDArray[Any]:
    return np.array([0, *itertools.accumulate(map(len, values))], dtype)
