"""What a reader refuses, with the file, what was found and what was expected."""

import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.corpora import (
    TINY_TOKENIZER,
    Source,
    change_table,
    documents_of,
    rewrite_manifest,
    write_corpus,
)
from tokshard.errors import (
    CorpusError,
    DamagedCorpusError,
    MissingCorpusError,
    UnfinishedCorpusError,
    UnsupportedFormatError,
    UsageError,
)
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.format.tables import SHARD_TABLE_SCHEMA, Table
from tokshard.store import open_store

FIRST_SHARD = "shard-00-0000000-000000-0000.arrow"


@pytest.fixture
def corpus(tmp_path):
    """Three shards of one batch each, with a kept column."""
    source = Source(documents=documents_of([3, 4, 6, 2, 7]), metadata={"url": ["a", "bb", None, "", "ccc"]})
    return write_corpus(
        tmp_path / "corpus", sources=[source], columns={"url": "string"}, shard_tokens=9, tokenizer=TINY_TOKENIZER
    )


def refusal(corpus, kind=DamagedCorpusError):
    """The error of opening a corpus and reading all that it has."""
    with pytest.raises(kind) as caught:
        read_everything(corpus)
    assert caught.value.hint
    return caught.value.problem


def read_everything(location):
    with open_corpus(location) as corpus:
        corpus.sources()
        for index in range(len(corpus)):
            corpus.document(index)
            corpus.metadata(index)
            corpus.provenance(index)


def test_a_missing_shard_is_named_when_the_corpus_is_opened(corpus):
    (corpus / FIRST_SHARD).unlink()
    with pytest.raises(DamagedCorpusError, match=f"{FIRST_SHARD} is missing; the manifest names 3 shards"):
        open_corpus(corpus)


def test_a_shard_of_another_size_is_refused_when_it_is_touched(corpus):
    path = corpus / FIRST_SHARD
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:-8])
    open_corpus(corpus)
    assert f"{path} has {size - 8} bytes, expected {size}" in refusal(corpus)


def test_a_shard_of_another_corpus_is_refused(corpus, tmp_path):
    tokenizer = TINY_TOKENIZER.replace(b'"three"', b'"trois"')
    other = write_corpus(tmp_path / "other", documents_of([3, 4]), columns={}, shard_tokens=9, tokenizer=tokenizer)
    shutil.copy(other / FIRST_SHARD, corpus / FIRST_SHARD)
    vouch_for_sizes(corpus)
    assert "tokshard.tokenizer_sha256 is" in refusal(corpus)


def vouch_for_sizes(corpus):
    """Make table and manifest agree with the sizes of the shards, so that the next check is reached."""
    sizes = [path.stat().st_size for path in sorted(corpus.glob("shard-*"))]
    change_table(corpus, "shards.arrow", lambda rows: {**rows, "num_bytes": sizes})
    rewrite_manifest(corpus, lambda fields: fields.update(num_bytes=sum(sizes)))


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("name", "../" + FIRST_SHARD, "names the shard '../shard-.*, which is not a shard's name"),
        ("name", "/etc/passwd", "names the shard '/etc/passwd'"),
        ("num_tokens", 8, "column num_tokens adds up to 23 .* the manifest says 22"),
        ("num_documents", 0, "column num_documents adds up to 3 .* the manifest says 5"),
        ("num_bytes", -1, "column num_bytes adds up to"),
        ("batch_tokens", [3, 4], "batches of shard-.* hold 2 documents and 7 tokens"),
        ("batch_documents", [], "batches of shard-.* hold 0 documents"),
        ("batch_offsets_position", [64], "batch 0 is .*, expected .*offsets_position=64"),
        ("run_record", [], "have 1 documents, 1 sources and 0 records"),
        ("run_document", [5], "do not cover document 0"),
    ],
)
def test_a_shard_table_that_contradicts_itself_is_refused(corpus, column, value, message):
    def change(rows):
        rows[column][0] = value
        return rows

    change_table(corpus, "shards.arrow", change)
    with pytest.raises(DamagedCorpusError, match=message):
        read_everything(corpus)


def overwrite(path, column, buffer, position, content):
    """Replace bytes of one buffer of a column of a table, in place."""
    data = bytearray(path.read_bytes())
    mapped = pa.py_buffer(data)
    found = ipc.open_file(mapped).get_batch(0).column(column).buffers()[buffer]
    start = found.address - mapped.address + position
    path.write_bytes(bytes(data[:start]) + content + bytes(data[start + len(content) :]))


@pytest.mark.parametrize("offset", [-1, -(2**62), 2**62])
def test_offsets_of_a_list_that_lead_outside_of_its_values_are_refused(corpus, offset):
    path = corpus / "shards.arrow"
    overwrite(path, "batch_tokens", 1, 8, offset.to_bytes(8, "little", signed=True))
    for row in (0, 1):
        with pytest.raises(DamagedCorpusError, match=f"offsets of column batch_tokens, row {row}, are"):
            Table(open_store(path.parent), path.name, SHARD_TABLE_SCHEMA).list_at("batch_tokens", row)
    with pytest.raises(DamagedCorpusError, match="offsets of column batch_tokens must ascend"):
        Table(open_store(path.parent), path.name, SHARD_TABLE_SCHEMA).lists("batch_tokens")


def test_a_column_of_a_table_that_is_not_valid_arrow_is_refused(corpus):
    path = corpus / "shards.arrow"
    overwrite(path, "name", 2, 0, b"\xff")
    with pytest.raises(DamagedCorpusError, match=r"shards\.arrow, batch 0: "):
        Table(open_store(path.parent), path.name, SHARD_TABLE_SCHEMA).batch(0)


def test_a_source_of_an_unknown_argument_is_refused(corpus):
    change_table(corpus, "sources.arrow", lambda rows: {**rows, "argument": [1]})
    assert "source 0 comes from argument 1, the manifest has 1" in refusal(corpus)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (["num_documents"], 0, "0 documents of"),
        (["num_tokens"], -5, "expected `int` >= 0"),
        (["num_shards"], "three", "expected `int`, got `str`"),
        (["tokenizer", "vocab_size"], 0, "expected `int` >= 1"),
        (["tokenizer", "vocab_size"], 70_000, "dtype is uint16, a vocabulary of 70000 ids has uint32"),
        (["tokenizer", "eos_id"], 4, "delimiter 4 is outside the vocabulary of 4 ids"),
        (["dtype"], "int8", "dtype is int8"),
        (["columns"], {"url": "date"}, "expected none called 'tokens' and types of string, int64"),
        (["columns"], {"tokens": "string"}, "expected none called 'tokens'"),
        (["files", "../../secret"], {"num_bytes": 1, "sha256": "0" * 64}, "secret"),
        (["fingerprints", "content"], "abc", "matching regex"),
        (["colour"], "red", "unknown field `colour`"),
        (["records"], None, "expected `object`"),
        (["arguments"], ["\ud800"], "surrogate pair"),
        (["format_version"], "1", "expected a positive integer"),
        (["format_version"], 0, "expected a positive integer"),
    ],
)
def test_a_manifest_with_a_true_checksum_and_a_wrong_value_is_refused(corpus, path, value, message):
    def change(fields):
        for key in path[:-1]:
            fields = fields[key]
        fields[path[-1]] = value

    rewrite_manifest(corpus, change)
    problem = refusal(corpus)
    assert str(corpus / "manifest.json") in problem
    assert message.lower() in problem.lower()


def test_a_newer_format_is_refused_with_both_versions(corpus):
    rewrite_manifest(corpus, lambda fields: fields.update(format_version=2, new_field="of the future"))
    with pytest.raises(
        UnsupportedFormatError, match=r"manifest.json has format version 2; this tokshard reads up to 1"
    ):
        open_corpus(corpus)


def test_every_byte_of_the_manifest_is_covered_by_its_checksum(corpus):
    path = corpus / "manifest.json"
    content = path.read_bytes()
    for position in range(0, len(content), 7):
        path.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(DamagedCorpusError, match="its last line is"):
            open_corpus(corpus)
    for wrong in (content[:-1], content + b"\n", content + b" ", b"", b"\n"):
        path.write_bytes(wrong)
        with pytest.raises(DamagedCorpusError, match="its last line is"):
            open_corpus(corpus)


@pytest.mark.parametrize("name", ["shards.arrow", "sources.arrow"])
def test_a_missing_or_cut_table_is_refused(corpus, name):
    path = corpus / name
    size = path.stat().st_size
    os.truncate(path, size - 1)
    assert f"{path} has {size - 1} bytes, expected {size}" in refusal(corpus)
    path.unlink()
    assert f"{path} is missing" in refusal(corpus)


def test_offsets_that_do_not_ascend_are_refused_before_a_token_is_read(corpus):
    place = open_corpus(corpus).shards.batch_places(0)[0]
    path = corpus / FIRST_SHARD
    content = bytearray(path.read_bytes())
    content[place.offsets_position + 8 : place.offsets_position + 16] = np.int64(1 << 40).tobytes()
    path.write_bytes(content)
    assert "offsets must ascend from 0 to 7, found 0, ... 1099511627776, 7, ... 7 at document 1" in refusal(corpus)


def test_kept_text_that_is_not_utf8_is_refused(corpus):
    path = corpus / FIRST_SHARD
    content = path.read_bytes()
    position = content.index(b"abb")
    path.write_bytes(content[:position] + b"\xff" + content[position + 1 :])
    assert f"{path}, batch 0, column url: " in refusal(corpus)


def test_a_shard_that_is_not_an_arrow_file_is_refused(corpus):
    path = corpus / FIRST_SHARD
    path.write_bytes(bytes(path.stat().st_size))
    assert f"{path} is not an Arrow file" in refusal(corpus)


def test_a_shard_that_is_a_directory_is_refused(corpus):
    (corpus / FIRST_SHARD).unlink()
    (corpus / FIRST_SHARD).mkdir()
    assert FIRST_SHARD in refusal(corpus)


def test_a_shard_whose_column_name_is_not_utf8_is_refused(corpus):
    path = corpus / FIRST_SHARD
    path.write_bytes(path.read_bytes().replace(b"url", b"u\xffl"))
    assert FIRST_SHARD in refusal(corpus)


def test_a_compressed_shard_is_refused(corpus):
    path = corpus / FIRST_SHARD
    table = ipc.open_file(path).read_all()
    with ipc.new_file(path, table.schema, options=ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    vouch_for_sizes(corpus)
    assert f"{path}, batch 0: it is compressed, expected uncompressed buffers" in refusal(corpus)


def test_an_empty_batch_is_refused(corpus):
    path = corpus / FIRST_SHARD
    batch = ipc.open_file(path.read_bytes()).get_batch(0)
    with ipc.new_file(str(path), batch.schema) as writer:
        writer.write_batch(batch)
        writer.write_batch(batch.slice(0, 0))

    def change(rows):
        for column, value in (("documents", 0), ("tokens", 0), ("offsets_position", -1), ("values_position", -1)):
            rows[f"batch_{column}"][0].append(value)
        return rows

    vouch_for_sizes(corpus)
    change_table(corpus, "shards.arrow", change)
    assert "every batch holds at least 1" in refusal(corpus)


def test_a_file_name_that_is_not_utf8_does_not_matter_to_a_reader(corpus):
    (corpus / os.fsdecode(b"shard-\xff.arrow")).touch()
    read_everything(corpus)


def test_a_corpus_in_a_folder_whose_name_is_not_utf8_is_read(corpus):
    read_everything(corpus.rename(corpus.with_name(os.fsdecode(b"\xff"))))


def test_a_directory_without_a_manifest_is_not_a_corpus(tmp_path):
    with pytest.raises(MissingCorpusError, match=r"is not a corpus: it has no manifest.json") as error:
        open_corpus(tmp_path)
    assert error.value.exit_code == 2
    (tmp_path / names.WORK).mkdir()
    with pytest.raises(UnfinishedCorpusError, match=r"holds an unfinished build"):
        open_corpus(tmp_path)


def test_a_path_that_is_not_a_directory_is_not_a_corpus(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CorpusError, match="is a file"):
        open_corpus(tmp_path / "file")
    with pytest.raises(CorpusError, match="does not exist"):
        open_corpus(tmp_path / "nothing")


def test_a_uri_of_an_unknown_scheme_is_refused_as_usage():
    with pytest.raises(UsageError, match="is a URI"):
        open_corpus("ftp://server/corpus")


def test_a_changed_table_with_a_true_hash_never_crashes_the_process(corpus):
    """Hundreds of flipped bytes, with size and hash made true again: only the structure can be refused."""
    script = """
import json, random, sys
from pathlib import Path
from tests.corpora import sign_files
from tests.format.test_refusals import read_everything
from tokshard.errors import TokshardError
corpus, outcomes = Path(sys.argv[1]), {"read": 0, "refused": 0}
for name in ("shards.arrow", "sources.arrow"):
    content = (corpus / name).read_bytes()
    rng = random.Random(name)
    for _ in range(150):
        changed = bytearray(content)
        for _ in range(rng.choice((1, 1, 4))):
            changed[rng.randrange(len(changed))] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
        (corpus / name).write_bytes(changed)
        sign_files(corpus)
        try:
            read_everything(corpus)
            outcomes["read"] += 1
        except TokshardError:
            outcomes["refused"] += 1
    (corpus / name).write_bytes(content)
print(json.dumps(outcomes))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(corpus)], capture_output=True, text=True, check=False, cwd=os.getcwd()
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["refused"] > 40


def test_schema_metadata_identifies_a_single_shard(corpus):
    schema = ipc.open_file(corpus / FIRST_SHARD).schema
    assert schema.field("tokens").type == pa.large_list(pa.field("item", pa.uint16(), nullable=False))
    facts = {key.decode(): value.decode() for key, value in schema.metadata.items()}
    manifest = open_corpus(corpus).manifest
    assert facts == {
        "tokshard.format_version": "1",
        "tokshard.tokenizer_sha256": manifest.tokenizer.canonical_sha256,
        "tokshard.eos_id": "0",
        "tokshard.bos_id": "",
        "tokshard.dtype": "uint16",
    }


def test_offsets_that_change_while_a_shard_is_mapped_are_refused(corpus):
    with open_corpus(corpus) as opened:
        place, path = opened.shards.batch_places(0)[0], corpus / FIRST_SHARD
        opened.document(0)
        for wrong in (-1, 0, 8, 1 << 40):
            descriptor = os.open(path, os.O_WRONLY)
            os.pwrite(descriptor, np.int64(wrong).tobytes(), place.offsets_position + 8)
            os.close(descriptor)
            with pytest.raises(DamagedCorpusError, match=f"{FIRST_SHARD}, batch 0: document 0 is at 0 to {wrong}"):
                opened.document(0)
