"""Promise 1, for the recipes of clusters: processes play their jobs, one of them killed and one run twice."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.contract import builds
from tests.contract.commands import DEDUP, shards, state

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
COUNT = 3
Environment = Mapping[str, str]


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sources")
    builds.write_sources(directory, documents=4_000)
    return directory


@dataclass(frozen=True)
class Cluster:
    """Nodes that are this machine: `tokshard` has small tasks, and `sbatch` writes down what is submitted."""

    place: Path
    sources: Path

    @property
    def out(self) -> Path:
        return self.place / "out of several words"

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PATH": f"{self.place}/bin:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}

    def write_tools(self) -> None:
        small = "--task-bytes 1MiB --shard-tokens 100K --quiet"
        submitted = self.place / "submitted"
        scripts = {
            "tokshard": f'[[ "$1" == commit ]] || set -- "$@" {small}\nexec {sys.executable} -m tokshard "$@"',
            "sbatch": f'printf "%s\\n" "$(printf "%q " "$@")" >> {submitted}\nwc -l < {submitted}',
        }
        (self.place / "bin").mkdir()
        for name, script in scripts.items():
            path = self.place / "bin" / name
            path.write_text(f"#!/bin/bash\n{script}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def play(self, command: Sequence[str], jobs: Sequence[Environment]) -> None:
        """Run the jobs of an array at once, the first twice; the last is killed when the first shard is there."""
        started = [
            subprocess.Popen(command, env=job, stderr=subprocess.PIPE, text=True, start_new_session=True)
            for job in [jobs[0], *jobs]
        ]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and not shards(self.out) and started[-1].poll() is None:
            time.sleep(0.005)
        if started[-1].poll() is None:
            os.killpg(started[-1].pid, signal.SIGKILL)
        ended = [(process.communicate()[1], process.returncode) for process in started]
        assert [code for _, code in ended[:-1]] == [0] * len(jobs), ended

    def run(self, command: Sequence[str], environment: Environment) -> None:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr

    def check(self, *options: str) -> None:
        """What the jobs made is what one process makes."""
        expected = self.place / "expected"
        builds.complete([str(self.sources)], expected, "--workers", "1", *options)
        assert state(self.out) == state(expected)


@pytest.fixture
def cluster(tmp_path: Path, sources: Path) -> Cluster:
    found = Cluster(tmp_path, sources)
    found.write_tools()
    return found


@pytest.mark.parametrize("options", [DEDUP, pytest.param((), marks=pytest.mark.soak)], ids=["dedup", "none"])
def test_the_slurm_array_makes_the_corpus_of_one_process(cluster: Cluster, options: tuple[str, ...]) -> None:
    places = {"SOURCES": cluster.sources, "TOKENIZER": builds.TOKENIZER, "OUT": cluster.out}
    array = {"ARRAY_TASK_MIN": 0, "ARRAY_TASK_MAX": COUNT - 1, "ARRAY_TASK_STEP": 1, "CPUS_PER_TASK": 1}
    given = {**places, "SLURM_ARRAY_JOB_ID": 77, **{f"SLURM_{name}": value for name, value in array.items()}}
    environment = cluster.environment | {name: str(value) for name, value in given.items()}
    jobs = [environment | {"SLURM_ARRAY_TASK_ID": str(index)} for index in range(COUNT)]
    script = ["bash", str(RECIPES / "slurm/build.sbatch"), *options]
    cluster.play(script, jobs)
    first, *_ = (cluster.place / "submitted").read_text().splitlines()
    sent = dict(re.fullmatch(r"--([a-z-]+)(?:=(.*))?", word, re.DOTALL).groups() for word in shlex.split(first))  # type: ignore[union-attr]
    assert sent["dependency"] == "afterok:77"
    cluster.run(script, jobs[-1] | {"SLURM_RESTART_COUNT": "1"})
    cluster.run(["bash", "-c", sent["wrap"]], cluster.environment)
    cluster.check(*options)


@pytest.mark.soak  # the script of Slurm has the same steps
def test_the_kubernetes_jobs_make_the_corpus_of_one_process(cluster: Cluster) -> None:
    build, commit = yaml.safe_load_all((RECIPES / "kubernetes/build-job.yaml").read_text())
    assert (build["spec"]["completionMode"], commit["spec"]["suspend"]) == ("Indexed", True)
    places = {
        f"--num-jobs={build['spec']['completions']}": f"--num-jobs={COUNT}",
        "/data/raw": str(cluster.sources),
        "--tokenizer=/data/tokenizer": f"--tokenizer={builds.TOKENIZER}",
        "--out=/data/shards": f"--out={cluster.out}",
        "--workers=8": "--workers=1",
        "/data/shards": str(cluster.out),
    }
    (to_build,), (to_commit,) = (job["spec"]["template"]["spec"]["containers"] for job in (build, commit))
    words = [places.get(word, word) for word in to_build["command"]]
    assert f"--num-jobs={COUNT}" in words
    pods = [{**cluster.environment, "JOB_COMPLETION_INDEX": str(index)} for index in range(COUNT)]
    cluster.play(words, pods)
    cluster.run(words, pods[-1])
    cluster.run([places.get(word, word) for word in to_commit["command"]], cluster.environment)
    cluster.check()
