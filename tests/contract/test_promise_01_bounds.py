"""What a task of a build needs does not grow with the build: the files it opens, its rows, its requests at a time."""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract import small
from tests.contract.arrays import Words, run_array
from tests.contract.faults import Fault, Launcher, Outcome
from tests.contract.outcomes import build_words
from tests.examples import examples
from tests.pipeline.inputs import texts_of
from tests.pipeline.places import StoppedError
from tests.store.memory import SCHEME, MemoryStore
from tokshard import build_corpus, open_corpus
from tokshard.format import names
from tokshard.store import STORES_BY_SCHEME

pytestmark = pytest.mark.timeout(300)

READS = Fault(reads=True)
TEXTS_PER_TASK = 5


def lines(path: Path, texts: Sequence[str]) -> Path:
    """Lines of 100 bytes, five of which are a task."""
    path.write_bytes(b"".join(json.dumps({"text": text}).encode().ljust(99) + b"\n" for text in texts))
    return path


def texts(num_tasks: int) -> list[str]:
    """Texts that come twice, more or less, anywhere."""
    rng = random.Random(num_tasks)
    return [f"text {rng.randrange(TEXTS_PER_TASK * num_tasks // 2)}" for _ in range(TEXTS_PER_TASK * num_tasks)]


Run = Callable[..., Outcome]


@pytest.fixture
def run(launcher: Launcher, byte_tokenizer: Path, tmp_path: Path) -> Run:
    """Runs a build of so many tasks, all of whose reads are steps."""

    def build(num_tasks: int, *options: str, run_all: Callable[..., Outcome] | None = None) -> Outcome:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        source = lines(tmp_path / f"{num_tasks}.jsonl", texts(num_tasks))
        words = build_words(
            [source], tmp_path / "out", byte_tokenizer, "--task-bytes", "512", "--workers", "1", *options
        )
        if run_all is not None:
            return run_all(words)
        done = launcher.start(words, out=tmp_path / "out", fault=READS).end()
        assert done.exit_code == 0, done.errors
        return done

    return build


def reads(steps: Sequence[str]) -> list[str]:
    """The files of the unfinished build that were opened to be read."""
    return [step for step in steps if step.startswith("read ") and f"/{names.WORK}/" in step]


def between_renames(steps: Sequence[str]) -> Iterator[tuple[set[str], str]]:
    """Of every file that was put in its place, which were read since the one before, but for receipts."""
    opened: set[str] = set()
    for step in steps:
        if step.startswith("replace "):
            yield opened, step
            opened = set()
        elif reads([step]) and not re.search(small.RECEIPT, step):
            opened.add(step)


@pytest.mark.slow
def test_files_opened_in_the_search_for_duplicates_grow_with_the_number_of_tasks_and_no_faster(run: Run) -> None:
    """With a fan-in of 4, the largest case takes three rounds of joins."""
    opens = [len(reads(run(num_tasks, "--dedup", "exact").steps)) for num_tasks in (16, 32, 64)]
    assert opens[0] > 16
    for before, after in itertools.pairwise(opens):
        assert after < 2.4 * before, opens


def test_no_task_opens_more_files_than_the_fan_in(run: Run) -> None:
    steps = run(64, "--dedup", "exact").steps
    most = max(len(opened) for opened, _ in between_renames(steps))
    assert 2 <= most <= small.TINY["fan_in"] + 1  # and the settings or the inputs, where a process begins


def test_a_build_opens_as_many_files_per_task_however_many_tasks_it_has(run: Run) -> None:
    few, many = (len(reads(run(num_tasks).steps)) for num_tasks in (16, 64))
    assert many <= 4 * few
    assert few <= 3 * 16 + 10


@pytest.mark.slow
def test_all_jobs_of_an_array_together_read_what_one_process_reads_and_little_for_each(
    launcher: Launcher, run: Run, tmp_path: Path
) -> None:
    """Each job judges the stages before the last: it reads all of their receipts, and no other file of other tasks."""

    def opens(jobs: int) -> int:
        steps: list[str] = []

        def run_all(commands: Sequence[Words]) -> list[Outcome]:
            ended = [launcher.start(words, out=tmp_path / "out", fault=READS).end() for words in commands]
            assert {done.exit_code for done in ended} == {0}, [done.errors for done in ended]
            for done in ended:
                steps.extend(done.steps)
            return ended

        run(32, "--dedup", "exact", run_all=lambda words: run_array(words, tmp_path / "out", run_all, jobs=jobs))
        return len(reads(steps))

    few, many = opens(2), opens(8)
    assert many - few < (8 - 2) * 3 * 32, (few, many)


@pytest.mark.slow
def test_the_memory_of_the_search_for_duplicates_does_not_grow_with_the_texts(
    byte_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that held the rows of all hashes would hold four times as many."""
    sizes = {"chunk_bytes": 1 << 14, "part_texts": 512, "fence_rows": 16, "slice_rows": 512, "fan_in": 4}
    small.shrink(monkeypatch.setattr, **sizes, batch_tokens=4_096)
    peaks = []
    for num_texts in (100, 2_000, 8_000):  # the first imports what the others need
        rng = random.Random(num_texts)
        source = lines(tmp_path / f"{num_texts}.jsonl", [f"text {rng.randrange(num_texts)}" for _ in range(num_texts)])
        options = {
            "tokenizer": byte_tokenizer,
            "out": tmp_path / f"out-{num_texts}",
            "task_bytes": 1 << 16,
            "workers": 1,
        }
        tracemalloc.start()
        build_corpus([source], dedup="exact", **options)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.6 * peaks[1], peaks


@settings(max_examples=examples(10))
@given(
    found=st.lists(st.sampled_from("aaaabbcdefghijklmnopqrstuvwxyz"), min_size=10, max_size=80),
    slice_rows=st.sampled_from([4, 6, 32]),
)
def test_texts_that_most_tasks_have_are_found_wherever_the_search_is_cut(
    byte_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory, found: list[str], slice_rows: int
) -> None:
    place = tmp_path_factory.mktemp("place")
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, **{**small.MERGES, "slice_rows": slice_rows, "fan_in": 3}, chunk_bytes=200)
        options = {"tokenizer": byte_tokenizer, "out": place / "out", "task_bytes": 200, "workers": 1}
        build_corpus([lines(place / "a.jsonl", found)], dedup="exact", **options)
    with open_corpus(place / "out") as corpus:
        assert texts_of(corpus) == list(dict.fromkeys(found))


# buckets


class BusyStore(MemoryStore):
    """A store that takes its time to answer, and counts how many requests it answers at once."""

    lock = threading.Lock()
    now = most = 0

    def get(self, name: str) -> bytes:
        with self.lock:
            BusyStore.now += 1
            BusyStore.most = max(self.most, self.now)
        try:
            time.sleep(0.005)
            return super().get(name)
        finally:
            with self.lock:
                BusyStore.now -= 1


def test_receipts_in_a_bucket_are_asked_for_several_at_a_time_and_not_all_at_once(
    byte_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.shrink(monkeypatch.setattr, chunk_bytes=512)
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    source = lines(tmp_path / "a.jsonl", texts(150))
    out = f"{SCHEME}:/{tmp_path}/out"
    options = {"tokenizer": byte_tokenizer, "out": out, "task_bytes": 512, "workers": 1}
    with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
        build_corpus([source], **options)
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, BusyStore)
    BusyStore.now = BusyStore.most = 0
    build_corpus([source], **options)
    assert 2 <= BusyStore.most <= 64
