"""What ORDER.md says is what the package reads: a model that was written from the page alone gives the same samples."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.runtime import page_model
from tests.runtime.page_model import Documents, Used
from tests.runtime.sources import ListSource, PeriodicSource, SpannedSource
from tests.vectors import order
from tokshard.runtime import NumpyLoader
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.infilling import FillInTheMiddle
from tokshard.runtime.rows.transforms import SampleRandom

VECTORS = json.loads(order.FILE.read_text(encoding="utf-8"))
ROW = ("input_ids", "labels", "loss_weights", "position_ids")


def documents_of_vector(facts: dict[str, Any]) -> Documents:
    """As the header of the vectors explains them."""
    content = bytes.fromhex(facts["content"])
    if "document_lengths" not in facts:
        starts = range(0, facts["num_tokens"], facts["document_tokens"])
        return Documents(content, starts, facts["num_tokens"], token=lambda position: 0)
    ends = set(accumulate(facts["document_lengths"]))

    def token(position: int) -> int:
        return 0 if position + 1 in ends else int(facts["first_token"]) + position

    weights = order.target_weights(facts) if "loss" in facts else None
    return Documents.of_lengths(content, facts["document_lengths"], token, weights)


def transforms_of_vector(facts: dict[str, Any]) -> list[page_model.FillInTheMiddle]:
    return [page_model.FillInTheMiddle(**facts["fill_in_the_middle"])] if "fill_in_the_middle" in facts else []


def model_of_vector(name: str) -> page_model.Plan:
    facts = VECTORS["plans"][name]
    entries = facts["corpora"].values()
    arguments = {key: value for key, value in facts["arguments"].items() if key != "allow_small_blocks"}
    return page_model.Plan(
        [
            Used(
                documents_of_vector(VECTORS["corpora"][entry["corpus"]]),
                take=entry.get("take", 1.0),
                start_epoch=entry.get("start_epoch", 0),
                pack=entry.get("pack", "cut"),
            )
            for entry in entries
        ],
        weights=[entry.get("weight", 1.0) for entry in entries],
        changes=facts.get("changes", ()),
        transforms=transforms_of_vector(facts),
        **arguments,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.soak if name == "64 streams" else ()) for name in VECTORS["plans"]],
)
def test_the_page_alone_gives_every_value_of_the_vectors(name: str) -> None:
    facts, model = VECTORS["plans"][name], model_of_vector(name)
    assert model.num_samples == facts["num_samples"]
    assert [[g, *model.located(g)] for g, _, _ in facts["located"]] == facts["located"]
    for sample, pieces in facts["pieces"].items():
        assert [list(piece) for piece in model.pieces(int(sample))] == pieces
    for sample, expected in facts["rows"].items():
        row = model.row(int(sample))
        assert {key: value for key in ROW if (value := getattr(row, key)) is not None} == expected


def documents_of_source(source: ListSource, fingerprint: str = "") -> Documents:
    tokens: Callable[[int], int] = source.tokens.tolist().__getitem__
    weights = source.target_weights if isinstance(source, SpannedSource) else None
    return Documents.of_lengths(bytes.fromhex(fingerprint or source.fingerprint), source.lengths, tokens, weights)


def assert_equal(plan: StreamPlan, model: page_model.Plan, sample: int) -> None:
    assert [(piece.document, piece.start, piece.stop) for piece in plan.trace(sample)] == model.pieces(sample)
    # a sample alone is a batch of one row, without the dimension of rows
    expected = {key: value[0] if key in ROW else value for key, value in model.batch([sample]).items()}
    assert {key: np.asarray(value).tolist() for key, value in plan.sample(sample).items()} == expected


lengths = st.lists(st.integers(1, 40), min_size=1, max_size=25)
few_lengths = st.lists(st.integers(1, 20), min_size=1, max_size=8)
shapes = st.fixed_dictionaries(
    {
        "seq_len": st.integers(1, 30),
        "block_tokens": st.integers(1, 8) | st.integers(1, 64),  # small ones deal more corpora to streams
        "window_blocks": st.integers(1, 6),
    }
)
seeds = st.integers(0, 2**64 - 1)


def spanned(parts: list[int], data: st.DataObject, **options: Any) -> SpannedSource:
    """Documents in which all tokens, none, or some with several weights are targets."""
    kinds = {"none": [0.0], "all": [1.0], "one weight": [0.3], "some": [0.0, 1.0], "several": [0.0, 0.5, 0.1]}
    found = []
    for length in parts:
        kind = kinds[data.draw(st.sampled_from(sorted(kinds)))]
        found.append([0.0, *(kind[place * place % 7 % len(kind)] for place in range(1, length))])
    return SpannedSource(found, **options)


def a_take(data: st.DataObject, parts: list[int], block_tokens: int) -> float:
    take = data.draw(st.sampled_from([1.0, 0.3, 0.5, 0.99]))
    return take if int(take * (sum(parts) // block_tokens)) else 1.0  # one that leaves no block is refused


@settings(max_examples=examples(30), deadline=None)
@given(parts=st.lists(lengths, min_size=1, max_size=4), shape=shapes, seed=seeds, data=st.data())
def test_the_page_alone_gives_the_samples_of_any_mixture(
    parts: list[list[int]], shape: dict[str, int], seed: int, data: st.DataObject
) -> None:
    inner = data.draw(st.booleans())
    sources = [
        ListSource(part, first_token=1 + 5000 * number, name=str(number), inner_delimiters=inner)
        for number, part in enumerate(parts)
    ]
    if data.draw(st.booleans()):
        sources[-1] = spanned(parts[-1], data, first_token=50_001, name="with loss spans")
    if data.draw(st.booleans()):
        sources.append(sources[0])
    takes = [a_take(data, source.lengths, shape["block_tokens"]) for source in sources]
    first_epochs = [data.draw(st.sampled_from([0, 0, 7, 2**32 - 1])) for _ in sources]
    if sources[0] in sources[1:]:
        first_epochs[-1] = first_epochs[0] // 2 + 1
    some_weights = st.lists(
        st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0, 3.0]), min_size=len(sources), max_size=len(sources)
    ).filter(any)
    weights = data.draw(st.none() | some_weights)
    starts = sorted(data.draw(st.sets(st.integers(1, 30) | st.integers(1, 2**40), max_size=3)))
    changes = [(start, data.draw(some_weights)) for start in starts]
    num_streams = data.draw(st.sampled_from([1, 1, 2, 3, 64]))

    names = [f"corpus {number}" for number in range(len(sources))]
    plan = StreamPlan(
        dict(zip(names, sources, strict=True)),
        seed=seed,
        weights=weights and dict(zip(names, weights, strict=True)),
        schedule=[(start, dict(zip(names, values, strict=True))) for start, values in changes],
        take=dict(zip(names, takes, strict=True)),
        start_epoch=dict(zip(names, first_epochs, strict=True)),
        num_streams=num_streams,
        pack="cut",
        allow_small_blocks=True,
        **shape,
    )
    model = page_model.Plan(
        [
            Used(documents_of_source(source), take=take, start_epoch=first_epoch)
            for source, take, first_epoch in zip(sources, takes, first_epochs, strict=True)
        ],
        seed=seed,
        weights=weights,
        changes=changes,
        num_streams=num_streams,
        **shape,
    )
    for sample in [*range(10), *data.draw(st.lists(st.integers(10, 2**50), max_size=6))]:
        assert_equal(plan, model, sample)
    for start in starts:
        for sample in (start - 1, start, start + 1):
            assert_equal(plan, model, sample)


@settings(max_examples=examples(30), deadline=None)
@given(part=lengths, shape=shapes, seed=seeds, epochs=st.integers(1, 3), data=st.data())
def test_the_page_alone_gives_a_finite_pass_to_its_short_end(
    part: list[int], shape: dict[str, int], seed: int, epochs: int, data: st.DataObject
) -> None:
    options: dict[str, Any] = {**shape, "seed": seed, "epochs": epochs}
    take, first_epoch = a_take(data, part, shape["block_tokens"]), data.draw(st.sampled_from([0, 2]))
    source = ListSource(part)
    plan = StreamPlan({"a": source}, take=take, start_epoch={"a": first_epoch}, allow_small_blocks=True, **options)
    model = page_model.Plan([Used(documents_of_source(source), take=take, start_epoch=first_epoch)], **options)
    assert plan.num_samples == model.num_samples
    with pytest.raises(IndexError):
        plan.sample(plan.num_samples or 0)
    last = model.num_samples - 1
    for sample in {0, last, max(0, last - 1), *data.draw(st.lists(st.integers(0, last), max_size=5))}:
        assert_equal(plan, model, sample)


ranks = st.integers(1, 3).flatmap(lambda count: st.tuples(st.integers(0, count - 1), st.just(count)))


def assert_loader_equals(plan: StreamPlan, steps: Iterator[Any], batch_size: int, rank: int, count: int) -> None:
    with NumpyLoader(plan, global_batch_size=batch_size, dp_rank=rank, dp_world_size=count, uneven="pad") as loader:
        found = [{key: value.tolist() for key, value in batch.items()} for batch in loader]
    assert found == list(steps)


@settings(max_examples=examples(15), deadline=None)
@given(part=few_lengths, shape=shapes, batch_size=st.integers(1, 7), place=ranks)
def test_the_page_alone_gives_the_batches_of_every_rank_in_a_finite_pass(
    part: list[int], shape: dict[str, int], batch_size: int, place: tuple[int, int]
) -> None:
    source = ListSource(part)
    plan = StreamPlan(source, epochs=1, allow_small_blocks=True, **shape)
    model = page_model.Plan([Used(documents_of_source(source))], epochs=1, **shape)
    assert_loader_equals(plan, model.steps(batch_size, *place), batch_size, *place)


@pytest.mark.filterwarnings("ignore")  # that the pass ends
@settings(max_examples=examples(15), deadline=None)
@given(parts=st.lists(few_lengths, min_size=1, max_size=2), shape=shapes, batch_size=st.integers(1, 7), data=st.data())
def test_the_page_alone_says_where_max_epochs_ends_a_pass(
    parts: list[list[int]], shape: dict[str, int], batch_size: int, data: st.DataObject
) -> None:
    sources = [ListSource(part, name=str(number)) for number, part in enumerate(parts)]
    most = [data.draw(st.sampled_from([0.3, 1.0, 1.1])) for _ in sources]
    weights = [data.draw(st.sampled_from([0.5, 1.0])) for _ in sources]
    names = [source.name for source in sources]
    plan = StreamPlan(
        dict(zip(names, sources, strict=True)),
        weights=dict(zip(names, weights, strict=True)),
        max_epochs=dict(zip(names, most, strict=True)),
        allow_small_blocks=True,
        **shape,
    )
    model = page_model.Plan([Used(documents_of_source(source)) for source in sources], weights=weights, **shape)
    assert_loader_equals(plan, model.steps(batch_size, 0, 1, most), batch_size, 0, 1)


@settings(max_examples=examples(25), deadline=None)
@given(
    part=lengths,
    shape=shapes,
    seed=seeds,
    rates=st.lists(st.sampled_from([0.0, 0.5, 0.9, 1.0]), min_size=2, max_size=2),
    times=st.integers(1, 2),
    data=st.data(),
)
def test_the_page_alone_fills_in_the_middle(
    part: list[int], shape: dict[str, int], seed: int, rates: list[float], times: int, data: st.DataObject
) -> None:
    rate, spm_rate = rates
    source = spanned(part, data) if data.draw(st.booleans()) else ListSource(part)
    options: dict[str, Any] = {**shape, "seed": seed, "epochs": 1}
    transform = FillInTheMiddle(prefix_id=60_001, suffix_id=60_002, middle_id=60_003, rate=rate, spm_rate=spm_rate)
    plan = StreamPlan(source, transforms=[transform] * times, allow_small_blocks=True, pack="cut", **options)
    said = page_model.FillInTheMiddle(60_001, 60_002, 60_003, rate, spm_rate)
    model = page_model.Plan([Used(documents_of_source(source))], transforms=[said] * times, **options)
    for sample in {*range(min(5, model.num_samples)), model.num_samples - 1}:
        assert_equal(plan, model, sample)


def test_integers_of_a_transform_are_drawn_as_the_page_says() -> None:
    said, random = page_model.Random(17, 2**40 + 3), SampleRandom(17, 2**40 + 3)
    for below in (1, 2, 10, 1000, 2**32):
        assert random.integers(below, 3).tolist() == [said.integer(below) for _ in range(3)]


def test_the_defaults_of_the_page_are_those_of_a_plan() -> None:
    for seq_len in (1, 1024, 8192, 100_000):
        shape = StreamPlan(ListSource([3]), seq_len=seq_len).shape
        corpus = page_model.Plan([Used(documents_of_source(ListSource([3])))], seq_len=seq_len).corpora[0]
        assert (shape.block_tokens, shape.window_blocks) == (corpus.B, corpus.W)


def test_default_weights_of_huge_corpora_are_rounded_as_the_page_says() -> None:
    sources = {str(size): PeriodicSource(size) for size in (2**53 + 1, 2**55 + 3, 2**56 + 2**53 + 7)}
    plan = StreamPlan(sources, seq_len=1024)
    documents = [
        Documents(bytes.fromhex(source.fingerprint), range(0, source.num_tokens, 1000), source.num_tokens, int)
        for source in sources.values()
    ]
    model = page_model.Plan([Used(each) for each in documents], seq_len=1024)
    samples = [*range(20), *range(2**60, 2**60 + 20), 2**62]
    found = np.array(plan.mixture(plan.cursor()).locate(np.array(samples, np.int64))).T
    assert [tuple(entry) for entry in found.tolist()] == [model.located(sample) for sample in samples]
