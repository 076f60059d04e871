"""Documents shown to a person."""

import contextlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.transcripts import shell
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.errors import TokenizerError, UsageError
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.documents import document_numbers, spread, view_document
from tokshard.inspect.corpus.report import read_documents


@given(count=st.integers(0, 50), length=st.integers(1, 10**9))
def test_samples_are_distinct_documents_the_same_distance_apart(count, length):
    found = spread(count, length)
    assert found == sorted(set(found))
    assert len(found) == min(count, length)
    assert all(0 <= index < length for index in found)
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_tokenizer_that_the_library_cannot_load_is_refused_with_both_versions(tmp_path):
    broken = b'{"added_tokens": [{"id": 0, "content": "<eos>"}], "model": {"type": "?", "vocab": {"a": 1}}}'
    corpus = write_corpus(tmp_path / "corpus", [[1, 0]], tokenizer=broken)
    with pytest.raises(TokenizerError, match=r"tokenizers .* cannot load .*tokenizer.json") as caught:
        read_documents(corpus, "0")
    assert caught.value.hint == "the corpus was built with tokenizers 1.0.0rc3; install that"


def test_an_excerpt_with_boundaries_is_as_short_as_one_without(tmp_path):
    with open_corpus(write_corpus(tmp_path / "corpus", [[*[3] * 400, 0]], tokenizer=TINY_TOKENIZER)) as corpus:
        found = view_document(corpus, corpus.sources(), corpus.decode, 0, excerpt=300, with_boundaries=True)
    assert found.is_excerpt
    assert 290 < sum(len(piece.text) for piece in found.pieces) <= 300


def test_a_long_document_of_little_text_is_an_excerpt(tmp_path):
    """Its first 512 tokens are all that is decoded of the start, however short their text is."""
    without_ones = b'{"type": "Replace", "pattern": {"String": "one"}, "content": ""}'
    decoder = b'{"type": "Sequence", "decoders": [' + without_ones + b', {"type": "Fuse"}]}'
    tokenizer = TINY_TOKENIZER.replace(b'"decoder": null', b'"decoder": ' + decoder)
    with open_corpus(write_corpus(tmp_path / "corpus", [[2, *[1] * 600, 3, 0]], tokenizer=tokenizer)) as corpus:
        found = view_document(corpus, corpus.sources(), corpus.decode, 0, excerpt=300)
    assert (found.is_excerpt, found.text) == (True, "two ... <eos>")


def test_a_long_value_of_a_column_is_shown_whole_only_with_its_document(tmp_path):
    source = Source(documents=documents_of([9]), metadata={"id": ["x" * 10**5]})
    place = write_corpus(tmp_path / "corpus", sources=[source], columns={"id": "string"}, tokenizer=TINY_TOKENIZER)
    commands = [("inspect", place), ("inspect", place, "--grep", "one"), ("inspect", place, "--document", 0)]
    (tmp_path / "mix.toml").write_text(f'corpora = {{ a = "{place}" }}\nseq_len = 4\nglobal_batch_size = 1\n')
    commands.append(("trace", tmp_path / "mix.toml", "--document", "a:0"))
    assert [len(shell(*command)[1]) > 10**5 for command in commands] == [False, False, True, False]


@pytest.mark.parametrize(("number", "error"), [(16, ""), (17, "17 documents of it have id 'a'")])
def test_as_many_documents_as_can_be_shown_may_have_an_id(tmp_path, number, error):
    source = Source(documents=documents_of([3] * number), metadata={"id": ["a"] * number})
    place = write_corpus(tmp_path / "corpus", sources=[source], columns={"id": "string"})
    with pytest.raises(UsageError) if error else contextlib.nullcontext() as caught, open_corpus(place) as corpus:
        assert document_numbers(corpus, "a", corpus_name="it", prefix="") == [*range(number)]
    assert not error or caught.value.problem == error
