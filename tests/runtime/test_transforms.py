"""Samples that are changed as they are read: the same for every division of the work; and fill-in-the-middle."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples, some
from tests.runtime import page_model
from tests.runtime.loaders import dataloader, expected_rows, global_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import EOS, ListSource, PeriodicSource
from tests.runtime.transforms import failing, note, reverse, roll, wrong
from tokshard.errors import PlanError
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.infilling import FillInTheMiddle
from tokshard.runtime.rows.transforms import Sample, SampleRandom
from tokshard.runtime.tensors import StreamDataset, StreamingLoader

PRE, SUF, MID = 900_001, 900_002, 900_003
FIM = FillInTheMiddle(prefix_id=PRE, suffix_id=SUF, middle_id=MID, rate=0.7)


# the same for every division of the work


@settings(max_examples=examples(20))
@given(ranks=st.sampled_from([1, 2, 3, 6]), steps=st.integers(1, 6), prefetch=st.integers(1, 5))
def test_the_global_batches_are_those_of_the_plan_for_every_world_size(ranks: int, steps: int, prefetch: int) -> None:
    plan = two_corpora(transforms=[FIM, note])
    assert global_rows(plan, steps, batch=6, ranks=ranks, prefetch_factor=prefetch) == expected_rows(
        plan, range(6 * steps)
    )


def test_resuming_anywhere_draws_the_same() -> None:
    plan = two_corpora(transforms=[roll, FIM, note])
    for stop in range(1, 8):
        loader = StreamingLoader(plan, global_batch_size=3)
        take(loader, stop)
        resumed = StreamingLoader(two_corpora(transforms=[roll, FIM, note]), global_batch_size=2)
        resumed.load_state_dict(loader.state_dict())
        assert rows_of(take(resumed, 2)) == expected_rows(plan, range(3 * stop, 3 * stop + 4))
        loader.close()
        resumed.close()


def test_a_dataset_of_other_loaders_transforms_too() -> None:
    plan = one_corpus(epochs=2, transforms=[note])
    rows = [
        row for row in rows_of(list(dataloader(StreamDataset(plan, global_batch_size=4)))) if row["sample_index"] >= 0
    ]
    assert rows == expected_rows(plan, range(plan.num_samples or 0))


@pytest.mark.slow
def test_samples_draw_independently_of_each_other_and_of_other_seeds() -> None:
    notes = {
        int(two_corpora(transforms=[note], seed=seed).sample(sample)["input_ids"][0])
        for seed in range(3)
        for sample in range(100)
    }
    assert len(notes) == 300


def test_what_is_drawn_is_golden() -> None:
    # golden: other values are another order, so ORDER_VERSION goes up
    plan = StreamPlan(ListSource([50]), seq_len=8, seed=17, transforms=[note])
    assert [int(plan.sample(sample)["input_ids"][0]) for sample in (0, 1, 10**12)] == [
        1_081_704_498,
        2_981_421_809,
        1_257_792_416,
    ]


def test_the_random_numbers_of_a_sample_are_those_that_the_rules_name() -> None:
    model = page_model.Random(17, 23)
    words = [model.word() for _ in range(6)]
    random = SampleRandom(17, 23)
    assert random.words(2).tolist() == words[:2]
    assert random.uniform(2).tolist() == [(word >> 11) * 2.0**-53 for word in words[2:4]]
    assert random.integers(1000, 2).tolist() == [(word >> 32) * 1000 >> 32 for word in words[4:]]
    assert SampleRandom(17, 23).integers(1 << 32, 1).tolist() == [words[0] >> 32]
    for below in (0, (1 << 32) + 1):
        with pytest.raises(ValueError, match="below must be from 1 to"):
            random.integers(below, 1)


# what a transform gets and gives


def test_transforms_are_applied_in_their_order() -> None:
    plain = two_corpora()
    one, other = two_corpora(transforms=[reverse, note]), two_corpora(transforms=[note, reverse])
    for sample in range(10):
        tokens = plain.sample(sample)["input_ids"].tolist()
        first, second = one.sample(sample)["input_ids"].tolist(), other.sample(sample)["input_ids"].tolist()
        assert first[1:] == tokens[::-1][1:]
        assert second[:-1] == tokens[::-1][:-1]
        assert first[0] == second[-1]


def test_labels_and_boundaries_follow_from_what_a_transform_returns() -> None:
    row = two_corpora(transforms=[reverse]).sample(3)
    tokens = two_corpora().sample(3)["input_ids"].tolist()[::-1]
    assert row["input_ids"].tolist() == tokens
    assert row["labels"].tolist() == [*tokens[1:], -100]
    assert row["position_ids"].tolist() == list(range(6))
    assert row["cu_seqlens"].tolist() == [0] + [6] * 63
    assert int(row["max_seqlen"]) == 6


class Seen:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def __call__(self, sample: Sample, random: SampleRandom) -> Sample:
        self.samples.append(replace(sample, tokens=sample.tokens.copy()))
        sample.tokens[:] = 7  # what it is given is its own
        return sample


@pytest.mark.parametrize("source", [ListSource([9, 4, 30, 1, 12, 3, 7]), PeriodicSource(66, 9)])
def test_a_transform_sees_the_tokens_pieces_and_labels_of_each_sample(source: Any) -> None:
    seen = Seen()
    plan = StreamPlan(source, seq_len=6, seed=4, block_tokens=24)
    for number in range(11):
        row, trace = plan.sample(number), plan.trace(number)
        StreamPlan(source, seq_len=6, seed=4, block_tokens=24, transforms=[seen]).sample(number)
        (sample,) = seen.samples
        seen.samples.clear()
        assert sample.tokens.dtype == source.dtype
        assert sample.tokens.tolist() == row["input_ids"].tolist()
        assert sample.piece_lengths.tolist() == [piece.stop - piece.start for piece in trace]
        assert sample.next_tokens.tolist() == row["labels"][np.cumsum(sample.piece_lengths) - 1].tolist()


def test_padding_rows_are_not_passed_and_the_last_sample_of_a_pass_without_its_padding() -> None:
    seen = Seen()
    plan = one_corpus(epochs=1, transforms=[seen])  # 66 tokens: 11 samples
    short = StreamPlan(ListSource([9, 4, 1]), epochs=1, seq_len=6, seed=4, transforms=[seen])
    for one in (plan, short):
        seen.samples.clear()
        batches = list(StreamingLoader(one, global_batch_size=4))
        assert len(seen.samples) == one.num_samples
        assert sum(len(sample.tokens) for sample in seen.samples) == one.sources[0].num_tokens
        assert all(sample.piece_lengths.sum() == len(sample.tokens) for sample in seen.samples)
    last = batches[-1]
    assert last["sample_index"].tolist() == [0, 1, 2, -1]
    assert last["input_ids"].tolist() == [[7] * 6, [7] * 6, [7, 7, 0, 0, 0, 0], [0] * 6]
    assert last["labels"][2, 2:].tolist() == [-100] * 4
    assert set(last["labels"][3].tolist()) == {-100}


def test_a_transform_that_changes_nothing_changes_nothing() -> None:
    for options in ({}, {"epochs": 2}):
        plan, same = one_corpus(**options), one_corpus(**options, transforms=[lambda sample, random: sample])
        for batch, other in zip(
            take(StreamingLoader(plan, global_batch_size=5), 5),
            take(StreamingLoader(same, global_batch_size=5), 5),
            strict=True,
        ):
            assert {key: value.tolist() for key, value in batch.items()} == {
                key: value.tolist() for key, value in other.items()
            }


def test_provenance_is_that_of_the_tokens_before_they_were_changed() -> None:
    plain, changed = two_corpora(), two_corpora(transforms=[FIM])
    assert changed.fingerprint == plain.fingerprint
    assert [changed.trace(sample) for sample in range(9)] == [plain.trace(sample) for sample in range(9)]


# what is not a sample


WRONG = {
    "nothing": "returned NoneType, expected a Sample",
    "an array": "returned ndarray, expected a Sample",
    "shorter": r"returned tokens uint32 \[5\], expected uint32 \[6\]",
    "wider": r"returned tokens int64 \[6\], expected uint32 \[6\]",
    "a list": r"returned tokens list, expected uint32 \[6\]",
    "sum": "pieces of 7 tokens .* expected 6 tokens",
    "empty piece": "pieces of 6 tokens",
    "negative piece": "2 pieces of 6 tokens",
    "no pieces": "0 pieces of 0 tokens",
    "labels": r"\d pieces of 6 tokens with \d next tokens",
    "float pieces": r"returned piece_lengths float64 \[\d\]",
    "list of pieces": "returned piece_lengths list",
    "float labels": r"next_tokens float64 \[\d\]",
    "square": r"returned piece_lengths int64 \[\d, 1\]",
    "label -1": "returned next_tokens from -1 on, expected token ids or -100",
}


@pytest.mark.parametrize("change", WRONG)
def test_a_transform_that_returns_no_sample_is_named_with_what_it_returned(change: str) -> None:
    transform = partial(wrong, change)
    plan = two_corpora(transforms=[transform])
    with pytest.raises(PlanError, match=WRONG[change]) as caught:
        plan.sample(0)
    assert repr(transform) in caught.value.problem
    assert caught.value.hint
    loader = StreamingLoader(plan, global_batch_size=2)
    with pytest.raises(PlanError, match=WRONG[change]):
        take(loader, 1)


def test_a_transform_that_fails_raises_its_own_error_and_the_loader_goes_on_where_it_was() -> None:
    loader = StreamingLoader(two_corpora(transforms=[failing]), global_batch_size=2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="own mistake"):
            take(loader, 1)
    assert loader.cursor.sample == 0


def test_a_transform_that_does_not_pickle_is_refused_before_a_worker_starts() -> None:
    plan = two_corpora(transforms=[note, lambda sample, random: sample])
    with pytest.raises(PlanError, match=r"<lambda> at .* does not pickle") as caught:
        list(dataloader(StreamDataset(plan, global_batch_size=2), num_workers=2, multiprocessing_context="spawn"))
    assert "num_workers=0" in caught.value.hint
    assert rows_of(take(StreamingLoader(plan, global_batch_size=2), 1)) == expected_rows(plan, range(2))


# fill-in-the-middle


def filled(body: list[int], original: list[int]) -> str:
    """Undo one piece without its delimiter; says which order it is in.

    Every token of `original` is another, so that the cuts can be found again.
    """
    assert len(body) == len(original)
    assert body[0] == PRE
    suf, mid = body.index(SUF), body.index(MID)
    assert suf < mid
    before, suffix, rest = body[1:suf], body[suf + 1 : mid], body[mid + 1 :]
    kept = before + rest  # prefix and middle: in SPM order they stand together after the middle's sentinel
    assert original[: len(kept)] == kept
    assert original[len(kept) + 3 :] == suffix
    assert Counter(body) + Counter(original[len(kept) : len(kept) + 3]) == Counter(original) + Counter([PRE, SUF, MID])
    return "PSM" if before else "SPM or a PSM without a prefix"


def check_fim(plain: dict[str, Any], changed: dict[str, Any], rate: float) -> list[str]:
    """Compare a sample with and without the transform; returns what became of each piece that is long enough."""
    assert plain["position_ids"].tolist() == changed["position_ids"].tolist()
    starts = np.flatnonzero(plain["position_ids"] == 0).tolist()
    found = []
    for start, stop in zip(starts, [*starts[1:], len(plain["input_ids"])], strict=True):
        original, tokens = plain["input_ids"][start:stop].tolist(), changed["input_ids"][start:stop].tolist()
        labels, last = changed["labels"][start:stop].tolist(), int(plain["labels"][stop - 1])
        assert labels[:-1] == tokens[1:]
        is_whole = last == -100  # the piece ends with its document
        assert is_whole == (original[-1] == EOS)
        inner = len(original) - is_whole
        if tokens == original:
            assert labels[-1] == last
            assert rate < 1 or inner <= 6
            found += ["unchanged"] * (inner > 6)
            continue
        assert inner > 6
        assert tokens[inner:] == original[inner:]  # the delimiter
        assert labels[-1] == -100
        found.append(filled(tokens[:inner], original[:inner]))
    return found


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    seq_len=st.integers(1, 80),
    rates=st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 2),
    seed=st.integers(0, 2**64 - 1),
)
def test_documents_can_be_put_together_again_from_prefix_middle_and_suffix(
    lengths: list[int], seq_len: int, rates: tuple[float, float], seed: int
) -> None:
    rate, spm_rate = rates
    transform = FillInTheMiddle(prefix_id=PRE, suffix_id=SUF, middle_id=MID, rate=rate, spm_rate=spm_rate)
    options = {"seq_len": seq_len, "seed": seed, "block_tokens": 4 * seq_len, "window_blocks": 4}
    source = ListSource(lengths)
    plain, changed = StreamPlan(source, **options), StreamPlan(source, **options, transforms=[transform])
    for sample in range(12):
        kinds = check_fim(plain.sample(sample), changed.sample(sample), rate)
        if rate == 0:
            assert set(kinds) <= {"unchanged"}
        if spm_rate == 1:
            assert "PSM" not in kinds


@some("rate, spm_rate", [(0.2, 0.5), (0.5, 0.5), (0.9, 0.1), (0.2, 1.0), (1.0, 0.0)])
def test_pieces_are_changed_at_the_given_rates(rate: float, spm_rate: float) -> None:
    transform = FillInTheMiddle(prefix_id=PRE, suffix_id=SUF, middle_id=MID, rate=rate, spm_rate=spm_rate)
    source = ListSource([200] * 2000)
    plain = StreamPlan(source, seq_len=4000, seed=5)
    changed = StreamPlan(source, seq_len=4000, seed=5, transforms=[transform])
    kinds = [kind for sample in range(90) for kind in check_fim(plain.sample(sample), changed.sample(sample), rate)]
    counts = Counter(kinds)
    assert len(kinds) > 1800
    assert 1 - counts["unchanged"] / len(kinds) == pytest.approx(rate, abs=0.05)
    # of the PSM ones 2 of 197 have no prefix
    assert counts["PSM"] / (len(kinds) - counts["unchanged"]) == pytest.approx((1 - spm_rate) * 0.99, abs=0.08)


def test_every_length_of_prefix_middle_and_suffix_comes() -> None:
    transform = FillInTheMiddle(prefix_id=PRE, suffix_id=SUF, middle_id=MID, rate=1, spm_rate=0)
    sizes: set[tuple[int, int, int]] = set()
    for number in range(1000):
        sample = Sample(
            tokens=np.arange(1, 11, dtype=np.uint32), piece_lengths=np.array([10]), next_tokens=np.array([11])
        )
        tokens = transform(sample, SampleRandom(0, number)).tokens.tolist()
        suf, mid = tokens.index(SUF), tokens.index(MID)
        sizes.add((suf - 1, 9 - mid, mid - suf - 1))
    assert sizes == {(a, b, 7 - a - b) for a in range(8) for b in range(8 - a)}


def test_what_is_drawn_for_a_piece_does_not_depend_on_the_pieces_before_it() -> None:
    def rows(rate: float) -> list[int]:
        transform = FillInTheMiddle(prefix_id=PRE, suffix_id=SUF, middle_id=MID, rate=rate)
        tokens = np.arange(1, 101, dtype=np.uint32)
        sample = Sample(tokens=tokens, piece_lengths=np.array([50, 50]), next_tokens=np.array([-100, 101]))
        return transform(sample, SampleRandom(0, 13)).tokens.tolist()

    draws = SampleRandom(0, 13).uniform(8).reshape(2, 4)[:, 0]
    assert draws[0] > draws[1], "choose another seed: the second piece is to be changed alone"
    alone, both = rows(float(draws.mean())), rows(1.0)
    assert alone[:50] == list(range(1, 51)) != both[:50]
    assert alone[50:] == both[50:] != list(range(51, 101))


def test_sentinels_that_do_not_fit_the_ids_of_the_corpus_are_refused() -> None:
    plan = StreamPlan(PeriodicSource(10_000), seq_len=64, transforms=[FIM])
    with pytest.raises(PlanError, match="id 900003 does not fit uint16, the dtype of the corpus"):
        plan.sample(0)


@pytest.mark.parametrize(
    "change",
    [{"prefix_id": -1}, {"middle_id": SUF}, {"rate": 1.1}, {"rate": -0.1}, {"spm_rate": 2}, {"rate": float("nan")}],
)
def test_sentinels_and_rates_that_are_none_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PlanError, match="the three ids must differ and be at least 0, and rates are from 0 to 1"):
        FillInTheMiddle(**{"prefix_id": PRE, "suffix_id": SUF, "middle_id": MID, **change})
