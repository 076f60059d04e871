"""Token ids in columns of Arrow tables: a list of ids in each row, or one document in each record batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.arrays import number_array, numbers_of
from tokshard.interop.tokens.batches import TokenBatch
from tokshard.interop.tokens.located import batches_of
from tokshard.interop.tokens.loss import (
    IGNORED,
    NO_LOSS,
    PACKED,
    STARTS,
    WRONG_LOSS,
    LossField,
    find_loss,
    weights_of,
)
from tokshard.interop.tokens.rows import LENGTHS, MASK, ROW_FIELDS, RowValues, documents_of_rows, for_each_id
from tokshard.numbers import DTYPES

USUAL_FIELDS = ("tokens", "input_ids", "token_ids")
"""Usual names of the column of ids; the first that is there is taken."""

_VALUES = (pa.types.is_integer, pa.types.is_boolean, pa.types.is_floating)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


def find_name(location: str, names: Sequence[str], wanted: str | None) -> str:
    """The name of the column of ids.

    Raises:
        UsageError: there is no such column, or several.
    """
    name = wanted or next((usual for usual in USUAL_FIELDS if usual in names), None)
    if name is None or names.count(name) != 1:
        column = "columns" if name in names else "column"
        raise UsageError(
            f"{location} has {'several' if name in names else 'no'} "
            f"{'column of token ids' if name is None else f'{column} {name!r}'}; it has {', '.join(names)}",
            hint="give the column that holds the ids with --token-field",
        )
    return name


def find_field(location: str, schema: pa.Schema, wanted: str | None) -> str:
    """As `find_name`, for a table.

    Raises:
        UsageError: the column does not hold ids.
    """
    name = find_name(location, schema.names, wanted)
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


def loss_field(location: str, schema: pa.Schema, wanted: str | None) -> LossField | None:
    """The column that says which tokens are trained, if there is one.

    Args:
        wanted: as `find_loss` takes it.

    Raises:
        UsageError: there is no such column, or several may be it.
    """
    kinds = {one.name: one.type.value_type for one in schema if _is_list(one.type)}
    values = [name for name, kind in kinds.items() if any(is_value(kind) for is_value in _VALUES)]
    name = find_loss(location, values, wanted)
    if name is None:
        return None
    if STARTS in values and name != PACKED:
        raise UsageError(
            f"{location} has packs ({STARTS}), of which only {PACKED} is known to be shifted, and not {name}",
            hint=f"give --loss-field {PACKED}, or {NO_LOSS} to leave masks and labels out",
        )
    is_weighted = pa.types.is_floating(kinds[name])
    found = LossField(name=name, is_weighted=is_weighted, is_shifted=STARTS in values)
    if found.is_labels and not pa.types.is_integer(kinds[name]):
        raise UsageError(
            f"{location}: column {name!r} has type {schema.field(name).type}, expected lists of integers",
            hint=f"labels are ids or {IGNORED}; a mask has 'mask' in its name: rename the column, or leave it out with "
            f"--loss-field {NO_LOSS}",
        )
    return found


def row_fields(location: str, schema: pa.Schema, ids: str) -> list[str]:
    """The columns that mark padding, and the starts of documents in a row.

    Args:
        ids: the column of the ids.

    Raises:
        UsageError: such a column does not hold lists of integers.
    """
    found = []
    for name in (*ROW_FIELDS, STARTS):
        kind = schema.field(name).type if schema.names.count(name) == 1 and name != ids else pa.null()
        if kind == pa.null() or (name in (LENGTHS, STARTS) and not pa.types.is_nested(kind)):
            continue  # a single number says nothing of this kind
        found.append(name)
        is_mask = name == MASK and _is_list(kind) and pa.types.is_boolean(kind.value_type)
        if not is_mask and not (_is_list(kind) and pa.types.is_integer(kind.value_type)):
            what = "a number for each document" if name in (LENGTHS, STARTS) else "a value for each id"
            raise UsageError(
                f"{location}: column {name!r} has type {kind}, expected a list of integers in each row: {what}",
                hint=f"leave the column {name!r} out of the source, if its rows have neither padding nor several "
                "documents; else write one document in each row, without padding",
            )
    return found


def unpacked(array: pa.Array, starts: pa.Array) -> pa.Array:
    """The documents in packs: lists that end where another document of the same row starts.

    Args:
        array: a list of values for each pack.
        starts: where the documents of each pack start, the first at 0.

    Raises:
        ValueError: a start is not in its pack.
    """
    lengths, counts = _lengths(array), _lengths(starts)
    packs = np.repeat(np.arange(len(counts)), counts)
    within = ids_of(starts.flatten()).astype(np.int64)
    firsts = np.cumsum(counts) - counts
    is_first = np.zeros(len(within), np.bool_)
    is_first[firsts[counts > 0]] = True
    is_wrong = np.where(is_first, within != 0, np.diff(within, prepend=0) <= 0) | (within > lengths[packs])
    if is_wrong.any() or (lengths[counts == 0] > 0).any():
        row = int(packs[np.argmax(is_wrong)]) if is_wrong.any() else int(np.argmax((counts == 0) & (lengths > 0)))
        raise ValueError(f"{STARTS} of row {row} does not ascend from 0 within the {int(lengths[row])} ids of the row")
    offsets = np.append(within + (np.cumsum(lengths) - lengths)[packs], lengths.sum())
    return pa.LargeListArray.from_arrays(number_array(offsets), array.flatten())


def list_batches(
    array: pa.Array,
    input_bytes: int,
    loss: tuple[LossField, pa.Array] | None = None,
    said: Mapping[str, pa.Array] = MappingProxyType({}),
    delimiters: Sequence[int] = (),
) -> Iterator[TokenBatch]:
    """The documents in a valid array of lists; a null is an empty document.

    Args:
        input_bytes: bytes of the file that the array covers.
        loss: the mask or labels, and their values: an array of as many lists.
        said: some of `ROW_FIELDS`, each with an array of as many lists.
        delimiters: ids that end a document.

    Raises:
        ValueError: one of the ids or of the values is null.
    """
    lengths = _lengths(array)
    tokens = ids_of(array.flatten())  # leaves out what null lists point to
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
    count = len(lengths)
    weights, problems = None, dict[int, tuple[str, str]]()
    if loss is not None:
        weights, problems = _weights(*loss, tokens, bounds)
    values = {name: _row_values(name, lists) for name, lists in said.items()}
    for start, stop in batches_of(bounds * tokens.itemsize):
        batch = TokenBatch(
            tokens=tokens[bounds[start] : bounds[stop]],
            ends=bounds[start + 1 : stop + 1] - bounds[start],
            input_bytes=input_bytes * stop // count - input_bytes * start // count,
            problems={place - start: problem for place, problem in problems.items() if start <= place < stop},
            loss=None if weights is None else weights[bounds[start] : bounds[stop]],
        )
        found = {name: lists.of(start, stop) for name, lists in values.items()}
        yield documents_of_rows(batch, found, delimiters) if found else batch


def _weights(
    field: LossField, array: pa.Array, tokens: NDArray[Any], bounds: NDArray[np.int64]
) -> tuple[NDArray[np.float32], dict[int, tuple[str, str]]]:
    found = _row_values(field.name, array)
    unread = np.zeros(len(tokens), found.values.dtype)  # of records with a problem; labels may be unsigned
    values, problems = for_each_id(field.name, found, np.diff(bounds), unread, reason=WRONG_LOSS, may_miss=False)
    weights, wrong = weights_of(field, values, tokens, bounds[1:])
    return weights, wrong | problems


def _row_values(name: str, array: pa.Array) -> RowValues:
    """The values of a column of lists.

    Raises:
        ValueError: one of them is null.
    """
    flat = array.flatten()
    if flat.null_count:
        raise ValueError(f"{flat.null_count:,} values of {name} are null")
    is_missing = array.is_null().to_numpy(zero_copy_only=False)
    return RowValues(values=flat.to_numpy(zero_copy_only=False), counts=_lengths(array), is_missing=is_missing)


def _lengths(array: pa.Array) -> NDArray[np.int64]:
    import pyarrow.compute as pc

    lengths = pc.list_value_length(array)
    if lengths.null_count:
        lengths = pc.fill_null(lengths, 0)
    return numbers_of(lengths).astype(np.int64)


def ids_of(array: pa.Array) -> NDArray[Any]:
    """The ids in a flat array: integers [tokens].

    Raises:
        ValueError: one of them is null.
    """
    if array.null_count:
        raise ValueError(f"{array.null_count:,} ids are null")
    return numbers_of(array)


def join(documents: Sequence[NDArray[Any]], input_bytes: int) -> TokenBatch:
    """Documents of one dtype as a batch."""
    ends = np.cumsum(np.fromiter(map(len, documents), np.int64, len(documents)))
    return TokenBatch(tokens=np.concatenate(documents), ends=ends, input_bytes=input_bytes)
