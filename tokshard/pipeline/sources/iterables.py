"""Records that a Python program gives to a build: any iterable of mappings or of texts, read once and in order."""

from __future__ import annotations

import io
import os
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from tokshard.errors import SourceError, TokshardError, UsageError
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import Input, RecordSource
from tokshard.pipeline.sources.records import MALFORMED, MISSING_TEXT, NOT_A_STRING, Records, RecordSpec, admit_rows
from tokshard.wording import counted

_RECORDS_PER_CHUNK = 1_024
_SHOWN_FIELDS = 8


def as_sources(sources: Any) -> list[str | RecordSource]:
    """The sources of a build from what a Python program gives: a path, an iterable of records, or a list of such.

    A list or tuple holds sources, so its strings are paths; what else can be iterated gives records, so its strings
    are texts. A list of mappings is records, too.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(sources, list | tuple) and not _holds_records(sources):
        return [_as_source(source, f"sources[{number}]") for number, source in enumerate(sources)]
    return [_as_source(sources, "sources")]


def record_chunks(input_: Input, spec: RecordSpec) -> Iterator[Records]:
    """The records of an iterable, in chunks of at most 1,024 records or about `CHUNK_BYTES` of text.

    Raises:
        SourceError: the iterable raised an exception.
        UsageError: it gives paths.
    """
    given = input_.records
    assert given is not None
    texts: list[Any] = []
    columns: dict[str, list[Any]] = {name: [] for name in spec.columns}
    broken: dict[int, tuple[str, str]] = {}
    num_bytes = 0
    for record in _records(given):
        text, problem = _text(record, spec.text_field)
        if problem is not None:
            broken[len(texts)] = problem
        for name, (path, _) in spec.columns.items():
            columns[name].append(_plain(_lookup(record, path)) if isinstance(record, Mapping) else None)
        texts.append(text)
        num_bytes += len(text or "")
        if num_bytes >= CHUNK_BYTES or len(texts) >= _RECORDS_PER_CHUNK:
            yield admit_rows(spec, texts, columns, input_bytes=num_bytes, broken=broken)
            texts, columns, broken, num_bytes = [], {name: [] for name in spec.columns}, {}, 0
    if texts:
        yield admit_rows(spec, texts, columns, input_bytes=num_bytes, broken=broken)


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
        hint = "give a list: its order is that of the documents"
    elif isinstance(source, io.IOBase):
        hint = "give the path of the file"
    elif hasattr(source, "iterrows"):  # a data frame of pandas, which iterates over the names of its columns
        hint = f'give {place}.to_dict("records")'
    elif isinstance(source, list | tuple) and not _holds_records(source):
        hint = "give paths in one list, and texts as an iterator: iter(texts)"
    elif isinstance(source, Iterable) and not isinstance(source, bytes | bytearray | memoryview):
        return RecordSource(name=f"<{kind}>", records=source)
    raise UsageError(f"{place} has type {kind}, expected a path or an iterable of records", hint=hint)


def _records(given: RecordSource) -> Iterator[Any]:
    number = 0
    try:
        for record in given.records:
            if isinstance(record, os.PathLike):
                raise UsageError(
                    f"{given.name} gives paths, expected records", hint="give paths in a list: list(paths)"
                )
            number += 1
            yield record
    except TokshardError:
        raise
    except Exception as error:
        given.failure = SourceError(
            f"{given.name} failed after {counted(number, 'record')}: {type(error).__name__}: {error}",
            hint="mend what gives the records, and start over with force=True",
        )
        raise given.failure from error


def _text(record: Any, path: str) -> tuple[Any, tuple[str, str] | None]:
    """The text of a record, or reason and detail of why it has none."""
    if isinstance(record, str):
        return record, None
    if not isinstance(record, Mapping):
        return None, (MALFORMED, f"it has type {type(record).__name__}, expected a mapping or a string")
    text = _plain(_lookup(record, path))
    if text is None:
        names = list(map(str, record))
        shown = ", ".join(names[:_SHOWN_FIELDS]) + (", ..." if len(names) > _SHOWN_FIELDS else "")
        return None, (MISSING_TEXT, f"no text in field {path!r}; it has {shown or 'no fields'}")
    if not isinstance(text, str | bytes):
        return None, (NOT_A_STRING, f"field {path!r} is {text!r:.80}")
    return text, None


def _lookup(record: Mapping[Any, Any], path: str) -> Any:
    """The value at a dotted path; a field whose name has the dots comes first, as in a table."""
    if path in record:
        return record[path]
    found: Any = record
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return None
        found = found[name]
    return found


def _plain(value: Any) -> Any:
    """A scalar of numpy as Python has it."""
    return value.item() if isinstance(value, np.generic) else value
