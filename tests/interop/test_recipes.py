"""The recipes for other frameworks give each rank its rows once, and continue exactly from its checkpoints.

Each recipe trains on real gloo ranks, saves at every third step, and prints which samples a rank was given. Two
environments run these tests: each those whose packages it has.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.interop.real_text import ROOT, TORCHRUN, environment, run
from tests.ranks import free_port
from tests.spec.order import WORD, G, mix
from tests.trainer.runs import as_toml, configuration, corpora, steps_of
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS
from tokshard.runtime import StreamPlan

GLOBAL_BATCH = 12  # of the recipes
WRAPPERS = {"torchtitan": [ROOT / "tests/interop/torchtitan_on_cpu.py"]}

pytestmark = [pytest.mark.interop, pytest.mark.timeout(600)]

Steps = dict[int, list[int]]
"""The samples of a rank, in the order in which it was given them."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("corpus") / "corpus")


def write(path: Path, *, weights: Sequence[float] = ()) -> Path:
    """A corpus; or one with loss spans, the second half of each document, whose rows are packed whole."""
    lengths = [2 + 7 * index % 83 for index in range(300)]
    spans = {LOSS: [[length // 2, length] for length in lengths], WEIGHTS: [[of] for of in weights]} if weights else {}
    source = Source(documents=documents_of(lengths, vocab_size=500), metadata=spans)
    return write_corpus(path, sources=[source], columns={name: LOSS_COLUMNS[name] for name in spans})


def samples_of(output: str) -> Steps:
    """What a recipe printed."""
    samples: Steps = {}
    for rank, row in re.findall(r"rank (\d+) samples \[([\d, ]+)\]", output):
        samples.setdefault(int(rank), []).extend(map(int, row.split(",")))
    return samples


def expected(world_size: int, start: int, stop: int) -> Steps:
    """The samples of each rank in the steps from `start` to `stop`: slices of the global batches, in turn."""
    rows, found = GLOBAL_BATCH // world_size, {rank: list[int]() for rank in range(world_size)}
    for first in range(start * GLOBAL_BATCH, stop * GLOBAL_BATCH, GLOBAL_BATCH):
        for rank, samples in found.items():
            part = (rank + mix(first * G % WORD)) % world_size  # ORDER.md, section 9
            samples.extend(range(first + part * rows, first + (part + 1) * rows))
    return found


def check_recipe(start: Callable[[int, int], Steps], forget_last_save: Callable[[], None] = lambda: None) -> None:
    """A recipe reads the plan's batches, and after a stop past its checkpoint those after the checkpoint: on any size.

    Args:
        start: runs the recipe on so many processes up to so many steps.
        forget_last_save: removes what the framework saved at its end.
    """
    for ranks, first, stop in ((2, 0, 5), (2, 3, 7), (3, 6, 8), (1, 6, 7)):
        assert start(ranks, stop) == expected(ranks, first, stop)
        forget_last_save()


@pytest.mark.parametrize(
    ("package", "recipe", "with_spans", "saves"),
    [
        ("torch", "torch", False, ""),
        ("torchdata.stateful_dataloader", "dataloader", False, ""),
        ("accelerate", "accelerate", False, ""),
        ("accelerate", "accelerate", True, ""),
        ("accelerate", "hf_trainer", False, "checkpoint-"),
        ("torchtitan", "torchtitan", False, "step-"),
        ("torchtitan", "torchtitan", True, "step-"),
        ("olmo_core", "olmo_core", False, "step"),
    ],
)
def test_a_recipe_reads_the_plan_on_any_number_of_ranks_and_resumes_exactly(
    package: str, recipe: str, with_spans: bool, saves: str, tmp_path: Path
) -> None:
    """A framework that also saves at the end of a run has checkpoints whose names begin with `saves`."""
    pytest.importorskip(package)
    corpus, out = write(tmp_path / "corpus", weights=[1.0] * 300 * with_spans), tmp_path / "out"  # the recipe makes it
    script = [*WRAPPERS.get(recipe, ()), ROOT / f"recipes/with_{recipe}.py", corpus, out]

    def start(ranks: int, steps: int) -> Steps:
        return samples_of(run(*TORCHRUN, f"--nproc-per-node={ranks}", *script, steps, cwd=tmp_path).stdout)

    def forget_last_save() -> None:
        for path in out.glob(f"{saves}*") if saves else ():
            number = path.name.removeprefix(saves)
            if number.isdigit() and int(number) % 3:
                shutil.rmtree(path)

    check_recipe(start, forget_last_save)
    if not saves:  # a loop of its own
        assert start(1, 6) == {}, "all steps are done"


SPY = """import runpy, sys, torch
if __name__ == "__main__":  # not in the workers of a DataLoader
    backward, sys.argv = torch.Tensor.backward, sys.argv[1:]
    torch.Tensor.backward = lambda loss: print(f"loss {loss.item()}", flush=True) or backward(loss)
    torch.manual_seed(17)
    runpy.run_path(sys.argv[0], run_name="__main__")"""
PACKAGES = {"dataloader": "torchdata.stateful_dataloader", "hf_trainer": "accelerate"}
REFUSE = ("hf_trainer", "olmo_core", "torchtitan")


@pytest.mark.parametrize("recipe", ["torch", "dataloader", "accelerate", "lightning", "jax", "torchft", *REFUSE])
def test_the_losses_of_all_ranks_are_the_weighted_mean_or_weights_are_refused(recipe: str, tmp_path: Path) -> None:
    torch, _ = pytest.importorskip("torch"), pytest.importorskip(PACKAGES.get(recipe, recipe))
    (tmp_path / "spy.py").write_text(SPY)
    corpus, script = write(tmp_path / "corpus", weights=[4e-4, 1e-4] * 150), ROOT / f"recipes/with_{recipe}.py"
    words, size = [*WRAPPERS.get(recipe, ()), script, corpus, tmp_path / "out", 1], 2**14
    command = [*TORCHRUN, f"--nproc-per-node={1 if recipe in REFUSE else 2}", tmp_path / "spy.py", *words, 2]
    if recipe in REFUSE:
        with pytest.raises(AssertionError, match="loss knows no weights of targets"):
            run(*command)
        return
    torch.manual_seed(17)
    model = torch.nn.Sequential(torch.nn.Embedding(size, 16), torch.nn.Linear(16, size))
    embedding, head, bias = (parameter.detach().numpy() for parameter in model.parameters())
    if recipe == "torchft":
        functions = runpy.run_path(str(script))
        with functions["begin"](corpus)[0] as loader:
            said = f"loss {functions['loss_of'](model, next(iter(loader)))}"
    elif recipe == "jax":
        rng = np.random.default_rng(17)
        embedding, head, bias = rng.normal(size=(size, 16)), rng.normal(size=(16, size)).T, 0 * bias
        said = run(*words, f"localhost:{free_port()}", 1, 0, env=environment(JAX_PLATFORMS="cpu")).stdout
    else:
        said = run(*command).stdout
    rows = list(map(StreamPlan(corpus, seq_len=32, seed=17).sample, range(16 if recipe == "torchft" else GLOBAL_BATCH)))
    ids, labels, weights = (np.hstack([row[key] for row in rows]) for key in ("input_ids", "labels", "loss_weights"))
    logits = embedding[ids] @ head.T + bias
    losses = np.logaddexp.reduce(logits, axis=1) - logits[range(len(labels)), labels]
    found = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert np.mean(found) == pytest.approx(np.average(losses, weights=weights), abs=1e-4)


# torchft


def test_replicas_of_the_recipe_for_torchft_that_are_killed_lose_no_sample(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchft")
    recipe, steps = ROOT / "recipes/with_torchft.py", 6
    run(recipe, corpus, tmp_path, steps, 3, seconds=550)
    lines = [json.loads(line) for path in tmp_path.glob("*.jsonl") for line in path.read_text("utf-8").splitlines()]
    functions = runpy.run_path(str(recipe))
    loader, model, optimizer = functions["begin"](corpus)  # a run of one, in which nothing is killed
    for step, batch in zip(range(steps), loader, strict=False):
        loss = functions["loss_of"](model, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        those = [line for line in lines if line["step"] == step]
        samples = [sample for line in those for sample in line["samples"]]
        assert sorted(samples) == list(range(16 * step, 16 * step + 16))
        assert [line["loss"] for line in those] == pytest.approx([loss.item()] * len(those), abs=1e-5)
        assert {line["replicas"] for line in those} == {len(those)}
        if step % 3 < 2:
            assert len(those) == 3 - step % 3  # in steps 1 and 4 one is killed, and it is back in step 3
    loader.close()


# Lightning


def with_lightning(script: Path, corpus: Path, out: Path, steps: int, devices: int) -> Steps:
    return samples_of(run(script, corpus, out, steps, devices, cwd=out.parent).stdout)


def test_the_recipe_for_lightning(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    script, out = ROOT / "recipes/with_lightning.py", tmp_path / "out"

    def forget_last_save() -> None:
        third = max(out.glob("epoch=*-step=*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
        shutil.copy(third, out / "last.ckpt")

    check_recipe(lambda devices, steps: with_lightning(script, corpus, out, steps, devices), forget_last_save)


def test_the_batch_that_the_lightning_recipe_warns_of_is_lost(corpus: Path, tmp_path: Path) -> None:
    """Without a limit, Lightning fetches a batch more than it trains on, and its checkpoint passes over that one."""
    pytest.importorskip("lightning")
    text = (ROOT / "recipes/with_lightning.py").read_text(encoding="utf-8")
    (tmp_path / "unlimited.py").write_text(re.sub(r"\n +limit_train_batches=.*", "", text), encoding="utf-8")
    first, second = (with_lightning(tmp_path / "unlimited.py", corpus, tmp_path / "out", steps, 1) for steps in (4, 5))
    assert first
    assert second == expected(1, 4, 6)


# JAX


def test_the_recipe_for_jax(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("jax")
    out = tmp_path / "out"  # the recipe makes it

    def start(processes: int, steps: int) -> Steps:
        place = f"localhost:{free_port()}"
        script = [sys.executable, ROOT / "recipes/with_jax.py", corpus, out, steps, place, processes]
        streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        jobs = [
            subprocess.Popen(
                [str(word) for word in (*script, process)], env=environment(JAX_PLATFORMS="cpu"), **streams
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

    check_recipe(start)
    assert start(1, 6) == {}, "all steps are done"


# Ray Train


START_RAY = """
import ray, runpy, sys
ray.init(num_cpus=6, include_dashboard=False)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
"""More CPUs than this machine has: the workers of three ranks are meant to fit in."""


def test_the_recipe_for_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    recipe, out = tmp_path / "run.toml", tmp_path / "out"
    changes = {"data__global_batch_size": GLOBAL_BATCH, "checkpoint__every": 0}
    recipe.write_text(as_toml(configuration(corpora(tmp_path / "corpora"), out, **changes)))
    env = environment(HOME=str(tmp_path), RAY_USAGE_STATS_ENABLED="0")
    for workers, steps in ((2, 3), (3, 5)):
        script = [ROOT / "recipes/with_ray_train.py", recipe, workers, f"train.stop_after={steps}"]
        done = run("-c", START_RAY, *script, env=env, seconds=280)
        assert f"on {workers} ranks" in done.stdout + done.stderr
    read = [(step["step"], step["samples"]) for step in steps_of(out)]
    assert read == [(index + 1, [12 * index, 12 * (index + 1)]) for index in range(5)]


# models of Hugging Face


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torchao, which transformers imports
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_model_keeps_documents_apart_unless_it_has_a_cache(corpus: Path, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tokshard.runtime import StreamingLoader

    loader = StreamingLoader(StreamPlan(corpus, seq_len=128, seed=17), global_batch_size=4)
    batch = next(iter(loader))
    loader.close()
    torch.manual_seed(17)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=500, use_cache=False, attn_implementation=attention, **sizes)
    model = transformers.LlamaForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.weight)  # so that the loss depends on what is attended to
    inputs = {key: batch[key] for key in ("input_ids", "position_ids", "labels")} | {"shift_labels": batch["labels"]}
    loss, targets = 0.0, 0
    with torch.no_grad():
        for row in range(4):
            starts = torch.nonzero(batch["position_ids"][row] == 0).flatten().tolist()
            for start, stop in zip(starts, [*starts[1:], 128], strict=True):
                labels = batch["labels"][row, start:stop]
                logits = model(input_ids=batch["input_ids"][row : row + 1, start:stop]).logits[0]
                loss += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
                targets += int((labels != -100).sum())
        alone = pytest.approx(loss / targets, abs=1e-4)
        assert model(**inputs).loss.item() == alone
        assert model(**inputs, use_cache=True).loss.item() != alone
