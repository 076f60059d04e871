"""Counts, lengths and sizes in bytes are written in the same way in every option and in every file."""

from __future__ import annotations

import re

import click
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tokshard.cli.main import COMMANDS, cli, run
from tokshard.cli.plan_text import tokens_text
from tokshard.cli.sizes import BYTES, COUNT, LENGTH, POSITIVE_COUNT, Number
from tokshard.errors import UsageError
from tokshard.numbers import read_bytes, read_count, read_length
from tokshard.wording import bytes_text, count_text, counted

OPTIONS = {
    "build": {
        "--shard-tokens": COUNT,
        "--min-tokens": COUNT,
        "--max-tokens": COUNT,
        "--max-documents": COUNT,
        "--task-bytes": BYTES,
        "--max-document-bytes": BYTES,
    },
    "import": {
        "--shard-tokens": COUNT,
        "--min-tokens": COUNT,
        "--max-tokens": COUNT,
        "--max-documents": COUNT,
        "--task-bytes": BYTES,
        "--max-document-bytes": BYTES,
    },
    "export": {"--file-bytes": BYTES, "--pack-tokens": POSITIVE_COUNT},
    "copy": {
        "--shard-tokens": POSITIVE_COUNT,
        "--min-tokens": COUNT,
        "--max-tokens": POSITIVE_COUNT,
        "--max-documents": COUNT,
        "--shuffle": COUNT,
    },
    "inspect": {"--sample": COUNT, "--limit": POSITIVE_COUNT},
    "report": {"--sample": COUNT, "--tokens": POSITIVE_COUNT},
    "plan": {
        "--tokens": POSITIVE_COUNT,
        "--simulate": POSITIVE_COUNT,
        "--nodes": POSITIVE_COUNT,
        "--seq-len": LENGTH,
        "--global-batch-size": COUNT,
    },
    "trace": {"--text": POSITIVE_COUNT, "--seq-len": LENGTH, "--global-batch-size": COUNT},
    "bench": {"--gpu-tokens": POSITIVE_COUNT, "--seq-len": LENGTH, "--global-batch-size": COUNT},
}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("0", 0),
        ("1_000", 1000),
        (" 7 ", 7),
        ("1e6", 10**6),
        ("1.5e+3", 1500),
        ("256k", 256_000),
        ("256K", 256_000),
        ("256M", 256_000_000),
        ("1B", 10**9),
        ("1.5B", 1_500_000_000),
        ("3b", 3 * 10**9),
        ("3G", 3 * 10**9),
        ("2T", 2 * 10**12),
        ("10 M", 10**7),
    ],
)
def test_a_count_may_have_a_decimal_suffix_an_exponent_and_grouped_digits(text, number):
    assert read_count(text) == number


@pytest.mark.parametrize("text", ["256MB", "1GiB", "1kB", "16MiB", "2TB", "4Ki", "10 MB", "1Gi"])
def test_a_count_with_a_unit_of_bytes_is_refused_with_a_hint(text):
    with pytest.raises(UsageError, match="has a unit of bytes, expected a count such as") as error:
        read_count(text)
    assert "k, M, B (or G) and T stand for" in error.value.hint


WRONG = [
    "",
    "M",
    "-1",
    "0.3",
    "12Q",
    "1,000",
    "٣",
    "1e",
    "1e999",
    "1__0",
    "_1",
    "1e-3",
    "9" * 41,
    "1.5",
    "nan",
]


@pytest.mark.parametrize("read", [read_count, read_length, read_bytes])
@pytest.mark.parametrize("text", WRONG)
def test_a_text_that_is_not_a_whole_number_is_refused_with_a_hint(read, text):
    with pytest.raises(UsageError, match="is not a ") as error:
        read(text)
    assert error.value.hint


@pytest.mark.parametrize(
    ("text", "decimal", "binary"),
    [("4k", 4000, 4096), ("8K", 8000, 8192), ("1M", 10**6, 1 << 20), ("0.5k", 500, 512), ("4Ki", None, None)],
)
def test_a_length_with_a_suffix_is_asked_for_in_full(text, decimal, binary):
    with pytest.raises(UsageError) as error:
        read_length(text)
    if decimal:
        assert error.value.problem == f"{text!r} may be {decimal} or {binary}"
        assert error.value.hint == f"give {decimal} or {binary}"


def test_a_length_may_have_grouped_digits_and_an_exponent():
    assert [read_length(text) for text in ("4096", "65_536", "1e3")] == [4096, 65_536, 1000]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("64kB", 64_000),
        ("64KB", 64_000),
        ("256MB", 256_000_000),
        ("16MiB", 16 << 20),
        ("1.5GiB", 3 << 29),
        ("2TB", 2 * 10**12),
        ("0.5KiB", 512),
        ("10 MB", 10_000_000),
    ],
)
def test_a_size_in_bytes_has_a_unit_of_bytes_or_none(text, number):
    assert read_bytes(text) == number


@pytest.mark.parametrize("text", ["256M", "1G", "64k", "2T", "64Ki", "1.5 M"])
def test_a_size_in_bytes_without_its_b_is_refused_with_both_readings(text):
    with pytest.raises(UsageError, match="has no unit of bytes") as error:
        read_bytes(text)
    prefix = text.rstrip("i")
    assert error.value.hint == f"give {prefix}B (a power of 1000) or {prefix}iB (a power of 1024)"


@given(st.integers(0, 10**15))
@example(999_950_000)  # 1B, not 1000M
@example(999_950)
def test_a_count_that_is_printed_with_a_suffix_is_read_as_the_same_number_in_four_digits(number):
    text = tokens_text(number)
    read = read_count(text.replace(",", ""))
    assert abs(read - number) <= number / 2_000
    assert read == number or text[-1] in "MBT"
    assert tokens_text(read) == text


@given(st.integers(0, 10**14))
def test_a_rate_that_is_printed_with_a_suffix_is_read_as_the_same_number_in_three_digits(number):
    assert abs(read_count(count_text(number)) - number) <= number / 199


@given(st.integers(0, 10**15))
def test_a_size_that_is_printed_is_read_as_the_same_size_in_three_digits(number):
    assert abs(read_bytes(bytes_text(number)) - number) <= number / 199


@given(st.integers(0, 1 << 62), st.sampled_from([read_count, read_length, read_bytes]))
def test_a_number_without_a_suffix_is_read_digit_by_digit(number, read):
    assert read(str(number)) == read(f"{number:_}") == number


@pytest.mark.parametrize(("command", "option"), [(name, option) for name in OPTIONS for option in OPTIONS[name]])
def test_every_option_reads_its_number_in_the_same_way(command, option):
    (param,) = (param for param in _params(command) if option in param.opts)
    assert param.type is OPTIONS[command][option]


def test_options_share_the_same_number_types():
    for command in COMMANDS:
        numbers = {param.opts[0] for param in _params(command) if isinstance(param.type, Number)}
        assert numbers == set(OPTIONS.get(command, {}))
        plain = {param.opts[0] for param in _params(command) if isinstance(param.type, click.types.IntParamType)}
        assert plain <= {
            "--workers",
            "--ngram",
            "--seed",
            "--dp-rank",
            "--dp-world-size",
            "--num-jobs",
            "--source-eos",
        }


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (
            ["build", "a", "--max-documents", "256MB"],
            "'--max-documents': '256MB' has a unit of bytes",
            "k, M, B (or G) and T",
        ),
        (["build", "a", "--task-bytes", "1G"], "'--task-bytes': '1G' has no unit of bytes", "give 1GB (a power of"),
        (["plan", "a", "--seq-len", "4k"], "'--seq-len': '4k' may be 4000 or 4096", "give 4000 or 4096"),
        (["plan", "a", "--tokens", "1e20"], "'--tokens': '1e20' is 2^63 or more", "plan --help"),
        (["plan", "a", "--tokens", str(2**63)], f"'--tokens': '{2**63}' is 2^63 or more", "plan --help"),
        (["plan", "a", "--max-epochs-warn", "nan"], "'--max-epochs-warn': 'nan' is not a number", "plan --help"),
        (["bench", "a", "--seconds", "nan"], "'--seconds': 'nan' is not a number", "bench --help"),
        (["bench", "a", "--gpu-tokens", "0"], "'--gpu-tokens': must be at least 1", "bench --help"),
        (["trace", "a", "--step", "1MB"], "'1MB' is not a number such as 1000", "k, M, B (or G) and T"),
    ],
)
def test_a_number_that_is_refused_names_the_option_and_what_to_write(capsys, arguments, error, hint):
    assert run(arguments) == 2
    problem_line, hint_line = capsys.readouterr().err.splitlines()
    assert error in problem_line
    assert hint in hint_line


def test_one_thing_is_singular():
    assert [counted(number, "shard") for number in (0, 1, 2, 1000)] == [
        "0 shards",
        "1 shard",
        "2 shards",
        "1,000 shards",
    ]
    assert [counted(number, "corpus", "corpora") for number in (1, 2)] == ["1 corpus", "2 corpora"]


def _params(command):
    found = cli.get_command(click.Context(cli), command)
    assert found is not None
    return [param for param in found.params if re.match("--", param.opts[0])]
