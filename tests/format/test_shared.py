"""How many documents two corpora share, from the hashes of their texts, or from the tables of views."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.contract.small import shrink
from tests.corpora import write_corpus
from tokshard import build_corpus, open_corpus, select_corpus
from tokshard.format.shared import num_shared

TOKENIZER = Path(__file__).parents[2] / "recipes/tokenizer"


def built(place: Path, numbers: range, *, dedup: str = "exact") -> Path:
    lines = [json.dumps({"text": f"text {number}", "id": str(number)}) for number in [*numbers, *numbers[:2]]]
    place.with_suffix(".jsonl").write_text("\n".join(lines))
    build_corpus(place.with_suffix(".jsonl"), tokenizer=TOKENIZER, out=place, workers=1, dedup=dedup, id_field="id")
    return place


def shared(one: Path, other: Path) -> int | None:
    with open_corpus(one) as first, open_corpus(other) as second:
        return num_shared(first, second)


@pytest.mark.parametrize(
    ("first", "second", "count"), [(range(3_000), range(2_500, 4_000), 500), (range(5), range(5, 9), 0)]
)
def test_equal_texts_are_counted_once_by_the_hashes_of_builds(tmp_path, first, second, count):
    one, other = built(tmp_path / "one", first), built(tmp_path / "other", second)
    assert shared(one, other) == shared(other, one) == count
    assert shared(one, one) == len(first)


@pytest.mark.parametrize("rows_at_once", [1, 1_000])
def test_of_views_the_tables_say_it_and_of_builds_without_hashes_nothing_does(rows_at_once, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr, view_rows=rows_at_once)
    base = built(tmp_path / "base", range(40), dedup="none")
    for name, where in (("low", "id<2"), ("some", "id!=1"), ("high", "id>=2")):
        select_corpus(base, out=tmp_path / name, where=where, workers=1)
    with open_corpus(tmp_path / "low") as low, open_corpus(tmp_path / "high") as high:
        assert shared(tmp_path / "low", tmp_path / "high") == 0
        assert shared(tmp_path / "high", base) == len(high)
        assert shared(tmp_path / "some", tmp_path / "low") == len(low) - 2  # "1" is there twice
    other = write_corpus(tmp_path / "other", [[1, 0]])
    assert shared(base, other) is None
    assert shared(tmp_path / "low", other) is None
