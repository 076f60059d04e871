"""The documents of a corpus as a Python sequence, and their text."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.corpora import EOS, TINY_TOKENIZER, TOKENIZER, documents_of, write_corpus
from tokshard.errors import TokenizerError
from tokshard.format.opening import open_corpus

TEXTS = ["plain", " a space\nand a line", "", "<|endoftext|> is spelt here", "na\u00efve \U0001f4a1"]


@pytest.fixture
def tiny(tmp_path):
    return write_corpus(tmp_path / "corpus", documents_of([3, 1, 4, 2, 5]), shard_tokens=5, tokenizer=TINY_TOKENIZER)


def test_a_corpus_is_a_sequence_of_documents(tiny):
    with open_corpus(tiny) as corpus:
        expected = [tokens.tolist() for tokens in map(corpus.document, range(5))]
        assert [tokens.tolist() for tokens in corpus] == expected
        assert len(corpus) == len(expected)
        assert [corpus[index].tolist() for index in range(-5, 5)] == expected * 2
        assert corpus[np.int64(2)].tolist() == expected[2]
        assert [tokens.tolist() for tokens in reversed(corpus)] == expected[::-1]


def test_names_that_are_not_utf8_do_not_matter_to_a_reader(tiny):
    (tiny / os.fsdecode(b"shard-\xff.arrow")).touch()
    with open_corpus(tiny.rename(tiny.with_name(os.fsdecode(b"\xff")))) as corpus:
        assert len([*corpus]) == 5


def test_a_corpus_that_was_opened_by_a_relative_path_is_read_from_another_directory(tiny, monkeypatch):
    with open_corpus(tiny) as corpus:
        expected = [corpus.text(index) for index in range(5)]
    monkeypatch.chdir(tiny.parent)
    with open_corpus(tiny.name) as corpus:
        monkeypatch.chdir("/")
        assert [corpus.text(index) for index in range(5)] == expected
        assert corpus.provenance(4).source == 0


def maps_of(directory) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory / "shard-"))


def test_a_loop_over_all_documents_holds_one_shard_at_a_time(tmp_path):
    directory = write_corpus(tmp_path / "corpus", documents_of([3] * 20), shard_tokens=3, tokenizer=TINY_TOKENIZER)
    with open_corpus(directory) as corpus:
        assert len(corpus.shards) == 20
        assert max(maps_of(directory) for _ in corpus) <= 2
        assert maps_of(directory) <= 1


@pytest.mark.parametrize("bos_id", [None, 5])
def test_the_text_of_a_document_comes_without_the_delimiters_that_the_build_added(tmp_path, bos_id):
    encode = Tokenizer.from_file(str(TOKENIZER)).encode
    # as a build does: special tokens are never encoded from text
    parts = [(text[:2], text[2:]) if text == TEXTS[3] else (text,) for text in TEXTS]
    bodies = [[token for part in one for token in encode(part).ids] for one in parts]
    documents = [[*([bos_id] if bos_id else []), *body, EOS] for body in bodies]
    ids = json.loads(TOKENIZER.read_bytes())["model"]["vocab"]
    bos = next((token for token, index in ids.items() if index == bos_id), None)
    with open_corpus(write_corpus(tmp_path / "corpus", documents, bos=bos)) as corpus:
        assert [corpus.text(index) for index in range(len(TEXTS))] == TEXTS
        assert corpus.text(-1) == TEXTS[-1]


def test_a_panic_of_the_library_is_an_error_of_the_tokenizer(tiny, monkeypatch):
    class PanicException(BaseException):  # as Rust libraries raise
        pass

    class Failing:
        def decode(self, *_, **__):
            raise PanicException("index out of bounds")

    def fail(_):
        raise PanicException("bit 31")

    with open_corpus(tiny) as corpus:
        for load, problem in ((fail, "cannot load .*: bit 31"), (lambda _: Failing(), "cannot decode .*out of bounds")):
            monkeypatch.setattr("tokenizers.Tokenizer.from_file", load, raising=False)
            with pytest.raises(TokenizerError, match=problem):
                corpus.text(0)
