"""Documents in, shards on disk, the same documents out."""

import gc
import io
import random
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import corpus as corpora
from tokshard.format import names, writer
from tokshard.format.corpus import Provenance
from tokshard.format.files import HashingFile
from tokshard.format.opening import open_corpus
from tokshard.format.schema import ORDINAL_STRIDE, ShardFacts
from tokshard.format.tables import SHARD_TABLE_SCHEMA, Table, write_table
from tokshard.format.writer import ShardWriter
from tokshard.store import open_store

lengths_of_documents = st.lists(st.integers(1, 60), min_size=1, max_size=60)
LARGE_VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 65536')


@contextmanager
def batches_of(tokens: int = writer.MAX_BATCH_TOKENS, characters: int = writer.MAX_BATCH_CHARACTERS):
    """Record batches that close earlier, so that a small corpus has many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "MAX_BATCH_TOKENS", tokens)
        patch.setattr(writer, "MAX_BATCH_CHARACTERS", characters)
        yield


def write_tiny(directory: Path, documents, **options) -> Path:
    return write_corpus(directory, documents, tokenizer=TINY_TOKENIZER, **options)


@given(
    lengths=lengths_of_documents,
    shard_tokens=st.integers(1, 400),
    batch_tokens=st.integers(1, 120),
    documents_per_call=st.integers(1, 70),
)
def test_documents_come_back_as_they_were_written(lengths, shard_tokens, batch_tokens, documents_per_call):
    documents = documents_of(lengths)
    with tempfile.TemporaryDirectory() as folder, batches_of(batch_tokens):
        directory = write_tiny(
            Path(folder) / "corpus", documents, shard_tokens=shard_tokens, documents_per_call=documents_per_call
        )
        with open_corpus(directory) as corpus:
            assert [document.tolist() for document in corpus.documents()] == documents
            assert (corpus.num_documents, corpus.num_tokens, len(corpus)) == (len(lengths), sum(lengths), len(lengths))
            for shard in corpus.shards:
                assert shard.num_tokens <= shard_tokens or shard.num_documents == 1
            for index in range(len(corpus.shards)):
                for place in corpus.shards.batch_places(index):
                    assert place.num_tokens <= batch_tokens or place.num_documents == 1


@given(lengths=lengths_of_documents, shard_tokens=st.integers(1, 400), documents_per_call=st.integers(1, 70))
def test_the_bytes_do_not_depend_on_how_documents_reach_the_writer(lengths, shard_tokens, documents_per_call):
    texts = [None if length % 5 == 0 else "é" * (length % 7) for length in lengths]
    source = Source(documents=documents_of(lengths), metadata={"note": texts})
    written = []
    with tempfile.TemporaryDirectory() as folder, batches_of(tokens=100, characters=20):
        for number, count in enumerate((1 << 30, documents_per_call)):
            directory = Path(folder) / str(number)
            write_tiny(
                directory,
                [],
                sources=[source],
                columns={"note": "string"},
                shard_tokens=shard_tokens,
                documents_per_call=count,
            )
            written.append({path.name: path.read_bytes() for path in directory.iterdir()})
    assert written[0] == written[1]


@given(data=st.data(), lengths=lengths_of_documents)
def test_any_document_can_be_read_at_any_time(data, lengths):
    documents = documents_of(lengths)
    with tempfile.TemporaryDirectory() as folder, batches_of(40):
        corpus = open_corpus(write_tiny(Path(folder) / "corpus", documents, shard_tokens=100))
        for index in data.draw(st.lists(st.integers(-len(lengths), len(lengths) - 1), max_size=20)):
            assert corpus.document(index).tolist() == documents[index]
        for index in (len(lengths), -len(lengths) - 1):
            with pytest.raises(IndexError, match=f"document {index} of a corpus of {len(lengths)}"):
                corpus.document(index)


def test_a_shard_closes_before_the_document_that_would_exceed_it(tmp_path):
    corpus = open_corpus(write_tiny(tmp_path / "corpus", documents_of([4, 6, 1, 10, 11, 3]), shard_tokens=10))
    assert [(shard.num_documents, shard.num_tokens) for shard in corpus.shards] == [
        (2, 10),
        (1, 1),
        (1, 10),
        (1, 11),
        (1, 3),
    ]
    assert [shard.name for shard in corpus.shards][:2] == [
        "shard-00-0000000-000000-0000.arrow",
        "shard-00-0000000-000000-0001.arrow",
    ]


def test_a_document_larger_than_a_batch_gets_its_own(tmp_path):
    with batches_of(10):
        corpus = open_corpus(write_tiny(tmp_path / "corpus", documents_of([4, 6, 25, 3, 30, 10])))
    assert [place.num_tokens for place in corpus.shards.batch_places(0)] == [10, 25, 3, 30, 10]


def test_a_batch_closes_before_kept_text_grows_too_large_for_it(tmp_path):
    source = Source(documents=documents_of([2] * 6), metadata={"html": ["aaaa", None, "bbbb", "c" * 30, "", "dddd"]})
    with batches_of(characters=8):
        directory = write_tiny(tmp_path / "corpus", [], sources=[source], columns={"html": "string"})
    corpus = open_corpus(directory)
    assert [place.num_documents for place in corpus.shards.batch_places(0)] == [3, 1, 2]
    assert [corpus.metadata(index)["html"] for index in range(6)] == ["aaaa", None, "bbbb", "c" * 30, "", "dddd"]


def test_kept_columns_of_every_type_come_back_nulls_included(tmp_path):
    metadata = {
        "text": ["plain", "", None, "é 🙂"],
        "count": [1, None, -(1 << 63), (1 << 63) - 1],
        "score": [None, 0.5, -1e300, 3.0],
        "flag": [True, False, None, True],
    }
    columns = {"text": "string", "count": "int64", "score": "float64", "flag": "bool"}
    source = Source(documents=documents_of([3, 1, 4, 1]), metadata=metadata)
    with batches_of(4):
        corpus = open_corpus(write_tiny(tmp_path / "corpus", [], sources=[source], columns=columns))
    for index in range(4):
        assert corpus.metadata(index) == {name: values[index] for name, values in metadata.items()}


def test_metadata_is_empty_without_kept_columns(tmp_path):
    assert open_corpus(write_tiny(tmp_path / "corpus", documents_of([3]))).metadata(0) == {}


@given(gaps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=30), min_size=1, max_size=4))
def test_every_document_knows_its_source_and_record(gaps):
    sources, expected = [], []
    for index, gaps_of_source in enumerate(gaps):
        records = [row + sum(gaps_of_source[: row + 1]) for row in range(len(gaps_of_source))]
        left_out = {"empty": sum(gaps_of_source)} if any(gaps_of_source) else {}
        sources.append(
            Source(
                documents=documents_of([2] * len(records)), records=records, path=f"{index}.jsonl", left_out=left_out
            )
        )
        expected += [Provenance(index, record + 1) for record in records]
    with tempfile.TemporaryDirectory() as folder:
        corpus = open_corpus(
            write_tiny(Path(folder) / "corpus", [], sources=sources, shard_tokens=14, documents_per_call=5)
        )
        assert [corpus.provenance(index) for index in range(len(corpus))] == expected
        assert [source.path for source in corpus.sources()] == [source.path for source in sources]
        assert [source.left_out for source in corpus.sources()] == [source.left_out for source in sources]


def test_consecutive_records_are_one_run(tmp_path):
    source = Source(documents=documents_of([2] * 9), records=[0, 1, 2, 5, 6, 7, 8, 20, 21], left_out={"empty": 13})
    directory = write_tiny(tmp_path / "corpus", [], sources=[source], documents_per_call=2)
    runs = open_corpus(directory).shards.runs(0)
    assert (runs.document.tolist(), runs.record.tolist()) == ([0, 3, 7], [0, 5, 20])


def test_a_run_ends_with_its_source_even_where_the_next_one_counts_on(tmp_path):
    sources = [
        Source(documents=documents_of([2] * 2), path="a"),
        Source(documents=documents_of([2] * 2), path="b", records=[2, 3], left_out={"empty": 2}),
    ]
    corpus = open_corpus(write_tiny(tmp_path / "corpus", [], sources=sources))
    assert [corpus.provenance(index) for index in range(4)] == [
        Provenance(0, 1),
        Provenance(0, 2),
        Provenance(1, 3),
        Provenance(1, 4),
    ]


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


def test_the_table_names_the_document_at_every_stride(tmp_path):
    rng = random.Random(5)
    lengths = [rng.choice([1, 100, ORDINAL_STRIDE - 1, ORDINAL_STRIDE, 3 * ORDINAL_STRIDE + 7]) for _ in range(40)]
    with batches_of(150_000):
        directory = write_tiny(tmp_path / "corpus", documents_of(lengths), shard_tokens=500_000)
    corpus = open_corpus(directory)
    first = 0
    for index, shard in enumerate(corpus.shards):
        document_of_token = np.repeat(np.arange(shard.num_documents), lengths[first : first + shard.num_documents])
        assert corpus.shards.stride_documents(index).tolist() == document_of_token[::ORDINAL_STRIDE].tolist()
        first += shard.num_documents
    assert first == len(lengths)


def test_batch_places_give_the_positions_of_ids_and_offsets(tmp_path):
    documents = documents_of([5, 9, 2, 30, 4])
    with batches_of(14):
        corpus = open_corpus(write_tiny(tmp_path / "corpus", documents))
    content = (corpus.directory / corpus.shards[0].name).read_bytes()
    read = []
    for place in corpus.shards.batch_places(0):
        offsets = np.frombuffer(content, np.int64, place.num_documents + 1, place.offsets_position)
        tokens = np.frombuffer(content, corpus.dtype, place.num_tokens, place.values_position)
        read += [tokens[start:stop].tolist() for start, stop in pairwise(offsets)]
    assert read == documents


@pytest.mark.parametrize(
    ("tokenizer", "dtype"), [(TINY_TOKENIZER, "uint16"), (LARGE_VOCABULARY, "uint32")], ids=["small", "large"]
)
def test_ids_take_two_bytes_if_the_vocabulary_fits_them(tmp_path, tokenizer, dtype):
    corpus = open_corpus(write_corpus(tmp_path / "corpus", [[1, 2, 0], [0]], tokenizer=tokenizer))
    assert corpus.dtype == dtype
    assert corpus.document(0).dtype == dtype


def test_documents_are_read_only_views_of_the_map_that_outlive_the_corpus(tmp_path):
    documents = documents_of([3, 5])
    with open_corpus(write_tiny(tmp_path / "corpus", documents)) as corpus:
        views = list(corpus.documents())
    del corpus
    for view, document in zip(views, documents, strict=True):
        assert not view.flags.writeable
        assert not view.flags.owndata
        assert view.tolist() == document


def test_a_range_of_documents_is_read_in_order(tmp_path):
    documents = documents_of([3, 5, 1, 2])
    corpus = open_corpus(write_tiny(tmp_path / "corpus", documents))
    assert [document.tolist() for document in corpus.documents(1, 3)] == documents[1:3]


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


def test_a_corpus_written_with_bos_says_so(tmp_path):
    corpus = open_corpus(write_corpus(tmp_path / "corpus", [[3, 1, 0]], tokenizer=TINY_TOKENIZER, bos="three"))
    assert (corpus.bos_id, corpus.eos_id, corpus.vocab_size) == (3, 0, 4)


def test_an_unfinished_shard_leaves_no_file(tmp_path):
    facts = ShardFacts(dtype="uint16", tokenizer_sha256="0" * 64, eos_id=0, bos_id=None, columns={})

    def write_and_fail():
        with ShardWriter(store=open_store(tmp_path), name=str, facts=facts, shard_tokens=4) as unfinished:
            for _ in range(3):
                unfinished.extend(
                    np.array([1, 2, 0], np.uint16), np.array([3]), source=0, records=np.array([0]), columns={}
                )
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]  # whole; a partial third is gone


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
    "name",
    [
        "../shard-00-0000000-000000-0000.arrow",
        "/shard-00-0000000-000000-0000.arrow",
        "shard-00-0000000-000000-0000.arrow\n",
        "shard-00-0000000-000000-0000.parquet",
        "shard-\u0660\u0660-0000000-000000-0000.arrow",  # digits too, but not ours
        "manifest.json",
    ],
)
def test_a_name_that_could_leave_the_directory_is_not_a_shard_name(name):
    assert not names.is_shard_name(name)


def test_shard_names_tell_where_their_first_document_comes_from():
    name = names.shard_name(generation=0, first_input=12, segment=3, part=4)
    assert name == "shard-00-0000012-000003-0004.arrow"
    assert names.is_shard_name(name)
    assert names.is_shard_name(names.shard_name(generation=0, first_input=123_456_789, segment=0, part=99_999))


def test_lists_of_the_shard_table_are_read_without_a_search_for_pandas(tmp_path, monkeypatch):
    """Old versions of pyarrow try to import it for every array that becomes one of numpy."""
    wanted = []

    class Finder:
        def find_spec(self, name, path=None, target=None):
            wanted.append(name)

    with open_corpus(write_tiny(tmp_path / "corpus", documents_of([3, 4]))) as corpus:
        table = Table(open_store(str(corpus.directory)), names.SHARD_TABLE, SHARD_TABLE_SCHEMA)
        table.batch(0)
        monkeypatch.setattr(sys, "meta_path", [Finder(), *sys.meta_path])
        assert table.list_at("batch_tokens", 0).tolist() == [7]
    assert wanted == []


def test_a_list_of_the_shard_table_that_is_shorter_than_its_length_is_damage(tmp_path):
    with open_corpus(write_tiny(tmp_path / "corpus", documents_of([3, 4]))) as corpus:
        table = Table(open_store(str(corpus.directory)), names.SHARD_TABLE, SHARD_TABLE_SCHEMA)
    with pytest.raises(DamagedCorpusError, match="column batch_tokens has less than the 3 values"):
        table._numbers_at("batch_tokens", pa.array([7, 7], pa.int64()), 1, 3)


@pytest.mark.parametrize("batch_tokens", [1, 100], ids=["batches written", "none written"])
def test_a_shard_that_is_not_finished_is_dropped_in_silence(batch_tokens, tmp_path, capfd):
    facts = ShardFacts(dtype="uint16", tokenizer_sha256="0" * 64, eos_id=0, bos_id=None, columns={})
    tokens, ends = np.array([1, 0, 2, 0], np.uint16), np.array([2, 4])

    def write_and_fail():
        with ShardWriter(store=open_store(tmp_path), name=str, facts=facts, shard_tokens=100) as unfinished:
            unfinished.extend(tokens, ends, source=0, records=np.arange(2), columns={})
            raise KeyboardInterrupt

    with batches_of(batch_tokens), pytest.raises(KeyboardInterrupt):
        write_and_fail()
    gc.collect()  # Arrow writes the rest of a stream when it is freed, and prints that its file is closed
    assert capfd.readouterr().err == ""


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
