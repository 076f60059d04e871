"""Counts, lengths and sizes in bytes are written in the same way in every option and in every file."""

from __future__ import annotations

from fnmatch import fnmatchcase

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokshard.cli.main import COMMANDS, cli
from tokshard.cli.plan_text import tokens_text
from tokshard.cli.sizes import BYTES, COUNT, LENGTH, POSITIVE_COUNT, Number
from tokshard.errors import UsageError
from tokshard.numbers import read_bytes, read_count, read_length
from tokshard.wording import as_typed, as_typed_bytes, bytes_text, count_text, counted

FROM_ZERO = {"--sample", "--dp-rank", "--source-eos", "--shuffle", "--global-batch-size"}
PLAIN = {"--ngram", "--seed"}
"""Options that take a number without a suffix."""


@pytest.mark.parametrize(
    ("read", "texts", "number"),
    [
        (read_count, ["4096", "4_096", " 4096 "], 4096),
        (read_count, ["0"], 0),
        (read_count, ["1.5e+3", "1.5k"], 1500),
        (read_count, ["256k", "256K"], 256_000),
        (read_count, ["1e6", "1M"], 10**6),
        (read_count, ["10 M"], 10**7),
        (read_count, ["1.5B", "1.5b", "1.5G"], 1_500_000_000),
        (read_count, ["2T"], 2 * 10**12),
        (read_length, ["65536", "65_536", "65.536e3"], 65_536),
        (read_bytes, ["4096", "4096B", "4KiB"], 4096),
        (read_bytes, ["64kB", "64KB"], 64_000),
        (read_bytes, ["10 MB"], 10_000_000),
        (read_bytes, ["16MiB"], 16 << 20),
        (read_bytes, ["1.5GiB"], 3 << 29),
        (read_bytes, ["2TB"], 2 * 10**12),
        (read_bytes, ["0.5KiB"], 512),
    ],
)
def test_a_number_may_have_grouped_digits_an_exponent_and_a_suffix_of_its_kind(read, texts, number):
    assert {read(text) for text in texts} == {number}


NONE = ["", "M", "-1", "0.3", "12Q", "1,000", "٣", "1e", "1e999", "1__0", "_1", "1e-3", "9" * 41, "1.5", "nan"]
SUFFIXES = "k, M, B (or G) and T stand for *"
WRONG = [
    *((read, text, "* is not a *", "?*") for read in (read_count, read_length, read_bytes) for text in NONE),
    *(
        (read_count, text, "* has a unit of bytes, expected a count such as *", f"*{SUFFIXES}")
        for text in ("256MB", "1GiB", "1kB", "16MiB", "2TB", "4Ki", "10 MB", "1Gi")
    ),
    *(
        (read_length, text, f"{text!r} may be {decimal} or {binary}", f"give {decimal} or {binary}")
        for text, decimal, binary in (
            ("4k", 4000, 4096),
            ("8K", 8000, 8192),
            ("1M", 10**6, 1 << 20),
            ("0.5k", 500, 512),
        )
    ),
    (read_length, "4Ki", "*", "?*"),
    *(
        (read_bytes, text, "* has no unit of bytes*", f"give {si}B (a power of 1000) or {si}iB (a power of 1024)")
        for text, si in (("256M",) * 2, ("1G",) * 2, ("64k",) * 2, ("2T",) * 2, ("64Ki", "64K"), ("1.5 M",) * 2)
    ),
]


@pytest.mark.parametrize(("read", "text", "problem", "hint"), WRONG)
def test_another_text_is_refused_with_what_may_be_meant(read, text, problem, hint):
    with pytest.raises(UsageError) as error:
        read(text)
    assert fnmatchcase(error.value.problem, problem)
    assert fnmatchcase(error.value.hint, hint)


@given(st.integers(0, 10**15))
@example(999_950_000)  # 1B, not 1000M
@example(999_950)
def test_a_count_that_is_printed_with_a_suffix_is_read_as_the_same_number_in_four_digits(number):
    text = tokens_text(number)
    read = read_count(text.replace(",", ""))
    assert abs(read - number) <= number / 2_000
    assert read == number or text[-1] in "MBT"
    assert tokens_text(read) == text


@given(st.integers(0, 10**17))
@example(10**15)
def test_a_rate_that_is_printed_with_a_suffix_is_read_as_the_same_number_in_three_digits(number):
    text = count_text(number)
    assert "e" not in text
    assert abs(read_count(text.replace(",", "")) - number) <= number / 199


@given(st.integers(0, 10**15))
def test_a_size_that_is_printed_is_read_as_the_same_size_in_three_digits(number):
    assert abs(read_bytes(bytes_text(number)) - number) <= number / 199


@given(st.integers(0, 1 << 62), st.sampled_from([10**6, 10**9, 10**12, 1 << 10, 1 << 20, 1 << 40, 1]))
def test_a_limit_is_shown_as_it_can_be_typed(number, unit):
    number -= number % unit
    assert (read_count(as_typed(number)), read_bytes(as_typed_bytes(number))) == (number, number)


@given(st.integers(0, 1 << 62), st.sampled_from([read_count, read_length, read_bytes]))
def test_a_number_without_a_suffix_is_read_digit_by_digit(number, read):
    assert read(str(number)) == read(f"{number:_}") == number


def kind_of(option: str) -> Number:
    """What an option with a number is read as."""
    if option.endswith("bytes"):
        return BYTES
    if option in {"--seq-len", "--hidden"}:
        return LENGTH
    return COUNT if option in FROM_ZERO else POSITIVE_COUNT


@pytest.mark.parametrize("command", COMMANDS)
def test_an_option_reads_its_number_in_the_same_way_in_every_command(command):
    found = cli.get_command(click.Context(cli), command)
    kinds = {param.opts[0]: param.type for param in found.params}
    numbers = {name: kind for name, kind in kinds.items() if isinstance(kind, Number)}
    assert numbers == {name: kind_of(name) for name in numbers}
    assert {name for name, kind in kinds.items() if isinstance(kind, click.types.IntParamType)} <= PLAIN


def test_one_thing_is_singular():
    assert [counted(number, "shard") for number in (0, 1, 1000)] == ["0 shards", "1 shard", "1,000 shards"]
    assert [counted(number, "corpus", "corpora") for number in (1, 2)] == ["1 corpus", "2 corpora"]
