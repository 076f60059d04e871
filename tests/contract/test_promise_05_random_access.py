"""Promise 5: `plan.sample(g)` is what the loader yields as sample g, and what the page of the order says.

tests/runtime/test_page_model.py compares both with a model that was written from ORDER.md, streams included.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime import page_model
from tests.runtime.loaders import expected_rows, rows_of, take
from tests.runtime.page_model import Used
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.test_page_model import documents_of_source
from tokshard.runtime import StreamingLoader, StreamPlan

lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
half = settings(max_examples=examples(20))


@half
@given(one=lengths, other=lengths, seed=st.integers(0, 2**64 - 1), data=st.data())
def test_a_sample_alone_the_loader_and_the_page_agree(
    one: list[int], other: list[int], seed: int, data: st.DataObject
) -> None:
    sources = {"one": ListSource(one), "other": ListSource(other, first_token=2000, name="other")}
    sizes = {"seq_len": data.draw(st.integers(1, 20)), "window_blocks": data.draw(st.integers(1, 4))}
    block = data.draw(st.integers(1, 50))
    plan = StreamPlan(
        sources, weights={"one": 1, "other": 2}, seed=seed, block_tokens=block, allow_small_blocks=True, **sizes
    )
    loader = StreamingLoader(plan, global_batch_size=5)
    received = rows_of(take(loader, 4))
    loader.close()
    assert received == expected_rows(plan, range(20))
    model = page_model.Plan(
        [Used(documents_of_source(source)) for source in sources.values()],
        weights=[1.0, 2.0],
        seed=seed,
        block_tokens=block,
        **sizes,
    )
    for sample, row in enumerate(received):
        expected = model.row(sample)
        assert row["corpus_index"] == expected.corpus
        for key in ("input_ids", "labels", "position_ids"):
            assert row[key] == getattr(expected, key)


@half
@given(start=st.integers(0, 2**45), batch=st.integers(1, 4), num_streams=st.sampled_from([1, 1, 2, 7, 64]))
def test_a_loader_that_starts_anywhere_yields_the_samples_of_the_plan(start: int, batch: int, num_streams: int) -> None:
    corpora = {"a": PeriodicSource(10**13), "b": PeriodicSource(10**9, 77), "c": PeriodicSource(10**6, 50)}
    weights = {"a": 3, "b": 1, "c": 1}
    plan = StreamPlan(corpora, weights=weights, seq_len=16, window_blocks=1, seed=1, num_streams=num_streams)
    size = batch * num_streams
    loader = StreamingLoader(plan, global_batch_size=size, dp_rank=1, dp_world_size=2, uneven="pad", prefetch_factor=1)
    loader.skip(start)
    step = sorted(range(start, start + size), key=lambda g: (g % num_streams, g))
    halves = [step[: -(-size // 2)], step[-(-size // 2) :]]
    rows = [row for row in rows_of(take(loader, 1)) if row["sample_index"] >= 0]
    # with one stream, a hash of the step says which half is whose
    assert rows in [expected_rows(plan, half) for half in (halves if num_streams == 1 else halves[1:])]
    loader.close()
