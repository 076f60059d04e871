"""``tokshard plan``: its numbers are those of a loader. `transcripts/plan.txt` has what it prints."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from tests.cli.transcripts import json_of
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.refusals import tokshard
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.runtime import NumpyLoader, StreamPlan

MIX = 'corpora = { code = "code", prose = "prose" }\nweights = { code = 3, prose = 1 }\n'
SIZES = "seq_len = 64\nglobal_batch_size = 8\nseed = 5\nblock_tokens = 256\n"


@pytest.fixture(autouse=True)
def _in_the_directory_of_a_mix(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, lengths in (("code", [2_000] * 40), ("prose", [20, 7] * 400)):
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    (tmp_path / "mix.toml").write_text(MIX + SIZES)


def report_of(*arguments: object) -> dict[str, Any]:
    """What ``tokshard plan`` says."""
    (report,) = json_of("plan", *arguments)
    return report


def test_json_holds_the_numbers_of_a_loader():
    report = report_of("mix.toml", "--tokens", "20k")
    assert (report["num_steps"], report["num_samples"], report["num_tokens"]) == (40, 320, 20_480)
    with NumpyLoader(StreamPlan.load("mix.toml"), global_batch_size=8) as loader:
        batches = iter(loader)
        for _ in range(40):
            next(batches)
        stats = loader.stats()["corpora"]
    for corpus in report["corpora"]:
        expected = stats[corpus["name"]]
        assert (corpus["samples"], corpus["tokens"]) == (expected["samples"], expected["tokens"])
        assert corpus["epochs"] == expected["epoch"]
        assert corpus["bytes"] == 2 * corpus["tokens"]
        assert corpus["share"] == corpus["samples"] / 320


@pytest.mark.parametrize("count", [8, 9, 11])
def test_of_many_corpora_with_one_warning_the_first_are_named(tmp_path, count):
    for number in range(count):
        write_corpus(tmp_path / f"cell-{number}", documents_of([20 + number]), tokenizer=TINY_TOKENIZER)
    corpora = ", ".join(f'{number} = "cell-{number}"' for number in range(count))
    (tmp_path / "cells.toml").write_text(f"corpora = {{ {corpora} }}\n{SIZES}")
    warnings = report_of("cells.toml", "--tokens", "20k")["warnings"]
    named = [warning for warning in warnings if "more than --max-epochs-warn" in warning]
    assert [warning.split("'")[1] for warning in named] == [*"01234567"]
    others = f"so {count - 8} other {'corpus' if count == 9 else 'corpora'}"
    assert [others in warnings] == [count > 8]


@pytest.mark.parametrize(("weights", "steps"), [("1e308, prose = 0.5", 6.0), ("1.5e308, prose = 0.5e308", 8.0)])
def test_windows_last_as_long_with_the_largest_weights(tmp_path, weights, steps):
    mix = MIX.replace("3, prose = 1", weights)
    (tmp_path / "mix.toml").write_text(mix + SIZES + "window_blocks = 12\n")
    assert report_of("mix.toml", "--tokens", "10k")["corpora"][0]["steps_per_window"] == steps


@pytest.mark.parametrize("tokens", ["20k", "120k"])
@pytest.mark.parametrize(
    "sizes",
    [
        "block_tokens = 256\nnum_streams = 4\nwindow_blocks = 3\n",
        "block_tokens = 256\ntake = { code = 0.25 }\n",
        'pack = "whole"\n',
    ],
)
def test_documents_are_about_as_many_as_the_samples_are_made_of(tmp_path, sizes, tokens):
    write_corpus(tmp_path / "code", documents_of([100] * 900), tokenizer=TINY_TOKENIZER)
    (tmp_path / "mix.toml").write_text(MIX + SIZES.partition("block_tokens")[0] + sizes)
    report, plan = report_of("mix.toml", "--tokens", tokens), StreamPlan.load("mix.toml")
    samples = plan.traces(np.arange(report["num_samples"]))
    for corpus in report["corpora"]:
        read = {piece.document for pieces in samples for piece in pieces if piece.corpus == corpus["name"]}
        assert corpus["documents"] == pytest.approx(len(read), rel=0.1)


def test_a_corpus_that_is_packed_whole_has_the_rows_that_its_blocks_and_tail_give(tmp_path):
    sizes = "seq_len = 16\nglobal_batch_size = 8\nblock_tokens = 2048\nwindow_blocks = 2\n"
    (tmp_path / "mix.toml").write_text(MIX + sizes + 'pack = { prose = "whole" }\n')
    code, prose = report_of("mix.toml", "--tokens", "100k")["corpora"]
    assert code["packing"] is None
    rows = 5 * (2048 + 16) // 16 + (560 + 16) // 16  # five blocks and a tail of 560 tokens
    found = prose["packing"]
    assert (found["rows"], found["padding"]) == (rows, 1 - 10_800 / (16 * rows))
    # of 20 and 7 tokens in turn: chunks of 16, 4 and 7, of which rows of 16 hold 14 or 15 tokens at most
    assert found["num_chunks"] == pytest.approx(2 * 2048 / 27 * 3, abs=4)


def test_the_work_of_ranks_is_that_of_their_batches():
    def work(deal: Literal["order", "cost"]) -> tuple[float, int]:
        """Of the pairs of tokens that attention looks at: the most of a rank over the mean, and the sum of the most."""
        plan, most, mean = StreamPlan.load("mix.toml"), [], []
        loaders = [NumpyLoader(plan, deal=deal, dp_rank=rank, dp_world_size=4, prefetch_factor=0) for rank in range(4)]
        for _, *batches in zip(range(32), *loaders, strict=False):
            pairs = [int((np.diff(batch["cu_seqlens"]).astype(int) ** 2).sum()) for batch in batches]
            most.append(max(pairs))
            mean.append(sum(pairs) / 4)
        return float(np.mean(np.array(most) / mean)), sum(most)

    four, of_16 = ["--dp-world-size", 4], ["--global-batch-size", 16]
    found = report_of("mix.toml", *four, "--hidden", 8, "--layers", 2)["balance"]
    (in_order, pairs_in_order), (by_cost, pairs_by_cost) = work("order"), work("cost")
    assert (found["num_ranks"], found["rows_per_rank"], found["num_steps"]) == (4, 2, 32)
    assert (found["in_order"], found["by_cost"]) == (pytest.approx(in_order), pytest.approx(by_cost))
    assert in_order > by_cost
    with open_corpus("code") as corpus:
        per_token = 12 * 8 + corpus.vocab_size / 2  # the weights that a token is multiplied with, in the same unit
    weights = 32 * 2 * 64 * per_token
    assert found["saved"] == pytest.approx(1 - (weights + pairs_by_cost) / (weights + pairs_in_order))
    Path("ramp.toml").write_text(f"[data]\n{MIX}{SIZES}batch_ramp = [[1, 16], [30, 28]]\n")
    grown, same = (report_of(*given)["balance"] for given in (["ramp.toml", *four], ["mix.toml", *four, *of_16]))
    assert (grown["num_steps"], grown["rows_per_rank"]) == (29, same["rows_per_rank"])
    assert grown["in_order"] == pytest.approx(same["in_order"], rel=0.1)
    assert tokshard("plan", "ramp.toml", "--dp-world-size", 8).problem.startswith(
        "8 ranks do not divide a global batch of 28"
    )


@pytest.mark.parametrize("line", ['corpora.more = "code"', "block_tokens = 64"])
def test_a_hint_about_a_key_can_be_typed_into_the_mix(line):
    mix = f'seq_len = 64\nglobal_batch_size = 8\ncorpora.code = "code"\n{line}\n'
    Path("other.toml").write_text(mix)
    hint = tokshard("plan", "other.toml").hint.rpartition("or ")[2].removeprefix("give ")
    Path("other.toml").write_text(f"{mix}{hint}\n")
    assert report_of("other.toml")["num_steps"] > 0


def test_a_terminal_without_line_drawing_gets_ascii(monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(sys, "stdout", shown)
    monkeypatch.setenv("COLUMNS", "200")
    assert run(["plan", "mix.toml"]) == 0
    lines = shown.buffer.getvalue().decode().splitlines()
    assert [line[:3] for line in lines[1:4]] == ["|- ", "|- ", "`- "]
