"""A job over a corpus that grows: it reads what it is asked to, however much there is by now.

That it goes on with a generation more, as with another corpus: test_histories.py.
"""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, append_generation, documents_of, write_corpus
from tokshard.errors import PlanError
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

SIZES: dict[str, Any] = {"seq_len": 8, "block_tokens": 32, "window_blocks": 2, "seed": 5}
FIRST, SECOND = documents_of([5, 9, 2, 30, 7, 16, 3] * 6), documents_of([11, 4, 8, 21] * 5)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "code", FIRST, tokenizer=TINY_TOKENIZER)


def samples(plan: StreamPlan, count: int) -> list[list[int]]:
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(count)]


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_a_plan_reads_all_generations_and_can_be_pinned_to_one(corpus: Path, access: Any) -> None:
    before = StreamPlan({"code": corpus}, **SIZES)
    pickled = pickle.dumps(before)
    append_generation(corpus, SECOND)
    pinned = StreamPlan({"code": corpus}, generations={"code": 0}, **SIZES)
    for same in (pinned, pickle.loads(pickled), before.copy(reopened=True)):  # in another process, whatever is appended
        assert same.fingerprint == before.fingerprint
    whole = write_corpus(corpus.parent / "whole", FIRST + SECOND, tokenizer=TINY_TOKENIZER)
    now, expected = (StreamPlan(CorpusSource(place, access=access), **SIZES) for place in (corpus, whole))
    assert now.fingerprint == expected.fingerprint
    assert samples(now, 80) == samples(expected, 80)
    assert [now.trace(sample)[0].document for sample in range(40)] == [
        expected.trace(sample)[0].document for sample in range(40)
    ]


def test_a_run_that_read_a_corpus_at_two_generations_goes_on_with_the_newer_one(corpus: Path) -> None:
    append_generation(corpus, SECOND)
    sources = {"new": CorpusSource(corpus), "old": CorpusSource(corpus, generation=0)}
    with pytest.raises(PlanError, match="corpora 'new' and 'old' share documents, such as number 0"):
        StreamPlan(sources, **SIZES)
    loader = NumpyLoader(StreamPlan(sources, allow_overlap=True, **SIZES), global_batch_size=4)
    loader.skip(20)
    newer = NumpyLoader(StreamPlan({"new": corpus}, **SIZES), global_batch_size=4)
    newer.load_state_dict(loader.state_dict(), corpora="plan")
    assert newer.stats()["corpora"]["new"]["samples"] == loader.stats()["corpora"]["new"]["samples"]
