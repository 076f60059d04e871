"""What a task of a build needs does not grow with the build: the files it opens, its rows, its requests at a time."""

from __future__ import annotations

import itertools
import json
import random
import re
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.contract import small
from tests.contract.commands import DEDUP, Bench, commit_words, job_words
from tests.contract.faults import Fault
from tests.pipeline.places import StoppedError
from tests.store.memory import SCHEME, MemoryStore
from tokshard import build_corpus
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


def steps_of(bench: Bench, num_tasks: int, *options: str, jobs: int = 0) -> list[str]:
    """The steps of a build of so many tasks, by one process or by jobs one after another; reads are steps, too."""
    bench.clear()
    source = lines(bench.place / f"{num_tasks}.jsonl", texts(num_tasks))
    words = bench.build_words([source], "--task-bytes", "512", *options)
    alone = [[*words, "--workers", "1"]]
    array = [*[job_words(words, index, jobs) for index in range(jobs)], commit_words(bench.out)]
    ended = [bench.run(each, READS) for each in (array if jobs else alone)]
    assert {done.exit_code for done in ended} == {0}, [done.errors for done in ended]
    return [step for done in ended for step in done.steps]


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
def test_files_opened_in_the_search_for_duplicates_grow_with_the_number_of_tasks_and_no_faster(bench: Bench) -> None:
    """With a fan-in of 4, the largest case takes joins and four levels. No task opens more than 8 files."""
    steps = [steps_of(bench, num_tasks, *DEDUP) for num_tasks in (16, 32, 64)]
    opens = [len(reads(each)) for each in steps]
    assert opens[0] > 16
    for before, after in itertools.pairwise(opens):
        assert after < 2.4 * before, opens
    most = max(len(opened) for opened, _ in between_renames(steps[-1]))
    last_level = 8  # of 320 texts, 32 in a bucket, each bucket dealt to two
    assert 2 <= most <= last_level


def test_a_build_opens_as_many_files_per_task_however_many_tasks_it_has(bench: Bench) -> None:
    few, many = (len(reads(steps_of(bench, num_tasks))) for num_tasks in (16, 64))
    assert many <= 4 * few
    assert few <= 3 * 16 + 10


@pytest.mark.slow
def test_all_jobs_of_an_array_together_read_what_one_process_reads_and_little_for_each(bench: Bench) -> None:
    """Each job judges the stages before the last: it reads all of their receipts, and no other file of other tasks."""
    few, many = (len(reads(steps_of(bench, 32, *DEDUP, jobs=jobs))) for jobs in (2, 8))
    assert many - few < (8 - 2) * 3 * 32, (few, many)


@pytest.mark.slow
def test_the_memory_of_the_search_for_duplicates_does_not_grow_with_the_texts(
    byte_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that held the rows of all hashes would hold four times as many."""
    sizes = {"chunk_bytes": 1 << 14, "part_texts": 512, "copy_deal_bytes": 1 << 14, "hash_rows": 512, "fan_in": 4}
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
    byte_tokenizer: Path, in_memory: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small.shrink(monkeypatch.setattr, chunk_bytes=512)
    source = lines(tmp_path / "a.jsonl", texts(150))
    options = {"tokenizer": byte_tokenizer, "out": f"{in_memory}/out", "task_bytes": 512, "workers": 1}
    with small.stopped_before_the_corpus(StoppedError()), pytest.raises(StoppedError):
        build_corpus([source], **options)
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, BusyStore)
    BusyStore.now = BusyStore.most = 0
    build_corpus([source], **options)
    assert 2 <= BusyStore.most <= 64
