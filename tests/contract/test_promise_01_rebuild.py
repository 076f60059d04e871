"""Promise 1: the same input and configuration give the same shards and manifest, whatever happened on the way."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import random
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import builds, small
from tests.examples import examples, some
from tests.pipeline.inputs import patch_chunk_bytes, write_byte_tokenizer
from tokshard import build_corpus
from tokshard.errors import TokshardError
from tokshard.format import names
from tokshard.format.opening import open_corpus
from tokshard.pipeline.executors import choice
from tokshard.pipeline.executors.base import Ended, Event, InlineExecutor, OnProgress
from tokshard.pipeline.progress import Report, StageStarted
from tokshard.pipeline.request import Build
from tokshard.pipeline.tasks.planning import Run
from tokshard.pipeline.tasks.running import Stage, TaskRunner
from tokshard.pipeline.workspace.receipts import Progress

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return builds.write_sources(tmp_path_factory.mktemp("sources"), documents=6_000)


@pytest.fixture(scope="module")
def reference(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What one undisturbed process makes, which is not the one of the other builds."""
    out = tmp_path_factory.mktemp("reference") / "out"
    done = builds.run(builds.command(sources, out, "--workers", "1"))
    assert done.returncode == 0, done.stderr
    hashes = builds.corpus_hashes(out)
    with open_corpus(out) as corpus:
        assert len(corpus.shards) > 20, "too little data to mean anything"
    return hashes


@some("workers", [3, 2, 5])
def test_any_number_of_workers_gives_the_same_bytes(
    sources: list[str], reference: dict[str, str], tmp_path: Path, workers: int
) -> None:
    assert builds.build(sources, tmp_path / "out", "--workers", str(workers)) == reference


def test_tasks_completed_in_any_order_give_the_same_bytes(
    sources: list[str], reference: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Shuffled(InlineExecutor):
        """Runs all tasks that it can get, in any order."""

        def __init__(self, build: Build, stage: Stage, on_progress: OnProgress) -> None:
            super().__init__(build, stage, on_progress)
            self.runner, self.runs = TaskRunner(build, stage, on_progress), list[Run]()

        def has_room(self) -> bool:
            return True

        def submit(self, run: Run) -> None:
            self.runs.append(run)

        def events(self) -> Iterator[Event]:
            random.Random(5).shuffle(self.runs)
            for run in self.runs:
                yield from self.runner.run(run)
                yield Ended(run.task)
            self.runs.clear()

    monkeypatch.setattr(choice, "InlineExecutor", Shuffled)
    build_corpus(
        sources,
        tokenizer=builds.TOKENIZER,
        out=tmp_path / "out",
        task_bytes=1 << 20,
        shard_tokens=100_000,
        workers=1,
    )
    assert builds.corpus_hashes(tmp_path / "out") == reference


@pytest.mark.soak
@pytest.mark.parametrize("moment", range(20))
def test_a_build_killed_at_a_random_moment_and_run_again_gives_the_same_bytes(
    sources: list[str], reference: dict[str, str], tmp_path: Path, moment: int
) -> None:
    """Those killed at moments that are chosen are in `test_promise_01_faults.py`."""
    rng = random.Random(moment)
    command = builds.command(sources, tmp_path / "out", "--workers", str(rng.choice([1, 2, 3])))
    process = builds.start(command)
    time.sleep(rng.uniform(0.2, 2.0))
    # half of the time only the coordinator dies, and its workers have to notice
    if rng.random() < 0.5:
        os.killpg(process.pid, signal.SIGKILL)
    else:
        process.kill()
    process.communicate()
    _assert_no_half_shard(tmp_path / "out")
    assert builds.build(sources, tmp_path / "out", "--workers", "2") == reference


def _assert_no_half_shard(out: Path) -> None:
    """Every shard that can be seen is whole: its footer is there and every batch can be read."""
    from pyarrow import ipc

    for path in builds.visible_shards(out):
        with ipc.open_file(str(path)) as reader:
            for index in range(reader.num_record_batches):
                reader.get_batch(index).validate(full=True)


@some("limit", [11_999, 1, 777, 5_999, 6_000, 8_345])
def test_a_limit_gives_the_same_bytes_for_any_number_of_workers_and_is_exact(
    sources: list[str], tmp_path: Path, limit: int
) -> None:
    options = ("--max-documents", str(limit))
    one = builds.build(sources, tmp_path / "one", *options, "--workers", "1")
    assert builds.build(sources, tmp_path / "three", *options, "--workers", "3") == one
    with open_corpus(tmp_path / "one") as corpus:
        assert corpus.num_documents == limit
        records = corpus.manifest.records
        assert records.read == records.written + sum(records.left_out.values())


def test_skipping_bad_records_gives_the_same_bytes_for_any_number_of_workers(
    sources: list[str], tmp_path: Path
) -> None:
    broken = tmp_path / "broken.jsonl"
    lines = Path(sources[0]).read_bytes().split(b"\n")
    for number in range(0, len(lines) - 1, 97):
        lines[number] = (b'{"text": 7}', b"{", b'{"text": ""}', b"", b'{"text": "\xff"}')[number % 5]
    broken.write_bytes(b"\n".join(lines))
    inputs = [str(broken), *sources[1:]]
    one = builds.build(inputs, tmp_path / "one", "--on-bad-record", "skip", "--workers", "1")
    assert names.REJECTS in one
    assert builds.build(inputs, tmp_path / "three", "--on-bad-record", "skip", "--workers", "3") == one


@pytest.fixture
def small_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], dict[str, Any], dict[str, str]]:
    """Sources of eight tasks of a moment each, options of a build of them, and what it makes when undisturbed."""
    patch_chunk_bytes(monkeypatch, 40 << 10)
    sources = builds.write_sources(tmp_path / "sources", documents=500)
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer")
    options = {"tokenizer": tokenizer, "task_bytes": 40 << 10, "shard_tokens": 20_000, "workers": 1}
    build_corpus(sources, out=tmp_path / "reference", **options)
    return sources, options, builds.corpus_hashes(tmp_path / "reference")


@settings(max_examples=examples(12), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_build_that_finds_any_subset_of_its_tasks_done_gives_the_same_bytes(
    small_build: tuple[list[str], dict[str, Any], dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    sources, options, reference = small_build
    out = tmp_path_factory.mktemp("subset") / "out"
    stop_after = data.draw(st.integers(0, 15))
    done = 0

    class StoppedError(Exception):
        pass

    def stop(report: Report) -> None:
        nonlocal done
        done += isinstance(report, Progress)
        if done > stop_after:
            raise StoppedError

    try:
        build_corpus(sources, out=out, observer=stop, **options)
    except StoppedError:
        assert not (out / names.MANIFEST).exists()
    receipts = sorted((out / names.WORK / small.RECEIPTS).glob("*.receipt")) if (out / names.WORK).exists() else []
    for path in receipts:
        if data.draw(st.booleans()):
            path.unlink()
    build_corpus(sources, out=out, **options)
    assert builds.corpus_hashes(out) == reference


def test_a_full_disk_is_a_clear_error_and_the_next_run_continues(
    sources: list[str], reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for workers in ("1", "2"):
        # a shard of 100,000 tokens has 200 kB: the limit lets small files pass and stops at a whole shard
        done = builds.run(
            builds.command(sources, out, "--workers", workers),
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (150_000, 150_000)),
        )
        assert done.returncode == 1
        assert done.stderr.startswith("error: cannot write to ")
        assert "File too large" in done.stderr
        assert "hint: make room" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (out / names.MANIFEST).exists()
        _assert_no_half_shard(out)
    assert builds.build(sources, out, "--workers", "2") == reference


@some("is_one_stream", [False, True])
def test_the_task_of_a_killed_worker_runs_on_another(
    sources: list[str], reference: dict[str, str], tmp_path: Path, is_one_stream: bool
) -> None:
    inputs, expected = sources, reference
    if is_one_stream:
        stream = tmp_path / "a.jsonl.gz"
        stream.write_bytes(gzip.compress(Path(sources[0]).read_bytes(), 0))
        inputs, expected = [str(stream)], builds.build([str(stream)], tmp_path / "expected", "--workers", "1")
    out = tmp_path / "out"
    process = builds.start(builds.command(inputs, out, "--workers", "2"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out):
        time.sleep(0.005)
    os.kill(builds.children(process.pid)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert builds.corpus_hashes(out) == expected


def test_a_task_that_kills_two_workers_is_a_clear_error_and_the_next_run_continues(
    sources: list[str], reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    process = builds.start(builds.command(sources, out, "--workers", "2"))
    while process.poll() is None:
        with contextlib.suppress(ProcessLookupError, psutil.Error):
            for worker in builds.children(process.pid):
                os.kill(worker, signal.SIGKILL)
        time.sleep(0.02)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "was killed by SIGKILL while it read" in errors
    assert "hint: run the same command again: finished tasks are kept" in errors
    _assert_no_half_shard(out)
    assert builds.build(sources, out, "--workers", "2") == reference


@some("number, workers", [(signal.SIGINT, "2"), (signal.SIGTERM, "1"), (signal.SIGINT, "1"), (signal.SIGTERM, "2")])
def test_an_interrupted_build_exits_with_the_code_of_its_signal_and_the_next_run_continues(
    sources: list[str], reference: dict[str, str], tmp_path: Path, workers: str, number: signal.Signals
) -> None:
    out = tmp_path / "out"
    process = builds.start(builds.command(sources, out, "--workers", workers))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out):
        time.sleep(0.005)
    os.killpg(process.pid, number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == {signal.SIGINT: 130, signal.SIGTERM: 143}[number], errors
    assert "Traceback" not in errors
    _assert_no_half_shard(out)
    assert builds.build(sources, out, "--workers", "2") == reference


def test_a_second_build_into_the_same_directory_is_refused_while_the_first_runs(
    sources: list[str], reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    first = builds.start(builds.command(sources, out, "--workers", "2"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not (out / names.WORK / "build.json").exists():
        time.sleep(0.005)
    os.killpg(first.pid, signal.SIGSTOP)  # or it may be done before the second has started
    second = builds.run(builds.command(sources, out, "--workers", "1"))
    assert first.poll() is None, "the first build was too quick for this test"
    os.killpg(first.pid, signal.SIGCONT)
    assert second.returncode == 1
    assert f"error: another build is writing to {out}" in second.stderr
    first.communicate(timeout=60)
    assert first.returncode == 0
    assert builds.corpus_hashes(out) == reference


def test_finished_tasks_are_not_encoded_again(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = builds.start(builds.command(sources, out, "--workers", "2"))
    receipts = out / names.WORK / small.RECEIPTS
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and len(list(receipts.glob("*.receipt"))) < 3:
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    shards = {path: path.stat().st_mtime_ns for path in builds.visible_shards(out)}
    done = builds.run(builds.command(sources, out, "--workers", "2", "--json"))
    result = json.loads(done.stdout)
    assert 0 < result["tokens_written"] < result["corpora"][0]["manifest"]["num_tokens"]
    kept = [path for path, time_ns in shards.items() if path.stat().st_mtime_ns == time_ns]
    assert len(kept) >= 3


def test_a_finished_corpus_is_left_alone_and_force_rebuilds_the_same_bytes(
    sources: list[str], reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert builds.build(sources, out) == reference
    again = builds.run(builds.command(sources, out, "--workers", "1"))
    assert again.returncode == 0
    assert "nothing to do" in again.stdout
    other = builds.run(builds.command(sources, out, "--max-documents", "10"))
    assert other.returncode == 2
    assert "--max-documents was not given, now 10" in other.stderr
    assert builds.corpus_hashes(out) == reference
    assert builds.build(sources, out, "--force") == reference


def test_force_removes_the_manifest_before_anything_else(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    builds.build(sources, out)
    process = builds.start(builds.command(sources, out, "--force", "--workers", "1"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (out / names.MANIFEST).exists():
        time.sleep(0.001)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (out / names.MANIFEST).exists()
    assert builds.run([*builds.command(sources, out)[:3], "inspect", str(out)]).returncode == 1


def test_an_unfinished_build_refuses_other_settings_and_changed_sources(tmp_path: Path) -> None:
    sources = builds.write_sources(tmp_path / "sources", documents=6_000)
    out = tmp_path / "out"
    process = builds.start(builds.command(sources, out, "--workers", "1"))
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out):
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    other = builds.run(builds.command(sources, out, "--shard-tokens", "200K"))
    assert other.returncode == 2
    assert "--shard-tokens was 100000, now 200000" in other.stderr
    os.utime(sources[0], (1, 1))
    touched = builds.run(builds.command(sources, out))
    assert touched.returncode == 2
    assert f"source {sources[0]} was modified since" in touched.stderr
    Path(sources[0]).unlink()
    gone = builds.run(builds.command(sources, out))
    assert gone.returncode == 2
    assert f"{sources[0]} does not exist" in gone.stderr


@pytest.mark.parametrize("change", ["vanish", "grow"])
def test_a_source_that_vanishes_or_changes_under_a_running_build_is_a_clear_error(tmp_path: Path, change: str) -> None:
    sources = builds.write_sources(tmp_path / "sources", documents=500)

    def vanish(report: Report) -> None:
        if isinstance(report, StageStarted) and change == "vanish":
            Path(sources[1]).unlink()
        elif isinstance(report, StageStarted):
            with Path(sources[1]).open("ab") as file:
                file.write(b"{}")

    with pytest.raises(TokshardError) as caught:
        build_corpus(sources, tokenizer=builds.TOKENIZER, out=tmp_path / "out", workers=1, observer=vanish)
    assert sources[1] in caught.value.problem
    assert ("cannot be read" if change == "vanish" else "was modified since the build began") in caught.value.problem
    assert not (tmp_path / "out" / names.MANIFEST).exists()
