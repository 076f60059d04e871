"""Conditions on kept columns, whose names may hold the signs of conditions."""

from __future__ import annotations

import pyarrow as pa
import pytest

from tokshard.errors import UsageError
from tokshard.format.conditions import are_met, parse_conditions


def test_of_the_columns_that_a_condition_may_begin_with_the_one_with_the_longest_name_is_meant():
    ((name, sign, value),) = parse_conditions(["a<b<3"], {"a": "string", "a<b": "int64"})
    assert (name, sign, value.to_pylist()) == ("a<b", "<", [3])


@pytest.mark.parametrize("condition", ["c=0", "c=-0", "c in 0,7", "c in -0"])
def test_zeros_of_either_sign_are_equal(condition):
    zeros, conditions = pa.array([0.0, -0.0, 1.0, None]), parse_conditions([condition], {"c": "float64"})
    assert are_met(conditions, {"c": zeros}, 4).tolist() == [True, True, False, False]


def of_texts(condition: str, texts: list[str | None]) -> list[str | None]:
    met = are_met(parse_conditions([condition], {"c": "string"}), {"c": pa.array(texts, pa.string())}, len(texts))
    return [text for text, is_met in zip(texts, met.tolist(), strict=True) if is_met]


@pytest.mark.parametrize(
    ("condition", "texts"),
    [
        ("c>=2024-01-01", ["2024-01-01", "2024-02-01 05:00", None, "2023-12-31T23:59"]),
        ("c>=2024/01", ["2024/01/01", "2024/02", "2023/12", "-"]),
        ("c>=20240101T10", ["20240101T11:00", "20240102", "20240101T09"]),
        ("c>=2024", ["2024", "2024-01-01", "2023"]),
        ("c<0.5", ["0.25", "0.125", "0.75", "n/a"]),
        ("c<0.5", ["-", "", "n/a"]),
        ("c>=b", ["b", "c10", "a9"]),
        ("c=10", ["10", "9", "1e1"]),
    ],
)
def test_texts_that_are_written_alike_have_the_order_of_their_numbers_and_dates(condition, texts):
    stop = {"c>=2024/01": 2, "c>=2024-01-01": 2, "c>=20240101T10": 2, "c>=2024": 2, "c<0.5": 2, "c>=b": 2, "c=10": 1}
    assert of_texts(condition, texts) == texts[: stop[condition]]


@pytest.mark.parametrize(
    ("condition", "texts"),
    [
        ("c>=2", ["3.5", "n/a"]),
        ("c<0.5", ["0.25", ""]),
        ("c>=2024-01-01", ["2024-01-05", "unknown"]),
        ("c<2024-01-01", ["2023-01-05", "-"]),
    ],
)
def test_a_text_that_is_neither_and_would_be_taken_is_refused_until_it_is_left_out(condition, texts):
    said = f"'c' holds (dates|numbers) as texts, and {condition} takes '{texts[1]}', too"
    with pytest.raises(UsageError, match=said):
        of_texts(condition, texts)
    column = {"c": pa.array(texts, pa.string())}
    for given in ([condition, f"c!={texts[1]}"], [f"c!={texts[1]}", condition]):
        assert are_met(parse_conditions(given, {"c": "string"}), column, 2).tolist() == [True, False]


@pytest.mark.parametrize(
    ("condition", "text"),
    [
        *(("c>=2024/01/01", text) for text in ("2024-02-01", "20240201", "2024/2/1", "01/02/2024")),
        *(("c<01.02.2024", text) for text in ("01.03.2023", "2024-02-01")),
        *(("c>2024-1-1", text) for text in ("2024-1-5", "2024-01-05")),
        *(("c>=2024-01-01T10:00", text) for text in ("2024-01-01 11:00", "2024-01-01  11")),
        *(("c>9", text) for text in ("10", "1e1")),
        *(("c<=0.5", text) for text in ("1e-05", "+1", ".75")),
    ],
)
def test_texts_that_would_be_compared_in_another_order_than_their_numbers_or_dates_are_refused(condition, text):
    with pytest.raises(UsageError, match=rf"'c' holds texts: '{text.replace('+', '.')}' and .* (dates|numbers)"):
        of_texts(condition, [text])
    assert of_texts(condition.replace("=", "").replace("<", "!=").replace(">", "!="), [text]) == [text]
