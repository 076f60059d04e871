"""How many blocks a step draws from, by a simulation, compared with the tokens of a loader's batches."""

from __future__ import annotations

import itertools
import json
import re

import pytest

from tests.inspect.pages import write_mix
from tests.runtime.sources import ListSource
from tokshard.cli.main import run
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.simulation import simulate
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

BLOCK = 64


def counted(plan, first_tokens, size, num_steps):
    """Blocks of each corpus that the batches of a loader have tokens of, in the mean of some steps."""
    found = {name: set() for name in plan.names}
    with NumpyLoader(plan, global_batch_size=size) as loader:
        for step, batch in enumerate(itertools.islice(loader, num_steps)):
            for row, corpus in zip(batch["input_ids"], batch["corpus_index"].tolist(), strict=True):
                if corpus >= 0:
                    name = plan.names[corpus]
                    positions = row[row > 0] - first_tokens[name]  # of all tokens but delimiters and padding
                    found[name] |= {(step, block) for block in (positions // BLOCK).tolist()}
    return {name: len(blocks) / num_steps for name, blocks in found.items()}


# all lengths are multiples of 4, and so are samples and blocks: no piece is a delimiter alone
@pytest.mark.parametrize("num_streams", [1, 4])
@pytest.mark.parametrize("lengths", [[4, 12, 8, 16], [64] * 4, [1_000, 480, 2_000]])
def test_a_step_draws_from_as_many_blocks_as_its_batches_have_tokens_of(lengths, num_streams):
    sources = {"a": ListSource(lengths * 60, first_token=1), "b": ListSource(lengths * 7, first_token=10**6)}
    plan = StreamPlan(
        sources, weights={"a": 3, "b": 1}, seq_len=16, block_tokens=BLOCK, window_blocks=16, num_streams=num_streams
    )
    found = simulate(Run(plan=plan, global_batch_size=8, cursor=plan.cursor()), 64)
    assert found.num_steps == 8
    blocks = {corpus.name: corpus.blocks_per_step for corpus in found.corpora}
    assert blocks == counted(plan, {"a": 1, "b": 10**6}, 8, 8)


def test_a_short_last_step_of_a_pass_is_not_counted():
    plan = StreamPlan(ListSource([8] * 16), seq_len=16, block_tokens=BLOCK, window_blocks=2, epochs=1)
    found = simulate(Run(plan=plan, global_batch_size=3, cursor=plan.cursor()), 100)
    assert (found.num_samples, found.num_steps) == (8, 2)
    assert found.corpora[0].blocks_per_step == counted(plan, {"corpus": 1}, 3, 2)["corpus"]


def test_the_page_says_it(tmp_path, monkeypatch):
    monkeypatch.setattr("tokshard.inspect.page.page.plotly_source", lambda: "")
    assert run(["report", str(write_mix(tmp_path)), "--out", str(tmp_path / "page.html")]) == 0
    data = re.findall(r'id="data">(.*?)</script>', (tmp_path / "page.html").read_text(), re.DOTALL)[0]
    rows = dict(json.loads(data)["sections"][1]["rows"])
    assert "each of the first 8 steps draws from 1.0 blocks on average" in rows["a"]  # which has one block
