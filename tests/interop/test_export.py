"""An export holds the documents of the corpus in their order, or does not appear.

test_with_*.py read them with the loaders that they are for.
"""

from __future__ import annotations

import hashlib
import json
import stat
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import parquet

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.store.servers import copied
from tokshard import import_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import DamagedCorpusError, UsageError
from tokshard.format.loss import LOSS, WEIGHTS
from tokshard.interop.export.export import FORMATS, export_corpus
from tokshard.interop.export.megatron import MegatronFormat
from tokshard.store import files_below, open_store

LENGTHS = [1, 5, 300, 2, 1, 70_000, 17, 900, 255, 1_000]
DOCUMENTS = documents_of(LENGTHS)
FULL = [document for document in DOCUMENTS if len(document) > 1]
"""An import leaves out documents of nothing but EOS."""


def wide_tokenizer() -> bytes:
    """With an id of more than two bytes, and two delimiters."""
    fields = json.loads(TINY_TOKENIZER)
    (eos,) = fields["added_tokens"]
    fields["added_tokens"].append(eos | {"id": 1, "content": "<bos>"})
    fields["model"] = {"type": "WordLevel", "vocab": {"<eos>": 0, "<bos>": 1, "far": 70_000}, "unk_token": "far"}
    return json.dumps(fields).encode()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """Ten documents in several shards, one of them longer than a shard."""
    return write_corpus(tmp_path / "corpus", DOCUMENTS, shard_tokens=1_000, tokenizer=TINY_TOKENIZER)


DIGESTS = {
    "megatron": "af1369b77b287fa112f81e65697f25910e1b3f06e3cf8906dc8ecc413770fb61",
    "mds": "fbe5d7fb0e7d4d942935545ade44107b6e7e754e664b392664eae560c7b48eda",
    "olmo": "5377278cd5da447672470b552c638a8d08db5dc84fcc86e2f17c6c5669109694",
}
"""Of the names and bytes of all files of `DOCUMENTS`. Golden: other tools read them. The writers of Megatron and
MosaicML give the same (test_with_megatron.py, test_with_streaming.py)."""


def digest(directory: Path) -> str:
    found = hashlib.sha256()
    for path in sorted(path for path in directory.rglob("*") if path.is_file()):
        found.update(path.relative_to(directory).as_posix().encode() + path.read_bytes())
    return found.hexdigest()


def export(corpus: Path, kind: str, out: Path, *, is_wide: bool = False, **options: Any) -> tuple[Any, list[list[int]]]:
    """What an export says, and its documents as an import reads them, which has tests with files of each tool."""
    done = export_corpus(corpus, format=kind, out=out, **options)
    assert not list(out.parent.glob(".*"))
    more = {"bos": "<bos>"} if is_wide else {}
    tokenizer, again = corpus / "tokenizer.json", out.with_name(f"{out.name}-again")
    import_corpus(done.location, out=again, tokenizer=tokenizer, eos="<eos>", workers=1, **more)
    with open_corpus(again) as found:
        return done, [document.tolist() for document in found]


# what is exported


@pytest.mark.parametrize("kind", FORMATS)
def test_an_export_holds_every_document_in_order_with_or_without_eos(corpus, tmp_path, kind, monkeypatch):
    monkeypatch.setattr(MegatronFormat, "max_document_tokens", max(LENGTHS))  # so many it may have
    (tmp_path / "out").mkdir()  # an empty directory may be there
    for out, file_bytes in ("out", None), ("parts", 2_000):
        done, found = export(corpus, kind, tmp_path / out, drop_eos=False, file_bytes=file_bytes)
        assert (done.num_documents, done.num_tokens, found) == (10, sum(LENGTHS), FULL)
        assert bool(list((tmp_path / out).rglob("*0001*"))) == (file_bytes is not None)
    assert DIGESTS.get(kind) in (None, digest(tmp_path / "out"))
    if kind == "fms":
        assert done.num_files == 7  # a document takes 256 bytes besides its ids
        counts = f"dataset/filename,documents,tokens\n/corpus/part-00000.arrow,10,{sum(LENGTHS)}\n"
        assert (tmp_path / "out/meta/combined_counts.csv").read_text() == counts
    if kind != "olmo":
        done, found = export(corpus, kind, tmp_path / "bare" / "train", drop_eos=True)
        assert (done.location, done.num_left_out, done.eos) == (str(tmp_path / "bare/train"), 2, False)
        assert (done.num_documents, done.num_tokens, found) == (8, sum(LENGTHS) - 10, FULL)


WIDE = dict.fromkeys(FORMATS, "int32") | dict.fromkeys(("mds", "fms", "olmo"), "uint32")


@pytest.mark.parametrize("kind", FORMATS)
def test_ids_of_a_large_vocabulary_are_stored_in_four_bytes(tmp_path, kind):
    documents = [[1, 70_000, 65_536, 0], [1, 0], [1, 5, 0]]
    corpus = write_corpus(tmp_path / "corpus", documents, tokenizer=wide_tokenizer(), eos="<eos>", bos="<bos>")
    done, found = export(corpus, kind, tmp_path / "out", drop_eos=False, is_wide=True)
    assert (done.dtype, done.bos, found) == (WIDE[kind], True, documents)
    assert not list((tmp_path / "out").glob("labels*"))
    if kind != "olmo":
        done, bare = export(corpus, kind, tmp_path / "bare", drop_eos=True, drop_bos=True, is_wide=True)
        assert (done.eos, done.bos, bare) == (False, False, [[1, 70_000, 65_536, 0], [1, 5, 0]])


SPANS = {LOSS: [[1, 3], [], [1, 2, 4, 6]], WEIGHTS: [[0.5], [], [2.0, 0.25]], "url": ["a", "b", "c"]}
TRAINED = [[1, 2, 3, 0], [0], [3, 3, 1, 2, 2, 0]]


def trained(path: Path, *, is_weighted: bool = False) -> Path:
    columns = {LOSS: "spans", **({WEIGHTS: "weights"} if is_weighted else {}), "url": "string"}
    source = Source(documents=TRAINED, metadata={name: SPANS[name] for name in columns})
    return write_corpus(path, sources=[source], columns=columns, tokenizer=TINY_TOKENIZER)


def test_a_hugging_face_data_set_has_labels_or_a_mask_of_weights(tmp_path):
    done = export_corpus(trained(tmp_path / "corpus"), format="hf", out=tmp_path / "out")
    table = parquet.read_table(tmp_path / "out")
    assert table.column_names == ["input_ids", "labels", "url"]
    assert table["labels"].to_pylist() == [[-100, 2, 3, -100], [-100], [-100, 3, -100, -100, 2, 0]]
    assert table.schema.field("labels").type == table.schema.field("input_ids").type
    assert (done.num_targets, done.num_dropped_targets) == (5, 0)
    done = export_corpus(tmp_path / "corpus", format="hf", out=tmp_path / "bare", drop_eos=True)
    assert parquet.read_table(tmp_path / "bare")["labels"].to_pylist() == [[-100, 2, 3], [-100, 3, -100, -100, 2]]
    assert (done.num_targets, done.num_dropped_targets, done.num_left_out) == (4, 1, 1)
    export_corpus(trained(tmp_path / "weighted", is_weighted=True), format="hf", out=tmp_path / "mask")
    table = parquet.read_table(tmp_path / "mask")
    assert table.column_names == ["input_ids", "loss_mask", "url"]
    assert table["loss_mask"].to_pylist() == [[0, 0.5, 0.5, 0], [0], [0, 2, 0, 0, 0.25, 0.25]]


@pytest.mark.parametrize(("drop_loss", "num_files"), [(False, 5), (True, 2)])
def test_labels_count_towards_the_size_of_files(tmp_path, drop_loss, num_files):
    source = Source(documents=documents_of([50] * 10), metadata={LOSS: [[1, 50]] * 10})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], columns={LOSS: "spans"}, tokenizer=TINY_TOKENIZER)
    options = {"file_bytes": 1_024, "drop_eos": False, "drop_loss": drop_loss}
    assert export_corpus(corpus, format="hf", out=tmp_path / "out", **options).num_files == num_files


def test_a_mask_has_a_byte_for_each_id_unless_it_is_dropped(tmp_path):
    file = "labels_mask_part_0000.npy"
    done = export_corpus(trained(tmp_path / "corpus"), format="olmo", out=tmp_path / "out")
    assert (tmp_path / "out" / file).read_bytes() == bytes([0, 1, 1, 0, 0, 0, 1, 0, 0, 1, 1])
    assert (done.num_targets, done.num_files) == (5, 1)
    export_corpus(trained(tmp_path / "other"), format="olmo", out=tmp_path / "bare", drop_loss=True)
    assert not (tmp_path / "bare" / file).exists()


@pytest.mark.parametrize("kind", ["megatron", "mds", "fms", "olmo"])
def test_loss_spans_are_never_dropped_unasked(tmp_path, capsys, kind):
    corpus = trained(tmp_path / "corpus", is_weighted=kind == "olmo")
    command = ["export", str(corpus), "--format", kind, "--out", str(tmp_path / "out")]
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
        export_corpus(corpus, format=kind, out=tmp_path / "new/out", file_bytes=2_000)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_file_that_appears_meanwhile_is_kept(corpus, tmp_path):
    def write(done: int, total: int) -> None:
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/mine.txt").write_text("mine")

    with pytest.raises(UsageError, match="not empty"):
        export_corpus(corpus, format="mds", out=tmp_path / "out", on_progress=write)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["mine.txt"]
    assert not list(tmp_path.glob(".*"))


def test_an_empty_directory_that_an_export_replaces_keeps_its_mode(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o2751)
    export_corpus(corpus, format="hf", out=tmp_path / "out")
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o2751


def test_a_directory_that_an_export_cannot_replace_is_refused_before_it_reads(corpus, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UsageError, match="is the current directory, which an export cannot replace"):
        export_corpus(corpus, format="hf", out=".")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("os.path.ismount", lambda path: path == str(tmp_path / "here"))
    with pytest.raises(UsageError, match="is a mount point"):
        export_corpus(corpus, format="hf", out="here")


# buckets


def test_an_export_from_a_bucket_into_a_bucket_is_that_of_directories(corpus, tmp_path, in_memory):
    source = copied(corpus, f"{in_memory}/corpus")
    done = export_corpus(source, format="mds", out=f"{in_memory}/out", file_bytes=2_000)
    found = open_store(done.location)
    export_corpus(corpus, format="mds", out=tmp_path / "out", file_bytes=2_000)
    here = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert {name: found.get(name) for name in files_below(found, "")} == here


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
