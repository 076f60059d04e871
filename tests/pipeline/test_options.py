"""Options of builds: limits of bad records, special tokens in text, and names and help of all."""

from __future__ import annotations

import inspect
import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokshard import build_corpus, copy_corpus, import_corpus, select_corpus
from tokshard.cli import main
from tokshard.pipeline.encode.maker import SpecialText
from tokshard.pipeline.judge import is_exceeded, loss_warning
from tokshard.pipeline.options import (
    FORMATS,
    OPTIONS,
    BuildOptions,
    OptionalBuildOptions,
    parse_bad_record_limit,
)
from tokshard.pipeline.sources.discover import COMPRESSIONS
from tokshard.pipeline.sources.formats import formats_of
from tokshard.pipeline.sources.inputs import RECORDS


def test_a_share_of_bad_records_is_judged_at_the_end_and_before_once_there_are_enough():
    limit = Fraction(1, 100)
    assert not is_exceeded(limit, 9_999, 9_999, is_end=False)
    assert is_exceeded(limit, 101, 10_000, is_end=False)
    assert not is_exceeded(limit, 100, 10_000, is_end=True)


def test_a_limit_is_a_number_or_a_share():
    assert parse_bad_record_limit("12") == 12
    assert parse_bad_record_limit("100%") == Fraction(1)
    assert parse_bad_record_limit("1.5k") == 1_500
    assert parse_bad_record_limit("0.5 %") == Fraction(1, 200)
    assert parse_bad_record_limit(None) is None


@pytest.mark.parametrize(
    ("bad", "records", "is_end", "warns"),
    [
        (500, 1_000, False, True),
        (499, 1_000, False, False),
        (999, 999, False, False),
        (1, 2, True, True),
        (0, 0, True, False),
    ],
)
def test_half_of_the_records_bad_is_worth_a_warning(bad, records, is_end, warns):
    assert (loss_warning(bad, records, is_end=is_end) is not None) == warns


@given(
    tokens=st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=4),
    texts=st.lists(st.text("ab<|\u00e9", max_size=300) | st.integers(0, 1_000).map("<".__mul__), max_size=4),
)
def test_special_text_is_found_wherever_it_is(tokens, texts):
    expected = [any(token in text for token in tokens) for text in texts]
    assert SpecialText(tokens).mask(texts).tolist() == expected


@pytest.mark.parametrize(
    ("function", "kind"),
    [(build_corpus, "text"), (import_corpus, "tokens"), (copy_corpus, "documents"), (select_corpus, "view")],
)
def test_a_public_function_has_the_names_defaults_and_help_of_its_options(function, kind):
    fields, defaults = inspect.signature(BuildOptions).parameters, BuildOptions(tokenizer="", out="")
    shown = dict(inspect.signature(function).parameters)
    wanted = {name for name, option in OPTIONS.items() if kind in option.reads}
    assert wanted == shown.keys() - {"sources", "corpora", "corpus", "observer"}
    required = {"tokenizer", "out"}
    assert all(shown[name].default == getattr(defaults, name) for name in wanted - required)
    assert "Option(" not in str(inspect.signature(function)), "help() shows types, not what is said of them"
    assert set(OptionalBuildOptions.__annotations__) == set(fields) - required
    for name in wanted - required:
        assert f"{name}: {OPTIONS[name].help[:9]}".partition("{")[0] in function.__doc__, name


def test_the_formats_that_options_name_are_those_that_have_a_reader():
    for kind, known in FORMATS.items():
        assert [form.name for form in formats_of(kind) if form.name not in {RECORDS, "arrow-stream"}] == [*known]
    assert {name for option in OPTIONS.values() for name in option.users} <= {*itertools.chain(*FORMATS.values())}


def test_help_names_every_format_and_compression_of_a_source(capsys):
    for command, named in (("build", [*FORMATS["text"], *COMPRESSIONS]), ("import", FORMATS["tokens"])):
        assert main.run([command, "--help"]) == 0
        sources = capsys.readouterr().out.partition("A SOURCE is")[2].partition("\n\n")[0].lower()
        assert [name for name in named if name not in sources] == []
