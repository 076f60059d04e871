"""Lines of JSON become texts, or bad records with the reason that a person would give."""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.inputs import build
from tokshard.errors import UsageError
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.kept_values import typed_value
from tokshard.pipeline.sources.records import (
    EMPTY,
    INVALID_UTF8,
    MALFORMED,
    MISSING_TEXT,
    NOT_A_STRING,
    TOO_LONG,
    WRONG_TYPE,
    LineChunk,
    Records,
    RecordSpec,
    admit_rows,
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


def refuse_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity are not JSON


def expected(line: bytes, path: str) -> str | tuple[str]:
    line = line.removeprefix(b"\xef\xbb\xbf")  # a byte order mark is dropped
    if not line.strip():
        return (EMPTY,)
    pairs: list[Any] = []  # also of the keys that a later one replaces
    try:
        found: Any = json.loads(
            line.decode(),
            parse_constant=refuse_constant,
            object_pairs_hook=lambda some: pairs.extend(some) or dict(some),
        )
    except UnicodeDecodeError:
        return (INVALID_UTF8,)
    except (ValueError, RecursionError):
        return (MALFORMED,)
    if any("\ud800" <= c <= "\udfff" for c in json.dumps([found, pairs], ensure_ascii=False)):
        return (INVALID_UTF8,)
    return expected_text(found, path) if isinstance(found, dict) else (MALFORMED,)


def expected_text(found: Any, path: str) -> str | tuple[str]:
    for key in path.split("."):
        found = found.get(key) if isinstance(found, dict) else None
    if not isinstance(found, str):
        return (MISSING_TEXT,) if found is None else (NOT_A_STRING,)
    if len(found.encode()) > MAX_BYTES:
        return (TOO_LONG,)
    return found or (EMPTY,)


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
columns = st.sampled_from([(), ("other",), ("data.body", "other.te:int64")])


def without_wrong_types(line: bytes, path: str, found: str | tuple[str]) -> str | tuple[str]:
    return expected(line, path) if found == (WRONG_TYPE,) else found


@given(lines=st.lists(lines_of_json(), max_size=8), path=paths, ends_in_newline=st.booleans())
def test_every_line_of_json_gives_what_the_stdlib_gives(lines, path, ends_in_newline):
    data = b"\n".join(lines) + (b"\n" if ends_in_newline and lines else b"")
    assert outcomes(parse(data, path)) == [expected(line, path) for line in lines]


@given(lines=st.lists(lines_of_json(), max_size=8), path=paths)
def test_keeping_columns_changes_no_text(lines, path):
    found = outcomes(parse(b"\n".join(lines), path, "other", "data.body:int64"))
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


@given(line=lines_of_json(), position=st.integers(0, 200), damage=st.binary(min_size=1, max_size=3))
def test_a_damaged_line_is_refused_or_reads_the_same_as_in_the_stdlib(line, position, damage):
    damaged = (line[:position] + damage + line[position + len(damage) :]).replace(b"\n", b" ")
    (found,) = outcomes(parse(damaged + b"\n"))
    wanted = expected(damaged, "text")
    if wanted == (INVALID_UTF8,):
        # UTF-8 is not checked in fields that are not asked for; the structure is
        assert found in ((INVALID_UTF8,), (MALFORMED,), expected(damaged.decode(errors="replace").encode(), "text"))
    else:
        assert found == wanted


# what the user reads


def only_bad(data: bytes, *arguments: str) -> tuple[str, str]:
    (bad,) = parse(data, *arguments).bad
    return bad.reason, bad.detail


def first_bad(data: bytes, *arguments: str) -> tuple[str, str]:
    bad = parse(data, *arguments).bad[0]
    return bad.reason, bad.detail


@pytest.mark.parametrize(
    ("line", "reason", "detail"),
    [
        (b'{"text": "abc', MALFORMED, "Input data was truncated: '"),
        (b'{"text": "a"} {"text": "b"}', MALFORMED, "trailing characters"),
        (b'{"text": "a",}', MALFORMED, "JSON is malformed"),
        (b"['a']", MALFORMED, "Expected `object`, got `array`"),
        (b'"just a string"', MALFORMED, "Expected `object`, got `str`"),
        (b'{"text": NaN}', MALFORMED, "JSON does not allow NaN, which Python's json module writes"),
        (b'{"score": NaN, "text": "a"}', MALFORMED, "JSON does not allow NaN, which Python's json module writes"),
        (b'{"score": -Infinity, "text": "a"}', MALFORMED, "JSON does not allow -Infinity"),
        (b'{"score": NaN, "text": "a",}', MALFORMED, "JSON is malformed: invalid character"),
        (b'[{"text": "a"}]', MALFORMED, "expected JSON lines, one object per line: jq -c '.[]' converts an array"),
        (b'{\n  "text": "a" }', MALFORMED, "expected JSON lines, one object per line: jq -c . converts other"),
        (gzip.compress(b"a", mtime=0)[:9], MALFORMED, "this looks like gzip; give the file a name that ends in .gz"),
        (b"\x28\xb5\x2f\xfd\x04", MALFORMED, "this looks like zstd; give the file a name that ends in .zst"),
        ('{"text": "a"}'.encode("utf-16"), MALFORMED, "this looks like UTF-16; save the file as UTF-8"),
        ('{"text": "a"}'.encode("utf-16-le"), MALFORMED, "this looks like UTF-16; save the file as UTF-8"),
        ('{"text": "a"}'.encode("utf-16-be"), MALFORMED, "this looks like UTF-16; save the file as UTF-8"),
        ('{"text": "a"}'.encode("utf-32-le"), MALFORMED, "this looks like UTF-32; save the file as UTF-8"),
        (bytes(4_096), MALFORMED, "these are NUL bytes: the file was cut off or preallocated when its machine stopped"),
        (bytes(9) + b'{"text": "a"}', MALFORMED, "these are NUL bytes"),
        (b'{"text": "a' + bytes(2), MALFORMED, "these are NUL bytes"),
        (b'{"text": "a\x01b"}', MALFORMED, "invalid character"),
        (b'{"a": ' + b"[" * 1_000_000 + b"]" * 1_000_000 + b', "text": "a"}', MALFORMED, "nested too deeply"),
        (b'{"text": "a\xffb"}', INVALID_UTF8, "can't decode byte 0xff in position 1"),
        (b'{"text": "\\ud83d alone"}', INVALID_UTF8, "the JSON escapes a lone surrogate"),
        (b'{"text": "\\uDE00 alone"}', INVALID_UTF8, "the JSON escapes a lone surrogate"),
        (b'{"text": "\\ud83d\\u0041"}', INVALID_UTF8, "the JSON escapes a lone surrogate"),
        (b'{"title": "\\ud83d", "text": "a"}', INVALID_UTF8, "the JSON escapes a lone surrogate"),
        (b'{"body": "a"}', MISSING_TEXT, "no field 'text'"),
        (b"{}", MISSING_TEXT, "no field 'text'"),
        (b'{"text": null}', MISSING_TEXT, "field 'text' is null"),
        (b'{"url": 1, "bo\\u001bdy": 2}', MISSING_TEXT, r"no field 'text'; it has: url, 'bo\x1bdy'"),
        (b"{%s}" % b", ".join(b'"%d": 1' % n for n in range(40)), MISSING_TEXT, ", 9, 10, 11, ..."),
        (b'{"messages": []}', MISSING_TEXT, "it has messages: make tokens of conversations with --chat"),
        (b'{"text": 17}', NOT_A_STRING, "field 'text' is 17"),
        (b'{"text": {"body": "a"}}', NOT_A_STRING, """field 'text' is {"body": "a"}"""),
        (b'{"text": ["a"]}', NOT_A_STRING, """field 'text' is ["a"]"""),
        (b'{"text": "a", "text": false}', NOT_A_STRING, "field 'text' is false"),
        (b'{"text": "%s"}' % (b"x" * 61), TOO_LONG, "text has 61 bytes, at most 60 are allowed"),
    ],
)  # fmt: skip
def test_a_bad_line_is_explained(line, reason, detail):
    for keep in ((), ("other",)):
        found, explanation = first_bad(line + b"\n", "text", *keep)
        assert found == reason
        assert detail in explanation
        assert len(explanation) < 300


@pytest.mark.parametrize("keep", [(), ("n",)])
def test_byte_order_marks_of_joined_files_are_dropped_and_counted(keep):
    records = parse(
        b'\xef\xbb\xbf{"text": "a"}\n{"text": "\xef\xbb\xbfb"}\n\xef\xbb\xbf\n\xef\xbb\xbf{\n', "text", *keep
    )
    assert (records.texts, records.num_empty, records.num_marks) == (["a", "\ufeffb"], 1, 3)
    assert [bad.position for bad in records.bad] == [3]


def test_a_field_with_a_dot_in_its_name_goes_before_a_nested_one():
    lines = b'{"a.b": "whole"}\n{"a": {"b": "nested"}}\n{"a": {"b": "nested"}, "a.b": "whole"}\n'
    assert parse(lines, "a.b").texts == ["whole", "nested", "whole"]
    kept = parse(lines.replace(b"}\n", b', "t": "x"}\n'), "t", "a.b")
    assert kept.columns == {"a.b": ["whole", "nested", "whole"]}


def test_the_kept_fields_that_some_record_has_are_known():
    lines = b'{"text": "a", "n": null, "b": {"x": 1}}\n{"text": "b", "m": 1}\n'
    assert parse(lines, "text", "n", "m", "b.x", "b.y", "k").fields == {"n", "m", "b.x"}


@pytest.mark.parametrize("name", ['a"b', "a\\b", "a\nb", "a\x00", "a\udcff"])
def test_a_name_of_a_field_that_json_would_escape_is_refused(name, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "a"}')
    for arguments in ({"text_field": name}, {"keep_field": [name]}, {"id_field": name}):
        with pytest.raises(UsageError, match=r"the field name .* (has a quote, backslash or control|is not UTF-8)"):
            build(tmp_path / "a.jsonl", tmp_path / "out", **arguments)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        ("bool", "True", True),
        ("bool", "FALSE", False),
        ("int64", "007", 7),
        ("int64", "+5", 5),
        ("float64", "nan", "nan"),
        ("float64", "-inf", -math.inf),
        ("float64", ".5", 0.5),
    ],
)
def test_a_kept_value_of_csv_is_read_as_other_programs_write_it(kind, text, value):
    found = typed_value(text, kind)
    assert (str(found) if text == "nan" else found) == value


def test_a_pair_of_escaped_surrogates_is_one_character():
    assert parse(rb'{"text": "\ud83d\ude00"}').texts == ["😀"]


def test_the_last_of_two_equal_keys_counts():
    assert parse(b'{"text": 5, "text": "a"}').texts == ["a"]
    assert parse(b'{"data": 5, "data": {"body": "a"}}', "data.body").texts == ["a"]
    assert only_bad(b'{"data": {"body": "a"}, "data": {}}', "data.body")[0] == MISSING_TEXT


def test_lines_of_white_space_are_empty_records_and_are_counted_as_lines():
    records = parse(b'\n  \r\n{"text": "a"}\r\n\t\n{"text": "\xff"}')
    assert outcomes(records) == [(EMPTY,), (EMPTY,), "a", (EMPTY,), (INVALID_UTF8,)]


def test_a_line_too_long_to_be_held_is_the_last_record_of_its_chunk():
    chunk = LineChunk(b'{"text": "a"}\n', 99_000_000, 99_000_014)
    records = JsonLinesParser(spec_of())(chunk)
    (bad,) = records.bad
    assert outcomes(records) == ["a", (TOO_LONG,)]
    assert bad.detail == "line has 99,000,000 bytes, at most 1,049,056 are allowed"


def test_the_byte_limit_counts_bytes_of_utf8_and_admits_the_limit_itself():
    texts = ["é" * 30, "é" * 30 + "x", "x" * 60, "😀" * 15, "😀" * 16]
    lines = b"\n".join(json.dumps({"text": text}).encode() for text in texts)
    assert outcomes(parse(lines)) == ["é" * 30, (TOO_LONG,), "x" * 60, "😀" * 15, (TOO_LONG,)]


# kept columns


@pytest.mark.parametrize(
    ("kind", "json_value", "value"),
    [
        ("string", '"a é"', "a é"), ("string", "null", None), ("string", "17", "17"), ("string", "1.50", "1.50"),
        ("string", "true", "true"), ("string", '{"a": [1]}', '{"a": [1]}'), ("string", '""', ""),
        ("int64", "17", 17), ("int64", "-9223372036854775808", -(1 << 63)), ("int64", "null", None),
        ("float64", "1.5", 1.5), ("float64", "17", 17.0), ("float64", "1e3", 1000.0), ("float64", "null", None),
        ("bool", "true", True), ("bool", "false", False), ("bool", "null", None),
    ],
)  # fmt: skip
def test_a_kept_field_of_json_lines_has_the_type_that_was_asked_for(kind, json_value, value):
    line = f'{{"k": {json_value}, "text": "t"}}'.encode()
    found = parse(line, "text", f"k:{kind}").columns["k"]
    assert found == [value]
    assert type(found[0]) is type(value)


@pytest.mark.parametrize(
    ("kind", "json_value"),
    [
        ("int64", '"17"'), ("int64", "17.0"), ("int64", "true"), ("int64", "9223372036854775808"), ("int64", "[]"),
        ("int64", '"x"'), ("float64", '"x"'), ("float64", "true"), ("float64", "1e999"), ("float64", "{}"),
        ("bool", "1"), ("bool", '"true"'), ("bool", "[true]"),
    ],
)  # fmt: skip
def test_a_kept_field_of_another_type_is_a_bad_record_that_shows_it(kind, json_value):
    reason, detail = only_bad(f'{{"k": {json_value}, "text": "t"}}'.encode(), "text", f"k:{kind}")
    assert reason == WRONG_TYPE
    assert detail == f"field 'k' is {json_value}, not {kind}"


def test_a_kept_string_that_is_not_utf_8_is_named_as_that():
    assert only_bad(b'{"k": "\xff", "text": "t"}', "text", "k")[0] == INVALID_UTF8
    assert only_bad(rb'{"k": "\udc00", "text": "t"}', "text", "k")[0] == INVALID_UTF8


def test_a_kept_field_may_be_missing_nested_or_the_text_itself():
    line = b'{"meta": {"url": "u", "n": 3}, "text": "t"}\n{"text": "s", "meta": 5}\n'
    records = parse(line, "text", "meta.url", "meta.n:int64", "text", "nowhere")
    assert records.columns == {
        "meta.url": ["u", None],
        "meta.n": [3, None],
        "text": ["t", "s"],
        "nowhere": [None, None],
    }


@pytest.mark.parametrize(
    ("kind", "value", "kept"),
    [
        ("string", "a", "a"), ("string", b"a\xc3\xa9", "aé"), ("string", 17, "17"), ("string", 1.5, "1.5"),
        ("string", True, "true"),
        ("string", {"a": [True, None]}, '{"a": [true, null]}'), ("string", None, None), ("string", "", ""),
        ("int64", 17, 17), ("int64", "17", 17), ("int64", " 17 ", 17), ("int64", b"17", 17), ("int64", None, None),
        ("float64", 1.5, 1.5), ("float64", 17, 17.0), ("float64", "1.5", 1.5), ("float64", "17", 17.0),
        ("bool", True, True), ("bool", "false", False),
    ],
)  # fmt: skip
def test_a_kept_value_of_a_table_or_csv_has_the_type_that_was_asked_for(kind, value, kept):
    records = admit_rows(spec_of("text", f"k:{kind}"), ["t"], [[value]])
    assert (records.columns["k"], records.bad) == ([kept], [])
    assert type(records.columns["k"][0]) is type(kept)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("int64", "x"), ("int64", ""), ("int64", "1.5"), ("int64", 1.5), ("int64", True), ("int64", 1 << 63),
        ("int64", [1]),
        ("float64", "x"), ("float64", "1e999"), ("float64", True), ("bool", 1), ("bool", "yes"),
    ],
)  # fmt: skip
def test_a_kept_value_of_another_type_is_a_bad_record(kind, value):
    records = admit_rows(spec_of("text", f"k:{kind}"), ["t", "u"], [[value, None]])
    assert outcomes(records) == [(WRONG_TYPE,), "u"]
    assert records.columns == {"k": [None]}
    assert records.bad[0].detail == f"field 'k' is {value!r}, not {kind}"


rows = st.lists(st.one_of(st.none(), strings, st.binary(max_size=6)), max_size=12)


@given(texts=rows)
def test_rows_of_a_table_follow_the_rules_of_lines(texts: Sequence[str | bytes | None]):
    def rule(text: str | bytes | None) -> str | tuple[str]:
        if text is None:
            return (MISSING_TEXT,)
        try:
            text = text.decode() if isinstance(text, bytes) else text.encode().decode()
        except UnicodeError:
            return (INVALID_UTF8,)
        if len(text.encode()) > MAX_BYTES:
            return (TOO_LONG,)
        return text or (EMPTY,)

    records = admit_rows(spec_of("text", "k:int64"), texts, [range(len(texts))])
    assert outcomes(records) == [rule(text) for text in texts]
    assert records.columns["k"] == records.positions


def test_columns_are_named_by_their_path_and_the_id_field_by_id():
    assert parse_columns("meta.key", ["url", "score:float64", "a.b:bool"]) == {
        "id": ("meta.key", "string"),
        "url": ("url", "string"),
        "score": ("score", "float64"),
        "a.b": ("a.b", "bool"),
    }


@pytest.mark.parametrize(
    ("id_field", "keep", "problem"),
    [
        (None, ["url", "url:string"], "column 'url' is kept twice"),
        ("key", ["id"], "column 'id' is kept twice"),
        (None, ["url:text"], "url: unknown type 'text', expected one of string, int64, float64, bool"),
        (None, [":int64"], "the name of a kept field is empty"),
        (None, ["tokens"], "a kept column cannot be called 'tokens': that is the column of token ids"),
    ],
)
def test_columns_that_cannot_be_are_refused(id_field, keep, problem):
    with pytest.raises(ValueError, match=problem):
        parse_columns(id_field, keep)


SEPARATORS = st.sampled_from(["\n", "\n", "\n", " ", ",", "", "\r\n", "\n\n", "},\n{", "}\n{"])
FRAGMENTS = st.sampled_from(
    [
        '{"text": "a"}',
        '{"text": "b", "x": [{}',
        '{"text": "c"',
        '"x": 1}',
        "{}]}",
        "{}",
        '{"text": "}"}',
        '{"text": ""}',
    ]
)


@given(parts=st.lists(st.tuples(FRAGMENTS, SEPARATORS), min_size=1, max_size=8), keep=st.booleans())
def test_a_line_holds_one_record_however_objects_and_lines_fall(parts, keep):
    """All lines are parsed in one call where each holds one object; no object may span two, and no line hold two."""
    data = "".join(fragment + separator for fragment, separator in parts).encode()
    whole = parse(data, "text", *(["x"] if keep else []))
    lines = data.split(b"\n")[:-1] if data.endswith(b"\n") else data.split(b"\n")
    # a space in front keeps a line from being parsed in one call with others
    one_by_one = [parse(b" " + line, "text", *(["x"] if keep else [])) for line in lines]
    assert outcomes(whole) == [outcome for records in one_by_one for outcome in outcomes(records)]
    assert whole.columns.get("x", []) == [value for records in one_by_one for value in records.columns.get("x", [])]


def test_two_objects_on_a_line_and_one_on_two_do_not_make_up_for_each_other():
    data = b'{"text": "a"}{"text": "b"}\n{"text": "c", "x": [{}\n,{}]}\n'
    assert outcomes(parse(data)) == [(MALFORMED,)] * 3
