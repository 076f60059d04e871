"""The hashes by which ranged reads are checked: of each stride of a shard, in one file of each generation."""

import zlib

import numpy as np
import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.format import stride_hashes
from tokshard.format.names import STRIDE_HASHES
from tokshard.format.opening import open_corpus
from tokshard.format.schema import HASH_STRIDE
from tokshard.format.stride_hashes import StrideHasher


@pytest.fixture
def corpus(tmp_path, monkeypatch):
    """Shards of 18, 16 and 5 tokens, whose strides are of 8."""
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 8)
    return write_corpus(tmp_path / "corpus", documents_of([11, 7, 16, 5]), shard_tokens=18, tokenizer=TINY_TOKENIZER)


def crc_of_strides(tokens, stride):
    return [zlib.crc32(tokens[start : start + stride].tobytes()) for start in range(0, len(tokens), stride)]


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


def test_a_group_of_1024_hashes_is_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 8)
    with open_corpus(
        write_corpus(tmp_path / "corpus", documents_of([9_000, 9_000]), tokenizer=TINY_TOKENIZER)
    ) as corpus:
        groups = [corpus.stride_hashes(0, group) for group in range(3)]
        assert [len(group) for group in groups] == [1_024, 1_024, 202]
        assert np.concatenate(groups).tolist() == corpus.stride_hashes(0).tolist()


def test_the_hashes_of_a_shard_are_one_ranged_read(corpus, monkeypatch):
    asked = []
    small.on_disk(monkeypatch.setattr, read=lambda _, *request, **options: asked.append(request) or [bytes(8)])
    with open_corpus(corpus) as opened:
        opened.stride_hashes(1, is_checked=False)
    assert asked == [(STRIDE_HASHES, [(12, 8)])]
