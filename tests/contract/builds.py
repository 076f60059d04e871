"""Builds as a user runs them, and what they leave on disk."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import zstandard

from tokshard.cli import main
from tokshard.format import names

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


def run(arguments: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return subprocess.run(arguments, capture_output=True, text=True, timeout=100, check=False, **options)  # type: ignore[call-overload]


def complete(sources: Sequence[str], out: Path, *options: str) -> None:
    """Build to the end, by the same command line in this process: one of its own takes longer to start than to build.

    The workers are processes nevertheless.
    """
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run(_arguments(sources, out, *options))
    assert exit_code == 0, errors.getvalue()


def build(sources: Sequence[str], out: Path, *options: str) -> dict[str, str]:
    """Build to the end, and return what `corpus_hashes` says of the result."""
    complete(sources, out, *options)
    return corpus_hashes(out)


def corpus_hashes(out: Path) -> dict[str, str]:
    """Name to SHA-256 of every file of a finished corpus, but for the report, which is not pure."""
    left = [path for path in out.iterdir() if path.name != names.REPORT]
    assert not [path for path in left if path.is_dir()], left
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(left)}


def visible_shards(out: Path) -> list[Path]:
    """The shards that a reader could see."""
    return sorted(path for path in out.glob("*") if names.is_shard_name(path.name)) if out.exists() else []


def children(pid: int) -> list[int]:
    """Process ids of the worker processes of a build."""
    import psutil

    below = psutil.Process(pid).children(recursive=True)
    servers = {child.pid for child in below if any("forkserver" in part for part in child.cmdline())}
    return [child.pid for child in below if child.ppid() in servers]


def start(arguments: Sequence[str]) -> subprocess.Popen[str]:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True, env=os.environ
    )
