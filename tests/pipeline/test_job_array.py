"""Jobs of an array: who runs what, what becomes of failures, and which processes may take part.

Their bytes and errors are compared with those of one process in test_any_order.py and
tests/contract/test_promise_01_product.py.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import shlex
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.examples import some
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, texts_of
from tests.pipeline.places import TEXTS, at, build, files, interrupt, write
from tests.refusals import tokshard
from tests.store.memory import REQUESTS
from tokshard import open_corpus
from tokshard.errors import BadSourceError, BuildError, TokshardError
from tokshard.extras import version_of
from tokshard.format import names
from tokshard.pipeline import adopt, jobs
from tokshard.pipeline.jobs import JobResult
from tokshard.pipeline.progress import Note, Report, StageStarted
from tokshard.pipeline.request import Build, load_request, placed
from tokshard.pipeline.tasks import running
from tokshard.pipeline.tasks.planning import StreamTask
from tokshard.pipeline.tasks.running import Stage
from tokshard.pipeline.workspace import ownership
from tokshard.pipeline.workspace.lease import running_job
from tokshard.pipeline.workspace.places import HASH, WRITE, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import open_store

Start = Callable[..., JobResult]


@pytest.fixture
def start(place: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a job of an array whose tasks have three or four texts each."""
    patch_chunk_bytes(monkeypatch, 64)

    def begin(index: int, count: int, *sources: Path, **options: Any) -> JobResult:
        settings = {"tokenizer": place / "tok", "out": place / "out", "workers": 1, "task_bytes": 64}
        found = [str(source) for source in sources or [place / "a.jsonl"]]
        return run_job(found, job_index=index, num_jobs=count, **{**settings, **options})

    return begin


def killed(start: Start, number: int, *arguments: Any, **options: Any) -> None:
    """A job that ends when it has left so many receipts."""
    with pytest.raises(KeyboardInterrupt):
        start(*arguments, observer=at(Receipt, interrupt, number=number), **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The location of each input whenever a task begins to read it."""
    found: list[str] = []
    original = running.read_span

    def noting(source: Any, *arguments: Any) -> Any:
        found.append(source.location)
        return original(source, *arguments)

    monkeypatch.setattr(running, "read_span", noting)
    return found


# who runs what


def test_a_job_plans_the_tasks_if_the_one_that_began_the_build_did_not(place, start, monkeypatch):
    def fail(build: object) -> None:
        raise BadSourceError("gone", hint="fetch it")

    with monkeypatch.context() as patch:
        patch.setattr(adopt, "plan", fail)
        with pytest.raises(BadSourceError):
            start(0, 2)
    with pytest.raises(BuildError, match="no job has planned its tasks") as caught:
        commit_corpus(place / "out")
    assert "--job-index 0 --num-jobs 1" in caught.value.hint
    start(1, 2)
    commit_corpus(place / "out")
    assert files(place / "out") == files(build(place, out=place / "expected", task_bytes=64))


def test_a_job_that_looks_at_a_directory_while_another_begins_there_is_not_refused(place, start, monkeypatch):
    killed(start, 1, 0, 2)
    answers = iter([False])  # what the other one has written is there a moment later
    monkeypatch.setattr(ownership, "has_request", lambda store: next(answers, True))
    workspace = open_workspace(place / "out")
    ownership.check_directory(workspace, workspace.outputs(is_split=False))


def test_a_job_that_cannot_write_where_another_began_names_the_place(place, start):
    killed(start, 1, 0, 2)
    partial = place / "out" / names.WORK / "partial"  # of another user, say
    shutil.rmtree(partial)
    partial.touch()
    with pytest.raises(BuildError, match=f"cannot write to {place / 'out'}"):
        start(1, 2)


def test_a_job_leaves_the_next_tasks_of_a_job_that_runs_to_it_and_none_to_one_of_another_array(place, start):
    killed(start, 1, 0, 2)
    with running_job(open_workspace(place / "out"), 1, 2):
        first = start(0, 2)
    assert (0, 1) not in [receipt.key for receipt in first.receipts]
    with running_job(open_workspace(place / "out"), 1, 3):
        second = start(0, 2)
    # the other job was taken to be at the first of its tasks
    assert [receipt.key for receipt in second.receipts] == [(0, 1)]


@pytest.mark.parametrize(("dedup", "what"), [("none", "written"), ("exact", "hashed")])
def test_a_commit_that_comes_too_early_says_what_is_missing_and_the_command_for_it(place, start, dedup, what):
    sources = [place / "a.jsonl", write(place / "b.jsonl", TEXTS)]
    expected = files(build(place, *sources, out=place / "expected", task_bytes=64, dedup=dedup))
    killed(start, 1, 0, 2, *sources, dedup=dedup)
    (place / "out").rename(place / "moved")
    with pytest.raises(BuildError, match=rf"tasks are not {what}, the first of which reads .*/a\.jsonl\n") as caught:
        commit_corpus(place / "moved")
    there, _, words = caught.value.hint.removeprefix("any job finishes the tasks of the others: ").partition(" && ")
    with contextlib.chdir(there.removeprefix("cd ")):
        assert tokshard(*shlex.split(words)[1:]).exit_code == 0
    commit_corpus(place / "moved")
    assert files(place / "moved") == expected


def test_a_job_reads_nothing_again_that_is_done_before_it_began_or_since(place, start, reads):
    killed(start, 2, 0, 2)
    start(0, 2, observer=at(StageStarted, lambda _: start(1, 2)))  # it is overtaken
    start(1, 2)
    commit_corpus(place / "out")
    assert len(reads) == len(list((place / "out").glob("shard-*"))) > 4


@pytest.mark.parametrize("limit", [1, 12])
def test_jobs_read_little_more_than_a_limit_asks_for(place, start, reads, limit):
    write(place / "a.jsonl", [f"text {number}" for number in range(400)])
    for index in (1, 0):
        start(index, 2, max_documents=limit)
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == [f"text {number}" for number in range(limit)]
    assert len(reads) < 20  # of 134 tasks


@pytest.mark.timeout(60)  # comparing each stream with all receipts took a quarter of an hour
def test_a_job_finds_what_is_left_of_many_streams_at_once(place, start, monkeypatch):
    start(0, 1)
    workspace = open_workspace(place / "out")
    monkeypatch.setattr(jobs, "receipt_keys", lambda *_: [(index, 0) for index in range(100_000)])
    monkeypatch.setattr(jobs, "read_receipts", lambda _, __, keys: [Receipt(key=keys[0])])
    share = jobs._Share(placed(load_request(workspace), workspace), jobs.Job(index=0, count=2), None)
    streams = [StreamTask(key=(index, 0)) for index in range(100_001)]
    assert share._missing(Stage(name=WRITE, tasks=streams)) == [(100_000, streams[-1])]


@pytest.mark.timeout(60)
def test_a_job_that_has_to_wait_says_for_what(place, start, monkeypatch):
    monkeypatch.setattr(jobs, "_POLL_SECONDS", 0.01)
    killed(start, 1, 0, 2, dedup="exact")
    notes = []
    with ExitStack() as other:
        other.enter_context(running_job(open_workspace(place / "out"), 0, 2))

        def observe(report: Report) -> None:
            if isinstance(report, Note):
                notes.append(report.text)
                other.close()

        start(1, 2, dedup="exact", observer=observe)
    assert notes == ["waiting for 1 task of other jobs; running: job 0"]
    commit_corpus(place / "out")


def test_jobs_append_where_the_commit_before_was_killed_while_it_cleaned_up(place, start):
    work = place / "out" / names.WORK
    for number, text in enumerate("abc"):
        source = write(place / f"{text}.jsonl", [text])
        assert start(0, 1, source, append=number > 0).is_new
        shutil.copytree(work, place / "kept")
        commit_corpus(place / "out")
        (place / "kept").rename(work)
    assert not start(0, 1, source, append=True).is_new
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == [*"abc"]


# who may take part


@contextlib.contextmanager
def another_version(package: str) -> Iterator[None]:
    """This process has another version of a package; workers do not."""
    version = importlib.metadata.version
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "0.0.7" if name == package else version(name))
        version_of.cache_clear()
        yield
    version_of.cache_clear()


@some("package", ["tokenizers", "pyarrow"])
def test_jobs_builds_and_commits_with_other_versions_of_packages_are_refused(place, start, package):
    start(0, 2)
    before, lock = files(place / "out"), f"{names.WORK}/lock"
    install = f"install the versions with which the build began, or remove {place / 'out'} and run the jobs again"
    for late, way_out in (
        (lambda: start(1, 2), install),
        (lambda: commit_corpus(place / "out"), install),
        (lambda: build(place, task_bytes=64), f"another --out, remove {place / 'out'} to start over"),
        # whose worker has the right one
        (
            lambda: build(place, out=place / "new", workers=2, task_bytes=64),
            "install the versions with which the build",
        ),
    ):
        with another_version(package), pytest.raises(TokshardError, match=rf"{package} was .*0\.0\.7") as caught:
            late()
        assert way_out in caught.value.hint
    assert files(place / "out").items() - before.items() <= {(lock, files(place / "out")[lock])}
    commit_corpus(place / "out")


def test_a_late_job_lists_a_folder_of_a_bucket_once_to_see_whether_sources_changed(in_memory, start):
    bucket = open_store(f"{in_memory}/in")
    for number in range(20):
        bucket.put(f"{number}.jsonl", jsonl([{"text": f"text {number}"}]))
    start(0, 2, bucket.location, task_bytes=1 << 20)
    REQUESTS.clear()
    start(1, 2, bucket.location, task_bytes=1 << 20)
    assert (REQUESTS["list"], REQUESTS["stat"]) == (1, 0)


def test_a_job_knows_of_what_stage_a_receipt_is_where_one_runs_again(start, monkeypatch):
    def run_stages(build: Build, _: object, settled: Any) -> None:
        for name in (HASH, WRITE, HASH):
            settled.__self__.runs.observer(StageStarted(build=build, name=name, tasks=(), done=()))
            settled.__self__.runs.observer(Receipt(key=(0, 0), inputs_digest=name))

    monkeypatch.setattr(jobs, "run_stages", run_stages)
    done = start(0, 1)
    assert (len(done.receipts), done.written) == (2, [Receipt(key=(0, 0), inputs_digest=WRITE)])


def test_an_import_does_not_depend_on_tokenizers(place, start):
    pq.write_table(pa.table({"tokens": [[5, 0]] * 3}), place / "tokens.parquet")
    start(0, 2, place / "tokens.parquet", reads="tokens")
    with another_version("tokenizers"):
        start(1, 2, place / "tokens.parquet", reads="tokens")
        commit_corpus(place / "out")
    assert len(open_corpus(place / "out")) == 3
