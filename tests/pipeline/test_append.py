"""Corpora that grow: what an append adds, keeps, refuses, and what one corpus of all generations is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.corpora import rewrite_manifest
from tests.examples import examples
from tests.pipeline.inputs import jsonl, write_byte_tokenizer
from tokshard import build_corpus, open_corpus
from tokshard.errors import DamagedCorpusError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus


class Shop:
    """Sources and corpora in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.tokenizer = write_byte_tokenizer(directory)

    def source(self, name: str, texts: Sequence[str]) -> str:
        path = self.directory / f"{name}.jsonl"
        path.write_bytes(jsonl([{"text": text, "n": number} for number, text in enumerate(texts)]))
        return str(path)

    def build(self, sources: str | Sequence[str], out: str = "corpus", **options: Any) -> Any:
        kept = {"tokenizer": self.tokenizer, "out": self.directory / out, "workers": 1, **options}
        return build_corpus(sources, **kept)

    def open(self, out: str = "corpus", **options: Any) -> Any:
        return open_corpus(self.directory / out, **options)


@pytest.fixture
def shop(tmp_path: Path) -> Shop:
    return Shop(tmp_path)


def texts_of(corpus: Any) -> list[str]:
    return [corpus.text(index) for index in range(len(corpus))]


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


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
    shop = Shop(tmp_path_factory.mktemp("shop"))
    options: dict[str, Any] = {"dedup": dedup, "validation_fraction": split}
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, part_texts=5, hash_fan_out=4, fence_rows=2, hash_rows=8)
        # each part has a text of its own, because a build has to write a document
        lists[0] += [f"text {number}" for number in range(20)]
        sources = [shop.source(f"s{index}", [f"first of {index}", *texts]) for index, texts in enumerate(lists)]
        shop.build(sources, "whole", **options)
        bounds = [0, *sorted(cut for cut in cuts if cut < len(sources)), len(sources)]
        for start, stop in pairwise(bounds):
            files = files_of(shop.directory / "grown")
            shop.build(sources[start:stop], "grown", append=start > 0, **options)
            assert files.items() <= files_of(shop.directory / "grown").items()
    parts = [""] if split is None else [names.TRAIN, names.VALIDATION]
    for part in parts:
        whole, grown = (shop.open(f"{out}/{part}") for out in ("whole", "grown"))
        assert texts_of(grown) == texts_of(whole)
        assert grown.fingerprint == whole.fingerprint
        assert grown.num_generations == len(bounds) - 1
        assert grown.manifest.records == whole.manifest.records
        assert grown.manifest.document_lengths == whole.manifest.document_lengths
        assert grown.manifest.num_tokens == whole.manifest.num_tokens
        assert [source.left_out for source in grown.sources()] == [source.left_out for source in whole.sources()]
        assert [*map(grown.provenance, range(len(grown)))] == [*map(whole.provenance, range(len(whole)))]
        pinned = [texts_of(shop.open(f"grown/{part}", generation=number)) for number in range(len(bounds) - 1)]
        for number, (before, after) in enumerate(pairwise(pinned), 1):
            assert after == before + texts_of(shop.open(f"grown/{part}/{names.generation_folder(number)}"))
        assert pinned[-1] == texts_of(grown)
        assert verify_corpus(shop.directory / "grown" / part).problems == ()
    assert not list((shop.directory / "grown" / names.VALIDATION).rglob(names.HASHES)), "those of train are of both"
    assert not shop.build(sources[bounds[-2] :], "grown", append=len(bounds) > 2, **options).is_new


# what belongs together


def test_a_generation_of_the_other_split_is_refused_even_where_its_manifest_says_that_it_follows(shop: Shop) -> None:
    texts = [f"text {number}" for number in range(80)]
    shop.build(shop.source("a", texts[:40]), validation_fraction=0.4)
    shop.build(shop.source("b", texts[40:]), append=True, validation_fraction=0.4)
    train, validation = (shop.directory / "corpus" / name for name in (names.TRAIN, names.VALIDATION))
    folder = names.generation_folder(1)
    shutil.rmtree(validation / folder)
    shutil.copytree(train / folder, validation / folder)
    previous = json.loads((validation / names.MANIFEST).read_bytes())["manifest_sha256"]
    rewrite_manifest(validation / folder, lambda fields: fields["generation"].update(previous=previous))
    with pytest.raises(DamagedCorpusError, match="another split than the generation before it"):
        open_corpus(validation)
