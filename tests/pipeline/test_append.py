"""Corpora that grow: what an append adds, keeps, refuses, and what one corpus of all generations is."""

from __future__ import annotations

import json
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.corpora import rewrite_manifest
from tests.examples import examples
from tests.pipeline.inputs import texts_of, write_byte_tokenizer
from tests.pipeline.places import SPLIT, build, files, write
from tokshard import open_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus

LISTS = st.lists(
    st.lists(st.sampled_from("abcdefghijklmnopqrstuvwxyz"), min_size=1, max_size=12), min_size=2, max_size=5
)


@settings(max_examples=examples(12))
@given(
    lists=LISTS,
    cuts=st.sets(st.integers(1, 4)),
    dedup=st.sampled_from(["none", "exact"]),
    split=st.sampled_from([None, 0.3]),
)
def test_appends_of_any_cut_of_the_sources_hold_what_one_build_of_all_holds(
    tmp_path_factory: pytest.TempPathFactory, lists: list[list[str]], cuts: set[int], dedup: str, split: float | None
) -> None:
    """Also where all new documents are of the other part of a split."""
    place = tmp_path_factory.mktemp("place")
    write_byte_tokenizer(place / "tok")
    options: dict[str, Any] = {"dedup": dedup, "validation_fraction": split}
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, part_texts=5, hash_fan_out=4, fence_rows=2, hash_rows=8)
        # each part has a text of its own, because a build has to write a document
        lists[0] += [f"text {number}" for number in range(20)]
        sources = [write(place / f"s{index}.jsonl", [f"first of {index}", *texts]) for index, texts in enumerate(lists)]
        build(place, *sources, out=place / "whole", **options)
        bounds = [0, *sorted(cut for cut in cuts if cut < len(sources)), len(sources)]
        for start, stop in pairwise(bounds):
            before = files(place / "grown")
            build(place, *sources[start:stop], out=place / "grown", append=start > 0, **options)
            assert before.items() <= files(place / "grown").items()
    parts = [""] if split is None else [names.TRAIN, names.VALIDATION]
    for part in parts:
        whole, grown = (open_corpus(place / out / part) for out in ("whole", "grown"))
        assert texts_of(grown) == texts_of(whole)
        assert grown.fingerprint == whole.fingerprint
        assert grown.num_generations == len(bounds) - 1
        assert grown.manifest.records == whole.manifest.records
        assert grown.manifest.document_lengths == whole.manifest.document_lengths
        assert grown.manifest.num_tokens == whole.manifest.num_tokens
        assert [source.left_out for source in grown.sources()] == [source.left_out for source in whole.sources()]
        assert [*map(grown.provenance, range(len(grown)))] == [*map(whole.provenance, range(len(whole)))]
        pinned = [texts_of(open_corpus(place / "grown" / part, generation=number)) for number in range(len(bounds) - 1)]
        for number, (earlier, later) in enumerate(pairwise(pinned), 1):
            assert later == earlier + texts_of(open_corpus(place / "grown" / part / names.generation_folder(number)))
        assert pinned[-1] == texts_of(grown)
        assert verify_corpus(place / "grown" / part).problems == ()
    assert not list((place / "grown" / names.VALIDATION).rglob(names.HASHES)), "those of train are of both"
    found = files(place / "grown")
    build(place, *sources[bounds[-2] :], out=place / "grown", append=len(bounds) > 2, **options)
    assert files(place / "grown") == found, "it is there already"


# what belongs together


def test_a_generation_of_the_other_split_is_refused_even_where_its_manifest_says_that_it_follows(place: Path) -> None:
    build(place, **SPLIT)
    build(place, write(place / "b.jsonl", [f"more {number}" for number in range(40)]), append=True, **SPLIT)
    train, validation = (place / "out" / name for name in (names.TRAIN, names.VALIDATION))
    folder = names.generation_folder(1)
    shutil.rmtree(validation / folder)
    shutil.copytree(train / folder, validation / folder)
    previous = json.loads((validation / names.MANIFEST).read_bytes())["manifest_sha256"]
    rewrite_manifest(validation / folder, lambda fields: fields["generation"].update(previous=previous))
    with pytest.raises(DamagedCorpusError, match="another split than the generation before it"):
        open_corpus(validation)
