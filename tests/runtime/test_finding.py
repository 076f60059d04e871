"""`plan.find` is the inverse of `plan.trace`: held against a scan of every sample."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import PlanError
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.options import checked_weights
from tokshard.runtime.plan import StreamPlan

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=30)
shapes = st.fixed_dictionaries(
    {"seq_len": st.integers(1, 30), "block_tokens": st.integers(1, 64), "window_blocks": st.integers(1, 6)}
)
Place = tuple[str, int]


def plan_of(sources: Any, **options: Any) -> StreamPlan:
    return StreamPlan(sources, **{"allow_small_blocks": True, **options})


def scanned(plan: StreamPlan, cursor: Cursor, samples: range) -> dict[Place, Counter[tuple[int, int, int]]]:
    """By document: (sample, start, stop) of all that these samples read of it."""
    found: dict[Place, Counter[tuple[int, int, int]]] = defaultdict(Counter)
    for sample in samples:
        for piece in plan.trace(sample, cursor):
            found[piece.corpus, piece.document][sample, piece.start, piece.stop] += 1
    return found


def assert_inverse(plan: StreamPlan, cursor: Cursor, samples: range, *, known: bool = True) -> None:
    """Every document is found where a scan finds it, and each epoch has all of it once."""
    expected = scanned(plan, cursor, samples)
    counts = plan.mixture(cursor).counts_before(samples.stop)
    for name, source, shuffled, count in zip(plan.names, plan.sources, plan.corpora, counts, strict=True):
        epochs = count * plan.seq_len // shuffled.num_tokens + 2
        lengths_of: list[int] = source.lengths  # type: ignore[attr-defined]
        for document, length in enumerate(lengths_of):
            readings = plan.find(name, document, cursor, epochs=epochs)
            assert all(reading.sample is not None for reading in readings) or not known
            inside = [one for one in readings if one.sample is not None and one.sample in samples]
            assert inside == sorted(inside, key=lambda one: (one.epoch, one.sample, one.start))
            assert Counter((one.sample, one.start, one.stop) for one in inside) == expected[name, document]
            assert_each_epoch_is_whole(plan, readings, length if shuffled.take == 1 else None)


def assert_each_epoch_is_whole(plan: StreamPlan, readings: list[Any], length: int | None) -> None:
    by_epoch: dict[int, list[int]] = defaultdict(list)
    for one in readings:
        by_epoch[one.epoch] += range(one.start, one.stop)
    wholes = {tuple(sorted(tokens)) for tokens in by_epoch.values()}
    assert len(wholes) <= 1 or not all(plan.cursor().segments[-1].weights)
    if length is not None and by_epoch and all(plan.cursor().segments[-1].weights):
        assert wholes == {tuple(range(length))}


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(
    documents=st.lists(lengths, min_size=1, max_size=3),
    shape=shapes,
    seed=st.integers(0, 2**64 - 1),
    take=st.sampled_from([1.0, 1.0, 0.9, 0.5]),
    start_epoch=st.integers(0, 3),
    data=st.data(),
)
def test_every_document_is_found_where_a_scan_of_all_samples_finds_it(
    documents: list[list[int]],
    shape: dict[str, int],
    seed: int,
    take: float,
    start_epoch: int,
    data: st.DataObject,
) -> None:
    sources = [
        ListSource(parts, first_token=1 + 5000 * number, name=str(number)) for number, parts in enumerate(documents)
    ]
    if data.draw(st.booleans()):
        sources.append(sources[0])  # the same content from another epoch on is another corpus
    if take < 1:  # at least one block must remain
        sources = [
            source for source in sources if math.floor(take * (source.num_tokens // shape["block_tokens"]) + 0.5)
        ]
    if not sources:
        return
    count = data.draw(st.integers(1, 60))
    weights = st.lists(
        st.sampled_from([0.0, 0.1, 0.25, 1.0, 3.0]), min_size=len(sources), max_size=len(sources)
    ).filter(any)
    names = [f"corpus {number}" for number in range(len(sources))]
    starts = [0, *sorted(data.draw(st.sets(st.integers(1, count), max_size=3)))]
    changes = [(start, dict(zip(names, data.draw(weights), strict=True))) for start in starts]
    plan = plan_of(
        dict(zip(names, sources, strict=True)),
        seed=seed,
        weights=changes[0][1],
        schedule=changes[1:],
        take=take,
        start_epoch={name: start_epoch + sources[:at].count(sources[at]) for at, name in enumerate(names)},
        max_epochs=1.5,
        **shape,
    )
    assert_inverse(plan, plan.cursor(), range(count))


@settings(max_examples=examples(25))
@given(parts=lengths, shape=shapes, epochs=st.integers(1, 3))
def test_a_finite_pass_reads_a_document_once_per_epoch_and_never_after_its_end(
    parts: list[int], shape: dict[str, int], epochs: int
) -> None:
    source = ListSource(parts)
    plan = plan_of(source, epochs=epochs, seed=3, **shape)
    assert plan.num_samples is not None
    assert_inverse(plan, plan.cursor(), range(plan.num_samples))
    for document, length in enumerate(parts):
        readings = plan.find("corpus", document, epochs=epochs + 2)
        assert sum(one.stop - one.start for one in readings) == epochs * length


@settings(max_examples=examples(20))
@given(
    parts=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    seq_len=st.integers(15, 60),
    block=st.integers(1, 64),
    seed=st.integers(0, 100),
)
def test_a_document_that_a_sample_reads_in_many_epochs_is_found_in_each(
    parts: list[int], seq_len: int, block: int, seed: int
) -> None:
    plan = plan_of(ListSource(parts), seq_len=seq_len, block_tokens=block, window_blocks=2, seed=seed)
    assert_inverse(plan, plan.cursor(), range(4))


@settings(max_examples=examples(12))
@given(
    parts=st.lists(lengths, min_size=2, max_size=3),
    shape=shapes,
    num_changes=st.sampled_from([1, 2, 20]),
    random=st.randoms(use_true_random=False),
)
def test_a_cursor_of_changed_weights_leads_to_the_samples_that_its_job_reads(
    parts: list[list[int]], shape: dict[str, int], num_changes: int, random: Random
) -> None:
    names = [f"corpus {number}" for number in range(len(parts))]
    sources = [
        ListSource(documents, first_token=1 + 5000 * number, name=str(number)) for number, documents in enumerate(parts)
    ]
    plan = plan_of(dict(zip(names, sources, strict=True)), **shape)
    cursor = plan.cursor()
    for _ in range(num_changes):
        weights = {name: random.choice([0.1, 1.0, 2.5]) for name in names}
        cursor = cursor.advanced(random.randint(1, 3)).weighted(checked_weights(plan.names, weights))
        cursor = cursor.compacted(plan.mixture(cursor))
    cursor = cursor.skipping(2)
    first = cursor.segments[0].start
    assert_inverse(plan, cursor, range(first, cursor.sample + 20), known=first == 0)
    read_before = sum(
        one.stop - one.start
        for name, source in zip(names, sources, strict=True)
        for document in range(len(source.lengths))
        for one in plan.find(name, document, cursor, epochs=first * plan.seq_len // source.num_tokens + 1)
        if one.sample is None
    )
    assert read_before == first * plan.seq_len


def test_a_document_of_a_corpus_of_weight_0_is_never_read() -> None:
    plan = plan_of({"a": ListSource([5]), "b": ListSource([9], first_token=50)}, seq_len=4, weights={"a": 0, "b": 1})
    assert plan.find("a", 0, epochs=3) == []
    assert len(plan.find("b", 0, epochs=range(2, 3))) > 0


def test_what_does_not_exist_is_refused() -> None:
    plan = plan_of({"a": ListSource([5, 2])}, seq_len=4)
    with pytest.raises(PlanError, match="the plan has no corpus 'b'"):
        plan.find("b", 0)
    with pytest.raises(IndexError):
        plan.find("a", 2)


@pytest.mark.parametrize("document_tokens", [1000, 1_000_000])
def test_a_document_of_a_corpus_of_10_to_the_14_tokens_is_found_at_once(document_tokens: int) -> None:
    sources = {"web": PeriodicSource(10**14, document_tokens), "code": PeriodicSource(10**12, 700)}
    plan = StreamPlan(sources, seq_len=4096, seed=17, weights={"web": 0.7, "code": 0.3})
    document = 77 * 10**12 // document_tokens
    started = time.process_time()
    readings = plan.find("web", document, epochs=range(1, 2))
    seconds = time.process_time() - started
    assert sum(one.stop - one.start for one in readings) == document_tokens
    for one in readings:
        assert one.sample is not None
        pieces = [(piece.document, piece.start, piece.stop) for piece in plan.trace(one.sample)]
        assert (document, one.start, one.stop) in pieces
    assert seconds < 60  # about 0.1 s per block; a replay would take years
