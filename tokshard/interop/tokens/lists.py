"""Token ids in columns of Arrow tables: a list of ids in each row, or one document in each record batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.interop.tokens.batches import DTYPES, TokenBatch
from tokshard.interop.tokens.located import batches_of

USUAL_FIELDS = ("tokens", "input_ids", "token_ids")
"""Names of the column of ids, the first that is there."""

_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def find_field(location: str, schema: pa.Schema, wanted: str | None) -> str:
    """The name of the column of ids.

    Raises:
        UsageError: there is no such column, or it does not hold ids.
    """
    names = list(schema.names)
    name = wanted or next((usual for usual in USUAL_FIELDS if usual in names), None)
    if name is None or names.count(name) != 1:
        column = "columns" if name in names else "column"
        raise UsageError(
            f"{location} has {'several' if name in names else 'no'} "
            f"{'column of token ids' if name is None else f'{column} {name!r}'}; it has {', '.join(names)}",
            hint="give the column that holds the ids with --token-field",
        )
    kind = schema.field(name).type
    if not (is_flat(kind) or (_is_list(kind) and is_flat(kind.value_type))):
        raise UsageError(
            f"{location}: column {name!r} has type {kind}, expected integers or lists of integers",
            hint="give the column that holds the ids with --token-field",
        )
    return name


def is_flat(kind: pa.DataType) -> bool:
    """Whether a column holds ids themselves, so that a record batch is a document."""
    return str(kind) in DTYPES


def _is_list(kind: pa.DataType) -> bool:
    return any(is_list(kind) for is_list in _LISTS)


def list_batches(array: pa.Array, input_bytes: int) -> Iterator[TokenBatch]:
    """The documents in an array of lists, which is sound; a null is an empty document.

    Args:
        input_bytes: bytes of the file that the array covers.

    Raises:
        ValueError: one of the ids is null.
    """
    lengths = _lengths(array)
    tokens = ids_of(array.flatten())  # leaves out what null lists point to
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    count = len(lengths)
    for start, stop in batches_of(bounds * tokens.itemsize):
        yield TokenBatch(
            tokens=tokens[bounds[start] : bounds[stop]],
            ends=bounds[start + 1 : stop + 1] - bounds[start],
            input_bytes=input_bytes * stop // count - input_bytes * start // count,
        )


def _lengths(array: pa.Array) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, 0)
    return _numbers(lengths).astype(np.int64)


def ids_of(array: pa.Array) -> NDArray[Any]:
    """The ids in a flat array: integers [tokens].

    Raises:
        ValueError: one of them is null.
    """
    if array.null_count:
        raise ValueError(f"{array.null_count:,} ids are null")
    return _numbers(array)


def _numbers(array: pa.Array) -> NDArray[Any]:
    dtype = np.dtype(str(array.type))
    if not len(array):
        return np.empty(0, dtype)
    return np.frombuffer(array.buffers()[1], dtype, len(array), array.offset * dtype.itemsize)


def join(documents: Sequence[NDArray[Any]], input_bytes: int) -> TokenBatch:
    """Documents of one dtype as a batch."""
    ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)))
    return TokenBatch(tokens=np.concatenate(documents), ends=ends, input_bytes=input_bytes)
