"""The tasks that find duplicates: sorted rows on disk, how many files they open, and what a partition may hold."""

from __future__ import annotations

import io
import itertools
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.hashed import leave_hashes
from tests.pipeline.inputs import patch_merges, texts_of
from tests.pipeline.places import TEXTS, build, write
from tokshard import open_corpus
from tokshard.errors import BuildError
from tokshard.format import names
from tokshard.pipeline.executors.base import Ended, Lost
from tokshard.pipeline.executors.processes import ProcessExecutor
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.tasks import duplicates, hashing, running, sorted_rows
from tokshard.pipeline.tasks.duplicates import Drops, Partition, find_duplicates, run_merge
from tokshard.pipeline.tasks.hashing import hash_runs
from tokshard.pipeline.tasks.planning import Run as TaskRun
from tokshard.pipeline.tasks.planning import StepTask
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.tasks.sorted_rows import (
    Run,
    RunWriter,
    merged,
    read_fences,
    read_slice,
    row_ranges,
    run_bytes,
)
from tokshard.pipeline.workspace.places import FIND, HASH
from tokshard.pipeline.workspace.receipts import Receipt, file_path
from tokshard.store import Store, open_store
from tokshard.store.posix import PosixStore

keys = st.lists(st.integers(0, 40), max_size=30)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path)


def write_run(store: Store, name: str, keys: Sequence[int], base: int = 0) -> Run:
    """Rows of these keys, sorted, with what number each has among them."""
    rows = np.array([sorted(keys), range(len(keys))], np.uint64).T
    content = io.BytesIO()
    writer = RunWriter(content, name)
    for part in np.array_split(rows, 3):
        writer.append(part)
    writer.finish()
    store.put(name, content.getvalue())
    return Run(name=name, file_bytes=run_bytes(len(keys), 2), offset=0, count=len(keys), width=2, base=base)


# sorted rows


@given(files=st.lists(keys, min_size=1, max_size=5), fence_rows=st.integers(1, 4), slice_rows=st.integers(1, 9))
def test_merging_gives_all_rows_by_key_and_equal_keys_in_the_order_of_the_files(
    files, fence_rows, slice_rows, tmp_path_factory
):
    store = open_store(tmp_path_factory.mktemp("rows"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "FENCE_ROWS", fence_rows)
        patch.setattr(sorted_rows, "SLICE_ROWS", slice_rows)
        runs = [write_run(store, str(number), keys, 100 * number) for number, keys in enumerate(files)]
        found = np.concatenate(list(merged(store, runs))).tolist()
    expected = [[key, 100 * number + i] for number, keys in enumerate(files) for i, key in enumerate(sorted(keys))]
    assert found == sorted(expected, key=lambda row: row[0])


@given(keys=keys, low=st.integers(0, 41), size=st.integers(0, 41), fence_rows=st.integers(1, 4))
def test_a_range_of_keys_is_read_exactly_and_little_more(keys, low, size, fence_rows, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("rows"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "FENCE_ROWS", fence_rows)
        run = write_run(store, "rows", keys)
        lows = np.array([low, low + size], np.uint64)
        ranges = row_ranges(read_fences(store, [run])[0], run.count, lows)
        found = read_slice(store, [run], ranges[:1], *lows)
    assert found[:, 0].tolist() == [key for key in sorted(keys) if low <= key < low + size]
    start, stop = ranges[0].tolist()
    assert stop - start <= len(found) + 2 * fence_rows


def test_two_hashes_that_share_their_high_half_are_no_duplicates():
    high, low = np.array([7, 7, 3, 7, 7], np.uint64), np.array([1, 2, 1, 1, 2], np.uint64)
    order, is_repeat = hashing.sorted_repeats(high, low)
    assert sorted(order[is_repeat].tolist()) == [3, 4]


def test_a_file_of_another_size_is_damaged_and_one_that_is_gone_is_named(store):
    run = write_run(store, "rows", range(9))
    store.put("rows", b"short")
    with pytest.raises(BuildError, match=r"rows is damaged: it has 5 bytes, expected"):
        read_fences(store, [run])
    store.delete("rows")
    with pytest.raises(BuildError, match=r"rows cannot be read: No such file"):
        read_fences(store, [run])


@given(keys=st.lists(st.integers(0, 40), min_size=1, max_size=20), data=st.data(), fence_rows=st.integers(1, 4))
def test_any_changed_byte_of_sorted_rows_is_reported_with_the_file(keys, data, fence_rows, tmp_path_factory):
    store = open_store(tmp_path_factory.mktemp("rows"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sorted_rows, "FENCE_ROWS", fence_rows)
        run = write_run(store, "rows", keys)
        content = bytearray(store.get("rows"))
        content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
        store.put("rows", bytes(content))
        with pytest.raises(BuildError, match=r"rows is damaged: the (rows|fences) .* do not have their checksum"):
            list(merged(store, [run]))
        store.put("rows", store.get("rows")[:-1])
        with pytest.raises(BuildError, match=r"rows is damaged: it has \d+ bytes"):
            list(merged(store, [run]))


def test_a_file_in_the_place_of_another_is_damaged(store):
    run = write_run(store, "rows", range(9))
    write_run(store, "others", range(9))
    store.put("rows", store.get("others"))
    with pytest.raises(BuildError, match=r"rows is damaged"):
        list(merged(store, [run]))


@pytest.mark.parametrize("place", [1, -3], ids=["a place", "the checksum"])
def test_a_changed_place_of_a_repeated_text_is_reported_with_the_file(store, place):
    hashes = np.array([[5, 1], [5, 1], [5, 1], [7, 2]], np.uint64)
    parts, name = leave_hashes(store, 0, hashes).parts, file_path(HASH, (0, 0))
    assert hashing.read_repeats(store, name, parts).tolist() == [1, 2]
    content = bytearray(store.get(name))
    content[len(content) - 12 + place if place > 0 else place] ^= 1
    store.put(name, bytes(content))
    with pytest.raises(BuildError, match=r"is damaged: the places .* do not have their checksum"):
        hashing.read_repeats(store, name, parts)


# the steps


def hashed(store: Store, num_tasks: int, per_task: int, num_texts: int) -> list[Receipt]:
    """What hashing tasks leave of `per_task` texts each, which are random ones of `num_texts`."""
    rng = np.random.default_rng(num_tasks)
    known = rng.integers(0, 1 << 63, (num_texts, 2)).astype(np.uint64)
    return [
        leave_hashes(store, index, known[rng.choice(num_texts, per_task, replace=False)]) for index in range(num_tasks)
    ]


def merge(store: Store, stage: str, task: StepTask) -> Receipt:
    assert isinstance(task.step, duplicates.Join | Partition)
    return run_merge(store, stage, task.key, task.step)


def search(
    store: Store,
    receipts: Sequence[Receipt],
    run: Callable[[Store, str, StepTask], Receipt] = merge,
    steps: list[list[StepTask]] | None = None,
) -> Drops:
    """Find duplicates; the tasks of each step are added to `steps`."""
    found = find_duplicates(store, receipts)
    try:
        stage, tasks = next(found)
        while True:
            if steps is not None:
                steps.append(list(tasks))
            stage, tasks = found.send([run(store, stage, task) for task in tasks])
    except StopIteration as end:
        drops: Drops = end.value
        return drops


@pytest.fixture
def num_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The name of each file that is opened to be read in part."""
    names: list[str] = []
    read = PosixStore.read

    def counting(store: PosixStore, name: str, ranges: Any, **options: Any) -> Any:
        names.append(name)
        return read(store, name, ranges, **options)

    monkeypatch.setattr(PosixStore, "read", counting)
    return names


@pytest.mark.soak
def test_opens_grow_with_the_number_of_hashes_and_no_faster(tmp_path, monkeypatch, num_reads):
    """With a fan-in of 4, the largest case takes four rounds of joins, so that what does not fit would show."""
    monkeypatch.setattr(duplicates, "FAN_IN", 4)
    monkeypatch.setattr(duplicates, "MAX_DROP_FILES", 2)
    monkeypatch.setattr(sorted_rows, "FENCE_ROWS", 2)
    monkeypatch.setattr(sorted_rows, "SLICE_ROWS", 64)
    opens = []
    for num_tasks in (16, 32, 64, 128, 256, 512):
        num_reads.clear()
        store = open_store(tmp_path / str(num_tasks))
        drops = search(store, hashed(store, num_tasks, 16, 16 * num_tasks))
        for index in range(num_tasks):
            drops.of((index, 0))
        opens.append(len(num_reads))
    for before, after in itertools.pairwise(opens):
        assert after < 2.6 * before, opens
    assert opens[-1] < 60 * opens[0], opens  # 32 times the hashes, and some more rounds; squared it would be 1,024


def test_no_task_opens_more_files_or_holds_more_rows_than_it_may(store, monkeypatch, num_reads):
    """Half of the tasks hold the same few texts, so that the hashes lie anything but evenly."""
    monkeypatch.setattr(duplicates, "FAN_IN", 4)
    monkeypatch.setattr(sorted_rows, "FENCE_ROWS", 2)
    monkeypatch.setattr(sorted_rows, "SLICE_ROWS", 64)
    rows: list[int] = []
    read = sorted_rows.read_slice
    for module in (sorted_rows, duplicates):
        monkeypatch.setattr(module, "read_slice", lambda *a: rows.append(len(found := read(*a))) or found)
    opened = []

    def run(store: Store, stage: str, task: StepTask) -> Receipt:
        num_reads.clear()
        receipt = merge(store, stage, task)
        opened.append(len(set(num_reads)))
        return receipt

    search(store, hashed(store, 40, 16, 24), run)
    assert max(opened) <= 4
    assert max(rows) <= 64 + 4 * 2 + 40  # a slice, its fences, and a text that every task has


def test_every_text_but_the_first_of_its_kind_is_found_at_its_place(store, monkeypatch):
    monkeypatch.setattr(duplicates, "FAN_IN", 4)
    monkeypatch.setattr(duplicates, "MAX_DROP_FILES", 2)
    monkeypatch.setattr(sorted_rows, "FENCE_ROWS", 2)
    monkeypatch.setattr(sorted_rows, "SLICE_ROWS", 16)
    rng = np.random.default_rng(0)
    known = rng.integers(0, 1 << 63, (60, 2)).astype(np.uint64)
    texts = [rng.integers(0, 60, size) for size in (16, 0, 9, 0, 0, 16, 30, 1, 16)]
    drops = search(store, [leave_hashes(store, index, known[chosen]) for index, chosen in enumerate(texts)])
    seen: set[int] = set()
    for index, chosen in enumerate(texts):
        expected = [place for place, text in enumerate(chosen.tolist()) if text in seen or seen.add(text)]
        assert drops.of((index, 0)).places.tolist() == expected


def test_partitions_follow_the_hashes_and_together_cover_all(store, monkeypatch):
    monkeypatch.setattr(sorted_rows, "FENCE_ROWS", 2)
    monkeypatch.setattr(sorted_rows, "SLICE_ROWS", 50)
    steps: list[list[StepTask]] = []
    search(store, hashed(store, 10, 40, 4000), steps=steps)
    merges = [task.step for step in steps for task in step if isinstance(task.step, Partition)]
    assert len(merges) == 9  # of 400 rows, with two more of each of 10 files
    assert (merges[0].low, merges[-1].high) == (0, None)
    assert all(before.high == after.low for before, after in itertools.pairwise(merges))


def test_an_input_that_goes_bad_leaves_the_joins_of_the_others_as_they_are(store, monkeypatch):
    """What a task merges is named by what it reads, so that only what has to be is done again."""
    monkeypatch.setattr(duplicates, "FAN_IN", 4)
    receipts = hashed(store, 16, 8, 64)
    before: list[list[StepTask]] = []
    after: list[list[StepTask]] = []
    search(store, receipts, steps=before)
    search(store, receipts[:-1], steps=after)
    same = [a.made_of == b.made_of for a, b in zip(before[0], after[0], strict=True)]
    assert same == [True, True, True, False]


# in a build


def test_the_hashes_of_a_corpus_are_each_there_once(place, monkeypatch):
    patch_merges(monkeypatch)
    other = write(place / "b.jsonl", TEXTS[5:25])
    once = build(place, out=place / "once", dedup="exact")
    twice = build(place, place / "a.jsonl", other, dedup="exact")
    assert (twice / names.HASHES).read_bytes() == (once / names.HASHES).read_bytes()


def test_a_partition_that_is_done_is_not_done_again(place, stop, monkeypatch):
    patch_merges(monkeypatch)
    texts = [*TEXTS, *TEXTS]
    write(place / "a.jsonl", texts)
    stop(dedup="exact")
    monkeypatch.setattr(running, "run_merge", lambda *_: pytest.fail("it was done"))
    assert texts_of(open_corpus(build(place, dedup="exact"))) == list(dict.fromkeys(texts))


@pytest.mark.parametrize("how", ["gone", "short"])
def test_a_file_of_duplicates_that_is_lost_between_runs_is_made_again(place, stop, monkeypatch, how):
    patch_merges(monkeypatch)
    texts = [*TEXTS, *TEXTS]
    write(place / "a.jsonl", texts)
    stop(dedup="exact")
    found = list((place / "out" / names.WORK).glob("[fj]*/files/*.bin"))  # of the stages find and join
    assert found
    for path in found:
        if how == "gone":
            path.unlink()
        else:
            path.write_bytes(path.read_bytes()[:-1])
    assert texts_of(open_corpus(build(place, dedup="exact"))) == list(dict.fromkeys(texts))


def test_a_task_whose_worker_dies_runs_again_on_another(place):
    """Its step waits on a pipe in the place of a file until it is killed."""
    options = BuildOptions(tokenizer=str(place / "tok"), out=str(place / "out"), dedup="exact", workers=1)
    build = resolve([str(place / "a.jsonl")], options)[0]
    store = build.workspace.store
    build.workspace.run.take_over()
    (receipt,) = hashed(store, 1, 8, 8)
    file = place / "out" / file_path(HASH, receipt.key)
    aside = file.rename(place / "aside")
    os.mkfifo(file)  # whoever opens it waits
    runs = (*hash_runs(file_path(HASH, receipt.key), receipt.parts, 0),) * 2
    step = Partition(runs=runs, ranges=np.array([[0, 8]] * 2), low=0, high=None)
    task = StepTask(key=(0, 0), step=step, made_of="both")
    events = []
    with ProcessExecutor(build, Stage(name=FIND, tasks=[task]), lambda _: None, num_workers=1) as executor:
        executor.submit(TaskRun(task=task))
        (child,) = [child for child in multiprocessing.active_children() if child.name == "tokshard-worker-0"]
        child.kill()
        (lost,) = executor.events()
        assert isinstance(lost, Lost)
        assert executor.has_room()
        file.unlink()
        aside.rename(file)
        executor.submit(TaskRun(task=lost.task))
        while not isinstance(event := next(iter(executor.events())), Ended):
            events.append(event)
    assert "was killed by SIGKILL while it worked on files of this build" in lost.error.problem
    (done,) = events
    assert (done.parts, done.made_of) == ([(8, 0)], "both")
