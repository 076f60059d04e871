"""Duplicates of a build: whichever tasks texts are in, they are found as by a set."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.examples import examples
from tests.pipeline.inputs import patch_chunk_bytes, texts_of, write_byte_tokenizer
from tests.pipeline.places import build, write
from tokshard import open_corpus
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline.tasks import duplicates, exchange
from tokshard.pipeline.workspace.places import HASH
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import open_store


def deduplicated(
    place: Path, sources: Sequence[Path], out: str = "out", **sizes: int
) -> tuple[list[str], list[int], bytes]:
    """The texts of a build in many tasks, how many of each source were duplicates, and the hashes that it keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, 64)
        small.shrink(patch.setattr, **{**small.MERGES, **sizes})
        directory = build(place, *sources, out=place / out, dedup="exact", task_bytes=64)
    assert verify_corpus(directory).problems == ()
    assert not (directory / names.WORK).exists()
    with open_corpus(directory) as corpus:
        left_out = [source.left_out.get("duplicate", 0) for source in corpus.sources()]
        return texts_of(corpus), left_out, (directory / names.HASHES).read_bytes()


@settings(max_examples=examples(40))
@given(
    files=st.lists(st.lists(st.sampled_from([*"aaaabcdefgh", "A", "a ", ""]), max_size=12), min_size=1, max_size=4),
    times=st.sampled_from([1, 4]),
    sizes=st.fixed_dictionaries({"hash_rows": st.sampled_from([4, 6, 32]), "fan_in": st.integers(2, 3)}),
)
def test_any_texts_in_any_tasks_are_deduplicated_as_by_a_set(files, times, sizes, tmp_path_factory):
    place = tmp_path_factory.mktemp("texts")
    write_byte_tokenizer(place / "tok")
    files = [["z"], *(texts * times for texts in files)]
    found, left_out, hashes = deduplicated(
        place, [write(place / f"{number}.jsonl", texts) for number, texts in enumerate(files)], **sizes
    )
    given = [[text for text in texts if text] for texts in files]
    first: list[str] = []
    expected = []
    for texts in given:
        before = len(first)
        first = list(dict.fromkeys([*first, *texts]))
        expected.append(len(texts) - (len(first) - before))
    assert (found, left_out) == (first, expected)
    assert deduplicated(place, [write(place / "set.jsonl", first)], "once")[2] == hashes


def test_two_hashes_that_share_their_high_half_are_no_duplicates():
    high, low = np.array([7, 7, 3, 7, 7], np.uint64), np.array([1, 2, 1, 1, 2], np.uint64)
    order, is_repeat = duplicates.sorted_repeats(high, low)
    assert sorted(order[is_repeat].tolist()) == [3, 4]


def test_a_task_deals_a_text_once_for_each_part_however_often_it_occurs(tmp_path, monkeypatch):
    """Otherwise the bucket of a text that most documents have would not fit into memory."""
    small.shrink(monkeypatch.setattr, part_texts=50)
    store = open_store(tmp_path)
    hashes = np.where(np.arange(400) % 4, 7, np.arange(400)).astype(np.uint64)
    with contextlib.ExitStack() as stack:
        writer = duplicates.HashSink(store, (0, 0), stack)
        for start in range(0, 400, 80):
            writer.add(np.stack([hashes[start : start + 80]] * 2, axis=1))
        receipt = writer.finish(Receipt(key=(0, 0)))
    dealt = exchange.Dealt.by(store, duplicates.hash_levels(), HASH, [receipt])
    assert 100 < sum(dealt.sizes()) <= 100 + 400 // 50
