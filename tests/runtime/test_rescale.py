"""Jobs of real processes that die by SIGKILL and come back as another number of ranks lose no token and double none."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.runtime import rescale
from tests.runtime.sources import ListSource
from tokshard.format.opening import open_corpus
from tokshard.runtime import StreamingLoader

ROOT = Path(__file__).parents[2]
VOCABULARY = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')
STEPS = 24
SEQ_LEN = 16

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),  # even with no_dist=True
]
Row = dict[str, Any]


class Launcher:
    """One process that has imported torch, and forks the ranks of job after job."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.runtime.rescale"],
            cwd=ROOT,
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    def run(self, **job: Any) -> list[int]:
        """The exit codes of all ranks."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job, default=str) + "\n")
        self._process.stdin.flush()
        codes: list[int] = json.loads(self._process.stdout.readline())
        return codes

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def launcher() -> Iterator[Launcher]:
    launcher = Launcher()
    yield launcher
    launcher.close()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """Two corpora of several shards, one of a whole number of samples and one not; only delimiters are equal tokens."""
    rng = random.Random(3)
    lengths = {"prose": [rng.randint(1, 60) for _ in range(30)], "code": [rng.randint(1, 90) for _ in range(11)]}
    lengths["prose"].append(SEQ_LEN - sum(lengths["prose"]) % SEQ_LEN)
    lengths["code"].append(SEQ_LEN + 5 - sum(lengths["code"]) % SEQ_LEN)
    for name, first in (("prose", 1), ("code", 50_000)):
        documents = ListSource(lengths[name], first_token=first).documents()
        write_corpus(tmp_path / name, documents, shard_tokens=300, tokenizer=VOCABULARY)
    (tmp_path / "ledger").mkdir()
    return tmp_path


def logs(directory: Path, name: str) -> str:
    return "\n".join(path.read_text() for path in sorted(directory.glob(f"log-{name}-*")))


def incarnations_of(
    directory: Path, rng: random.Random, launcher: Launcher, num_streams: int = 1
) -> Iterator[dict[str, Any]]:
    """Run until the last step is saved; every incarnation is killed, but the one that gets there.

    With several streams, each incarnation has a batch size of its own, too.
    """
    sizes = rng.sample([1, 2, 3, 4], 4)
    for number in range(60):
        checkpoint = rescale.last_checkpoint(directory)
        step = int(checkpoint.name) if checkpoint else 0
        if step == STEPS:
            return
        world_size = sizes[number % 4]
        job: dict[str, Any] = {
            "kind": "train",
            "directory": directory,
            "name": f"{number:02}",
            "start": step,
            "world_size": world_size,
            "steps": STEPS,
            "prefetch_factor": rng.randint(1, 6),
        }
        if num_streams > 1:
            job |= {"num_streams": num_streams, "global_batch_size": num_streams * rng.choice([1, 2, 3])}
        # four steps or more bring a new checkpoint, and what comes after it is lost
        kill_step = step + rng.randint(4, 7)
        moment = "any" if rng.random() < 0.2 else rng.choice(["received", "computed", "saved"])
        job["kill"] = {"rank": rng.randrange(world_size), "step": kill_step, "moment": moment}
        if moment == "saved":
            kill_step -= kill_step % rescale.SAVE_EVERY
            job["kill"]["step"] = kill_step
        elif moment == "any":
            job["kill"] |= {"moment": "received", "seconds": rng.uniform(0.001, 0.02)}
        codes = launcher.run(**job)
        if kill_step < STEPS and moment != "any":
            assert codes[job["kill"]["rank"]] == -signal.SIGKILL, logs(directory, job["name"])
        # a rank that loses its peers fails in the next collective
        assert -signal.SIGKILL in codes or not any(codes), logs(directory, job["name"])
        yield job


def ledger_of(directory: Path, name: str, rank: int) -> list[dict[str, Any]]:
    """The lines of one rank; a kill may have come before the first, or in the middle of the last."""
    path = directory / "ledger" / f"{name}-{rank}.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def read_ledger(directory: Path, jobs: list[dict[str, Any]]) -> tuple[dict[int, list[Row]], int]:
    """The rows of each step, by sample, that the next incarnation did not read again, and how many it did."""
    steps: dict[int, list[Row]] = {}
    num_lost = 0
    for job, end in zip(jobs, [*(job["start"] for job in jobs[1:]), STEPS], strict=True):
        for rank in range(job["world_size"]):
            head, *entries = ledger_of(directory, job["name"], rank) or [None]
            assert head in (None, {"start": job["start"], "world_size": job["world_size"]})
            for entry in entries:
                if entry["step"] <= end:
                    steps.setdefault(entry["step"], []).extend(entry["rows"])
                else:
                    num_lost += len(entry["rows"])
    # a rank has another part of the batch in each step
    return {step: sorted(rows, key=lambda row: row["sample"]) for step, rows in steps.items()}, num_lost


def undisturbed(directory: Path) -> tuple[dict[int, list[Row]], int]:
    """The rows of each step in one process that never stops, and the digest of all."""
    loader = StreamingLoader(rescale.plan_of(directory), global_batch_size=rescale.GLOBAL_BATCH)
    steps, digest = {}, 0
    for step, batch in enumerate(loader, 1):
        steps[step] = rescale.rows_of(loader, batch)
        digest += int(rescale.digest(batch))
        if step == rescale.CHANGE_STEP:
            loader.set_weights(rescale.CHANGED_WEIGHTS)
        if step == STEPS:
            break
    loader.close()
    return steps, digest


def assert_every_token_once_per_epoch(directory: Path, name: str, rows: list[Row]) -> int:
    """Check the rows of one corpus in order; returns the whole epochs that they cover."""
    with open_corpus(directory / name) as corpus:
        documents = [document.tolist() for document in corpus.documents()]
    for row in rows:
        places = [(document, place) for _, document, start, stop in row["pieces"] for place in range(start, stop)]
        assert row["input_ids"] == [documents[document][place] for document, place in places]
        after = [documents[document][place + 1 :][:1] or [-100] for document, place in places]
        assert row["labels"] == [label for (label,) in after]
    total = sum(map(len, documents))
    epochs = len(rows) * SEQ_LEN // total - 1  # the samples of the window that is under way are read in another order
    assert epochs >= 2
    # the samples that start in an epoch hold its last token and perhaps the first few of the next
    num_samples = -(-epochs * total // SEQ_LEN)
    ranges = [piece for row in rows[:num_samples] for piece in row["pieces"]]
    reads = Counter((document, place) for _, document, start, stop in ranges for place in range(start, stop))
    beyond = num_samples * SEQ_LEN - epochs * total
    assert len(reads) == total
    assert set(reads.values()) <= {epochs, epochs + 1}
    assert sum(count - epochs for count in reads.values()) == beyond
    return epochs


@pytest.mark.parametrize("history", [1, *(pytest.param(number, marks=pytest.mark.soak) for number in (2, 3))])
def test_ranks_killed_at_random_steps_and_rescaled_many_times_read_every_token_once_per_epoch(
    directory: Path, launcher: Launcher, history: int
) -> None:
    jobs = list(incarnations_of(directory, random.Random(history), launcher))
    assert len(jobs) >= 5
    assert {job["world_size"] for job in jobs} == {1, 2, 3, 4}
    steps, num_lost = read_ledger(directory, jobs)
    assert num_lost > 0, "no kill cost any work: this test means nothing"
    # the global batches are those of one process that nothing ever happened to
    expected, digest = undisturbed(directory)
    assert sorted(steps) == list(range(1, STEPS + 1))
    for step in range(1, STEPS + 1):
        assert [row["sample"] for row in steps[step]] == list(range(12 * step - 12, 12 * step))
        assert steps[step] == expected[step]
    # and the ledger proves the epochs by itself
    rows = [row for step in sorted(steps) for row in steps[step]]
    for name in rescale.WEIGHTS:
        assert assert_every_token_once_per_epoch(directory, name, [row for row in rows if row["corpus"] == name])
    # what was computed from the batches is the same, too
    model = torch.zeros(2, dtype=torch.int64)
    dcp.load({"model": model}, checkpoint_id=directory / "checkpoints" / str(STEPS), no_dist=True)
    assert model.tolist() == [digest, STEPS]


@pytest.mark.soak
@pytest.mark.parametrize("num_streams", [2, 4, 64])
def test_ranks_killed_and_rescaled_with_other_batch_sizes_read_the_streams_of_the_plan_on(
    directory: Path, launcher: Launcher, num_streams: int
) -> None:
    jobs = list(incarnations_of(directory, random.Random(num_streams), launcher, num_streams))
    assert len({job["world_size"] for job in jobs}) > 2
    assert len({job["global_batch_size"] for job in jobs}) > 1
    steps, num_lost = read_ledger(directory, jobs)
    assert num_lost > 0, "no kill cost any work: this test means nothing"
    assert sorted(steps) == list(range(1, STEPS + 1))
    # the weights that the last checkpoint knows are those of the whole run
    plan = rescale.plan_of(directory, num_streams)
    assert [corpus.is_dealt for corpus in plan.corpora] == [num_streams < 64, num_streams == 2]
    last = StreamingLoader(plan, global_batch_size=num_streams)
    dcp.load({"loader": last}, checkpoint_id=directory / "checkpoints" / str(STEPS), no_dist=True)
    assert [dict(zip(plan.names, part.weights, strict=True)) for part in last.cursor.segments] == [
        rescale.WEIGHTS,
        rescale.CHANGED_WEIGHTS,
    ]
    start = 0
    for step in range(1, STEPS + 1):
        samples = [row["sample"] for row in steps[step]]
        assert samples == list(range(start, start + len(samples)))
        start += len(samples)
        for row in steps[step]:
            alone = plan.sample(row["sample"], last.cursor)
            assert row["input_ids"] == alone["input_ids"].tolist()
            assert row["labels"] == alone["labels"].tolist()
    assert last.cursor.sample == start


def test_a_checkpoint_of_several_ranks_holds_the_cursor_once(directory: Path, launcher: Launcher) -> None:
    job = {"kind": "train", "directory": directory, "name": "once", "prefetch_factor": 2}
    assert launcher.run(**job, world_size=4, steps=4) == [0] * 4, logs(directory, "once")
    checkpoint = directory / "checkpoints" / "4"
    metadata = dcp.FileSystemReader(checkpoint).read_metadata()
    assert set(metadata.state_dict_metadata) == {"loader.cursor", "model"}
    assert [index.fqn for index in metadata.storage_data].count("loader.cursor") == 1
    files = [path.read_bytes() for path in checkpoint.iterdir() if path.name != ".metadata"]
    assert sum(content.count(b"tokshard_cursor") for content in files) == 1
    # and a plain process of any size goes on from it
    loader = StreamingLoader(rescale.plan_of(directory), global_batch_size=5)
    dcp.load({"loader": loader}, checkpoint_id=checkpoint, no_dist=True)
    assert loader.cursor.sample == 48
    assert next(iter(loader))["sample_index"].tolist() == list(range(48, 53))
    loader.close()


def test_a_job_killed_in_the_middle_of_a_save_goes_on_from_the_one_before(directory: Path, launcher: Launcher) -> None:
    job = {"kind": "train", "directory": directory, "prefetch_factor": 2, "steps": 8}
    # one rank never comes to the save of step 8, in which the others wait for it
    kill = {"rank": 1, "step": 8, "moment": "computed"}
    assert -signal.SIGKILL in launcher.run(**job, name="killed", world_size=3, kill=kill)
    assert rescale.last_checkpoint(directory) == directory / "checkpoints" / "4"
    assert launcher.run(**job, name="resumed", world_size=2) == [0, 0], logs(directory, "resumed")
    lines = [ledger_of(directory, "resumed", rank) for rank in range(2)]
    assert [head["start"] for head, *_ in lines] == [4, 4]
    expected, _ = undisturbed(directory)
    for step in range(5, 9):
        rows = [row for entries in lines for row in entries[step - 4]["rows"]]
        assert sorted(rows, key=lambda row: row["sample"]) == expected[step]


def test_a_device_mesh_gives_its_data_parallel_coordinates_in_row_major_order(
    directory: Path, launcher: Launcher
) -> None:
    codes = launcher.run(kind="meshes", directory=directory, name="meshes", world_size=4)
    assert codes == [0] * 4, logs(directory, "meshes")
    found = [json.loads((directory / f"meshes-{rank}.json").read_text()) for rank in range(4)]
    quarters = [list(range(3 * part, 3 * part + 3)) for part in range(4)]
    halves = [list(range(6 * part, 6 * part + 6)) for part in range(2)]
    for name in ("none", "hsdp", "both dp of three", "flattened"):
        assert [ranks[name] for ranks in found] == quarters, name
    # ranks that differ only in tensor or pipeline parallelism read the same rows
    assert [ranks["dp of dp x tp"] for ranks in found] == [halves[0], halves[0], halves[1], halves[1]]
    assert [ranks["dp of pp x dp"] for ranks in found] == [halves[0], halves[1], halves[0], halves[1]]
    # and the whole mesh, which would give each of them other rows, is refused
    for name, dimension in {"dp x tp": "tp", "pp x dp": "pp", "three": "cp", "tp": "tp"}.items():
        for ranks in found:
            assert f"that differ only in {dimension} must read the same rows" in ranks[name]
