"""``tokshard trace`` says of a row what the loader gives. `transcripts/trace*.txt` have what it prints."""

from __future__ import annotations

import random
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.cli.transcripts import json_of
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.refusals import tokshard
from tokshard import open_corpus
from tokshard.runtime import NumpyLoader, StreamPlan

MIX = """
corpora = { code = "code", prose = "prose" }
weights = { code = 0.7, prose = 0.3 }
seq_len = 32
global_batch_size = 6
seed = 17
"""


@pytest.fixture(autouse=True)
def _in_the_directory_of_a_mix(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = random.Random(5)
    for name, count in (("code", 60), ("prose", 90)):
        lengths = [rng.randint(4, 95) for _ in range(count)]
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER, shard_tokens=2_000)
    Path("mix.toml").write_text(MIX)


def rows(*arguments: object) -> list[dict[str, Any]]:
    """The rows of a trace."""
    return json_of("trace", *arguments, "--no-text")


def tokens_of(rows: list[dict[str, Any]], rank: int, row: int) -> list[int]:
    """What the documents of a row hold on disk."""
    found = []
    for one in rows:
        if (one["rank"], one["row"]) == (rank, row):
            with open_corpus(one["corpus"]) as corpus:
                found += corpus.document(one["document"])[one["start"] : one["stop"]].tolist()
    return found


@pytest.mark.parametrize("deal", ["order", "cost"])
def test_every_row_of_every_rank_is_what_the_loader_gives_to_that_rank(deal):
    found = rows("mix.toml", "--step", "1:5", "--dp-world-size", 3, "--deal", deal)
    plan = StreamPlan.load("mix.toml")
    for rank in range(3):
        with NumpyLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=3, deal=deal) as loader:
            for step, batch in zip(range(1, 5), loader, strict=False):
                mine = [one for one in found if (one["step"], one["rank"]) == (step, rank)]
                samples = {(one["row"], one["sample"], one["corpus"]) for one in mine}
                names = [plan.names[index] for index in batch["corpus_index"].tolist()]
                assert samples == set(zip(range(2), batch["sample_index"].tolist(), names, strict=True))
                for row in range(2):
                    assert tokens_of(mine, rank, row) == batch["input_ids"][row].tolist()


def test_a_warning_of_the_plan_is_a_line_like_others_without_a_place_in_the_source() -> None:
    loader = NumpyLoader(StreamPlan.load("mix.toml"), global_batch_size=6)
    loader.skip(6)
    Path("state.json").write_text(loader.state_dict()["cursor"])
    Path("recipe.toml").write_text(f'[data]{MIX.replace("32", "48")}on_resume = ["seq_len"]\nblock_tokens = 65_536\n')
    with warnings.catch_warnings():
        warnings.filterwarnings("default", "the change of seq_len")
        said = tokshard("trace", "recipe.toml", "--checkpoint", "state.json", "--sample", 6)
    (warning,) = (line for line in said.errors.splitlines() if not line.startswith("note: "))
    assert warning.startswith("warning: the change of seq_len from 32 to 48 leaves out ")
