"""The summary of a corpus, which ``inspect`` and ``build`` print."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.cli.corpus_text import length_histogram, summary_json, summary_text
from tokshard.cli.tables import shorten
from tokshard.format.manifest import DocumentLengths
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus.documents import source_label
from tokshard.wording import bytes_text, one_line, printable


@pytest.fixture
def corpus(tmp_path):
    sources = [
        Source(documents=documents_of([3, 4]), left_out={"empty": 40, "malformed": 3}),
        Source(documents=documents_of([2]), path="sub/b\x1b[2J.jsonl", left_out={"empty": 1}),
    ]
    return open_corpus(
        write_corpus(
            tmp_path / "corpus", sources=sources, tokenizer=TINY_TOKENIZER, shard_tokens=7, rejects=b"{}\n" * 3
        )
    )


def test_the_summary_says_what_a_corpus_is(corpus):
    content, recipe = corpus.manifest.fingerprints.content, corpus.manifest.fingerprints.recipe
    disk = bytes_text(corpus.manifest.num_bytes)
    assert summary_text(corpus.manifest, corpus.sources(), width=100).splitlines() == [
        "documents   3, of 2 to 4 tokens, mean 3.0",
        "tokens      9 as uint16, 4.00 bytes of text each",
        f"on disk     {disk} in 2 shards",
        "tokenizer   tokenizer: 4 ids, tokenizers 1.0.0rc3, EOS '<eos>' = 0, no BOS",
        "sources     2 files, 2 kB: source-0.jsonl, source-1.jsonl",
        "settings    text from 'text', shards of at most 7 tokens, documents of at most 16,777,216 bytes",
        "records     47 read = 3 written + 44 left out (41 empty, 3 malformed)",
        "            source-0.jsonl: 43 of 45 left out (40 empty, 3 malformed)",
        r"            source-1.jsonl/sub/b\x1b[2J.jsonl: 1 of 2 left out (1 empty)",
        "rejects     rejects.jsonl lists every bad record and input that was left out (9 B)",
        f"content     {content}",
        f"recipe      {recipe}",
    ]


@given(width=st.integers(80, 200))
def test_the_summary_fits_the_terminal(tmp_path_factory, width):
    directory = tmp_path_factory.getbasetemp() / "wide"
    if not directory.exists():
        sources = [
            Source(documents=documents_of([2]), path=f"{'long' * 30}/{number}.jsonl", left_out={"empty": number + 1})
            for number in range(25)
        ]
        write_corpus(directory, sources=sources, tokenizer=TINY_TOKENIZER)
    corpus = open_corpus(directory)
    lines = summary_text(corpus.manifest, corpus.sources(), width=width).splitlines()
    assert max(map(len, lines)) <= width


def test_the_sources_that_lost_most_are_shown_most_first(tmp_path):
    lost = [3, 0, 9, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]
    sources = [Source(documents=documents_of([2]), left_out={"empty": number} if number else {}) for number in lost]
    corpus = open_corpus(write_corpus(tmp_path / "corpus", sources=sources, tokenizer=TINY_TOKENIZER))
    shown = [line for line in summary_text(corpus.manifest, corpus.sources()).splitlines() if " left out (" in line]
    assert [line.split(":")[0].strip() for line in shown[1:4]] == ["source-2.jsonl", "source-0.jsonl", "source-3.jsonl"]
    assert "and records of 2 more files" in summary_text(corpus.manifest, corpus.sources())


def test_a_summary_without_sources_leaves_them_out(corpus):
    text = summary_text(corpus.manifest)
    assert "sources     source-0.jsonl, source-1.jsonl\n" in text
    assert "source-0.jsonl: 43" not in text


def test_the_json_summary_holds_the_same_numbers(corpus):
    summary = json.loads(json.dumps(summary_json(corpus.manifest, corpus.sources())))
    assert (summary["documents"], summary["tokens"], summary["shards"]) == (3, 9, 2)
    assert summary["tokens_per_document"] == {"mean": 3.0, "shortest": 2, "longest": 4, "powers_of_two": [0, 2, 1]}
    assert summary["records"] == {"read": 47, "written": 3, "left_out": {"empty": 41, "malformed": 3}}
    assert summary["sources"]["most_left_out"][0] == {
        "source": "source-0.jsonl",
        "records_read": 45,
        "left_out": {"empty": 40, "malformed": 3},
    }
    assert summary["rejects"] == {"file": "rejects.jsonl", "bytes": 9}


def test_a_source_is_called_by_its_argument_and_the_path_below_it(corpus):
    labels = [source_label(corpus.manifest, source) for source in corpus.sources()]
    assert labels == ["source-0.jsonl", "source-1.jsonl/sub/b\x1b[2J.jsonl"]


LENGTHS = DocumentLengths(shortest=2, longest=20, counts=[0, 1, 0, 100, 50])


def test_the_histogram_has_a_line_for_every_power_of_two_in_use():
    assert length_histogram(LENGTHS, width=40, encoding="utf-8").splitlines() == [
        "tokens  documents",
        "   2-3          1    0.7%  ▏",
        "   4-7          0    0.0%",
        "  8-15        100   66.2%  " + "█" * 13,
        " 16-31         50   33.1%  " + "█" * 6 + "▌",
    ]


def test_the_histogram_is_ascii_if_the_encoding_lacks_blocks():
    for encoding in ("ascii", "latin-1", "no such encoding"):
        text = length_histogram(LENGTHS, width=40, encoding=encoding)
        assert text.isascii()
        assert text.splitlines()[3].endswith("#" * 13)


def test_the_summary_uses_the_singular_for_one(tmp_path):
    corpus = write_corpus(tmp_path / "one", documents_of([1]), tokenizer=TINY_TOKENIZER, shard_tokens=1)
    manifest = open_corpus(corpus).manifest
    records = msgspec.structs.replace(manifest.records, with_special_text=1)
    shown = " ".join(summary_text(msgspec.structs.replace(manifest, records=records)).split())
    assert "documents 1, of 1 token, mean 1.0 tokens 1 as" in shown
    assert "in 1 shard tokenizer" in shown
    assert "shards of at most 1 token," in shown
    assert "1 document spells a special token, which" in shown


@given(counts=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40).filter(any), width=st.integers(80, 400))
def test_the_histogram_fits_the_terminal_and_shows_every_count(counts, width):
    lengths = DocumentLengths(shortest=1, longest=1, counts=counts)
    for encoding in ("utf-8", "ascii"):
        lines = length_histogram(lengths, width=width, encoding=encoding).splitlines()[1:]
        assert max(map(len, lines)) <= min(width, 100)
        used = [index for index, count in enumerate(counts) if count]
        shown = counts[used[0] : used[-1] + 1]
        assert [bool(line[-1] in "#▏▎▍▌▋▊▉█") for line in lines] == [bool(count) for count in shown]


@given(text=st.text(st.characters(exclude_categories=[])))
def test_printable_text_is_free_of_terminal_control(text):
    shown = printable(text)
    shown.encode()  # no lone surrogate
    assert not any(ord(char) < 32 and char not in "\t\n" for char in shown)
    assert not any(0x7F <= ord(char) < 0xA0 for char in shown)
    assert len(one_line(text).splitlines()) <= 1


def test_escapes_show_what_was_there():
    assert printable("a\x1b[31m\r\n\tb\u202e\x9b\ud800") == "a\\x1b[31m\\r\n\tb\\u202e\\x9b\\ud800"
    assert one_line("a\n\tb") == "a\\n\\tb"


def test_a_long_path_keeps_its_start_and_its_end():
    assert shorten("corpus/very/long/path/file.jsonl", 20) == "corpus/ve...le.jsonl"
    assert shorten("short", 20) == "short"


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (20_100_000, "20.1 MB"), (3e15, "3 PB")],
)
def test_bytes_are_shown_in_three_digits(number, text):
    assert bytes_text(number) == text
