"""The summary of a corpus, which ``inspect`` and ``build`` print."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard.cli.corpus_text import length_histogram, summary_text
from tokshard.format.manifest import DocumentLengths
from tokshard.format.opening import open_corpus
from tokshard.wording import bytes_text, one_line, printable, shorten


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


LENGTHS = DocumentLengths(shortest=2, longest=20, counts=[0, 1, 0, 100, 50])


def test_the_histogram_is_ascii_if_the_encoding_lacks_blocks():
    for encoding in ("ascii", "latin-1", "no such encoding"):
        text = length_histogram(LENGTHS, width=40, encoding=encoding)
        assert text.isascii()
        assert text.splitlines()[3].endswith("#" * 13)


@given(counts=st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40).filter(any), width=st.integers(80, 400))
@example(counts=[1, 0], width=80)
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
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_600, "1 MB"),
        (20_100_000, "20.1 MB"),
        (3e15, "3 PB"),
        (8e18, "8 EB"),
        (1e21, "1,000 EB"),
    ],
)
def test_bytes_are_shown_in_three_digits(number, text):
    assert bytes_text(number) == text
