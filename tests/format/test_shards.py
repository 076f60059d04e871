"""Documents in, shards on disk, the same documents out."""

import gc
import io
import os
import random
import subprocess
import sys
import tempfile
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, tokenizer_info, write_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import corpus as corpora
from tokshard.format import names, stride_hashes, writer
from tokshard.format.corpus import Provenance
from tokshard.format.files import HashingFile
from tokshard.format.manifest import shard_schema
from tokshard.format.opening import open_corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.tables import Table, write_table
from tokshard.format.writer import ShardWriter
from tokshard.store import open_store

LARGE_VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 65536')
COLUMNS = {"text": "string", "note": "string", "count": "int64", "score": "float64", "flag": "bool"}
rows = st.fixed_dictionaries(
    {
        "length": st.integers(1, 60),
        "gap": st.sampled_from([0, 0, 0, 1, 5]),  # records before it that were left out
        "text": st.none() | st.text("aé🙂", max_size=9),
        "note": st.none() | st.text("a", max_size=3),
        "count": st.none() | st.integers(-(1 << 63), (1 << 63) - 1),
        "score": st.none() | st.floats(allow_nan=False),
        "flag": st.none() | st.booleans(),
    }
)


@contextmanager
def batches_of(
    tokens: int = writer.MAX_BATCH_TOKENS, characters: int = writer.MAX_BATCH_CHARACTERS, stride: int = HASH_STRIDE
):
    """Record batches and strides that close earlier, so that a small corpus has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MAX_BATCH_TOKENS", tokens)
        patch.setattr(writer, "MAX_BATCH_CHARACTERS", characters)
        patch.setattr(stride_hashes, "HASH_STRIDE", stride)
        yield


def write_tiny(directory: Path, documents, **options) -> Path:
    return write_corpus(directory, documents, tokenizer=TINY_TOKENIZER, **options)


def source_of(found, number):
    """An input whose documents are these rows."""
    records = (np.cumsum([row["gap"] + 1 for row in found]) - 1).tolist()
    return Source(
        documents=documents_of([row["length"] for row in found]),
        path=f"{number}.jsonl",
        records=records,
        left_out={"empty": sum(row["gap"] for row in found)},
        metadata={name: [row[name] for row in found] for name in COLUMNS},
    )


def packed(found, shard_tokens, batch_tokens, batch_characters):
    """The lengths of documents, by shard and by record batch: each closes before the one that would exceed it."""
    shards, in_shard, in_batch, characters = [], 0, 0, 0
    for row in found:
        length, more = row["length"], len(row["text"] or "") + len(row["note"] or "")
        if not shards or in_shard + length > shard_tokens:
            shards.append([[]])
            in_shard = in_batch = characters = 0
        elif in_batch + length > batch_tokens or characters + more > batch_characters:
            shards[-1].append([])
            in_batch = characters = 0
        shards[-1][-1].append(length)
        in_shard, in_batch, characters = in_shard + length, in_batch + length, characters + more
    return shards


@given(
    sources=st.lists(st.lists(rows, min_size=1, max_size=20), min_size=1, max_size=3),
    shard_tokens=st.integers(1, 400),
    batch_tokens=st.integers(1, 120),
    batch_characters=st.integers(1, 30),
    documents_per_call=st.integers(1, 20),
    index=st.integers(-1, 0),
)
def test_documents_come_back_as_they_were_written_in_the_same_bytes_however_they_reach_the_writer(
    sources, shard_tokens, batch_tokens, batch_characters, documents_per_call, index
):
    with tempfile.TemporaryDirectory() as folder, batches_of(batch_tokens, batch_characters, 8):
        inputs = [source_of(found, number) for number, found in enumerate(sources)]
        written = []
        for count in (1 << 30, documents_per_call):
            directory = Path(folder) / str(count)
            options = {"columns": COLUMNS, "shard_tokens": shard_tokens, "documents_per_call": count}
            write_tiny(directory, [], sources=inputs, **options)
            written.append({path.name: path.read_bytes() for path in directory.iterdir()})
        assert written[0] == written[1]
        every = [row for found in sources for row in found]
        documents = [document for source in inputs for document in source.documents]
        with open_corpus(directory) as corpus:
            assert [document.tolist() for document in corpus.documents()] == documents
            assert [document.tolist() for document in corpus.documents(1, -1)] == documents[1:-1]
            assert corpus.document(index).tolist() == documents[index]
            assert [corpus.metadata(n) for n in range(len(every))] == [
                {name: row[name] for name in COLUMNS} for row in every
            ]
            assert [corpus.provenance(n) for n in range(len(every))] == [
                Provenance(number, record + 1) for number, source in enumerate(inputs) for record in source.records
            ]
            assert [(one.path, one.left_out) for one in corpus.sources()] == [
                (one.path, one.left_out) for one in inputs
            ]
            places = [corpus.shards.batch_places(n) for n in range(len(corpus.shards))]
            shards = packed(every, shard_tokens, batch_tokens, batch_characters)
            assert [[(place.num_documents, place.num_tokens) for place in one] for one in places] == [
                [(len(batch), sum(batch)) for batch in shard] for shard in shards
            ]
            origins = [(n, record) for n, source in enumerate(inputs) for record in source.records]
            firsts = corpus.shards.first_documents.tolist()
            for number, (start, stop) in enumerate(pairwise(firsts)):  # a run: consecutive records of one source
                runs = corpus.shards.runs(number)
                assert [*zip(runs.document.tolist(), runs.source.tolist(), runs.record.tolist(), strict=True)] == [
                    (n - start, *origins[n])
                    for n in range(start, stop)
                    if n == start or origins[n] != (origins[n - 1][0], origins[n - 1][1] + 1)
                ]
            read, hashes = [], b""
            for number, shard in enumerate(corpus.shards):
                in_shard = []
                for place in places[number]:
                    content, count = written[0][shard.name], place.num_documents + 1
                    offsets = np.frombuffer(content, "<i8", count, place.offsets_position)
                    tokens = np.frombuffer(content, "<u2", place.num_tokens, place.values_position)
                    read += [tokens[start:stop].tolist() for start, stop in pairwise(offsets)]
                    in_shard += tokens.tolist()
                strides = [
                    zlib.crc32(np.array(in_shard[start : start + 8], "<u2")) for start in range(0, len(in_shard), 8)
                ]
                assert corpus.stride_hashes(number).tolist() == strides
                hashes += np.array(strides, "<u4").tobytes()
            assert read == documents
            assert written[0][names.STRIDE_HASHES] == hashes


@pytest.mark.parametrize(
    ("rows", "expected"), [([], []), ([5], [2, 2, 1]), ([2, 2], [2, 2]), ([3, 1], [2, 2]), ([1, 1, 1], [2, 1])], ids=str
)
def test_the_batches_of_a_table_are_full_but_for_the_last_and_none_is_empty(rows, expected, tmp_path):
    schema = pa.schema([pa.field("n", pa.int64())])
    batches = [pa.record_batch([pa.array(range(count), pa.int64())], schema=schema) for count in rows]
    with (tmp_path / "table.arrow").open("wb") as file:
        write_table(file, schema, batches, rows_per_batch=2)
    table = Table(open_store(tmp_path), "table.arrow", schema)
    assert [batch.num_rows for batch in table.batches()] == expected
    assert table.numbers("n").tolist() == [number for count in rows for number in range(count)]


@pytest.mark.parametrize(("tokenizer", "dtype"), [(TINY_TOKENIZER, "uint16"), (LARGE_VOCABULARY, "uint32")])
def test_documents_are_read_only_views_that_outlive_the_corpus_of_as_few_bytes_as_the_vocabulary_fits(
    tmp_path, tokenizer, dtype
):
    documents = documents_of([3, 5, 1])
    with open_corpus(write_corpus(tmp_path / "corpus", documents, tokenizer=tokenizer, bos="three")) as corpus:
        views = list(corpus.documents(1, 3))
        vocab_size = 4 if dtype == "uint16" else 65_537
        assert (corpus.dtype, corpus.bos_id, corpus.eos_id, corpus.vocab_size) == (dtype, vocab_size - 1, 0, vocab_size)
    del corpus
    for view, document in zip(views, documents[1:], strict=True):
        assert (view.dtype, view.flags.writeable, view.flags.owndata) == (dtype, False, False)
        assert view.tolist() == document


def test_a_document_that_does_not_exist_has_no_columns_of_a_corpus_without_columns(tmp_path: Path) -> None:
    with open_corpus(os.fsencode(write_corpus(tmp_path / "corpus", [[1]]))) as corpus:  # type: ignore[arg-type]
        assert corpus.metadata(0) == {}
        with pytest.raises(IndexError, match="document 1 of a corpus of 1"):
            corpus.metadata(1)


OPENED_BY_THREADS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor

sys.setswitchinterval(1e-6)
for _ in range(20):  # each with types that nothing has decoded yet
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokshard"]:
        del sys.modules[name]
    from tokshard.format.opening import open_corpus
    barrier = threading.Barrier(4)

    def opened(_):
        barrier.wait()
        return open_corpus(sys.argv[1]).num_documents

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(opened, range(4))) == [1] * 4
"""


def test_threads_that_open_the_first_corpora_of_a_process_do_not_crash_it(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", [[1]])
    subprocess.run([sys.executable, "-c", OPENED_BY_THREADS, str(corpus)], check=True)


@pytest.mark.slow
def test_threads_read_documents_while_shards_are_opened_and_forgotten(tmp_path, monkeypatch):
    documents = documents_of([2 + index % 5 for index in range(300)])
    corpus = open_corpus(write_tiny(tmp_path / "corpus", documents, shard_tokens=20))
    monkeypatch.setattr(corpora, "_MAX_OPEN_SHARDS", 2)
    interval = sys.getswitchinterval()

    def read(seed: int) -> bool:
        order = random.Random(seed).choices(range(300), k=200)
        return all(corpus.document(index).tolist() == documents[index] for index in order)

    try:
        sys.setswitchinterval(1e-6)  # seconds; a race shows within the test
        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(8)))
    finally:
        sys.setswitchinterval(interval)


def test_a_short_write_is_continued():
    class Trickle(io.RawIOBase):
        def __init__(self):
            self.content = b""

        def write(self, data):
            self.content += bytes(data[:3])
            return min(3, len(data))

    trickle = Trickle()
    HashingFile(trickle).write(b"all of these bytes")
    assert trickle.content == b"all of these bytes"


@pytest.mark.parametrize(
    ("shard_tokens", "batch_tokens", "whole"), [(4, 100, ["0", "1"]), (100, 1, []), (100, 100, [])]
)
def test_a_shard_that_is_not_finished_is_dropped_in_silence(shard_tokens, batch_tokens, whole, tmp_path, capfd):
    schema = shard_schema(tokenizer_info(TINY_TOKENIZER), {})

    def write_and_fail():
        with ShardWriter(store=open_store(tmp_path), name=str, schema=schema, shard_tokens=shard_tokens) as unfinished:
            for _ in range(3):
                document = np.array([1, 2, 0], np.uint16)
                unfinished.extend(document, np.array([3]), source=0, records=np.array([0]), columns={})
            raise KeyboardInterrupt

    with batches_of(batch_tokens), pytest.raises(KeyboardInterrupt):
        write_and_fail()
    gc.collect()  # Arrow writes the rest of a stream when it is freed, and prints that its file is closed
    assert capfd.readouterr().err == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == whole  # a partial last one is gone


@pytest.mark.parametrize("place", ["/dev/full", "table"], ids=["a full disk", "an error of the rows"])
def test_a_table_that_cannot_be_written_is_dropped_in_silence(place, tmp_path, capfd):
    schema = pa.schema([pa.field("n", pa.int64())])

    def batches():
        yield pa.record_batch([pa.array(range(5))], schema=schema)
        if place == "table":
            raise OSError

    with pytest.raises(OSError), (tmp_path / place).open("wb", buffering=0) as file:  # noqa: PT011 - either of two
        write_table(file, schema, batches(), rows_per_batch=2)
    gc.collect()
    assert capfd.readouterr().err == ""


def test_a_shard_of_another_corpus_is_refused_after_shards_of_this_one_were_opened(tmp_path: Path) -> None:
    directory = write_corpus(tmp_path / "corpus", documents_of([40] * 6), shard_tokens=80, tokenizer=TINY_TOKENIZER)
    with open_corpus(directory) as corpus:
        corpus.shard(0), corpus.shard(1)
        path, tokenizer = directory / corpus.shards[2].name, corpus.manifest.tokenizer.canonical_sha256.encode()
        assert path.read_bytes().count(tokenizer) == 2
        path.write_bytes(path.read_bytes().replace(tokenizer, tokenizer[::-1]))
        with pytest.raises(DamagedCorpusError, match=r"is not a shard of this corpus: tokshard\.tokenizer_sha256"):
            corpus.shard(2).batch(0)
