"""Transforms of samples at read time: any function of a sample and random numbers.

A transform sees tokens and the lengths of pieces, before labels are derived from them. Its random numbers follow from
the plan's seed and the global number of the sample. So they are the same on every rank, world size and worker, and
after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.order.permutation import derive_key, keyed_hashes
from tokshard.runtime.rows.narrow import IGNORED, LabelSpans, NarrowBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample before its labels are made.

    Args:
        tokens: uint16 or uint32 [n], n = seq_len, except in the last sample of a finite pass.
        piece_lengths: int64 [pieces], parts of documents one after another; they add up to n.
        next_tokens: int64 [pieces], the label of the last token of each piece, -100 for none. It is the next token of
            the document where a piece is cut, be it a target or not.
        loss_weights: float32 [n], the weight of each token's label: 1 for targets without a weight, 0 where the next
            token is no target or there is none. Where a transform returns 0, the label becomes -100. None if no corpus
            of the plan has loss spans.
    """

    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int64]
    next_tokens: NDArray[np.int64]
    loss_weights: NDArray[np.float32] | None = None


class Transform(Protocol):
    """A function of a sample and random numbers, or an object with settings that can be called like one.

    It must be pure, and keep the number of tokens and their dtype. With worker processes it must pickle.
    """

    def __call__(self, sample: Sample, random: SampleRandom, /) -> Sample: ...


class SampleRandom:
    """The stream of random numbers of one global sample: the same everywhere, and after every resume.

    Releases of numpy may change the output of its generators, and samples must not change: so the numbers are made
    here, by the formulas of ROWS.md. All transforms of a sample draw from one sequence.

    Args:
        seed: seed of the plan.
        sample: global number of the sample.
    """

    def __init__(self, seed: int, sample: int) -> None:
        self._key = derive_key(seed, "transform", window=sample, words=3)[np.newaxis]
        self._drawn = 0

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next 64-bit words: uint64 [count]. They can seed any other generator."""
        index = np.arange(self._drawn, self._drawn + count, dtype=np.uint64)
        self._drawn += count
        words: NDArray[np.uint64] = keyed_hashes(index, self._key)[0]
        return words

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Numbers in ``[0, 1)``, multiples of 2**-53: float64 [count]."""
        return (self.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def integers(self, below: int, count: int) -> NDArray[np.int64]:
        """Integers in ``[0, below)``: int64 [count]. The chance of each has a relative error < ``below / 2**32``.

        Raises:
            ValueError: `below` is not from 1 to 2**32.
        """
        if not 1 <= below <= 1 << 32:
            raise ValueError(f"below must be from 1 to 2**32, got {below}")
        high = self.words(count) >> np.uint64(32)
        return ((high * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


def transformed(narrow: NarrowBatch, transforms: Sequence[Transform], seed: int) -> NarrowBatch:
    """Rows after all transforms, applied in order.

    Raises:
        PlanError: a transform returned a sample of another size or dtype, or moved masked tokens.
    """
    seq_len, tokens = narrow.tokens.shape[1], narrow.tokens.copy()
    firsts = np.searchsorted(np.cumsum(narrow.piece_lengths), np.arange(len(tokens) + 1) * seq_len, "right").tolist()
    lengths: list[NDArray[Any]] = []
    labels: list[NDArray[np.int64]] = []
    masks: list[NDArray[np.bool_]] = []
    weights = None if narrow.loss is None else narrow.loss.of_labels(tokens.size).reshape(tokens.shape)
    for row, (first, last) in enumerate(pairwise(firsts)):
        size, number = int(narrow.num_tokens[row]), int(narrow.sample_index[row])
        stop = last - (size < seq_len)  # the padding is a piece of its own, which no transform sees
        before = narrow.piece_lengths[first:stop].astype(np.int64)
        sample = Sample(
            tokens=tokens[row, :size].copy(),
            piece_lengths=before.copy(),
            next_tokens=narrow.next_tokens[first:stop].copy(),
            loss_weights=None if weights is None else weights[row, :size].copy(),
        )
        if size:
            random = SampleRandom(seed, number)
            for transform in transforms:
                sample = _checked(transform(sample, random), sample, transform)
        tokens[row, :size] = sample.tokens
        if weights is not None:
            weights[row, :size] = sample.loss_weights
        lengths += sample.piece_lengths, narrow.piece_lengths[stop:last]
        labels += sample.next_tokens, narrow.next_tokens[stop:last]
        if narrow.is_masked is not None:
            masks.append(np.zeros(len(sample.piece_lengths) + last - stop, np.bool_))
            if (flags := narrow.is_masked[first:stop]).any():
                if not np.array_equal(sample.piece_lengths, before):
                    raise PlanError(
                        f"a transform changed the pieces of sample {number}, which has a masked document: where its "
                        "tokens are now is not known",
                        hint="mask documents with transforms that keep the lengths of pieces",
                    )
                masks[-1][: len(flags)] = flags
    return replace(
        narrow,
        tokens=tokens,
        piece_lengths=np.concatenate(lengths).astype(np.int32),
        next_tokens=np.concatenate(labels, dtype=np.int64, casting="unsafe"),  # a transform may give other integers
        is_masked=np.concatenate(masks) if masks else None,
        loss=None if weights is None else LabelSpans.of_weights(weights.reshape(-1)),
    )


def _checked(found: Any, before: Sample, transform: Transform) -> Sample:
    """Check the sample that a transform returned.

    Raises:
        PlanError: it is not a valid sample.
    """
    tokens, weights = before.tokens, before.loss_weights
    if not isinstance(found, Sample):
        wrong, hint = f"{type(found).__name__}, expected a Sample", "return a Sample from transforms"
    elif _form(found.tokens) != _form(tokens):
        wrong = f"tokens {_form(found.tokens)}, expected {_form(tokens)}"
        hint = "a transform keeps the number of tokens and their dtype"
    elif not (_are_integers(lengths := found.piece_lengths) and _are_integers(labels := found.next_tokens)):
        wrong = f"piece_lengths {_form(lengths)} and next_tokens {_form(found.next_tokens)}, expected int64 [pieces]"
        hint = "give both as one-dimensional arrays of integers"
    elif len(lengths) != len(labels) or lengths.sum() != len(tokens) or lengths.min() < 1:
        wrong = (
            f"{len(lengths)} pieces of {lengths.sum()} tokens with {len(labels)} next tokens, "
            f"expected {len(tokens)} tokens and one next token per piece"
        )
        hint = "piece_lengths are at least 1 and add up to the tokens"
    elif _form(found.loss_weights) != _form(weights) or (
        found.loss_weights is not None and not (np.isfinite(found.loss_weights) & (found.loss_weights >= 0)).all()
    ):
        wrong = f"loss_weights {_form(found.loss_weights)}, expected {_form(weights)} of finite numbers from 0 on"
        hint = "keep the loss_weights of a sample, and move them with its tokens"
    elif np.any((labels < 0) & (labels != IGNORED)):
        wrong = f"next_tokens from {labels.min()} on, expected token ids or {IGNORED}"
        hint = f"{IGNORED} is for a token that has no label"
    else:
        return found
    raise PlanError(f"{transform!r} returned {wrong}", hint=hint)


def _are_integers(found: Any) -> bool:
    return isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "iu"


def _form(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
