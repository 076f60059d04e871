"""Jobs of an array: who runs what, what becomes of failures, and which processes may take part.

That their bytes and errors are those of one process is in tests/contract/test_promise_01_jobs.py.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.contract import small
from tests.examples import some
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, patch_merges, texts_of
from tests.pipeline.places import SPLIT, TEXTS, StoppedError, build, files, write
from tests.store.memory import REQUESTS, SCHEME, MemoryStore
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import BadRecordError, BadSourceError, BuildError, SourceError, UsageError
from tokshard.format import names
from tokshard.pipeline import adopt, jobs
from tokshard.pipeline.jobs import JobResult
from tokshard.pipeline.progress import Note, Report, StageStarted
from tokshard.pipeline.status import read_status
from tokshard.pipeline.tasks import running
from tokshard.pipeline.workspace import ownership
from tokshard.pipeline.workspace.lease import running_job
from tokshard.pipeline.workspace.places import WRITE, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import STORES_BY_SCHEME
from tokshard.store.posix import PosixStore

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


def killed_after(number: int) -> Callable[[Report], None]:
    """An observer that ends a job when it has left so many receipts."""
    left = []

    def observe(report: Report) -> None:
        left.extend([report] if isinstance(report, Receipt) else [])
        if len(left) == number:
            raise KeyboardInterrupt

    return observe


def killed(start: Start, number: int, *arguments: Any, **options: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        start(*arguments, observer=killed_after(number), **options)


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


def test_any_job_finishes_what_the_others_left(place, start):
    expected = files(build(place, out=place / "expected", task_bytes=64))
    killed(start, 2, 0, 3)
    killed(start, 1, 2, 3)
    with pytest.raises(BuildError, match="is not complete") as caught:
        commit_corpus(place / "out")
    assert "--job-index 0 --num-jobs 1" in caught.value.hint
    start(1, 3)
    assert not commit_corpus(place / "out").warnings
    assert files(place / "out") == expected


@pytest.mark.parametrize(
    "end", [KeyboardInterrupt(), BadSourceError("gone", hint="fetch it")], ids=["killed", "failed"]
)
def test_a_job_plans_the_tasks_if_the_one_that_began_the_build_did_not(place, start, monkeypatch, end):
    def ends(build: object) -> None:
        raise end

    with monkeypatch.context() as patch:
        patch.setattr(adopt, "plan", ends)
        with pytest.raises(type(end)):
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


def test_a_job_leaves_the_next_tasks_of_a_job_that_runs_to_it(place, start):
    killed(start, 1, 0, 2)
    with running_job(open_workspace(place / "out"), 1, 2):
        first = start(0, 2)
    second = start(1, 2)
    # the other job is taken to be at the first of its tasks
    assert [receipt.key for receipt in second.receipts] == [(0, 1)]
    assert (0, 1) not in [receipt.key for receipt in first.receipts]


def test_a_job_leaves_nothing_to_a_job_of_another_count(place, start):
    killed(start, 1, 0, 2)
    with running_job(open_workspace(place / "out"), 1, 3):
        start(0, 2)
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == TEXTS


def test_a_commit_that_comes_too_early_names_the_first_input_that_is_missing(place, start):
    killed(start, 1, 0, 2, place / "a.jsonl", write(place / "b.jsonl", TEXTS))
    with pytest.raises(BuildError, match=r"tasks are not written, the first of which reads .*/a\.jsonl\n"):
        commit_corpus(place / "out")


def test_a_job_reads_nothing_again_that_is_done(place, start, reads):
    killed(start, 2, 0, 2)
    num_done = len(reads)
    start(1, 2)
    in_all = len(reads)
    assert in_all - num_done < in_all
    start(0, 2)
    commit_corpus(place / "out")
    assert len(reads) == in_all
    assert in_all == len(list((place / "out").glob("shard-*")))


def test_a_job_does_not_run_what_another_has_done_since_it_began(place, start, reads):
    num_tasks = len(start(0, 1, out=place / "one").receipts)
    reads.clear()

    def overtaken(report: Report) -> None:
        if isinstance(report, StageStarted) and not reads:
            start(1, 2)

    start(0, 2, observer=overtaken)
    assert len(reads) == num_tasks > 4


@pytest.mark.parametrize("limit", [1, 5, 12])
def test_jobs_read_little_more_than_a_limit_asks_for(place, start, reads, limit):
    write(place / "a.jsonl", [f"text {number}" for number in range(400)])
    for index in (1, 0):
        start(index, 2, max_documents=limit)
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == [f"text {number}" for number in range(limit)]
    assert len(reads) < 20  # of 134 tasks


def test_duplicates_are_found_by_jobs_and_by_those_that_come_later(place, start, monkeypatch):
    patch_merges(monkeypatch)
    texts = [f"text {number % 10}" for number in range(30)]
    write(place / "a.jsonl", texts)
    expected = files(build(place, out=place / "expected", task_bytes=64, dedup="exact"))
    for number, index in ((1, 0), (3, 1), (7, 0), (2, 1), (5, 0)):
        killed(start, number, index, 2, dedup="exact")
    start(1, 2, dedup="exact")
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == texts[:10]
    assert files(place / "out") == expected


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


@pytest.mark.timeout(60)
def test_a_segment_of_a_stream_that_is_void_is_made_again_by_a_job_that_waits_for_all(place, start):
    """Its later segments hold, and the last one says that the stream has ended."""
    stream = place / "b.jsonl.gz"
    stream.write_bytes(gzip.compress(jsonl([{"text": f"text {number}"} for number in range(40)])))
    sources = [stream, place / "a.jsonl"]  # the first task is of the job that does not run again
    expected = files(build(place, *sources, out=place / "expected", task_bytes=64, dedup="exact"))
    start(0, 2, *sources, dedup="exact")
    hashes = sorted((place / "out" / names.WORK / small.HASHED).glob("0000000-*.bin"))
    assert len(hashes) > 2
    hashes[1].unlink()
    start(1, 2, *sources, dedup="exact")
    commit_corpus(place / "out")
    assert files(place / "out") == expected


@pytest.mark.parametrize("task_bytes", [64, 1 << 20], ids=["divided", "in a group"])
def test_a_text_is_kept_where_the_input_that_had_it_first_goes_after_jobs_have_hashed_it(place, start, task_bytes):
    write(place / "b.jsonl", ["only here", *TEXTS[:5]])

    def lose(report: Report) -> None:
        if isinstance(report, StageStarted) and report.name == WRITE:
            (place / "a.jsonl").unlink(missing_ok=True)

    sources = [place / "a.jsonl", place / "b.jsonl"]
    options = {"dedup": "exact", "on_bad_source": "skip", "task_bytes": task_bytes}
    start(0, 2, *sources, **options, observer=lose)
    start(1, 2, *sources, **options)
    with pytest.raises(BuildError, match="is not complete"):
        commit_corpus(place / "out")  # the duplicates have to be found again
    for index in (1, 0):
        start(index, 2, *sources, **options)
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == ["only here", *TEXTS[:5]]


def test_jobs_end_where_a_divided_input_is_left_out_as_damaged(place, start):
    (place / "b.jsonl.gz").write_bytes(gzip.compress((place / "a.jsonl").read_bytes())[:-9])
    (place / "c.parquet").write_bytes(b"no parquet" * 30)
    write(place / "d.jsonl", ["another"])
    sources = [place / name for name in ("b.jsonl.gz", "a.jsonl", "c.parquet", "d.jsonl")]
    for index in (1, 0):
        start(index, 2, *sources, dedup="exact", on_bad_source="skip")
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == [*TEXTS, "another"]


def test_a_commit_that_ended_between_its_two_manifests_is_made_again(place, start, monkeypatch):
    expected = files(build(place, out=place / "expected", task_bytes=64, **SPLIT))
    start(0, 1, **SPLIT)
    put = PosixStore.put

    def stop(store: PosixStore, name: str, content: bytes) -> None:
        put(store, name, content)
        if name == names.MANIFEST:
            raise StoppedError

    with monkeypatch.context() as patch:
        patch.setattr(PosixStore, "put", stop)
        with pytest.raises(StoppedError):
            commit_corpus(place / "out")
    assert len(list((place / "out").rglob(names.MANIFEST))) == 1
    commit_corpus(place / "out")
    assert files(place / "out") == expected


def test_what_a_commit_left_that_was_killed_while_it_cleaned_up_goes_with_the_next_one(place, start):
    start(0, 1)
    work, kept = place / "out" / names.WORK, place / "kept"
    shutil.copytree(work, kept)
    commit_corpus(place / "out")
    kept.rename(work)
    (work / "build.json").unlink()  # the first to go
    assert not commit_corpus(place / "out").is_new
    assert not work.exists()


def test_a_job_writes_nothing_beside_the_corpus_of_a_commit_that_was_killed_while_it_cleaned_up(place, start):
    start(0, 1)
    work, kept = place / "out" / names.WORK, place / "kept"
    shutil.copytree(work, kept)
    commit_corpus(place / "out")
    expected = files(place / "out")
    kept.rename(work)
    shutil.rmtree(work / WRITE)  # the receipts are among the first to go
    done = start(0, 1)
    assert (done.is_new, done.receipts) == (False, ())
    assert not (work / WRITE).exists()
    commit_corpus(place / "out")
    assert files(place / "out") == expected


# failures


def test_the_commit_judges_what_failed_in_a_job_without_running_it_again(place, start, reads):
    lines = (place / "a.jsonl").read_bytes().split(b"\n")
    lines[20] = b"{"
    (place / "a.jsonl").write_bytes(b"\n".join(lines))
    problems = []
    for index in range(2):
        with contextlib.suppress(BadRecordError) if index else pytest.raises(BadRecordError) as caught:
            start(index, 2)
        problems.append(caught)
    before = len(reads)
    (place / "a.jsonl").unlink()  # nothing of it is wanted
    for _ in range(2):
        with pytest.raises(BadRecordError, match=r"a\.jsonl, line 21: malformed: Input data was truncated") as caught:
            commit_corpus(place / "out")
        assert caught.value.hint.startswith("repair the record, or leave out")
    assert len(reads) == before


def test_a_failure_of_a_job_shows_the_task_until_the_commit_can_count_the_lines_before_it(place, start):
    lines = (place / "a.jsonl").read_bytes().split(b"\n")
    lines[20] = b"{"
    (place / "a.jsonl").write_bytes(b"\n".join(lines))
    problems = []
    for index in (1, 0):
        try:
            start(index, 2)
        except BadRecordError as error:
            problems.append(error.problem)
    (problem,) = problems
    assert re.search(r"a\.jsonl, line \d of the part that task 0-\d reads: malformed: ", problem)
    assert read_status(place / "out").failed == 1


def test_a_task_that_failed_is_tried_again_by_its_job(place, start):
    write(place / "b.jsonl", ["another"] * 5)
    sources = [place / "a.jsonl", place / "b.jsonl"]
    killed(start, 1, 0, 2, *sources)
    content = (place / "b.jsonl").read_bytes()
    found = os.stat(place / "b.jsonl")
    (place / "b.jsonl").unlink()
    for index in range(2):
        with contextlib.suppress(BadSourceError):
            start(index, 2, *sources)
    with pytest.raises(BadSourceError, match=r"b\.jsonl cannot be read: No such file"):
        commit_corpus(place / "out")
    (place / "b.jsonl").write_bytes(content)
    os.utime(place / "b.jsonl", ns=(found.st_atime_ns, found.st_mtime_ns))
    with pytest.raises(BadSourceError):  # it holds until somebody tries again
        commit_corpus(place / "out")
    for index in range(2):
        start(index, 2, *sources)
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == [*TEXTS, *["another"] * 5]


def test_a_milder_policy_leaves_out_what_failed(place, start):
    (place / "a.jsonl").write_bytes(b"{\n" + (place / "a.jsonl").read_bytes())
    for index in (1, 0):
        with contextlib.suppress(BadRecordError):
            start(index, 2)
    with pytest.raises(BadRecordError, match="line 1"):
        commit_corpus(place / "out")
    start(0, 2, on_bad_record="skip")
    commit_corpus(place / "out")
    assert texts_of(open_corpus(place / "out")) == TEXTS
    assert [json.loads(line)["record"] for line in (place / "out" / names.REJECTS).read_text().splitlines()] == [1]


# who may take part

OTHER_VERSION = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda package: "0.0.7" if package == {package!r} else version(package)
"""
IN_THIS_PROCESS = """
import sys
import other_version
from tokshard.cli.main import run
if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
"""
IN_ITS_WORKERS = """
import multiprocessing, sys
if __name__ == "__main__":
    preload = multiprocessing.set_forkserver_preload
    multiprocessing.set_forkserver_preload = lambda names: preload(["other_version", *names])
    from tokshard.cli.main import run
    sys.exit(run(sys.argv[1:]))
"""


@pytest.fixture
def words(place: Path) -> list[str]:
    """A build of several tasks, of the sizes that other processes have."""
    write(place / "a.jsonl", [f"text {number} {'x' * 9_000}" for number in range(400)])
    fixed = ["--tokenizer", str(place / "tok"), "--out", str(place / "out"), "--task-bytes", "1MiB"]
    return ["build", str(place / "a.jsonl"), *fixed]


def tokshard(place: Path, program: str, package: str, *words: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of which a part has another version of a package."""
    (place / "other_version.py").write_text(OTHER_VERSION.format(package=package))
    (place / "program.py").write_text(program)
    paths = [str(Path(__file__).parents[2]), str(place)]
    return subprocess.run(
        [sys.executable, str(place / "program.py"), *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        timeout=60,
    )


@pytest.mark.slow
@some("package", ["tokenizers", "pyarrow"])
def test_jobs_builds_and_commits_with_other_versions_of_packages_are_refused(place, words, package):
    assert run([*words, "--workers", "1", "--quiet", "--job-index", "0", "--num-jobs", "2"]) == 0
    before = {name: found for name, found in files(place / "out").items() if not name.endswith("lock")}
    install = f"install the versions with which the build began, or remove {place / 'out'} and run the jobs again"
    for command, way_out in (
        ([*words, "--workers", "1", "--job-index", "1", "--num-jobs", "2"], install),
        (["commit", str(place / "out")], install),
        ([*words, "--workers", "1"], f"another --out, remove {place / 'out'} to start over"),
    ):
        done = tokshard(place, IN_THIS_PROCESS, package, *command)
        assert done.returncode in (1, 2), done.stderr
        assert f"{package} was " in done.stderr
        assert "0.0.7" in done.stderr
        assert way_out in done.stderr
    assert {name: found for name, found in files(place / "out").items() if not name.endswith("lock")} == before
    commit_corpus(place / "out")


@pytest.mark.slow
def test_a_worker_with_another_version_of_a_package_is_refused(place, words):
    done = tokshard(place, IN_ITS_WORKERS, "pyarrow", *words, "--workers", "2")
    assert done.returncode == 1, done.stderr
    assert "pyarrow was " in done.stderr
    assert "is 0.0.7 here: the bytes could differ" in done.stderr
    assert "hint: install the versions with which the build began" in done.stderr
    assert run([*words, "--workers", "2", "--quiet"]) == 0


@pytest.mark.parametrize("is_gone", [False, True])
def test_a_source_that_changes_after_its_tasks_are_done_is_refused_by_jobs_and_by_the_commit(place, start, is_gone):
    expected = files(build(place, out=place / "expected", task_bytes=64))
    start(0, 2)
    source, before = place / "a.jsonl", os.stat(place / "a.jsonl")
    content = source.read_bytes()
    source.write_bytes(content.replace(b"t", b"T"))
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    for late in (lambda: start(1, 2), lambda: commit_corpus(place / "out")):
        with pytest.raises(
            SourceError, match=r"a\.jsonl was modified since the build began: its version was"
        ) as caught:
            late()
        assert caught.value.hint == f"put the file back, or remove {place / 'out'} and run the jobs again"
    source.write_bytes(content)
    os.utime(source, ns=(before.st_atime_ns, before.st_mtime_ns))
    if is_gone:  # what was read of it is in the shards
        source.unlink()
    start(1, 2)
    commit_corpus(place / "out")
    assert files(place / "out") == expected


def test_a_late_job_lists_a_folder_of_a_bucket_once_to_see_whether_sources_changed(place, start, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    bucket = MemoryStore(f"{SCHEME}://bucket/{place.name}")
    for number in range(20):
        bucket.put(f"{number}.jsonl", jsonl([{"text": f"text {number}"}]))
    start(0, 2, bucket.location, task_bytes=1 << 20)
    REQUESTS.clear()
    start(1, 2, bucket.location, task_bytes=1 << 20)
    assert (REQUESTS["list"], REQUESTS["stat"]) == (1, 0)
    bucket.put("7.jsonl", jsonl([{"text": "another"}]))
    with pytest.raises(SourceError, match=r"7\.jsonl was modified since the build began"):
        commit_corpus(place / "out")


def test_an_import_does_not_depend_on_tokenizers(place, words):
    pq.write_table(pa.table({"tokens": [[5, 0]] * 3}), place / "tokens.parquet")
    command = ["import", str(place / "tokens.parquet"), *words[2:]]
    done = tokshard(place, IN_THIS_PROCESS, "tokenizers", *command, "--job-index", "0", "--num-jobs", "2")
    assert done.returncode == 0, done.stderr
    commit_corpus(place / "out")
    assert len(open_corpus(place / "out")) == 3


def test_what_can_be_read_once_only_is_refused(start, place):
    with pytest.raises(UsageError, match="standard input can be read once only"):
        run_job("-", tokenizer=place / "tok", out=place / "out", num_jobs=2)
    with pytest.raises(UsageError, match="can be read once only"):
        run_job([{"text": "a"}], tokenizer=place / "tok", out=place / "out", num_jobs=2)
    assert not (place / "out").exists()
