"""The script for a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmark import gpu, gpu_attention, gpu_checks
from tests.corpora import documents_of, write_corpus
from tokshard.trainer.attention import Documents, attend


def test_attention_is_compared_and_a_wrong_document_or_head_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = gpu_checks.Place("cpu", "", tmp_path)
    monkeypatch.setattr(gpu_attention, "PACKINGS", ([1, 14, 1],))
    assert gpu_checks.result("varlen attention", place)["result"] == "PASS"

    def over_all(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents) -> torch.Tensor:
        whole = Documents(cu_seqlens=documents.cu_seqlens[[0, -1]], max_seqlen=documents.max_seqlen)
        return attend(query, key, value, whole)

    monkeypatch.setattr(gpu_attention, "attend", over_all)
    assert gpu_checks.result("varlen attention", place)["result"] == "FAIL"

    def other_groups(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents) -> torch.Tensor:
        repeats = (1, query.shape[1] // key.shape[1], 1)
        return attend(query, key.repeat(repeats), value.repeat(repeats), documents)

    monkeypatch.setattr(gpu_attention, "attend", other_groups)
    assert "2 of 4 heads" in gpu_checks.result("varlen attention", place)["why"]


def test_a_batch_that_was_overwritten_on_its_way_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus", documents_of([40] * 200))
    place = gpu_checks.Place("cpu", str(corpus), tmp_path)
    monkeypatch.setattr(gpu_checks, "NUM_BATCHES", 60)
    copy = torch.Tensor.to
    seen: list[int] = []

    def late(tensor: torch.Tensor, *given: object, **options: object) -> torch.Tensor:
        if "non_blocking" in options:
            seen.append(1)
            if len(seen) == 100:
                tensor[0, 0] += 1
        return copy(tensor, *given, **options)

    monkeypatch.setattr(torch.Tensor, "to", late)
    found = gpu_checks.result("2,000 pinned batches", place)
    assert found["why"] == "1 of 60 batches arrived changed, the first is number 33"


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_every_check_and_row_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu.main(["--tiny", "--out", str(tmp_path), "--seconds", "1700"]) == 0
    machine, corpus, *rows = [json.loads(text) for text in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert machine["product_tflops"] > 0
    assert "problem" not in corpus
    assert corpus["tokens"] > 10_000
    assert [row["row"] for row in rows] == gpu.ORDER
    for row in rows:
        if row["row"] == "no sync in 5 steps":
            assert row["why"] == "syncs are seen on CUDA only; the steps ran"
        elif row["row"] == "out of memory":
            assert row["why"] == "the memory of a process is limited on CUDA only"
        elif row["row"] in gpu.CHECKS:
            assert row["result"] == "PASS", row
        else:  # float8 needs torchao
            assert row.get("mfu_of_product", 0) > 0 or ("float8" in row["row"] and "torchao" in row["problem"]), row
            assert row.get("estimated_gib", 0) > 0 or "7B" not in row["row"]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
