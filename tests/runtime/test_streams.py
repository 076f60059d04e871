"""A plan with streams is plans side by side: what a stream owns, what is refused, and how every other argument behaves.

The promises for any number of streams are in tests/contract; ORDER.md against the code in test_page_model.
"""

from __future__ import annotations

import itertools
import json
import pickle
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.corpora import write_corpus
from tests.examples import examples
from tests.runtime.loaders import expected_rows, rows_of
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.states import edited
from tests.runtime.test_reader import LARGE_VOCABULARY
from tokshard.errors import PlanError, PlanMismatchError
from tokshard.inspect.plan.run import Run
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import Cache
from tokshard.runtime.bytes.corpus import CorpusSource
from tokshard.runtime.bytes.source import fetched
from tokshard.runtime.locality import steps_per_window
from tokshard.runtime.stop import used_up

SIZES = {"seq_len": 4, "block_tokens": 16, "window_blocks": 2, "seed": 5}
LARGE = ListSource([9, 4, 30, 1, 12, 3] * 30)
SMALL = ListSource([5, 17, 2] * 4, first_token=5000)
OTHER = ListSource([8, 1, 19] * 60, first_token=9000)


def plan_of(num_streams: int = 4, corpora: dict[str, Any] | None = None, **options: Any) -> StreamPlan:
    """A corpus that is dealt to up to 13 streams, and one that is shared."""
    corpora = {"large": LARGE, "small": SMALL} if corpora is None else corpora
    return StreamPlan(corpora, num_streams=num_streams, **{**SIZES, **options})


@pytest.mark.parametrize(
    ("block_tokens", "num_streams", "blocks"),
    [(65_536, 1, 1024), (65_536, 4, 256), (65_536, 16, 64), (65_536, 64, 64), (1 << 20, 2, 64)],
)
def test_default_windows_of_streams_have_the_blocks_of_one_window_together_but_at_least_64_each(
    block_tokens: int, num_streams: int, blocks: int
) -> None:
    plan = StreamPlan(PeriodicSource(10**6), seq_len=8, block_tokens=block_tokens, num_streams=num_streams)
    assert plan.shape.window_blocks == blocks


@pytest.mark.parametrize("window_blocks", [1, 3])
def test_a_corpus_is_dealt_if_each_stream_gets_four_windows(window_blocks: int) -> None:
    for more, is_dealt in ((0, True), (-1, False)):
        source = PeriodicSource((4 * 5 * window_blocks + more) * 16 + 3)
        plan = StreamPlan(source, seq_len=4, block_tokens=16, window_blocks=window_blocks, num_streams=5)
        assert plan.corpora[0].is_dealt is is_dealt


def test_a_large_corpus_is_dealt_and_a_small_one_stays_whole() -> None:
    large, small = plan_of().corpora
    assert (large.num_parts, large.num_windows) == (4, sum(large.part_windows(c) for c in range(4)))
    assert (small.num_parts, small.num_windows) == (1, small.part_windows(0))
    assert sum(large.part_tokens(c) for c in range(4)) == large.num_tokens == LARGE.num_tokens


def test_one_stream_is_the_plan_without_streams() -> None:
    assert plan_of(1).fingerprint == StreamPlan({"large": LARGE, "small": SMALL}, **SIZES).fingerprint
    assert json.loads(NumpyLoader(plan_of(1), global_batch_size=1).state_dict()["cursor"])["num_streams"] == 1


@pytest.mark.parametrize("value", [0, -1, 1.5, 65_537, "4"])
def test_numbers_of_streams_that_make_no_sense_are_refused(value: Any) -> None:
    with pytest.raises(PlanError, match="num_streams"):
        plan_of(value)


@pytest.mark.parametrize(("options", "hint"), [({"epochs": 2}, "leave epochs out"), ({"max_epochs": 3}, "'warn'")])
def test_a_pass_that_ends_has_one_stream(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(PlanError, match="num_streams 4") as caught:
        plan_of(4, {"large": LARGE}, **options)
    assert hint in str(caught.value.hint)


def test_a_batch_that_streams_do_not_divide_is_refused_also_after_a_change_of_its_size() -> None:
    state = NumpyLoader(plan_of(), global_batch_size=8).state_dict()
    with pytest.raises(PlanError, match="global batch of 10 samples is not a multiple of the 4 streams") as caught:
        NumpyLoader(plan_of(), global_batch_size=10)
    assert "such as 8" in str(caught.value.hint)
    NumpyLoader(plan_of(), global_batch_size=12).load_state_dict(state)


@pytest.mark.parametrize(("before", "after"), [(4, 1), (1, 4), (4, 2)])
@pytest.mark.parametrize("corpora", ["same", "plan"])
def test_a_state_of_a_plan_with_other_streams_is_refused(before: int, after: int, corpora: Any) -> None:
    state = NumpyLoader(plan_of(before), global_batch_size=4).state_dict()
    with pytest.raises(PlanMismatchError, match=rf"num_streams differs \({before}, now {after}\)"):
        NumpyLoader(plan_of(after), global_batch_size=4).load_state_dict(state, corpora=corpora)


@pytest.mark.parametrize(
    "change",
    [
        {"num_streams": "4"},
        {"counts": [[0, 0]] * 3, "remainders": [[0]] * 4},
        {"counts": [[0, 0]] * 3, "remainders": [[0]] * 3},
        {"counts": [[0]] * 4, "remainders": [[0]] * 4},
        {"weights": [[4, [1.0, 1.0]]], "sample": 8},
    ],
)
def test_a_state_whose_streams_do_not_fit_is_damaged(change: dict[str, Any]) -> None:
    loader = NumpyLoader(plan_of(), global_batch_size=4)
    with pytest.raises(PlanMismatchError, match="damaged"):
        loader.load_state_dict(edited(loader.state_dict(), **change))


def test_a_plan_with_streams_pickles() -> None:
    plan = pickle.loads(pickle.dumps(plan_of()))
    assert plan.fingerprint == plan_of().fingerprint
    assert expected_rows(plan, range(12)) == expected_rows(plan_of(), range(12))


@settings(max_examples=examples(15))
@given(num_streams=st.sampled_from([2, 5, 13]), document=st.integers(0, 179), epoch=st.integers(0, 3), data=st.data())
def test_find_names_the_samples_of_every_stream_that_read_a_document(
    num_streams: int, document: int, epoch: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from(["large", "small"]))
    plan = plan_of(num_streams, weights={"large": 3, "small": 1})
    document %= len((LARGE if name == "large" else SMALL).lengths)
    tokens: Counter[int] = Counter()
    found = plan.find(name, document, epochs=[epoch])
    assert [one.sample for one in found] == sorted(one.sample or 0 for one in found)
    for one in found:
        assert one.sample is not None
        read = [(p.start, p.stop) for p in plan.trace(one.sample) if (p.corpus, p.document) == (name, document)]
        assert any(start <= one.start and one.stop <= stop for start, stop in read)
        tokens.update(range(one.start, one.stop))
    length = plan.sources[plan.names.index(name)].lengths[document]
    assert tokens == dict.fromkeys(range(length), 1)


@settings(max_examples=examples(10))
@given(
    num_streams=st.sampled_from([1, 2, 5, 13]),
    epochs=st.sampled_from([0.5, 1.0, 1.7]),
    start=st.integers(0, 700),
    limited=st.sampled_from(["large", "small"]),
)
def test_a_corpus_is_used_up_when_a_stream_asks_for_more_than_max_epochs_of_its_part(
    num_streams: int, epochs: float, start: int, limited: str
) -> None:
    weights = {"large": 3, "small": 1}
    plan = plan_of(num_streams, weights=weights, max_epochs={limited: epochs}, on_max_epochs="warn")
    cursor = plan.cursor().advanced(start)
    number = plan.names.index(limited)
    corpora, corpus_samples = plan.mixture(cursor).locate(np.arange(5_000))
    expected = None
    for sample in range(start, 5_000):
        if corpora[sample] == number:
            _, (part,), (part_sample,) = plan.corpora[number].by_part(
                np.array([sample]), corpus_samples[sample : sample + 1]
            )
            if part_sample * plan.seq_len >= epochs * plan.corpora[number].part_tokens(part):
                expected = sample
                break
    assert expected is not None
    assert used_up(plan, cursor) == [(expected, limited)]


def test_a_loader_warns_once_when_a_stream_reads_more_than_max_epochs() -> None:
    plan = plan_of(max_epochs={"small": 1}, on_max_epochs="warn")
    with NumpyLoader(plan, global_batch_size=40) as loader, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(itertools.islice(loader, 20))
    ((sample, _),) = used_up(plan, plan.cursor())
    messages = [str(one.message) for one in caught if "is used up" in str(one.message)]
    assert [message.partition(":")[0] for message in messages] == [f"corpus 'small' is used up at sample {sample}"]


def test_corpora_that_come_and_go_leave_the_others_in_every_stream_where_they_were() -> None:
    corpora = {"large": LARGE, "small": SMALL, "other": OTHER}
    weights = {"large": 3.0, "small": 1.0, "other": 2.0}
    read: dict[str, list[list[int]]] = {name: [[] for _ in range(4)] for name in corpora}
    state = None
    for names in (["large", "small"], ["other", "large", "small"], ["large", "other"]):
        plan = plan_of(4, {name: corpora[name] for name in names}, weights={name: weights[name] for name in names})
        loader = NumpyLoader(plan, global_batch_size=8)
        if state is not None:
            loader.load_state_dict(state, corpora="plan")
        start = loader.cursor.sample
        loader.skip(43 * 8)  # as read; 43 makes steps begin anywhere
        samples = np.arange(start, loader.cursor.sample)
        located, corpus_samples = plan.mixture(loader.cursor).locate(samples)
        for sample, number, corpus_sample in zip(samples.tolist(), located.tolist(), corpus_samples, strict=True):
            read[names[number]][sample % 4].append(int(corpus_sample))
        state = loader.state_dict()
    for name, streams in read.items():
        for samples_read in streams:
            assert samples_read == list(range(len(samples_read))), name


def test_a_state_holds_no_counts_until_weights_have_changed_often() -> None:
    loader = NumpyLoader(plan_of(), global_batch_size=4)
    loader.skip(10)
    saved = json.loads(loader.state_dict()["cursor"])
    assert (saved["num_streams"], saved["counts"], saved["remainders"]) == (4, [], [])
    for part in range(20):
        loader.skip(7)
        loader.set_weights({"large": 1, "small": part})
    saved = json.loads(loader.state_dict()["cursor"])
    (start, _), *_ = saved["weights"]
    before = plan_of().mixture(loader.cursor).counts_before(start)
    assert tuple(map(sum, zip(*saved["counts"], strict=True))) == before
    assert [len(part) for part in saved["remainders"]] == [1] * 4


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("start", [0, 3])
def test_a_trace_names_the_rank_and_row_that_a_sample_had(world_size: int, start: int) -> None:
    plan = plan_of()
    run = Run(plan=plan, global_batch_size=8, cursor=plan.cursor().skipping(start), world_size=world_size, uneven="pad")
    for rank in range(world_size):
        with NumpyLoader(plan, global_batch_size=8, dp_rank=rank, dp_world_size=world_size, uneven="pad") as loader:
            loader.skip(start)
            for step, batch in enumerate(itertools.islice(loader, 2), 1):
                for row, sample in enumerate(batch["sample_index"].tolist()):
                    if sample >= 0:
                        assert run.place_of(sample) == (step, rank, row)


def shift(sample: Any, random: Any) -> Any:
    return replace(sample, tokens=(sample.tokens + random.integers(100, 1)).astype(sample.tokens.dtype))


def test_transforms_draw_for_the_global_sample_and_take_leaves_out_the_same_blocks_of_all_streams() -> None:
    plan = plan_of(4, take={"large": 0.5}, transforms=[shift])
    with NumpyLoader(plan, global_batch_size=8) as loader:
        rows = rows_of([next(iter(loader))])
    assert rows == expected_rows(plan, sorted(range(8), key=lambda g: (g % 4, g)))
    blocks = {block for c in range(4) for block in blocks_of(plan_of(4, take={"large": 0.5}), c)}
    assert blocks == set(blocks_of(plan_of(1, take={"large": 0.5}), 0))


def blocks_of(plan: StreamPlan, stream: int) -> list[int]:
    """Of the first epoch of a stream in the first corpus."""
    order = plan.corpora[0]
    windows = (order.window(stream % order.num_parts, 0, index) for index in range(order.part_windows(stream)))
    return [start // order.shape.block_tokens for window in windows for start in order.blocks(window)[0].tolist()]


def test_windows_of_a_step_are_counted_over_all_streams() -> None:
    source = PeriodicSource(10**10, 750)
    sizes = {"seq_len": 64, "block_tokens": 4_096}
    one, many = (
        StreamPlan({"corpus": source}, num_streams=count, window_blocks=1_024 // count, **sizes) for count in (1, 16)
    )
    assert steps_per_window(one, 64) == steps_per_window(many, 64) == {"corpus": 1_024.0}


def test_find_asks_the_streams_that_own_the_document_only() -> None:
    plan = plan_of(13)
    plan.find("large", 7)
    start, stop = LARGE.place_of(7).start, LARGE.place_of(7).stop
    assert len(plan.readers[0]._kept) <= stop // 16 - start // 16 + 1


@pytest.mark.slow
def test_nodes_with_a_stream_each_fetch_a_corpus_once_together(tmp_path: Path) -> None:
    memory = ListSource([500] * 1_100)
    directory = write_corpus(tmp_path / "corpus", memory.documents(), tokenizer=LARGE_VOCABULARY)
    sizes = {"seq_len": 1_024, "block_tokens": 16_384, "window_blocks": 2, "seed": 3}
    num_steps, fetched_bytes = memory.num_tokens // 1_024 // 8, {}
    for num_streams in (1, 4):
        mapped = StreamPlan({"corpus": directory}, num_streams=num_streams, **sizes)
        fetched_bytes[num_streams] = 0.0
        for rank in range(4):
            source = CorpusSource(directory, access="pread", cache=Cache(memory_bytes=1 << 20))
            plan = StreamPlan({"corpus": source}, num_streams=num_streams, **sizes)
            with NumpyLoader(plan, global_batch_size=8, dp_rank=rank, dp_world_size=4) as loader:
                batches = list(itertools.islice(loader, num_steps))
            for row, sample in enumerate(batches[-1]["sample_index"].tolist()):
                assert np.array_equal(batches[-1]["input_ids"][row], mapped.sample(sample)["input_ids"])
            fetched_bytes[num_streams] += fetched([source])["fetched_bytes"]
    corpus_bytes = memory.num_tokens * 4
    # a block of two strides is fetched with the one that has the label of its last token, and the next window begun
    assert fetched_bytes[1] > 4 * corpus_bytes
    assert fetched_bytes[4] < 2 * corpus_bytes
