"""Samples changed as they are read: any function of a sample and random numbers, and fill-in-the-middle.

A transform sees tokens and the bounds of the pieces, before labels are derived from them. Its random numbers follow
from the plan's seed and the global number of the sample, so they are the same on every rank, world size and worker,
and after every resume.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError
from tokshard.runtime.order.permutation import derive_key, keyed_hashes
from tokshard.runtime.rows.batches import IGNORED, PADDING_INDEX, Packed


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One sample before its labels are made.

    Args:
        tokens: uint16 or uint32 [n], n = seq_len, except in the last sample of a finite pass.
        piece_lengths: int64 [pieces], parts of documents one after another; they add up to n.
        next_tokens: int64 [pieces], the label of the last token of each piece, -100 for none. It is the next token of
            the document where a piece is cut.
    """

    tokens: NDArray[Any]
    piece_lengths: NDArray[np.int64]
    next_tokens: NDArray[np.int64]


class Transform(Protocol):
    """A function of a sample and random numbers, or an object with settings that can be called like one.

    It must be pure, and keep the number of tokens and their dtype. With worker processes it must pickle.
    """

    def __call__(self, sample: Sample, random: SampleRandom, /) -> Sample: ...


class SampleRandom:
    """The random numbers of one global sample, one after another: the same everywhere and after every resume.

    Releases of numpy may change what its generators draw, and samples must not change with them: so the numbers are
    made here, by the formulas of STATE.md. All transforms of a sample draw from one sequence.

    Args:
        seed: of the plan.
        sample: its global number.
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
        """Integers in ``[0, below)``: int64 [count]. Each is off its exact chance by less than ``below / 2**32``.

        Raises:
            ValueError: `below` is not from 1 to 2**32.
        """
        if not 1 <= below <= 1 << 32:
            raise ValueError(f"below must be from 1 to 2**32, got {below}")
        high = self.words(count) >> np.uint64(32)
        return ((high * np.uint64(below)) >> np.uint64(32)).astype(np.int64)


def transformed(packed: Packed, transforms: Sequence[Transform], seed: int) -> Packed:
    """Rows with all transforms applied, one after the other.

    Raises:
        PlanError: a transform did not return a sample of the same size and dtype.
    """
    rows, seq_len = len(packed.tokens), packed.tokens.shape[1] - 1
    ends = np.cumsum(packed.piece_lengths, dtype=np.int64)
    tokens = np.zeros_like(packed.tokens)
    lengths: list[NDArray[np.int64]] = []
    labels: list[NDArray[np.int64]] = []
    masks: list[NDArray[np.bool_]] = []
    for row in range(rows):
        first, stop = np.searchsorted(ends, [row * seq_len, (row + 1) * seq_len], "right").tolist()
        size = int(packed.num_tokens_in_row[row])
        pieces, following = packed.piece_lengths[first:stop].astype(np.int64), packed.next_tokens[first:stop]
        before = pieces
        if packed.sample_index[row] != PADDING_INDEX:
            is_short = size < seq_len  # the padding is a piece of its own, which no transform sees
            inner = Sample(
                tokens=packed.tokens[row, :size].copy(),
                piece_lengths=pieces[: len(pieces) - is_short],
                next_tokens=following[: len(pieces) - is_short],
            )
            random = SampleRandom(seed, int(packed.sample_index[row]))
            for transform in transforms:
                inner = _checked(transform(inner, random), inner, transform)
            tokens[row, :size] = inner.tokens
            pieces = np.append(inner.piece_lengths, pieces[len(pieces) - is_short :])
            following = np.append(inner.next_tokens, following[len(following) - is_short :])
        lengths.append(pieces)
        labels.append(following)
        if packed.is_masked is not None:
            masks.append(_masks_after(packed.is_masked[first:stop], before, pieces, int(packed.sample_index[row])))
    return replace(
        packed,
        tokens=tokens,
        piece_lengths=np.concatenate(lengths).astype(np.int32),
        next_tokens=np.concatenate(labels, dtype=np.int64, casting="unsafe"),  # a transform may give other integers
        is_masked=np.concatenate(masks) if masks else None,
    )


def _masks_after(
    before: NDArray[np.bool_], old: NDArray[np.int64], new: NDArray[np.int64], sample: int
) -> NDArray[np.bool_]:
    """What is masked of the pieces of a row that was transformed."""
    if not before.any():
        return np.zeros(len(new), np.bool_)
    if not np.array_equal(old, new):
        raise PlanError(
            f"a transform changed the pieces of sample {sample}, which has a masked document: where its tokens are "
            "now is not known",
            hint="mask documents with transforms that keep every piece in its place, as FillInTheMiddle does",
        )
    return before


def _checked(found: Sample, before: Sample, transform: Transform) -> Sample:
    if not isinstance(found, Sample):
        raise PlanError(
            f"{transform!r} returned {type(found).__name__}, expected a Sample", hint="return a Sample from transforms"
        )
    if _form(found.tokens) != _form(before.tokens):
        raise PlanError(
            f"{transform!r} returned tokens {_form(found.tokens)}, expected {_form(before.tokens)}",
            hint="a transform keeps the number of tokens and their dtype",
        )
    lengths, following = found.piece_lengths, found.next_tokens
    if not (_are_integers(lengths) and _are_integers(following)):
        raise PlanError(
            f"{transform!r} returned piece_lengths {_form(lengths)} and next_tokens {_form(following)}, expected "
            "int64 [pieces]",
            hint="give both as one-dimensional arrays of integers",
        )
    size, total = len(before.tokens), int(lengths.sum())
    if len(lengths) != len(following) or total != size or lengths.min() < 1:
        raise PlanError(
            f"{transform!r} returned {len(lengths)} pieces of {total} tokens with {len(following)} next tokens, "
            f"expected {size} tokens and one next token per piece",
            hint="piece_lengths are at least 1 and add up to the tokens",
        )
    if bool(np.any((following < 0) & (following != IGNORED))):
        raise PlanError(
            f"{transform!r} returned next_tokens from {following.min()} on, expected token ids or {IGNORED}",
            hint=f"{IGNORED} is for a token that has no label",
        )
    return found


def _are_integers(found: Any) -> bool:
    return isinstance(found, np.ndarray) and found.ndim == 1 and found.dtype.kind in "iu"


def _form(found: Any) -> str:
    return f"{found.dtype} {list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
