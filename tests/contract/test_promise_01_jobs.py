"""Promise 1, for job arrays: the bytes and the errors of a build do not depend on how many jobs share it, or when."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import os
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.contract import arrays, builds
from tests.examples import examples, some
from tests.pipeline.inputs import patch_chunk_bytes, write_byte_tokenizer
from tokshard.cli import main
from tokshard.cli.build_progress import BuildDisplay
from tokshard.cli.job_array import job_of
from tokshard.format import names
from tokshard.pipeline.progress import Report
from tokshard.pipeline.workspace.lease import _PREPARING, check_no_build, running_job
from tokshard.pipeline.workspace.places import LOCK, open_workspace
from tokshard.pipeline.workspace.receipts import Receipt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DEDUP = ("--dedup", "exact")
SMALL = ("--task-bytes", "100KiB", "--shard-tokens", "30K", "--workers", "1")


@pytest.fixture(scope="module", autouse=True)
def _a_job_takes_a_moment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, 100 << 10)
        patch.setattr(builds, "TOKENIZER", write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer")))
        yield


class Ended(NamedTuple):
    exit_code: int
    errors: str


def tokshard(*arguments: str) -> Ended:
    """Run a command in this process: starting one takes longer than a job of this size."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run(list(arguments))
    return Ended(exit_code, errors.getvalue())


def run_job(sources: Sequence[str], out: Path, index: int, count: int, *options: str) -> Ended:
    words = builds._arguments(sources, out, *SMALL, *options)
    return tokshard(*arrays.job_words(words, index, count))


def commit(out: Path) -> Ended:
    return tokshard(*arrays.commit_words(out))


def alone(sources: Sequence[str], out: Path, *options: str) -> Ended:
    return tokshard(*builds._arguments(sources, out, *SMALL, *options))


def array(sources: Sequence[str], out: Path, count: int, *options: str) -> tuple[Ended, list[Ended]]:
    """Run all jobs of an array and its commit; how the array ended, and each command."""
    commands: list[Ended] = []

    def run_all(some: Sequence[arrays.Words]) -> list[Ended]:
        ended = [tokshard(*words) for words in reversed(some)]
        commands.extend(ended)
        return ended

    words = builds._arguments(sources, out, *SMALL, *options)
    return arrays.run_array(words, out, run_all, jobs=count), commands


@contextlib.contextmanager
def stopped_after(number: int) -> Iterator[None]:
    """A job in this context is interrupted when it has left so many receipts."""
    left = []

    def observe(display: BuildDisplay, report: Report) -> None:
        left.extend([report] if isinstance(report, Receipt) else [])
        if len(left) == number:
            raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BuildDisplay, "__call__", observe)
        yield


def hashes(out: Path) -> dict[str, dict[str, str]]:
    """What `corpus_hashes` says of each corpus that a build made."""
    if (out / names.TRAIN).exists():
        return {name: builds.corpus_hashes(out / name) for name in (names.TRAIN, names.VALIDATION)}
    return {"": builds.corpus_hashes(out)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines that are cut into three tasks, a stream, and a group of small files; some texts are equal."""
    directory = tmp_path_factory.mktemp("sources")
    rng = random.Random(3)
    texts = [builds.text(rng, rng.randint(1, 150)) for _ in range(500)]
    places = {"a.jsonl": range(500), "b.jsonl.gz": range(200, 800), "c.jsonl": range(50), "d.jsonl": range(60)}
    for name, numbers in places.items():
        lines = "".join(json.dumps({"text": texts[n % 500], "n": n}) + "\n" for n in numbers).encode()
        (directory / name).write_bytes(gzip.compress(lines, 0) if name.endswith(".gz") else lines)
    return [str(directory / name) for name in places]


@pytest.fixture(scope="module")
def reference(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, str]]:
    out = tmp_path_factory.mktemp("reference") / "out"
    assert alone(sources, out).exit_code == 0
    return hashes(out)


@settings(max_examples=examples(8), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_number_of_jobs_in_any_order_gives_the_bytes_of_one_process(
    sources: list[str],
    reference: dict[str, dict[str, str]],
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
) -> None:
    out = tmp_path_factory.mktemp("jobs") / "out"
    count = data.draw(st.integers(1, 5), label="jobs")
    order = data.draw(st.permutations(range(count)), label="order")
    again = data.draw(st.lists(st.sampled_from(range(count)), max_size=2), label="run twice")
    # each job is killed when it has left some receipts, so that others have to help
    receipts = 0
    for index in [*order[:-1], *again]:
        number = data.draw(st.integers(1, 4), label="receipts")
        receipts += number
        with stopped_after(number):
            run_job(sources, out, index, count)
    if 0 < receipts < 5:
        early = commit(out)
        assert (early.exit_code, "is not complete: " in early.errors) == (1, True)
        assert "--job-index 0 --num-jobs 1" in early.errors
    # the last job may belong to an array of another size
    other = data.draw(st.integers(1, 3), label="jobs of the second array")
    for index in range(other):
        assert run_job(sources, out, index, other).exit_code == 0
    assert commit(out) == (0, "")
    assert hashes(out) == reference
    assert commit(out).exit_code == 0  # a commit that is run again has nothing to do
    assert run_job(sources, out, 0, count).exit_code == 0


@some(
    "options",
    [
        ("--max-documents", "450"),
        ("--validation-fraction", "0.1", "--max-documents", "700"),
        ("--min-tokens", "20", "--max-tokens", "300"),
        (*DEDUP, "--validation-fraction", "0.2", "--keep-field", "n:int64"),
        (*DEDUP, "--max-documents", "350"),
        ("--max-documents", "1"),
        ("--max-documents", "501"),
        ("--max-documents", "1155"),
        ("--keep-field", "n:int64"),
        ("--validation-fraction", "0.1"),
        DEDUP,
    ],
    default=5,
    ids=" ".join,
)
def test_every_option_gives_the_bytes_of_one_process(
    sources: list[str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    assert alone(sources, tmp_path / "one", *options).exit_code == 0
    _, commands = array(sources, tmp_path / "jobs", 3, *options)
    assert all(ended == (0, "") for ended in commands)
    assert hashes(tmp_path / "jobs") == hashes(tmp_path / "one")


@pytest.fixture(scope="module")
def damaged(sources: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The same with bad records here and there, and two streams that break off."""
    directory = tmp_path_factory.mktemp("damaged")
    lines = Path(sources[0]).read_bytes().split(b"\n")
    for number in (120, 250, 251, 460):
        lines[number] = b'{"text": 7}'
    stream = Path(sources[1]).read_bytes()
    contents = {
        "a.jsonl": b"\n".join(lines),
        "b.jsonl.gz": stream,
        "broken.jsonl.gz": stream[: len(stream) // 2],
        "c.jsonl": Path(sources[2]).read_bytes() + b'{"text": 7}\n',
        "d.jsonl.gz": gzip.compress(Path(sources[3]).read_bytes())[:-200],
        "e.jsonl": Path(sources[3]).read_bytes(),
    }
    for name, content in contents.items():
        (directory / name).write_bytes(content)
    return [str(directory / name) for name in contents]


@some(
    "options",
    [
        ("--on-bad-record", "skip"),
        ("--on-bad-source", "skip"),
        *(("--on-bad-record", "skip", "--on-bad-source", "skip", "--max-bad-records", most) for most in ("4", "5")),
        ("--on-bad-record", "skip", "--on-bad-source", "skip", "--max-documents", "350"),
        ("--max-documents", "120"),
        ("--max-documents", "121"),
        (*DEDUP, "--on-bad-record", "skip", "--on-bad-source", "skip"),
        (*DEDUP, "--on-bad-record", "skip", "--on-bad-source", "skip", "--max-bad-records", "3"),
        (),
        ("--on-bad-record", "skip", "--on-bad-source", "skip"),
        *(
            ("--on-bad-record", "skip", "--on-bad-source", "skip", "--max-bad-records", most)
            for most in ("2", "0.01%", "50%")
        ),
        ("--on-bad-record", "skip", "--on-bad-source", "skip", "--max-documents", "1200"),
        (*DEDUP, "--on-bad-source", "skip"),
    ],
    default=9,
    ids=" ".join,
)
@pytest.mark.parametrize("count", [3, *(pytest.param(count, marks=pytest.mark.soak) for count in (2, 5))])
def test_damage_gives_the_error_or_the_bytes_of_one_process(
    damaged: list[str], tmp_path: Path, options: tuple[str, ...], count: int
) -> None:
    one, jobs = tmp_path / "one", tmp_path / "jobs"
    expected = alone(damaged, one, *options)
    found, commands = array(damaged, jobs, count, *options)
    # what is skipped fails no job; with --dedup exact, the stage after hashing judges how much is
    is_mild = {"--on-bad-record", "--on-bad-source"} <= {*options} and not {"--dedup", "--max-bad-records"} <= {
        *options
    }
    assert {each.exit_code for each in commands[:-1]} <= ({0} if is_mild else {0, 1})
    assert _but_left_out(found).errors.replace(str(jobs), str(one)) == _but_left_out(expected).errors
    assert found.exit_code == expected.exit_code
    if not expected.exit_code:
        assert hashes(jobs) == hashes(one)


def _but_left_out(ended: Ended) -> Ended:
    """What was said, without the inputs that are left out: each is named by the process that found it."""
    lines = ended.errors.splitlines(keepends=True)
    return ended._replace(errors="".join(line for line in lines if not line.startswith("left out: ")))


def test_a_commit_is_refused_while_a_job_runs_and_a_job_while_a_build_does(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_job(sources, out, 0, 2).exit_code == 0
    with running_job(open_workspace(out), 1, 2):
        for refused in (commit(out), alone(sources, out)):
            assert refused.exit_code == 1
            assert "error: job 1 of 2, process " in refused.errors
            assert "hint: wait until all jobs have ended, or end them" in refused.errors
    with open_workspace(out).store.lease(f"{names.WORK}/lock").hold("process 1 on a host"):
        refused = run_job(sources, out, 1, 2)
        assert (refused.exit_code, "another build is writing to" in refused.errors) == (1, True)


def test_a_job_is_not_refused_next_to_one_that_has_taken_the_lock_and_not_written_its_name_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = open_workspace(tmp_path / "out")
    with workspace.store.lease(LOCK).hold(""):
        monkeypatch.setattr("time.sleep", lambda _: (tmp_path / "out" / LOCK).write_text(_PREPARING))
        check_no_build(workspace)


def test_one_process_may_end_what_jobs_began(
    sources: list[str], reference: dict[str, dict[str, str]], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert run_job(sources, out, 1, 2).exit_code == 0
    assert alone(sources, out).exit_code == 0
    assert hashes(out) == reference


@pytest.mark.parametrize("options", [(), DEDUP], ids=" ".join)
def test_a_commit_that_comes_too_early_says_what_is_missing_and_the_command_for_it(
    sources: list[str], reference: dict[str, dict[str, str]], tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "out"
    with stopped_after(1):
        assert run_job(sources, out, 0, 2, *options).exit_code == 130
    early = commit(out)
    assert early.exit_code == 1
    assert f" tasks are not {'hashed' if options else 'written'}, the first of which reads " in early.errors
    (line,) = (line for line in early.errors.splitlines() if line.startswith("hint: "))
    directory, _, words = line.partition("cd ")[2].partition(" && ")
    assert directory == os.getcwd()
    assert tokshard(*shlex.split(words)[1:]).exit_code == 0
    assert commit(out) == (0, "")
    assert options or hashes(out) == reference


def test_a_job_with_other_settings_is_refused(sources: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_job(sources, out, 0, 2).exit_code == 0
    refused = run_job(sources, out, 1, 2, "--min-tokens", "3")
    assert refused.exit_code == 2
    assert "belongs to another build: --min-tokens was not given, now 3" in refused.errors


def test_jobs_that_failed_go_on_with_a_milder_policy(damaged: list[str], tmp_path: Path) -> None:
    out, policy = tmp_path / "jobs", ("--on-bad-record", "skip", "--on-bad-source", "skip")
    assert array(damaged, out, 2)[0].exit_code == 1
    assert {ended.exit_code for ended in array(damaged, out, 2, *policy)[1]} == {0}
    assert alone(damaged, tmp_path / "one", *policy).exit_code == 0
    assert hashes(out) == hashes(tmp_path / "one")


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--job-index", "2", "--num-jobs", "2"], "job 2 of 2 does not exist"),
        (["--job-index", "0"], "missing option '--num-jobs'"),
        (["--num-jobs", "2"], "missing option '--job-index'"),
        (["--job-index", "0", "--num-jobs", "2", "--force"], "--force starts over"),
        (["--job-index", "0", "--num-jobs", "2", "--stage", "hash"], "no option --stage"),
        (["--job-index", "0", "--num-jobs", "2", "--dry-run"], "--dry-run cannot be divided among jobs"),
        (["--commit", "somewhere"], "no option --commit"),
    ],
)
def test_what_jobs_cannot_do_is_refused(sources: list[str], tmp_path: Path, words: list[str], problem: str) -> None:
    ended = tokshard(*builds._arguments(sources, tmp_path / "out", *words))
    assert ended.exit_code == 2
    assert problem in ended.errors
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "environment", "problem", "hint"),
    [
        (["slurm"], {}, "SLURM_ARRAY_TASK_ID is not set, SLURM_ARRAY_TASK_MIN is not set", "sbatch --array=0-15"),
        (
            ["slurm"],
            {"SLURM_ARRAY_TASK_ID": "3", "SLURM_ARRAY_TASK_MIN": "0"},
            "slurm: SLURM_ARRAY_TASK_MAX is not set",
            "sbatch --array",
        ),
        (
            ["slurm"],
            {"SLURM_ARRAY_TASK_ID": "x", "SLURM_ARRAY_TASK_MIN": "0", "SLURM_ARRAY_TASK_MAX": "1"},
            "slurm: SLURM_ARRAY_TASK_ID is 'x'",
            "sbatch --array",
        ),
        (["slurm", "--num-jobs", "2"], {}, "Slurm says how many jobs its array has", "leave it out"),
        (["kubernetes", "--num-jobs", "2"], {}, "JOB_COMPLETION_INDEX is not set", "completionMode: Indexed"),
        (["kubernetes"], {"JOB_COMPLETION_INDEX": "0"}, "missing option '--num-jobs'", "number of completions"),
        (["kubernetes", "--num-jobs", "2"], {"JOB_COMPLETION_INDEX": "2"}, "job 2 of 2 does not exist", "from 0 to 1"),
        (["ray", "--num-jobs", "2"], {}, "'ray' is not a number from 0 on, slurm or kubernetes", "--help"),
        (["-1", "--num-jobs", "2"], {}, "'-1' is not a number from 0 on", "--help"),
    ],
)
def test_what_the_environment_does_not_say_of_a_job_is_named(
    sources: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    environment: dict[str, str],
    problem: str,
    hint: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    ended = tokshard(*builds._arguments(sources, tmp_path / "out", "--job-index", *words))
    assert ended.exit_code == 2
    shown, _, advice = ended.errors.partition("hint:")
    assert problem in shown
    assert hint in advice
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("numbers", "step", "expected"),
    [
        ("0 1 2", "1", ["job 0 of 3", "job 1 of 3", "job 2 of 3"]),
        ("4 8 12", "4", ["job 0 of 3", "job 1 of 3", "job 2 of 3"]),
        ("3 7", None, ["job 0 of 5", "job 4 of 5"]),  # jobs that are sent again: the others' shares are done, or helped
    ],
)
def test_the_numbers_of_a_slurm_array_are_shares(
    monkeypatch: pytest.MonkeyPatch, numbers: str, step: str | None, expected: list[str]
) -> None:
    first, *_, last = numbers.split()
    monkeypatch.setenv("SLURM_ARRAY_TASK_MIN", first)
    monkeypatch.setenv("SLURM_ARRAY_TASK_MAX", last)
    if step is not None:
        monkeypatch.setenv("SLURM_ARRAY_TASK_STEP", step)
    found = []
    for number in numbers.split():
        monkeypatch.setenv("SLURM_ARRAY_TASK_ID", number)
        job = job_of("slurm", None)
        assert job is not None
        found.append(f"job {job.index} of {job.count}")
    assert found == expected


def test_starting_over_an_append_by_jobs_never_asks_to_remove_the_corpus(sources: list[str], tmp_path: Path) -> None:
    ended = run_job(sources, tmp_path / "out", 0, 2, "--append", "--force")
    assert (ended.exit_code, "remove" in ended.errors.partition("hint:")[2]) == (2, False)


def test_standard_input_is_refused(tmp_path: Path) -> None:
    ended = run_job(["-"], tmp_path / "out", 0, 2)
    assert (ended.exit_code, "standard input can be read once only" in ended.errors) == (2, True)


def test_a_commit_without_jobs_says_so(tmp_path: Path) -> None:
    ended = commit(tmp_path)
    assert (ended.exit_code, "holds no build that has begun" in ended.errors) == (2, True)
    assert list(tmp_path.iterdir()) == []
