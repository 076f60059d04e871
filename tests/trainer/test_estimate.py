"""What the step of a big job communicates and keeps in memory, found by running it without content."""

from __future__ import annotations

import cProfile
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.fsdp._fully_shard import _fsdp_param

from tokshard.errors import CorpusError
from tokshard.run_files.recipe import resolve
from tokshard.trainer import step_ledger
from tokshard.trainer.estimate import Estimate, estimate, main
from tokshard.trainer.step_ledger import COLLECTIVES, GATHERED, StepLedger, fake_group

NUM_LAYERS, DIM, IDS = 2, 64, 256
SMALL = {"dim": DIM, "num_layers": NUM_LAYERS, "num_heads": 2, "num_kv_heads": 1, "hidden_dim": 128, "vocab_size": IDS}
GIB = 1 << 30


@functools.cache
def of_step(ranks: int, **changes: Any) -> Estimate:
    """The corpora do not exist."""
    fields: dict[str, Any] = {
        "data": {"corpora": {"code": "/nowhere"}, "seq_len": 128, "global_batch_size": 4 * ranks},
        "model": {"preset": "10M", **SMALL},
        "parallel": {"precision": "bf16"},
        "train": {"out": "/nowhere", "steps": 1, "micro_batch_size": 2},
    }
    for key, value in changes.items():
        section, _, name = key.partition("__")
        fields.setdefault(section, {})[name] = value
    return estimate(resolve(fields), ranks=ranks)


@pytest.mark.slow
def test_each_unit_is_gathered_for_both_passes_but_for_embedding_and_head_and_reduced_once() -> None:
    found, ends = of_step(8), 2 * IDS * DIM + DIM
    assert found.collectives == {
        "all-gather": {
            "count": 2 * (2 * NUM_LAYERS + 2),
            "bytes": 2 * 2 * (2 * (found.parameters - ends) + ends),
        },
        "reduce-scatter": {"count": 2 * (NUM_LAYERS + 2), "bytes": 2 * 4 * found.parameters},
    }
    assert (found.rows, found.micro_batches) == (4, 2)


@pytest.mark.slow
def test_copies_exchange_gradients_once_per_step_in_the_dtype_of_the_recipe() -> None:
    for reduce, size in (("fp32", 4), ("bf16", 2)):
        found = of_step(8, parallel__replicas=2, parallel__reduce=reduce)
        expected = {"count": NUM_LAYERS + 2, "bytes": size * found.parameters // 4}
        assert found.collectives["all-reduce"] == expected
        assert found.collectives["reduce-scatter"]["bytes"] == 2 * size * found.parameters


def test_every_rank_keeps_its_part_of_parameters_and_states() -> None:
    found = of_step(8)
    assert found.peak_bytes["parameters"] == 4 * found.parameters // 8
    num_tensors = 9 * NUM_LAYERS + 3
    assert found.peak_bytes["optimizer"] == 2 * found.peak_bytes["parameters"] + 4 * num_tensors
    assert found.peak_bytes[GATHERED] < 2 * found.parameters, "what was gathered of a unit is freed, in bf16"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "replicas", "name"),
    [
        (6, 2, "adamw"),
        (3, 1, "muon"),
        pytest.param(100, 1, "muon", marks=pytest.mark.soak),
        *(pytest.param(*sizes, "adamw", marks=pytest.mark.soak) for sizes in ((1, 1), (48, 4), (100, 1))),
    ],
)
def test_the_figures_are_those_of_the_shards_and_groups_of_all_ranks(
    ranks: int, replicas: int, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 and 100 ranks do not divide a matrix of 64 rows."""
    changes: dict[str, Any] = {"parallel__replicas": replicas, "optimizer__name": name, "model__num_layers": 1}
    found = of_step.__wrapped__(ranks, **changes)
    monkeypatch.setattr(step_ledger, "first_chunk", _fsdp_param._chunk_with_empty)
    monkeypatch.setattr(step_ledger, "group_of_rank_0", distributed.new_group)
    assert found == of_step.__wrapped__(ranks, **changes)


@pytest.mark.soak
@pytest.mark.skipif(torch.__version__ < "2.13", reason="the mesh of torch 2.11 looks at all ranks")
@pytest.mark.parametrize(("replicas", "name"), [(1, "adamw"), (15_625, "muon")])
def test_a_million_ranks_make_no_more_calls_than_four(replicas: int, name: str) -> None:
    def num_calls(ranks: int, replicas: int) -> int:
        profile = cProfile.Profile()
        small: dict[str, Any] = {"model__num_layers": 1, "train__micro_batch_size": 4, "optimizer__name": name}
        profile.runcall(of_step.__wrapped__, ranks, parallel__replicas=replicas, **small)
        return sum(of.callcount for of in profile.getstats())

    assert num_calls(1_000_000, replicas) < 2 * num_calls(4, min(2, replicas))


def test_parameters_that_take_part_in_a_collective_are_counted_as_parameters() -> None:
    parameter = torch.zeros(10)
    with fake_group(2), StepLedger(vocab_size=IDS) as ledger:
        ledger.watch("parameters", [parameter])
        distributed.all_reduce(parameter)
    assert ledger.counts == {"all-reduce": 1}
    assert +ledger.alive == {"parameters": parameter.nbytes}


@pytest.mark.slow
def test_recomputation_and_chunks_of_logits_lower_what_a_step_keeps() -> None:
    sizes: dict[str, Any] = {"data__seq_len": 512, "data__global_batch_size": 8, "train__micro_batch_size": 0}
    whole = of_step(2, **sizes).peak_bytes
    kept = of_step(2, **sizes, compute__recompute="full", compute__loss_chunk=256).peak_bytes
    # a block keeps more than 16 tensors as wide as the model, in bf16; with recomputation its input
    assert whole["activations"] > 16 * NUM_LAYERS * 4 * 512 * DIM * 2
    assert kept["activations"] < 2 * NUM_LAYERS * 4 * 512 * DIM * 2
    assert whole["logits"] >= 4 * 512 * IDS * 4
    assert kept.get("logits", 0) <= 3 * 256 * IDS * 4


def test_the_vocabulary_of_a_recipe_without_one_is_that_of_its_corpora() -> None:
    with pytest.raises(CorpusError, match="/nowhere"):
        of_step(8, model__vocab_size=None)


@pytest.mark.slow
def test_the_command_prints_lines_or_json_and_explains_a_wrong_recipe(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    sizes = "".join(f"{name} = {value}\n" for name, value in SMALL.items())
    recipe.write_text(
        '[data]\ncorpora = { code = "/nowhere" }\nseq_len = 64\nglobal_batch_size = 8\n'
        f'[model]\npreset = "10M"\n{sizes}[train]\nout = "/nowhere"\nsteps = 1\n'
    )
    command = [str(recipe), "ranks=8", "parallel.replicas=2", "optimizer.name=muon"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "on 8 ranks, 2 copies; a step of a rank is 1 rows in 1 micro-batches" in said
    assert all(name in said for name in COLLECTIVES.values())
    assert main([*command, "data.batch_ramp=[[2, 24], [3, 16]]", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["collectives"]["all-reduce"]["count"] == NUM_LAYERS + 2
    assert found["rows"] == 3  # of the largest batch
    for wrong, problem in (
        ("ranks=0", "expected a number"),
        ("ranks=7", "7 ranks do not divide a global batch"),
        ("data.global_batch_size=800_000_000", "2**31 tokens or more"),
        ("parallel.replicas=3", "of 8 ranks"),
        ("model.dim=7", "do not divide"),
        ("train.micro_batch_size=3", "have 1 rows"),
    ):
        assert main([*command, wrong]) == 2
        assert problem in capsys.readouterr().err
    assert main([]) == 2


@pytest.mark.soak
@pytest.mark.parametrize(
    ("ranks", "replicas", "parts", "gathers", "reduces", "between_copies"),
    [(64, 1, 1, 66, 34, 0), (64, 1, 4, 264, 136, 0), (64, 8, 4, 264, 136, 34)],
)
def test_the_collectives_of_7b(
    ranks: int, replicas: int, parts: int, gathers: int, reduces: int, between_copies: int
) -> None:
    """32 layers twice, embedding and head once; gradients of all 34 units; between copies once per step."""
    found = of_7b(ranks, rows=2 * parts, parallel__replicas=replicas, train__micro_batch_size=2)
    counts = {name: of["count"] for name, of in found.collectives.items()}
    assert counts.pop("all-reduce", 0) == between_copies
    assert counts == {"all-gather": gathers, "reduce-scatter": reduces}
    assert found.collectives["all-gather"]["bytes"] / GIB == pytest.approx(24.6 * parts, rel=0.01)
    assert found.collectives["reduce-scatter"]["bytes"] / GIB == pytest.approx(25.1 * parts, rel=0.01)


@pytest.mark.soak
def test_7b_with_full_recomputation_trains_on_one_card() -> None:
    found = of_7b(1, rows=1, compute__recompute="full", train__micro_batch_size=1)
    assert 4 * 4 * found.parameters < sum(found.peak_bytes.values()) < 110 * GIB


def of_7b(ranks: int, *, rows: int, **changes: Any) -> Estimate:
    sizes: dict[str, Any] = dict.fromkeys(SMALL) | {"preset": "7B", "vocab_size": 32_000}
    model = {f"model__{name}": value for name, value in sizes.items()}
    return of_step(ranks, data__seq_len=4096, data__global_batch_size=rows * ranks, **model, **changes)
