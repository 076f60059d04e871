"""How steps are counted, and what a report makes of them."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.cli.transcripts import json_of
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.inspect.plan import bench
from tokshard.inspect.plan.bench import endless, take_steps


def test_steps_go_on_until_both_the_time_and_the_number_are_reached(monkeypatch):
    clock = itertools.chain([0.0, 1.0, 3.0, 4.0], itertools.count(5.0))  # nearly every look at it is a second
    monkeypatch.setattr(bench.time, "perf_counter", lambda: next(clock))
    batch = {"input_ids": torch.zeros(2, 5)}
    steps = take_steps(itertools.repeat(batch), seconds=4.0)
    assert (steps.num_tokens, steps.wall_seconds, steps.tokens_per_second) == (30, 4.0, 7.5)
    assert (steps.median_seconds, steps.longest_seconds) == (1.0, 2.0)
    assert take_steps(itertools.repeat(batch), num_steps=7).num_tokens == 70
    monkeypatch.setattr(bench, "_MEMORY_TOKENS", 1 << 12)
    assert [bench.memory_speed(seconds) for seconds in (4.0, 0.0)] == [3 * 32 * 1_000 / 4, 32 * 1_000 / 2]


def test_a_report_has_the_figures_of_its_measurements(tmp_path, monkeypatch):
    for name, lengths in (("code", [500] * 4), ("prose", [20, 5] * 40)):
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    mix = tmp_path / "mix.toml"
    mix.write_text('corpora = { code = "code", prose = "prose" }\nweights = { code = 3, prose = 1 }\nseq_len = 64\n')
    tokens, speeds = {"full": 10, "compact": 30, "one row": 50}, iter([40.0, 10.0, 20.0])

    def measured(_: object, batches: str, **__: float) -> bench.Reading:
        return bench.Reading(
            batches=batches,
            tokens_per_second=tokens[batches] / 2,
            first_batch_seconds=0.125,
            median_step_seconds=0.5,
            longest_step_seconds=0.75,
            fetched={"reads": tokens[batches]},
        )

    monkeypatch.setattr(bench, "memory_speed", lambda _: next(speeds))
    monkeypatch.setattr(bench, "_reading", measured)
    (report,) = json_of("bench", mix, "--seed", 3, "--seq-len", 1000)
    assert [report[name] for name in ("seq_len", "global_batch_size", "seed")] == [1_000, 8, 3]
    assert (report["shares"], report["tokens"]) == ({"code": 0.75, "prose": 0.25}, 3_000)
    assert report["mean_document_tokens"] == pytest.approx(1 / (0.75 / 500 + 0.25 / 12.5))
    assert report["limit_tokens_per_second"] == 20.0
    assert [list(reading.values()) for reading in report["readings"]] == [
        ["full", 5.0, 0.25, 0.125, 0.5, 0.75, {"reads": 10}],
        ["compact", 15.0, 0.75, 0.125, 0.5, 0.75, {"reads": 30}],
        ["one row", 25.0, 1.25, 0.125, 0.5, 0.75, {"reads": 50}],
    ]


def test_a_finite_pass_is_read_again():
    assert list(itertools.islice(endless([1, 2]), 5)) == [1, 2, 1, 2, 1]
