"""Conditions on kept columns, whose names may hold the signs of conditions."""

from __future__ import annotations

from tokshard.format.conditions import parse_conditions


def test_of_the_columns_that_a_condition_may_begin_with_the_one_with_the_longest_name_is_meant():
    ((name, sign, value),) = parse_conditions(["a<b<3"], {"a": "string", "a<b": "int64"})
    assert (name, sign, value.to_pylist()) == ("a<b", "<", [3])
