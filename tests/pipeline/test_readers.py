"""Every format gives the same documents in the same order, however its input is cut."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipeline.inputs import (
    COMPRESSIONS,
    FORMATS,
    TABLES,
    arrow_stream_bytes,
    build,
    csv_bytes,
    jsonl,
    patch_chunk_bytes,
    table,
    texts_of,
)
from tokshard import Corpus
from tokshard.errors import BadRecordError
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import INDIVISIBLE, LINES, Divisibility, Span
from tokshard.pipeline.sources.formats import read_stream
from tokshard.pipeline.sources.records import TOO_LONG, RecordSpec, parse_columns
from tokshard.pipeline.tasks import planning as tasks
from tokshard.pipeline.tasks.planning import plan_tasks

TEXTS = [
    *(f"document {number}: def f(x):\n    return {number} * x\n" for number in range(12)),
    'He said "no", twice; ""',
    "comma, separated, words",
    "two\r\nlines\rand a half\n",
    "Größe, résumé, 数据, עברית, 🙂👩‍👩‍👧",
    "null\x00byte and \x1f",
    " spaces around ",
    "long " * 20,
    "x",
    *(f"{number}" for number in range(12)),
]
RECORDS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]


LONG = "x" * 300


def record_numbers(corpus: Corpus) -> list[int]:
    return [corpus.provenance(index).record for index in range(len(corpus))]


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=examples(14))
@given(less=st.integers(0, 244), chunks_per_task=st.integers(1, 4), size=st.sampled_from([5, 1, 2, 9]))
def test_every_record_of_every_format_is_a_document_or_left_out_under_its_number_wherever_it_is_cut(
    name, less, chunks_per_task, size, tmp_path_factory
):
    tmp_path, chunk_bytes = tmp_path_factory.mktemp("cut"), 256 - less
    path = tmp_path / name
    records = [dict(record) for record in RECORDS]
    empty, long = range(1, len(TEXTS), 5), (3, 13, 25)
    for numbers, text in ((empty, ""), (long, LONG)):
        for number in numbers:
            records[number]["text"] = text
    kept = [number for number in range(len(TEXTS)) if number not in (*empty, *long)]
    path.write_bytes(FORMATS[name](records, size))
    options = {"shard_tokens": 300, "keep_field": ["n:int64", "text"], "max_document_bytes": 200}
    options["task_bytes"] = chunk_bytes * chunks_per_task
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, chunk_bytes)
        with pytest.raises(BadRecordError, match=rf"{name}, (line|record) 4: over max-document-bytes"):
            build(path, tmp_path / "out", **options)
        corpus = build(path, tmp_path / "out", on_bad_record="skip", **options)
    assert texts_of(corpus) == [TEXTS[number] for number in kept]
    assert record_numbers(corpus) == [number + 1 for number in kept]
    metadata = [corpus.metadata(index) for index in range(len(corpus))]
    assert metadata == [{"n": number, "text": TEXTS[number]} for number in kept]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["source"], reject["record"]) for reject in rejects] == [(name, number + 1) for number in long]
    (source,) = corpus.sources()
    assert (source.records_read, source.documents) == (len(TEXTS), len(kept))
    assert source.left_out == {"empty": len(empty), "over max-document-bytes": len(long)}
    assert (source.num_bytes, source.text_bytes) == (path.stat().st_size, sum(map(bytes_of, texts_of(corpus))))
    assert num_tasks(corpus) > 2 or options["task_bytes"] > 256


def bytes_of(text: str) -> int:
    return len(text.encode())


def num_tasks(corpus: Corpus) -> int:
    """Tasks and segments that wrote a shard."""
    return len({shard.name.rpartition("-")[0] for shard in corpus.shards})


@pytest.mark.parametrize("line_bytes", [31, 32, 33])
def test_lines_that_start_or_end_where_a_task_does_are_read_once(line_bytes, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    documents = [f"{number:02d}".ljust(line_bytes - len('{"text": ""}\n'), ".") for number in range(20)]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": text} for text in documents]))
    corpus = build(tmp_path / "a.jsonl", tmp_path / "out", task_bytes=64)
    assert texts_of(corpus) == documents
    # a line belongs to the task in which it begins
    assert num_tasks(corpus) == len({number * line_bytes // 64 for number in range(20)})


ROWS = [{"text": "a", "n": "x" * 2_000}] * 500
SEGMENTED: dict[str, tuple[list[str], str, bytes]] = {
    "kept values of csv": (["n"], "a.csv", csv_bytes(ROWS)),
    "bad records of csv": ([], "a.csv", b"text,n\n" + b"a\n" * 8_000),
    "empty records of csv": ([], "a.csv", b"text,n\n" + b'"",\n' * 8_000),
    "kept values of Arrow": (["n"], "a.arrow", arrow_stream_bytes(table(ROWS), 20)),
    "empty records of Arrow": ([], "a.arrow", arrow_stream_bytes(table([{**row, "text": ""} for row in ROWS]), 20)),
}


@pytest.mark.parametrize("what", SEGMENTED)
def test_a_segment_of_a_stream_ends_by_all_that_a_worker_would_hold(what, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 14)
    keep, name, content = SEGMENTED[what]
    (tmp_path / name).write_bytes(content)
    (source,) = discover([str(tmp_path / name)], input_format=None).inputs
    spec = RecordSpec(text_field="text", columns=parse_columns(None, keep), max_document_bytes=1 << 20)
    assert len({segment for segment, _ in read_stream(source, spec, task_bytes=1 << 13)}) > 5


# tables


every_table = pytest.mark.parametrize("name", TABLES)


def write_table(found: pa.Table, name: str, directory: Path, rows: int | None = None) -> Path:
    try:
        (directory / name).write_bytes(TABLES[name](found, rows))
    except pa.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {pa.__version__} writes no {found.schema.field(0).type} to {name}")
    return directory / name


VALUES = ["a", "é🙂", None, "", "b" * 40]
ENCODED = [None if value is None else value.encode() for value in VALUES]
STRINGS = {
    **{str(kind): pa.array(VALUES, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())},
    **{str(kind): pa.array(ENCODED, kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())},
    **{f"{kind} once": pa.array(VALUES, kind).dictionary_encode() for kind in (pa.string(), pa.large_string())},
}


@every_table
@pytest.mark.parametrize("of", STRINGS)
def test_a_text_column_may_have_any_type_of_strings(name, of, tmp_path):
    path = write_table(pa.table({"text": STRINGS[of]}), name, tmp_path, 2)
    corpus = build(path, tmp_path / "out", on_bad_record="skip")
    assert texts_of(corpus) == ["a", "é🙂", "b" * 40]
    assert corpus.sources()[0].left_out == {"missing text": 1, "empty": 1}


@pytest.mark.parametrize("name", ["a.arrow", "stream.arrow"])  # the parquet reader itself refuses such a dictionary
def test_a_value_of_a_dictionary_that_is_not_utf_8_spoils_only_its_records(name, tmp_path):
    values = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 1, None, 0]), values)
    corpus = build(write_table(pa.table({"text": array}), name, tmp_path), tmp_path / "out", on_bad_record="skip")
    assert texts_of(corpus) == ["good", "fine", "good"]
    assert corpus.sources()[0].left_out == {"invalid UTF-8": 2, "missing text": 1}


# nested fields

NESTED = [
    {"data": {"body": "a", "meta": {"url": "u1"}}},
    {"data": None},
    {"data": {"body": None, "meta": {"url": "u3"}}},
    {"data": {"body": "d", "meta": None}},
]


@pytest.mark.parametrize("name", ["plain.jsonl", "frames.jsonl.zst", "table.parquet", "file.arrow", "stream.arrow"])
def test_a_nested_text_field_is_found_below_missing_parents_too(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FORMATS[name](NESTED, 2))
    corpus = build(path, tmp_path / "out", text_field="data.body", keep_field=["data.meta.url"], on_bad_record="skip")
    assert texts_of(corpus) == ["a", "d"]
    assert [corpus.metadata(index) for index in (0, 1)] == [{"data.meta.url": "u1"}, {"data.meta.url": None}]
    assert record_numbers(corpus) == [1, 4]
    assert corpus.sources()[0].left_out == {"missing text": 2}


@every_table
def test_a_column_whose_name_has_a_dot_is_taken_before_a_nested_one(name, tmp_path):
    path = write_table(pa.table({"data": [{"body": "nested"}], "data.body": ["flat"]}), name, tmp_path)
    assert texts_of(build(path, tmp_path / "out", text_field="data.body")) == ["flat"]


NO_TEXT = {name: write(pa.table({"text": pa.array([], pa.string())})) for name, write in TABLES.items()}


@pytest.mark.parametrize(("name", "content"), [*NO_TEXT.items(), ("a.csv", b"text,n\n"), ("a.txt", b"")])
def test_a_source_without_text_holds_no_document(name, content, tmp_path):
    path = tmp_path / name
    path.write_bytes(content)
    (tmp_path / "b.jsonl").write_bytes(FORMATS["plain.jsonl"]([{"text": "b"}], 1))
    corpus = build([path, tmp_path / "b.jsonl"], tmp_path / "out")
    assert texts_of(corpus) == ["b"]
    assert corpus.sources()[0].left_out == ({"empty": 1} if name == "a.txt" else {})


# kept columns


WHOLE = [pa.array([1_000], pa.timestamp("ns")), pa.array([10**9], pa.duration("ns"))]
OTHERS: dict[str, tuple[pa.Array, str]] = {
    # the same with pandas and without
    "whole": (
        pa.StructArray.from_arrays(WHOLE, ["at", "for"]),
        '{"at": "1970-01-01 00:00:00.000001", "for": "0:00:01"}',
    ),
    "time": (pa.array([1], pa.timestamp("ns")), "1970-01-01 00:00:00.000000001"),
    "zoned": (pa.array([1], pa.timestamp("us", "UTC")), "1970-01-01 00:00:00.000001Z"),
    "day": (pa.array([18_263], pa.date32()), "2020-01-02"),
    "flag": (pa.array([True]), "true"),
    "nested": (pa.array([{"a": [True, None], "b": "é"}]), '{"a": [true, null], "b": "é"}'),
    "bytes": (pa.array(["é".encode()], pa.binary()), "é"),
    "big": (pa.array([(1 << 64) - 1], pa.uint64()), "18446744073709551615"),
    "short": (pa.array([0.9], pa.float32()), "0.9"),
    "unknown": (pa.array([{"a": float("nan"), "b": [1, float("inf")]}]), '{"a": null, "b": [1.0, null]}'),
}


@every_table
def test_kept_values_of_other_types_become_the_text_that_json_would_have(name, tmp_path):
    columns = {name: array for name, (array, _) in OTHERS.items()}
    path = write_table(pa.table({"text": ["t"], **columns}), name, tmp_path)
    kept = build(path, tmp_path / "out", keep_field=list(columns)).metadata(0)
    assert kept == {name: text for name, (_, text) in OTHERS.items()}


# csv


def test_a_csv_may_have_documents_of_any_size(tmp_path):
    (tmp_path / "a.csv").write_text("text\nok\n")
    assert texts_of(build(tmp_path / "a.csv", tmp_path / "out", max_document_bytes=(1 << 63) - 1)) == ["ok"]


@pytest.mark.parametrize("quote", ['"', ""])
def test_a_csv_field_too_long_to_be_held_is_one_bad_record_whatever_its_rest_looks_like(quote, tmp_path):
    lines = 40 if quote else 1
    long = "\n".join(['a line, that ""looks"" like, rows ' + "x" * (3_000_000 // lines)] * lines)
    rows = ["text,n", "ok,1", f"{quote}{long}{quote},2", "also ok,3", "short", '"two\nlines",4', "x,y,z", '"open\n,6']
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows) + "\n")
    corpus = build(path, tmp_path / "out", max_document_bytes=100, on_bad_record="skip")
    assert texts_of(corpus) == ["ok", "also ok", "two\nlines"]
    assert record_numbers(corpus) == [1, 3, 5]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    first = 3 + lines  # the line after the long one
    said = ["1 fields, the header has 2", "3 fields, the header has 2", "unexpected end of data"]
    places = [f"line {first + 1}", f"line {first + 4}", f"lines {first + 5} to {first + 6}"]
    expected = zip((4, 6, 7), places, said, strict=True)
    assert (rejects[0]["record"], rejects[0]["reason"]) == (2, "over max-document-bytes")
    assert rejects[0]["detail"].endswith("a field has more than 1,049,376 characters")
    assert [(reject["record"], reject["detail"]) for reject in rejects[1:]] == [
        (record, f"{place}: {detail}") for record, place, detail in expected
    ]


def test_a_csv_that_another_thread_reads_with_a_lower_limit_takes_nothing_from_a_longer_document(tmp_path):
    (tmp_path / "a.csv").write_text("\n".join(["text", *["ok"] * 200_000, "x" * 1_200_000]))
    (source,) = discover([str(tmp_path / "a.csv")], input_format=None).inputs
    large, small = (RecordSpec(text_field="text", columns={}, max_document_bytes=most) for most in (1 << 21, 10))
    chunks = read_stream(source, large, task_bytes=1 << 20)
    next(chunks)
    assert [bad.reason for _, chunk in read_stream(source, small, task_bytes=1) for bad in chunk.bad] == [TOO_LONG]
    assert [bad for _, chunk in chunks for bad in chunk.bad] == []


# plans of tasks

WHOLE_TASK = Span()
PLANS: dict[str, tuple[list[int], Divisibility, list[tuple[list[int], Span]]]] = {
    "an input as large as a task is not cut, and ends the group that it fills": (
        *([5, 10, 5], LINES, [([0, 1], WHOLE_TASK), ([2], WHOLE_TASK)]),
    ),
    "a group begins anew behind an input that is divided": (
        *([6, 20, 6, 0, 6], LINES),
        [([0], WHOLE_TASK), ([1], Span(0, 10)), ([1], Span(10, None)), ([2, 3, 4], WHOLE_TASK)],
    ),
    "the last range of an input is open": (
        *([25], LINES, [([0], Span(0, 10)), ([0], Span(10, 20)), ([0], Span(20, None))]),
    ),
    "row groups as large as a task are a task each": (
        *([30], (10, 10, 10), [([0], Span(start, start + 1)) for start in range(3)]),
    ),
    "small row groups share a task until they fill it": (
        *([30], (4, 4, 4, 9, 9, 0), [([0], Span(0, 3)), ([0], Span(3, 5)), ([0], Span(5, 6))]),
    ),
    "what cannot be divided is in a group, however large": (
        *([4, 40, 4], INDIVISIBLE, [([0, 1], WHOLE_TASK), ([2], WHOLE_TASK)]),
    ),
    "nothing is read by no task": ([], LINES, []),
}


@pytest.mark.parametrize("what", PLANS)
def test_tasks_are_as_large_as_was_asked_for(what):
    sizes, split, expected = PLANS[what]
    planned = list(plan_tasks(sizes, [split] * len(sizes), 10))
    assert [(list(task.inputs), task.span) for task in planned] == expected
    assert [task.key for task in planned] == sorted({task.key for task in planned})
    assert [task.key[0] for task in planned] == [inputs[0] for inputs, _ in expected]


@pytest.mark.parametrize(("task_mib", "segment_mib"), [(1, 16), (16, 256), (64, 512), (512, 512), (4096, 4096)])
def test_a_stream_has_fewer_segments_than_other_inputs_have_tasks(task_mib, segment_mib):
    assert tasks.segment_bytes(task_mib << 20) == segment_mib << 20


@pytest.mark.parametrize(
    ("total_bytes", "task_mib"), [(0, 16), (4 << 30, 16), (16 << 30, 64), (128 << 30, 512), (50 << 40, 512)]
)
def test_tasks_have_16_to_512_mib_by_the_size_of_the_inputs(total_bytes, task_mib):
    assert tasks.default_task_bytes(total_bytes) == task_mib << 20
    assert tasks.round_task_bytes(1) == tasks.CHUNK_BYTES
    assert tasks.round_task_bytes(tasks.CHUNK_BYTES + 1) == 2 * tasks.CHUNK_BYTES


# plain text

VERSE = "first line\nsecond line\r\n\n \t\n  indented\n\n\nlast, without an end"
UNITS = {
    "file": [VERSE],
    "line": ["first line", "second line", " \t", "  indented", "last, without an end"],
    "paragraph": ["first line\nsecond line", "  indented", "last, without an end"],
}


@pytest.mark.parametrize("suffix", COMPRESSIONS)
@pytest.mark.parametrize("unit", UNITS)
def test_the_text_unit_says_what_a_document_is_and_the_name_of_the_file_is_a_field_of_it(unit, suffix, tmp_path):
    path = tmp_path / "in" / "sub" / f"a.txt{suffix}"
    path.parent.mkdir(parents=True)
    path.write_bytes(COMPRESSIONS[suffix](VERSE.encode()))
    for source, name in ((tmp_path / "in", f"sub/{path.name}"), (path, path.name)):
        corpus = build(
            source, tmp_path / "out", text_unit=unit, id_field="__name__", keep_field=["__name__"], force=True
        )
        assert texts_of(corpus) == UNITS[unit]
        assert corpus.sources()[0].left_out == ({"empty": 3} if unit == "line" else {})
        assert corpus.manifest.build.text_unit == unit
        assert corpus.metadata(len(corpus) - 1) == {"id": name, "__name__": name}
