"""Records that a Python program passes to a build: any iterable of mappings or texts, read once and in order.

They are spooled: each as its length and MessagePack, with the values that the corpus keeps, or its problem.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from tokshard.errors import SourceError, TokshardError, UsageError
from tokshard.forking import decodable
from tokshard.pipeline.sources.chats import CHAT_FIELDS, NO_CHAT, chat_text
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.inputs import RECORDS, Input, RecordSource
from tokshard.pipeline.sources.kept_values import WrongTypeError, is_missing, python_value
from tokshard.pipeline.sources.protocol import Format
from tokshard.pipeline.sources.records import (
    MALFORMED,
    MISSING_TEXT,
    NOT_A_STRING,
    Problem,
    Records,
    RecordSpec,
    admit_rows,
    batches,
    counted,
    text_of,
    typed_columns,
    value_bytes,
)
from tokshard.wording import counted as counted_text

_SHOWN_FIELDS = 8
_LENGTH_BYTES = 8


@decodable
class _Row(msgspec.Struct, array_like=True, frozen=True):
    """A record as it is spooled.

    Args:
        num_bytes: bytes of its text and its kept values as they were given; decides where chunks end.
        text: None if it is bad.
        values: the kept values, each of the type of its column.
        problem: the reason and the detail; the detail and names of fields are bytes, because UTF-8 may not hold them.
        unread: the fields of a conversation that are not read.
    """

    num_bytes: int
    text: str | None
    values: list[str | int | float | bool | None]
    problem: tuple[str, bytes] | None
    unread: list[bytes]


def as_sources(sources: Any) -> list[str | RecordSource]:
    """The sources of a build, from a path, an iterable of records, or a list of those.

    A list or tuple holds sources, so strings in it are paths. Any other iterable yields records, so strings from it are
    texts. A list of mappings is also an iterable of records.

    Raises:
        UsageError: it has another type.
    """
    if isinstance(sources, list | tuple) and not _holds_records(sources):
        return [_as_source(source, f"sources[{number}]") for number, source in enumerate(sources)]
    return [_as_source(sources, "sources")]


def encoded_rows(source: RecordSource, spec: RecordSpec) -> Iterator[bytes]:
    """The records of an iterable as they are spooled.

    Raises:
        SourceError: the iterable or a record raised an exception.
        UsageError: the iterable yields paths.
    """
    encode = msgspec.msgpack.Encoder(enc_hook=str.__str__).encode  # strings of numpy and others become plain ones
    number = 0
    try:
        for record in source.records:
            if isinstance(record, os.PathLike):
                raise UsageError(
                    f"{source.name} gives paths, expected records", hint="give paths in a list: list(paths)"
                )
            row = encode(_row(record, spec))
            number += 1
            yield len(row).to_bytes(_LENGTH_BYTES, "little") + row
    except TokshardError:
        raise
    except Exception as error:
        raise SourceError(
            f"{source.name} failed after {counted_text(number, 'record')}: {type(error).__name__}: {error}",
            hint="fix the iterable, and give it to the same build again, from its start",
        ) from error


def _chunks(input_: Input, _: Span, spec: RecordSpec) -> Iterator[tuple[None, Records]]:
    with open_bytes(input_) as stream:
        yield from counted(_records_of(_rows(stream.read), spec), stream.file_position)


FORMAT = Format(name=RECORDS, read=_chunks)


def _rows(read: Callable[[int], bytes]) -> Iterator[_Row]:
    decode = msgspec.msgpack.Decoder(_Row).decode
    while length := read(_LENGTH_BYTES):
        yield decode(read(int.from_bytes(length, "little")))


def _records_of(rows: Iterable[_Row], spec: RecordSpec) -> Iterator[Records]:
    for held in batches(rows, lambda row: row.num_bytes):
        problems = {place: row.problem for place, row in enumerate(held) if row.problem is not None}
        records = admit_rows(
            spec,
            [row.text for row in held],
            list(zip(*(row.values for row in held), strict=True)),
            {place: (reason, _text(detail)) for place, (reason, detail) in problems.items()},
        )
        for place, row in enumerate(held):
            records.note_unread(place, map(_text, row.unread))
        yield records


def _holds_records(sources: list[Any] | tuple[Any, ...]) -> bool:
    return bool(sources) and isinstance(sources[0], Mapping)


def _as_source(source: Any, place: str) -> str | RecordSource:
    if isinstance(source, str | os.PathLike):
        return os.fsdecode(source)
    kind = type(source).__name__
    hint = "give a path, a list of paths, or an iterable of records: mappings such as {'text': ...}, or strings"
    if isinstance(source, Mapping):
        hint = f"give one of its values, such as {place}[{next(iter(source), '')!r}], or a list of mappings"
    elif isinstance(source, set | frozenset):
        hint = "give a list: the documents follow its order"
    elif isinstance(source, io.IOBase):
        hint = "give the path of the file"
    elif hasattr(source, "iterrows"):  # a pandas data frame, which iterates over its column names
        hint = f'give {place}.to_dict("records")'
    elif hasattr(source, "iter_rows"):  # a data frame of polars, which iterates over its columns
        hint = f"give {place}.iter_rows(named=True)"
    elif hasattr(source, "to_pylist") and not isinstance(source, Iterable):  # a table of pyarrow
        hint = f"give {place}.to_pylist()"
    elif isinstance(source, list | tuple) and not _holds_records(source):
        hint = "give paths in one list, and texts as an iterator: iter(texts)"
    elif isinstance(source, Iterable) and not isinstance(source, bytes | bytearray | memoryview):
        return RecordSource(name=f"<{kind}>", records=source)
    raise UsageError(f"{place} has type {kind}, expected a path or an iterable of records", hint=hint)


def _row(record: Any, spec: RecordSpec) -> _Row:
    unread = _unread(record, spec) if spec.is_chat and isinstance(record, Mapping) else ()
    raw, values, problem = _fields(record, spec)
    text, found = text_of(spec, raw)
    typed, wrong = typed_columns(spec, [[value] for value in values])
    problem = problem or found or wrong.get(0)
    return _Row(
        sum(map(value_bytes, (raw, *values))),
        None if problem else text,
        [value for (value,) in typed],
        problem and (problem[0], _bytes(problem[1])),
        list(map(_bytes, unread)),
    )


def _fields(record: Any, spec: RecordSpec) -> tuple[Any, Sequence[Any], Problem | None]:
    """The text and the kept values of a record, and its problem if it is bad."""
    if isinstance(record, str):
        return record, [None] * len(spec.columns), None
    if not isinstance(record, Mapping):
        kind = type(record).__name__
        problem = MALFORMED, f"the record has type {kind}, expected a mapping or a string"
        return None, [None] * len(spec.columns), problem
    values = [_plain(_lookup(record, path)) for path in spec.kept_paths]
    try:
        text = chat_text(record) if spec.is_chat else _plain(_lookup(record, spec.text_field))
    except (WrongTypeError, RecursionError) as error:
        return None, values, (MALFORMED, f"the conversation cannot be JSON: {error}")
    if isinstance(text, str | bytes):
        return text, values, None
    if text is not None:
        return None, values, (NOT_A_STRING, f"field {spec.text_field!r} is {text!r:.80}")
    names = list(map(str, record))
    shown = ", ".join(names[:_SHOWN_FIELDS]) + (", ..." if len(names) > _SHOWN_FIELDS else "")
    missing = NO_CHAT if spec.is_chat else f"no text in field {spec.text_field!r}"
    return None, values, (MISSING_TEXT, f"{missing}; it has {shown or 'no fields'}")


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _text(saved: bytes) -> str:
    return saved.decode(errors="surrogatepass")


def _unread(record: Mapping[Any, Any], spec: RecordSpec) -> Iterator[str]:
    """The fields of a conversation that hold something and are not read."""
    read = {*CHAT_FIELDS, *spec.kept_paths, *(path.split(".")[0] for path in spec.kept_paths)}
    for name, value in record.items():
        if name not in read and not is_missing(value) and not (isinstance(value, str | list) and not value):
            yield str(name)


def _lookup(record: Mapping[Any, Any], path: str) -> Any:
    """The value at a dotted path, or None. As in a table, a field with exactly that name comes first."""
    if path in record:
        return record[path]
    found: Any = record
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _plain(value: Any) -> Any:
    """A numpy scalar as a Python object; other values unchanged."""
    if isinstance(value, np.float32):  # as in tables: 0.9, not 0.89999998
        return float(str(value))
    return python_value(value) if isinstance(value, np.generic) else value
