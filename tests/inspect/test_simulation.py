"""Simulations of the next samples, compared with a count of every piece."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.runtime.sources import ListSource, PeriodicSource
from tokshard.errors import UsageError
from tokshard.inspect.plan.run import Run
from tokshard.inspect.plan.simulation import UNIFORM_DISTANCE, simulate, worst_error
from tokshard.runtime.order.mixture import Segment
from tokshard.runtime.plan import StreamPlan


@given(
    corpora=st.lists(st.integers(0, 1), min_size=1, max_size=60),
    first=st.integers(0, 10),
    changes=st.dictionaries(st.integers(1, 80), st.sampled_from([(1.0, 3.0), (0.0, 1.0), (5.0, 5.0)]), max_size=3),
)
def test_the_worst_error_is_that_of_the_worst_prefix(corpora, first, changes):
    weights = {0: (0.3, 0.7), **changes}
    segments = [Segment(start=start, weights=weights[start]) for start in sorted(weights)]
    exact, worst = 0.0, 0.0
    for number, corpus in enumerate(corpora):
        current = [segment.weights for segment in segments if segment.start <= first + number][-1]
        exact += current[1] / sum(current)
        worst = max(worst, abs(sum(corpora[: number + 1]) - exact))
        assert corpus in (0, 1)
    positions = np.flatnonzero(corpora) + first
    assert worst_error(segments, 1, positions, first, first + len(corpora)) == pytest.approx(worst)


def test_blocks_and_distances_are_those_of_the_traces():
    sources = {"a": ListSource([7, 30, 2, 8] * 20), "b": ListSource([50, 3] * 9)}
    plan = StreamPlan(sources, seq_len=4, block_tokens=16, window_blocks=5, seed=3)
    run = Run(plan=plan, global_batch_size=6, cursor=plan.cursor().advanced(7))
    found = simulate(run, 50)
    places, blocks = {"a": [], "b": []}, []
    for sample in range(7, 57):
        pieces = plan.trace(sample)
        starts = [sources[p.corpus].place_of(p.document).start + p.start for p in pieces]
        places[pieces[0].corpus].append(starts[0])
        if (sample - 7) % 6 == 0:
            blocks.append(set())
        blocks[-1] |= {(piece.corpus, start // 16) for piece, start in zip(pieces, starts, strict=True)}
    sizes = [len(step) for step in blocks[:8]]
    assert (found.first, found.num_samples) == (7, 50)
    assert found.blocks_per_step == (min(sizes), np.median(sizes), max(sizes))
    for corpus in found.corpora:
        mine = places[corpus.name]
        assert corpus.num_samples == len(mine)
        distance = np.median(np.abs(np.diff(mine))) / sources[corpus.name].num_tokens
        assert corpus.median_distance == pytest.approx(distance)
        assert corpus.worst_error < 2


def test_successive_samples_of_a_large_corpus_are_as_far_apart_as_random_places():
    plan = StreamPlan({"web": PeriodicSource(10**13), "code": PeriodicSource(10**11)}, seq_len=4096, seed=1)
    found = simulate(Run(plan=plan, global_batch_size=256, cursor=plan.cursor()), 5_000)
    web, code = found.corpora
    assert web.median_distance == pytest.approx(UNIFORM_DISTANCE, abs=0.02)
    assert web.num_samples + code.num_samples == 5_000
    assert 600 < found.blocks_per_step[1] < 1_100


def test_a_simulation_ends_with_the_pass_and_is_refused_after_it():
    plan = StreamPlan(ListSource([40]), seq_len=4, epochs=1)
    run = Run(plan=plan, global_batch_size=3, cursor=plan.cursor())
    assert simulate(run, 1000).num_samples == 10
    with pytest.raises(UsageError, match="no sample is left"):
        simulate(Run(plan=plan, global_batch_size=3, cursor=plan.cursor().advanced(10)), 5)
    plan = StreamPlan({"a": ListSource([40]), "b": ListSource([9])}, seq_len=4, weights={"a": 1, "b": 0})
    found = simulate(Run(plan=plan, global_batch_size=3, cursor=plan.cursor()), 2)
    assert [corpus.num_samples for corpus in found.corpora] == [2, 0]
