"""Promise 3: in one epoch every token of every document is an input exactly once, whatever the sizes."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, write_corpus
from tests.runtime.sources import ListSource
from tokshard.runtime import StreamingLoader, StreamPlan

WIDE = TINY_TOKENIZER.replace(b'"three": 3', b'"three": 99999')

sizes = st.fixed_dictionaries(
    {
        "seq_len": st.integers(1, 40),
        "block_tokens": st.integers(1, 80),
        "window_blocks": st.integers(1, 5),
        "seed": st.integers(0, 2**64 - 1),
    }
)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    sizes=sizes,
    epochs=st.integers(1, 3),
    batch=st.integers(1, 7),
)
def test_every_token_of_every_document_is_an_input_once_per_epoch(
    lengths: list[int], sizes: dict[str, int], epochs: int, batch: int
) -> None:
    source = ListSource(lengths)
    plan = StreamPlan(source, epochs=epochs, allow_small_blocks=True, **sizes)
    loader = StreamingLoader(plan, global_batch_size=batch)
    inputs: list[int] = []
    for rows in loader:
        inputs += rows["input_ids"][rows["sample_index"] >= 0].flatten().tolist()
    loader.close()
    reads = Counter(
        (piece.document, place)
        for sample in range(plan.num_samples or 0)
        for piece in plan.trace(sample)
        for place in range(piece.start, piece.stop)
    )
    everything = {(document, place) for document, length in enumerate(lengths) for place in range(length)}
    assert reads == dict.fromkeys(everything, epochs)
    # what the loop got are those tokens, and zeros after the last
    padding = -(epochs * source.num_tokens) % plan.seq_len
    assert Counter(inputs) == Counter(source.tokens.tolist() * epochs) + Counter({0: padding})


@settings(max_examples=10)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30), sizes=sizes, shard_tokens=st.integers(1, 300))
def test_every_token_of_a_corpus_on_disk_is_an_input_once_in_an_endless_plan(
    lengths: list[int], sizes: dict[str, int], shard_tokens: int
) -> None:
    memory = ListSource(lengths)
    with tempfile.TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus", memory.documents(), shard_tokens=shard_tokens, tokenizer=WIDE)
        plan = StreamPlan(corpus, allow_small_blocks=True, **{**sizes, "seq_len": 1})
        inputs = [int(plan.sample(sample)["input_ids"][0]) for sample in range(2 * memory.num_tokens)]
    for epoch in (inputs[: memory.num_tokens], inputs[memory.num_tokens :]):
        assert sorted(epoch) == sorted(memory.tokens.tolist())
