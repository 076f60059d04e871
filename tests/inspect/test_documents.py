"""Documents shown to a person."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.corpora import EOS, TINY_TOKENIZER, TOKENIZER, Source, write_corpus
from tokshard.cli.corpus_text import report_json, report_text
from tokshard.cli.document_text import view_json, view_text
from tokshard.errors import DamagedCorpusError, TokenizerError, UsageError
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.documents import spread, view_document
from tokshard.inspect.corpus.report import read_documents, read_report

TEXTS = [
    "def f(x):\n    return x\n",
    "Größe 数据 🙂 \x1b[2J",
    "word " * 2000,
    "".join(f"line {n}\n" for n in range(40)),
]


def encode(text):
    return [*Tokenizer.from_file(str(TOKENIZER)).encode(text, add_special_tokens=False).ids, EOS]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    source = Source(
        documents=[encode(text) for text in TEXTS],
        records=[0, 2, 3, 7],
        left_out={"empty": 4},
        metadata={"url": ["http://a", None, "evil\x1b[2J\n", "d"]},
    )
    return write_corpus(tmp_path_factory.mktemp("documents") / "corpus", sources=[source], columns={"url": "string"})


def view(directory, index, *, excerpt=None):
    with open_corpus(directory) as corpus:
        return view_document(corpus, corpus.sources(), corpus.decode, index, excerpt=excerpt)


def test_a_decoded_document_is_its_text_and_the_delimiter(directory):
    for index, text in enumerate(TEXTS):
        assert view(directory, index).text == text + "<|endoftext|>"


def test_a_document_comes_with_its_number_tokens_source_record_and_columns(directory):
    assert view_text(view(directory, 3)).startswith(
        f"document 3: {len(encode(TEXTS[3])):,} tokens, record 8 of source-0.jsonl\nurl: d\nline 0\nline 1\n"
    )


def test_control_characters_in_a_document_are_escaped(directory):
    assert view_text(view(directory, 1)).endswith("Größe 数据 🙂 \\x1b[2J<|endoftext|>")
    assert "url: evil\\x1b[2J\\n\n" in view_text(view(directory, 2))


def test_an_excerpt_has_the_first_lines_or_characters_and_the_delimiter(directory):
    assert view(directory, 0, excerpt=300).text == TEXTS[0] + "<|endoftext|>"
    assert not view(directory, 0, excerpt=300).is_excerpt
    long = view(directory, 2, excerpt=300)
    assert long.is_excerpt
    assert long.text == ("word " * 60).rstrip() + " ... <|endoftext|>"
    assert view(directory, 3, excerpt=300).text.splitlines()[-1] == "line 7 ... <|endoftext|>"


def test_a_document_is_valid_json_even_if_a_column_holds_nan(tmp_path):
    source = Source(documents=[encode("a"), encode("b")], metadata={"score": [float("nan"), 0.5]})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], columns={"score": "float64"})
    assert [view_json(view(corpus, index))["metadata"] for index in range(2)] == [{"score": "nan"}, {"score": 0.5}]


@given(count=st.integers(0, 50), length=st.integers(1, 10**9))
def test_samples_are_distinct_documents_the_same_distance_apart(count, length):
    found = spread(count, length)
    assert found == sorted(set(found))
    assert len(found) == min(count, length)
    assert all(0 <= index < length for index in found)
    gaps = {after - before for before, after in pairwise(found)}
    assert not gaps or max(gaps) - min(gaps) <= 1


def test_a_document_that_does_not_exist_is_refused_with_how_many_there_are(directory):
    with pytest.raises(UsageError, match=r"has no document '4': it has 4, counted from 0"):
        read_documents(directory, "4")


def test_where_ids_are_kept_the_hint_of_a_missing_number_says_numbers_as_they_have_to_be_given(tmp_path):
    source = Source(documents=[encode("a"), encode("b")], metadata={"id": ["x", "y"]})
    corpus = write_corpus(tmp_path / "corpus", sources=[source], columns={"id": "string"})
    with pytest.raises(UsageError, match=r"has no document '#2': it has 2, counted from 0") as caught:
        read_documents(corpus, "#2")
    assert caught.value.hint == "give --document '#0' to --document '#1'"


def test_a_changed_tokenizer_is_refused_before_it_is_loaded(directory, tmp_path):
    corpus = write_corpus(tmp_path / "corpus", [encode("text")])
    content = (corpus / "tokenizer.json").read_bytes()
    (corpus / "tokenizer.json").write_bytes(content.replace(b'"type"', b'"typo"', 1))
    with pytest.raises(DamagedCorpusError, match=r"tokenizer.json has SHA-256 .*, expected"):
        read_documents(corpus, "0")


def test_a_tokenizer_that_the_library_cannot_load_is_refused_with_both_versions(tmp_path):
    broken = b'{"added_tokens": [{"id": 0, "content": "<eos>"}], "model": {"type": "?", "vocab": {"a": 1}}}'
    corpus = write_corpus(tmp_path / "corpus", [[1, 0]], tokenizer=broken)
    with pytest.raises(TokenizerError, match=r"tokenizers .* cannot load .*tokenizer.json") as caught:
        read_documents(corpus, "0")
    assert caught.value.hint == "the corpus was built with tokenizers 1.0.0rc3; install that"


def test_a_report_needs_no_tokenizer_if_no_document_is_shown(tmp_path):
    corpus = write_corpus(tmp_path / "corpus", [[1, 0]])
    (corpus / "tokenizer.json").unlink()
    assert read_report(corpus, num_samples=0).documents == []


def test_a_report_holds_summary_histogram_and_samples(directory):
    report = read_report(directory, num_samples=3)
    text = report_text(report, width=80, encoding="utf-8")
    assert text.startswith(f"corpus      {directory}\ndocuments   4, of ")
    assert "tokens  documents\n" in text
    assert text.count("\ndocument ") == 3
    assert [sample["document"] for sample in report_json(report)["samples"]] == [0, 2, 3]
    assert report_json(report)["corpus"] == str(directory)


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
