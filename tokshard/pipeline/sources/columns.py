"""Converts columns of Arrow tables to Python objects, in pieces that fit into memory.

Rows of views, dictionaries and lists can hold far more than they take in a file: many rows may share one long
value, and a list of nulls takes nothing. So the bytes of a row are counted before its values are made.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.errors import SourceError, UsageError
from tokshard.format.arrays import as_written, numbers_of
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.opening import damaged
from tokshard.pipeline.sources.records import ROWS_PER_CHUNK, RecordSpec, batches, field_hint, value_bytes

_OBJECT_BYTES = 64.0
"""Approximate bytes of a value inside a list or struct as a Python object, in addition to its text."""

_BINARY_OF = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}

_VIEWS = (pa.string_view(), pa.binary_view())

_TEXTS = (*_BINARY_OF, *_BINARY_OF.values())


class Columns:
    """The requested fields of a table.

    Args:
        paths: dotted; a column of that very name is preferred to a nested one.

    Raises:
        UsageError: a field is missing, the text is no string, or a type cannot be read.
    """

    def __init__(self, input_: Input, schema: pa.Schema, spec: RecordSpec, paths: Sequence[str]) -> None:
        self._input, self._spec, self.paths = input_, spec, list(dict.fromkeys(paths))
        try:
            self.names: list[str] = schema.names
        except UnicodeDecodeError as error:
            raise damaged(input_, f"a field has a name that is not UTF-8: {error}") from error
        found = {path: self._find(schema, path) for path in self.paths}
        self.kinds = {path: kind for path, (_, kind) in found.items()}
        self._places = {path: place for path, (place, _) in found.items()}
        for path, kind in self.kinds.items():
            if path == spec.text_field and spec.tokens is None and not _is_text(kind):
                raise UsageError(
                    f"{input_.location}: field {path!r} has type {kind}, expected a string",
                    hint=f"give the field that holds the text with --text-field; fields: {', '.join(self.names)}",
                )
            if not _can_be_read(kind):
                way_out = ", or leave it out of --keep-field" if path in spec.kept_paths else ""
                raise UsageError(
                    f"{input_.location}: field {path!r} has type {kind}, which a build cannot read",
                    hint=f"cast it to strings, numbers, or lists or structs of those in the source{way_out}",
                )

    @property
    def read_options(self) -> ipc.IpcReadOptions:
        """Options with which Arrow neither reads nor holds the other columns of a batch."""
        return ipc.IpcReadOptions(
            included_fields=sorted({self.names.index(root) for root, *_ in self._places.values()})
        )

    def array(self, batch: pa.RecordBatch, path: str) -> pa.Array:
        """The field at a path, validated.

        Raises:
            BadSourceError: it is damaged.
        """
        root, *rest = self._places[path]
        array = batch.column(batch.schema.get_field_index(root))
        if rest:
            import pyarrow.compute as pc

            for name in rest:
                # a null struct has null children, which field() alone would not show
                array = pc.struct_field(array, name)
        try:
            return _validated(array)
        except pa.ArrowException as error:
            raise damaged(self._input, str(error)) from error

    def rows(
        self, batch: pa.RecordBatch, paths: Sequence[str]
    ) -> Iterator[tuple[int, int, Mapping[str, Sequence[Any]] | float]]:
        """Half-open ranges of rows, each with the values at the paths, or with the size of a row that is too large.

        A range has at most `ROWS_PER_CHUNK` rows and about `CHUNK_BYTES` of values: encoding takes several times as
        much memory.

        Raises:
            BadSourceError: the batch is damaged.
        """
        arrays = {path: self.array(batch, path) for path in paths}
        for start, stop, num_bytes in _ranges(list(arrays.values()), batch.num_rows):
            if num_bytes > self._spec.max_line_bytes:
                yield start, stop, num_bytes
                continue
            slices = {path: array.slice(start, stop - start) for path, array in arrays.items()}
            values = {path: self._values(path, part) for path, part in slices.items()}
            if all(_holds_little(part) for part in slices.values()):
                yield start, stop, values
                continue
            sizes = zip(*(map(value_bytes, found) for found in values.values()), strict=True)
            first = 0
            for held in batches(sizes, sum):
                last = first + len(held)
                yield start + first, start + last, {path: found[first:last] for path, found in values.items()}
                first = last

    def _find(self, schema: pa.Schema, path: str) -> tuple[list[str], pa.DataType]:
        """A column, the struct fields below it, and the type of the last field."""
        for place in ([path], path.split(".")):
            root, *rest = place
            if self.names.count(root) > 1:
                raise UsageError(
                    f"{self._input.location} has {self.names.count(root)} fields {root!r}",
                    hint="rename one of them in the source",
                )
            kind: Any = schema.field(root).type if root in self.names else None
            for name in rest:
                has_field = kind is not None and pa.types.is_struct(kind) and kind.get_field_index(name) >= 0
                kind = kind.field(name).type if has_field else None
            if kind is not None:
                return place, kind
        raise UsageError(
            f"{self._input.location} has no field {path!r}; it has {', '.join(self.names)}",
            hint=field_hint(path, self._spec),
        )

    def _values(self, path: str, array: pa.Array) -> Sequence[Any]:
        if pa.types.is_dictionary(array.type):
            # one Python object per value, however many rows share it: decoded row by row, 4 KB could fill any memory
            used = array.indices.unique().drop_null()
            if array.type.value_type in _VIEWS:  # which `take` does not support
                found: Sequence[Any] = [array.dictionary[index].as_py() for index in used.to_pylist()]
            else:
                found = self._values(path, array.dictionary.take(used))
            known = dict(zip(used.to_pylist(), found, strict=True))
            return [known.get(index) for index in array.indices.to_pylist()]
        if pa.types.is_float32(array.type):
            array = as_written(array)
        try:
            if pa.types.is_temporal(array.type):
                array = array.cast(pa.string())  # Python lacks nanoseconds and years above 9999
            # with pandas installed, nested nanoseconds become types of pandas, which would be kept as other text
            if (kind := _in_microseconds(array.type)) != array.type:
                array = array.cast(kind)
            values: Sequence[Any] = array.to_pylist()
        except (ValueError, OverflowError, pa.ArrowNotImplementedError) as error:
            problem = f"Nanoseconds in it: {error}" if "lose data" in str(error) else str(error)
            raise SourceError(
                f"{self._input.location}: field {path!r} cannot be read: {problem}", hint="leave it out of --keep-field"
            ) from error
        return values


def _validated(array: pa.Array) -> pa.Array:
    """Check that no offset, view or index of the array points outside it. Cheap compared with reading its values.

    Returns:
        The array. Strings with invalid UTF-8 become binary, so each value can be checked separately.

    Raises:
        pa.ArrowException: the array is damaged.
    """
    if pa.types.is_dictionary(array.type):
        array = pa.DictionaryArray.from_arrays(array.indices, _validated(array.dictionary))
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if array.type not in _BINARY_OF:
            raise
        array = array.view(_BINARY_OF[array.type])
        array.validate(full=True)
    return array


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column can hold texts. A column of nulls can: all its texts are missing."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in _TEXTS or kind == pa.null()


def _can_be_read(kind: pa.DataType) -> bool:
    """Whether values of a type can be counted: scalars, dictionaries of them, and structs, lists and maps of scalars.

    Others can share values in more ways, and are rare: views and dictionaries inside others, unions, run-end encoded
    values, list views.
    """
    return _is_scalar(kind.value_type) if pa.types.is_dictionary(kind) else kind in _VIEWS or _is_plain(kind)


def _is_plain(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _is_plain(kind.storage_type)
    if _maker(kind) is not None:
        return all(_is_plain(kind.field(index).type) for index in range(kind.num_fields))
    return _is_scalar(kind) and kind not in _VIEWS


def _is_scalar(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind) or pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType):
        return False
    return _is_text(kind) or _width(kind) is not None


def _width(kind: pa.DataType) -> int | None:
    """Bytes per value of a fixed-width type; None for other types."""
    try:
        return int(kind.bit_width) // 8
    except ValueError:
        return None


def _is_counted(kind: pa.DataType) -> bool:
    """Whether a row may hold more than its share of the file.

    Rows of a dictionary share one Python object, so a dictionary is counted only if its values are views.
    """
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return kind in _VIEWS or pa.types.is_nested(kind) or isinstance(kind, pa.BaseExtensionType)


def _ranges(columns: Sequence[pa.Array], num_rows: int) -> Iterator[tuple[int, int, float]]:
    """Half-open ranges of rows to decode at once, each with the bytes of the counted columns.

    A range has at most `ROWS_PER_CHUNK` rows, and at most `CHUNK_BYTES` in those columns or a single row.
    """
    counts = [_counter(column) for column in columns if _is_counted(column.type)]
    start = 0
    while start < num_rows:
        end = min(start + ROWS_PER_CHUNK, num_rows)
        stop, size = end, sum(count(start, end) for count in counts)
        if size > CHUNK_BYTES:
            stop, size = start + 1, sum(count(start, start + 1) for count in counts)
            while stop < end and size + (more := sum(count(stop, stop + 1) for count in counts)) <= CHUNK_BYTES:
                stop, size = stop + 1, size + more
        yield start, stop, size
        start = stop


def _counter(array: pa.Array) -> Callable[[int, int], float]:
    """A function that counts the bytes of the rows ``[start, stop)`` as Python objects."""
    if not pa.types.is_dictionary(array.type) and array.type not in _VIEWS:
        return lambda start, stop: _bytes_inside(array.slice(start, stop - start))
    sizes = _bytes_of_views(array).tolist()
    return lambda start, stop: sum(sizes[start:stop])


def _bytes_inside(array: pa.Array) -> float:
    """Bytes of the values of a validated array. Hostile lists of nulls have more than 64 bits can count."""
    kind, count = array.type, float(len(array))
    if isinstance(array, pa.ExtensionArray):
        return _bytes_inside(array.storage)
    if not count:
        return 0.0
    if pa.types.is_struct(kind):
        parts = map(array.field, range(kind.num_fields))
        return sum(map(_bytes_inside, parts), count * kind.num_fields * _OBJECT_BYTES)
    if pa.types.is_nested(kind):
        if pa.types.is_fixed_size_list(kind):
            start, stop = array.offset * kind.list_size, (array.offset + len(array)) * kind.list_size
        else:
            start, stop = array.offsets[0].as_py(), array.offsets[len(array)].as_py()
        inner = array.values.slice(start, stop - start)
        return _bytes_inside(inner) + len(inner) * _OBJECT_BYTES
    if kind not in _TEXTS:
        return count * (_width(kind) or 0)
    offsets = np.frombuffer(array.buffers()[1], np.int64 if "large" in str(kind) else np.int32)[array.offset :]
    return float(offsets[len(array)] - offsets[0])


def _bytes_of_views(array: pa.Array) -> NDArray[np.float64]:
    """Bytes of each view of an array, or of each row of a dictionary of views: float64 [rows]; 0 for nulls."""
    is_dictionary = pa.types.is_dictionary(array.type)
    places = array.indices if is_dictionary else array
    is_valid = places.is_valid().to_numpy(zero_copy_only=False)
    indices = numbers_of(places.drop_null()) if is_dictionary else np.flatnonzero(is_valid)
    views = array.dictionary if is_dictionary else array
    sizes = np.zeros(len(array))
    if len(indices):
        # a view is 16 bytes, whose first four are its length
        sizes[is_valid] = np.frombuffer(views.buffers()[1], np.int32)[4 * views.offset :: 4][indices]
    return sizes


def _holds_little(array: pa.Array) -> bool:
    """Whether the values of a column certainly fit into a chunk."""
    shares_values = pa.types.is_dictionary(array.type) or _is_counted(array.type)
    return not shares_values and array.nbytes < CHUNK_BYTES


def _in_microseconds(kind: pa.DataType) -> pa.DataType:
    """The nested type with times in microseconds, the finest unit of Python's types."""
    if pa.types.is_timestamp(kind) and kind.unit == "ns":
        return pa.timestamp("us", kind.tz)
    make = _maker(kind)
    if make is None:
        return _MICROSECONDS.get(kind, kind)
    fields = (kind.field(index) for index in range(kind.num_fields))
    return make([field.with_type(_in_microseconds(field.type)) for field in fields])


_MICROSECONDS = {pa.duration("ns"): pa.duration("us"), pa.time64("ns"): pa.time64("us")}


def _maker(kind: pa.DataType) -> Callable[[list[pa.Field]], pa.DataType] | None:
    """A function from the fields of a struct, list or map to the type; None for other types."""
    if pa.types.is_struct(kind):
        return partial(pa.struct)
    if pa.types.is_map(kind):
        return lambda fields: pa.map_(*(part.type for part in fields[0].type))
    if pa.types.is_fixed_size_list(kind):
        return lambda fields: pa.list_(fields[0], kind.list_size)
    if pa.types.is_list(kind):
        return lambda fields: pa.list_(fields[0])
    return (lambda fields: pa.large_list(fields[0])) if pa.types.is_large_list(kind) else None
