"""Promise 1, for the recipes of clusters: processes play their jobs, one of them killed and one run twice."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import yaml

from tests.contract import builds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
COUNT = 3


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    builds.write_sources(directory, documents=4_000)
    return directory


@pytest.fixture(scope="module")
def reference(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return builds.build([str(sources)], tmp_path_factory.mktemp("reference") / "out", "--workers", "1")


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """The environment of a node: `tokshard` with small tasks, and an `sbatch` that writes down what is submitted."""
    tools = tmp_path / "bin"
    tools.mkdir()
    small = "--task-bytes 1MiB --shard-tokens 100K --quiet"
    is_other = '[[ "$1" == status || "$1" == commit ]]'
    scripts = {
        "tokshard": f'{is_other} || set -- "$@" {small}\nexec {sys.executable} -m tokshard "$@"',
        "sbatch": f'printf "%s\\n" "$(printf "%q " "$@")" >> {tmp_path}/submitted\nwc -l < {tmp_path}/submitted',
    }
    for name, script in scripts.items():
        path = tools / name
        path.write_text(f"#!/bin/bash\n{script}\n")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def play(command: list[str], environments: list[Mapping[str, str]], out: Path) -> None:
    """Run the jobs of an array at once, the first twice; the last is killed when the first shard is there."""
    started = [
        subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True, start_new_session=True)
        for environment in [environments[0], *environments]
    ]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out) and started[-1].poll() is None:
        time.sleep(0.005)
    if started[-1].poll() is None:
        os.killpg(started[-1].pid, signal.SIGKILL)
    ended = [(process.communicate()[1], process.returncode) for process in started]
    assert [code for _, code in ended[:-1]] == [0] * len(environments), ended


def run(command: list[str], environment: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)


def submitted(tmp_path: Path) -> Iterator[tuple[dict[str, str], str]]:
    """What was given to sbatch: the options with their values, and the command."""
    for line in (tmp_path / "submitted").read_text().splitlines():
        options = dict(re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word, re.DOTALL).groups() for word in shlex.split(line))  # type: ignore[union-attr]
        yield options, options.pop("wrap")


def slurm(cluster: dict[str, str], index: int, **more: str) -> dict[str, str]:
    """The environment of a job of an array."""
    given = {
        "SLURM_ARRAY_JOB_ID": "77",
        "SLURM_ARRAY_TASK_ID": str(index),
        "SLURM_ARRAY_TASK_MIN": "0",
        "SLURM_ARRAY_TASK_MAX": str(COUNT - 1),
        "SLURM_ARRAY_TASK_STEP": "1",
        "SLURM_CPUS_PER_TASK": "1",
    }
    return {**cluster, **given, **more}


@pytest.mark.parametrize(
    "options", [("--dedup", "exact"), pytest.param((), marks=pytest.mark.soak)], ids=["dedup", "none"]
)
def test_the_slurm_array_makes_the_corpus_of_one_process(
    sources: Path, cluster: dict[str, str], tmp_path: Path, options: tuple[str, ...]
) -> None:
    out = tmp_path / "out of several words"
    places = {"SOURCES": str(sources), "TOKENIZER": str(builds.TOKENIZER), "OUT": str(out)}
    script = ["bash", str(RECIPES / "slurm/build.sbatch"), *options]
    play(script, [slurm(cluster, index, **places) for index in range(COUNT)], out)
    sent, commit = next(submitted(tmp_path))
    assert sent["dependency"] == "afterok:77"
    again = run(script, slurm(cluster, COUNT - 1, **places, SLURM_RESTART_COUNT="1"))
    assert again.returncode == 0, again.stderr
    done = run(["bash", "-c", commit], cluster)
    assert done.returncode == 0, done.stderr
    expected = builds.build([str(sources)], tmp_path / "expected", "--workers", "1", *options)
    assert builds.corpus_hashes(out) == expected


@pytest.mark.soak  # the script of Slurm has the same steps
def test_the_kubernetes_jobs_make_the_corpus_of_one_process(
    sources: Path, reference: dict[str, str], cluster: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    build, commit = yaml.safe_load_all((RECIPES / "kubernetes/build-job.yaml").read_text())
    assert (build["spec"]["completionMode"], commit["spec"]["suspend"]) == ("Indexed", True)
    (container,) = build["spec"]["template"]["spec"]["containers"]
    places = {
        f"--num-jobs={build['spec']['completions']}": f"--num-jobs={COUNT}",
        "/data/raw": str(sources),
        "--tokenizer=/data/tokenizer": f"--tokenizer={builds.TOKENIZER}",
        "--out=/data/shards": f"--out={out}",
        "--workers=8": "--workers=1",
        "/data/shards": str(out),
    }
    words = [places.get(word, word) for word in container["command"]]
    assert f"--num-jobs={COUNT}" in words
    pods = [{**cluster, "JOB_COMPLETION_INDEX": str(index)} for index in range(COUNT)]
    play(words, pods, out)
    again = run(words, pods[-1])
    assert again.returncode == 0, again.stderr
    (container,) = commit["spec"]["template"]["spec"]["containers"]
    done = run([places.get(word, word) for word in container["command"]], cluster)
    assert done.returncode == 0, done.stderr
    assert builds.corpus_hashes(out) == reference


@pytest.mark.soak  # by default the scripts above show it
def test_jobs_that_start_at_once_prepare_the_build_once_and_may_be_killed_or_run_twice(
    sources: Path, reference: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    commit = [*builds.command([], out)[:3], "commit", str(out)]
    jobs = [
        builds.command([str(sources)], out, "--workers", "1", "--job-index", str(index), "--num-jobs", str(COUNT))
        for index in range(COUNT)
    ]
    started = [builds.start(jobs[index]) for index in (0, 1, 1, 2)]
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out):
        time.sleep(0.005)
    os.killpg(started[3].pid, signal.SIGKILL)
    said = [process.communicate()[1] for process in started]
    assert [process.returncode for process in started[:3]] == [0, 0, 0], said
    early = builds.run(commit)
    # it may have been killed between its last receipt and its end
    assert early.returncode == 0 or "they belong to job 2 of 3" in early.stderr
    assert builds.run(jobs[2]).returncode == 0
    done = builds.run(commit)
    assert done.returncode == 0, done.stderr
    assert builds.corpus_hashes(out) == reference


def test_the_status_shows_the_jobs_that_run_and_how_the_build_continues(
    sources: Path, cluster: dict[str, str], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ["tokshard", "build", str(sources), "--tokenizer", str(builds.TOKENIZER), "--out", str(out)]
    job = [*words, "--workers", "1", "--job-index", "1", "--num-jobs", "2"]
    running = subprocess.Popen(job, env=cluster, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and not builds.visible_shards(out):
        time.sleep(0.005)
    os.killpg(running.pid, signal.SIGSTOP)  # or it may be done before it is asked for
    shown = run(["tokshard", "status", str(out)], cluster).stdout
    found = json.loads(run(["tokshard", "status", str(out), "--json"], cluster).stdout)
    os.killpg(running.pid, signal.SIGKILL)
    running.communicate()
    assert found["state"] == "running"
    (holder,) = found["holders"]
    assert re.fullmatch(r"job 1 of 2, process \d+ on .+", holder)
    assert re.search(rf"^ +{re.escape(holder)}$", shown, re.MULTILINE)
    shown = run(["tokshard", "status", str(out)], cluster).stdout
    assert "--job-index 0 --num-jobs 1" in shown
    assert f"with any job number, then tokshard commit {out}" in shown
