"""What builds and imports refuse to read, each with what is said.

What a shell can write and ask for is in `transcripts/files.txt`.
"""

from __future__ import annotations

import base64
import io
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pq_encryption
import pytest

from tests.contract.small import stopped_before_the_corpus
from tests.pipeline import foreign
from tests.pipeline.bad_records import SAID
from tests.pipeline.inputs import TABLES, arrow_bytes, jsonl, parquet_bytes, table, write_byte_tokenizer
from tests.refusals import Call, Refusal, check, refused, said_in
from tokshard import build_corpus, import_corpus
from tokshard.pipeline.sources import hub

EOS = foreign.EOS
LINE = jsonl([{"text": "good"}])


def run(run: Callable[..., Any], sources: Any, **options: Any) -> Any:
    tokenizer = write_byte_tokenizer(Path(".tokenizer"))
    return run(sources, **{"tokenizer": tokenizer, "out": "out", "workers": 1, **options})


def write(files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(content)


def built(files: Mapping[str, bytes], *sources: str, **options: Any) -> Call:
    """A build of some of the files, or of all."""

    def call(_: Path) -> Any:
        write(files)
        return run(build_corpus, list(sources or files), **options)

    return call


def imports(put: Callable[[Path], Any], *sources: str, **options: Any) -> Call:
    """An import of what a function writes into a folder."""

    def call(_: Path) -> Any:
        Path("in").mkdir()
        put(Path("in"))
        return run(import_corpus, list(sources) or "in", **options)

    return call


def of_file(name: str, content: bytes, **options: Any) -> Call:
    return imports(lambda folder: (folder / name).write_bytes(content), **options)


def of_table(columns: Mapping[str, Any], **options: Any) -> Call:
    """An import of a table."""
    return of_file("a.parquet", parquet_bytes(pa.table(columns)), **options)


# which files

FILES = {
    "a build without a source": built({}),
    "a name that is not UTF-8": built({os.fsdecode(b"\xff.jsonl"): LINE}),
}

# what is asked for


def _given(sources: Any, **options: Any) -> Call:
    return lambda _: run(build_corpus, sources, **options)


ASKED: list[tuple[str, Any]] = [
    ("keep_field", [7]),
    ("text_field", 7),
    ("format", "json"),
    ("text_unit", "word"),
    ("dedup", True),
    ("workers", True),
    ("workers", np.True_),
    ("shard_tokens", "1B"),
    ("max_documents", 1.5),
    ("validation_fraction", "1%"),
    ("out", None),
    ("tokenizer", 7),
    *(("text_field", f"a{end}") for end in "\n\x00\udcff"),
    ("id_field", "a\udcff"),
]
OPTIONS = {f"a build with {name}={value!r}": built({"a.jsonl": LINE}, **{name: value}) for name, value in ASKED}

# fields


def _fields(file: str, encode: Callable[[pa.Table], bytes]) -> dict[str, Call]:
    """Of a table whose columns are not those that are asked for."""
    data = {file: encode(pa.table({"data": [{"x": "a"}], "body": ["b"]}))}
    twice = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["text", "text"])
    meta = pa.StructArray.from_arrays([pa.array([1], pa.timestamp("ns"))], ["at"])
    return {
        **{
            f"a text field of type {kind} in {file}": built(
                {file: encode(pa.table({"text": pa.nulls(1, kind), "body": ["x"]}))}
            )
            for kind in (pa.int64(), pa.list_(pa.string()), pa.struct([("body", pa.string())]))
        },
        **{
            f"the text field {name}, which is not in {file}": built(data, text_field=name)
            for name in ("nothing", "data.nothing", "body.x")
        },
        f"a kept field that is not in {file}": built(data, text_field="body", keep_field=["url"]),
        f"an id field that is not in {file}": built(data, text_field="body", id_field="url"),
        f"two text fields in {file}": built({file: encode(twice)}),
        f"a kept field with nanoseconds in {file}": built(
            {file: encode(pa.table({"text": ["t"], "meta": meta}))}, keep_field=["meta"]
        ),
        f"a kept field in an unknown time zone in {file}": built(
            {file: encode(pa.table({"text": ["t"], "at": pa.array([0], pa.timestamp("s", "Mars"))}))}, keep_field=["at"]
        ),
    }


HEADER = {"a text field that is not in a csv of Latin-1": built({"a.csv": "gr\u00f6\u00dfe\n1\n".encode("latin-1")})}
FIELDS = HEADER | {what: call for file, encode in TABLES.items() for what, call in _fields(file, encode).items()}

# what is in them


class PlainKeys(pq_encryption.KmsClient):
    """Keys that are kept in the file itself."""

    def __init__(self, _: Any) -> None:
        super().__init__()

    def wrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, key: bytes, _: str) -> bytes:
        return base64.b64decode(key)


def _encrypted(*, has_plain_footer: bool) -> Call:
    def call(_: Path) -> Any:
        keys = {"footer_key": "k", "column_keys": {"k": ["text"]}, "plaintext_footer": has_plain_footer}
        config = pq_encryption.EncryptionConfiguration(**keys)
        factory = pq_encryption.CryptoFactory(PlainKeys)
        properties = factory.file_encryption_properties(pq_encryption.KmsConnectionConfig(), config)
        found = table([{"text": "a"}])
        with pq.ParquetWriter("a.parquet", found.schema, encryption_properties=properties) as writer:
            writer.write_table(found)
        return run(build_corpus, "a.parquet")

    return call


def _begun(files: Mapping[str, bytes], changed: Mapping[str, bytes], **options: Any) -> Call:
    """A build with other options or files is not finished."""

    def call(_: Path) -> Any:
        write(files)
        with stopped_before_the_corpus(KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            run(build_corpus, list(files), **options)
        write(changed)
        return run(build_corpus, list(files))

    return call


CONTENT = {
    "an encrypted table": _encrypted(has_plain_footer=False),
    "encrypted columns": _encrypted(has_plain_footer=True),
    "bad records that were left out before": _begun({"a.jsonl": LINE + b"{\n"}, {}, on_bad_record="skip"),
    "a source that has changed": _begun({"a.jsonl": LINE, "b.jsonl": LINE}, {"b.jsonl": 2 * LINE}),
}

# what a program gives


class Frame:
    """What a data frame does: it iterates over its columns or their names, and has a method for its rows."""

    def __init__(self, method: str) -> None:
        setattr(self, method, None)

    def __iter__(self) -> Any:
        return iter(["text", "url"])


def _fetched(argument: str) -> Call:
    return lambda _: hub.fetch_dataset(argument)


def _library(version: str | None) -> Call:
    """A data set of the hub, with a version of datasets, or without it."""

    def call(_: Path) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "datasets", version and SimpleNamespace(__version__=version))
            return hub.fetch_dataset("hf://someone/rows")

    return call


TEXTS = iter(["a text"])
PROGRAM = {
    "a number as sources": _given(7),
    "None as sources": _given(None),
    "bytes as sources": _given(b"text"),
    "an iterable twice": _given([TEXTS, TEXTS]),
    "a number among sources": _given(["a.jsonl", 7]),
    "a list among sources": _given([["a.jsonl"]]),
    "a dict of splits as sources": _given({"train": [], "test": []}),
    "a set as sources": _given({"a", "b"}),
    "an open file as sources": _given(io.StringIO("text")),
    "a data frame as sources": _given(Frame("iterrows")),
    "a data frame of polars as sources": _given(Frame("iter_rows")),
    "a table as sources": _given(pa.table({"text": ["a"]})),
    "a misspelt option": _given([], keep_fields=["n"]),
    "an iterator of paths": _given(iter([Path("a.jsonl")])),
    **{name: _fetched(name) for name in ("hf://", "hf://plain", "hf://a/b/c/d", "hf://a/b:x y", "hf://a/b:train:test")},
    "a version of datasets that may run code of a repository": _library("3.6.0"),
    "a data set of the hub, without the packages for it": _library(None),
}

# ids of other tools

DOCUMENTS = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS], [12, EOS]]
IDS = {"input_ids": [[5, 6]]}


def _flat(ids: list[int], dtype: str = "u2", **options: Any) -> Call:
    return of_file("a.npy", foreign.flat([ids], dtype), **options)


def _megatron(*sources: str, **options: Any) -> Call:
    return imports(lambda folder: foreign.megatron(folder / "a", DOCUMENTS), *sources, **options)


def _litdata(**options: Any) -> Call:
    return imports(lambda folder: foreign.litdata(folder, [DOCUMENTS]), **options)


def _mds(
    old: str = "id", new: str = "id", documents: Any = DOCUMENTS, kind: str = "ndarray:uint16", **options: Any
) -> Call:
    """A shard of MDS whose index says something else."""

    def put(folder: Path) -> None:
        index = foreign.mds(folder, [documents], kind) / "index.json"
        assert old in index.read_text()
        index.write_text(index.read_text().replace(old, new))

    return imports(put, **options)


def _bytes_of_mds(ids: list[int], dtype: str) -> Call:
    """Ids in bytes, of which nothing says how they are stored."""
    return _mds("bytes:uint8", "bytes", [np.frombuffer(np.array(ids, dtype).tobytes(), "u1").tolist()], "bytes:uint8")


def _a_corpus(make: Any, source: str) -> Call:
    def call(_: Path) -> Any:
        foreign.megatron(Path("a"), DOCUMENTS)
        run(import_corpus, "a", out=f"{source.partition('/')[0]}/a")
        return run(make, source)

    return call


def _two(*masks: Any, how: str) -> Call:
    """Two tables, of which one has a mask, in one import or one after the other."""

    def call(_: Path) -> Any:
        for name, mask in zip("ab", masks, strict=True):
            found = pa.table({"input_ids": DOCUMENTS[:1]} | ({"loss_mask": [mask]} if mask else {}))
            write({f"two/{name}.parquet": parquet_bytes(found)})
        if how != "append":
            return run(import_corpus, "two" if how == "folder" else ["two/a.parquet", "two/b.parquet"])
        run(import_corpus, "two/a.parquet")
        return run(import_corpus, "two/b.parquet", append=True)

    return call


def _pack(starts: list[int]) -> Call:
    """The second row of two, of three ids, or of one without a start."""
    all_starts, ids = pa.array([[0], starts], pa.list_(pa.int32())), [5, 6, 7] if starts else [5]
    return of_table({"input_ids": [[8, 9], ids], "loss_mask": [[0, 0], [0] * len(ids)], "seq_start_id": all_starts})


MASK = [0, 1, 1]
PER_ID = pa.table({"tokens": pa.array([1, EOS], pa.int32()), "mask": [0, 1]})
WIDE = [each for number in range(1, 201) for each in (number, 7, EOS)]
TOKENS = {
    "a flat file of ids without a delimiter": _flat([1, 2, 9, 4, 9], source_eos=7),
    "a long flat file of ids without a delimiter": _flat([1] * 100, max_document_bytes=64),
    "a flat file of 4-byte ids": _flat(WIDE, "u4"),
    "a flat file of 8-byte ids": _flat(WIDE, "i8"),
    "bytes of MDS that are int32": _bytes_of_mds([5, 6, 7, EOS], "i4"),
    "bytes of MDS that are uint16": _bytes_of_mds([5, 6, 7, 256], "u2"),
    "bytes of MDS that are uint16, too": _bytes_of_mds([5, 256, 7, EOS], "u2"),
    "bytes of MDS of an odd length": _bytes_of_mds([5, 6, EOS], "i4"),
    "--dtype for a file whose header says it": of_file("a.npy", foreign.npy([4, EOS], "i8"), token_dtype="uint16"),
    "--dtype for a column that says its own": _mds(token_dtype="uint16"),
    "--dtype for litdata": _litdata(token_dtype="int32"),
    "--token-field for litdata": _litdata(token_field="ids"),
    "--keep-field for megatron": _megatron(keep_field=["url"]),
    "--id-field for megatron": _megatron(id_field="url"),
    "--text-unit for ids": _megatron(text_unit="line"),
    "token ids in csv": _megatron(format="csv"),
    "token ids that are floats": _megatron(token_dtype="float32"),
    "a delimiter below zero": _megatron(source_eos=-1),
    "a chunk of litdata without its index": _megatron("in/a.bin", format="litdata"),
    "an index without its chunks": _megatron("in/a.idx"),
    **{
        f"{what} of a corpus, as {source}": _a_corpus(make, source)
        for what, make in (("an import", import_corpus), ("a build", build_corpus))
        for source in ("corpora/a", "corpora", "corpora/a/*.arrow")
    },
    "MDS without ids": _mds('"tokens"', '"other"'),
    "MDS with two columns of one name": _mds('"tokens"', '"n"', token_field="n"),
    "MDS without columns": _mds('"tokens"', "[]"),
    "token ids stored as pickles": _mds("ndarray:uint16", "pkl"),
    "kept values stored as pickles": _mds('"str"', '"pkl"', id_field="id"),
    "a kept column that is not in the MDS files": _mds(keep_field=["other"]),
    "JSON lines without token ids": of_file("a.jsonl", jsonl([{"messages": [], "n": 1}])),
    "a table without token ids": of_table({"text": ["a"]}),
    "a table without the given --token-field": of_table({"tokens": [[1]]}, token_field="ids"),
    **{f"ids that are {values}": of_table({"tokens": values}) for values in (["a"], [[1.5]], [[True]], [1, EOS])},
    "ids in a column of integers, with kept columns": of_file("a.arrow", arrow_bytes(PER_ID), keep_field=["mask"]),
    "a null among token ids": of_table({"tokens": [[1], [None]]}),
    "a null in a mask": of_table({**IDS, "attention_mask": [[1, None]]}),
    **{f"a pack that starts at {starts}": _pack(starts) for starts in ([1, 2], [0, 2, 2], [0, 4], [])},
    "token ids of nothing but delimiters": _flat([EOS]),
    **{
        f"{name} {values}": of_table({**IDS, name: values})
        for name in ("attention_mask", "position_ids")
        for values in ([[[1, 0], [1, 1]]], [[1.0, 0.0]], ["11"], [{"mask": 1}], [3])
    },
    **{f"labels {values}": of_table({**IDS, "labels": [values]}) for values in ([True, False], [1.0, 0.0])},
    "a packed row with labels": of_table({**IDS, "labels": [[5, 6]], "seq_start_id": [[0]]}),
    "labels together with a mask": of_table({**IDS, "labels": [[5, 6]], "loss_mask": [[0, 1]]}),
    "a folder in which only the first table has a mask": _two(MASK, None, how="folder"),
    "a folder in which only the second table has a mask": _two(None, MASK, how="folder"),
    "tables, only one of which has a mask": _two(None, MASK, how="files"),
    "an append without masks": _two(MASK, None, how="append"),
    "an append with masks": _two(None, MASK, how="append"),
}

REFUSALS = [
    *said_in(
        Path(__file__).with_name("refusals_of_sources.txt"), FILES | OPTIONS | FIELDS | CONTENT | PROGRAM | TOKENS
    ),
    *SAID.values(),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
