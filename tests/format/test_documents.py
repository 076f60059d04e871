"""The documents of a corpus as a Python sequence, and their text."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.corpora import TINY_TOKENIZER, TOKENIZER, documents_of, sign_files, write_corpus
from tokshard.errors import DamagedCorpusError, TokenizerError
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
        for index in (5, -6):
            with pytest.raises(IndexError, match=f"document {index} of a corpus of 5 documents"):
                corpus[index]
        for index in ("1", 1.0, slice(0, 2)):
            with pytest.raises(TypeError):
                corpus[index]


def maps_of(directory) -> int:
    return Path("/proc/self/maps").read_text().count(str(directory / "shard-"))


def test_a_loop_over_all_documents_holds_one_shard_at_a_time(tmp_path):
    directory = write_corpus(tmp_path / "corpus", documents_of([3] * 20), shard_tokens=3, tokenizer=TINY_TOKENIZER)
    with open_corpus(directory) as corpus:
        assert len(corpus.shards) == 20
        assert max(maps_of(directory) for _ in corpus) <= 2
        assert maps_of(directory) <= 1


@pytest.mark.parametrize("place", ["vocab", "added_tokens"])
def test_a_tokenizer_with_an_id_beyond_the_vocabulary_is_damaged_before_the_library_takes_memory_for_it(tiny, place):
    path = Path(tiny) / "tokenizer.json"
    parsed = json.loads(path.read_bytes())
    if place == "vocab":
        parsed["model"]["vocab"]["far"] = 2**31
    else:
        parsed["added_tokens"].append({**parsed["added_tokens"][0], "content": "far", "id": 2**31})
    path.write_text(json.dumps(parsed))
    sign_files(tiny)
    with open_corpus(tiny) as corpus, pytest.raises(DamagedCorpusError, match="has a token with id 2,147,483,648"):
        corpus.text(0)


@pytest.fixture(scope="module", params=[None, "bos"])
def readable(request, tmp_path_factory):
    """Documents of the quickstart's tokenizer, with and without a BOS."""
    parsed = json.loads(TOKENIZER.read_bytes())
    eos, bos, added = parsed["added_tokens"][0]["content"], None, {}
    if request.param:
        bos = "<|begin|>"
        added = {**parsed["added_tokens"][0], "content": bos, "id": max(parsed["model"]["vocab"].values()) + 2}
        parsed["added_tokens"].append(added)
    content = json.dumps(parsed).encode()
    directory = tmp_path_factory.mktemp("readable")
    (directory / "tokenizer.json").write_bytes(content)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    eos_id, first = parsed["added_tokens"][0]["id"], [added["id"]] if bos else []
    # as a build does: special tokens are never encoded from text
    spelt = TEXTS[3][:2], TEXTS[3][2:]
    bodies = [
        [token for part in (spelt if text == TEXTS[3] else (text,)) for token in tokenizer.encode(part).ids]
        for text in TEXTS
    ]
    documents = [[*first, *body, eos_id] for body in bodies]
    return write_corpus(directory / "corpus", documents, tokenizer=content, eos=eos, bos=bos)


def test_the_text_of_a_document_comes_without_the_delimiters_that_the_build_added(readable):
    with open_corpus(readable) as corpus:
        assert [corpus.text(index) for index in range(len(TEXTS))] == TEXTS
        assert corpus.text(-1) == TEXTS[-1]
        with pytest.raises(IndexError, match="document 5 of a corpus of 5 documents"):
            corpus.text(5)


def test_text_is_never_decoded_with_another_tokenizer(tmp_path):
    directory = write_corpus(tmp_path / "corpus", documents_of([3]), tokenizer=TINY_TOKENIZER)
    path = directory / "tokenizer.json"
    path.write_bytes(path.read_bytes().replace(b'"three"', b'"trois"'))
    with open_corpus(directory) as corpus, pytest.raises(DamagedCorpusError, match=r"tokenizer.json has SHA-256"):
        corpus.text(0)


def test_a_tokenizer_that_the_library_cannot_load_is_an_error_with_its_path(tiny):
    path = Path(tiny) / "tokenizer.json"
    path.write_bytes(TINY_TOKENIZER.replace(b'"type": "WordLevel"', b'"type": "Unheard"'))
    sign_files(tiny)
    with open_corpus(tiny) as corpus, pytest.raises(TokenizerError, match=re.escape(f"cannot load {path}")):
        corpus.text(0)


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


def test_reading_tokens_does_not_import_tokenizers(tiny):
    script = (
        "import sys; from tokshard import open_corpus; corpus = open_corpus(sys.argv[1]); "
        "list(corpus); print('tokenizers' in sys.modules); corpus.text(0); print('tokenizers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tiny)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "True"]
