"""The recipes for other trainers, each with packages of its own: exact rows on two ranks, an exact resume on three."""

from __future__ import annotations

import runpy
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.interop.test_training_frameworks import (  # noqa: F401 - two are fixtures
    ROOT,
    Steps,
    check_recipe,
    conversations,
    corpus,
    environment,
    expected,
    run,
    samples_of,
    torchrun,
)
from tests.trainer.runs import configuration, corpora, steps_of
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]


def delete_all_but_thirds(out: Path, prefix: str) -> Callable[[], None]:
    """Removes what a framework saves at the end of a run, so that the next one resumes from a step before it."""

    def forget() -> None:
        for path in out.glob(f"{prefix}*"):
            number = path.name.removeprefix(prefix)
            if number.isdigit() and int(number) % 3:
                shutil.rmtree(path)

    return forget


def test_the_recipe_for_plain_torch(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("torch")
    check_recipe(torchrun("with_torch.py", corpus, tmp_path), lambda: None)


@pytest.mark.parametrize("data", ["corpus", "conversations"])
def test_the_recipe_for_torchtitan_and_its_trainer_on_the_cpu(
    data: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    pytest.importorskip("torchtitan")
    path = request.getfixturevalue(data)
    start = torchrun("with_torchtitan.py", path, tmp_path, wrapper=ROOT / "tests/interop/torchtitan_on_cpu.py")
    check_recipe(start, delete_all_but_thirds(tmp_path / "out", "step-"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, which torchtitan imports
def test_the_recipe_for_torchtitan_refuses_weights_of_targets(tmp_path: Path) -> None:
    pytest.importorskip("torchtitan")
    loader = runpy.run_path(str(ROOT / "recipes/with_torchtitan.py"))["Loader"]

    def first(weight: float) -> object:
        metadata = {LOSS: [[2, 9]] * 40, WEIGHTS: [[weight]] * 40}
        source = Source(documents=documents_of([20] * 40, vocab_size=500), metadata=metadata)
        path = write_corpus(tmp_path / str(weight), sources=[source], columns=LOSS_COLUMNS)
        config = loader.Config(dataset_path=str(path))
        return next(iter(loader(config, dp_rank=0, dp_world_size=1, seq_len=32, local_batch_size=2)))

    first(1.0)
    with pytest.raises(ValueError, match="knows no weights"):
        first(0.5)


def test_the_recipe_for_olmo_core(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("olmo_core")
    start = torchrun("with_olmo_core.py", corpus, tmp_path)
    check_recipe(start, delete_all_but_thirds(tmp_path / "out", "step"))


def test_the_recipe_for_jax(corpus: Path, tmp_path: Path) -> None:  # noqa: F811
    pytest.importorskip("jax")
    out = tmp_path / "out"
    out.mkdir()

    def start(processes: int, steps: int) -> Steps:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            place = f"localhost:{probe.getsockname()[1]}"
        script = [sys.executable, str(ROOT / "recipes/with_jax.py"), str(corpus), str(out), str(steps), place]
        jobs = [
            subprocess.Popen(
                [*script, str(processes), str(process)],
                env={**environment(), "JAX_PLATFORMS": "cpu"},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for process in range(processes)
        ]
        try:
            said = [job.communicate(timeout=200)[0] for job in jobs]
        finally:
            for job in jobs:
                job.kill()
        assert [job.returncode for job in jobs] == [0] * processes, said
        losses = {text.rpartition("loss ")[2] for text in said}
        assert len(losses) == 1  # all processes have the parameters of the global batch
        return samples_of("".join(said))

    check_recipe(start, lambda: None)


def test_jax_gets_the_batches_that_torch_gets(corpus: Path) -> None:  # noqa: F811
    jax = pytest.importorskip("jax")
    from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan

    plan = StreamPlan(corpus, seq_len=32, seed=17)
    keys = ("input_ids", "labels", "position_ids", "sample_index")
    with_torch, with_numpy = (loader(plan, global_batch_size=12) for loader in (StreamingLoader, NumpyLoader))
    kept = []
    for _, theirs, ours in zip(range(4), with_torch, with_numpy, strict=False):
        kept.append({key: jax.numpy.asarray(ours[key].astype(np.int32)) for key in keys})
        for key in keys:
            np.testing.assert_array_equal(kept[-1][key], theirs[key].numpy())
    # the arrays of JAX do not change as the loader goes on
    again = iter(NumpyLoader(plan, global_batch_size=12))
    for arrays, batch in zip(kept, again, strict=False):
        np.testing.assert_array_equal(arrays["input_ids"], batch["input_ids"])
    assert with_torch.state_dict() == with_numpy.state_dict()
    with_torch.close()
    with_numpy.close()


START_RAY = """
import ray, runpy, sys
ray.init(num_cpus=6, include_dashboard=False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""More CPUs than this machine has: the workers of three ranks are meant to fit in."""


def test_the_recipe_for_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    from tests.trainer.test_command import as_toml

    recipe, out = tmp_path / "run.toml", tmp_path / "out"
    changes = {"data__global_batch_size": 12, "checkpoint__every": 0}
    recipe.write_text(as_toml(configuration(corpora(tmp_path / "corpora"), out, **changes)))
    for workers, steps in ((2, 3), (3, 5)):
        script = [str(ROOT / "recipes/with_ray_train.py"), str(recipe), str(workers), f"train.stop_after={steps}"]
        done = subprocess.run(
            [sys.executable, "-c", START_RAY, *script],
            env={**environment(), "HOME": str(tmp_path), "RAY_USAGE_STATS_ENABLED": "0"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"on {workers} ranks" in done.stdout + done.stderr
    read = [(step["step"], step["samples"]) for step in steps_of(out)]
    assert read == [(index + 1, [12 * index, 12 * (index + 1)]) for index in range(5)]
