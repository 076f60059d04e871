"""Promise 5: `plan.sample(g)` is what the loader yields as sample g, and what the page of the order says.

tests/runtime/test_page_model.py and test_histories.py compare both with models that were written from the pages alone.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contract.builds import select
from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.examples import examples
from tests.runtime.loaders import expected_rows, rows_of, take
from tests.runtime.modelled import assert_equal
from tests.runtime.sources import ListSource, PeriodicSource
from tests.spec.order import Documents, Plan, Used
from tokshard.runtime import CorpusSource, StreamingLoader, StreamPlan

SIZES = {"a": (10**13, 1000), "b": (10**9, 77), "c": (10**6, 50)}


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> tuple[CorpusSource, Documents]:
    """A view of two documents out of three, and its tokens."""
    place = tmp_path_factory.mktemp("viewed")
    contents = ListSource([1 + number % 70 for number in range(900)]).documents()
    tokenizer = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 59999')
    base = write_corpus(place / "base", contents, shard_tokens=999, tokenizer=tokenizer)
    kept = [number for number in range(900) if number % 3]
    source = CorpusSource(select(base, place / "view", kept))
    tokens = np.concatenate([contents[number] for number in kept])
    lengths = [len(contents[number]) for number in kept]
    return source, Documents.of_lengths(bytes.fromhex(source.fingerprint), lengths, lambda place: int(tokens[place]))


@settings(max_examples=examples(20))
@given(start=st.integers(0, 2**45), batch=st.integers(1, 4), num_streams=st.sampled_from([1, 1, 2, 7, 64]))
def test_a_loader_that_starts_anywhere_yields_the_samples_of_the_plan_and_of_the_page(
    viewed: tuple[CorpusSource, Documents], start: int, batch: int, num_streams: int
) -> None:
    view, of_view = viewed
    imaginary = {name: PeriodicSource(*sizes) for name, sizes in SIZES.items()}
    for source in imaginary.values():
        source.tokenizer = view.tokenizer
    sources = {**imaginary, "view": view}
    shared = {"seq_len": 16, "window_blocks": 1, "seed": 1, "num_streams": num_streams}
    plan = StreamPlan(sources, weights={"a": 3, "b": 1, "c": 1, "view": 2}, **shared)
    size = batch * num_streams
    loader = StreamingLoader(plan, global_batch_size=size, dp_rank=1, dp_world_size=2, uneven="pad", prefetch_factor=1)
    loader.skip(start)
    step = sorted(range(start, start + size), key=lambda g: (g % num_streams, g))
    halves = [step[: -(-size // 2)], step[-(-size // 2) :]]
    rows = [row for row in rows_of(take(loader, 1)) if row["sample_index"] >= 0]
    # with one stream, a hash of the step says which half is whose
    assert rows in [expected_rows(plan, half) for half in (halves if num_streams == 1 else halves[1:])]
    loader.close()
    documents = [
        Documents(bytes.fromhex(source.fingerprint), range(0, size, length), size, lambda place: place % 60_000)
        for source, (size, length) in zip(imaginary.values(), SIZES.values(), strict=True)
    ]
    model = Plan(list(map(Used, [*documents, of_view])), weights=[3.0, 1.0, 1.0, 2.0], **shared)
    assert_equal(plan, model, step[-1])
