"""Conditions on kept columns, whose names may hold the signs of conditions."""

from __future__ import annotations

import pytest

from tokshard.errors import UsageError
from tokshard.format.conditions import parse_conditions


def test_of_the_columns_that_a_condition_may_begin_with_the_one_with_the_longest_name_is_meant():
    ((name, sign, value),) = parse_conditions(["a<b<3"], {"a": "string", "a<b": "int64"})
    assert (name, sign, value.to_pylist()) == ("a<b", "<", [3])


def test_a_text_that_is_not_utf_8_is_no_value_of_a_column():
    with pytest.raises(UsageError, match=r"'a\\udcef' is not a value of column lang, which is string"):
        parse_conditions(["lang in fr,a\udcef"], {"lang": "string"})


def test_without_columns_the_hint_says_how_to_get_one():
    with pytest.raises(UsageError, match="no kept column 'lang'") as refused:
        parse_conditions(["lang=en"], {})
    assert refused.value.hint == "a build keeps columns with --keep-field, and tokshard select takes others with --join"
