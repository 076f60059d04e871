"""The training commands of the recipes for clusters train, stop and continue: processes play the machines."""

from __future__ import annotations

import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.interop.real_text import environment
from tests.interop.test_cluster_manifests import pods as pods_of
from tests.ranks import free_port
from tests.trainer.runs import ROOT, as_toml, configuration, corpora, steps_of

pytestmark = [pytest.mark.interop, pytest.mark.timeout(400)]

RECIPES = ROOT / "recipes"
NODES = 2
GLOBAL_BATCH = 12
STEPS = 100_000  # more than any test waits for

Machine = tuple[list[str], dict[str, str]]
"""The command that starts on a machine, and the variables that its scheduler sets."""

SRUN = """\
while [[ $1 == --* ]]; do shift; done
pids=()
trap 'kill -KILL -- "${pids[@]/#/-}"; exit 137' TERM # "srun: forcing job termination"
for node in 0 1; do SLURM_NODEID=$node setsid "$@" & pids+=($!); done
echo "${pids[@]}" > "$STATE/step"
code=0
for pid in "${pids[@]}"; do wait "$pid" || code=$?; done
exit "$code"
"""
SCANCEL = """\
echo "scancel $*" >> "$STATE/said"
read -ra pids < "$STATE/step"
for pid in "${pids[@]}"; do kill -s "${1#--signal=}" -- "-$pid" || true; done
"""
SCONTROL = """\
if [[ $1 == show ]]; then printf 'localhost\\nother\\n'; else echo "scontrol $*" >> "$STATE/said"; fi
"""


@pytest.fixture
def node(tmp_path: Path) -> dict[str, str]:
    """The environment of a machine of the cluster: the tools of Slurm, torchrun, and no GPU."""
    tools = tmp_path / "bin"
    tools.mkdir()
    scripts = {
        "srun": SRUN,
        "scancel": SCANCEL,
        "scontrol": SCONTROL,
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"\n',
    }
    for name, script in scripts.items():
        path = tools / name
        path.write_text(f"#!/bin/bash\n{script}")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return environment(PATH=f"{tools}:{os.environ['PATH']}", STATE=str(tmp_path))


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    changes = {"data__global_batch_size": GLOBAL_BATCH, "train__steps": STEPS, "checkpoint__every": 0}
    path.write_text(as_toml(configuration(corpora(tmp_path / "corpora"), tmp_path / "out", **changes)))
    return path


@pytest.fixture
def port() -> str:
    return str(free_port())


def wait_for_steps(out: Path, number: int, processes: list[subprocess.Popen[str]]) -> None:
    log, deadline = out / "metrics.jsonl", time.monotonic() + 200
    while not (log.exists() and log.read_bytes().count(b"\n") >= number):
        assert time.monotonic() < deadline, "no step was made"
        assert all(process.poll() is None for process in processes), [process.communicate() for process in processes]
        time.sleep(0.05)


def check_that_the_run_is_whole(out: Path) -> int:
    """Each step once, each with the samples of an undisturbed run. The number of the last."""
    steps = steps_of(out)
    assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
    starts = range(0, GLOBAL_BATCH * len(steps), GLOBAL_BATCH)
    assert [step["samples"] for step in steps] == [[start, start + GLOBAL_BATCH] for start in starts]
    return len(steps)


@pytest.fixture
def slurm(node: dict[str, str], recipe: Path) -> Callable[..., subprocess.Popen[str]]:
    """Starts the script for Slurm as its batch shell does, with more arguments and variables."""
    given = {"SLURM_JOB_ID": "77", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    script = ["bash", str(RECIPES / "slurm/train.sbatch"), str(recipe)]
    return lambda *more, **known: start([*script, *more], {**node, **given, "SLURM_CPUS_PER_TASK": "1", **known})


def test_the_slurm_script_saves_before_the_time_limit_and_the_requeued_job_continues(
    slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    said = tmp_path / "said"
    with slurm() as job:
        try:
            wait_for_steps(tmp_path / "out", 2, [job])
            job.send_signal(signal.SIGTERM)  # to the batch shell alone, as --signal=B:TERM@120 does
            output = job.communicate(timeout=120)[0]
        finally:
            # each machine of the fake srun is a group of its own
            for group in [job.pid, *map(int, (tmp_path / "step").read_text().split())]:
                kill(group)
    last = check_that_the_run_is_whole(tmp_path / "out")
    assert f"stopped by SIGTERM after step {last}" in output
    assert job.returncode != 0  # torchrun's own exit code after SIGTERM
    assert said.read_text() == "scancel --signal=TERM 77\nscontrol requeue 77\n"

    with slurm(f"train.stop_after={last + 2}", SLURM_RESTART_COUNT="1") as again:
        output = again.communicate(timeout=200)[0]
    assert again.returncode == 0, output
    assert f"continuing after step {last} on {NODES} ranks" in output
    assert check_that_the_run_is_whole(tmp_path / "out") == last + 2
    assert said.read_text().count("requeue") == 1  # a run that has ended is not queued again


def test_a_run_that_fails_is_not_queued_again(slurm: Callable[..., subprocess.Popen[str]], tmp_path: Path) -> None:
    with slurm("train.stepz=3") as job:
        assert "no key train.stepz" in job.communicate(timeout=200)[0]
    assert job.returncode != 0
    assert not (tmp_path / "said").exists()


def kill(group: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)


def start(command: list[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """A process in a group of its own."""
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=ROOT, start_new_session=True, **streams)


def manifest(name: str) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((RECIPES / "kubernetes" / name).read_text(encoding="utf-8"))
    return found


def job_set(recipe: Path, port: str) -> list[Machine]:
    """The command and the variables of each pod of the JobSet, of which there are as many as `NODES`."""
    ((container,),) = (pod["containers"] for pod in pods_of(manifest("jobset.yaml")))
    values = {entry["name"]: entry["value"] for entry in container["env"]} | {"MASTER_ADDR": "localhost"}
    changes = {
        "--nnodes=8": f"--nnodes={NODES}",
        "--nproc-per-node=8": "--nproc-per-node=1",
        "--master-port=29500": f"--master-port={port}",
        "recipes/train_7b.toml": str(recipe),
        "parallel.replicas=8": f"parallel.replicas={NODES}",
    }
    assert changes.keys() <= {*container["command"]}
    words = [changes.get(word, word) for word in container["command"]]
    pods = [values | {"JOB_COMPLETION_INDEX": str(index), "OMP_NUM_THREADS": "1"} for index in range(NODES)]
    return [([kubelet(word, known) for word in words], known) for known in pods]


def kubelet(word: str, known: Mapping[str, str]) -> str:
    """A word of a command with $(NAME) replaced by the variables of its container."""
    return re.sub(r"\$\((\w+)\)", lambda found: known[found[1]], word)


def train_job(recipe: Path, port: str) -> list[Machine]:
    """The same for the TrainJob, with the variables that Kubeflow Trainer gives to the container `node`."""
    ((container,),) = (pod["containers"] for pod in pods_of(manifest("training-runtime.yaml")))
    trainer = manifest("train-job.yaml")["spec"]["trainer"]
    changes = {"recipes/train_7b.toml": str(recipe), "parallel.replicas=8": f"parallel.replicas={NODES}"}
    assert changes.keys() == {*trainer["args"]}
    words = [*container["command"], *(changes[word] for word in trainer["args"])]
    job = {"PET_NNODES": str(NODES), "PET_NPROC_PER_NODE": "1", "PET_MASTER_ADDR": "localhost", "PET_MASTER_PORT": port}
    return [(words, {**job, "PET_NODE_RANK": str(index)}) for index in range(NODES)]


def sky_task(recipe: Path, port: str) -> list[Machine]:
    """The same for the task of SkyPilot."""
    script = yaml.safe_load((RECIPES / "skypilot/train.yaml").read_text(encoding="utf-8"))["run"].rstrip()
    for written, played in (("recipes/train_7b.toml", str(recipe)), ("29500", port)):
        assert written in script
        script = script.replace(written, played)
    task = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NUM_GPUS_PER_NODE": "1", "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.2"}
    words = ["bash", "-c", f'{script} "$@"', "run"]
    return [(words, {**task, "SKYPILOT_NODE_RANK": str(index)}) for index in range(NODES)]


@contextmanager
def started(machines: list[Machine], node: dict[str, str], *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """A process for each machine; whatever is left of them at the end is killed."""
    processes = [start([*words, *more], {**node, **values}) for words, values in machines]
    try:
        yield processes
    finally:
        for process in processes:
            kill(process.pid)


@pytest.mark.parametrize("machines", [job_set, train_job, sky_task])
def test_a_recipe_trains_on_the_machines_that_it_is_given(
    machines: Callable[[Path, str], list[Machine]], node: dict[str, str], recipe: Path, port: str, tmp_path: Path
) -> None:
    with started(machines(recipe, port), node, "train.stop_after=2") as processes:
        outputs = [process.communicate(timeout=200)[0] for process in processes]
        assert [process.returncode for process in processes] == [0] * NODES, outputs
    assert f"a new run on {NODES} ranks" in outputs[0]
    assert check_that_the_run_is_whole(tmp_path / "out") == 2


def test_deleted_pods_save_and_the_next_ones_continue(
    node: dict[str, str], recipe: Path, port: str, tmp_path: Path
) -> None:
    with started(job_set(recipe, port), node) as pods:
        wait_for_steps(tmp_path / "out", 2, pods)
        for pod in pods:
            pod.send_signal(signal.SIGTERM)  # the kubelet signals the first process of a container, here torchrun
        outputs = [pod.communicate(timeout=120)[0] for pod in pods]
    last = check_that_the_run_is_whole(tmp_path / "out")
    assert f"stopped by SIGTERM after step {last}" in outputs[0]
    with started(job_set(recipe, port), node, f"train.stop_after={last + 1}") as pods:
        outputs = [pod.communicate(timeout=200)[0] for pod in pods]
    assert f"continuing after step {last} on {NODES} ranks" in outputs[0]
    assert check_that_the_run_is_whole(tmp_path / "out") == last + 1


def test_the_recipe_of_the_clusters_is_one_that_the_trainer_reads() -> None:
    from tokshard.run_files.recipe import load_config

    config = load_config(str(RECIPES / "train_7b.toml"), ["parallel.replicas=8"])
    assert config.data.global_batch_size % 64 == 0
    assert config.data.global_batch_size * config.data.seq_len * config.train.steps == pytest.approx(1e12, rel=0.05)
