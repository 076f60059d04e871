"""Every format gives the same documents in the same order, however its input is cut."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import crossed, examples
from tests.pipeline import inputs
from tests.pipeline.inputs import FORMATS, build, csv_bytes, jsonl, patch_chunk_bytes, texts_of, zstd
from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.sources import division
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import Indivisible, Span
from tokshard.pipeline.sources.formats import divisibility_of, read_span, read_stream
from tokshard.pipeline.sources.json_lines import JsonLinesParser
from tokshard.pipeline.sources.records import Chunk, LineChunk, Records, RecordSpec, parse_columns
from tokshard.pipeline.tasks import planning as tasks
from tokshard.pipeline.tasks.planning import Task, plan_tasks

TEXTS = [
    *(f"document {number}: def f(x):\n    return {number} * x\n" for number in range(12)),
    'He said "no", twice; ""',
    "comma, separated, words",
    "two\r\nlines\rand a half\n",
    "Größe, résumé, 数据, עברית, 🙂👩‍👩‍👧",
    "null\x00byte and \x1f",
    " spaces around ",
    "long " * 200,
    "x",
    *(f"{number}" for number in range(12)),
]
RECORDS = [{"text": text, "n": number} for number, text in enumerate(TEXTS)]
every_format = pytest.mark.parametrize("name", FORMATS)


def spec_of(text_field: str = "text", *keep: str) -> RecordSpec:
    return RecordSpec(text_field=text_field, columns=parse_columns(None, keep), max_document_bytes=1 << 20)


def read(paths: Sequence[Path], spec: RecordSpec, task_bytes: int) -> list[tuple[tuple[int, int], Records]]:
    """What a build reads: the key of its task or segment, and the records, chunk by chunk."""
    found = discover([str(path) for path in paths], input_format=None).inputs
    splits = [divisibility_of(source) if source.num_bytes > task_bytes else Indivisible() for source in found]
    parse = JsonLinesParser(spec)

    def chunks() -> Iterator[tuple[tuple[int, int], Chunk]]:
        for task in plan_tasks([source.num_bytes for source in found], splits, task_bytes):
            if isinstance(task, Task):
                for index in task.inputs:
                    for chunk in read_span(found[index], task.span, spec):
                        yield task.key, chunk
            else:
                for segment, chunk in read_stream(found[task.key[0]], spec, task_bytes=task_bytes):
                    yield (task.key[0], segment), chunk

    result = [(key, parse(chunk) if isinstance(chunk, LineChunk) else chunk) for key, chunk in chunks()]
    assert [key for key, _ in result] == sorted(key for key, _ in result)
    return result


texts = st.text(st.characters(codec="utf-8"), max_size=12).map(lambda text: f"{text}.")


@settings(max_examples=examples(60))
@given(
    data=st.data(),
    documents=st.lists(texts, min_size=1, max_size=25),
    cuts=st.tuples(st.integers(8, 200), st.integers(1, 4), st.integers(1, 9)),
)
def test_every_cut_of_every_format_gives_every_record_once_and_in_order(data, documents, cuts, tmp_path_factory):
    chunk_bytes, chunks_per_task, size = cuts
    directory = tmp_path_factory.mktemp("formats")
    records = [{"text": text, "n": number} for number, text in enumerate(documents)]
    paths = []
    for number, name in enumerate(data.draw(st.lists(st.sampled_from(list(FORMATS)), min_size=1, max_size=3))):
        paths.append(directory / f"{number}-{name}")
        paths[-1].write_bytes(FORMATS[name](records, size))
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, chunk_bytes)
        found = [part for _, part in read(paths, spec_of("text", "n:int64"), chunks_per_task * chunk_bytes)]
    assert [text for part in found for text in part.texts] == documents * len(paths)
    assert [n for part in found for n in part.columns["n"]] == [*range(len(documents))] * len(paths)
    assert sum(part.count for part in found) == len(documents) * len(paths)
    assert not any(part.bad or part.num_empty for part in found)
    assert all(part.input_bytes >= 0 for part in found)


@pytest.mark.parametrize("line_bytes", [31, 32, 33])
def test_lines_that_start_or_end_where_a_task_does_are_read_once(line_bytes, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    documents = [f"{number:02d}".ljust(line_bytes - len('{"text": ""}\n'), ".") for number in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_bytes(jsonl([{"text": text} for text in documents]))
    assert path.stat().st_size == 20 * line_bytes
    found = read([path], spec_of(), 64)
    assert [text for _, part in found for text in part.texts] == documents
    assert {segment for (_, segment), _ in found} == {number * line_bytes // 64 for number in range(20)}


@crossed("name, task_bytes", FORMATS, [256, 1024, 1 << 20])
def test_a_build_of_any_format_holds_its_documents_in_order(name, task_bytes, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 256)
    path = tmp_path / name
    path.write_bytes(FORMATS[name](RECORDS, 5))
    corpus = build(path, tmp_path / "out", task_bytes=task_bytes, shard_tokens=300, keep_field=["n:int64"])
    assert texts_of(corpus) == TEXTS
    assert [corpus.provenance(index).record for index in range(len(corpus))] == [*range(1, len(TEXTS) + 1)]
    assert [corpus.metadata(index) for index in range(len(corpus))] == [{"n": index} for index in range(len(TEXTS))]
    (source,) = corpus.sources()
    assert (source.records_read, source.documents, source.left_out) == (len(TEXTS), len(TEXTS), {})
    assert source.num_bytes == path.stat().st_size
    assert source.text_bytes == sum(len(text.encode()) for text in TEXTS)
    if task_bytes == 256:  # small tasks are many tasks
        assert len({shard.name[:24] for shard in corpus.shards}) > 2


def test_all_formats_in_one_build_follow_each_other(tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 256)
    for number, (name, encode) in enumerate(FORMATS.items()):
        (tmp_path / "in").mkdir(exist_ok=True)
        (tmp_path / "in" / f"{number:02d}-{name}").write_bytes(encode(RECORDS, 7))
        (tmp_path / "in" / f"{number:02d}-z.txt").write_text(f"a text after {name}\n")
    corpus = build(
        tmp_path / "in", tmp_path / "out", task_bytes=512, shard_tokens=500, keep_field=["n"], on_bad_record="skip"
    )
    assert texts_of(corpus) == [text for name in FORMATS for text in [*TEXTS, f"a text after {name}\n"]]
    place = [(2 * number, record) for number in range(len(FORMATS)) for record in range(1, len(TEXTS) + 1)]
    place += [(2 * number + 1, 1) for number in range(len(FORMATS))]
    found = [(corpus.provenance(i).source, corpus.provenance(i).record) for i in range(len(corpus))]
    assert found == sorted(place)


@pytest.mark.slow
@every_format
def test_provenance_and_counts_are_right_around_records_that_are_left_out(name, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 128)
    records = [{**record, "text": "" if number % 3 == 1 else record["text"]} for number, record in enumerate(RECORDS)]
    kept = [number for number in range(len(records)) if number % 3 != 1]
    path = tmp_path / name
    path.write_bytes(FORMATS[name](records, 4))
    corpus = build(path, tmp_path / "out", task_bytes=256, shard_tokens=200)
    assert texts_of(corpus) == [TEXTS[number] for number in kept]
    assert [corpus.provenance(index).record for index in range(len(corpus))] == [number + 1 for number in kept]
    (source,) = corpus.sources()
    assert source.left_out == {"empty": len(records) - len(kept)}
    assert source.records_read == len(records)


# limits


@pytest.mark.slow
@crossed("name, limit", FORMATS, [1, 7, len(TEXTS) - 1, len(TEXTS), len(TEXTS) + 1])
def test_a_limit_takes_the_first_documents_and_reads_no_further(name, limit, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 128)
    records = [record for record in RECORDS for record in ({"text": "", "n": -1}, record)]  # each after an empty one
    for number in (0, 1):
        (tmp_path / f"{number}-{name}").write_bytes(FORMATS[name](records, 3))
    corpus = build(
        [tmp_path / f"0-{name}", tmp_path / f"1-{name}"], tmp_path / "out", task_bytes=256, max_documents=limit
    )
    assert texts_of(corpus) == [*TEXTS, *TEXTS][:limit]
    first, second = corpus.sources()
    assert (first.documents, second.documents) == (min(limit, len(TEXTS)), max(0, limit - len(TEXTS)))
    # with the last document that is wanted, reading ends
    assert first.records_read == 2 * min(limit, len(TEXTS))
    assert second.records_read == 2 * max(0, limit - len(TEXTS))


# plain text


@pytest.mark.parametrize("text", ["a line\n", "no end", "\n\n", "\ttab\r\n", "é🙂", "text " * 5_000])
@pytest.mark.parametrize(
    ("suffix", "compress"), [("", bytes), (".gz", gzip.compress), (".zst", zstd)], ids=["plain", "gz", "zst"]
)
def test_a_text_file_is_one_document_byte_for_byte(text, suffix, compress, tmp_path):
    path = tmp_path / f"a.txt{suffix}"
    path.write_bytes(compress(text.encode()))
    assert texts_of(build(path, tmp_path / "out", task_bytes=1)) == [text]


def test_text_files_of_a_directory_are_grouped_into_tasks(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(40):
        (tmp_path / "in" / f"{number:02d}.txt").write_text(f"text {number}")
    corpus = build(tmp_path / "in", tmp_path / "out")
    assert texts_of(corpus) == [f"text {number}" for number in range(40)]
    assert len(corpus.shards) == 1
    assert [corpus.provenance(i).source for i in range(40)] == [*range(40)]


# tables


TABLES = {"parquet": inputs.parquet_bytes, "arrow": inputs.arrow_bytes, "stream": inputs.arrow_stream_bytes}
every_table = pytest.mark.parametrize("kind", TABLES)


def write_table(found: pa.Table, kind: str, directory: Path, rows: int | None = None) -> Path:
    path = directory / ("a.parquet" if kind == "parquet" else "a.arrow")
    try:
        path.write_bytes(TABLES[kind](found, rows))
    except pa.ArrowNotImplementedError:
        pytest.skip(f"pyarrow {pa.__version__} writes no {found.schema.field(0).type} to {kind}")
    return path


@every_table
@pytest.mark.parametrize(
    "string_type",
    [
        "string",
        "large_string",
        "string_view",
        "binary",
        "large_binary",
        "binary_view",
        "dictionary",
        "large dictionary",
    ],
)
def test_a_text_column_may_have_any_type_of_strings(kind, string_type, tmp_path):
    values = ["a", "é🙂", None, "", "b" * 40]
    if "dictionary" in string_type:
        array = pa.array(values, pa.large_string() if "large" in string_type else pa.string()).dictionary_encode()
    else:
        is_binary = "binary" in string_type
        array = pa.array([v.encode() if is_binary and v is not None else v for v in values], getattr(pa, string_type)())
    path = write_table(pa.table({"text": array}), kind, tmp_path, 2 if "dictionary" not in string_type else None)
    corpus = build(path, tmp_path / "out", on_bad_record="skip")
    assert texts_of(corpus) == ["a", "é🙂", "b" * 40]
    assert corpus.sources()[0].left_out == {"missing text": 1, "empty": 1}


@every_table
def test_an_arrow_table_with_a_dictionary_per_batch_is_read(kind, tmp_path):
    chunks = [pa.array(part).dictionary_encode() for part in (["a", "b", "a"], ["c", "a"])]
    path = write_table(pa.table({"text": pa.chunked_array(chunks).unify_dictionaries()}), kind, tmp_path, 2)
    assert texts_of(build(path, tmp_path / "out")) == ["a", "b", "a", "c", "a"]


@pytest.mark.parametrize("kind", ["arrow", "stream"])  # the parquet reader itself refuses such a dictionary
def test_a_value_of_a_dictionary_that_is_not_utf_8_spoils_only_its_records(kind, tmp_path):
    values = pa.array([b"good", b"\xff\xfe", b"fine"]).view(pa.string())
    array = pa.DictionaryArray.from_arrays(pa.array([0, 1, 2, 1, None, 0]), values)
    path = write_table(pa.table({"text": array}), kind, tmp_path)
    corpus = build(path, tmp_path / "out", on_bad_record="skip")
    assert texts_of(corpus) == ["good", "fine", "good"]
    assert corpus.sources()[0].left_out == {"invalid UTF-8": 2, "missing text": 1}


@every_table
def test_a_long_text_that_many_rows_share_is_held_once_and_comes_in_small_chunks(kind, tmp_path):
    long = pa.array(["a" * 200_000, None, "b"])
    array = pa.DictionaryArray.from_arrays(pa.array([0] * 300 + [1, 2]), long)
    path = write_table(pa.table({"text": array}), kind, tmp_path)
    (source,) = discover([str(path)], input_format=None).inputs
    tracemalloc.start()
    sizes = []
    for part in read_span(source, Span(), spec_of()):
        assert isinstance(part, Records)
        sizes.append((part.count, sum(map(len, part.texts)), part.input_bytes))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert sum(count for count, _, _ in sizes) == 302
    assert max(size for _, size, _ in sizes) <= division.CHUNK_BYTES + 200_000
    assert 0 <= source.num_bytes - sum(num_bytes for _, _, num_bytes in sizes) < source.num_bytes // 2
    if kind != "parquet":  # which decodes its dictionaries itself
        assert peak < 5 << 20


SEGMENTED = {
    "kept values": (["n"], [["a", "x" * 2_000]] * 500),
    "bad records": ([], [["a"]] * 8_000),
    "empty records": ([], [["", ""]] * 8_000),
}


@pytest.mark.parametrize("what", SEGMENTED)
def test_a_segment_of_csv_ends_by_all_that_a_worker_would_hold(what, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 14)
    keep, rows = SEGMENTED[what]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(["text,n", *(",".join(row) or '""' for row in rows)]) + "\n")
    found = read([path], spec_of("text", *keep), 1 << 13)
    assert sum(part.count for _, part in found) == len(rows)
    assert len({key for key, _ in found}) > 5


@pytest.mark.parametrize("column", ["kept", "text"])
def test_a_segment_of_an_arrow_stream_ends_by_all_that_a_worker_would_hold(column, tmp_path):
    rows = [{"text": "a" if column == "kept" else None, "n": "x" * 2_000}] * 500
    path = tmp_path / "a.arrow"
    found = table_of(rows)
    path.write_bytes(inputs.arrow_stream_bytes(found, 20))
    keys = {key for key, _ in read([path], spec_of("text", *(["n"] if column == "kept" else [])), 1 << 13)}
    assert len(keys) > 5


def table_of(rows: Sequence[dict[str, Any]]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), pa.schema([("text", pa.string()), ("n", pa.string())]))


@every_table
@pytest.mark.parametrize(
    "column_type", [pa.int64(), pa.list_(pa.string()), pa.struct([("body", pa.string())])], ids=str
)
def test_a_text_column_of_another_type_is_refused_with_the_fields_there_are(kind, column_type, tmp_path):
    path = write_table(pa.table({"text": pa.nulls(1, column_type), "body": ["x"]}), kind, tmp_path)
    with pytest.raises(UsageError, match=r"field 'text' has type .*, expected a string") as caught:
        build(path, tmp_path / "out")
    assert caught.value.hint == "give the field that holds the text with --text-field; fields: text, body"


@every_table
@pytest.mark.parametrize(("field", "keep"), [("nothing", ()), ("data.nothing", ()), ("body.x", ()), ("body", ("url",))])
def test_a_missing_column_is_refused_with_the_fields_there_are(kind, field, keep, tmp_path):
    path = write_table(pa.table({"data": [{"x": "a"}], "body": ["b"]}), kind, tmp_path)
    missing = keep[0] if keep else field
    with pytest.raises(UsageError, match=f"has no field '{missing}'; it has data, body"):
        build(path, tmp_path / "out", text_field=field, keep_field=keep)


@every_table
def test_two_columns_of_one_name_are_refused(kind, tmp_path):
    path = write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"]), kind, tmp_path)
    with pytest.raises(UsageError, match="has 2 fields 'text'"):
        build(path, tmp_path / "out")


@every_table
def test_a_table_without_rows_holds_no_record(kind, tmp_path):
    write_table(pa.table({"text": pa.array([], pa.string())}), kind, tmp_path)
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "b"}]))
    (path,) = tmp_path.glob("a.*")
    corpus = build([path, tmp_path / "b.jsonl"], tmp_path / "out")
    assert texts_of(corpus) == ["b"]
    assert corpus.sources()[0].records_read == 0


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
    assert [corpus.provenance(index).record for index in (0, 1)] == [1, 4]
    assert corpus.sources()[0].left_out == {"missing text": 2}


@every_table
def test_a_column_whose_name_has_a_dot_is_taken_before_a_nested_one(kind, tmp_path):
    path = write_table(pa.table({"data": [{"body": "nested"}], "data.body": ["flat"]}), kind, tmp_path)
    assert texts_of(build(path, tmp_path / "out", text_field="data.body")) == ["flat"]


# kept columns

KEPT = [
    {"text": "a", "s": "é", "i": -3, "f": 1.5, "b": True},
    {"text": "b", "s": None, "i": None, "f": None, "b": None},
    {"text": "c", "s": "x, \n", "i": 1 << 60, "f": -0.25, "b": False},
]


@pytest.mark.parametrize(
    "name", ["plain.jsonl", "members.jsonl.gz", "table.parquet", "file.arrow", "stream.arrow", "csv"]
)
def test_kept_columns_are_the_same_from_every_format(name, tmp_path):
    path = tmp_path / name.replace("csv", "a.csv")
    if name == "csv":
        json_like = [{k: str(v).lower() if isinstance(v, bool) else v for k, v in record.items()} for record in KEPT]
        path.write_bytes(csv_bytes(json_like))
    else:
        path.write_bytes(FORMATS[name](KEPT, 2))
    corpus = build(path, tmp_path / "out", id_field="i", keep_field=["s", "i:int64", "f:float64", "b:bool"])
    assert texts_of(corpus) == ["a", "b", "c"]
    expected = [{"id": None if r["i"] is None else str(r["i"]), **{k: r[k] for k in "sifb"}} for r in KEPT]
    if name == "csv":  # an empty field is an empty string where strings are asked for
        expected[1] |= {"id": "", "s": ""}
    assert [corpus.metadata(index) for index in range(3)] == expected


@every_table
def test_kept_values_of_other_types_become_the_text_that_json_would_have(kind, tmp_path):
    columns = {
        "time": pa.array([1], pa.timestamp("ns")),
        "zoned": pa.array([1], pa.timestamp("us", "UTC")),
        "day": pa.array([18_263], pa.date32()),
        "flag": pa.array([True]),
        "nested": pa.array([{"a": [True, None], "b": "é"}]),
        "bytes": pa.array(["é".encode()], pa.binary()),
        "big": pa.array([(1 << 64) - 1], pa.uint64()),
        "half": pa.array([0.5], pa.float32()),
    }
    path = write_table(pa.table({"text": ["t"], **columns}), kind, tmp_path)
    assert build(path, tmp_path / "out", keep_field=list(columns)).metadata(0) == {
        "time": "1970-01-01 00:00:00.000000001",
        "zoned": "1970-01-01 00:00:00.000001Z",
        "day": "2020-01-02",
        "flag": "true",
        "nested": '{"a": [true, null], "b": "é"}',
        "bytes": "é",
        "big": "18446744073709551615",
        "half": "0.5",
    }


@every_table
def test_a_kept_value_that_python_cannot_hold_is_named_by_its_field(kind, tmp_path):
    nanoseconds = pa.StructArray.from_arrays([pa.array([1], pa.timestamp("ns"))], ["at"])
    path = write_table(pa.table({"text": ["t"], "meta": nanoseconds}), kind, tmp_path)
    with pytest.raises(SourceError, match="field 'meta' cannot be read: Nanosecond") as caught:
        build(path, tmp_path / "out", keep_field=["meta"])
    assert caught.value.hint == "leave it out of --keep-field"


@every_table
def test_nested_nanoseconds_are_kept_as_the_same_text_whether_pandas_is_there_or_not(kind, tmp_path):
    whole = pa.StructArray.from_arrays(
        [pa.array([1_000], pa.timestamp("ns")), pa.array([10**9], pa.duration("ns"))], ["at", "for"]
    )
    path = write_table(pa.table({"text": ["t"], "meta": whole}), kind, tmp_path)
    kept = build(path, tmp_path / "out", keep_field=["meta"]).metadata(0)
    assert kept == {"meta": '{"at": "1970-01-01 00:00:00.000001", "for": "0:00:01"}'}


@every_format
def test_a_kept_field_may_be_the_text_field(name, tmp_path):
    path = tmp_path / name
    path.write_bytes(FORMATS[name]([{"text": "a", "n": 1}], 1))
    assert build(path, tmp_path / "out", keep_field=["text"]).metadata(0) == {"text": "a"}


# csv


def csv_build(content: bytes | str, directory: Path, **options: Any) -> list[str]:
    path = directory / "a.csv"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return texts_of(build(path, directory / "out", **options))


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_csv_fields_may_hold_newlines_quotes_and_commas(line_end, tmp_path):
    rows = ["text,n", '"two\nlines",1', '"He said ""no"", twice",2', '"a,b",3', "plain,4", '"crlf\r\nkept",5', '"",6']
    assert csv_build(line_end.join(rows), tmp_path) == [
        "two\nlines",
        'He said "no", twice',
        "a,b",
        "plain",
        "crlf\r\nkept",
    ]


def test_csv_may_start_with_a_byte_order_mark_and_name_the_text_anywhere(tmp_path):
    assert csv_build(b"\xef\xbb\xbfurl,text\nu,a\n", tmp_path, keep_field=["url"]) == ["a"]
    assert build(tmp_path / "a.csv", tmp_path / "out", keep_field=["url"]).metadata(0) == {"url": "u"}


def test_csv_rows_that_are_broken_are_left_out_with_their_line(tmp_path):
    content = 'text,n\nok,1\nshort\n"two\nlines",2,3\n"open" quote,4\n\nalso ok,5\n"never closed,6\n'
    assert csv_build(content, tmp_path, on_bad_record="skip") == ["ok", "also ok"]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["record"], reject["reason"], reject["detail"]) for reject in rejects] == [
        (2, "malformed", "line 3: 1 fields, the header has 2"),
        (3, "malformed", "line 5: 3 fields, the header has 2"),
        (4, "malformed", "line 6: ',' expected after '\"'"),
        (7, "malformed", "line 9: unexpected end of data"),
    ]
    (source,) = build(tmp_path / "a.csv", tmp_path / "out", on_bad_record="skip").sources()
    assert (source.records_read, source.documents, source.left_out) == (7, 2, {"empty": 1, "malformed": 4})


@pytest.mark.parametrize("quote", ['"', ""])
def test_a_csv_field_too_long_to_be_held_is_one_bad_record_whatever_its_rest_looks_like(quote, tmp_path):
    lines = 40 if quote else 1
    long = "\n".join(['a line, that ""looks"" like, rows ' + "x" * (3_000_000 // lines)] * lines)
    rows = ["text,n", "ok,1", f"{quote}{long}{quote},2", "also ok,3", "short", '"two\nlines",4', "x,y,z"]
    path = tmp_path / "a.csv"
    path.write_text("\n".join(rows) + "\n")
    corpus = build(path, tmp_path / "out", max_document_bytes=100, on_bad_record="skip")
    assert texts_of(corpus) == ["ok", "also ok", "two\nlines"]
    assert [corpus.provenance(index).record for index in range(3)] == [1, 3, 5]
    rejects = [json.loads(line) for line in (tmp_path / "out" / "rejects.jsonl").read_text().splitlines()]
    assert [(reject["record"], reject["reason"]) for reject in rejects] == [
        (2, "over max-document-bytes"),
        (4, "malformed"),
        (6, "malformed"),
    ]
    assert rejects[0]["detail"].endswith("a field has more than 1,049,376 characters")
    first = 3 + lines  # the line after the long one
    assert [reject["detail"] for reject in rejects[1:]] == [
        f"line {first + 1}: 1 fields, the header has 2",
        f"line {first + 4}: 3 fields, the header has 2",
    ]


def test_a_csv_line_without_an_end_is_not_held_in_memory(tmp_path):
    def peak_bytes(number: int, line_bytes: int) -> int:
        path = tmp_path / f"{number}.csv"
        path.write_text("text\nok\n" + "x" * line_bytes + "\nalso ok\n")
        tracemalloc.start()
        corpus = build(path, tmp_path / f"out-{number}", max_document_bytes=100, on_bad_record="skip")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert texts_of(corpus) == ["ok", "also ok"]
        return peak

    peaks = [peak_bytes(number, line_bytes) for number, line_bytes in enumerate([1_000, 1_000, 32 << 20])]
    assert peaks[2] < peaks[1] + (10 << 20)


@pytest.mark.parametrize(
    ("header", "problem"),
    [
        ("body,n", "has 0 columns 'text'; its header is body, n"),
        ("text,text", "has 2 columns 'text'; its header is text, text"),
        ("Text", "has 0 columns 'text'; its header is Text"),
    ],
)
def test_csv_without_one_text_column_is_refused_with_its_header(header, problem, tmp_path):
    with pytest.raises(UsageError, match=problem):
        csv_build(f"{header}\na,b\n", tmp_path)


@pytest.mark.parametrize(
    ("content", "problem"),
    [(b"", "the file is empty, expected a header line"), (b'"text\n', "line 1: unexpected end of data")],
)
def test_csv_without_a_header_is_damaged(content, problem, tmp_path):
    with pytest.raises(SourceError, match=f"a.csv is damaged: {problem}"):
        csv_build(content, tmp_path)


def test_csv_of_a_header_alone_holds_no_record(tmp_path):
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "b"}]))
    (tmp_path / "a.csv").write_bytes(b"text,n\n")
    corpus = build([tmp_path / "a.csv", tmp_path / "b.jsonl"], tmp_path / "out")
    assert (texts_of(corpus), corpus.sources()[0].records_read) == (["b"], 0)


# one compressed file, several processes


def padded(number: int) -> dict[str, Any]:
    """A record that is long to read, also when it is compressed, and short to encode."""
    return {"text": f"document {number}", "n": number, "pad": random.Random(number).randbytes(1_000).hex()}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        *("frames.jsonl.zst", "members.csv.gz", "plain.jsonl", "members.tar.zst"),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in (
                *("members.jsonl.gz", "streams.jsonl.bz2", "streams.jsonl.xz", "plain.tsv"),
                *("stream.arrow", "file.feather"),
            )
        ),
    ],
)
def test_several_workers_share_one_input_and_give_the_corpus_of_one_process(name, tmp_path):
    records = [padded(number) for number in range(2_600)]
    if name in ("members.csv.gz", "stream.arrow", "plain.tsv"):  # their segments are counted in bytes of text
        records = [{**record, "text": record["text"] + "\t" * 2_000} for record in records]
    path = tmp_path / name
    path.write_bytes(FORMATS[name](records, 100))
    options: dict[str, Any] = {"task_bytes": 1 << 20, "max_documents": 2_500, "keep_field": ["n:int64"]}
    alone = build(path, tmp_path / "alone", **options)
    shared = build(path, tmp_path / "shared", workers=3, **options)
    assert texts_of(alone) == [record["text"] for record in records[:2_500]]
    assert len({shard.name[:24] for shard in alone.shards}) >= 4
    assert shared.manifest == alone.manifest
    assert (tmp_path / "shared" / "shards.arrow").read_bytes() == (tmp_path / "alone" / "shards.arrow").read_bytes()


# plans of tasks

sizes = st.lists(st.integers(0, 40), max_size=12)
splits = st.one_of(
    st.just(division.Lines()),
    st.just(division.Stream()),
    st.just(division.Indivisible()),
    st.lists(st.integers(0, 15), min_size=1, max_size=6).map(lambda sizes: division.Grouped(tuple(sizes))),
)


@given(sizes=sizes, data=st.data(), task_bytes=st.integers(1, 20))
def test_tasks_cover_every_input_once_and_in_order(sizes, data, task_bytes):
    found = [data.draw(splits) for _ in sizes]
    planned = list(plan_tasks(sizes, found, task_bytes))
    assert [task.key for task in planned] == sorted({task.key for task in planned})
    covered: list[tuple[int, int, int | None]] = []
    for task in planned:
        if not isinstance(task, Task):
            covered.append((task.key[0], 0, None))
            continue
        assert task.key[0] == task.inputs[0]
        small = list(task.inputs) if task.is_group else []
        # a group ends with the input that fills it
        assert sum(sizes[index] for index in small[:-1]) < task_bytes
        for index in task.inputs:
            start, stop = task.span.start, task.span.stop
            is_last_group = isinstance(found[index], division.Grouped) and stop == len(found[index].group_bytes)
            covered.append((index, start, None if is_last_group else stop))
    assert [index for index, start, _ in covered if start == 0] == [*range(len(sizes))]
    for (index, _, stop), (following, start, _) in pairwise([*covered, (len(sizes), 0, None)]):
        assert (following, start) == ((index + 1, 0) if stop is None else (index, stop))


def test_an_input_as_large_as_a_task_is_not_cut_and_ends_the_group_that_it_fills():
    planned = list(plan_tasks([5, 10, 5], [tasks.Lines()] * 3, 10))
    assert [list(task.inputs) for task in planned if isinstance(task, Task)] == [[0, 1], [2]]


def test_a_group_begins_anew_behind_an_input_that_is_divided():
    planned = list(plan_tasks([6, 20, 6, 6], [tasks.Lines()] * 4, 10))
    assert [list(task.inputs) for task in planned if isinstance(task, Task) and task.is_group] == [[0], [2, 3]]


def test_row_groups_as_large_as_a_task_are_a_task_each():
    planned = list(plan_tasks([30], [tasks.Grouped((10, 10, 10))], 10))
    spans = [task.span for task in planned if isinstance(task, Task)]
    assert spans == [Span(start, start + 1) for start in range(3)]


@pytest.mark.parametrize(
    ("total_bytes", "task_mib"), [(0, 16), (4 << 30, 16), (16 << 30, 64), (128 << 30, 512), (50 << 40, 512)]
)
def test_tasks_have_16_to_512_mib_by_the_size_of_the_inputs(total_bytes, task_mib):
    assert tasks.default_task_bytes(total_bytes) == task_mib << 20
    assert tasks.round_task_bytes(1) == tasks.CHUNK_BYTES
    assert tasks.round_task_bytes(tasks.CHUNK_BYTES + 1) == 2 * tasks.CHUNK_BYTES
