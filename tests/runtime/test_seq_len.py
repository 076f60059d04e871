"""Another length of samples in the middle of a run: nothing is read twice, and what is left out is said."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import ListSource
from tests.runtime.states import edited, values_of
from tokshard.errors import PlanMismatchError
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

pytestmark = pytest.mark.filterwarnings("ignore:the change of seq_len")

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=40)
sizes = st.sampled_from([1, 2, 3, 4, 6, 8, 16])
shapes = st.fixed_dictionaries({"block_tokens": st.sampled_from([8, 16, 48]), "window_blocks": st.integers(1, 4)})


def plan_of(parts: Sequence[Sequence[int]], seq_len: int, **options: Any) -> StreamPlan:
    corpora = {str(number): ListSource(part, name=str(number)) for number, part in enumerate(parts)}
    return StreamPlan(corpora, seq_len=seq_len, allow_small_blocks=True, **options)


def resized(plan: StreamPlan, state: dict[str, Any], size: int, **choices: Any) -> NumpyLoader:
    loader = NumpyLoader(plan, global_batch_size=size)
    loader.load_state_dict(state, seq_len="plan", **choices)
    return loader


def tokens_of(loader: NumpyLoader, samples: range) -> Counter[tuple[str, int, int]]:
    """How often samples have each token, as (corpus, document, token of it)."""
    found: Counter[tuple[str, int, int]] = Counter()
    for pieces in loader.plan.traces(np.arange(samples.start, samples.stop), loader.cursor):
        for piece in pieces:
            found.update((piece.corpus, piece.document, token) for token in range(piece.start, piece.stop))
    return found


def take(loader: NumpyLoader, steps: int) -> list[dict[str, Any]]:
    return [batch for _, batch in zip(range(steps), loader, strict=False)]


@pytest.mark.filterwarnings("ignore:the pass of")
@given(part=lengths, shape=shapes, seq_lens=st.lists(sizes, min_size=2, max_size=4), data=st.data())
def test_a_pass_that_changes_its_seq_len_reads_every_token_as_often_as_it_has_epochs_but_for_what_it_says(
    part: list[int], shape: dict[str, int], seq_lens: list[int], data: st.DataObject
) -> None:
    first, *later = seq_lens
    loader = NumpyLoader(plan_of([part], first, epochs=2, **shape), global_batch_size=1)
    for seq_len in later:
        left = (loader.plan.at(loader.cursor).num_samples or 0) - loader.cursor.sample
        take(loader, data.draw(st.integers(0, max(0, left - 1))))
        loader = resized(plan_of([part], seq_len, epochs=2, **shape), loader.state_dict(), 1)
    num_samples = loader.plan.at(loader.cursor).num_samples
    assert num_samples is not None
    start = loader.cursor.sample
    assert len(take(loader, num_samples + 1)) == num_samples - start
    assert loader.cursor.sample == num_samples
    counts = tokens_of(loader, range(num_samples))
    (stats,) = loader.stats()["corpora"].values()
    assert set(counts.values()) <= {1, 2}
    # a slice that is left out may reach beyond the end of the pass
    assert 0 <= counts.total() + stats["left_out"] - 2 * sum(part) < max(seq_lens)
    if all(length % before == 0 for before, length in pairwise(seq_lens)):
        assert set(counts.values()) == {2}
        assert stats["left_out"] == 0
    window = shape["window_blocks"] * shape["block_tokens"] + max(seq_lens) + shape["block_tokens"]
    assert stats["left_out"] < window * len(later)


@given(
    parts=st.lists(lengths, min_size=1, max_size=3),
    shape=shapes,
    streams=st.integers(1, 4),
    pair=st.tuples(sizes, sizes),
    steps=st.tuples(st.integers(0, 12), st.integers(1, 12)),
    takes=st.sampled_from([1.0, 0.6]),
)
def test_batches_after_the_change_are_the_samples_of_the_plan_and_survive_a_save(
    parts: list[list[int]],
    shape: dict[str, int],
    streams: int,
    pair: tuple[int, int],
    steps: tuple[int, int],
    takes: float,
) -> None:
    parts = [[2 * shape["block_tokens"], *part] for part in parts]  # of which 0.6 is a block
    before, after = (plan_of(parts, size, num_streams=streams, take=takes, **shape) for size in pair)
    loader = NumpyLoader(before, global_batch_size=2 * streams)
    take(loader, steps[0])
    loader = resized(after, loader.state_dict(), 2 * streams)
    start = loader.cursor.sample
    rows = {
        int(sample): batch["input_ids"][row].tolist()
        for batch in take(loader, steps[1])
        for row, sample in enumerate(batch["sample_index"])
    }
    assert sorted(rows) == list(range(start, loader.cursor.sample))
    assert all(len(row) == pair[1] for row in rows.values())
    again = NumpyLoader(after, global_batch_size=3 * streams)
    again.load_state_dict(loader.state_dict())
    assert again.state_dict() == loader.state_dict()
    assert all(after.sample(sample, again.cursor)["input_ids"].tolist() == row for sample, row in rows.items())
    if start:
        early = before.sample(start - 1, before.cursor())["input_ids"].tolist()
        assert after.sample(start - 1, again.cursor)["input_ids"].tolist() == early
    # a token is read twice only in two epochs
    counts, epochs = tokens_of(again, range(again.cursor.sample)), again.stats()["corpora"]
    for (corpus, _, _), count in counts.items():
        assert count <= np.ceil(epochs[corpus]["epoch"]) + streams


@settings(max_examples=examples(15))
@given(part=lengths, shape=shapes, pair=st.tuples(sizes, sizes), steps=st.integers(0, 20), streams=st.integers(1, 3))
def test_find_is_the_inverse_of_trace_on_both_sides_of_the_change(
    part: list[int], shape: dict[str, int], pair: tuple[int, int], steps: int, streams: int
) -> None:
    before, after = (plan_of([[40, *part]], size, num_streams=streams, **shape) for size in pair)
    loader = NumpyLoader(before, global_batch_size=streams)
    take(loader, steps)
    loader = resized(after, loader.state_dict(), streams)
    end = loader.cursor.sample + 4 * streams
    traced = {
        (sample, piece.document, piece.start, piece.stop)
        for sample, pieces in enumerate(after.traces(np.arange(end), loader.cursor))
        for piece in pieces
    }
    found = {
        (one.sample, document, one.start, one.stop)
        for document in range(len(part) + 1)
        for one in after.find("0", document, loader.cursor, epochs=8)
        if one.sample is not None and one.sample < end
    }
    if steps * streams * max(pair) < 3 * (40 + sum(part)):  # within the epochs that were asked for
        assert found == traced


@pytest.mark.slow
@pytest.mark.parametrize("weights", [{"0": 1, "1": 1}, {"0": 2, "1": 1}])
def test_streams_that_read_a_small_corpus_in_turn_read_nothing_twice_wherever_the_length_changes(
    weights: dict[str, float],
) -> None:
    """Some streams are then ahead of others in each corpus, which continues behind the furthest one."""
    shape = {"block_tokens": 16, "window_blocks": 2, "num_streams": 3, "weights": weights}
    parts = [[7, 30, 11, 2] * 6, [5, 17, 40] * 5]
    for steps in range(1, 16):
        loader = NumpyLoader(plan_of(parts, 4, **shape), global_batch_size=3)
        take(loader, steps)
        loader = resized(plan_of(parts, 2, **shape), loader.state_dict(), 3)
        take(loader, 16)
        counts, epochs = tokens_of(loader, range(loader.cursor.sample)), loader.stats()["corpora"]
        assert all(of["epoch"] <= 1 for of in epochs.values()), "no token is to be read twice"
        assert set(counts.values()) == {1}


def test_another_seq_len_is_refused_with_the_word_that_allows_it() -> None:
    loader = NumpyLoader(plan_of([[30, 9, 12]], 4, block_tokens=16, window_blocks=2), global_batch_size=1)
    take(loader, 2)
    other = NumpyLoader(plan_of([[30, 9, 12]], 8, block_tokens=16, window_blocks=2), global_batch_size=1)
    with pytest.raises(PlanMismatchError, match=r"seq_len differs \(4, now 8\)") as caught:
        other.load_state_dict(loader.state_dict())
    assert "seq_len='plan'" in caught.value.hint
    other.load_state_dict(loader.state_dict(), seq_len="plan")
    with pytest.raises(PlanMismatchError, match=r"seq_len differs \(8, now 4\)"):
        loader.load_state_dict(other.state_dict())
    with pytest.raises(PlanMismatchError, match="block_tokens differs"):
        resized(plan_of([[30, 9, 12]], 8, block_tokens=32, window_blocks=2), loader.state_dict(), 1)


@pytest.mark.filterwarnings("error")
def test_conversations_go_on_in_rows_of_twice_the_length_with_default_sizes_and_lose_nothing() -> None:
    corpora = {
        "chats": ListSource([300, 1500, 700, 4096, 2500, 900] * 40, name="chats"),
        "text": ListSource([5000, 200, 1200] * 90, name="text"),
    }
    pack = {"chats": "whole", "text": "cut"}
    loader = NumpyLoader(StreamPlan(corpora, seq_len=4096, pack=pack), global_batch_size=4)
    take(loader, 5)
    loader = resized(StreamPlan(corpora, seq_len=8192, pack=pack), loader.state_dict(), 6)
    take(loader, 25)
    # each corpus was read once by then
    statistics = loader.stats()["corpora"].values()
    assert [found["left_out"] for found in statistics] == [0, 0]
    assert min(found["epoch"] for found in statistics) > 1
    counts = tokens_of(loader, range(loader.cursor.sample))
    assert len(counts) == sum(source.num_tokens for source in corpora.values())
    last = resized(StreamPlan(corpora, seq_len=8192, pack=pack), loader.state_dict(), 6)
    assert last.state_dict() == loader.state_dict()


def test_what_a_change_leaves_out_is_warned_of_with_numbers() -> None:
    plan, shape = plan_of, {"block_tokens": 64, "window_blocks": 2}
    loader = NumpyLoader(plan([[30] * 9], 8, **shape), global_batch_size=1)
    take(loader, 3)
    with pytest.warns(UserWarning, match=r"from 8 to 12 leaves out \d+ tokens of '0' \(\d+\.\d% of an epoch\), which"):
        resized(plan([[30] * 9], 12, **shape), loader.state_dict(), 1)


def test_a_plan_that_is_not_given_sizes_takes_those_of_the_run_or_is_refused_with_what_it_can_have() -> None:
    corpus = ListSource([300, 1500, 700] * 40)
    loader = NumpyLoader(
        StreamPlan(corpus, seq_len=64, block_tokens=16_384, window_blocks=3, pack="whole"), global_batch_size=2
    )
    take(loader, 3)
    state = loader.state_dict()
    loader = NumpyLoader(StreamPlan(corpus, seq_len=64, pack="whole"), global_batch_size=2)
    loader.load_state_dict(state)
    assert loader.state_dict() == state
    assert (loader.plan.shape.block_tokens, loader.plan.shape.window_blocks) == (16_384, 3)
    with pytest.raises(PlanMismatchError, match=r"run has block_tokens=16384 and window_blocks=3, which") as error:
        resized(StreamPlan(corpus, seq_len=256, pack="whole"), state, 2)
    assert error.value.hint.startswith("give a seq_len that divides 128;")
    resized(StreamPlan(corpus, seq_len=128, pack="whole"), state, 2)
    with pytest.raises(PlanMismatchError, match="block_tokens differs"):
        resized(StreamPlan(corpus, seq_len=128, block_tokens=32_768, pack="whole"), state, 2)


def test_a_change_that_began_with_more_samples_than_were_given_is_damage() -> None:
    shape = {"block_tokens": 16, "window_blocks": 2}
    loader = NumpyLoader(plan_of([[30] * 9], 4, **shape), global_batch_size=1)
    take(loader, 3)
    plan = plan_of([[30] * 9], 2, **shape)
    state = resized(plan, loader.state_dict(), 1).state_dict()
    (length,) = values_of(state)["lengths"]
    assert length["bases"] == [[3]]
    with pytest.raises(PlanMismatchError, match="damaged: the rest of it contradicts lengths"):
        resized(plan, edited(state, lengths=[{**length, "bases": [[4]]}]), 1)


def test_a_change_before_the_first_sample_is_the_plan_with_that_seq_len() -> None:
    shape = {"block_tokens": 16, "window_blocks": 2}
    before, after = plan_of([[30, 9, 12], [50]], 4, **shape), plan_of([[30, 9, 12], [50]], 8, **shape)
    loader = resized(after, NumpyLoader(before, global_batch_size=1).state_dict(), 1)
    for sample in range(20):
        assert after.sample(sample, loader.cursor)["input_ids"].tolist() == after.sample(sample)["input_ids"].tolist()
    assert {corpus["left_out"] for corpus in loader.stats()["corpora"].values()} == {0}


def test_a_second_change_at_the_same_sample_takes_the_place_of_the_first() -> None:
    shape = {"block_tokens": 16, "window_blocks": 2}
    loader = NumpyLoader(plan_of([[30] * 9], 4, **shape), global_batch_size=1)
    take(loader, 3)
    once = resized(plan_of([[30] * 9], 2, **shape), loader.state_dict(), 1)
    twice = resized(plan_of([[30] * 9], 8, **shape), once.state_dict(), 1)
    straight = resized(plan_of([[30] * 9], 8, **shape), loader.state_dict(), 1)
    assert twice.state_dict() == straight.state_dict()
    assert len(twice.cursor.lengths) == 2


@given(data=st.data(), streams=st.integers(1, 3))
def test_corpora_that_are_reordered_added_and_removed_among_changes_of_the_length_read_nothing_twice(
    data: st.DataObject, streams: int
) -> None:
    shape = {"block_tokens": 16, "window_blocks": 2, "num_streams": streams}
    parts = [[7, 30, 11, 2] * 6, [5, 17, 40] * 5, [3, 90, 20] * 3]
    sources = {str(number): ListSource(part, name=str(number)) for number, part in enumerate(parts)}

    def plan(names: str, seq_len: int) -> StreamPlan:
        return StreamPlan({name: sources[name] for name in names}, seq_len=seq_len, allow_small_blocks=True, **shape)

    loader = NumpyLoader(plan("01", 4), global_batch_size=streams)
    found: Counter[tuple[str, int, int]] = Counter()
    orders = st.lists(st.sampled_from(["01", "10"]), max_size=3)
    for names in [*data.draw(orders), *data.draw(st.sampled_from([[], ["1"], ["201"], ["21", "12"]]))]:
        start = loader.cursor.sample
        take(loader, data.draw(st.integers(0, 5)))
        found += tokens_of(loader, range(start, loader.cursor.sample))
        seq_len = data.draw(st.sampled_from([2, 4, 8]))
        state = loader.state_dict()
        loader = resized(plan(names, seq_len), state, streams, corpora="plan")
        again = NumpyLoader(loader.plan, global_batch_size=streams)
        again.load_state_dict(loader.state_dict())
        assert again.cursor == loader.cursor
    # one stream may have gone through its part when the others have not
    most = 1 if streams == 1 else 0.9 / streams
    in_first_epoch = {name for name, stats in loader.stats()["corpora"].items() if stats["epoch"] <= most}
    assert all(count == 1 for (corpus, *_), count in found.items() if corpus in in_first_epoch)


def test_weights_skips_and_masks_go_on_across_the_change(tmp_path: Any) -> None:
    shape = {"block_tokens": 16, "window_blocks": 2}
    parts = [[7, 30, 11, 2] * 6, [5, 17, 40] * 5]
    (tmp_path / "masked.txt").write_text("".join(f"{document}\n" for document in range(24)))
    loader = NumpyLoader(plan_of(parts, 4, **shape), global_batch_size=2)
    take(loader, 3)
    loader.set_weights({"0": 3, "1": 1})
    loader.skip(5)
    loader = resized(plan_of(parts, 8, **shape), loader.state_dict(), 2)
    loader.mask("0", tmp_path / "masked.txt")
    loader.skip(2)
    batches = take(loader, 20)
    for batch in batches:
        of_first = batch["corpus_index"] == 0
        assert np.all(batch["labels"][of_first] == -100)
        assert np.any(batch["labels"][~of_first] != -100) or of_first.all()
    counts = Counter(np.concatenate([batch["corpus_index"] for batch in batches]).tolist())
    assert counts == {0: 30, 1: 10}
    assert loader.stats()["skipped_samples"] == 7
