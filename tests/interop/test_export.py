"""An export holds the documents of the corpus in their order, or does not appear.

The files are read here by what is known of the formats; test_with_*.py read them with the loaders.
"""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.store.memory import SCHEME, MemoryStore
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import DamagedCorpusError, ExportError, UsageError
from tokshard.format.loss import LOSS, WEIGHTS
from tokshard.interop.export import documents as documents_module
from tokshard.interop.export.export import FORMATS, export_corpus
from tokshard.interop.export.megatron import MegatronFormat
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

LENGTHS = [1, 5, 300, 2, 1, 70_000, 17, 900, 255, 1_000]
DOCUMENTS = documents_of(LENGTHS)
WIDE = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<eos>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            },
            {
                "id": 1,
                "content": "<bos>",
                "special": True,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
            },
        ],
        "model": {"type": "WordLevel", "vocab": {"<eos>": 0, "<bos>": 1, "far": 70_000}, "unk_token": "far"},
    }
).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten documents in several shards, one of them longer than a shard."""
    return write_corpus(tmp_path / "corpus", DOCUMENTS, shard_tokens=1_000, tokenizer=TINY_TOKENIZER)


# the formats, as their pages have them


def read_megatron(directory: Path) -> tuple[str, list[list[int]]]:
    found: list[list[int]] = []
    name = ""
    for path in sorted(directory.glob("*.idx")):
        index = path.read_bytes()
        assert index[:9] == b"MMIDIDX\x00\x00"
        version, code, sequences, entries = struct.unpack_from("<QBQQ", index, 9)
        name = {4: "int32", 8: "uint16"}[code]
        assert (version, entries) == (1, sequences + 1)
        lengths = np.frombuffer(index, np.int32, sequences, 34)
        places = np.frombuffer(index, np.int64, sequences, 34 + 4 * sequences)
        assert np.frombuffer(index, np.int64, offset=34 + 12 * sequences).tolist() == list(range(entries))
        content = path.with_suffix(".bin").read_bytes()
        assert len(content) == lengths.sum() * np.dtype(name).itemsize
        found += [
            np.frombuffer(content, name, length, place).tolist() for length, place in zip(lengths, places, strict=True)
        ]
    return name, found


def samples(content: bytes, text: bytes = b"") -> list[bytes]:
    (count,) = struct.unpack_from("<I", content)
    places = struct.unpack_from(f"<{count + 1}I", content, 4)
    assert content[4 * (count + 2) : places[0]] == text
    assert places[-1] == len(content)
    return [content[start:stop] for start, stop in itertools.pairwise(places)]


def read_mds(directory: Path) -> tuple[str, list[list[int]]]:
    index = json.loads((directory / "index.json").read_bytes())
    found: list[list[int]] = []
    name = ""
    for shard in index["shards"]:
        (encoding,) = shard["column_encodings"]
        name = encoding.removeprefix("ndarray:")
        content = (directory / shard["raw_data"]["basename"]).read_bytes()
        config = {key: shard[key] for key in shard if key not in ("raw_data", "samples", "zip_data")}
        read = samples(content, json.dumps(config, sort_keys=True).encode())
        assert (len(content), len(read)) == (shard["raw_data"]["bytes"], shard["samples"])
        for sample in read:
            size, shape = struct.unpack_from("<IB", sample)
            width = 1 << shape % 4
            length = int.from_bytes(sample[5 : 5 + width], "little")
            assert (len(sample), shape >> 2) == (4 + size, 1)
            found.append(np.frombuffer(sample, name, length, 5 + width).tolist())
    return name, found


def read_litdata(directory: Path) -> tuple[str, list[list[int]]]:
    index = json.loads((directory / "index.json").read_bytes())
    (kind,) = index["config"]["data_format"]
    name = {"no_header_tensor:20": "uint16", "no_header_tensor:16": "int32"}[kind]
    found: list[list[int]] = []
    for chunk in index["chunks"]:
        content = (directory / chunk["filename"]).read_bytes()
        read = [np.frombuffer(sample, name).tolist() for sample in samples(content)]
        assert (chunk["chunk_bytes"], chunk["chunk_size"]) == (len(content), len(read))
        assert chunk["dim"] == sum(map(len, read))
        found += read
    return name, found


def read_fms(directory: Path) -> tuple[str, list[list[int]]]:
    found: list[list[int]] = []
    lines = ["dataset/filename,documents,tokens"]
    for path in sorted(directory.glob("corpus/*.arrow")):
        reader = ipc.open_file(path)
        assert reader.schema.field("tokens").type == pa.uint32()
        read = [reader.get_batch(index)["tokens"].to_pylist() for index in range(reader.num_record_batches)]
        lines.append(f"/{path.relative_to(directory)},{len(read)},{sum(map(len, read))}")
        found += read
    assert (directory / "meta/combined_counts.csv").read_text() == "\n".join(lines) + "\n"
    return "uint32", found


def read_hugging_face(directory: Path) -> tuple[str, list[list[int]]]:
    tables = [parquet.read_table(path) for path in sorted(directory.glob("*.parquet"))]
    return str(tables[0].schema.field("input_ids").type.value_type), pa.concat_tables(tables)["input_ids"].to_pylist()


def read_olmo(directory: Path) -> tuple[str, list[list[int]]]:
    """Of a small vocabulary: the files do not say how ids are stored."""
    found: list[list[int]] = []
    for path in sorted(directory.glob("token_ids_part_*.npy")):
        ids = np.fromfile(path, np.uint16)
        found += [part.tolist() for part in np.split(ids, np.flatnonzero(ids == 0) + 1) if len(part)]
    return "uint16", found


def read_datatrove(directory: Path) -> tuple[str, list[list[int]]]:
    found: list[list[int]] = []
    width = 0
    for path in sorted(directory.glob("*.ds")):
        ends = np.fromfile(f"{path}.index", "<u8")
        said, num_tokens, _ = Path(f"{path}.metadata").read_text().splitlines()
        width = int(said.rpartition("|")[2])
        ids = np.fromfile(path, f"<u{width}")
        assert len(ids) == int(num_tokens) == ends[-1]
        found += [part.tolist() for part in np.split(ids, ends[:-1].astype(int))]
    return f"uint{8 * width}", found


def packs(directory: Path) -> pa.Table:
    return pa.concat_tables(parquet.read_table(path) for path in sorted(directory.glob("*.idx.parquet")))


def read_bridge(directory: Path) -> tuple[str, list[list[int]]]:
    rows = packs(directory).to_pylist()
    cut = [np.split(np.array(row["input_ids"]), row["seq_start_id"][1:]) for row in rows]
    assert all(len(row["loss_mask"]) == len(row["input_ids"]) and row["seq_start_id"][0] == 0 for row in rows)
    return "int32", [part.tolist() for parts in cut for part in parts]


READERS: dict[str, Callable[[Path], tuple[str, list[list[int]]]]] = {
    "megatron": read_megatron,
    "mds": read_mds,
    "litdata": read_litdata,
    "fms": read_fms,
    "hf": read_hugging_face,
    "olmo": read_olmo,
    "datatrove": read_datatrove,
    "bridge": read_bridge,
}


def options_of(kind: str) -> dict[str, Any]:
    """What a format cannot do without."""
    return {"pack_tokens": 70_000} if kind == "bridge" else {}


def export(corpus: Path, kind: str, out: Path, **options: Any) -> tuple[str, list[list[int]]]:
    """The dtype and the documents of an export, which says the same of itself."""
    done = export_corpus(corpus, format=kind, out=out, **options_of(kind), **options)
    name, found = READERS[kind](Path(done.location))
    assert (done.dtype, done.num_documents, done.num_tokens) == (name, len(found), sum(map(len, found)))
    assert not list(out.parent.glob(".*"))
    return name, found


# what is exported


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("file_bytes", [None, 2_000])
def test_an_export_holds_every_document_in_order(corpus, tmp_path, kind, file_bytes):
    _, found = export(corpus, kind, tmp_path / "out", drop_eos=False, file_bytes=file_bytes)
    assert found == DOCUMENTS
    shown = list((tmp_path / "out").rglob("*0001*")) + list((tmp_path / "out").glob("chunk-0-1.bin"))
    assert bool(shown) == (file_bytes is not None)


@pytest.mark.parametrize("kind", [kind for kind in FORMATS if kind != "olmo"])
def test_documents_without_eos_lose_their_last_token_and_empty_ones_are_counted(corpus, tmp_path, kind):
    _, found = export(corpus, kind, tmp_path / "out", drop_eos=True)
    assert found == [document[:-1] for document in DOCUMENTS if len(document) > 1]
    again = export_corpus(corpus, format=kind, out=tmp_path / "again", drop_eos=True, **options_of(kind))
    assert (again.num_left_out, again.eos) == (2, False)


def test_fms_adds_the_eos_itself_so_it_is_left_out(corpus, tmp_path):
    assert export(corpus, "fms", tmp_path / "out") == export(corpus, "fms", tmp_path / "other", drop_eos=True)


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("megatron", "int32"),
        ("mds", "uint32"),
        ("litdata", "int32"),
        ("fms", "uint32"),
        ("hf", "int32"),
        ("datatrove", "uint32"),
        ("bridge", "int32"),
    ],
)
def test_ids_of_a_large_vocabulary_are_stored_in_four_bytes(tmp_path, kind, dtype):
    documents = [[1, 70_000, 65_536, 0], [1, 0], [1, 5, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=WIDE, eos="<eos>", bos="<bos>")
    assert export(corpus, kind, tmp_path / "out", drop_eos=False) == (dtype, documents)
    _, bare = export(corpus, kind, tmp_path / "bare", drop_eos=True, drop_bos=True)
    assert bare == [[70_000, 65_536], [5]]


def test_ids_of_a_large_vocabulary_take_four_bytes_in_files_of_olmo(tmp_path):
    documents = [[1, 70_000, 65_536, 0], [1, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=WIDE, eos="<eos>", bos="<bos>")
    assert export_corpus(corpus, format="olmo", out=tmp_path / "out").dtype == "uint32"
    assert np.fromfile(tmp_path / "out/token_ids_part_0000.npy", np.uint32).tolist() == [1, 70_000, 65_536, 0, 1, 0]
    assert not list((tmp_path / "out").glob("labels*"))


SPANS = {LOSS: [[1, 3], [], [1, 2, 4, 6]], WEIGHTS: [[0.5], [], [2.0, 0.25]], "url": ["a", "b", "c"]}
TRAINED = [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0]]


def trained(path: Path, *, is_weighted: bool = False) -> Path:
    columns = {LOSS: "spans", **({WEIGHTS: "weights"} if is_weighted else {}), "url": "string"}
    source = Source(documents=TRAINED, metadata={name: SPANS[name] for name in columns})
    return write_corpus(path, sources=[source], columns=columns, tokenizer=TINY_TOKENIZER)


def test_a_hugging_face_data_set_has_labels(tmp_path):
    done = export_corpus(trained(tmp_path / "corpus"), format="hf", out=tmp_path / "out")
    table = parquet.read_table(tmp_path / "out")
    assert table.column_names == ["input_ids", "labels", "url"]
    assert table["labels"].to_pylist() == [[-100, 2, 3, -100], [-100], [-100, 3, -100, -100, 2, 0]]
    assert table.schema.field("labels").type == table.schema.field("input_ids").type
    assert (done.num_targets, done.num_dropped_targets) == (5, 0)
    done = export_corpus(trained(tmp_path / "other"), format="hf", out=tmp_path / "bare", drop_eos=True)
    assert parquet.read_table(tmp_path / "bare")["labels"].to_pylist() == [[-100, 2, 3], [-100, 3, -100, -100, 2]]
    assert (done.num_targets, done.num_dropped_targets, done.num_left_out) == (4, 1, 1)


def test_a_hugging_face_data_set_of_weighted_spans_has_a_mask_of_floats(tmp_path):
    export_corpus(trained(tmp_path / "corpus", is_weighted=True), format="hf", out=tmp_path / "out")
    table = parquet.read_table(tmp_path / "out")
    assert table.column_names == ["input_ids", "loss_mask", "url"]
    assert table["loss_mask"].to_pylist() == [[0, 0.5, 0.5, 0], [0], [0, 2, 0, 0, 0.25, 0.25]]


def test_files_of_olmo_have_a_byte_for_each_id(tmp_path):
    done = export_corpus(trained(tmp_path / "corpus"), format="olmo", out=tmp_path / "out")
    mask = (tmp_path / "out/labels_mask_part_0000.npy").read_bytes()
    assert mask == bytes([0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1])
    assert (done.num_targets, done.num_files) == (5, 1)


def test_files_of_datatrove_have_a_byte_for_each_id(tmp_path):
    done = export_corpus(trained(tmp_path / "corpus"), format="datatrove", out=tmp_path / "out")
    assert (tmp_path / "out/part_00000.ds.loss").read_bytes() == bytes([0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1])
    assert (done.num_targets, done.num_files) == (5, 1)
    export_corpus(trained(tmp_path / "other"), format="datatrove", out=tmp_path / "bare", drop_loss=True)
    assert not list((tmp_path / "bare").glob("*.loss"))


def test_packs_hold_consecutive_documents_and_a_mask_shifted_by_one(tmp_path):
    done = export_corpus(trained(tmp_path / "corpus"), format="bridge", out=tmp_path / "out", pack_tokens=10)
    assert packs(tmp_path / "out").to_pylist() == [
        {"input_ids": [1, 2, 3, 0, 0], "loss_mask": [1, 1, 0, 0, 0], "seq_start_id": [0, 4]},
        {"input_ids": [3, 3, 1, 2, 2, 0], "loss_mask": [1, 0, 0, 1, 1, 0], "seq_start_id": [0]},
    ]
    assert (done.num_targets, done.num_documents) == (5, 3)
    text = write_corpus(tmp_path / "text", TRAINED, tokenizer=TINY_TOKENIZER)
    export_corpus(text, format="bridge", out=tmp_path / "all", pack_tokens=11)
    (row,) = packs(tmp_path / "all").to_pylist()
    assert row["loss_mask"] == [1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 0]


def test_a_row_is_filled_with_documents_that_are_read_apart(tmp_path, monkeypatch):
    lengths = [3, 4, 2, 5, 1, 1, 8, 2, 2, 3]
    corpus = write_corpus(tmp_path / "corpus", documents_of(lengths), shard_tokens=4, tokenizer=TINY_TOKENIZER)
    monkeypatch.setattr(documents_module, "SLICE_TOKENS", 5)
    export_corpus(corpus, format="bridge", out=tmp_path / "out", pack_tokens=8)
    assert packs(tmp_path / "out")["seq_start_id"].to_pylist() == [[0, 3], [0, 2, 7], [0], [0], [0, 2, 4]]
    assert read_bridge(tmp_path / "out")[1] == documents_of(lengths)


@pytest.mark.parametrize("kind", ["megatron", "mds", "litdata", "fms", "olmo", "datatrove", "bridge"])
def test_loss_spans_are_never_dropped_unasked(tmp_path, capsys, kind):
    corpus = trained(tmp_path / "corpus", is_weighted=kind in ("olmo", "datatrove", "bridge"))
    command = ["export", str(corpus), "--format", kind, "--out", str(tmp_path / "out")]
    command += ["--pack-tokens", "8"] if kind == "bridge" else []
    assert run(command) == 2
    assert "trains 5 of its 11 tokens" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()
    assert run([*command, "--drop-loss"]) == 0
    assert "5 targets: readers train all tokens instead" in capsys.readouterr().out


def test_a_hugging_face_data_set_keeps_the_columns(tmp_path):
    urls = [None, "a", "", "bc"]
    source = Source(documents=documents_of([1, 3, 2, 4]), metadata={"url": urls, "score": [1.5, None, 0.0, 2.0]})
    corpus = write_corpus(
        tmp_path / "corpus", sources=[source], columns={"url": "string", "score": "float64"}, tokenizer=TINY_TOKENIZER
    )
    export_corpus(corpus, format="hf", out=tmp_path / "out", drop_eos=True)
    table = parquet.read_table(tmp_path / "out")
    assert table.column_names == ["input_ids", "url", "score"]
    assert table["url"].to_pylist() == ["a", "", "bc"]
    assert table["score"].to_pylist() == [None, 0.0, 2.0]
    assert table.schema.metadata[b"tokshard.eos_id"] == b"0"
    export_corpus(corpus, format="hf", out=tmp_path / "bare", with_columns=False)
    assert parquet.read_table(tmp_path / "bare").column_names == ["input_ids"]


def test_a_flipped_byte_of_a_hugging_face_data_set_is_found_by_who_reads_its_checksums(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", documents_of([900]), tokenizer=TINY_TOKENIZER)
    export_corpus(corpus, format="hf", out=tmp_path / "out")
    (file,) = (tmp_path / "out").glob("*.parquet")
    column = parquet.read_metadata(file).row_group(0).column(0)
    stop = column.dictionary_page_offset + column.total_compressed_size
    content = bytearray(file.read_bytes())
    for place in range(stop - 30, stop):
        content[place] ^= 1
        with pytest.raises(OSError, match="CRC"):
            parquet.read_table(pa.BufferReader(bytes(content)), page_checksum_verification=True)
        content[place] ^= 1


def test_a_split_is_a_folder(corpus, tmp_path):
    for split in ("train", "validation"):
        done = export_corpus(corpus, format="hf", out=tmp_path / "out", split=split)
        assert done.location == str(tmp_path / "out" / split)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["train", "validation"]


# all or nothing


@pytest.mark.parametrize("kind", FORMATS)
def test_a_flipped_token_stops_the_export_and_nothing_appears(corpus, tmp_path, kind):
    with open_corpus(corpus) as opened:
        info, place = opened.shards[2], opened.shards.batch_places(2)[0]
    path = corpus / info.name
    content = bytearray(path.read_bytes())
    content[place.values_position] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedCorpusError, match=info.name):
        export_corpus(corpus, format=kind, out=tmp_path / "new/out", file_bytes=2_000, **options_of(kind))
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_an_interrupted_export_leaves_nothing(corpus, tmp_path):
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export_corpus(corpus, format="megatron", out=tmp_path / "out", on_progress=interrupt)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_what_is_at_the_place_is_never_touched(corpus, tmp_path):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("full", "file", "link", "corpus/inside"):
        with pytest.raises(UsageError):
            export_corpus(corpus, format="mds", out=tmp_path / name)
    assert (tmp_path / "full/mine.txt").read_text() == (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "nowhere").exists()
    assert not (corpus / "inside").exists()
    (tmp_path / "empty").mkdir()
    export(corpus, "mds", tmp_path / "empty")


def test_a_file_that_appears_meanwhile_is_kept(corpus, tmp_path):
    def write(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/mine.txt").write_text("mine")

    with pytest.raises(UsageError, match="not empty"):
        export_corpus(corpus, format="mds", out=tmp_path / "out", on_progress=write)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert not list(tmp_path.glob(".*"))


def test_a_place_that_cannot_be_written_is_an_error_with_its_name(corpus, tmp_path):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ExportError, match="file/out cannot be written"):
        export_corpus(corpus, format="mds", out=tmp_path / "file/out")


# buckets


@pytest.fixture
def in_memory(tmp_path, monkeypatch) -> str:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    return f"{SCHEME}://{tmp_path.name}"


@pytest.mark.parametrize("kind", ["mds", "litdata"])
def test_an_export_from_a_bucket_into_a_bucket_is_that_of_directories(corpus, tmp_path, in_memory, kind):
    source, target = f"{in_memory}/{kind}/corpus", f"{in_memory}/{kind}/out"
    for name in files_below(open_store(corpus), ""):
        open_store(source).put(name, (corpus / name).read_bytes())
    done = export_corpus(source, format=kind, out=target, split="train", file_bytes=2_000)
    found = open_store(done.location)
    for name in files_below(found, ""):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_bytes(found.get(name))
    assert READERS[kind](tmp_path / "out")[1] == DOCUMENTS


def test_an_export_into_a_bucket_that_fails_is_removed_again(corpus, in_memory):
    def stop(done: int, total: int) -> None:
        if done == total:
            assert list(files_below(open_store(target), ""))
            raise KeyboardInterrupt

    target = f"{in_memory}/stopped"
    with pytest.raises(KeyboardInterrupt):
        export_corpus(corpus, format="mds", out=target, file_bytes=2_000, on_progress=stop)
    assert list(files_below(open_store(target), "")) == []
    open_store(target).put("mine.txt", b"mine")
    with pytest.raises(UsageError, match=r"mine\.txt"):
        export_corpus(corpus, format="mds", out=target)
    with pytest.raises(UsageError, match="look complete"):
        export_corpus(corpus, format="hf", out=f"{in_memory}/other")


# limits, and the command


def test_a_document_that_the_format_cannot_hold_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(MegatronFormat, "max_document_tokens", 60_000)
    with pytest.raises(UsageError, match=r"document 5 .* 70,000 tokens"):
        export_corpus(corpus, format="megatron", out=tmp_path / "out")
    with pytest.raises(UsageError, match=r"document 5 .* 70,000 tokens.* at most 69,999"):
        export_corpus(corpus, format="bridge", out=tmp_path / "out", pack_tokens=69_999)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--format", "bridge"], "bridge: a row needs a length"),
        (["--format", "hf", "--pack-tokens", "8"], "hf has no packs"),
        (["--format", "mds", "--file-bytes", "4GiB"], "32 bits"),
        (["--format", "hf", "--file-bytes", "100"], "too small"),
        (["--format", "hf", "--split", "../train"], "name of a split"),
        (["--format", "mds", "--no-columns"], "mds holds no columns but the ids"),
        (["--format", "olmo", "--drop-eos"], "only EOS says where a document ends"),
        (["--format", "pickle"], "pickle"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_written(corpus, tmp_path, capsys, options, problem):
    assert run(["export", str(corpus), "--out", str(tmp_path / "out"), *options]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_command_says_what_it_wrote_and_how_to_read_it(corpus, tmp_path, capsys):
    assert run(["export", str(corpus), "--format", "megatron", "--out", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr().out
    assert "10 documents, 72,481 tokens as uint16" in shown
    assert f"--data-path {tmp_path / 'out'}/documents" in shown.replace("\n            ", " ")
    command = ["export", str(corpus), "--format", "fms", "--out", str(tmp_path / "fms"), "--json"]
    assert run(command) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["num_documents"], found["num_left_out"]) == (8, 2)
    assert read_fms(tmp_path / "fms")[1] == [document[:-1] for document in DOCUMENTS if len(document) > 1]
