"""The corpora of many documents that the section on growth starts on are whole corpora."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest

import tokshard
from tests.benchmark.peers.programs import starting, tokshard_growth


def test_a_corpus_of_linked_shards_has_as_many_documents_as_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokshard_growth, "SHARD_TOKENS", 100_000)
    settings = {"documents": 5_000, "document_tokens": 100, "folder": str(tmp_path)}
    place = tokshard_growth.make(settings)["place"]
    with tokshard.open_corpus(place) as corpus:
        assert corpus.num_documents == pytest.approx(5_000, rel=0.1)
        assert corpus.document(0).tolist() == corpus.document(corpus.num_documents * 4 // 5).tolist()
    (tmp_path / "start").mkdir()
    found = tokshard_growth.start({"place": place, "folder": str(tmp_path / "start")})
    assert 0 < found["state_bytes"] < 1_000
    assert found["written_mb"] == 0


def test_what_a_start_takes_is_measured(tmp_path: Path) -> None:
    def work() -> list[int]:
        taken = bytearray(50_000_000)
        taken[::4096] = b"x" * len(taken[::4096])
        (tmp_path / "index").write_bytes(bytes(2_000_000))
        return [1, 2]

    gc.collect()  # memory that earlier tests left would be freed while this one measures
    found = starting.started(work, str(tmp_path))
    assert found["memory_mb"] == pytest.approx(50, rel=0.2)
    assert found["written_mb"] == 2
    assert found["state_bytes"] == len("[1, 2]")
