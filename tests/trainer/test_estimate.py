"""What the step of a big job communicates and keeps in memory, by arithmetic, and what torch really does."""

from __future__ import annotations

import json
import runpy
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from tests.contract.faults import Launcher
from tests.trainer.runs import as_toml, configuration, on_ranks
from tokshard.run_files.model_shape import Shape
from tokshard.run_files.recipe import Compute, Optimizer, Parallel, resolve
from tokshard.trainer.attention import Documents
from tokshard.trainer.batches import padding
from tokshard.trainer.estimate import Estimate, estimate, kept_bytes, main, report
from tokshard.trainer.losses import backward, micro_batches
from tokshard.trainer.model import Block, initialise, rotations
from tokshard.trainer.optimizer import make_optimizer
from tokshard.trainer.parallel import make_mesh, process_group, sharded_model

SMALL = {"dim": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 128, "vocab_size": 256}


def of_step(ranks: int, **changes: Any) -> Estimate:
    """The corpora do not exist."""
    sizes = {f"model__{name}": value for name, value in SMALL.items()} | {"data__seq_len": 128}
    sizes |= {"data__global_batch_size": 4 * ranks, "train__micro_batch_size": 2, "parallel__precision": "bf16"}
    fields = configuration({"code": "nowhere"}, Path("nowhere"), data__weights={}, **sizes | changes)
    return estimate(resolve(fields), ranks=ranks)


def of_7b(ranks: int, *, rows: int, **changes: Any) -> Estimate:
    sizes: dict[str, Any] = dict.fromkeys(SMALL) | {"preset": "7B", "vocab_size": 32_000}
    model = {f"model__{name}": value for name, value in sizes.items()}
    return of_step(ranks, data__seq_len=4_096, data__global_batch_size=rows * ranks, **model, **changes)


def count_calls(rank: int, place: str, tied: str, name: Any) -> None:
    """How often this rank calls each collective in a step of two micro-batches."""
    settings, shape = Parallel(precision="bf16", device="cpu"), Shape(**SMALL, tied_embeddings=tied == "True")
    with process_group(settings) as device:
        model = sharded_model(shape, make_mesh(settings, device), settings, Compute())
        initialise(model, seed=0)
        optimizer = make_optimizer(model, Optimizer(name=name))
        parts = list(micro_batches(padding(4, 128), 2, device))
        with torch.profiler.profile() as profile:
            for _ in backward(model, parts):
                pass
            optimizer.step()
        calls = Counter(event.name for event in profile.events() if event.name.startswith("c10d::"))
        (Path(place) / f"calls-{rank}.json").write_text(json.dumps(calls))


@pytest.mark.slow
@pytest.mark.parametrize(("tied", "name"), [(False, "adamw"), (True, "muon")])
def test_collectives_are_those_of_a_real_step(tmp_path: Path, forks: Launcher, tied: bool, name: str) -> None:
    found = of_step(2, model__tied_embeddings=tied, optimizer__name=name).collectives
    on_ranks(forks, 2, count_calls, tmp_path, tied, name, seconds=60)
    names = {
        "_allgather_base_": "all-gather",
        "_reduce_scatter_base_": "reduce-scatter",
        "alltoall_base_": "all-to-all",
    }
    for rank in range(2):
        calls = json.loads((tmp_path / f"calls-{rank}.json").read_text())
        assert {names[name.removeprefix("c10d::")]: count for name, count in calls.items()} == {
            name: of["count"] for name, of in found.items()
        }


def test_bytes_of_collectives_are_those_of_padded_tensors() -> None:
    found = of_step(8)
    ends = 2 * 256 * 64 + 64
    assert found.collectives["all-gather"]["bytes"] == 2 * 2 * (2 * (found.parameters - ends) + ends)
    assert found.collectives["reduce-scatter"]["bytes"] == 2 * 4 * found.parameters
    assert found.collectives["reduce-scatter"]["sent"] == 2 * 4 * found.parameters * 7 // 8
    assert (found.rows, found.micro_batches) == (4, 2)
    for reduce, size in (("fp32", 4), ("bf16", 2)):
        copies = of_step(8, parallel__replicas=2, parallel__reduce=reduce).collectives["all-reduce"]
        assert copies == {"count": 4, "bytes": size * found.parameters // 4, "sent": size * found.parameters // 4}
    matrices = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)  # of both blocks; there and back in bf16
    dealt = of_step(8, optimizer__name="muon").collectives["all-to-all"]
    assert (dealt["bytes"], dealt["sent"]) == (2 * 2 * matrices, 2 * 2 * matrices // 8 * 7 // 8)
    # 5 ranks pad the rows of each tensor to a multiple of 5
    block = [(64, 64), (32, 64), (32, 64), (64, 64), (128, 64), (128, 64), (64, 128), (64, 1), (64, 1)]
    padded = sum(-(-rows // 5) * 5 * columns for rows, columns in [*block, *block, (256, 64), (256, 64), (64, 1)])
    assert of_step(5).collectives["reduce-scatter"]["bytes"] == 2 * 4 * padded > 2 * 4 * found.parameters


def test_every_rank_keeps_its_part_of_parameters_and_states() -> None:
    found = of_step(8)
    assert found.peak_bytes["parameters"] == 4 * found.parameters // 8
    assert found.peak_bytes["optimizer"] == 2 * found.peak_bytes["parameters"]
    of_blocks = 2 * (2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64)  # Muon has one state of each of these
    assert found.peak_bytes["optimizer"] - of_step(8, optimizer__name="muon").peak_bytes["optimizer"] == of_blocks // 2


@pytest.mark.parametrize("qk_norm", [False, True])
def test_a_block_keeps_what_torch_saves_for_its_backward_pass(qk_norm: bool) -> None:
    """On the CPU a norm keeps its input and its result in fp32, and kernels on a GPU the input alone."""
    shape, tokens = Shape(**{**SMALL, "num_heads": 4, "num_kv_heads": 2}, qk_norm=qk_norm), 256
    block = Block(shape).bfloat16()
    own, saved = {one.untyped_storage().data_ptr() for one in block.parameters()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    documents = Documents(cu_seqlens=torch.tensor([0, tokens], dtype=torch.int32), max_seqlen=tokens)
    hidden = torch.randn(tokens, shape.dim, dtype=torch.bfloat16, requires_grad=True)
    rotation = rotations(torch.arange(tokens), shape)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden, rotation, documents)
    normed = 2 * shape.dim + (shape.query_dim + shape.kv_dim if qk_norm else 0)
    statistics = 2 + (shape.num_heads + shape.num_kv_heads if qk_norm else 0)
    on_cpu = (2 * 4 - 2) * normed + 4 * statistics + 4 * shape.head_size  # and the angles of RoPE
    assert sum(saved.values()) / tokens == pytest.approx(kept_bytes(shape, "none", 2) + on_cpu, rel=0.002)


def test_recomputation_and_chunks_of_logits_lower_what_a_step_keeps_and_accumulation_adds_gradients() -> None:
    sizes: dict[str, Any] = {"data__seq_len": 512, "data__global_batch_size": 8, "train__micro_batch_size": 0}
    whole, kept = of_step(2, **sizes).peak_bytes, of_step(2, **sizes, compute__recompute="full").peak_bytes
    assert whole["activations"] - kept["activations"] == 2 * 4 * 512 * (kept_bytes(Shape(**SMALL), "none", 2) - 2 * 64)
    twice = of_step(2, **sizes | {"data__global_batch_size": 16, "train__micro_batch_size": 4})
    assert "gradients" not in whole
    assert twice.peak_bytes == whole | {"gradients": 4 * twice.parameters // 2}
    chunked = of_step(2, **sizes, compute__loss_chunk=256).peak_bytes
    assert whole["logits"] == 12 * 4 * 512 * 256
    assert sum(chunked.values()) < sum(whole.values()) - 12 * 3 * 512 * 256 + 2**20


@pytest.mark.parametrize(("recompute", "gib"), [("full", 103.7), ("selective", 113.8)])
def test_memory_is_within_3_percent_of_what_7b_took_on_a_gpu(recompute: str, gib: float) -> None:
    """One H200, two micro-batches of a row of 4,096 tokens."""
    found = of_7b(1, rows=2, compute__recompute=recompute, compute__loss_chunk=4_096, train__micro_batch_size=1)
    *_, last = report(found)
    assert float(last.removeprefix("peak memory of a rank").removesuffix("GiB")) == pytest.approx(gib, rel=0.03)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
def test_the_command_prints_lines_or_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    fields = configuration({"code": "nowhere"}, tmp_path, data__weights={}, data__global_batch_size=8)
    recipe.write_text(as_toml(fields | {"model": SMALL}))
    command = [str(recipe), "ranks=8", "parallel.replicas=2", "optimizer.name=muon"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "on 8 ranks, 2 copies; a step of a rank is 1 row in 1 micro-batch" in said
    assert all(name in said for name in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "a rank sends"))
    assert main([*command, "data.batch_ramp=[[2, 24], [3, 16]]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["collectives"]["all-reduce"]["count"] == 4
    assert found["rows"] == 3  # of the largest batch
    assert main([]) == 2
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["estimate", "--help"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("tokshard.trainer.estimate", run_name="__main__")
    assert capsys.readouterr().out.startswith("usage: python -m tokshard.trainer.estimate")
