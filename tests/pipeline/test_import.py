"""``import_corpus``: documents that other tools have tokenized become a corpus, id for id."""

from __future__ import annotations

import bz2
import gzip
import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.pipeline import foreign
from tests.pipeline.foreign import EOS, documents_of, flat, imported
from tests.pipeline.inputs import jsonl, parquet_bytes, special_token, write_byte_tokenizer, zstd
from tests.pipeline.saved import save
from tokshard import import_corpus, open_corpus
from tokshard.errors import BadRecordError, BadSourceError, TokshardError
from tokshard.store import files_below, open_store

DOCUMENTS = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS], [12, EOS], [255, 256, EOS]]
NARROW = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS]]
THREES = [[1, 2, EOS], [3, 4, EOS], [5, 6, EOS]]
MANY = [[number, EOS] for number in range(1, 25)]


# formats


@dataclass(frozen=True)
class Form:
    """What writes documents into a folder, and what an import of it needs."""

    write: Callable[[Path, Sequence[Sequence[int]]], Any]
    documents: Sequence[Sequence[int]] = field(default_factory=lambda: DOCUMENTS)
    options: Mapping[str, Any] = field(default_factory=dict)


def _file(name: str, write: Callable[..., Any], **options: Any) -> Callable[[Path, Any], Any]:
    return lambda folder, documents: write(folder / name, documents, **options)


def _halves(write: Callable[..., Any], **options: Any) -> Callable[[Path, Any], Any]:
    """Two shards."""
    return lambda folder, documents: write(folder, [documents[:2], documents[2:]], **options)


def _singly(write: Callable[..., Any], **options: Any) -> Callable[[Path, Any], Any]:
    """A chunk for each document."""
    return lambda folder, documents: write(folder, [[each] for each in documents], **options)


def _packed_and_plain(folder: Path, documents: Any) -> None:
    """A shard that is kept compressed, too."""
    foreign.mds(folder, [documents], compress=("gz", gzip.compress))
    (folder / "shard.00000.mds").write_bytes(gzip.decompress((folder / "shard.00000.mds.gz").read_bytes()))


def _maps(folder: Path, documents: Any) -> None:
    """Two memory maps, the second with a header."""
    (folder / "part-0.npy").write_bytes(flat(documents[:2], "u2"))
    (folder / "part-1.npy").write_bytes(foreign.npy([token for each in documents[2:] for token in each], "i8"))


def _table(documents: Any, kind: pa.DataType | None = None) -> pa.Table:
    kind = pa.list_(pa.int32()) if kind is None else kind
    return pa.table({"n": range(len(documents)), "input_ids": pa.array([*documents], kind)})


TABLES = {**foreign.TABLES, "a.jsonl.gz": lambda found, rows: gzip.compress(jsonl(found.to_pylist()))}


def _in_table(name: str, kind: pa.DataType) -> Callable[[Path, Any], Any]:
    return lambda folder, documents: (folder / name).write_bytes(TABLES[name](_table(documents, kind), 2))


FORMS = {
    **{
        f"megatron of {dtype}": Form(
            _file("a", foreign.megatron, dtype=dtype), NARROW if dtype[1] == "1" else DOCUMENTS
        )
        for dtype in foreign.MEGATRON_CODES
    },
    **{f"datatrove of {dtype}": Form(_file("a.ds", foreign.datatrove, dtype=dtype)) for dtype in ("u2", "u4")},
    "numpy arrays": Form(_file("a.npy", foreign.numpy_arrays, dtype="i4")),
    "numpy arrays with the largest offset": Form(
        _file("a.npy", foreign.numpy_arrays, of_offsets="u1"), [[5, 6, EOS], [*range(1, 252), EOS]]
    ),
    "memory maps": Form(_maps),
    "a flat file of any name": Form(
        lambda folder, documents: (folder / "train.bin").write_bytes(flat(documents, "u4")),
        options={"format": "flat", "token_dtype": "uint32"},
    ),
    "a flat file whose last document has no delimiter": Form(
        lambda folder, documents: (folder / "a.npy").write_bytes(flat(documents, "u2")[:-2])
    ),
    **{f"MDS of {kind}": Form(_halves(foreign.mds, encoding=kind), THREES) for kind in foreign.MDS_ENCODINGS},
    **{
        f"MDS of arrays of {dtype}": Form(_halves(foreign.mds, encoding="ndarray", dtype=dtype), THREES)
        for dtype in foreign.MDS_CODES
    },
    **{
        f"MDS in {name}": Form(_halves(foreign.mds, compress=(name, compress), hashed="sha1"))
        for name, compress in (("zstd", zstd), ("gz", gzip.compress), ("bz2", bz2.compress))
    },
    "MDS that is kept compressed and plain": Form(_packed_and_plain),
    **{f"litdata of {kind}": Form(_singly(foreign.litdata, kind=kind), MANY) for kind in foreign.LITDATA_KINDS},
    "litdata in zstd of a level": Form(_singly(foreign.litdata, compress=("zstd:9", zstd)), MANY),
    "fms-fsdp": Form(foreign.fms),
    "a data set that datasets saved": Form(_file("saved", _halves(save, field="input_ids"))),
    **{
        f"{kind} in {name}": Form(_in_table(name, kind))
        for name in TABLES
        for kind in (pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64()))
    },
}


SIZES = {
    "import_batch_bytes": st.sampled_from([1 << 20, 16, 8, 40]),
    "import_documents": st.sampled_from([1 << 10, 2]),
    "import_piece_bytes": st.sampled_from([1 << 20, 5]),
}


@pytest.mark.parametrize("form", FORMS)
@settings(max_examples=examples(20))  # the first one divides nothing
@given(task_bytes=st.none() | st.integers(1, 60), sizes=st.fixed_dictionaries(SIZES))
def test_ids_of_every_format_become_documents_id_for_id_however_they_are_divided(
    form, task_bytes, sizes, tmp_path_factory
):
    found, place = FORMS[form], tmp_path_factory.mktemp("place")
    write_byte_tokenizer(place / "tok")
    (place / "in").mkdir()
    found.write(place / "in", found.documents)
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, **({} if task_bytes is None else {"chunk_bytes": 1, **sizes}))
        result = imported(place, place / "in", task_bytes=task_bytes, shard_tokens=9, **found.options)
    assert documents_of(result) == found.documents
    assert result.manifest.records.left_out == {}
    with open_corpus(result.directory) as corpus:
        places = [corpus.provenance(index) for index in range(len(corpus))]
        expected = [(source, record) for source, row in enumerate(corpus.sources()) for record in range(row.documents)]
    assert [(at.source, at.record - 1) for at in places] == expected


def test_prefixes_files_and_folders_keep_the_order_of_the_arguments(place):
    (place / "more").mkdir()
    for name, document in (("z", [1, EOS]), ("more/b", [2, EOS]), ("more/a", [3, EOS])):
        foreign.megatron(place / name, [document])
    assert documents_of(imported(place, place / "z", place / "more")) == [[1, EOS], [3, EOS], [2, EOS]]


def test_the_sentences_of_a_megatron_document_are_one_document(place):
    prefix = foreign.megatron(place / "a", [[1], [2, 3], [], [4, EOS], [5, EOS]], sentences=[2, 0, 2, 1])
    result = imported(place, prefix)
    assert documents_of(result) == [[1, 2, 3, EOS], [4, EOS], [5, EOS]]
    assert result.manifest.records.left_out == {"empty": 1}


@pytest.mark.parametrize("task_bytes", [6, 30])
@pytest.mark.parametrize("sequence", range(1, 5))
def test_a_gap_between_megatron_sequences_is_found_wherever_tasks_are_cut(place, monkeypatch, task_bytes, sequence):
    prefix = foreign.megatron(place / "a", [[1, 2, EOS], [3, EOS], [4, EOS], [5, 6, 7, EOS], [8, EOS]])
    index, start = bytearray(prefix.with_suffix(".idx").read_bytes()), 54 + 8 * sequence
    index[start : start + 8] = struct.pack("<q", struct.unpack_from("<q", index, start)[0] + 2)
    prefix.with_suffix(".idx").write_bytes(index)
    small.shrink(monkeypatch.setattr, chunk_bytes=1)
    with pytest.raises(BadSourceError, match="is damaged: "):
        imported(place, prefix, task_bytes=task_bytes)


def test_an_empty_sample_is_an_empty_document(place):
    result = imported(place, foreign.litdata(place / "in", [[[1, EOS], [], [2, EOS]]]))
    assert documents_of(result) == [[1, EOS], [2, EOS]]
    assert result.manifest.records.left_out == {"empty": 1}


@pytest.mark.parametrize("index", ['{"name": "model", "files": []}', '{"chunks": [{"id": 7}]}', "[]", "{"])
def test_an_index_of_something_else_matters_only_to_files_that_need_one(index, place):
    (place / "in").mkdir()
    _in_table("a.parquet", pa.list_(pa.int32()))(place / "in", DOCUMENTS)
    foreign.megatron(place / "in" / "b", DOCUMENTS)  # its .bin has an .idx
    (place / "in" / "index.json").write_text(index)
    assert documents_of(imported(place, place / "in")) == [*DOCUMENTS, *DOCUMENTS]


def test_a_shard_that_is_kept_compressed_and_plain_is_read_once_by_a_pattern_too(place):
    _packed_and_plain(place / "mds", DOCUMENTS)
    assert documents_of(imported(place, place / "mds" / "*")) == DOCUMENTS


# delimiters

BOS = 257
DELIMITED: dict[str, tuple[list[list[int]], dict[str, Any], list[list[int]], dict[str, int], str]] = {
    "missing or doubled": (
        *([[1, 2], [3, EOS], [4, EOS, EOS, EOS], [EOS], []], {}, [[1, 2, EOS], [3, EOS], [4, EOS]]),
        *({"doubled delimiter": 3, "empty": 1}, "1 document did not end in '<|endoftext|>': it was added"),
    ),
    "inside": (
        *([[1, EOS, 2, 3, EOS, 4], [5, EOS]], {}, [[1, EOS], [2, 3, EOS], [4, EOS], [5, EOS]]),
        *({}, "2 documents ended inside"),
    ),
    "another one": (
        *([[1, 99, 2, EOS, 3, 99], [4]], {"source_eos": 99}, [[1, EOS], [2, EOS], [3, EOS], [4, EOS]]),
        *({}, ""),
    ),
    "at the start, too": (
        *([[BOS, 1, EOS], [2], [3, EOS, BOS, 4]], {"bos": "<s>"}, [[BOS, n, EOS] for n in (1, 2, 3, 4)]),
        *({}, ""),
    ),
}
"""Where a delimiter stands: ids, options; documents, what is left out, and the note."""


@pytest.mark.parametrize("where", DELIMITED)
def test_every_document_ends_in_one_delimiter(where, place):
    ids, options, expected, left_out, note = DELIMITED[where]
    add_bos(place)
    result = imported(place, foreign.megatron(place / "a", ids), **options)
    assert documents_of(result) == expected
    assert result.manifest.records.left_out == left_out
    assert result.manifest.records.read == len(expected) + sum(left_out.values())
    assert any(found.startswith(note) for found in (*result.notes, ""))


def add_bos(place: Path) -> None:
    """Give the tokenizer a token ``<s>``: 257."""
    content = json.loads((place / "tok" / "tokenizer.json").read_text())
    content["added_tokens"].append(special_token(257, "<s>"))
    (place / "tok" / "tokenizer.json").write_text(json.dumps(content))


@pytest.mark.parametrize(("dtype", "found"), [("u2", 257), ("i4", -1), ("i8", 1 << 40)])
def test_an_id_outside_the_vocabulary_is_named_with_file_document_and_limit(dtype, found, place):
    prefix = foreign.megatron(place / "a", [[1, EOS], [2, found, EOS], [3, EOS]], dtype)
    with pytest.raises(BadRecordError, match=rf"a\.bin, record 2: .*: id {found:,} at token 1; .* up to 256"):
        imported(place, prefix)
    assert documents_of(imported(place, prefix, on_bad_record="skip", force=True)) == [[1, EOS], [3, EOS]]


# columns


@pytest.mark.parametrize("name", foreign.TABLES)
def test_columns_of_a_table_of_ids_are_kept_one_value_for_each_document(name, place):
    columns = {"labels": pa.array(DOCUMENTS, pa.list_(pa.int64())), "meta": [{"n": number} for number in range(5)]}
    found = pa.table({"name": [f"doc {number}" for number in range(5)], "input_ids": DOCUMENTS, **columns})
    (place / name).write_bytes(foreign.TABLES[name](found, 2))
    foreign.megatron(place / "b", DOCUMENTS[:1])
    options: dict[str, Any] = {"id_field": "name", "keep_field": ["labels"]}
    result = imported(place, place / name, **options)
    assert [note for note in result.notes if "left out" in note] == [
        f"columns of {name} that are left out: meta; --keep-field NAME keeps one, with a value for each document"
    ]
    expected: list[Any] = [{"id": f"doc {n}", "labels": json.dumps(ids)} for n, ids in enumerate(DOCUMENTS)]
    assert metadata_of(result) == expected
    # an input without columns beside it has no kept values
    beside = imported(place, place / name, place / "b", loss_field="none", out=place / "beside", **options)
    assert metadata_of(beside) == [*expected, {"id": None, "labels": None}]


def metadata_of(result: Any) -> list[dict[str, Any]]:
    with open_corpus(result.directory) as corpus:
        return [corpus.metadata(index) for index in range(len(corpus))]


def test_every_part_of_a_row_that_delimiters_cut_keeps_its_values(place):
    ids = pa.array([[1, EOS, 2], [3, 4, EOS], None], pa.list_(pa.int32(), 3))
    (place / "a.parquet").write_bytes(parquet_bytes(pa.table({"ids": ids, "n": [7, 8, 9]})))
    result = imported(place, place / "a.parquet", token_field="ids", keep_field=["n:int64"])
    assert documents_of(result) == [[1, EOS], [2, EOS], [3, 4, EOS]]
    assert metadata_of(result) == [{"n": 7}, {"n": 7}, {"n": 8}]
    assert result.manifest.records.left_out == {"empty": 1}


def test_columns_of_mds_are_kept(place):
    folder = foreign.mds(place / "mds", [DOCUMENTS[:2], DOCUMENTS[2:]])
    result = imported(place, folder, id_field="id", keep_field=["n:int64"])
    assert metadata_of(result) == [{"id": "abc", "n": 7}] * 5
    assert not any("left out" in note for note in result.notes)
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"int"', '"int32"'))
    with pytest.raises(BadSourceError, match="a value of a column is not stored as int32"):
        imported(place, folder, out=place / "narrow", keep_field=["n:int64"])


# the rest of an import


def test_an_index_that_changes_after_an_import_is_noticed(place):
    prefix = foreign.megatron(place / "a", DOCUMENTS)
    assert [imported(place, prefix).is_new for _ in range(2)] == [True, False]
    foreign.megatron(prefix, [DOCUMENTS[0], *DOCUMENTS[1:]])
    with pytest.raises(TokshardError, match=r"a\.bin was modified since"):
        imported(place, prefix)


def test_tokens_in_an_object_store_are_imported_into_one(place, in_memory):
    remote, local = f"{in_memory}/remote", place / "local"
    foreign.litdata(local, [DOCUMENTS, DOCUMENTS])
    foreign.megatron(local / "a", DOCUMENTS)
    _in_table("a.parquet", pa.list_(pa.int64()))(local, DOCUMENTS)
    store = open_store(str(local))
    for name in files_below(store, ""):
        open_store(remote).put(name, store.get(name))
    options = {"tokenizer": place / "tok", "workers": 1}
    result = import_corpus(remote, out=f"{in_memory}/out", **options)
    expected = imported(place, local).manifest
    assert result.manifest.fingerprints.content == expected.fingerprints.content
    assert result.manifest.num_documents == 4 * len(DOCUMENTS)
    assert documents_of(import_corpus(f"{remote}/a", out=place / "prefix", **options)) == DOCUMENTS
