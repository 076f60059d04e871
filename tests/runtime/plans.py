"""Any plan: what properties of plans and loaders draw."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.runtime.sources import ListSource, SpannedSource
from tokshard.runtime.order.windows import BLOCK_SECTIONS
from tokshard.runtime.plan import StreamPlan


class NarrowSource(ListSource):
    """A corpus with few enough tokens for 16 bits."""

    dtype = np.dtype(np.uint16)

    def tokens_of(self, start: int, length: int) -> NDArray[Any]:
        return super().tokens_of(start, length).astype(np.uint16)


WEIGHTS = st.sampled_from([0.0, 1e-30, 0.1, 0.25, 1.0, 3.0])
TARGETS = [[0.0], [1.0], [0.3], [0.0, 1.0], [0.0, 0.5, 0.1]]
"""Weights of the tokens of a document with loss spans: none, all, one weight, some, several."""


@st.composite
def target_weights(draw: st.DrawFn, lengths: list[int]) -> list[list[float]]:
    """Weights of the tokens of documents of these lengths, as `SpannedSource` takes them."""
    of = [draw(st.sampled_from(TARGETS)) for _ in range(7)]
    return [
        [0.0, *(of[number % 7][place * place % 7 % len(of[number % 7])] for place in range(1, length))]
        for number, length in enumerate(lengths)
    ]


@st.composite
def sources(draw: st.DrawFn, kind: str, **options: Any) -> ListSource:
    """Corpora in memory; each token but the delimiters is another."""
    lengths = draw(st.lists(st.integers(1, 40), min_size=1, max_size=25)) * draw(st.sampled_from([1, 1, 1, 6]))
    if kind == "with loss spans":
        return SpannedSource(draw(target_weights(lengths)), **options)
    options["inner_delimiters"] = draw(st.booleans())
    return (NarrowSource if kind == "narrow" else ListSource)(lengths, **options)


Drawn = tuple[dict[str, ListSource], dict[str, Any]]
"""Corpora by their names, and the other arguments of a plan."""


@st.composite
def arguments(draw: st.DrawFn, *, is_finite: bool | None = None) -> Drawn:
    """Plans over corpora in memory: each option that says what is read, in every combination that is allowed.

    Args:
        is_finite: whether a plan is a pass over one corpus; None: it may be.
    """
    is_finite = draw(st.sampled_from([False, False, True])) if is_finite is None else is_finite
    is_whole, kind = draw(st.booleans()), draw(st.sampled_from(["plain", "narrow", "with loss spans"]))
    blocks = st.just(1024) if is_whole else st.integers(1, 8) | st.integers(1, 64)  # small ones are dealt to streams
    block = draw(blocks)
    names = ["a"] if is_finite else draw(st.sampled_from([["a"], ["a", "b"], ["c", "b", "a"]]))
    corpora = {name: draw(sources(kind, first_token=1 + 6001 * number, name=name)) for number, name in enumerate(names)}
    per_corpus = st.fixed_dictionaries(dict.fromkeys(names, WEIGHTS)).filter(lambda each: any(each.values()))
    most, is_told = draw(st.sampled_from([None, None, 0.4, 1.0, 2.5])), draw(st.booleans())
    return corpora, {
        "seq_len": draw(st.sampled_from([1, 2, 4, 8])) if is_whole else draw(st.integers(1, 30)),
        "block_tokens": block,
        "window_blocks": draw(st.integers(1, 4)),
        "seed": draw(st.integers(0, 2**64 - 1)),
        "weights": draw(st.none() | per_corpus),
        "schedule": [(start, draw(per_corpus)) for start in sorted(draw(st.sets(st.integers(1, 30), max_size=3)))],
        "epochs": draw(st.integers(1, 3)) if is_finite else None,
        "take": {
            name: draw(st.sampled_from([1.0, 0.5, 0.9])) for name in names if len(corpora[name].tokens) >= 2 * block
        },
        "start_epoch": {name: draw(st.sampled_from([0, 0, 7, 2**32 - 1])) for name in names},
        "pack": {name: draw(st.sampled_from(["whole", "cut"])) for name in names} if is_whole else "cut",
        "num_streams": 1 if is_finite or (most and not is_told) else draw(st.sampled_from([1, 1, 2, 3])),
        "max_epochs": most,
        "on_max_epochs": "warn" if is_told else "stop",
        "allow_small_blocks": True,
    }


@st.composite
def packings(draw: st.DrawFn) -> Drawn:
    """Plans over up to five blocks of documents that are bad to pack whole: about a row, a section or a block long."""
    seq_len = draw(st.sampled_from([1, 2, 3, 4, 8]))
    block = BLOCK_SECTIONS * seq_len * draw(st.integers(1, 2))
    around = [1, max(1, seq_len // 2), seq_len // 2 + 1, seq_len, seq_len + 1, 2 * seq_len - 1]
    special = st.sampled_from([*around, block // BLOCK_SECTIONS + 1, block - 1, 3 * block])
    lengths = draw(st.lists(special | st.integers(1, 3 * seq_len), min_size=1, max_size=8)) * draw(st.integers(1, 200))
    lengths = lengths[: max(1, int(np.searchsorted(np.cumsum(lengths), 5 * block, "right")))]
    return packed(
        lengths,
        seq_len=seq_len,
        block_tokens=block,
        window_blocks=draw(st.integers(1, 3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        pack={"a": "whole", "b": draw(st.sampled_from(["cut", "whole"]))},
        num_streams=draw(st.integers(1, 3)),
        take={"a": draw(st.sampled_from([1.0, 0.7]))} if sum(lengths) >= block else {},
    )


def packed(lengths: list[int], **options: Any) -> Drawn:
    """Documents of these lengths, and a few others."""
    return {"a": ListSource(lengths), "b": ListSource([5, 1, 40, 2] * 9, first_token=60_000)}, options


def plans(*, is_finite: bool | None = None, **options: Any) -> st.SearchStrategy[StreamPlan]:
    """Any plan, with some options of all of them."""
    return arguments(is_finite=is_finite).map(lambda drawn: StreamPlan(drawn[0], **drawn[1] | options))
