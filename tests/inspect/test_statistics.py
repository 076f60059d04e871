"""Statistics from offsets and tokens: lengths, token counts, vocabularies, pieces."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.contract.small import shrink
from tests.corpora import TINY_TOKENIZER, TOKENIZER, documents_of, write_corpus
from tokshard import select_corpus
from tokshard.format.opening import open_corpus
from tokshard.format.schema import MAX_VOCABULARY
from tokshard.inspect.corpus.documents import token_pieces
from tokshard.inspect.corpus.statistics import PERCENTILES, count_tokens, estimated_lengths, read_lengths
from tokshard.inspect.corpus.vocabulary import parse_vocabulary


@given(lengths=st.lists(st.integers(1, 300), min_size=1, max_size=60))
@example(lengths=list(range(1, 501)))
def test_percentiles_are_those_of_all_documents_by_nearest_rank(tmp_path_factory, lengths):
    directory = tmp_path_factory.mktemp("lengths") / "corpus"
    write_corpus(directory, documents_of(lengths), tokenizer=TINY_TOKENIZER, shard_tokens=500)
    found = read_lengths(open_corpus(directory))
    assert found.is_exact
    expected = np.percentile(lengths, PERCENTILES, method="inverted_cdf").tolist()
    assert list(found.percentiles().values()) == expected


def test_lengths_of_the_manifest_are_estimates_within_their_power_of_two(tmp_path):
    lengths = [3, 5, 9, 17, 40, 100, 300]
    corpus = open_corpus(write_corpus(tmp_path / "corpus", documents_of(lengths), tokenizer=TINY_TOKENIZER))
    found = estimated_lengths(corpus.manifest.document_lengths)
    assert not found.is_exact
    assert found.percentiles()[50] == 24  # the median, 17, lies in [16, 32)
    assert found.percentiles()[99] == 300


def test_a_sample_of_tokens_comes_from_everywhere_and_full_counts_all(tmp_path, monkeypatch):
    monkeypatch.setattr("tokshard.inspect.corpus.statistics.NUM_SLICES", 20)
    monkeypatch.setattr("tokshard.inspect.corpus.statistics.SLICE_TOKENS", 5)
    documents = [[1] * 499 + [0], [2] * 499 + [0], [3] * 499 + [0]]
    directory = write_corpus(tmp_path / "corpus", documents, tokenizer=TINY_TOKENIZER, shard_tokens=500)
    with open_corpus(directory) as corpus:
        seen = []
        sample = count_tokens(corpus, on_progress=lambda done, total: seen.append((done, total)))
        assert not sample.is_full
        assert sample.num_tokens == 100
        assert all(30 <= token.count <= 35 for token in sample.most_frequent(9) if token.id)
        assert seen[-1] == (100, 100)
        assert count_tokens(corpus, is_full=True).counts.tolist() == [3, 499, 499, 499]


def test_a_sample_of_a_view_comes_from_all_record_batches_of_the_shards_of_its_base(tmp_path, monkeypatch):
    shrink(monkeypatch.setattr, batch_tokens=100)
    monkeypatch.setattr("tokshard.inspect.corpus.statistics.NUM_SLICES", 20)
    monkeypatch.setattr("tokshard.inspect.corpus.statistics.SLICE_TOKENS", 5)
    documents = [[token] * 9 + [0] for token in (1, 2, 3) for _ in range(40)]
    base = write_corpus(tmp_path / "base", documents, tokenizer=TINY_TOKENIZER)
    (tmp_path / "drop.jsonl").write_text("".join(f'{{"document": {number}}}\n' for number in range(40)))
    select_corpus(base, out=tmp_path / "view", drop_ids=tmp_path / "drop.jsonl", workers=1)
    with open_corpus(tmp_path / "view") as view:
        sample = count_tokens(view)
    assert (sample.is_full, sample.num_tokens) == (False, 100)
    assert {token.id for token in sample.most_frequent(9) if token.count > 30} == {2, 3}


def test_an_id_far_beyond_the_others_is_counted_without_room_for_those_between(tmp_path):
    far = MAX_VOCABULARY - 1
    tokenizer = json.loads(TINY_TOKENIZER)
    tokenizer["added_tokens"].append({**tokenizer["added_tokens"][0], "id": far, "content": "<far>"})
    documents = [[1, far, 1, far, 0], [2, far - 1, 0], [far, 0]]
    directory = write_corpus(
        tmp_path / "corpus", documents, tokenizer=json.dumps(tokenizer).encode(), documents_per_call=1
    )
    with open_corpus(directory) as corpus:
        tracemalloc.start()
        counts = count_tokens(corpus)
        assert counts.unknown_share == 0.2
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 50 << 20
    frequent = [(token.id, token.count) for token in counts.most_frequent(9)]
    assert frequent == [(0, 3), (far, 3), (1, 2), (2, 1), (far - 1, 1)]
    assert (len(counts.ids), counts.vocab_size, counts.num_tokens) == (5, MAX_VOCABULARY, 10)


BYTE_LEVEL = {
    "model": {"vocab": {"a": 0, "\u0120b": 1, "\u00e6": 2, "\u00c3\u00bc": 3}, "unk_token": None},
    "decoder": {"type": "ByteLevel"},
    "added_tokens": [{"id": 4, "content": "<eos>", "special": True}],
}
PIECES = {
    "model": {"vocab": [["<unk>", 0.0], ["<0x0A>", 0.0], ["\u2581the", -1.0]], "unk_id": 0},
    "added_tokens": None,
}


@pytest.mark.parametrize(
    ("tokenizer", "shown", "byte_ids", "special_ids", "unknown_id"),
    [
        (BYTE_LEVEL, ["a", " b", "\\xe6", "\u00fc", "<eos>"], {2}, {4}, None),
        (PIECES, ["<unk>", "<0x0A>", " the"], {1}, set(), 0),
    ],
    ids=["entries that are not valid text", "fallbacks"],
)
def test_bytes_of_a_vocabulary_are_no_text_of_their_own(tokenizer, shown, byte_ids, special_ids, unknown_id):
    found = parse_vocabulary(tokenizer)
    assert [found.shown(token) for token in range(len(shown))] == shown
    assert (found.byte_ids, found.special_ids, found.unknown_id) == (byte_ids, special_ids, unknown_id)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_the_pieces_of_a_document_are_its_text_and_its_tokens(tokenizer_and_decode, text):
    tokenizer, decode = tokenizer_and_decode
    tokens = np.array([*tokenizer.encode(text, add_special_tokens=False).ids, 0], np.uint16)
    pieces = token_pieces(tokens, decode)
    assert [token for piece in pieces for token in piece.ids] == tokens.tolist()
    assert "".join(piece.text for piece in pieces) == decode(tokens)


@pytest.fixture(scope="module")
def tokenizer_and_decode(tmp_path_factory):
    with open_corpus(write_corpus(tmp_path_factory.mktemp("pieces") / "corpus", [[1, 0]])) as corpus:
        return Tokenizer.from_file(str(TOKENIZER)), corpus.decode
