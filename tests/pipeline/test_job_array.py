"""Jobs of an array: what each of them reads. Their bytes and errors are in tests/contract/test_promise_01_jobs.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import patch_chunk_bytes, patch_merges, texts_of
from tests.pipeline.places import build, files, write
from tokshard import open_corpus
from tokshard.errors import BuildError
from tokshard.format import names
from tokshard.pipeline.tasks import saved_drops
from tokshard.pipeline.workspace import receipts
from tokshard.pipeline.workspace.places import DROPS
from tokshard.store.posix import PosixStore

DEDUP = {"dedup": "exact", "task_bytes": 64, "workers": 1}


def texts_that_repeat(number: int) -> list[str]:
    """Every text comes three times, far from each other."""
    return [f"text {index % (number // 3)}" for index in range(number)]


def job(place: Path, index: int, num_jobs: int, stage: str) -> None:
    run_job(
        place / "a.jsonl",
        job_index=index,
        num_jobs=num_jobs,
        stage=stage,
        tokenizer=place / "tok",
        out=place / "out",
        **DEDUP,
    )


def until_the_duplicates_are_found(place: Path) -> None:
    job(place, 0, 1, "hash")
    job(place, 0, 1, "duplicates")


@pytest.fixture
def read_files(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The names of the files of an unfinished build that are read, but for those that say what the build is."""
    found: set[str] = set()

    def noting(function: Callable[..., Any]) -> Callable[..., Any]:
        def noted(store: PosixStore, name: str, *arguments: Any, **options: Any) -> Any:
            if name.count("/") > 1 or name == DROPS:
                found.add(name)
            return function(store, name, *arguments, **options)

        return noted

    for place, name in ((PosixStore, "read"), (PosixStore, "get"), (receipts, "map_file"), (saved_drops, "map_file")):
        monkeypatch.setattr(place, name, noting(getattr(place, name)))
    return found


@pytest.mark.parametrize("number", [30, 60])
def test_a_job_that_writes_reads_the_receipts_of_its_own_tasks_alone(place, monkeypatch, read_files, number):
    patch_chunk_bytes(monkeypatch, 64)
    patch_merges(monkeypatch)
    write(place / "a.jsonl", texts_that_repeat(number))
    until_the_duplicates_are_found(place)
    hashed = sorted((place / "out" / names.WORK / "hashing" / "receipts").iterdir())
    assert len(hashed) > number // 6
    read_files.clear()
    job(place, 3, len(hashed), "write")
    read = {name for name in read_files if not name.startswith(f"{names.WORK}/jobs/")}
    assert {name for name in read if "/receipts/" in name} == {f"{names.WORK}/hashing/receipts/{hashed[3].name}"}
    # and the file of its hashes, if texts repeat within the task, and those of the duplicates, here merged to one
    assert DROPS in read
    assert len(read) <= 4


def test_what_jobs_write_by_the_saved_duplicates_is_what_one_process_writes(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    patch_merges(monkeypatch)
    texts = texts_that_repeat(30)
    write(place / "a.jsonl", texts)
    until_the_duplicates_are_found(place)
    for index in range(3):
        job(place, index, 3, "write")
    commit_corpus(place / "out", workers=1)
    assert texts_of(open_corpus(place / "out")) == texts[:10]
    found = files(place / "out")
    build(place, **DEDUP, force=True)
    assert files(place / "out") == found


@pytest.mark.parametrize("content", [b"", b"no table"])
def test_a_list_of_duplicates_that_is_damaged_is_named_and_made_again(place, content):
    until_the_duplicates_are_found(place)
    (place / "out" / DROPS).write_bytes(content)
    with pytest.raises(BuildError, match=r"drops\.arrow is damaged"):
        job(place, 0, 1, "write")
    job(place, 0, 1, "duplicates")
    job(place, 0, 1, "write")


def test_duplicates_that_were_looked_for_among_other_inputs_are_looked_for_again(place, monkeypatch):
    """An input that is left out later may have had the first of some texts."""
    until_the_duplicates_are_found(place)
    (place / "out" / names.WORK / "bad-inputs.json").write_bytes(b'{"0": "is gone"}')
    with pytest.raises(BuildError, match=r"the duplicates among its texts have not been found yet"):
        job(place, 0, 1, "write")
