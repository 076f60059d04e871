"""Builds of real size as a user runs them, with the tokenizer of the quickstart."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import zstandard

from tests.refusals import tokshard
from tokshard import select_corpus

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tokenizer"
WORDS = ["stream", "token", "shard", "Größe", "résumé", "数据", "def f(x):", "\n", "    return x", "é", "🙂", "1234"]


def text(rng: random.Random, words: int) -> str:
    """Text of mixed scripts, the same for the same state of `rng`."""
    return " ".join(rng.choice(WORDS) for _ in range(words))


def write_sources(directory: Path, *, documents: int, words: int = 60, seed: int = 1) -> list[str]:
    """A plain, a zstd and a small JSON lines file."""
    directory.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    paths = []
    for name, count in (("a.jsonl", documents), ("b.jsonl.zst", documents), ("c.jsonl", 50)):
        lines = "".join(
            json.dumps({"text": text(rng, rng.randint(1, 2 * words)), "n": number}, ensure_ascii=number % 2 == 0) + "\n"
            for number in range(count)
        ).encode()
        path = directory / name
        path.write_bytes(zstandard.compress(lines) if name.endswith(".zst") else lines)
        paths.append(str(path))
    return paths


def command(sources: Sequence[str], out: Path, *options: str) -> list[str]:
    """The command line of a build as a process of its own, which can be killed."""
    return [sys.executable, "-m", "tokshard", *_arguments(sources, out, *options)]


def _arguments(sources: Sequence[str], out: Path, *options: str) -> list[str]:
    """Small tasks and shards, so that little data makes many."""
    fixed = ["--tokenizer", str(TOKENIZER), "--task-bytes", "1MiB", "--shard-tokens", "100K", "--quiet"]
    return ["build", *sources, "--out", str(out), *fixed, *options]


def complete(sources: Sequence[str], out: Path, *options: str) -> None:
    """Build to the end, by the same command line in this process: one of its own takes longer to start than to build.

    The workers are processes nevertheless.
    """
    said = tokshard(*_arguments(sources, out, *options))
    assert said.exit_code == 0, said.errors


def select(corpus: Path, out: Path, numbers: list[int], **options: Any) -> Path:
    """Make a view of the documents with some numbers."""
    listed = out.with_suffix(".jsonl")
    listed.write_text("".join(f'{{"document": {number}}}\n' for number in numbers))
    select_corpus(corpus, out=out, keep_ids=listed, workers=1, **options)
    return out
