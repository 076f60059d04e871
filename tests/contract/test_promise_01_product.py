"""Promise 1 for the whole product: whoever runs it, whatever it is and asks for, and whether it is killed on the way.

Each cell of the table ends as one process ends that nothing happens to: with the same bytes in every file. By default
a few cells are tried, those of Ray by `make test-ray`, and all with faults of every kind by `make soak`.
"""

from __future__ import annotations

import bz2
import contextlib
import itertools
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract.arrays import Words, run_array
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import State, state
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.examples import examples
from tests.pipeline import foreign
from tests.pipeline.inputs import parquet_bytes, table
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus

pytestmark = pytest.mark.timeout(600)


class Cell(NamedTuple):
    """One case of the product."""

    executor: str
    kind: str
    option: str
    is_killed: bool

    def __str__(self) -> str:
        return f"{self.kind}, {self.option}, {self.executor}{', killed' if self.is_killed else ''}"


EXECUTORS = ("local 1", "local 2", "array of 3", "ray")
KINDS = ("build", "import", "copy", "copy --shuffle")
OPTIONS: dict[str, tuple[str, ...]] = {
    "plain": (),
    "dedup": ("--dedup", "exact"),
    "limit": ("--max-documents", "30"),
    "bad records skipped": ("--on-bad-record", "skip"),
    "damaged source skipped": ("--on-bad-source", "skip"),
    "append": ("--append",),
    "split": ("--validation-fraction", "0.3"),
}
CELLS = [Cell(*cell) for cell in itertools.product(EXECUTORS, KINDS, OPTIONS, (False, True))]

NOT_YET = {
    cell
    for cell in CELLS
    if (cell.kind.startswith("copy") and (cell.executor in ("array of 3", "ray") or cell.option != "plain"))
    or (cell.kind == "import" and cell.option == "dedup")
}
"""A copy has one executor and no option of a build, an import does not look for duplicates."""

HERE = [cell for cell in CELLS if cell.executor != "ray" and cell not in NOT_YET]
ON_RAY = [cell for cell in CELLS if cell.executor == "ray" and cell not in NOT_YET]


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
    for name, lengths in (("a", range(1, 31)), ("b", range(20, 0, -1))):
        write_corpus(place / name, documents_of([*lengths]), tokenizer=TINY_TOKENIZER, shard_tokens=100)
    shutil.copytree(place / "b", place / "broken")
    shard = next((place / "broken").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-9])
    both = [place / "a", place / "b"]
    return {"good": both, "bad": both, "broken": [place / "a", place / "broken", place / "b"], "base": [place / "b"]}


def _divided(place: Path, contents: dict[str, bytes]) -> dict[str, list[Path]]:
    for name, content in contents.items():
        (place / name).write_bytes(content)

    def paths(*without: str) -> list[Path]:
        return [place / name for name in contents if not name.startswith(without)]

    return {
        "good": paths("bad", "broken"),
        "bad": paths("broken"),
        "broken": paths("bad"),
        "base": [place / name for name in contents if name.startswith(("c", "d"))],
    }


WRITERS: dict[str, Callable[[Path], dict[str, list[Path]]]] = {
    "build": write_lines,
    "import": write_tables,
    "copy": write_corpora,
}
READS = {"bad records skipped": "bad", "damaged source skipped": "broken"}
SMALL = {
    "build": ("--task-bytes", "512", "--shard-tokens", "300"),
    "import": ("--task-bytes", "100", "--shard-tokens", "60"),
    "copy": ("--shard-tokens", "60"),
}


@dataclass
class Table:
    """The place of all cells."""

    launcher: Launcher
    place: Path
    tokenizer: Path
    sources: dict[str, dict[str, list[Path]]] = field(default_factory=dict)
    references: dict[tuple[str, str], tuple[State, list[str]]] = field(default_factory=dict)
    ray_address: str = ""

    @property
    def out(self) -> Path:
        return self.place / "out"

    def words(self, kind: str, sources: Sequence[Path], *options: str) -> list[str]:
        """A command, without its workers."""
        command, *shuffle = kind.split()
        words = [command, *map(str, sources), "--out", str(self.out), *SMALL[command], *options]
        if command == "copy":
            return [*words, *(("--shuffle", "7") if shuffle else ())]
        return [*words, "--tokenizer", str(self.tokenizer), "--quiet"]

    def command(self, kind: str, option: str) -> list[str]:
        """The command of a cell; the corpus that it adds to is there before it."""
        found = self._sources(kind)
        sources = found[READS.get(option, "good")]
        if option == "append":
            sources = [path for path in sources if path not in found["base"]]
        return self.words(kind, sources, *OPTIONS[option])

    def begin(self, kind: str, option: str) -> None:
        """The directory as it is before the command."""
        for folder in (self.out, self.launcher.directory):
            shutil.rmtree(folder, ignore_errors=True)
        if option == "append":
            kept = self.place / f"base of {kind}"
            if not kept.exists():
                done = self.run([*self.words(kind, self._sources(kind)["base"]), "--workers", "1"])
                assert done.exit_code == 0, done.errors
                shutil.copytree(self.out, kept)
            else:
                shutil.copytree(kept, self.out)

    def run(self, words: Words, fault: Fault | None = None, *, ray_address: str = "") -> Outcome:
        return self.launcher.start(words, out=self.out, fault=fault, ray_address=ray_address).end()

    def reference(self, kind: str, option: str) -> tuple[State, list[str]]:
        """What one process makes, and its steps."""
        if (kind, option) not in self.references:
            self.begin(kind, option)
            done = self.run([*self.command(kind, option), "--workers", "1"])
            assert done.exit_code == 0, done.errors
            self._check_is_as_asked(kind, option)
            self.references[kind, option] = (state(self.out), done.steps)
        return self.references[kind, option]

    def _sources(self, kind: str) -> dict[str, list[Path]]:
        command, *_ = kind.split()
        if command not in self.sources:
            (self.place / command).mkdir()
            self.sources[command] = WRITERS[command](self.place / command)
        return self.sources[command]

    def _check_is_as_asked(self, kind: str, option: str) -> None:
        """A corpus of several shards, in which the option had something to do."""
        corpora = [self.out / name for name in (names.TRAIN, names.VALIDATION)] if option == "split" else [self.out]
        for corpus in corpora:
            assert verify_corpus(corpus).problems == ()
            assert len([*corpus.rglob("shard-*")]) > 2
        left_out = {
            "dedup": "duplicate",
            "damaged source skipped": "damaged input",
            "bad records skipped": "malformed" if kind == "build" else "id outside the vocabulary",
        }
        manifest = json.loads((corpora[0] / names.MANIFEST).read_bytes())
        assert option not in left_out or manifest["records"]["left_out"][left_out[option]] > 0

    def check(self, cell: Cell, moment: float) -> None:
        """Run a cell, and compare.

        Args:
            moment: in [0, 1), about how far it has come when it is killed.
        """
        reference, steps = self.reference(cell.kind, cell.option)
        self.begin(cell.kind, cell.option)
        command = self.command(cell.kind, cell.option)
        if cell.is_killed:
            at = 1 + int(moment * len(steps) / SHARES[cell.executor])
            self._run(cell.executor, command, Fault(at=at, is_after=bool(at % 2)))
        done = self._run(cell.executor, command)
        assert done.exit_code == 0, f"{cell}: {done.errors}"
        assert state(self.out) == reference, str(cell)

    def _run(self, executor: str, command: list[str], fault: Fault | None = None) -> Outcome:
        """Run a command; the fault happens to its first process, or the second job of an array."""
        if executor.startswith("local"):
            return self.run([*command, "--workers", executor.split()[1]], fault)
        if executor == "ray":
            return self.run([*command, "--ray"], fault, ray_address=self.ray_address)
        faults = iter([None, fault])
        done: Outcome = run_array(
            [*command, "--workers", "1"],
            self.out,
            lambda commands: [self.run(words, next(faults, None)) for words in commands],
        )
        return done


SHARES = {"local 1": 1, "local 2": 1, "array of 3": 2, "ray": 2}
"""About which part of the steps of one process the one makes that is killed."""


@pytest.fixture(scope="module")
def cells(launcher: Launcher, byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Table:
    return Table(launcher, tmp_path_factory.mktemp("table"), byte_tokenizer)


@pytest.mark.slow
@settings(
    max_examples=examples(13),
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(cell=st.sampled_from(HERE), moment=st.floats(0, 1, exclude_max=True))
def test_some_cells_end_as_one_process_does(cells: Table, cell: Cell, moment: float) -> None:
    cells.check(cell, moment)


@contextlib.contextmanager
def cluster_of_two() -> Iterator[str]:
    """The address of two nodes with one CPU each."""
    from ray.cluster_utils import Cluster

    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    nodes.add_node(num_cpus=1)
    yield nodes.address
    nodes.shutdown()


@pytest.fixture(scope="module")
def cluster(cells: Table) -> Iterator[None]:
    with cluster_of_two() as cells.ray_address:
        yield


@pytest.mark.ray
@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("cell", ON_RAY, ids=str)
def test_every_cell_of_ray_ends_as_one_process_does(cells: Table, cell: Cell) -> None:
    cells.check(cell, 0.6)
