"""Megatron-core reads what tokshard exports for it, and its groups of ranks read the batches of the recipe."""

from __future__ import annotations

import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.interop.real_text import ROOT, TORCHRUN, imported, run
from tests.spec.order import WORD, G, mix
from tokshard import export_corpus

pytest.importorskip("megatron.core.datasets.indexed_dataset")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("is_mapped", [True, False])
@pytest.mark.parametrize("file_bytes", [None, 50_000])
def test_megatron_reads_every_document_of_an_export(corpus, tmp_path, is_mapped, file_bytes):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    export_corpus(corpus[0], format="megatron", out=tmp_path / "out", file_bytes=file_bytes)
    prefixes = sorted(str(path.with_suffix("")) for path in (tmp_path / "out").glob("*.idx"))
    assert (len(prefixes) > 1) == (file_bytes is not None)
    found: list[list[int]] = []
    for prefix in prefixes:
        data = IndexedDataset(prefix, mmap=is_mapped)
        assert data.document_indices.tolist() == list(range(len(data) + 1))
        found += [data[index].tolist() for index in range(len(data))]
        assert data.get(len(data) - 1, offset=1).tolist() == found[-1][1:]
    assert found == corpus[1]


def test_an_export_is_byte_for_byte_what_megatron_writes_and_that_is_imported(corpus, tmp_path):
    torch = pytest.importorskip("torch")
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(tmp_path / "theirs.bin"), dtype=np.uint16)
    for document in corpus[1]:
        builder.add_document(torch.tensor(document), [len(document)])
    builder.finalize(str(tmp_path / "theirs.idx"))
    export_corpus(corpus[0], format="megatron", out=tmp_path / "ours")
    assert imported(tmp_path / "theirs", tmp_path / "again")[1] == corpus[1]
    for kind in ("bin", "idx"):
        assert (tmp_path / f"ours/documents.{kind}").read_bytes() == (tmp_path / f"theirs.{kind}").read_bytes()


GLOBAL_BATCH = 12  # of tests/interop/megatron_on_cpu.py
SETTINGS: dict[str, Any] = {"seq_length": 32, "seed": 17}
SETTINGS |= {"create_attention_mask_in_dataloader": False, "dataloader_inter_document_masking": False}
EXTRAS = {"tensors": ["attention_mask"], "contexts": ["cu_seqlens", "max_seqlen"]}


def case(name: str, corpus: Path, start: int, stop: int, micro_batch_size: int, **others: Any) -> dict[str, Any]:
    """The steps from `start` to `stop` on some sizes of Megatron-LM; `others` are these sizes and its arguments."""
    args = {key: others.pop(key) for key in SETTINGS if key in others}
    args |= {"data_path": [str(corpus)], "iteration": start, "consumed_train_samples": start * GLOBAL_BATCH}
    return {"name": name, "stop": stop, "args": SETTINGS | args | {"micro_batch_size": micro_batch_size}, **others}


def samples_of(case: dict[str, Any], dp_rank: int, dp_size: int) -> list[list[int]]:
    """The samples of each micro-batch of a data-parallel rank."""
    size, args = case["args"]["micro_batch_size"], case["args"]
    steps = range(args["consumed_train_samples"], case["stop"] * GLOBAL_BATCH, size * dp_size)
    parts = [(dp_rank + mix(first * G % WORD)) % dp_size for first in steps]  # ORDER.md, section 9
    return [[first + part * size + row for row in range(size)] for first, part in zip(steps, parts, strict=True)]


@pytest.mark.timeout(600)
def test_the_recipe_reads_the_plan_on_every_group_of_ranks_and_resumes_on_other_sizes(corpus, tmp_path):
    torch = pytest.importorskip("torch")
    from tokshard.runtime import StreamPlan

    one = corpus[0]
    cases = [
        case("tensors", one, 0, 5, 3, tensor_model=2, create_attention_mask_in_dataloader=True),
        case("contexts", one, 3, 7, 3, context=2, dataloader_inter_document_masking=True),
        case("ranks", one, 6, 8, 1),
        case("stages", one, 6, 7, 2, tensor_model=2, pipeline_model=2),
        case("chunks", one, 6, 7, 3, pipeline_model=2, vp_stage=0),
    ]
    program = ROOT / "tests/interop/megatron_on_cpu.py"
    run(*TORCHRUN, "--nproc-per-node=4", program, tmp_path, json.dumps(cases), seconds=550)
    plan = StreamPlan(one, seq_len=32, seed=17)
    for each in cases:
        ranks = [torch.load(tmp_path / f"{each['name']}-{rank}.pt") for rank in range(4)]
        dp_size = 4 // (each.get("tensor_model", 1) * each.get("pipeline_model", 1) * each.get("context", 1))
        assert {rank["dp_rank"] for rank in ranks} == set(range(dp_size))
        for rank in ranks:
            samples = samples_of(each, rank["dp_rank"], dp_size)
            assert len(rank["read"]) == len(samples)
            for batch, rows in zip(rank["read"], samples, strict=True):
                assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids", *EXTRAS.get(each["name"], ())}
                check_batch(batch, rows, plan)


def test_the_recipe_passes_on_whole_weights_of_targets_and_refuses_fractions():
    torch = pytest.importorskip("torch")
    recipe = runpy.run_path(str(ROOT / "recipes/with_megatron_lm.py"))
    ones = dict.fromkeys(("input_ids", "labels", "position_ids"), torch.ones(2))
    read = iter([{**ones, "loss_weights": torch.tensor(weights)} for weights in ([2.0, 1.0], [0.5, 1.0])])
    batches = Namespace(_batches=read, _documents=lambda _: {})
    assert recipe["Batches"].__next__(batches)["loss_mask"].tolist() == [2.0, 1.0]
    with pytest.raises(SystemExit, match="whole weights"):
        recipe["Batches"].__next__(batches)


def check_batch(batch: dict[str, Any], samples: list[int], plan: Any) -> None:
    """A micro-batch has the dtypes that Megatron-LM broadcasts, and in each row a sample of the plan."""
    keys = ("tokens", "labels", "position_ids", "loss_mask")
    assert [str(batch[key].dtype) for key in keys] == [*["torch.int64"] * 3, "torch.float32"]
    for row, sample in enumerate(samples):
        expected = plan.sample(sample)
        assert batch["tokens"][row].tolist() == expected["input_ids"].tolist()
        assert batch["position_ids"][row].tolist() == expected["position_ids"].tolist()
        is_target = expected["labels"] != -100
        assert batch["loss_mask"][row].tolist() == is_target.tolist()
        assert batch["labels"][row].numpy()[is_target].tolist() == expected["labels"][is_target].tolist()
        lengths = [piece.stop - piece.start for piece in plan.trace(sample)]
        if "cu_seqlens" in batch:
            bounds = batch["cu_seqlens"][row].tolist()
            end = bounds.index(32) + 1  # what follows is padding, which Megatron-LM removes
            assert bounds[:end] == [0, *np.cumsum(lengths)]
            assert set(bounds[end:]) <= {32}
            assert batch["max_seqlen"][row] == max(lengths)
            assert str(batch["cu_seqlens"].dtype) == str(batch["max_seqlen"].dtype) == "torch.int32"
        if "attention_mask" in batch:
            piece = np.repeat(np.arange(len(lengths)), lengths)
            is_seen = (piece[:, None] == piece) & (np.arange(32)[:, None] >= np.arange(32))
            assert (batch["attention_mask"][row, 0].numpy() == ~is_seen).all()
