"""``import_corpus``: documents that other tools have tokenized become a corpus, id for id."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.pipeline import foreign
from tests.pipeline.inputs import (
    arrow_bytes,
    arrow_stream_bytes,
    jsonl,
    parquet_bytes,
    patch_chunk_bytes,
    special_token,
    write_byte_tokenizer,
    zstd,
)
from tests.store.memory import SCHEME, MemoryStore
from tokshard import export_corpus, import_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import BadRecordError, BadSourceError, SourceError, TokshardError, UsageError
from tokshard.format.corpus import Corpus
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.interop.tokens import ends, flat, located, megatron, samples
from tokshard.interop.tokens.batches import TokenSpec
from tokshard.pipeline.commit import BuildResult
from tokshard.pipeline.tasks import planning
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

EOS = 0
SPEC = TokenSpec(field=None, dtype=None, delimiters=(EOS,), narrowest="uint16", max_document_bytes=1 << 20)
DOCUMENTS = [[5, 6, EOS], [7, EOS], [8, 9, 10, 11, EOS], [12, EOS], [255, 256, EOS]]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A directory with the tokenizer of bytes, ``tok``: 257 ids, of which 0 is EOS."""
    write_byte_tokenizer(tmp_path / "tok")
    return tmp_path


def imported(place: Path, *sources: Path, **options: Any) -> BuildResult:
    settings: dict[str, Any] = {"tokenizer": place / "tok", "out": place / "out", "workers": 1, **options}
    return import_corpus(sources, **settings)


def documents_of(result: BuildResult) -> list[list[int]]:
    """The documents of a corpus, which is checked in every byte."""
    assert verify_corpus(result.directory).problems == ()
    with open_corpus(result.directory) as corpus:
        return [document.tolist() for document in corpus.documents()]


def records_of(corpus: Corpus) -> list[int]:
    return [corpus.provenance(index).record for index in range(corpus.num_documents)]


@pytest.mark.parametrize("dtype", foreign.MEGATRON_CODES)
def test_megatron_files_of_every_dtype_are_read_id_for_id(place, dtype):
    documents = [[min(token, 127) for token in document] for document in DOCUMENTS] if dtype[1] == "1" else DOCUMENTS
    assert documents_of(imported(place, foreign.megatron(place / "a_text_document", documents, dtype))) == documents


def test_several_megatron_prefixes_and_directories_keep_the_order_of_the_arguments(place):
    (place / "more").mkdir()
    for name, document in (("z", [1, EOS]), ("more/b", [2, EOS]), ("more/a", [3, EOS])):
        foreign.megatron(place / name, [document])
    assert documents_of(imported(place, place / "z", place / "more")) == [[1, EOS], [3, EOS], [2, EOS]]


def test_the_sentences_of_a_megatron_document_are_one_document(place):
    prefix = foreign.megatron(place / "a", [[1], [2, 3], [], [4, EOS], [5, EOS]], sentences=[2, 0, 2, 1])
    result = imported(place, prefix)
    assert documents_of(result) == [[1, 2, 3, EOS], [4, EOS], [5, EOS]]
    assert result.manifest.records.left_out == {"empty": 1}


def test_a_missing_delimiter_is_added_once_and_a_doubled_one_is_left_out_and_counted(place):
    result = imported(place, foreign.megatron(place / "a", [[1, 2], [3, EOS], [4, EOS, EOS, EOS], [EOS], []]))
    assert documents_of(result) == [[1, 2, EOS], [3, EOS], [4, EOS]]
    assert result.manifest.records.left_out == {"doubled delimiter": 3, "empty": 1}
    assert result.manifest.records.read == 7
    assert "1 document did not end in '<|endoftext|>': it was added" in result.notes


def test_a_delimiter_inside_a_document_ends_a_document(place):
    result = imported(place, foreign.megatron(place / "a", [[1, EOS, 2, 3, EOS, 4], [5, EOS]]))
    assert documents_of(result) == [[1, EOS], [2, 3, EOS], [4, EOS], [5, EOS]]
    assert any(note.startswith("2 documents ended inside") for note in result.notes)
    with open_corpus(result.directory) as corpus:
        assert records_of(corpus) == [1, 2, 3, 4]


def test_another_delimiter_of_the_sources_becomes_eos(place):
    prefix = foreign.megatron(place / "a", [[1, 99, 2, EOS, 3, 99], [4]])
    assert documents_of(imported(place, prefix, source_eos=99)) == [[1, EOS], [2, EOS], [3, EOS], [4, EOS]]


def test_bos_is_recognised_or_added_once(place):
    content = json.loads((place / "tok" / "tokenizer.json").read_text())
    content["added_tokens"].append(special_token(257, "<s>"))
    (place / "tok" / "tokenizer.json").write_text(json.dumps(content))
    prefix = foreign.megatron(place / "a", [[257, 1, EOS], [2], [3, EOS, 257, 4]])
    expected = [[257, 1, EOS], [257, 2, EOS], [257, 3, EOS], [257, 4, EOS]]
    assert documents_of(imported(place, prefix, bos="<s>")) == expected


@pytest.mark.parametrize(("dtype", "found"), [("u2", 257), ("i4", -1), ("i8", 1 << 40)])
def test_an_id_outside_the_vocabulary_is_named_with_file_document_and_limit(place, dtype, found):
    prefix = foreign.megatron(place / "a", [[1, EOS], [2, found, EOS], [3, EOS]], dtype)
    with pytest.raises(BadRecordError) as caught:
        imported(place, prefix)
    expected = f"a.bin, record 2: id outside the vocabulary: id {found:,} at token 1; the vocabulary has ids up to 256"
    assert caught.value.problem.endswith(expected)
    assert "--tokenizer" in caught.value.hint
    result = imported(place, prefix, on_bad_record="skip", force=True)
    assert documents_of(result) == [[1, EOS], [3, EOS]]


@pytest.mark.parametrize("dtype", ["u2", "u4"])
def test_datatrove_files_are_read_by_their_index(place, dtype):
    assert documents_of(imported(place, foreign.datatrove(place / "0_tokens.ds", DOCUMENTS, dtype))) == DOCUMENTS


def test_numpy_arrays_are_read_by_their_offsets(place):
    assert documents_of(imported(place, foreign.numpy_arrays(place / "a.npy", DOCUMENTS, "i4"))) == DOCUMENTS


def test_memory_maps_are_cut_at_the_delimiter(place):
    (place / "part-0.npy").write_bytes(foreign.flat([*DOCUMENTS, [EOS, 3]], "u2"))
    (place / "part-1.npy").write_bytes(foreign.npy([4, 5, EOS], "i8"))
    result = imported(place, place / "part-*.npy")
    assert documents_of(result) == [*DOCUMENTS, [3, EOS], [4, 5, EOS]]
    assert result.manifest.records.left_out == {"doubled delimiter": 1}


def test_a_flat_file_of_any_name_is_read_with_a_dtype_and_a_delimiter(place):
    (place / "train.bin").write_bytes(foreign.flat([[1, 2, 99, 3, 99]], "u4"))
    options = {"format": "flat", "token_dtype": "uint32", "source_eos": 99}
    assert documents_of(imported(place, place / "train.bin", **options)) == [[1, 2, EOS], [3, EOS]]


def test_a_flat_file_in_which_the_delimiter_never_occurs_is_refused_with_the_counts(place):
    (place / "a.npy").write_bytes(foreign.flat([[1, 2, 9], [4, 9]], "u2"))
    with pytest.raises(SourceError) as caught:
        imported(place, place / "a.npy", source_eos=7)
    assert caught.value.problem.endswith(
        "a.npy has 5 ids and no delimiter among them; looked for id 0 and 7 stored as uint16, and the last id is 9"
    )
    assert "0 and 5, as NAME.offsets.npy" in caught.value.hint
    assert documents_of(imported(place, place / "a.npy", source_eos=9, force=True)) == [[1, 2, EOS], [4, EOS]]
    foreign.numpy_arrays(place / "a.npy", [[1, 2, 9, 4, 9]])
    assert documents_of(imported(place, place / "a.npy", force=True)) == [[1, 2, 9, 4, 9, EOS]]


def test_a_flat_file_without_delimiters_is_refused_before_it_fills_the_memory(place):
    (place / "a.npy").write_bytes(foreign.flat([[1] * 100], "u2"))
    with pytest.raises(SourceError, match="has no delimiter in 64 bytes; looked for id 0 stored as uint16") as caught:
        imported(place, place / "a.npy", max_document_bytes=64)
    assert "--source-eos" in caught.value.hint


@pytest.mark.parametrize("encoding", foreign.MDS_ENCODINGS)
def test_mds_shards_are_read_in_every_encoding_of_arrays(place, encoding):
    shards = [[[1, 2, EOS], [3, 4, EOS]], [[5, 6, EOS]]]
    assert documents_of(imported(place, foreign.mds(place / "mds", shards, encoding))) == [*shards[0], *shards[1]]


@pytest.mark.parametrize(
    ("dtype", "document", "problem"),
    [
        ("i4", [5, 6, 7, EOS], "are no ids as int64: one is 25,769,803,781; as int32 all are below 16,777,216"),
        ("u2", [5, 6, 7, 256], "are no ids as int64: one is 72,057,624,103,092,229; as uint16"),
        ("u2", [5, 256, 7, EOS], "are no ids as int64: one is 30,081,548,293; as uint16"),
        ("i4", [5, 6, EOS], "12 bytes of a sample are not ids of 8 bytes each"),
    ],
)
def test_bytes_of_mds_that_are_no_int64_are_refused_with_the_option_that_says_what_they_are(
    place, dtype, document, problem
):
    as_wide = np.frombuffer(np.array(document, dtype).tobytes(), "u1").tolist()
    folder = foreign.mds(place / "mds", [[as_wide]], "bytes:uint8")
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0]["column_encodings"][1] = "bytes"
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError) as caught:
        imported(place, folder)
    assert "--dtype" in caught.value.hint
    assert problem in caught.value.problem


@pytest.mark.parametrize("compress", [("zstd", zstd), ("gz", gzip.compress), ("bz2", bz2.compress)])
def test_compressed_mds_shards_are_read(place, compress):
    folder = foreign.mds(place / "mds", [DOCUMENTS], compress=compress)
    assert documents_of(imported(place, folder)) == DOCUMENTS


@pytest.mark.parametrize("pattern", ["", "*"])
def test_a_shard_that_is_kept_compressed_and_plain_is_read_once(place, pattern):
    folder = foreign.mds(place / "mds", [DOCUMENTS], compress=("gz", gzip.compress))
    (folder / "shard.00000.mds").write_bytes(gzip.decompress((folder / "shard.00000.mds.gz").read_bytes()))
    assert documents_of(imported(place, folder / pattern)) == DOCUMENTS


@pytest.mark.parametrize("gone", ["b.idx", "b.bin"])
def test_a_directory_in_which_one_of_two_files_is_missing_is_refused(place, gone):
    (place / "in").mkdir()
    for name in ("a", "b"):
        foreign.megatron(place / "in" / name, DOCUMENTS)
    (place / "in" / gone).unlink()
    with pytest.raises(BadSourceError, match=rf"/in/b\.\w+ has no {gone} next to it"):
        imported(place, place / "in")


def test_a_companion_that_is_missing_is_named_and_not_the_file_that_needs_it(place):
    file = foreign.megatron(place / "a", DOCUMENTS).with_name("a.bin")
    with pytest.raises(BadSourceError, match=r"/index\.json cannot be read: .*; \S+/a\.bin needs it as litdata"):
        imported(place, file, format="litdata")
    with pytest.raises(UsageError, match=r"/a\.idx holds no ids"):
        imported(place, place / "a.idx")


@pytest.mark.parametrize(("stored", "other"), [("u4", "uint32"), ("i8", "uint64")])
def test_ids_that_are_stored_wider_than_the_vocabulary_needs_are_not_read_as_others(place, stored, other):
    file = place / "part.npy"
    file.write_bytes(foreign.flat([[1 + number % 200, 7, EOS] for number in range(200)], stored))
    with pytest.raises(UsageError, match=f"looks like ids stored as {other}"):
        imported(place, file)
    assert imported(place, file, token_dtype=other).manifest.num_documents == 200


@pytest.mark.parametrize(
    ("write", "options", "problem"),
    [
        (foreign.litdata, {"token_field": "ids"}, "token_field is given, and the sources are litdata"),
        (foreign.litdata, {"token_dtype": "int32"}, "token_dtype is given, and the sources are litdata"),
        (foreign.mds, {"token_dtype": "uint16"}, "says itself how ids are stored: ndarray:uint16"),
    ],
)
def test_an_option_that_a_format_does_not_use_is_refused(place, write, options, problem):
    with pytest.raises(UsageError, match=problem):
        imported(place, write(place / "in", [DOCUMENTS]), **options)


def test_the_dtype_in_a_header_is_not_overruled(place):
    (place / "a.npy").write_bytes(foreign.npy([4, 5, EOS], "i8"))
    with pytest.raises(UsageError, match=r"--dtype is uint16, and the header of \S+a\.npy says int64"):
        imported(place, place / "a.npy", token_dtype="uint16")


@pytest.mark.parametrize("index", ['{"name": "model", "files": []}', '{"chunks": [{"id": 7}]}', "[]", "{"])
def test_an_index_of_something_else_matters_only_to_files_that_need_one(place, index):
    folder = place / "in"
    folder.mkdir()
    (folder / "a.parquet").write_bytes(parquet_bytes(pa.table({"tokens": DOCUMENTS})))
    (folder / "index.json").write_text(index)
    assert documents_of(imported(place, folder)) == DOCUMENTS
    foreign.megatron(folder / "b", DOCUMENTS)  # its .bin has an .idx
    assert documents_of(imported(place, folder, force=True)) == [*DOCUMENTS, *DOCUMENTS]
    for name in ("b.bin", "b.idx", "a.parquet"):
        (folder / name).unlink()
    for name in ("chunk-0-0.bin", "shard.00000.mds.zstd"):
        (folder / name).write_bytes(b"")
        with pytest.raises(BadSourceError) as caught:
            imported(place, folder, force=True)
        (folder / name).unlink()
        assert "/in/index.json " in caught.value.problem
        if "name" in index:
            assert "it has 'name', 'files'; expected 'shards' (MDS) or 'chunks' (litdata)" in caught.value.problem


def test_a_corpus_is_not_imported_but_copied(place):
    corpus = imported(place, foreign.megatron(place / "a", DOCUMENTS)).directory
    for source in (Path(corpus), Path(corpus).parent, Path(corpus) / "*.arrow"):
        with pytest.raises(UsageError, match="out is a corpus of tokshard") as caught:
            imported(place, source, out=place.parent / f"{place.name}-again")
        assert f"tokshard copy {corpus} --out DIR" in caught.value.hint


@pytest.mark.parametrize("hashed", ["sha1", "blake2b"])
@pytest.mark.parametrize("compress", [None, ("gz", gzip.compress)])
def test_the_hashes_of_an_mds_index_are_compared(place, hashed, compress):
    folder = foreign.mds(place / "mds", [DOCUMENTS[:2], DOCUMENTS[2:]], compress=compress, hashed=hashed)
    assert documents_of(imported(place, folder)) == DOCUMENTS
    listed = json.loads((folder / "index.json").read_text())
    said = listed["shards"][1]["raw_data"]["hashes"][hashed]
    listed["shards"][1]["raw_data"]["hashes"][hashed] = said[::-1]
    (folder / "index.json").write_text(json.dumps(listed))
    expected = rf"shard\.00001\.mds\S* is damaged: its {hashed} is {said}, its index says {said[::-1]}"
    with pytest.raises(BadSourceError, match=expected):
        imported(place, folder, force=True)
    left_out = imported(place, folder, force=True, on_bad_source="skip")
    assert documents_of(left_out) == DOCUMENTS[:2]


def test_an_mds_shard_is_read_in_pieces_of_any_size(place, monkeypatch):
    monkeypatch.setattr(located, "BATCH_BYTES", 16)
    monkeypatch.setattr(samples, "_PIECE", 5)
    folder = foreign.mds(place / "mds", [DOCUMENTS, [[number, EOS] for number in range(1, 30)]])
    assert documents_of(imported(place, folder)) == [*DOCUMENTS, *([number, EOS] for number in range(1, 30))]


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ('"other"', r"has no column of token ids; it has id, other, n"),
        ('"n"', r"has several columns 'n'; it has id, n, n"),
        ("[]", r"index\.json.* does not describe the columns"),
    ],
)
def test_columns_of_mds_without_one_of_ids_are_named(place, name, problem):
    folder = foreign.mds(place / "mds", [DOCUMENTS])
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"tokens"', name))
    with pytest.raises(TokshardError, match=problem):
        imported(place, folder, **({"token_field": "n"} if name == '"n"' else {}))


def test_a_column_that_would_have_to_be_unpickled_is_refused(place):
    folder = foreign.mds(place / "mds", [DOCUMENTS])
    index = folder / "index.json"
    index.write_text(index.read_text().replace("ndarray:uint16", "pkl"))
    with pytest.raises(UsageError, match=r"column 'tokens' is stored as pkl, expected ndarray or bytes"):
        imported(place, folder)


@pytest.mark.parametrize("kind", ["no_header_tensor:16", "no_header_tensor:20", "no_header_numpy:5"])
def test_chunks_of_litdata_are_read_in_the_order_of_their_index(place, kind):
    chunks = [[[number, EOS], [100 + number, EOS]] for number in range(1, 13)]
    folder = foreign.litdata(place / "lit", chunks, kind=kind)
    assert documents_of(imported(place, folder)) == [document for documents in chunks for document in documents]


def test_a_chunk_that_is_listed_and_gone_is_an_error(place):
    folder = foreign.litdata(place / "lit", [[[1, EOS]], [[2, EOS]]])
    (folder / "chunk-0-0.bin").unlink()
    with pytest.raises(BadSourceError, match=r"index\.json is damaged: it lists chunk-0-0\.bin, which is not there"):
        imported(place, folder)


def test_samples_of_another_loader_are_refused(place):
    folder = foreign.litdata(place / "lit", [DOCUMENTS])
    index = folder / "index.json"
    index.write_text(index.read_text().replace("TokensLoader", "PyTreeLoader"))
    with pytest.raises(BadSourceError, match="its samples are not those of TokensLoader"):
        imported(place, folder)


def test_a_directory_saved_by_datasets_is_read_in_the_order_of_its_files(place):
    folder = place / "saved"
    folder.mkdir()
    for number, documents in enumerate([DOCUMENTS[:2], DOCUMENTS[2:]]):
        found = pa.table({"input_ids": pa.array(documents, pa.list_(pa.int32()))})
        (folder / f"data-0000{number}-of-00002.arrow").write_bytes(arrow_stream_bytes(found))
    files = [{"filename": f"data-0000{number}-of-00002.arrow"} for number in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")
    assert documents_of(imported(place, folder)) == DOCUMENTS


def fms(folder: Path, counts: str) -> Path:
    """A directory of fms-fsdp with one file, and its table of counts."""
    (folder / "data").mkdir(parents=True)
    (folder / "meta").mkdir()
    schema = pa.schema([pa.field("tokens", pa.uint32())])
    with pa.ipc.new_file(str(folder / "data" / "part.arrow"), schema) as writer:
        for document in DOCUMENTS:
            writer.write_batch(pa.record_batch([pa.array(document[:-1], pa.uint32())], schema=schema))
    lines = f"dataset/filename,documents,tokens\n/data/part.arrow,{counts}\n"
    (folder / "meta" / "combined_counts.csv").write_text(lines)
    return folder


def test_record_batches_of_fms_fsdp_are_documents(place):
    assert documents_of(imported(place, fms(place / "fms", "5,10"))) == DOCUMENTS


@pytest.mark.parametrize("counts", ["6,10", "5,11"])
def test_a_file_that_differs_from_its_counts_is_refused(place, counts):
    said = counts.replace(",", " and ")
    with pytest.raises(BadSourceError, match=rf"holds 5 documents and 10 tokens; .*/fms/meta says {said}"):
        imported(place, fms(place / "fms", counts))


def test_counts_that_were_written_anew_are_read_anew(place):
    imported(place, fms(place / "fms", "5,10"))
    table = place / "fms" / "meta" / "combined_counts.csv"
    table.write_text(table.read_text().replace("5,10", "50,10"))
    with pytest.raises(BadSourceError, match="says 50 and 10"):
        imported(place, place / "fms", out=place / "again")


TABLES = {
    "a.parquet": lambda found: parquet_bytes(found, 2),
    "a.arrow": lambda found: arrow_bytes(found, 2),
    "stream.arrow": lambda found: arrow_stream_bytes(found, 2),
    "a.jsonl": lambda found: jsonl(found.to_pylist()),
    "a.jsonl.gz": lambda found: gzip.compress(jsonl(found.to_pylist())),
}


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("kind", [pa.list_(pa.int32()), pa.large_list(pa.uint16()), pa.list_(pa.int64())])
def test_lists_of_ids_in_tables_are_read_in_order(place, name, kind):
    found = pa.table({"n": range(5), "input_ids": pa.array(DOCUMENTS, kind)})
    (place / name).write_bytes(TABLES[name](found))
    assert documents_of(imported(place, place / name)) == DOCUMENTS


def test_rows_of_a_fixed_length_are_cut_at_the_delimiters_in_them(place):
    found = pa.table({"ids": pa.array([[1, EOS, 2], [3, 4, EOS]], pa.list_(pa.int32(), 3))})
    (place / "a.parquet").write_bytes(parquet_bytes(found))
    result = imported(place, place / "a.parquet", token_field="ids")
    assert documents_of(result) == [[1, EOS], [2, EOS], [3, 4, EOS]]


def test_a_null_row_is_an_empty_document_and_a_null_id_is_damage(place):
    kind = pa.list_(pa.int32())
    (place / "a.arrow").write_bytes(arrow_bytes(pa.table({"tokens": pa.array([[1], None, [2]], kind)})))
    result = imported(place, place / "a.arrow")
    assert documents_of(result) == [[1, EOS], [2, EOS]]
    assert result.manifest.records.left_out == {"empty": 1}
    (place / "a.arrow").write_bytes(arrow_bytes(pa.table({"tokens": pa.array([[1], [None]], kind)})))
    with pytest.raises(BadSourceError, match="1 ids are null"):
        imported(place, place / "a.arrow", force=True)


def test_the_checksums_of_parquet_pages_are_compared(place):
    ids = pa.array([[7, 7, EOS]], pa.list_(pa.int32()))
    options = {"write_page_checksum": True, "compression": "none", "use_dictionary": False, "write_statistics": False}
    pq.write_table(pa.table({"tokens": ids}), place / "a.parquet", **options)
    assert documents_of(imported(place, place / "a.parquet")) == [[7, 7, EOS]]
    content = (place / "a.parquet").read_bytes()
    assert content.count(b"\7\0\0\0\7\0\0\0") == 1
    (place / "a.parquet").write_bytes(content.replace(b"\7\0\0\0\7\0\0\0", b"\7\0\0\0\6\0\0\0"))
    with pytest.raises(BadSourceError, match=r"a\.parquet is damaged: .*checksum"):
        imported(place, place / "a.parquet", force=True)


@pytest.mark.parametrize(
    ("columns", "options", "problem"),
    [
        ({"text": ["a"]}, {}, "has no column of token ids; it has text"),
        ({"tokens": ["a"]}, {}, "column 'tokens' has type string, expected integers or lists of integers"),
        ({"tokens": [[1.5]]}, {}, "has type list<"),
        ({"tokens": [[1]]}, {"token_field": "ids"}, "has no column 'ids'; it has tokens"),
    ],
)
def test_a_table_without_ids_is_refused_with_its_columns(place, columns, options, problem):
    (place / "a.arrow").write_bytes(arrow_bytes(pa.table(columns)))
    with pytest.raises(UsageError) as caught:
        imported(place, place / "a.arrow", **options)
    assert problem in caught.value.problem
    assert "--token-field" in caught.value.hint


def test_json_lines_without_ids_are_refused_with_their_fields(place):
    (place / "a.jsonl").write_bytes(jsonl([{"messages": [], "n": 1}]))
    with pytest.raises(UsageError, match=r"a\.jsonl has no column of token ids; it has messages, n"):
        imported(place, place / "a.jsonl")


def test_tasks_that_share_json_lines_write_every_document_once(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    records = [{"input_ids": [number] * (number % 4)} for number in range(1, 13)]
    (place / "a.jsonl").write_bytes(b"\n" + jsonl(records))
    result = imported(place, place / "a.jsonl", task_bytes=64)
    assert result.manifest.num_shards > 2
    assert documents_of(result) == [[*record["input_ids"], EOS] for record in records if record["input_ids"]]
    assert result.manifest.records.left_out == {"empty": 4}


def columns_table(documents: Sequence[Sequence[int]]) -> pa.Table:
    """Documents with an id, labels, a mask, and a column of numbers that is a text in one row."""
    return pa.table(
        {
            "name": [f"doc {number}" for number in range(len(documents))],
            "input_ids": pa.array(documents, pa.list_(pa.int32())),
            "labels": pa.array(documents, pa.list_(pa.int64())),
            "meta": [{"n": str(number) if number != 2 else "two"} for number in range(len(documents))],
        }
    )


TABLES_WITH_COLUMNS = {"a.parquet": parquet_bytes, "a.arrow": arrow_bytes, "b.arrow": arrow_stream_bytes}
TABLES_WITH_COLUMNS["a.jsonl"] = lambda found, *_: jsonl(found.to_pylist())


@pytest.mark.parametrize("name", TABLES_WITH_COLUMNS)
def test_columns_of_a_table_of_ids_are_kept_one_value_for_each_document(place, name):
    (place / name).write_bytes(TABLES_WITH_COLUMNS[name](columns_table(DOCUMENTS), 2))
    result = imported(place, place / name, id_field="name", keep_field=["labels"])
    assert documents_of(result) == DOCUMENTS
    assert [note for note in result.notes if "left out" in note] == [
        f"columns of {name} that are left out: meta; --keep-field NAME keeps one, with a value for each document"
    ]
    with open_corpus(result.directory) as corpus:
        kept = [corpus.metadata(index) for index in range(len(DOCUMENTS))]
    assert kept == [{"id": f"doc {n}", "labels": json.dumps(document)} for n, document in enumerate(DOCUMENTS)]


def test_a_document_whose_kept_value_has_another_type_is_a_bad_record(place):
    (place / "a.parquet").write_bytes(parquet_bytes(columns_table(DOCUMENTS)))
    with pytest.raises(
        BadRecordError, match=r"record 3: kept field of another type: field 'meta\.n' is 'two', not int"
    ):
        imported(place, place / "a.parquet", keep_field=["meta.n:int64"])
    result = imported(place, place / "a.parquet", keep_field=["meta.n:int64"], on_bad_record="skip", force=True)
    assert documents_of(result) == [*DOCUMENTS[:2], *DOCUMENTS[3:]]
    with open_corpus(result.directory) as corpus:
        assert [corpus.metadata(index)["meta.n"] for index in range(4)] == [0, 1, 3, 4]


def test_every_part_of_a_document_that_delimiters_cut_keeps_its_values(place):
    table = pa.table({"tokens": pa.array([[1, EOS, 2, EOS], [3, EOS]], pa.list_(pa.int32())), "n": [7, 8]})
    (place / "a.parquet").write_bytes(parquet_bytes(table))
    result = imported(place, place / "a.parquet", keep_field=["n:int64"])
    with open_corpus(result.directory) as corpus:
        assert [corpus.metadata(index)["n"] for index in range(3)] == [7, 7, 8]


def test_columns_of_mds_are_kept_and_those_that_would_be_unpickled_refused(place):
    folder = foreign.mds(place / "mds", [DOCUMENTS[:2], DOCUMENTS[2:]])
    result = imported(place, folder, id_field="id", keep_field=["n:int64"])
    assert documents_of(result) == DOCUMENTS
    assert not any("left out" in note for note in result.notes)
    with open_corpus(result.directory) as corpus:
        assert [corpus.metadata(index) for index in range(5)] == [{"id": "abc", "n": 7}] * 5
    index = folder / "index.json"
    index.write_text(index.read_text().replace('"str"', '"pkl"'))
    with pytest.raises(UsageError, match=r"column 'id' .* is stored as pkl, which cannot be kept"):
        imported(place, folder, id_field="id", force=True)
    with pytest.raises(UsageError, match="has no column 'other'; it has id, tokens, n"):
        imported(place, folder, keep_field=["other"], force=True)


def test_inputs_without_columns_beside_a_table_have_no_kept_values(place):
    (place / "a.parquet").write_bytes(parquet_bytes(columns_table(DOCUMENTS)))
    foreign.megatron(place / "b", DOCUMENTS[:1])
    result = imported(place, place / "a.parquet", place / "b", keep_field=["name"], loss_field="none")
    with open_corpus(result.directory) as corpus:
        assert [corpus.metadata(index)["name"] for index in (0, 4, 5)] == ["doc 0", "doc 4", None]


def test_columns_with_a_value_for_each_id_cannot_be_kept(place):
    (place / "a.arrow").write_bytes(arrow_bytes(pa.table({"tokens": pa.array([1, EOS], pa.int32()), "mask": [0, 1]})))
    with pytest.raises(UsageError, match="have a value for each id, and not for each document"):
        imported(place, place / "a.arrow", keep_field=["mask"])
    assert any("left out: mask" in note for note in imported(place, place / "a.arrow").notes)


def test_a_parquet_column_of_ids_themselves_is_refused(place):
    (place / "a.parquet").write_bytes(parquet_bytes(pa.table({"tokens": pa.array([1, EOS], pa.int32())})))
    with pytest.raises(UsageError, match="column 'tokens' has type int32, expected lists of integers"):
        imported(place, place / "a.parquet")


def test_an_import_is_estimated_and_nothing_is_written(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    (place / "a.parquet").write_bytes(parquet_bytes(columns_table(DOCUMENTS * 40)))
    words = ["import", "a.parquet", "--out", "out", "--tokenizer", "tok", "--keep-field", "labels", "--dry-run"]
    assert run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["documents"], shown["tokens"]) == (200, 40 * sum(map(len, DOCUMENTS)))
    assert run(words) == 0
    assert "nothing was written to out" in capsys.readouterr().out
    assert not (place / "out").exists()


@pytest.mark.parametrize("write", [foreign.mds, foreign.litdata])
def test_an_index_that_lists_a_file_twice_is_refused(place, write):
    folder = write(place / "in", [DOCUMENTS[:2], DOCUMENTS[2:]])
    index = json.loads((folder / "index.json").read_text())
    listed = index.get("shards") or index["chunks"]
    listed.append(listed[0])
    (folder / "index.json").write_text(json.dumps(index))
    with pytest.raises(BadSourceError, match=r"/in/index\.json is damaged: it lists \S+ twice"):
        imported(place, folder)


def test_counts_that_are_no_csv_are_damage(place):
    (place / "in" / "meta").mkdir(parents=True)
    (place / "in" / "a.arrow").write_bytes(arrow_bytes(pa.table({"tokens": pa.array([1, EOS], pa.int32())})))
    (place / "in" / "meta" / "counts.csv").write_text("dataset/filename,documents,tokens\r\nin\ra.arrow,1,2\n")
    with pytest.raises(BadSourceError, match=r"/counts\.csv is damaged: a line is not a file and two numbers"):
        imported(place, place / "in")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a few bytes, so that every bound falls somewhere in a small file."""
    monkeypatch.setattr(planning, "CHUNK_BYTES", 1)
    monkeypatch.setattr(located, "BATCH_BYTES", 8)
    monkeypatch.setattr(flat, "BATCH_BYTES", 8)
    monkeypatch.setattr(located, "_DOCUMENTS_AT_ONCE", 2)


DIVISIBLE = {
    "megatron": (lambda place, documents: foreign.megatron(place / "a", documents), "a.bin", megatron.read),
    "datatrove": (lambda place, documents: foreign.datatrove(place / "a.ds", documents, "u4"), "a.ds", ends.read_ds),
    "npy": (lambda place, documents: foreign.numpy_arrays(place / "a.npy", documents), "a.npy", ends.read_npy),
}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("form", DIVISIBLE)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths=st.lists(st.integers(0, 5), max_size=10), cuts=st.lists(st.integers(1, 199), max_size=4))
def test_ranges_of_any_size_give_every_document_once_and_in_order(place, form, lengths, cuts):
    documents = [[number + 1] * length for number, length in enumerate(lengths)]
    write, name, read = DIVISIBLE[form]
    write(place, documents)
    found = [
        part.tolist()
        for batch in in_ranges(read, place, name, cuts)
        for part in np.split(batch.tokens, batch.ends)[:-1]
    ]
    assert found == documents


def in_ranges(read, place, name, cuts):
    """The batches of a file that is read in ranges with these bounds."""
    store = open_store(str(place))
    for start, stop in itertools.pairwise([0, *sorted(set(cuts)), None]):
        yield from read(store, name, start, stop, SPEC)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("has_header", [False, True])
@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tokens=st.lists(st.integers(0, 2), max_size=40), cuts=st.lists(st.integers(1, 199), max_size=4))
def test_ranges_of_a_flat_file_begin_and_end_with_documents(place, has_header, tokens, cuts):
    content = foreign.npy(tokens, "u2") if has_header else foreign.flat([tokens], "u2")
    (place / "a.npy").write_bytes(content)
    if tokens and EOS not in tokens:
        with pytest.raises(SourceError, match="no delimiter among them"):
            list(in_ranges(flat.read, place, "a.npy", cuts))
        return
    found = [batch.tokens.tolist() for batch in in_ranges(flat.read, place, "a.npy", cuts)]
    assert [token for batch in found for token in batch] == tokens
    assert all(batch[-1] == EOS for batch in found[:-1])


@pytest.mark.usefixtures("small")
def test_tasks_that_share_a_file_write_what_one_task_writes(place):
    documents = [[number] * (number % 4) for number in range(1, 13)]
    result = imported(place, foreign.megatron(place / "a", documents), task_bytes=10)
    assert result.manifest.num_shards > 2
    assert documents_of(result) == [[*ids, EOS] for ids in documents if ids]
    with open_corpus(result.directory) as corpus:
        assert records_of(corpus) == [number for number, ids in enumerate(documents, 1) if ids]


def test_options_of_a_build_mean_the_same(place):
    prefix = foreign.megatron(place / "a", [[number, number, EOS] for number in range(1, 101)])
    assert len(documents_of(imported(place, prefix, max_documents=7))) == 7
    result = imported(place, prefix, validation_fraction=0.2, force=True)
    parts = [{document[0] for document in documents_of_place(corpus.directory)} for corpus in result.corpora]
    assert sorted(parts[0] | parts[1]) == list(range(1, 101))
    assert 5 < len(parts[1]) < 40


def documents_of_place(directory: str) -> list[list[int]]:
    with open_corpus(directory) as corpus:
        return [document.tolist() for document in corpus.documents()]


def test_an_import_grows_by_generations(place):
    imported(place, foreign.megatron(place / "a", [[1, EOS]]))
    result = imported(place, foreign.megatron(place / "b", [[2, EOS]]), append=True)
    assert documents_of(result) == [[1, EOS], [2, EOS]]


def test_an_index_that_changes_during_an_import_is_noticed(place, monkeypatch):
    prefix = foreign.megatron(place / "a", DOCUMENTS)
    result = imported(place, prefix)
    assert not imported(place, prefix).is_new
    assert result.is_new
    foreign.megatron(prefix, [DOCUMENTS[0], *DOCUMENTS[1:]])
    with pytest.raises(TokshardError, match=r"a\.bin was modified since"):
        imported(place, prefix)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: b"XX" + data[2:], "it begins with"),
        (lambda data: data[:9] + b"\2" + data[10:], "it has version 2, expected 1"),
        (lambda data: data[:17] + b"\7" + data[18:], r"its dtype has the code 7 \(float32\)"),
        (lambda data: data[:-1], "bytes, expected"),
        (lambda data: data[:20], "it has 20 bytes, expected at least 34"),
        (lambda data: data[:18] + b"\xff" * 8 + data[26:], "bytes, expected"),
        (lambda data: data[:34] + b"\xff\xff\xff\xff" + data[38:], "sequence 0 has -1 tokens"),
        (lambda data: data[:54] + b"\2" + data[55:], "its sequences lie at bytes 2"),
        (lambda data: data[:62] + b"\0" + data[63:], "sequence 1 begins at byte 0, and the one before it ends at 6"),
        (lambda data: data[:-8] + b"\4" + data[-7:], "its documents are sequences 0 to 4 of 5"),
        (lambda data: data[:-16] + b"\6" + data[-15:], "expected ascending numbers up to 5"),
    ],
)
def test_a_damaged_megatron_index_is_named_with_what_is_wrong(place, change, problem):
    prefix = foreign.megatron(place / "a", DOCUMENTS)
    index = place / "a.idx"
    index.write_bytes(change(index.read_bytes()))
    with pytest.raises(BadSourceError, match=problem):
        imported(place, prefix)


def test_megatron_ids_that_are_cut_do_not_fit_their_index(place):
    prefix = foreign.megatron(place / "a", DOCUMENTS)
    (place / "a.bin").write_bytes((place / "a.bin").read_bytes()[:-2])
    with pytest.raises(BadSourceError, match="and there are 28 bytes of ids"):
        imported(place, prefix)


def flips(data: bytes) -> st.SearchStrategy[bytes]:
    """The bytes with one of them changed, or cut."""

    def changed(place_and_value: tuple[int, int]) -> bytes:
        place, value = place_and_value
        return data[:place] if value == 0 else data[:place] + bytes([data[place] ^ value]) + data[place + 1 :]

    return st.tuples(st.integers(0, len(data) - 1), st.integers(0, 255)).map(changed)


FILES = {
    "megatron": (lambda place: foreign.megatron(place / "a", DOCUMENTS), "a.bin", megatron.read),
    "datatrove": (lambda place: foreign.datatrove(place / "a.ds", DOCUMENTS), "a.ds", ends.read_ds),
    "npy": (lambda place: foreign.numpy_arrays(place / "a.npy", DOCUMENTS), "a.npy", ends.read_npy),
    "flat": (lambda place: (place / "a.npy").write_bytes(foreign.npy([1, 2, EOS, 3], "u2")), "a.npy", flat.read),
    "mds": (lambda place: foreign.mds(place, [DOCUMENTS]), "shard.00000.mds", samples.read_mds),
    "mds without dtype": (
        lambda place: foreign.mds(place, [DOCUMENTS], "ndarray"),
        "shard.00000.mds",
        samples.read_mds,
    ),
    "zstd": (
        lambda place: foreign.mds(place, [DOCUMENTS], compress=("zstd", zstd)),
        "shard.00000.mds.zstd",
        samples.read_mds,
    ),
    "litdata": (lambda place: foreign.litdata(place, [DOCUMENTS]), "chunk-0-0.bin", samples.read_litdata),
}


@pytest.mark.parametrize("form", FILES)
@settings(max_examples=examples(40), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_or_a_cut_is_an_error_or_other_ids(tmp_path, form, data):
    write, name, read = FILES[form]
    write(tmp_path)
    file = data.draw(st.sampled_from(sorted(path for path in tmp_path.iterdir() if path.suffix != ".metadata")))
    file.write_bytes(data.draw(flips(file.read_bytes())))
    with contextlib.suppress(TokshardError):
        for batch in read(open_store(str(tmp_path)), name, 0, None, SPEC):
            assert batch.tokens.nbytes <= (tmp_path / name).stat().st_size * 100
            assert len(batch.tokens) == batch.ends[-1]
            assert (np.diff(batch.ends, prepend=0) >= 0).all()


@pytest.mark.parametrize("name", TABLES)
@settings(max_examples=examples(8), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_flipped_byte_or_a_cut_of_a_table_is_an_error_or_another_corpus(place, name, data):
    content = TABLES[name](pa.table({"tokens": pa.array(DOCUMENTS, pa.list_(pa.uint16()))}))
    (place / name).write_bytes(data.draw(flips(content)))
    with contextlib.suppress(TokshardError):
        result = imported(place, place / name, force=True, on_bad_record="skip")
        assert verify_corpus(result.directory).problems == ()


def test_tokens_in_an_object_store_are_imported_into_one(place, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    remote, local = f"{SCHEME}:/{place}/remote", place / "local"
    local.mkdir()
    foreign.megatron(local / "a", DOCUMENTS)
    foreign.litdata(local / "lit", [DOCUMENTS, DOCUMENTS])
    (local / "table.parquet").write_bytes(parquet_bytes(pa.table({"tokens": pa.array(DOCUMENTS)})))
    store = open_store(str(local))
    for name in files_below(store, ""):
        open_store(remote).put(name, store.get(name))
    result = import_corpus(remote, tokenizer=place / "tok", out=f"{SCHEME}:/{place}/out", workers=1)
    expected = imported(place, local).manifest
    assert result.manifest.fingerprints.content == expected.fingerprints.content
    assert result.manifest.num_documents == 4 * len(DOCUMENTS)
    by_prefix = import_corpus(f"{remote}/a", tokenizer=place / "tok", out=place / "prefix", workers=1)
    assert documents_of(by_prefix) == DOCUMENTS


@pytest.mark.parametrize("form", ["megatron", "mds", "litdata", "fms", "hf"])
def test_what_is_exported_is_imported_document_for_document(place, form):
    result = imported(place, foreign.megatron(place / "a", DOCUMENTS))
    export_corpus(result.directory, format=form, out=place / "exported")
    again = imported(place, place / "exported", out=place / "again")
    assert again.manifest.fingerprints.content == result.manifest.fingerprints.content


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"text_unit": "line"}, "text_unit is given"),
        ({"keep_field": ["url"]}, "keep_field is given, and the sources are megatron, which do not use it"),
        ({"id_field": "url"}, "id_field is given, and the sources are megatron, which do not use it"),
        ({"format": "csv"}, "format is 'csv'"),
        ({"source_eos": -1}, "source_eos is -1: expected int >= 0"),
        ({"token_dtype": "float32"}, "token_dtype is 'float32'"),
    ],
)
def test_what_means_nothing_for_tokens_is_refused(place, options, problem):
    with pytest.raises(UsageError, match=problem):
        imported(place, foreign.megatron(place / "a", DOCUMENTS), **options)


def test_the_command_shows_what_it_did_and_the_beginning_as_text(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    foreign.megatron(place / "a", [[1 + byte for byte in b"hello"], [2, EOS]])
    words = ["import", "a", "--out", "out", "--tokenizer", "tok", "--workers", "1", "--quiet"]
    assert run(words) == 0
    captured = capsys.readouterr()
    assert "begins      hello<|endoftext|>" in captured.out
    assert "note: 1 document did not end in '<|endoftext|>'" in captured.err
    assert run([*words, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["is_new"], shown["begins"]) == (False, "hello<|endoftext|>")
    assert shown["corpora"][0]["manifest"]["build"]["reads"] == "tokens"


def test_an_import_that_writes_no_document_names_the_option_that_says_how_sources_are_read(place):
    with pytest.raises(TokshardError) as caught:
        imported(place, foreign.megatron(place / "a", [[EOS]]))
    assert caught.value.hint == "check the sources and --format, and start over with --force"


def test_an_unfinished_import_says_which_command_continues_it(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    foreign.megatron(place / "a", [[1, EOS], [999, EOS]])
    assert run(["import", "a", "--out", "out", "--tokenizer", "tok", "--format", "megatron", "--quiet"]) == 1
    capsys.readouterr()
    assert run(["status", "out"]) == 0
    shown = capsys.readouterr().out
    assert "tokshard import a" in shown
    assert "text" not in shown


def test_jobs_of_an_array_share_an_import(place, capsys, monkeypatch):
    monkeypatch.chdir(place)
    for name in "ab":
        foreign.megatron(place / name, DOCUMENTS)
    words = ["import", "a", "b", "--out", "out", "--tokenizer", "tok", "--quiet", "--num-jobs", "2"]
    assert [run([*words, "--job-index", str(index)]) for index in range(2)] == [0, 0]
    assert run(["commit", "out"]) == 0
    assert documents_of_place("out") == [*DOCUMENTS, *DOCUMENTS]


def test_an_import_of_which_all_goes_for_validation_shows_the_beginning_of_that_part(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--tokenizer", str(place / "tok"), "--out", str(place / "out"), "--validation-fraction", "0.5", "-q"]
    (place / "a.jsonl").write_bytes(jsonl([{"tokens": document} for document in DOCUMENTS]))
    assert run(["import", str(place / "a.jsonl"), *options]) == 0
    for number in range(100, 110):  # one of them goes into either part
        (place / f"{number}.jsonl").write_bytes(jsonl([{"tokens": [number, EOS]}]))
        capsys.readouterr()
        assert run(["import", str(place / f"{number}.jsonl"), *options, "--append"]) == 0
        assert f"begins      {chr(number - 1)}" in capsys.readouterr().out


def test_a_comparison_shows_no_bytes_per_token_of_an_import(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (place / "a.jsonl").write_bytes(jsonl([{"tokens": document} for document in DOCUMENTS]))
    out = str(imported(place, place / "a.jsonl").directory)
    assert run(["inspect", out, out, "--sample", "0"]) == 0
    assert "bytes per token" not in capsys.readouterr().out
    assert run(["inspect", out, "--sample", "0", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text_bytes_per_token"] is None
