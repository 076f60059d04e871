"""How many documents two corpora share, from the hashes of their texts, or from the tables of views."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.contract.small import shrink
from tests.corpora import write_corpus
from tokshard import build_corpus, copy_corpus, open_corpus, select_corpus
from tokshard.errors import PlanError, UsageError
from tokshard.format.shared import num_shared
from tokshard.runtime import StreamPlan

TOKENIZER = Path(__file__).parents[2] / "recipes/tokenizer"


def built(place: Path, numbers: range, *, dedup: str = "exact", **options: Any) -> Path:
    lines = [json.dumps({"text": f"text {number}", "id": str(number)}) for number in [*numbers, *numbers[:2]]]
    place.with_suffix(".jsonl").write_text("\n".join(lines))
    options = {"id_field": "id", "workers": 1, "dedup": dedup, **options}
    build_corpus(place.with_suffix(".jsonl"), tokenizer=TOKENIZER, out=place, **options)
    return place


def shared(one: Path, other: Path, *, is_exact: bool = True) -> int | None:
    with open_corpus(one) as first, open_corpus(other) as second:
        found = num_shared(first, second)
    assert found is None or found.is_exact == is_exact
    return None if found is None else found.num_documents


@pytest.mark.parametrize(
    ("first", "second", "count"), [(range(3_000), range(2_500, 4_000), 500), (range(5), range(5, 9), 0)]
)
def test_equal_texts_are_counted_once_by_the_hashes_of_builds(tmp_path, first, second, count):
    one, other = built(tmp_path / "one", first), built(tmp_path / "other", second)
    assert shared(one, other) == shared(other, one) == count
    assert shared(one, one) == len(first)


def test_a_text_that_an_appended_generation_left_out_as_a_duplicate_is_counted_once(tmp_path):
    grown, other = built(tmp_path / "grown", range(4)), built(tmp_path / "other", range(3, 7))
    built(grown, range(3, 6), append=True)
    assert shared(grown, other) == shared(other, grown) == 3


def test_of_texts_that_became_no_document_only_the_most_is_known(tmp_path):
    whole, few = built(tmp_path / "whole", range(90, 130)), built(tmp_path / "few", range(90, 110), min_tokens=4)
    built(tmp_path / "split", range(90, 130), validation_fraction=0.5)
    train = tmp_path / "split/train"
    with open_corpus(few) as some, open_corpus(train) as half:
        assert shared(whole, few, is_exact=False) == shared(few, whole, is_exact=False) == len(some) < 20
        assert shared(train, whole, is_exact=False) == len(half) < 40
    assert shared(train, built(tmp_path / "new", range(50))) == 0


@pytest.mark.parametrize("dedup", ["exact", "none"])
def test_the_parts_of_a_split_and_views_of_them_share_no_text(tmp_path, dedup):
    built(tmp_path / "split", range(40), dedup=dedup, validation_fraction=0.5)
    other = built(tmp_path / "other", range(40), dedup=dedup, validation_fraction=0.25)
    select_corpus(tmp_path / "split/validation", out=tmp_path / "view", where="id!=x", workers=1)
    train, validation = tmp_path / "split/train", tmp_path / "split/validation"
    assert shared(train, validation) == shared(tmp_path / "view", train) == 0
    assert shared(train, other / "validation") is None


@pytest.mark.parametrize("rows_at_once", [1, 1_000])
def test_of_views_the_tables_say_it_and_of_builds_without_hashes_nothing_does(rows_at_once, tmp_path, monkeypatch):
    shrink(monkeypatch.setattr, view_rows=rows_at_once)
    base = built(tmp_path / "base", range(40), dedup="none")
    low, high = (",".join(str(n) for n in range(40) if (n % 20 < 10) is is_low) for is_low in (True, False))
    for name, where in (("low", f"id in {low}"), ("some", "id!=1"), ("high", f"id in {high}")):
        select_corpus(base, out=tmp_path / name, where=where, workers=1)
    with open_corpus(tmp_path / "low") as lower, open_corpus(tmp_path / "high") as higher:
        assert shared(tmp_path / "low", tmp_path / "high") == 0
        assert shared(tmp_path / "high", base) == len(higher)
        assert shared(tmp_path / "some", tmp_path / "low") == len(lower) - 2  # "1" is there twice
    other = write_corpus(tmp_path / "other", [[1, 0]])
    assert shared(base, other) is None
    assert shared(tmp_path / "low", other) is None


def test_views_made_before_and_after_their_corpus_grew_are_compared_by_number(tmp_path):
    base = built(tmp_path / "base", range(10), dedup="none")
    select_corpus(base, out=tmp_path / "old", where="id>=5", workers=1)
    built(tmp_path / "more", range(10, 14), dedup="none")
    build_corpus(tmp_path / "more.jsonl", tokenizer=TOKENIZER, out=base, workers=1, id_field="id", append=True)
    for name, where in (("all", "id!=x"), ("some", "id in 6,11"), ("new", "id in 11,12")):
        select_corpus(base, out=tmp_path / name, where=where, workers=1)
    assert shared(tmp_path / "old", base) == shared(tmp_path / "all", tmp_path / "old") == 5
    assert shared(tmp_path / "old", tmp_path / "some") == 1
    assert shared(tmp_path / "new", tmp_path / "old") == 0
    for names in (("old", "all"), ("old", "base"), ("some", "old")):
        with pytest.raises(PlanError, match="share documents"):
            StreamPlan({name: tmp_path / name for name in names}, seq_len=4)
        if "base" not in names:
            with pytest.raises(UsageError, match="holds the same documents"):
                copy_corpus([tmp_path / name for name in names], out=tmp_path / "copy", workers=1)
    assert StreamPlan({"old": tmp_path / "old", "new": tmp_path / "new"}, seq_len=4).names
