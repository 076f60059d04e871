"""The script for a GPU, rehearsed on the CPU."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from tests.benchmark import gpu, gpu_attention, gpu_checks, gpu_corpus
from tests.corpora import documents_of, write_corpus
from tokshard.format.opening import open_corpus
from tokshard.trainer.attention import Documents, attend


def test_figures_leave_the_first_steps_out_and_count_mfu_of_both_peaks() -> None:
    step = {"tokens": 100, "tokens_per_second": 50.0, "mfu_full_rows": 0.5, "memory_bytes": 2**30}
    steps = [step | {"tokens_per_second": 1.0, "loader_wait_seconds": 9.0}, *[step | {"loader_wait_seconds": 0.1}] * 4]
    figures = gpu.figures(steps, 1, product_tflops=989 / 2)
    assert figures == {
        "steps": 4,
        "tokens_per_second": 50.0,
        "mfu_of_989": 0.25,
        "mfu_of_product": 0.5,
        "memory_gib": 1.0,
        "wait_part": pytest.approx(0.05),
        "first_step_seconds": 100.0,
    }
    without = gpu.figures(steps, 1, product_tflops=None)
    assert (without["mfu_of_989"], without["mfu_of_product"]) == (0.5, None)


def test_what_the_time_does_not_suffice_for_says_so(tmp_path: Path) -> None:
    rows = list(gpu.results(tmp_path, tiny=True, seconds=0))
    assert [row["row"] for row in rows] == ["machine", "corpus", *gpu.ORDER]
    assert {*gpu.CHECKS} == {*gpu_checks.CHECKS}
    for row in rows[1:]:
        assert row.get("why", row.get("problem")) == "not run: the 0 s are over"
        assert "not run: the 0 s are over" in gpu.line(row)


def test_a_check_that_ends_without_a_result_has_failed_and_one_that_was_cut_short_did_not_run(tmp_path: Path) -> None:
    budget = gpu.Budget(600, time.monotonic() + 600)
    found = gpu.check("varlen attention", "cpu", "no corpus", tmp_path / "a", gpu.Budget(600, time.monotonic() + 0.01))
    assert (found["result"], found["why"]) == ("not run", "no answer in 0 s")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(gpu.CHECKS, "varlen attention", 0.01)
        found = gpu.check("varlen attention", "cpu", "no corpus", tmp_path / "b", budget)
    assert (found["result"], found["why"]) == ("FAIL", "no answer in 0 s")


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


def test_bytes_of_files_are_the_corpus_if_the_build_takes_too_long(tmp_path: Path) -> None:
    found = gpu_corpus.make_corpus(tmp_path / "corpus", num_bytes=3_000, seconds=0)
    assert found["problem"] == "tokshard build: no end in 0 s; bytes are the tokens"
    texts = list(gpu_corpus.python_sources(3_000))
    with open_corpus(found["path"]) as corpus:
        assert [bytes((tokens[:-1] - 1).astype("u1")).decode() for tokens in corpus] == texts
        assert found["tokens"] == corpus.manifest.num_tokens


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
