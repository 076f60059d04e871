"""Where the CPU time of one build in one process goes, stage by stage.

    python -m benchmark.stages TEXT... --tokenizer PATH

Functions of the rooms `pipeline` and `format` are wrapped in clocks, so a stage is named by what it calls, and its time
leaves out the stages inside of it. The clocks cost about 2 us a call, which is nothing next to a chunk of 1 MiB.
"""

import argparse
import functools
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmark.report import aligned
from tokshard.format import files, writer
from tokshard.pipeline import build as pipeline
from tokshard.pipeline import commit as committing
from tokshard.pipeline.encode import encoder, maker
from tokshard.pipeline.progress import BuildResult
from tokshard.pipeline.sources import decompress, json_lines
from tokshard.pipeline.tasks import running, writing

STAGES: tuple[tuple[str, Any, str], ...] = (
    ("resolve: options, inputs, tokenizer.json", pipeline, "resolve"),
    ("load the tokenizer", encoder.Encoder, "__init__"),
    ("parse JSON", json_lines.JsonLinesParser, "__call__"),
    ("encode", encoder.Encoder, "__call__"),
    ("join ids, look for special ones", encoder.DocumentEncoder, "__call__"),
    ("look for special text", maker.SpecialText, "mask"),
    ("count", writing._Tally, "add"),
    ("copy into a record batch", writer.ShardWriter, "extend"),
    ("hash and write", files.HashingFile, "write"),
    ("fsync and rename", writer._OpenShard, "publish"),
    ("tables and manifest", committing, "_assemble"),
)
STEPS: tuple[tuple[str, Any, str], ...] = (
    ("decompress", decompress, "_naming"),
    ("cut into chunks of lines", running, "read_stream"),
)
"""Generators, each of whose steps is timed."""
REST = "everything else"


class Clocks:
    """CPU seconds of this thread by stage, each without those of the stages inside."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._inner: list[float] = []

    def timed(self, stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, on the clock of a stage."""

        @functools.wraps(function)
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            self._inner.append(0.0)
            try:
                return function(*arguments, **options)
            finally:
                spent = time.thread_time() - started
                self.seconds[stage] += spent - self._inner.pop()
                if self._inner:
                    self._inner[-1] += spent

        return call

    def timed_steps(self, stage: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """The same generator, each of its steps on the clock of a stage."""

        def steps(*arguments: Any, **options: Any) -> Iterator[Any]:
            step = self.timed(stage, functools.partial(next, function(*arguments, **options), None))
            while (found := step()) is not None:
                yield found

        return steps


def stages_of(text: Path, tokenizer_path: str, out: Path) -> tuple[BuildResult, Counter[str], float]:
    """Build once; returns what was built, CPU seconds by stage, and CPU seconds in all."""
    clocks = Clocks()
    before = [(owner, name, getattr(owner, name)) for _, owner, name in (*STAGES, *STEPS)]
    try:
        for stage, owner, name in STAGES:
            setattr(owner, name, clocks.timed(stage, getattr(owner, name)))
        for stage, owner, name in STEPS:
            setattr(owner, name, clocks.timed_steps(stage, getattr(owner, name)))
        build = clocks.timed(REST, pipeline.build_corpus)
        started = time.thread_time()
        result = build([text], tokenizer=tokenizer_path, out=out, workers=1)
        return result, clocks.seconds, time.thread_time() - started
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def rows(megabytes: float, seconds: Counter[str], total: float) -> Iterator[list[str]]:
    """The table, the dearest stage first."""
    yield ["stage", "CPU s", "CPU-s/GB", "share"]
    for stage, spent in seconds.most_common():
        yield [stage, f"{spent:.3f}", f"{spent / megabytes * 1e3:.2f}", f"{spent / total:.1%}"]
    yield ["all, without the imports", f"{total:.3f}", f"{total / megabytes * 1e3:.2f}", ""]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmark.stages", description=__doc__.splitlines()[0])
    parser.add_argument("texts", nargs="+", type=Path, help="compressed JSON lines, as benchmark.texts writes them")
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--repeats", type=int, default=3, help="builds of each text, of which the cheapest is shown")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokshard-stages-") as scratch:
        for text in arguments.texts:
            found = []
            for _ in range(arguments.repeats):
                found.append(stages_of(text, arguments.tokenizer, Path(scratch) / "out"))
                shutil.rmtree(Path(scratch) / "out")
            result, seconds, total = min(found, key=lambda once: once[2])
            megabytes = result.manifest.text_bytes / 1e6
            sys.stdout.write(f"{text.name}: {megabytes:.0f} MB in {result.manifest.num_documents:,} documents\n")
            sys.stdout.write(aligned([*rows(megabytes, seconds, total)], num_left=1) + "\n\n")


if __name__ == "__main__":
    main()
