"""The table of promise 1: what is run, with which option, by whom; and the few kilobytes that it reads."""

from __future__ import annotations

import bz2
import itertools
import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from tests.contract.commands import DEDUP, Bench, Command, corpora, state
from tests.contract.faults import Fault
from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tests.pipeline import foreign
from tests.pipeline.inputs import parquet_bytes, table
from tokshard.format import names
from tokshard.format.opening import open_corpus, read_manifest
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.store import open_store


class Cell(NamedTuple):
    """One case of the product."""

    executor: str
    kind: str
    option: str
    is_killed: bool

    def __str__(self) -> str:
        return f"{self.kind}, {self.option}, {self.executor}{', killed' if self.is_killed else ''}"


LOCAL = ("local 1", "local 2", "array of 3")
EXECUTORS = (*LOCAL, "ray")
KINDS = ("build", "import", "copy", "copy --shuffle", "select")
WITH_SHARDS = KINDS[:-1]
"""A view has none."""

SHUFFLE = ("--shuffle", "7")
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dedup": DEDUP,
    "limit": ("--max-documents", "30"),
    "bad records skipped": ("--on-bad-record", "skip"),
    "damaged source skipped": ("--on-bad-source", "skip"),
    "append": ("--append",),
    "split": ("--validation-fraction", "0.3"),
    "cells": ("--by", "topic"),
}
NO_SUCH_OPTION = {
    ("copy", "bad records skipped"),  # it reads no records
    ("copy --shuffle", "bad records skipped"),
    *((kind, "cells") for kind in KINDS if kind != "select"),
    *(("select", option) for option in OPTIONS if option not in {"plain", "cells"}),
}
"""What a command does not have."""

OPTIONS_OF = {kind: [option for option in OPTIONS if (kind, option) not in NO_SUCH_OPTION] for kind in KINDS}
CELLS = [
    Cell(executor, kind, option, is_killed)
    for executor, kind, is_killed in itertools.product(EXECUTORS, KINDS, (False, True))
    for option in OPTIONS_OF[kind]
]
TOGETHER = "together"
"""All at once that leaves something out, and a split."""


# the sources of each kind


def write_lines(place: Path) -> dict[str, list[Path]]:
    """The sources of builds: some are cut, some texts are equal."""

    def line(text: str) -> bytes:
        return json.dumps({"text": text}).encode().ljust(99) + b"\n"

    texts = [f"text {number * number % 29}" for number in range(30)]
    contents = {
        "a.jsonl": b"".join(map(line, texts)),
        "b.jsonl.bz2": b"".join(bz2.compress(line(f"stream {text}")) for text in texts),
        "bad.jsonl": b"".join(line(text) if number % 3 else b"{\n" for number, text in enumerate(texts)),
        "broken.jsonl.bz2": b"".join(bz2.compress(line(text)) for text in texts)[:-3],
        "c.jsonl": b"".join(map(line, texts[:4])),
        "d.jsonl": line("last"),
    }
    return _divided(place, contents)


def write_tables(place: Path) -> dict[str, list[Path]]:
    """The sources of imports: tables and files of ids, some of which are cut."""

    def rows(lengths: Sequence[int], token: int) -> bytes:
        found = [{"tokens": [token + number % 50] * length + [0]} for number, length in enumerate(lengths)]
        return parquet_bytes(table(found), 6)

    lengths = [1 + 7 * number % 11 for number in range(30)]
    contents = {
        "a.parquet": rows(lengths, 1),
        "b.parquet": rows(lengths, 60),
        "bad.parquet": rows(lengths, 240),  # of which some are beyond the vocabulary
        "broken.parquet": rows(lengths, 1)[:-3],
        "c.parquet": rows(lengths[:4], 90),
        "d.parquet": rows([3], 7),
    }
    found = _divided(place, contents)
    foreign.megatron(place / "e", [[9] * length + [0] for length in lengths])
    return {what: [*paths, place / "e"] for what, paths in found.items()}


def write_corpora(place: Path) -> dict[str, list[Path]]:
    """What is copied."""
    for name, lengths in (("a", range(1, 31)), ("b", range(20, 0, -1)), ("broken", range(31, 51))):
        write_corpus(place / name, documents_of([*lengths]), tokenizer=TINY_TOKENIZER, shard_tokens=100)
    shard = next((place / "broken").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-9])
    both = [place / "a", place / "b"]
    broken = [place / "a", place / "broken", place / "b"]
    return {"good": both, "broken": broken, "all": broken, "base": [place / "b"]}


def write_bases(place: Path) -> dict[str, list[Path]]:
    """What views are made of."""
    source = Source(documents=documents_of([*range(1, 41)]), metadata={"topic": [f"t{n % 3}" for n in range(40)]})
    options = {"columns": {"topic": "string"}, "tokenizer": TINY_TOKENIZER, "shard_tokens": 100}
    write_corpus(place / "a", sources=[source], **options)
    return {"good": [place / "a"], "all": [place / "a"]}


def _divided(place: Path, contents: dict[str, bytes]) -> dict[str, list[Path]]:
    for name, content in contents.items():
        (place / name).write_bytes(content)

    def paths(*without: str) -> list[Path]:
        return [place / name for name in contents if not name.startswith(without)]

    base = [place / name for name in contents if name.startswith(("c", "d"))]
    return {
        "good": paths("bad", "broken"),
        "bad": paths("broken"),
        "broken": paths("bad"),
        "all": paths(),
        "base": base,
    }


WRITERS: dict[str, Callable[[Path], dict[str, list[Path]]]] = {
    "build": write_lines,
    "import": write_tables,
    "copy": write_corpora,
    "select": write_bases,
}
READS = {"bad records skipped": "bad", "damaged source skipped": "broken", TOGETHER: "all"}
SMALL = {
    "build": ("--task-bytes", "512", "--shard-tokens", "300"),
    "import": ("--task-bytes", "100", "--shard-tokens", "60"),
    "copy": ("--shard-tokens", "60"),
    "select": ("--where", "topic!=t1"),
}
SHARES = {"local 1": 1, "local 2": 1, "array of 3": 2, "ray": 2}
"""About which part of the steps of one process the one makes to which something happens."""

ACTS: dict[str, set[int]] = {
    "kill": {-9},
    "orphan": {-9},
    "die": {-9, 1},
    "error": {1},
    "full": {1},
    "SIGINT": {130},
    "SIGTERM": {143},
    "clock": set(),
    "hold": set(),
    "change": {1},
}
"""What may happen to a command, and with which exit code it ends then, if it does not end well."""


@dataclass
class Table(Bench):
    """The place of all cells."""

    _sources: dict[str, dict[str, list[Path]]] = field(default_factory=dict)

    def sources(self, kind: str) -> dict[str, list[Path]]:
        command, *_ = kind.split()
        if command not in self._sources:
            (self.place / command).mkdir(parents=True)
            self._sources[command] = WRITERS[command](self.place / command)
        return self._sources[command]

    def words(self, kind: str, sources: Sequence[Path], *options: str) -> tuple[str, ...]:
        """A command of a kind."""
        command, *shuffle = kind.split()
        small = (*SMALL[command], *options)
        if command in {"copy", "select"}:
            return (command, *map(str, sources), "--out", str(self.out), *small, *(SHUFFLE if shuffle else ()))
        return (command, *self.build_words(sources, *small)[1:])

    def command(self, kind: str, option: str, *more: str) -> Command:
        """A row of the table."""
        found = self.sources(kind)
        sources = found[READS.get(option, "good")]
        if option == "append":
            sources = [path for path in sources if path not in found["base"]]
            return Command(self.words(kind, sources, "--append", *more), self.words(kind, found["base"], *more))
        parts = [each for each in OPTIONS_OF[kind] if each not in ("limit", "append")]
        options = [word for each in (parts if option == TOGETHER else [option]) for word in OPTIONS[each]]
        return Command(self.words(kind, sources, *options, *more))

    def check_is_as_asked(self, kind: str, option: str) -> None:
        """What one process made are corpora of several shards, in which the option had something to do."""
        found = corpora(self.out)
        assert len(found) == (2 if option == "split" else 1)
        for corpus in found:
            assert verify_corpus(corpus).problems == ()
            assert len([*corpus.rglob("shard-*")]) > 2 or kind == "select"
        reasons = {
            "dedup": "duplicate",
            "damaged source skipped": "damaged input",
            "bad records skipped": "malformed" if kind == "build" else "id outside the vocabulary",
        }
        left_out = read_manifest(open_store(found[0])).records.left_out
        assert option not in reasons or left_out[reasons[option]] > 0

    def check_cell(self, cell: Cell, moment: float) -> None:
        """Run a cell, and compare.

        Args:
            moment: in [0, 1), about how far it has come when it is killed.
        """
        command = self.command(cell.kind, cell.option)
        steps = self.steps(command)
        self.begin(command)
        if cell.is_killed:
            at = 1 + int(moment * len(steps) / SHARES[cell.executor])
            self.run_by(cell.executor, command.words, Fault(at=at, is_after=bool(at % 2)))
        self.check(command, cell, cell.executor)
        if cell.executor == "local 1" and not cell.is_killed:
            self.check_is_as_asked(cell.kind, cell.option)

    def happen(self, command: Command, executor: str, act: str, moment: float, victim: int = 1) -> str:
        """Let something happen to a command; in a few words, how it ended."""
        at = 1 + int(moment * len(self.steps(command)) / SHARES[executor])
        with self._changing(command, at, is_asked_for=act == "change") as shell:
            fault = Fault(
                at=at,
                act="run" if act == "change" else act,
                is_after=bool(at % 2) and act != "error",
                command=shell,
                jumps=(-1e9, 3_600.0, 1e9)[at % 3],
                lingers=0.2 * (act == "hold"),
                outlives=0.5 * (executor == "local 2"),
            )
            outcome = self.run_by(executor, command.words, fault, victim=victim)
        what = f"{act} at {at} of {executor}: {outcome.exit_code} {outcome.errors}"
        assert "internal: " not in outcome.errors, what
        assert "Traceback" not in outcome.errors or act in ("kill", "orphan", "die"), what
        if executor.startswith("local"):
            assert outcome.exit_code in {0, *ACTS[act]}, what
        if outcome.exit_code in (1, 2):
            assert "error: " in outcome.errors, what
            assert "hint: " in outcome.errors, what
        if act in ("error", "full") and outcome.exit_code == 1 and executor.startswith("local"):
            assert "error: cannot write to " in outcome.errors, what
        return what

    @contextmanager
    def _changing(self, command: Command, seed: int, *, is_asked_for: bool) -> Iterator[str]:
        """A command of the shell that changes a source, which is put back in the end."""
        if not is_asked_for:
            yield ""
            return
        found = [Path(word) for word in command.words if (self.place / command.words[0]) in Path(word).parents]
        files = sorted(file for path in found for file in [path, *path.glob("shard-*")] if file.is_file())
        path = random.Random(seed).choice(files)
        kept = self.place / "kept"
        shutil.copy2(path, kept)
        try:
            yield f"printf x >> '{path}'"
        finally:
            shutil.copy2(kept, path)

    def check_base(self, command: Command) -> None:
        """The corpus that is added to is there, whole, at any moment."""
        kept = self._bases.get(command.base, self.place / "nothing")
        now = state(self.out) if self.out.exists() else {}
        assert not kept.exists() or state(kept).items() <= now.items()
        for corpus in corpora(kept):
            location = self.out / corpus.relative_to(kept)
            with open_corpus(location, generation=0) as found, open_corpus(corpus) as expected:
                assert found.fingerprint == expected.fingerprint
            allowed = f"{names.generation_folder(1)}/{names.MANIFEST}"
            assert {problem.file for problem in verify_corpus(location).problems} <= {allowed}
