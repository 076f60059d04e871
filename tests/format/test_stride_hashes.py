"""The hashes by which ranged reads are checked: of each stride of a shard, in one file of each generation."""

import zlib

import numpy as np
import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.format import stride_hashes
from tokshard.format.names import STRIDE_HASHES
from tokshard.format.opening import open_corpus
from tokshard.format.stride_hashes import StrideHasher


@pytest.mark.parametrize("dtype", [np.uint16, np.uint32])
def test_a_stride_is_8192_tokens_of_either_width(dtype):
    tokens, hasher = np.arange(20_000).astype(dtype), StrideHasher()
    for part in (tokens[:5_000], tokens[5_000:]):
        hasher.add(part)
    assert hasher.finish().tolist() == [zlib.crc32(tokens[start : start + 8_192]) for start in range(0, 20_000, 8_192)]


def test_a_group_of_1024_hashes_is_read_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 8)
    write_corpus(tmp_path / "corpus", documents_of([9_000, 9_000]), tokenizer=TINY_TOKENIZER)
    with open_corpus(tmp_path / "corpus") as corpus:
        groups = [corpus.stride_hashes(0, group) for group in range(3)]
        assert [len(group) for group in groups] == [1_024, 1_024, 202]
        assert np.concatenate(groups).tolist() == corpus.stride_hashes(0).tolist()


def test_the_hashes_of_a_shard_are_one_ranged_read(tmp_path, monkeypatch):
    monkeypatch.setattr(stride_hashes, "HASH_STRIDE", 8)
    lengths, asked = [11, 7, 16, 5], []  # in shards of 18, 16 and 5 tokens
    corpus = write_corpus(tmp_path / "corpus", documents_of(lengths), shard_tokens=18, tokenizer=TINY_TOKENIZER)
    small.on_disk(monkeypatch.setattr, read=lambda _, *request, **options: asked.append(request) or [bytes(8)])
    with open_corpus(corpus) as opened:
        opened.stride_hashes(1, is_checked=False)
    assert asked == [(STRIDE_HASHES, [(12, 8)])]
