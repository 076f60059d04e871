"""The hashes by which ranged reads are checked: of each stride of a shard, in one file of each generation."""

import tempfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, append_generation, documents_of, rewrite_manifest, write_corpus
from tests.examples import examples
from tokshard.errors import DamagedCorpusError
from tokshard.format import stride_hashes, writer
from tokshard.format.names import STRIDE_HASHES
from tokshard.format.opening import open_corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.stride_hashes import StrideHasher
from tokshard.store.posix import PosixStore


@pytest.fixture
def strides_of_8(monkeypatch):
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 8)


@pytest.fixture
def corpus(tmp_path, strides_of_8):
    """Shards of 18, 16 and 5 tokens."""
    return write_corpus(tmp_path / "corpus", documents_of([11, 7, 16, 5]), shard_tokens=18, tokenizer=TINY_TOKENIZER)


def crc_of_strides(tokens, stride):
    return [zlib.crc32(tokens[start : start + stride].tobytes()) for start in range(0, len(tokens), stride)]


def tokens_of(corpus, index):
    shard = corpus.shard(index)
    return np.concatenate([shard.batch(batch)[1] for batch in range(shard.num_batches)])


@settings(max_examples=examples(25))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=20),
    shard_tokens=st.integers(1, 200),
    batch_tokens=st.integers(1, 50),
    documents_per_call=st.integers(1, 40),
)
def test_every_stride_of_every_shard_has_its_hash_wherever_batches_end(
    lengths, shard_tokens, batch_tokens, documents_per_call
):
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stride_hashes, "HASH_STRIDE", 8)
        patch.setattr(writer, "MAX_BATCH_TOKENS", batch_tokens)
        directory = write_corpus(
            Path(folder) / "corpus",
            documents_of(lengths),
            shard_tokens=shard_tokens,
            documents_per_call=documents_per_call,
            tokenizer=TINY_TOKENIZER,
        )
        with open_corpus(directory) as corpus:
            expected = [crc_of_strides(tokens_of(corpus, index), 8) for index in range(len(corpus.shards))]
            assert [corpus.stride_hashes(index).tolist() for index in range(len(corpus.shards))] == expected
        stored = np.fromfile(directory / STRIDE_HASHES, "<u4").tolist()
        assert stored == [crc for crcs in expected for crc in crcs]


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
@pytest.mark.parametrize("count", [1, HASH_STRIDE - 1, HASH_STRIDE, HASH_STRIDE + 1, 3 * HASH_STRIDE])
def test_a_stride_is_8192_tokens_of_either_width(count, dtype):
    tokens = np.arange(count).astype(dtype)
    hasher = StrideHasher()
    for start in range(0, count, 5_000):
        hasher.add(tokens[start : start + 5_000])
    found = hasher.finish()
    assert found.dtype == np.uint32
    assert found.tolist() == crc_of_strides(tokens, 8_192)


def test_each_generation_has_the_hashes_of_its_own_shards(corpus, strides_of_8):
    append_generation(corpus, documents_of([9, 9, 20]), shard_tokens=18)
    with open_corpus(corpus) as grown:
        assert [len(grown.stride_hashes(index)) for index in range(5)] == [3, 2, 1, 3, 3]
        for index in range(5):
            assert grown.stride_hashes(index).tolist() == crc_of_strides(tokens_of(grown, index), 8)
    assert [(folder / STRIDE_HASHES).stat().st_size for folder in (corpus, corpus / "generation-01")] == [24, 24]


def test_a_shard_that_the_corpus_does_not_have_is_an_index_error(corpus):
    with open_corpus(corpus) as opened:
        assert opened.stride_hashes(-1).tolist() == opened.stride_hashes(2).tolist()
        with pytest.raises(IndexError):
            opened.stride_hashes(3)


def test_the_hashes_of_a_shard_are_one_ranged_read(corpus, monkeypatch):
    asked = []

    def read(store, name, ranges, **options):
        asked.append((name, ranges))
        return whole(store, name, ranges, **options)

    whole = PosixStore.read
    monkeypatch.setattr(PosixStore, "read", read)
    with open_corpus(corpus) as opened:
        opened.stride_hashes(1)
    assert asked == [(STRIDE_HASHES, [(12, 8)])]


def test_a_missing_file_of_hashes_is_named_when_it_is_asked_for(corpus):
    (corpus / STRIDE_HASHES).unlink()
    with open_corpus(corpus) as opened, pytest.raises(DamagedCorpusError, match=f"{corpus / STRIDE_HASHES} is missing"):
        opened.stride_hashes(0)


def test_a_short_file_of_hashes_is_named_when_its_end_is_asked_for(corpus):
    path = corpus / STRIDE_HASHES
    path.write_bytes(path.read_bytes()[:-1])
    with open_corpus(corpus) as opened:
        assert len(opened.stride_hashes(1)) == 2
        with pytest.raises(DamagedCorpusError, match=f"{path}: hashes 5 to 6 cannot be read"):
            opened.stride_hashes(2)


def test_a_manifest_with_another_number_of_hashes_than_strides_is_refused(corpus):
    rewrite_manifest(corpus, lambda fields: fields["files"][STRIDE_HASHES].update(num_bytes=20))
    with pytest.raises(DamagedCorpusError, match="the hashes of its shards take 24 bytes, the manifest says 20 of"):
        open_corpus(corpus)
