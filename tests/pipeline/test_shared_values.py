"""Arrow columns in which rows share values: counted before they are decoded, so that memory follows the file."""

from __future__ import annotations

import json
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.inputs import arrow_bytes, build, texts_of
from tokshard import build_corpus
from tokshard.errors import UsageError
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import CHUNK_BYTES, Span
from tokshard.pipeline.sources.formats import read_span
from tokshard.pipeline.sources.records import Records, RecordSpec

VALUE = "x" * 200_000
ROWS = 300
needs_views = pytest.mark.skipif(
    int(pa.__version__.split(".")[0]) < 18, reason="pyarrow 17 cannot write views of one value"
)


def dictionary(count: int = ROWS) -> pa.Array:
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([VALUE]))


def views(count: int = ROWS) -> pa.Array:
    view = struct.pack("<i4sii", len(VALUE), VALUE[:4].encode(), 0, 0)
    buffers = [None, pa.py_buffer(view * count), pa.py_buffer(VALUE.encode())]
    return pa.Array.from_buffers(pa.string_view(), count, buffers)


def one_each(values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(range(len(values) + 1), pa.int32()), values)


SHARED: dict[str, Callable[[], pa.Array]] = {
    "dictionary": dictionary,
    "views": views,
    "dictionary of views": lambda: pa.DictionaryArray.from_arrays(pa.array(range(ROWS), pa.int32()), views()),
}


def written(columns: dict[str, pa.Array], directory: Path) -> Path:
    path = directory / "a.arrow"
    path.write_bytes(arrow_bytes(pa.table(columns)))
    return path


def parts_of(path: Path, look: Callable[[Records], Any] = lambda part: part) -> tuple[list[Any], int]:
    """What is seen in each part of a table, and the most memory that reading them takes."""
    (input_,) = discover([str(path)], input_format=None).inputs
    spec = RecordSpec(text_field="text", columns={"k": ("k", "string")}, max_document_bytes=1 << 20)
    tracemalloc.start()
    try:
        return [look(part) for part in read_span(input_, Span(), spec)], tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("column", ["k", "text"])
@pytest.mark.parametrize("what", [pytest.param(what, marks=needs_views if "view" in what else []) for what in SHARED])
def test_rows_that_share_a_long_value_come_in_small_chunks(what, column, tmp_path):
    path = written({"text": pa.array(["t"] * ROWS), "k": pa.array(["v"] * ROWS), column: SHARED[what]()}, tmp_path)
    assert path.stat().st_size < 300_000

    def look(part: Records) -> tuple[int, int, int]:
        values = part.columns["k"] if column == "k" else part.texts
        assert all(VALUE in value for value in values)
        return part.count, sum(map(len, values)), part.input_bytes

    sizes, peak = parts_of(path, look)
    counts, chunks, input_bytes = zip(*sizes, strict=True)
    assert (sum(counts), peak < 6 << 20) == (ROWS, True)
    assert max(chunks) <= CHUNK_BYTES + 2 * len(VALUE) + 100
    assert 0 <= path.stat().st_size - sum(input_bytes) < path.stat().st_size // 2


@needs_views
def test_a_row_whose_shared_value_is_too_long_is_a_bad_record_and_never_decoded(tmp_path):
    long = "y" * 10_000_000
    view = struct.pack("<i4sii", len(long), long[:4].encode(), 0, 0)
    inline = struct.pack("<i12s", 1, b"z")
    buffers = [None, pa.py_buffer(inline + view + inline), pa.py_buffer(long.encode())]
    column = pa.Array.from_buffers(pa.string_view(), 3, buffers)
    parts, peak = parts_of(written({"text": pa.array(["a", "b", "c"]), "k": column}, tmp_path))
    assert peak < 6 << 20
    assert [text for part in parts for text in part.texts] == ["a", "c"]
    assert [value for part in parts for value in part.columns["k"]] == ["z", "z"]
    (bad,) = [bad for part in parts for bad in part.bad]
    said = "values take 10,000,000 bytes, at most 9,437,184 are allowed"
    assert (bad.reason, bad.detail) == ("over max-document-bytes", said)


def test_a_list_of_very_many_nulls_is_a_bad_record(tmp_path):
    count = (1 << 31) - 1
    lists = pa.ListArray.from_arrays(pa.array([0, 2, count], pa.int32()), pa.nulls(count))
    path = written({"text": pa.array(["a", "b"]), "k": lists}, tmp_path)
    corpus = build(path, tmp_path / "out", keep_field=["k"], on_bad_record="skip")
    assert texts_of(corpus) == ["a"]
    assert corpus.metadata(0) == {"k": "[null, null]"}
    assert corpus.manifest.records.left_out == {"over max-document-bytes": 1}


@needs_views
def test_a_dictionary_of_views_is_read_as_text_and_as_a_kept_value(tmp_path):
    values = pa.array(["a", None, "long enough to be no inline view", "b"], pa.string_view())
    column = pa.DictionaryArray.from_arrays(pa.array([2, 0, None, 1, 2]), values)
    path = written({"text": column, "k": column}, tmp_path)
    corpus = build(path, tmp_path / "out", keep_field=["k"], on_bad_record="skip")
    assert texts_of(corpus) == [values[2].as_py(), "a", values[2].as_py()]
    assert corpus.metadata(1) == {"k": "a"}
    assert corpus.manifest.records.left_out == {"missing text": 2}


RUNS = pa.RunEndEncodedArray.from_arrays(pa.array([3], pa.int32()), pa.array(["v"]))
UNION = pa.UnionArray.from_dense(pa.array([0] * 3, pa.int8()), pa.array([0] * 3, pa.int32()), [pa.array(["v"])])
UNCOUNTABLE: dict[str, Callable[[], pa.Array]] = {
    "runs": lambda: RUNS,
    "union": lambda: UNION,
    "struct of a union": lambda: pa.StructArray.from_arrays([UNION], ["u"]),
    "struct of a dictionary": lambda: pa.StructArray.from_arrays([dictionary(3)], ["a"]),
    "list of a dictionary": lambda: one_each(dictionary(3)),
    "map to a dictionary": lambda: pa.MapArray.from_arrays(
        pa.array(range(4), pa.int32()), pa.array(["k"] * 3), dictionary(3)
    ),
    "lists of one size of structs of a dictionary": lambda: pa.FixedSizeListArray.from_arrays(
        pa.StructArray.from_arrays([dictionary(6)], ["a"]), 2
    ),
    "list of views": lambda: one_each(views(3)),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", [pytest.param(w, marks=needs_views if "view" in w else []) for w in UNCOUNTABLE])
def test_a_kept_column_in_which_values_can_be_shared_without_bound_is_refused(what, tmp_path):
    path = written({"text": pa.array(["a", "b", "c"]), "k": UNCOUNTABLE[what]()}, tmp_path)
    with pytest.raises(UsageError, match=r"field 'k' has type .*, which a build cannot read") as caught:
        build(path, tmp_path / "out", keep_field=["k"])
    assert "cast it to strings, numbers, or lists or structs of those" in caught.value.hint
    assert build_corpus(path, out=tmp_path / "out", tokenizer=str(tmp_path / ".tokenizer"), workers=1)


scalars = st.sampled_from(
    [pa.string(), pa.large_string(), pa.binary(), pa.int32(), pa.bool_(), pa.null(), pa.decimal128(9, 2), pa.date32()]
)
types = st.recursive(
    scalars,
    lambda inner: (
        inner.map(pa.list_)
        | inner.map(pa.large_list)
        | inner.map(lambda kind: pa.list_(kind, 2))
        | inner.map(lambda kind: pa.map_(pa.string(), kind))
        | st.lists(inner, max_size=3).map(lambda kinds: pa.struct([(f"f{i}", kind) for i, kind in enumerate(kinds)]))
    ),
    max_leaves=5,
).filter(pa.types.is_nested)


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    if pa.types.is_struct(kind):
        return st.none() | st.fixed_dictionaries({field.name: values_of(field.type) for field in kind})
    if pa.types.is_map(kind):
        return st.none() | st.lists(st.tuples(st.sampled_from("ab"), values_of(kind.item_type)), max_size=4)
    if pa.types.is_fixed_size_list(kind):
        return st.none() | st.lists(values_of(kind.value_type), min_size=2, max_size=2)
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return st.none() | st.lists(values_of(kind.value_type), max_size=4)
    if "string" in str(kind) or "binary" in str(kind):
        texts = st.text(st.characters(codec="ascii"), max_size=30)
        return st.none() | (texts.map(str.encode) if "binary" in str(kind) else texts)
    return st.none()


def as_json(value: Any) -> str:
    """As a kept column has it: bytes are text."""
    return json.dumps(
        value, ensure_ascii=False, default=lambda one: one.decode() if isinstance(one, bytes) else str(one)
    )


def least_bytes(value: Any) -> int:
    """Bytes of the strings in a value, and 64 for each value inside of a list or struct."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list | tuple):
        return sum(64 + least_bytes(inner) for inner in value)
    return len(value) if isinstance(value, str | bytes) else 0


@given(data=st.data(), kind=types)
def test_no_more_nested_values_are_decoded_at_once_than_one_row_or_a_chunk_of_them(data, kind, tmp_path_factory):
    rows = data.draw(st.lists(values_of(kind), min_size=1, max_size=12))
    try:
        array = pa.array([None, *rows, None], kind).slice(1, len(rows))
        path = written({"text": pa.array(["t"] * len(rows)), "k": array}, tmp_path_factory.mktemp("nested"))
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return  # not every version makes every array of these types
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tokshard.pipeline.sources.columns.CHUNK_BYTES", 200)
        parts, _ = parts_of(path)
    assert sum(part.count for part in parts) == len(rows)
    found = [value for part in parts for value in part.columns["k"]]
    assert found == [None if row is None else as_json(row) for row in array.to_pylist()]
    start = 0
    for part in parts:
        assert part.count == 1 or sum(map(least_bytes, rows[start : start + part.count])) <= 200
        start += part.count
