"""``tokshard build``, where no transcript (`transcripts/build.txt` and others) can show it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.cli.transcripts import shell
from tests.pipeline.inputs import jsonl, patch_chunk_bytes, write_byte_tokenizer

BUILD = ("--tokenizer", ".tokenizer", "--out", "out", "--workers", "1")


@pytest.fixture(autouse=True)
def _in_an_empty_directory_with_a_tokenizer(tmp_path, monkeypatch) -> None:
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")


def write(name: str, texts: list[str]) -> None:
    Path(name).write_bytes(jsonl([{"text": text, "n": number} for number, text in enumerate(texts)]))


def facts(out: str) -> dict[str, str]:
    """The labels of a summary, and what stands behind them."""
    return {line[:12].strip(): line[12:] for line in out.splitlines()}


def test_a_dry_run_of_a_build_that_cannot_fit_on_the_disk_exits_1(monkeypatch):
    write("a.jsonl", ["text"])
    assert shell("build", "a.jsonl", *BUILD, "--dry-run")[0] == 0
    Path("b.jsonl.gz").write_bytes(b"\x1f\x8b\x08 and no more")
    assert "the first problem: b.jsonl.gz is damaged: " in shell("build", "b.jsonl.gz", *BUILD, "--dry-run")[1]
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    exit_code, out, _ = shell("build", "a.jsonl", *BUILD, "--dry-run")
    assert exit_code == 1
    assert out.startswith("refused     the disk is too small for this build\n")
    assert re.search(r"^disk {8}about [\d.]+ B needed, 1 B free$", out, re.MULTILINE)
    exit_code, out, _ = shell("build", "a.jsonl", *BUILD, "--dry-run", "--json")
    assert (exit_code, json.loads(out)["refused"]) == (1, "the disk is too small for this build")
    corpora = (f'[corpora.{name}]\nsources = "a.jsonl"\nout = "{name}"\n' for name in "ab")
    Path("r.toml").write_text(f'[defaults]\ntokenizer = ".tokenizer"\nworkers = 1\n{"".join(corpora)}')
    exit_code, out, _ = shell("build", "r.toml", "--dry-run")
    assert (exit_code, out.count("the disk is too small")) == (1, 2)


def test_a_summary_says_why_shards_are_small_where_there_are_many(monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("a.jsonl", ["text"] * 20)
    words = ("build", "a.jsonl", *BUILD, "--quiet")
    assert "shards" not in facts(shell(*words, "--task-bytes", "64")[1])  # there are few
    monkeypatch.setattr("tokshard.cli.build_text._MANY_SHARDS", 2)
    shown = facts(shell(*words, "--task-bytes", "64")[1])
    assert shown["shards"] == "12 tokens each, because a shard ends with its task: see --task-bytes 64"
    shown = facts(shell(*words, "--force")[1])
    assert "shards" not in shown  # one is as large as it can be
    assert shown["on disk"].endswith(" in 1 shard")
