"""A large shard table in another store is read in part, and says the same as the whole one."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.store.memory import READS, REQUESTS, SCHEME, MemoryStore
from tokshard.errors import DamagedCorpusError
from tokshard.format import arrow_file, names, opening, tables
from tokshard.format.corpus import Corpus
from tokshard.format.files import read_file
from tokshard.format.opening import open_corpus, read_generations
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.store import STORES_BY_SCHEME

_NUMBERS = itertools.count()
GAP_BYTES = arrow_file._GAP_BYTES


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """Shards with several entries in each of their lists."""
    lengths = [20_000, 30_000, 40_000, 50_000] * 3
    records = [record + record // 2 for record in range(len(lengths))]  # every third record was left out
    source = Source(documents=documents_of(lengths), records=records, left_out={"empty": max(records) + 1 - 12})
    return write_corpus(tmp_path_factory.mktemp("partial") / "corpus", sources=[source], shard_tokens=140_000)


@pytest.fixture
def store(local, monkeypatch):
    """The same in a store, in which every table is a large one."""
    monkeypatch.setattr(tables, "_WHOLE_BYTES", 0)
    monkeypatch.setattr(arrow_file, "_GAP_BYTES", 0)
    found = MemoryStore(f"{SCHEME}://partial-{next(_NUMBERS)}")
    for path in local.iterdir():
        found.put(path.name, path.read_bytes())
    READS.clear()
    return found


def opened(store, **options) -> Corpus:
    return Corpus(store, read_generations(store), **options)


def reads_of_the_table() -> list[int]:
    """How long each range of the shard table is that was read."""
    return [length for name, _, length in READS if name == names.SHARD_TABLE]


def test_every_shard_is_described_as_by_the_whole_table(local, store):
    expected, found = open_corpus(local).shards, opened(store).shards

    assert len(expected) == 3
    assert list(found) == list(expected)
    assert list(found.names()) == list(expected.names())
    assert np.array_equal(found.first_tokens, expected.first_tokens)
    for index in range(len(expected)):
        assert found.batch_places(index) == expected.batch_places(index)
        assert np.array_equal(found.stride_documents(index), expected.stride_documents(index))
        for name in ("document", "source", "record"):
            assert np.array_equal(getattr(found.runs(index), name), getattr(expected.runs(index), name))
    assert max(len(expected.runs(index).document) for index in range(len(expected))) > 1


def test_lists_of_documents_are_read_for_one_shard_at_a_time(store):
    shards = opened(store).shards
    read_to_open = len(READS)
    strides = shards.stride_documents(2)
    assert len(strides) == -(-shards[2].num_tokens // ORDINAL_STRIDE) == 3
    assert [length for _, _, length in READS[read_to_open:]] == [4 * 3]


def test_what_lies_close_together_and_all_of_a_small_table_or_a_verified_one_is_read_at_once(store, monkeypatch):
    opened(store, load_table=read_file)
    assert reads_of_the_table() == []
    monkeypatch.setattr(arrow_file, "_GAP_BYTES", GAP_BYTES)
    opened(store)
    assert (
        len(reads_of_the_table()) == 3
    )  # the footer, what describes the record batch, and all columns that are needed
    READS.clear()
    monkeypatch.setattr(tables, "_WHOLE_BYTES", 1 << 20)
    opened(store)
    assert reads_of_the_table() == []


def test_a_footer_that_is_longer_than_the_first_read_is_read_in_two(local, store, monkeypatch):
    monkeypatch.setattr(arrow_file, "_TAIL_BYTES", 100)
    assert list(opened(store).shards) == list(open_corpus(local).shards)


def test_a_table_that_is_replaced_while_a_corpus_is_opened_or_later_is_refused(store, monkeypatch):
    shards = opened(store).shards
    store.put(names.SHARD_TABLE, store.get(names.SHARD_TABLE))
    with pytest.raises(DamagedCorpusError, match=r"shards\.arrow cannot be read: the file was replaced"):
        shards.stride_documents(0)
    read = MemoryStore.read

    def read_and_replace(self, name, ranges, **options):
        found = read(self, name, ranges, **options)
        if len(reads_of_the_table()) == 1:  # its end
            self.put(names.SHARD_TABLE, self.get(names.SHARD_TABLE))
        return found

    READS.clear()
    monkeypatch.setattr(MemoryStore, "read", read_and_replace)
    with pytest.raises(DamagedCorpusError, match=r"shards\.arrow cannot be read: .*the file was replaced"):
        opened(store)


def test_a_bucket_of_many_shards_is_not_listed_and_a_missing_one_is_noticed_when_it_is_read(store, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    missing = list(opened(store).shards.names())[1]
    store.delete(missing)
    with pytest.raises(DamagedCorpusError, match=f"{missing} is missing"):
        open_corpus(store.location)

    monkeypatch.setattr(opening, "_MOST_LISTED", 2)
    REQUESTS.clear()
    corpus = open_corpus(store.location)
    assert REQUESTS["names"] == 0
    with pytest.raises(DamagedCorpusError, match=f"{missing} is missing"):
        corpus.shard(1)
