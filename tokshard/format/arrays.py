"""Arrow arrays from numpy arrays and plain values, through buffers.

``pa.array`` imports pandas wherever it is installed, to ask whether its argument is a series: a quarter of a second in
every process of a build.
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


def lists_array(offsets: NDArray[np.int64], values: NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Large lists of numbers, not copied: int64 [lists + 1] and [numbers]."""
    return pa.LargeListArray.from_arrays(number_array(offsets), number_array(values), type=kind)


def value_array(values: Sequence[Any], kind: pa.DataType) -> pa.Array:
    """Plain values, None for null; or lists of numbers."""
    return _array(values, kind) if pa.types.is_large_list(kind) else pa.array(values, type=kind)


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
        dtype = np.dtype("float32" if pa.types.is_float32(kind.value_type) else str(kind.value_type))
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
