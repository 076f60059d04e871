"""Ranges of shards in a store other than a directory: the same tokens, and one version of each shard."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.store.memory import REQUESTS, SCHEME, MemoryStore
from tokshard.errors import DamagedCorpusError
from tokshard.format import source_table
from tokshard.format.partial_file import PartialFile
from tokshard.runtime import StreamPlan
from tokshard.runtime.bytes import fetch
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.fetch import joined_ranges
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

RANGES = st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(1, 1 << 17)), max_size=30)


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """One corpus twice: on this machine and in memory."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    lengths = np.random.default_rng(0).integers(1, 200, 300).tolist()
    local = write_corpus(
        tmp_path / "corpus",
        sources=[Source(documents=documents_of(lengths))],
        shard_tokens=3_000,
        tokenizer=TINY_TOKENIZER,
    )
    remote = f"{SCHEME}:/{local}"
    for name in files_below(open_store(local), ""):
        open_store(remote).put(name, (local / name).read_bytes())
    return str(local), remote


def plan_of(location: str) -> StreamPlan:
    return StreamPlan({"corpus": location}, seq_len=64, block_tokens=256, window_blocks=8, allow_small_blocks=True)


def test_a_corpus_in_a_store_has_the_samples_of_one_in_a_directory(corpora):
    here, there = map(plan_of, corpora)
    assert there.fingerprint == here.fingerprint
    for sample in range(400):
        assert there.sample(sample)["input_ids"].tolist() == here.sample(sample)["input_ids"].tolist()


def test_training_asks_for_nothing_more_of_a_shard_table_that_was_read_in_part(corpora, monkeypatch):
    here = plan_of(corpora[0])
    monkeypatch.setattr(source_table, "_WHOLE_BYTES", 0)
    there = plan_of(corpora[1])
    monkeypatch.setattr(PartialFile, "read", None)  # a call would fail
    assert [there.sample(each)["input_ids"].tolist() for each in range(0, 400, 7)] == [
        here.sample(each)["input_ids"].tolist() for each in range(0, 400, 7)
    ]


def test_a_corpus_whose_hashes_are_too_many_to_keep_has_the_same_samples(corpora, monkeypatch):
    here = plan_of(corpora[0])
    monkeypatch.setattr(fetch, "_MAX_HASHES", fetch.HASH_GROUP)
    there = plan_of(corpora[1])
    assert [there.sample(each)["input_ids"].tolist() for each in range(0, 400, 7)] == [
        here.sample(each)["input_ids"].tolist() for each in range(0, 400, 7)
    ]


def test_documents_are_found_in_a_store_as_in_a_directory(corpora):
    here, there = map(CorpusSource, corpora)
    assert not there.is_in_memory
    for document in range(300):
        assert there.place_of(document) == here.place_of(document)
        assert there.document_at(there.place_of(document).start) == here.place_of(document)


def test_a_shard_that_is_put_again_is_refused_by_its_name(corpora):
    source = CorpusSource(corpora[1])
    name = source.place_of(0).shard
    store = open_store(corpora[1])
    store.put(name, store.get(name))
    with pytest.raises(DamagedCorpusError, match=f"{name} was replaced during the run"):
        source.place_of(0)


def test_a_shard_that_is_put_again_is_read_on_unless_its_tokens_changed(corpora):
    here, there = map(plan_of, corpora)
    store = open_store(corpora[1])
    shards = list(CorpusSource(corpora[1]).corpus.shards.names())
    there.sample(0)
    for name in shards:
        store.put(name, store.get(name))
    assert there.sample(200)["input_ids"].tolist() == here.sample(200)["input_ids"].tolist()
    for name in shards:
        content = bytearray(store.get(name))
        content[len(content) // 2] ^= 1
        store.put(name, bytes(content))
    with pytest.raises(DamagedCorpusError, match=r"shard-.*\.arrow: tokens .* have the hash .*, expected"):
        [plan_of(corpora[1]).sample(sample) for sample in range(400)]


def test_training_asks_for_no_facts_of_shards_whose_bytes_are_checked_by_hashes(corpora):
    plan = plan_of(corpora[1])
    REQUESTS.clear()
    for sample in range(400):
        plan.sample(sample)
    assert REQUESTS["stat"] == 0


@given(places=RANGES)
def test_joined_ranges_cover_all_that_is_wanted_and_have_no_short_gaps(places):
    joined = joined_ranges(places)
    assert all(
        any(start <= position and position + length <= start + size for start, size in joined)
        for position, length in places
    )
    assert all(start + size + fetch._GAP_BYTES < after for (start, size), (after, _) in itertools.pairwise(joined))
    assert {start for start, _ in joined} <= {position for position, _ in places}
