"""What is measured: each figure, on which text, once."""

import importlib.util
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmark.processes import ProcessFailedError, run

GROUPS = ("build", "encode", "hash", "datasets", "memory")
TEXTS = ("code", "prose", "short")

BUILD_1, BUILD_2 = "build, 1 worker", "build, 2 workers"
START_1, START_2 = "start-up, 1 worker", "start-up, 2 workers"
BATCH, PINNED, CALL = "encode_batch, unchanged", "encode_batch, on one CPU", "encoder as tokshard calls it"
HASH = "SHA-256 of the shards"
NAIVE_1, NAIVE_2 = "datasets, 1 process", "datasets, num_proc=2"
SHARDS_1, SHARDS_2 = "build, 1 worker, 8M-token shards", "build, 2 workers, 8M-token shards"

Key = tuple[str, str]
"""(figure, text)"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One figure, once.

    Args:
        processes: how many encoded; fewer than asked for if the text is one task.
        peak_bytes: resident memory of the largest process.
        worker_bytes: of the largest worker, as the build reports it.
    """

    cpu_seconds: float
    wall_seconds: float
    processes: int | None = None
    peak_bytes: int | None = None
    worker_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """A text on disk.

    Args:
        largest_bytes: of the largest document.
        task_bytes: for ``--task-bytes``; None leaves the default.
        tokens: EOS included; this and `shard_bytes` are 0 until it was built once.
    """

    path: Path
    documents: int
    text_bytes: int
    compressed_bytes: int
    largest_bytes: int
    task_bytes: int | None
    tokens: int = 0
    shard_bytes: int = 0


@dataclass(slots=True)
class Bench:
    """What all figures share.

    Args:
        tokenizer: as for ``tokshard build``.
        eos_id, vocab_size: known after the first build.
    """

    scratch: Path
    tokenizer: Path
    texts: dict[str, Text] = field(default_factory=dict)
    eos_id: int = 0
    vocab_size: int = 0

    @property
    def tokenizer_json(self) -> str:
        return str(self.tokenizer / "tokenizer.json" if self.tokenizer.is_dir() else self.tokenizer)

    def build(self, name: str, workers: int, *options: str) -> Measured:
        """``tokshard build`` as a process of its own; the corpus is removed afterwards."""
        text = self.texts[name]
        out = self.scratch / "corpus"
        fixed = ["--tokenizer", str(self.tokenizer), "--out", str(out), "--workers", str(workers), "--quiet"]
        fixed.append("--debug")  # a traceback, should it fail
        task_bytes = ["--task-bytes", str(text.task_bytes)] if text.task_bytes else []
        cost = run(["-m", "tokshard", "build", str(text.path), *fixed, *task_bytes, *options])
        report = json.loads((out / "build-report.json").read_bytes())
        manifest = json.loads((out / "manifest.json").read_bytes())
        shard_bytes = sum(path.stat().st_size for path in out.glob("shard-*.arrow"))
        shutil.rmtree(out)
        if cost.cpu_seconds < 0.95 * report["cpu_seconds"] or cost.peak_bytes < report["peak_worker_bytes"]:
            raise ProcessFailedError(
                f"{name}: {cost.cpu_seconds:.2f} CPU-seconds and {cost.peak_bytes / 1e6:.0f} MB were counted, but the"
                f" build reports {report['cpu_seconds']:.2f} and {report['peak_worker_bytes'] / 1e6:.0f}: some of its"
                " processes are not in the count"
            )
        if manifest["num_documents"] != text.documents:
            raise ProcessFailedError(
                f"{name}: of {text.documents:,} documents {manifest['num_documents']:,} were built"
            )
        self.texts[name] = replace(text, tokens=manifest["num_tokens"], shard_bytes=shard_bytes)
        self.eos_id, self.vocab_size = manifest["tokenizer"]["eos_id"], manifest["tokenizer"]["vocab_size"]
        return Measured(
            cpu_seconds=cost.cpu_seconds,
            wall_seconds=cost.wall_seconds,
            processes=report["workers"],
            peak_bytes=cost.peak_bytes,
            worker_bytes=report["peak_worker_bytes"],
        )

    def encode(self, name: str, way: str) -> Measured:
        """The loop alone; it must give as many tokens as a build of the same text."""
        text = self.texts[name]
        said = run_step("encode", str(text.path), self.tokenizer_json, "--way", way)
        if said["total"] + text.documents != text.tokens:
            raise ProcessFailedError(
                f"{name}: {way} gives {said['total']:,} tokens and {text.documents:,} EOS, a build {text.tokens:,}"
            )
        return Measured(cpu_seconds=said["cpu_seconds"], wall_seconds=said["wall_seconds"])

    def hash(self, name: str) -> Measured:
        said = run_step("hash", str(self.texts[name].shard_bytes))
        return Measured(cpu_seconds=said["cpu_seconds"], wall_seconds=said["wall_seconds"])

    def naive(self, name: str, processes: int) -> Measured:
        """`datasets` as a process of its own, with an empty cache."""
        text = self.texts[name]
        out = self.scratch / "naive"
        step = ["datasets", str(text.path), self.tokenizer_json, str(out)]
        cost = run(
            ["-m", "benchmark.steps", *step, "--processes", str(processes), "--eos-id", str(self.eos_id)],
            {"HF_HOME": str(out / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        )
        shutil.rmtree(out)
        documents = json.loads(cost.stdout)["total"]
        if documents != text.documents:
            raise ProcessFailedError(f"{name}: datasets saved {documents:,} of {text.documents:,} documents")
        return Measured(
            cpu_seconds=cost.cpu_seconds,
            wall_seconds=cost.wall_seconds,
            processes=processes,
            peak_bytes=cost.peak_bytes,
        )


def figures(bench: Bench, groups: set[str]) -> Iterator[tuple[Key, Callable[[], Measured]]]:
    """Everything to measure, in the order of each repetition."""
    if "build" in groups:
        yield (START_1, "tiny"), lambda: bench.build("tiny", 1)
        yield (START_2, "tiny"), lambda: bench.build("tiny", 2)
    for text in TEXTS:
        yield from _of_text(bench, groups, text)
    if "memory" in groups:
        for name in ("quarter", "half"):
            yield from _builds(bench, name)
        yield (SHARDS_1, "code"), lambda: bench.build("code", 1, "--shard-tokens", "8M")
        yield (SHARDS_2, "code"), lambda: bench.build("code", 2, "--shard-tokens", "8M")


def _of_text(bench: Bench, groups: set[str], text: str) -> Iterator[tuple[Key, Callable[[], Measured]]]:
    if "build" in groups or ("memory" in groups and text == "code"):
        yield from _builds(bench, text)
    if "encode" in groups:
        yield (BATCH, text), lambda: bench.encode(text, "batch")
        yield (PINNED, text), lambda: bench.encode(text, "pinned")
        yield (CALL, text), lambda: bench.encode(text, "tokshard")
    if "hash" in groups:
        yield (HASH, text), lambda: bench.hash(text)
    if "datasets" in groups and has_datasets():
        yield (NAIVE_1, text), lambda: bench.naive(text, 1)
        yield (NAIVE_2, text), lambda: bench.naive(text, 2)


def _builds(bench: Bench, text: str) -> Iterator[tuple[Key, Callable[[], Measured]]]:
    yield (BUILD_1, text), lambda: bench.build(text, 1)
    yield (BUILD_2, text), lambda: bench.build(text, 2)


def has_datasets() -> bool:
    return importlib.util.find_spec("datasets") is not None


def run_step(*arguments: str, python: str | None = None) -> dict[str, Any]:
    """One of `benchmark.steps`, and what it printed."""
    said = json.loads(run(["-m", "benchmark.steps", *arguments], python=python).stdout)
    assert isinstance(said, dict)
    return said
