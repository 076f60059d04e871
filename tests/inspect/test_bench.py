"""Limits and speeds: what is read, how much of it, and how steps are counted."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.format.opening import open_corpus
from tokshard.inspect.plan import bench
from tokshard.inspect.plan.bench import MemoryReader, endless, mapped_tokens, take_steps


def test_the_limits_are_read_from_the_shards_of_all_corpora_in_turn(tmp_path):
    lengths = {"a": [60, 60, 60], "b": [70, 50]}
    corpora = [
        open_corpus(write_corpus(tmp_path / name, documents_of(each), tokenizer=TINY_TOKENIZER, shard_tokens=100))
        for name, each in lengths.items()
    ]
    assert [len(array) for array in mapped_tokens(corpora)] == [60, 70, 60, 50, 60]
    assert [len(array) for array in mapped_tokens(corpora, num_tokens=125)] == [60, 70]
    assert np.array_equal(mapped_tokens(corpora)[1], corpora[1].document(0))


def test_limits_are_positive_even_for_one_token():
    for arrays in ([np.zeros(1, np.uint16)], [np.zeros(1_500, np.uint16), np.zeros(3, np.uint16)]):
        reader = MemoryReader(arrays)
        assert reader.measure(0.001) > 0
        assert reader.document_tokens == min(1_000, len(arrays[0]))


def test_steps_go_on_until_both_the_time_and_the_number_are_reached(monkeypatch):
    clock = itertools.count()  # every look at it is a second
    monkeypatch.setattr(bench.time, "perf_counter", lambda: float(next(clock)))
    batch = {"input_ids": torch.zeros(2, 5)}
    steps = take_steps(itertools.repeat(batch), seconds=4.0)
    assert (steps.num_tokens, steps.wall_seconds, steps.tokens_per_second) == (40, 4.0, 10.0)
    assert take_steps(itertools.repeat(batch), num_steps=7).num_tokens == 70


def test_the_longest_step_is_reported_with_the_median(monkeypatch):
    times = iter([0.0, 1.0, 2.0, 5.0, 6.0])
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(times))
    steps = take_steps(itertools.repeat({"input_ids": torch.zeros(1)}), num_steps=4)
    assert (steps.median_seconds, steps.longest_seconds) == (1.0, 3.0)


def test_a_finite_pass_is_read_again():
    assert list(itertools.islice(endless([1, 2]), 5)) == [1, 2, 1, 2, 1]
