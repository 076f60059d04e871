"""`plan.find` is the inverse of `plan.trace`: held against a scan of every sample."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from random import Random

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.plans import Drawn, arguments
from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import DamagedCorpusError
from tokshard.runtime.cursor import Cursor
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.state import load_state, save_state

pytestmark = pytest.mark.filterwarnings("ignore:the change of seq_len")

SEVERAL_WINDOWS: Drawn = (
    {"corpus": ListSource([351, 3, 1, 752, 41] * 2)},
    {"seq_len": 2, "block_tokens": 256, "window_blocks": 1, "pack": "whole", "num_streams": 2},
)

TWO_WINDOWS: Drawn = (
    {"corpus": ListSource([5, 40, 1, 17] * 20)},
    {"seq_len": 2, "block_tokens": 64, "window_blocks": 12},
)


def scanned(
    plan: StreamPlan, cursor: Cursor, samples: range
) -> dict[tuple[str, int], Counter[tuple[int | None, int, int]]]:
    """By document: (sample, start, stop) of all that these samples read of it."""
    found: dict[tuple[str, int], Counter[tuple[int | None, int, int]]] = defaultdict(Counter)
    for sample, pieces in zip(samples, plan.traces(np.array(samples), cursor), strict=True):
        for piece in pieces:
            found[piece.corpus, piece.document][sample, piece.start, piece.stop] += 1
    return found


def assert_inverse(plan: StreamPlan, cursor: Cursor, samples: range, every: int = 1) -> None:
    """Documents are found where a scan finds them, and each epoch has all of each once, unless `seq_len` changed."""
    expected, known = scanned(plan, cursor, samples), not cursor.segments[0].start and not cursor.lengths
    counts = plan.mixture(cursor).balance_before(samples.stop).counts
    are_all_read = not cursor.lengths and all(min(segment.weights) >= 0.1 for segment in cursor.segments)
    longest = max([plan.seq_len, *(length.seq_len for length in cursor.lengths)])
    for name, source, order, of_streams in zip(plan.names, plan.sources, plan.corpora, counts, strict=True):
        smallest = min(order.part_tokens(part) for part in range(order.num_parts))
        count = int(of_streams.max() if order.is_dealt else of_streams.sum())
        # of the part with the fewest tokens, at most; a change of `seq_len` may leave out a window
        epochs = (count + 1) * longest // smallest + 2 + len(cursor.lengths)
        lengths: list[int] = source.lengths  # type: ignore[attr-defined]
        for document, length in list(enumerate(lengths))[::every]:
            readings = plan.find(name, document, cursor, epochs=epochs)
            assert not known or all(one.sample is not None for one in readings)
            inside = [one for one in readings if one.sample is not None and one.sample in samples]
            assert inside == sorted(inside, key=lambda one: (one.epoch, one.sample, one.start))
            assert Counter((one.sample, one.start, one.stop) for one in inside) == expected[name, document]
            by_epoch: dict[int, list[int]] = defaultdict(list)
            for one in readings:
                by_epoch[one.epoch] += range(one.start, one.stop)
            wholes = {tuple(sorted(tokens)) for tokens in by_epoch.values()}
            if are_all_read:
                assert len(wholes) <= 1
                assert order.take < 1 or wholes == {tuple(range(length))}


@pytest.mark.slow
@settings(max_examples=examples(60), deadline=None)
@example(drawn=SEVERAL_WINDOWS, num_changes=0, seq_len=None, count=70, random=Random(1))
@example(drawn=TWO_WINDOWS, num_changes=3, seq_len=8, count=90, random=Random(1))  # joins what is left of a window
@given(
    drawn=arguments(),
    num_changes=st.sampled_from([0, 0, 1, 2, 20]),
    seq_len=st.sampled_from([None, 1, 2, 4, 8]),
    count=st.integers(1, 80),
    random=st.randoms(use_true_random=False),
)
def test_every_document_is_found_where_a_scan_of_all_samples_finds_it(
    drawn: Drawn, num_changes: int, seq_len: int | None, count: int, random: Random
) -> None:
    corpora, options = drawn
    plan = StreamPlan(corpora, **options)
    cursor = plan.cursor()
    for _ in range(num_changes if plan.num_samples is None else 0):
        weights = tuple(random.choice([0.1, 1.0, 2.5]) for _ in plan.names)
        cursor = cursor.advanced(random.randint(1, 3)).weighted(weights)
        cursor = cursor.compacted(plan.mixture(cursor))
    cursor = cursor.skipping(2)
    if seq_len and plan.num_samples is None:
        state, plan = save_state(plan, cursor), StreamPlan(corpora, **options | {"seq_len": seq_len})
        cursor = load_state(plan, state, seq_len="plan")
    first, stop = cursor.segments[0].start, cursor.sample + count
    most = stop if plan.num_samples is None else min(stop, plan.num_samples)
    every = max(1, sum(len(source.lengths) for source in plan.sources) // 20)  # type: ignore[attr-defined]
    assert_inverse(plan, cursor, range(first, most), every)


@pytest.mark.parametrize("pack", ["cut", "whole"])
def test_a_document_that_is_not_where_a_window_has_it_is_damage(pack: str) -> None:
    source = ListSource([5, 7, 9] * 30)
    plan = StreamPlan(source, seq_len=2, block_tokens=256, window_blocks=9, pack=pack)  # type: ignore[arg-type]
    assert len(plan.find("corpus", 5)) > 1
    source.stops[4] -= 1
    source.lengths[5] += 1
    with pytest.raises(DamagedCorpusError, match="changed during the run"):
        plan.find("corpus", 5)


@pytest.mark.parametrize("document_tokens", [1000, 1_000_000])
@pytest.mark.parametrize("pack", ["cut", "whole"])
def test_a_document_of_a_corpus_of_10_to_the_14_tokens_is_found_at_once(document_tokens: int, pack: str) -> None:
    sources = {"web": PeriodicSource(10**14, document_tokens), "code": PeriodicSource(10**12, 700)}
    weights = {"web": 0.7, "code": 0.3}
    plan = StreamPlan(sources, seq_len=4096, seed=17, weights=weights, pack={"web": pack})  # type: ignore[dict-item]
    document = 77 * 10**12 // document_tokens
    started = time.process_time()
    readings = plan.find("web", document, epochs=range(1, 2))
    seconds = time.process_time() - started
    assert sum(one.stop - one.start for one in readings) == document_tokens
    for one in readings:
        assert one.sample is not None
        assert (document, one.start, one.stop) in [(p.document, p.start, p.stop) for p in plan.trace(one.sample)]
    assert seconds < 60  # about 0.1 s per block; a replay would take years
