"""The steps of a build, entered one by one."""

from __future__ import annotations

from tests.pipeline.inputs import patch_chunk_bytes
from tests.pipeline.places import build, files
from tokshard.pipeline.commit import commit
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.prepare import prepare
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.run import run


def test_a_build_whose_steps_are_entered_one_by_one_gives_the_same_corpus(place, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    expected = files(build(place, out=place / "reference", task_bytes=64))
    options = BuildOptions(tokenizer=str(place / "tok"), out=str(place / "out"), task_bytes=64, workers=1)
    prepared = prepare(resolve([str(place / "a.jsonl")], options))
    assert len(prepared.tasks) > 4
    assert run(prepared).tokens_encoded > 0
    outcome = run(prepared)
    assert outcome.tokens_encoded == 0, "every task has its receipt"
    assert commit(prepared, outcome).is_new
    assert files(place / "out") == expected
