"""The recipes for other frameworks give each rank its rows once, and continue exactly from its checkpoints.

Each recipe trains on real gloo ranks, saves at every third step, and prints which samples a rank was given.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.runtime.page_model import WORD, G, mix
from tokshard.format.loss import LOSS, LOSS_COLUMNS

ROOT = Path(__file__).parents[2]
GLOBAL_BATCH = 12  # of the recipes

pytestmark = [pytest.mark.interop, pytest.mark.timeout(420)]

Steps = dict[int, list[int]]
"""The samples of a rank, in the order in which it was given them."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = [2 + 7 * index % 83 for index in range(300)]
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus", documents_of(lengths, vocab_size=500))


@pytest.fixture(scope="module")
def conversations(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `corpus`, with loss spans: the second half of each document. Its rows are packed whole."""
    lengths = [2 + 7 * index % 83 for index in range(300)]
    spans = [[length // 2, length] for length in lengths]
    source = Source(documents=documents_of(lengths, vocab_size=500), metadata={LOSS: spans})
    kind = {LOSS: LOSS_COLUMNS[LOSS]}
    return write_corpus(tmp_path_factory.mktemp("conversations") / "corpus", sources=[source], columns=kind)


def environment() -> dict[str, str]:
    """Of a process that trains on the CPU, and asks no hub."""
    kept = {name: value for name, value in os.environ.items() if name not in ("WORLD_SIZE", "RANK")}
    return {
        **kept,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }


def run(arguments: list[str], directory: Path) -> Steps:
    """Run a recipe on the CPU; the samples of each rank."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"
    return samples_of(done.stdout)


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
            part = (rank + mix(first * G % WORD)) % world_size  # ORDER.md, section 10
            samples.extend(range(first + part * rows, first + (part + 1) * rows))
    return found


def check_recipe(start: Callable[[int, int], Steps], forget_last_save: Callable[[], None]) -> None:
    """A recipe reads the plan's batches, and after a stop past its checkpoint those after the checkpoint: on any size.

    Args:
        start: runs the recipe on so many processes up to so many steps.
        forget_last_save: removes what the framework saved at its end.
    """
    assert start(2, 5) == expected(2, 0, 5)
    forget_last_save()
    assert start(2, 7) == expected(2, 3, 7)
    forget_last_save()
    assert start(3, 8) == expected(3, 6, 8)
    forget_last_save()
    assert start(1, 7) == expected(1, 6, 7)


def torchrun(recipe: str, corpus: Path, directory: Path, *, wrapper: Path | None = None) -> Callable[[int, int], Steps]:
    """What starts a recipe on so many ranks up to so many steps.

    Args:
        wrapper: a script that runs the recipe.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    wrapped = [str(wrapper)] if wrapper else []
    script = [*wrapped, str(ROOT / "recipes" / recipe), str(corpus), str(directory / "out")]
    (directory / "out").mkdir()
    return lambda ranks, steps: run([*launcher, f"--nproc-per-node={ranks}", *script, str(steps)], directory)


def test_the_recipe_for_a_stateful_dataloader(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("torchdata.stateful_dataloader")
    check_recipe(torchrun("with_dataloader.py", corpus, tmp_path), lambda: None)


@pytest.mark.parametrize("data", ["corpus", "conversations"])
def test_the_recipe_for_accelerate(data: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    check_recipe(torchrun("with_accelerate.py", request.getfixturevalue(data), tmp_path), lambda: None)


def test_the_recipe_for_the_hugging_face_trainer(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers")

    def forget_last_save() -> None:
        for path in (tmp_path / "out").glob("checkpoint-*"):
            if int(path.name.removeprefix("checkpoint-")) % 3:
                shutil.rmtree(path)

    check_recipe(torchrun("with_hf_trainer.py", corpus, tmp_path), forget_last_save)


def test_the_recipe_for_lightning(corpus: Path, tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    def start(devices: int, steps: int) -> Steps:
        script = [str(ROOT / "recipes/with_lightning.py"), str(corpus), str(tmp_path / "out")]
        return run([*script, str(steps), str(devices)], tmp_path)

    def forget_last_save() -> None:
        third = max((tmp_path / "out").glob("epoch=*-step=*.ckpt"), key=lambda path: int(path.stem.rpartition("=")[2]))
        shutil.copy(third, tmp_path / "out/last.ckpt")

    check_recipe(start, forget_last_save)


def test_the_batch_that_the_lightning_recipe_warns_of_is_lost(corpus: Path, tmp_path: Path) -> None:
    """Without a limit, Lightning fetches a batch more than it trains on, and its checkpoint passes over that one."""
    pytest.importorskip("lightning")
    text = (ROOT / "recipes/with_lightning.py").read_text(encoding="utf-8")
    (tmp_path / "unlimited.py").write_text(re.sub(r"\n +limit_train_batches=.*", "", text), encoding="utf-8")
    run(["unlimited.py", str(corpus), "out", "4", "1"], tmp_path)
    assert run(["unlimited.py", str(corpus), "out", "5", "1"], tmp_path) == expected(1, 4, 6)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_hugging_face_model_keeps_documents_apart_unless_it_has_a_cache(corpus: Path, attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    from tokshard.runtime import StreamingLoader, StreamPlan

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
