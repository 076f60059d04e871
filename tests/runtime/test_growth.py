"""A job over a corpus that grows: it reads on what it began with, and moves on exactly when it is asked to."""

from __future__ import annotations

import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, append_generation, documents_of, write_corpus
from tokshard.errors import PlanError, PlanMismatchError, UsageError
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.loader import NumpyLoader
from tokshard.runtime.plan import StreamPlan

SIZES: dict[str, Any] = {"seq_len": 8, "block_tokens": 32, "window_blocks": 2, "seed": 5}
FIRST, SECOND = documents_of([5, 9, 2, 30, 7, 16, 3] * 6), documents_of([11, 4, 8, 21] * 5)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "code", FIRST, tokenizer=TINY_TOKENIZER)


def rows(loader: NumpyLoader, steps: int, corpus: int) -> list[list[int]]:
    """The samples of one corpus in the next steps."""
    found = []
    for _, batch in zip(range(steps), loader, strict=False):
        found += [
            row.tolist()
            for row, index in zip(batch["input_ids"], batch["corpus_index"].tolist(), strict=True)
            if index == corpus
        ]
    return found


def samples(plan: StreamPlan, count: int) -> list[list[int]]:
    return [plan.sample(sample)["input_ids"].tolist() for sample in range(count)]


def test_a_plan_reads_all_generations_and_can_be_pinned_to_one(corpus: Path) -> None:
    before = StreamPlan({"code": corpus}, **SIZES)
    append_generation(corpus, SECOND)
    assert StreamPlan({"code": corpus}, generations={"code": 0}, **SIZES).fingerprint == before.fingerprint
    now = StreamPlan({"code": corpus}, **SIZES)
    assert now.sources[0].num_tokens == sum(map(len, FIRST + SECOND))
    whole = write_corpus(corpus.parent / "whole", FIRST + SECOND, tokenizer=TINY_TOKENIZER)
    assert StreamPlan({"code": whole}, **SIZES).fingerprint == now.fingerprint
    assert samples(now, 60) == samples(StreamPlan({"code": whole}, **SIZES), 60)


@pytest.mark.parametrize("access", ["mmap", "pread"])
def test_both_ways_of_reading_read_all_generations(corpus: Path, access: str) -> None:
    append_generation(corpus, SECOND)
    whole = write_corpus(corpus.parent / "whole", FIRST + SECOND, tokenizer=TINY_TOKENIZER)
    plans = [StreamPlan(CorpusSource(place, access=access), **SIZES) for place in (corpus, whole)]
    assert samples(plans[0], 80) == samples(plans[1], 80)
    assert [plans[0].trace(sample)[0].document for sample in range(40)] == [
        plans[1].trace(sample)[0].document for sample in range(40)
    ]


def test_a_copy_in_another_process_reads_what_the_plan_reads_whatever_is_appended(corpus: Path) -> None:
    plan = StreamPlan({"code": corpus}, **SIZES)
    pickled = pickle.dumps(plan)
    append_generation(corpus, SECOND)
    assert pickle.loads(pickled).fingerprint == plan.fingerprint
    assert plan.reopened().fingerprint == plan.fingerprint


def test_a_run_that_read_a_corpus_at_two_generations_goes_on_with_the_newer_one(corpus: Path) -> None:
    append_generation(corpus, SECOND)
    sources = {"new": CorpusSource(corpus), "old": CorpusSource(corpus, generation=0)}
    loader = NumpyLoader(StreamPlan(sources, **SIZES), global_batch_size=4)
    loader.skip(20)
    newer = NumpyLoader(StreamPlan({"new": corpus}, **SIZES), global_batch_size=4)
    newer.load_state_dict(loader.state_dict(), corpora="plan")
    assert newer.stats()["corpora"]["new"]["samples"] == loader.stats()["corpora"]["new"]["samples"]


@pytest.mark.parametrize("corpora", ["same", "plan"])
def test_a_state_of_an_older_generation_is_refused_with_the_ways_to_go_on(corpus: Path, corpora: Any) -> None:
    loader = NumpyLoader(StreamPlan({"code": corpus}, **SIZES), global_batch_size=4)
    rows(loader, 3, 0)
    state = loader.state_dict()
    append_generation(corpus, SECOND)
    grown = NumpyLoader(StreamPlan({"code": corpus}, **SIZES), global_batch_size=4)
    with pytest.raises(PlanMismatchError, match="up to generation 0, the plan up to generation 1") as caught:
        grown.load_state_dict(state, corpora=corpora)
    assert "generations={'code': 0}" in caught.value.hint
    assert "generation-01" in caught.value.hint
    assert "corpora='plan'" in caught.value.hint


def test_a_pinned_job_goes_on_exactly(corpus: Path) -> None:
    plan = StreamPlan({"code": corpus}, **SIZES)
    loader = NumpyLoader(plan, global_batch_size=4)
    read = rows(loader, 5, 0)
    state = loader.state_dict()
    append_generation(corpus, SECOND)
    resumed = NumpyLoader(StreamPlan({"code": corpus}, generations={"code": 0}, **SIZES), global_batch_size=4)
    resumed.load_state_dict(state)
    assert read + rows(resumed, 5, 0) == samples(plan, 40)


def test_a_job_that_moves_on_reads_each_generation_from_where_it_was(corpus: Path) -> None:
    """No sample of the old generation is lost or doubled, and the new one is read from its start."""
    plan = StreamPlan({"code": corpus}, **SIZES)
    loader = NumpyLoader(plan, global_batch_size=4)
    read = rows(loader, 5, 0)
    state = loader.state_dict()
    append_generation(corpus, SECOND)
    both = StreamPlan(
        {"code": corpus, "new": corpus / "generation-01"},
        generations={"code": 0},
        weights={"code": 0.5, "new": 0.5},
        **SIZES,
    )
    moved = NumpyLoader(both, global_batch_size=4)
    moved.load_state_dict(state, corpora="plan")
    later = moved.state_dict()
    read += rows(moved, 10, 0)
    assert read == samples(plan, len(read))
    assert len(read) > 30
    again = NumpyLoader(both, global_batch_size=4)
    again.load_state_dict(later)
    new = rows(again, 10, 1)
    assert new == samples(StreamPlan({"new": corpus / "generation-01"}, **SIZES), len(new))
    assert len(new) > 10


def test_the_next_epoch_takes_both_generations_whole(corpus: Path) -> None:
    """A pass over the older generation, and a new plan at its end, which reads every token of both once."""
    first = StreamPlan({"code": corpus}, epochs=1, **SIZES)
    assert tokens_of(first) == Counter(token for document in FIRST for token in document)
    append_generation(corpus, SECOND)
    second = StreamPlan({"code": corpus}, epochs=1, start_epoch={"code": 1}, **SIZES)
    assert tokens_of(second) == Counter(token for document in FIRST + SECOND for token in document)


def tokens_of(plan: StreamPlan) -> Counter[int]:
    assert plan.num_samples is not None
    pieces = [piece for sample in range(plan.num_samples) for piece in plan.trace(sample)]
    assert len({(piece.document, piece.start) for piece in pieces}) == len(pieces)
    with CorpusSource(plan.sources[0].location, generation=None).corpus as corpus:  # type: ignore[attr-defined]
        return Counter(
            token for piece in pieces for token in corpus.document(piece.document)[piece.start : piece.stop].tolist()
        )


def test_a_mix_file_pins_generations(corpus: Path) -> None:
    append_generation(corpus, SECOND)
    file = corpus.parent / "mix.toml"
    file.write_text(
        'corpora = { code = "code", new = "code/generation-01" }\ngenerations = { code = 0 }\n'
        "seq_len = 8\nglobal_batch_size = 4\nblock_tokens = 32\n"
    )
    plan = StreamPlan.load(str(file))
    assert [source.num_tokens for source in plan.sources] == [sum(map(len, part)) for part in (FIRST, SECOND)]


def test_generations_that_mean_nothing_are_refused(corpus: Path) -> None:
    with pytest.raises(PlanError, match="the plan has code"):
        StreamPlan({"code": corpus}, generations={"prose": 0}, **SIZES)
    with pytest.raises(PlanError, match="expected an integer"):
        StreamPlan({"code": corpus}, generations={"code": 0.5}, **SIZES)  # type: ignore[dict-item]
    with pytest.raises(PlanError, match="which is open already"):
        StreamPlan({"code": CorpusSource(corpus)}, generations={"code": 0}, **SIZES)
    with pytest.raises(UsageError, match="has no generation 1: it has generation 0 only"):
        StreamPlan({"code": corpus}, generations={"code": 1}, **SIZES)
