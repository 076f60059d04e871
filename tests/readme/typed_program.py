"""A program as a user with strict types writes it: `make lint` checks it, and test_readme.py runs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import tokshard
from tokshard.runtime import NumpyLoader, Sample, SampleRandom, StreamingLoader, StreamPlan


def checked_tokens(sample: Sample, random: SampleRandom) -> Sample:
    assert len(random.words(2)) == 2
    return sample


def build(out: Path) -> int:
    records = ({"text": f"note {number} of many"} for number in range(40))
    result = tokshard.build_corpus(records, tokenizer="recipes/tokenizer", out=out, workers=1)
    with tokshard.open_corpus(out) as corpus:
        text: str = corpus.text(0)
        tokens: NDArray[Any] = corpus.document(0)
        assert text == "note 0 of many", tokens
        assert str(out) in str(result)
        num_tokens: int = corpus.num_tokens
    try:
        tokshard.open_corpus("nowhere")
    except tokshard.TokshardError as error:
        hint: str = error.hint
        assert hint
    return num_tokens


def train(out: Path, checkpoint: Path) -> torch.Tensor:
    plan = StreamPlan({"notes": out}, weights={"notes": 1.0}, seq_len=16, seed=1, transforms=[checked_tokens])
    total = torch.zeros((), dtype=torch.int64)
    masked = Path("masked.txt")
    masked.write_text("0\n")
    with StreamingLoader(plan, global_batch_size=2, dp_rank=0, dp_world_size=2) as loader:
        if checkpoint.exists():
            loader.load_state_dict(json.loads(checkpoint.read_text(encoding="utf-8")))
        loader.mask("notes", masked)
        loader.skip(2)
        for step, batch in enumerate(loader):
            inputs: torch.Tensor = batch["input_ids"]
            total += inputs.sum()
            if step == 2:
                break
        state: dict[str, Any] = loader.state_dict()
    checkpoint.write_text(json.dumps(state), encoding="utf-8")
    return total


def evaluate(out: Path) -> int:
    plan = StreamPlan(out, seq_len=16, seed=1, epochs=1)
    loader = NumpyLoader(plan, global_batch_size=2)
    num_targets = 0
    for batch in loader:
        labels: NDArray[np.int64] = batch["labels"]
        num_targets += int((labels != -100).sum())
    assert plan.trace(0)
    loader.close()
    return num_targets


if __name__ == "__main__":
    corpus_directory = Path("typed-shards")
    built = build(corpus_directory)
    for _ in range(2):
        train(corpus_directory, Path("checkpoint.json"))
    evaluated = evaluate(corpus_directory)
    assert 0 < evaluated < built
