"""Promise 3: in one epoch every token of every document is an input exactly once; with streams, one of each stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime.loaders import reads_of
from tests.runtime.sources import ListSource
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan

sizes = st.fixed_dictionaries(
    {
        "seq_len": st.integers(1, 40),
        "block_tokens": st.integers(1, 80),
        "window_blocks": st.integers(1, 5),
        "seed": st.integers(0, 2**64 - 1),
    }
)


whole_sizes = st.fixed_dictionaries(
    {
        "seq_len": st.sampled_from([1, 2, 8]),
        "block_tokens": st.just(1024),
        "window_blocks": st.integers(1, 3),
        "seed": st.integers(0, 2**64 - 1),
        "pack": st.just("whole"),
    }
)


Token = tuple[str, int, int]
"""Corpus, document, and place in it."""


def tokens_of(source: ListSource) -> Iterator[Token]:
    return (("corpus", document, place) for document, length in enumerate(source.lengths) for place in range(length))


@pytest.mark.parametrize("loader", [NumpyLoader, StreamingLoader])
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    times=st.sampled_from([1, 1, 20]),
    sizes=sizes | whole_sizes,
    epochs=st.integers(1, 3),
    batch=st.integers(1, 7),
)
def test_every_token_of_every_document_is_an_input_once_per_epoch(
    loader: Any, lengths: list[int], times: int, sizes: dict[str, Any], epochs: int, batch: int
) -> None:
    source = ListSource(lengths * times)
    plan = StreamPlan(source, epochs=epochs, allow_small_blocks=True, **sizes)
    inputs: Counter[int] = Counter()
    with loader(plan, global_batch_size=batch) as batches:
        for rows in batches:
            inputs.update(rows["input_ids"][rows["sample_index"] >= 0].flatten().tolist())
    assert reads_of(plan, range(plan.num_samples or 0)) == dict.fromkeys(tokens_of(source), epochs)
    # what the loop got are those tokens, and zeros where rows have room, or after the last
    padding = (plan.num_samples or 0) * plan.seq_len - epochs * source.num_tokens
    assert inputs == Counter(source.tokens.tolist() * epochs) + Counter({0: padding})


@settings(max_examples=examples(8))
@pytest.mark.parametrize("num_streams", [1, 2, 5, pytest.param(64, marks=pytest.mark.soak)])
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    seq_len=st.integers(1, 3),
    window_blocks=st.integers(1, 2),
    seed=st.integers(0, 2**64 - 1),
)
def test_each_stream_reads_every_token_of_its_part_once_per_epoch_and_all_parts_are_the_corpus(
    num_streams: int, lengths: list[int], seq_len: int, window_blocks: int, seed: int
) -> None:
    block_tokens = 3
    num_blocks = 4 * num_streams * window_blocks + num_streams // 2  # some parts have a block more
    times = -(-num_blocks * block_tokens // sum(lengths))
    source = ListSource(lengths * times)
    plan = StreamPlan(
        source,
        seq_len=seq_len,
        block_tokens=block_tokens,
        window_blocks=window_blocks,
        num_streams=num_streams,
        seed=seed,
        allow_small_blocks=True,
    )
    full = source.num_tokens // block_tokens
    everything: Counter[Token] = Counter()
    for stream in range(num_streams):
        tokens = len(range(stream, full, num_streams)) * block_tokens
        if stream == num_streams - 1:
            tokens += source.num_tokens % block_tokens
        # so many samples end where an epoch does, `seq_len` epochs later
        samples = range(stream, 2 * tokens * num_streams, num_streams)
        first, second = reads_of(plan, samples[:tokens]), reads_of(plan, samples[tokens:])
        assert set(first.values()) == {seq_len}
        assert len(first) == tokens
        assert second == first  # the part is the same in later epochs
        everything += first
    assert everything == dict.fromkeys(tokens_of(source), seq_len)
