"""Training runs of the 10M model on a tiny vocabulary, on real gloo ranks.

    python -m tests.trainer.runs JOBS.json

JOBS.json holds configurations, which the ranks that were started train one after another.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpora import TINY_TOKENIZER, write_corpus

ROOT = Path(__file__).parents[2]
VOCABULARY = 64


def tokenizer() -> bytes:
    fields = json.loads(TINY_TOKENIZER)
    fields["model"]["vocab"] |= {f"word{index}": index for index in range(4, VOCABULARY)}
    return json.dumps(fields).encode()


def corpora(directory: Path) -> dict[str, str]:
    """Two corpora of Markov chains, which a model can learn: documents of 2 to 89 tokens."""
    paths = {}
    for name, step in (("code", 3), ("prose", 5)):
        rng = np.random.default_rng(step)
        documents = []
        for length in rng.integers(1, 89, 300).tolist():
            ids = 1 + (rng.integers(0, 63) + step * np.arange(length) + (rng.random(length) < 0.1)) % 63
            documents.append([*ids.tolist(), 0])
        paths[name] = str(write_corpus(directory / name, documents, tokenizer=tokenizer()))
    return paths


def configuration(paths: dict[str, str], out: Path, **changes: Any) -> dict[str, Any]:
    """A recipe; ``changes`` are ``section__key=value``."""
    fields: dict[str, Any] = {
        "data": {
            "corpora": paths,
            "weights": {"code": 0.7, "prose": 0.3},
            "seq_len": 32,
            "global_batch_size": 9,  # the fourth of four ranks holds only padding
            "uneven": "pad",
            "seed": 7,
        },
        "model": {"preset": "10M"},
        "parallel": {"device": "cpu"},
        "optimizer": {"lr": 1e-3, "warmup_steps": 4},
        "train": {"out": str(out), "steps": 20},
        "checkpoint": {"every": 10},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        fields[section][name] = value
    return fields


def train_on(world_size: int, jobs: list[dict[str, Any]], directory: Path) -> None:
    """Train configurations one after another on so many processes."""
    path = directory / f"jobs-{world_size}.json"
    path.write_text(json.dumps(jobs))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainer.runs", str(path)],
            cwd=ROOT,
            env={**os.environ, **shared, "RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    try:
        said = [rank.communicate(timeout=250)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(said)


def steps_of(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    from tokshard.trainer.config import resolve
    from tokshard.trainer.loop import train
    from tokshard.trainer.parallel import process_group

    warnings.simplefilter("ignore")
    jobs = json.loads(Path(sys.argv[1]).read_text())
    with process_group("cpu"):
        for job in jobs:
            assert train(resolve(job)) == 0


if __name__ == "__main__":
    main()
