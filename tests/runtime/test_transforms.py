"""Samples that are changed as they are read.

They are the same under every loader and after every resume: test_loader.py. What they may return: test_refusals.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.runtime.loaders import dataloader, expected_rows, one_corpus, rows_of, take, two_corpora
from tests.runtime.sources import ListSource
from tests.runtime.transforms import failing, note, reverse
from tests.spec import order as spec
from tokshard.errors import PlanError
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.transforms import Sample, SampleRandom
from tokshard.runtime.tensors import StreamDataset


def test_the_random_numbers_of_a_sample_are_those_that_the_rules_name() -> None:
    model = spec.Random(17, 23)
    words = [model.word() for _ in range(6)]
    random = SampleRandom(17, 23)
    assert random.words(2).tolist() == words[:2]
    assert random.uniform(2).tolist() == [(word >> 11) * 2.0**-53 for word in words[2:4]]
    assert random.integers(1000, 2).tolist() == [(word >> 32) * 1000 >> 32 for word in words[4:]]
    assert SampleRandom(17, 23).integers(1 << 32, 1).tolist() == [words[0] >> 32]
    for below in (0, (1 << 32) + 1):
        with pytest.raises(ValueError, match="below must be from 1 to"):
            random.integers(below, 1)


def test_transforms_are_applied_in_their_order_and_labels_and_boundaries_follow_from_what_they_return() -> None:
    plain, changed = two_corpora(), two_corpora(transforms=[reverse, note])
    assert changed.fingerprint == plain.fingerprint
    for sample in range(10):
        tokens, row = plain.sample(sample)["input_ids"].tolist()[::-1], changed.sample(sample)
        assert row["input_ids"][1:].tolist() == tokens[1:]
        assert row["input_ids"][0] != tokens[0]
        assert row["labels"].tolist() == [*tokens[1:], -100]
        assert row["position_ids"].tolist() == list(range(6))
        assert row["cu_seqlens"].tolist() == [0] + [6] * 63
        assert int(row["max_seqlen"]) == 6
        assert changed.trace(sample) == plain.trace(sample), "of the tokens before they were changed"


class Seen:
    """Remembers what it is given."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def __call__(self, sample: Sample, random: SampleRandom) -> Sample:
        self.samples.append(replace(sample, tokens=sample.tokens.copy()))
        sample.tokens[:] = 7  # what it is given is its own
        return sample


def test_padding_rows_are_not_passed_and_the_last_sample_of_a_pass_without_its_padding() -> None:
    seen = Seen()
    plan = StreamPlan(ListSource([9, 4, 1]), epochs=1, seq_len=6, seed=4, transforms=[seen])
    with NumpyLoader(plan, global_batch_size=4) as loader:
        (batch,) = loader
    assert [len(sample.tokens) for sample in seen.samples] == [6, 6, 2]
    assert all(sample.piece_lengths.sum() == len(sample.tokens) for sample in seen.samples)
    assert batch["sample_index"].tolist() == [0, 1, 2, -1]
    assert batch["input_ids"].tolist() == [[7] * 6, [7] * 6, [7, 7, 0, 0, 0, 0], [0] * 6]
    assert batch["labels"][2, 2:].tolist() == [-100] * 4
    assert set(batch["labels"][3].tolist()) == {-100}


def test_a_transform_that_fails_raises_its_own_error_and_the_loader_goes_on_where_it_was() -> None:
    loader = NumpyLoader(two_corpora(transforms=[failing]), global_batch_size=2)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="own mistake"):
            take(loader, 1)
    assert loader.cursor.sample == 0


def test_a_transform_that_does_not_pickle_is_refused_before_a_worker_starts() -> None:
    plan = one_corpus(epochs=1, transforms=[note, lambda sample, random: sample])
    dataset = StreamDataset(plan, global_batch_size=2)
    with pytest.raises(PlanError, match=r"<lambda> at .* does not pickle") as caught:
        list(dataloader(dataset, num_workers=2, multiprocessing_context="spawn"))
    assert "num_workers=0" in caught.value.hint
    rows = rows_of(list(dataloader(StreamDataset(plan, global_batch_size=2))))
    assert [row for row in rows if row["sample_index"] >= 0] == expected_rows(plan, range(plan.num_samples or 0))
