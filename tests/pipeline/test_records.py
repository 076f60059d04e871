"""Lines of JSON become texts, or bad records with the reason that a person would give."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from tests.spec import builder
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.records import (
    EMPTY,
    WRONG_TYPE,
    LineChunk,
    Records,
    RecordSpec,
    parse_columns,
)

MAX_BYTES = 60


def spec_of(text_field: str = "text", *keep: str, max_document_bytes: int = MAX_BYTES) -> RecordSpec:
    return RecordSpec(text_field=text_field, columns=parse_columns(None, keep), max_document_bytes=max_document_bytes)


def parse(data: bytes, text_field: str = "text", *keep: str, **options: Any) -> Records:
    return JsonLinesParser(spec_of(text_field, *keep, **options))(LineChunk(data, 0, len(data)))


def outcomes(records: Records) -> list[str | tuple[str]]:
    """Per record its text, or a tuple of the reason why there is none."""
    result: list[str | tuple[str]] = [(EMPTY,)] * records.count
    for position, text in zip(records.positions, records.texts, strict=True):
        result[position] = text
    for bad in records.bad:
        result[bad.position] = (bad.reason,)
    assert result.count((EMPTY,)) == records.num_empty
    assert records.count == len(records.texts) + len(records.bad) + records.num_empty
    assert records.positions == sorted(records.positions)
    assert [bad.position for bad in records.bad] == sorted(bad.position for bad in records.bad)
    return result


# the model: what the stdlib makes of a line


def expected(line: bytes, path: str) -> str | tuple[str]:
    said = builder.Options(encode=list, eos=0, text_field=path, max_document_bytes=MAX_BYTES)
    record = builder.record_of_line(1, line.removeprefix(builder.MARK), said)
    return (record.problem,) if record.problem else record.text


keys = st.sampled_from(["text", "data", "body", "other", "", "te", "text.body", "tëxt"])
strings = st.one_of(
    st.text(max_size=8),
    st.sampled_from(
        ["", "é" * 29, "é" * 30, "é" * 31, "x" * 60, "x" * 61, "\ud800", "a\udc00b", "\x00\x1f\x7f", '\\"/']
    ),
)
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), strings)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.lists(st.tuples(keys, inner), max_size=4), max_leaves=8
)
objects = st.lists(st.tuples(keys, values), max_size=5)


def spell(value: Any, ascii_only: bool, space: str) -> str:
    """JSON of a value in which an object is a list of pairs, so that a key can come twice."""
    if isinstance(value, list) and value and all(isinstance(item, tuple) for item in value):
        inner = f"{space},{space}".join(
            f"{spell(k, ascii_only, space)}{space}:{space}{spell(v, ascii_only, space)}" for k, v in value
        )
        return f"{{{space}{inner}{space}}}"
    if isinstance(value, list):
        return "[" + ",".join(spell(item, ascii_only, space) for item in value) + "]"
    is_whole = isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)
    return json.dumps(value, ensure_ascii=ascii_only or not is_whole)


@st.composite
def lines_of_json(draw: st.DrawFn) -> bytes:
    pairs = draw(objects)
    spelled = spell(pairs, draw(st.booleans()), draw(st.sampled_from(["", " ", "\t \r"]))) if pairs else "{}"
    return spelled.encode()


paths = st.sampled_from(["text", "data.body", "data.data.text", "tëxt"])


def without_wrong_types(line: bytes, path: str, found: str | tuple[str]) -> str | tuple[str]:
    return expected(line, path) if found == (WRONG_TYPE,) else found


@example([rb'{"text":"\ud800","text":null}'], "text", False)
@given(lines=st.lists(lines_of_json(), max_size=8), path=paths, ends_in_newline=st.booleans())
def test_every_line_of_json_gives_what_the_stdlib_gives_with_and_without_kept_columns(lines, path, ends_in_newline):
    data = b"\n".join(lines) + (b"\n" if ends_in_newline and lines else b"")
    assert outcomes(parse(data, path)) == [expected(line, path) for line in lines]
    found = outcomes(parse(data, path, "other", "data.body:int64"))
    assert [without_wrong_types(line, path, one) for line, one in zip(lines, found, strict=True)] == [
        expected(line, path) for line in lines
    ]


symbols = rb"""{ } [ ] : , "text" "a" " \ \u00e9 \ud800 \udc00 1 - 01 1. 1e5 null true NaN Infinity nul /**/ '"""
fragments = st.sampled_from([*symbols.split(), b" ", b"\t", b"\r", b"\x00", b"\x0b", b"\xc3\xa9", b"\xef\xbb\xbf"])


@given(
    start=st.sampled_from([b"", b'{"text": "a"', b'{"text": ', b'{"b": [1, ']), middle=st.lists(fragments, max_size=8)
)
def test_a_line_is_malformed_exactly_where_the_stdlib_says_so(start, middle):
    line = start + b"".join(middle)
    assert outcomes(parse(line + b"\n")) == [expected(line, "text")]
    assert outcomes(parse(line + b"\n", "text", "b:string")) == [expected(line, "text")]


SEPARATORS = st.sampled_from(["\n", "\n", "\n", " ", ",", "", "\r\n", "\n\n", "},\n{", "}\n{"])
OBJECTS = ['{"text": "a"}', '{"text": "b", "x": [{}', '{"text": "c"', '"x": 1}', "{}]}", "{}", '{"text": "}"}']


@given(parts=st.lists(st.tuples(st.sampled_from(OBJECTS), SEPARATORS), min_size=1, max_size=8), keep=st.booleans())
def test_a_line_holds_one_record_however_objects_and_lines_fall(parts, keep):
    """All lines are parsed in one call where each holds one object; no object may span two, and no line hold two."""
    data, columns = "".join(fragment + separator for fragment, separator in parts).encode(), ["x"] * keep
    whole = parse(data, "text", *columns)
    lines = data.removesuffix(b"\n").split(b"\n")
    # a space in front keeps a line from being parsed in one call with others
    one_by_one = [parse(b" " + line, "text", *columns) for line in lines]
    assert outcomes(whole) == [outcome for records in one_by_one for outcome in outcomes(records)]
    assert whole.columns.get("x", []) == [value for records in one_by_one for value in records.columns.get("x", [])]
