"""Rows that are packed whole: every token once an epoch whatever the lengths, and nothing is cut that need not be."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.examples import examples, some
from tests.runtime import page_model
from tests.runtime.page_model import Used
from tests.runtime.sources import ListSource, PeriodicSource
from tests.runtime.test_finding import assert_inverse
from tests.runtime.test_page_model import assert_equal, assert_loader_equals, documents_of_source
from tests.runtime.test_seq_len import resized, take, tokens_of
from tokshard.errors import DamagedCorpusError, PlanError, PlanMismatchError
from tokshard.runtime import NumpyLoader, expand
from tokshard.runtime.order import packing
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.infilling import FillInTheMiddle


@st.composite
def packings(draw: st.DrawFn, max_blocks: int = 5) -> tuple[list[int], dict[str, Any]]:
    """Lengths of documents that are bad to pack, and the arguments of a plan."""
    seq_len = draw(st.sampled_from([1, 2, 3, 4, 8]))
    block = 128 * seq_len * draw(st.integers(1, 2))
    special = [
        1,
        max(1, seq_len // 2),
        seq_len // 2 + 1,
        seq_len,
        seq_len + 1,
        2 * seq_len - 1,
        block // 128 + 1,
        block - 1,
        3 * block,
    ]
    pattern = draw(st.lists(st.sampled_from(special) | st.integers(1, 3 * seq_len), min_size=1, max_size=8))
    lengths = pattern * draw(st.integers(1, 200))
    fitting = int(np.searchsorted(np.cumsum(lengths), max_blocks * block, "right"))
    shape = {"seq_len": seq_len, "block_tokens": block, "window_blocks": draw(st.integers(1, 3)), "pack": "whole"}
    return lengths[: max(1, fitting)], {**shape, "seed": draw(st.integers(0, 2**64 - 1))}


def rows_of_windows(num_tokens: int, arguments: dict[str, Any]) -> list[int]:
    """The rows of each window of an epoch, as sizes alone say."""
    seq_len, block, width = (arguments[key] for key in ("seq_len", "block_tokens", "window_blocks"))
    section, (num_blocks, tail) = block // 128, divmod(num_tokens, block)
    blocks = [min(width, num_blocks - first) for first in range(0, num_blocks, width)] or [0]
    rows = [count * (block + section) // seq_len for count in blocks]
    rows[-1] += -(-(tail + section) // seq_len) if tail else 0
    return rows


def rows_of_one_window(lengths: list[int], seq_len: int) -> int:
    """The rows of an epoch that is one window: as the chunks need, longest first, and one in 128 more."""
    chunks = [min(seq_len, length - start) for length in lengths for start in range(0, length, seq_len)]
    count = len(page_model.opened(sorted(chunks, reverse=True), seq_len))
    return count + -(-count // 128)


def tokens_in(pieces: list[Any]) -> list[tuple[int, int]]:
    return [(piece.document, token) for piece in pieces for token in range(piece.start, piece.stop)]


@settings(max_examples=examples(40), deadline=None)
@given(packing=packings(), epoch=st.sampled_from([0, 1, 10**9]))
def test_an_epoch_has_every_token_once_in_rows_that_follow_from_sizes(
    packing: tuple[list[int], dict[str, Any]], epoch: int
) -> None:
    lengths, arguments = packing
    plan, seq_len = StreamPlan(ListSource(lengths), **arguments), arguments["seq_len"]
    rows = rows_of_windows(sum(lengths), arguments)
    if len(rows) == 1:
        rows = [rows_of_one_window(lengths, seq_len)]
    assert StreamPlan(ListSource(lengths), epochs=3, **arguments).num_samples == 3 * sum(rows)
    samples = np.arange(epoch * sum(rows), (epoch + 1) * sum(rows))
    traced = plan.traces(samples)
    assert max(len(tokens_in(pieces)) for pieces in traced) <= seq_len
    expected = [(document, token) for document, length in enumerate(lengths) for token in range(length)]
    assert sorted(token for pieces in traced for token in tokens_in(pieces)) == expected
    start = 0
    for count in rows:
        of_window = traced[start : start + count]
        if sum(map(len, of_window)) - sum(is_cut(pieces, seq_len, lengths) for pieces in of_window) >= count:
            assert all(of_window), "no row is empty if there are enough chunks"
        start += count


@settings(max_examples=examples(40), deadline=None)
@given(packing=packings(), epoch=st.sampled_from([0, 1, 10**9]))
def test_where_the_window_is_the_corpus_no_document_that_fits_into_a_row_is_cut(
    packing: tuple[list[int], dict[str, Any]], epoch: int
) -> None:
    lengths, arguments = packing
    plan = StreamPlan(ListSource(lengths), **arguments | {"window_blocks": 9})
    rows = rows_of_one_window(lengths, arguments["seq_len"])
    traced = plan.traces(np.arange(epoch * rows, (epoch + 1) * rows))
    assert sum(is_cut(pieces, arguments["seq_len"], lengths) for pieces in traced) == 0


def is_cut(pieces: list[Any], seq_len: int, lengths: list[int]) -> int:
    """Pieces that are not whole chunks."""
    return sum(
        piece.start % seq_len > 0 or piece.stop not in (piece.start + seq_len, lengths[piece.document])
        for piece in pieces
    )


@settings(max_examples=examples(80), deadline=None)
@given(data=st.data(), seq_len=st.integers(1, 30), num_rows=st.integers(1, 12))
def test_rows_are_chosen_as_by_one_who_looks_at_all_of_them_for_each_chunk(
    data: st.DataObject, seq_len: int, num_rows: int
) -> None:
    most = data.draw(st.sampled_from([seq_len, max(1, seq_len // 2), max(1, seq_len // 5)]))
    lengths = data.draw(st.lists(st.integers(1, most), max_size=60))
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_rows * seq_len, "right"))]
    chunks = [range(100 * number, 100 * number + length) for number, length in enumerate(lengths)]
    sizes = packing.Sizes(block=0, section=0, row=seq_len, is_counted=data.draw(st.booleans()))
    rows, late = packing.result_of(packing.placed(np.array(lengths, np.int64), num_rows, sizes))
    found = rows.tolist()
    assert sorted(late.tolist()) == [number for number, row in enumerate(found) if row < 0]
    model = page_model.packed(chunks, num_rows, seq_len, is_counted=sizes.is_counted)
    row_of = {chunk: row for row, held in enumerate(model) for chunk in held}
    assert found == [row_of.get(chunk, -1) for chunk in chunks]


@settings(max_examples=examples(25), deadline=None)
@given(packing=packings(), streams=st.integers(1, 3), data=st.data())
def test_the_page_alone_gives_the_rows(
    packing: tuple[list[int], dict[str, Any]], streams: int, data: st.DataObject
) -> None:
    lengths, arguments = packing
    sources = [ListSource(lengths), ListSource([5, 1, 40, 2] * 9, first_token=60_000)]
    takes = [data.draw(st.sampled_from([1.0, 0.7])) if sum(lengths) >= arguments["block_tokens"] else 1.0, 1.0]
    packs = ["whole", data.draw(st.sampled_from(["cut", "whole"]))]
    shared = {key: value for key, value in arguments.items() if key != "pack"} | {"num_streams": streams}
    plan = StreamPlan(
        {"a": sources[0], "b": sources[1]},
        take={"a": takes[0]},
        pack=dict(zip("ab", packs, strict=True)),
        **shared,
    )
    used = [
        Used(documents_of_source(source), take=part, pack=pack)
        for source, part, pack in zip(sources, takes, packs, strict=True)
    ]
    model = page_model.Plan(used, **shared)
    for sample in [*range(6), *data.draw(st.lists(st.integers(6, 2**45), max_size=6))]:
        assert_equal(plan, model, sample)


LONG_AND_SHORT_PUT_OFF = (
    [5, 5, 2, 2] * 9,
    {"seq_len": 8, "block_tokens": 1024, "window_blocks": 1, "pack": "whole", "seed": 0},
)


@settings(max_examples=examples(10), deadline=None)
@given(packing=packings(max_blocks=2), size=st.integers(1, 90), ranks=st.integers(1, 3))
@example(packing=LONG_AND_SHORT_PUT_OFF, size=1, ranks=1)
def test_every_rank_of_every_world_size_reads_its_rows_of_a_pass(
    packing: tuple[list[int], dict[str, Any]], size: int, ranks: int
) -> None:
    lengths, arguments = packing
    plan = StreamPlan(ListSource(lengths), epochs=1, **arguments)
    shared = {key: value for key, value in arguments.items() if key != "pack"}
    model = page_model.Plan([Used(documents_of_source(ListSource(lengths)), pack="whole")], epochs=1, **shared)
    for rank in range(ranks):
        assert_loader_equals(plan, model.steps(size, rank, ranks), size, rank, ranks)


@settings(max_examples=examples(15), deadline=None)
@given(packing=packings(max_blocks=2), streams=st.integers(1, 3))
def test_find_is_the_inverse_of_trace(packing: tuple[list[int], dict[str, Any]], streams: int) -> None:
    lengths, arguments = packing
    plan = StreamPlan(ListSource(lengths[:60]), num_streams=streams, **arguments)
    assert_inverse(plan, plan.cursor(), range(sum(rows_of_windows(sum(lengths[:60]), arguments)) + 5))


@pytest.mark.slow
@some("streams", [2, 1])
def test_documents_that_lie_in_several_windows_are_found(streams: int) -> None:
    lengths = [351, 3, 1, 752, 41] * 2
    plan = StreamPlan(
        ListSource(lengths), seq_len=2, block_tokens=256, window_blocks=1, pack="whole", num_streams=streams
    )
    assert_inverse(plan, plan.cursor(), range(int(plan.corpora[0].padded_tokens) // 2 + 9))


@pytest.mark.parametrize("pack", ["cut", "whole"])
def test_a_document_that_is_not_where_a_window_has_it_is_damage(pack: Any) -> None:
    source = ListSource([5, 7, 9] * 30)
    plan = StreamPlan(source, seq_len=2, block_tokens=256, window_blocks=9, pack=pack)
    assert len(plan.find("corpus", 5)) > 1
    source.stops[4] -= 1
    source.lengths[5] += 1
    with pytest.raises(DamagedCorpusError, match="changed during the run"):
        plan.find("corpus", 5)


@pytest.mark.filterwarnings("ignore:the pass of")
@settings(max_examples=examples(25), deadline=None)
@given(
    packing=packings(),
    seq_lens=st.lists(st.sampled_from([1, 2, 4, 8]), min_size=2, max_size=3),
    data=st.data(),
)
def test_a_pass_that_changes_its_seq_len_reads_no_token_again_before_all_others_but_those_left_out(
    packing: tuple[list[int], dict[str, Any]], seq_lens: list[int], data: st.DataObject
) -> None:
    lengths, arguments = packing
    shape = {**arguments, "block_tokens": 1024}

    def loader_of(seq_len: int) -> NumpyLoader:
        plan = StreamPlan(ListSource(lengths), epochs=2, **{**shape, "seq_len": seq_len})
        return NumpyLoader(plan, global_batch_size=1)

    loader = loader_of(seq_lens[0])
    for seq_len in seq_lens[1:]:
        left = (loader.plan.at(loader.cursor).num_samples or 0) - loader.cursor.sample
        loader.skip(data.draw(st.integers(0, max(0, left - 1))))
        loader = resized(loader_of(seq_len).plan, loader.state_dict(), 1)
    num_samples = loader.plan.at(loader.cursor).num_samples
    assert num_samples is not None
    counts = tokens_of(loader, range(num_samples))
    (stats,) = loader.stats()["corpora"].values()
    assert max(counts.values(), default=0) <= 2
    # what is left out is whole rows, their padding included
    assert 0 <= 2 * sum(lengths) - counts.total() <= stats["left_out"]
    window = (shape["window_blocks"] + 1) * (1024 + 8) + 8
    assert stats["left_out"] <= window * (len(seq_lens) - 1)


def test_skips_weights_and_masks_keep_their_meaning(tmp_path: Path) -> None:
    lengths = [9, 30, 1, 5, 12, 2, 1] * 40
    sources = {"text": ListSource(lengths), "more": ListSource([7] * 200, first_token=9_000)}
    plan = StreamPlan(sources, seq_len=8, block_tokens=1024, window_blocks=1, pack="whole", seed=3)
    loader = NumpyLoader(plan, global_batch_size=4)
    loader.skip(300)
    loader.set_weights({"text": 1.0, "more": 0.0})
    (tmp_path / "masked.txt").write_text("".join(f"{number}\n" for number in range(0, len(lengths), 3)))
    before = [plan.sample(sample, loader.cursor)["labels"] for sample in range(300, 340)]
    loader.mask("text", tmp_path / "masked.txt")
    for number, batch in enumerate(take(loader, 10)):
        for row, pieces in enumerate(plan.traces(batch["sample_index"], loader.cursor)):
            out = [piece.document % 3 == 0 for piece in pieces for _ in range(piece.start, piece.stop)]
            labels, unmasked = batch["labels"][row], before[4 * number + row]
            assert all(piece.corpus == "text" for piece in pieces)
            assert labels.tolist() == [
                -100 if gone else label
                for gone, label in zip([*out, *[True] * (8 - len(out))], unmasked.tolist(), strict=True)
            ]


def web_lengths(num_tokens: int, median: float, seed: int = 0) -> NDArray[np.int64]:
    """Lengths as documents of the web have them, in tokens."""
    drawn = np.exp(np.random.default_rng(seed).normal(np.log(median), 1.1, int(num_tokens / median)))
    lengths = np.maximum(1, drawn).astype(np.int64)
    return lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens))]


def test_no_document_that_fits_into_a_row_is_cut_and_one_token_in_129_is_padding() -> None:
    lengths = web_lengths(700_000, 32).tolist()
    plan = StreamPlan(ListSource(lengths), seq_len=128, block_tokens=65_536, window_blocks=8, pack="whole", seed=1)
    traced = plan.traces(np.arange(4_000))
    assert sum(is_cut(pieces, 128, lengths) for pieces in traced) == 0
    num_tokens = Counter(len(tokens_in(pieces)) for pieces in traced)
    assert 0.005 < 1 - sum(size * count for size, count in num_tokens.items()) / (128 * len(traced)) < 0.01
    assert 0 not in num_tokens


class Watched(ListSource):
    """A source that refuses to read what was not announced."""

    is_in_memory = False

    def __init__(self, lengths: list[int]) -> None:
        super().__init__(lengths)
        self.announced = np.zeros(len(self.tokens) + 1, np.int64)

    def will_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.announced[start : stop + 1] += 1  # with the label of the last token

    def has_read(self, starts: NDArray[np.int64], stops: NDArray[np.int64]) -> None:
        for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
            self.announced[start : stop + 1] -= 1

    def tokens_of(self, start: int, length: int) -> Any:
        assert self.announced[start : start + length].min() > 0, "a section reaches beyond its block"
        return super().tokens_of(start, length)


def test_what_is_announced_reaches_to_the_end_of_the_last_section_of_a_block() -> None:
    source = Watched([300, 21, 7, 40] * 40)
    plan = StreamPlan(source, seq_len=4, block_tokens=2048, window_blocks=2, pack="whole", epochs=2)
    with NumpyLoader(plan, global_batch_size=8) as loader:
        assert sum(1 for _ in loader) == -(-(plan.num_samples or 0) // 8)


@pytest.mark.parametrize("lengths", [[3000, 5, 2] * 2, [1, 2, 3] * 40, [4] * 2])
@pytest.mark.parametrize("has_transform", [False, True])
def test_compact_batches_are_the_full_ones_and_rows_without_tokens_pass_through_transforms(
    lengths: list[int], has_transform: bool
) -> None:
    middle = FillInTheMiddle(prefix_id=60_001, suffix_id=60_002, middle_id=60_003, rate=0.9, spm_rate=0.5)
    transforms = [middle] if has_transform else []
    shape = {"seq_len": 16, "block_tokens": 2048, "window_blocks": 2, "epochs": 2}
    plan = StreamPlan(ListSource(lengths), pack="whole", transforms=transforms, **shape)
    pair = [list(NumpyLoader(plan, global_batch_size=3, compact=compact)) for compact in (False, True)]
    samples = np.concatenate([batch["sample_index"] for batch in pair[0]])
    assert samples[samples >= 0].tolist() == list(range(plan.num_samples or 0))
    for full, narrow in zip(*pair, strict=True):
        expanded = expand(narrow)
        assert {key: value.tolist() for key, value in full.items()} == {key: expanded[key].tolist() for key in full}
    num_tokens = [int(count) for batch in pair[1] for count in batch["num_tokens"]]
    assert sum(num_tokens) == 2 * sum(lengths)
    assert 0 in num_tokens


def test_a_sample_far_away_is_found_at_once() -> None:
    plan = StreamPlan(PeriodicSource(10**14, 777), seq_len=2048, pack="whole", num_streams=2)
    started = time.process_time()
    pieces = plan.trace(10**12)
    assert time.process_time() - started < 5
    for one in plan.find("corpus", pieces[0].document, epochs=5):
        assert sum(piece.document == pieces[0].document for piece in plan.trace(one.sample or 0)) > 0


def test_the_table_of_many_short_chunks_is_made_in_seconds() -> None:
    lengths = np.maximum(1, web_lengths(8 << 20, 12))
    started = time.process_time()
    found, _ = packing.result_of(
        packing.placed(lengths, int(lengths.sum()) // 32_768 + 3, packing.Sizes(0, 0, 32_768, is_counted=False))
    )
    assert time.process_time() - started < 1e-5 * len(lengths)
    assert found.min() >= 0


def test_packs_are_in_the_hash_of_a_plan_and_in_its_states() -> None:
    source = ListSource([9] * 100)
    cut, whole = (StreamPlan(source, seq_len=2, block_tokens=256, pack=pack) for pack in ("cut", "whole"))
    assert cut.fingerprint == StreamPlan(source, seq_len=2, block_tokens=256).fingerprint != whole.fingerprint
    state = NumpyLoader(whole, global_batch_size=1).state_dict()
    NumpyLoader(whole, global_batch_size=1).load_state_dict(state)
    with pytest.raises(PlanMismatchError, match=r"pack of corpus 'corpus' differs \(whole, now cut\)"):
        NumpyLoader(cut, global_batch_size=1).load_state_dict(state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pack": "some"}, "pack is 'some'"),
        ({"pack": {"other": "whole"}}, "the plan has corpus"),
        ({"pack": {"corpus": 1}}, "pack is"),
        ({"pack": "whole", "block_tokens": 65_536}, "no multiple of 128 samples of 768"),
        ({"pack": "whole", "block_tokens": 128 * 768, "window_blocks": 43_500}, "2\\*\\*32"),
    ],
)
def test_what_cannot_be_packed_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        StreamPlan(ListSource([9]), seq_len=768, **arguments)


@pytest.mark.parametrize(
    ("seq_len", "block"), [(1, 1_048_576), (500, 1_088_000), (512, 1_048_576), (16_384, 2_097_152)]
)
def test_blocks_have_128_of_the_longest_rows_that_the_run_can_grow_to_by_default(seq_len: int, block: int) -> None:
    plan = StreamPlan({"a": ListSource([9]), "b": ListSource([8])}, seq_len=seq_len, pack={"b": "whole"})
    assert plan.shape.block_tokens == block
    assert [corpus.pack for corpus in plan.corpora] == ["cut", "whole"]
    model = page_model.Plan([Used(documents_of_source(ListSource([9])), pack="whole")], seq_len=seq_len)
    assert (block, plan.shape.window_blocks) == (model.B, model.W)
