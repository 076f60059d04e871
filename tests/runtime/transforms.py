"""Transforms of samples. They import no torch, so that a worker process that gets one starts in a moment."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tokshard.runtime.rows.transforms import Sample, SampleRandom


def reverse(sample: Sample, random: SampleRandom) -> Sample:
    """All tokens backwards, as one piece without a label at its end."""
    size = len(sample.tokens)
    return Sample(tokens=sample.tokens[::-1].copy(), piece_lengths=np.array([size]), next_tokens=np.array([-100]))


def roll(sample: Sample, random: SampleRandom) -> Sample:
    return replace(sample, tokens=np.roll(sample.tokens, int(random.integers(100, 1)[0])))


def stir(sample: Sample, random: SampleRandom) -> Sample:
    """Tokens move around, and the first piece has no label at its end."""
    if not len(sample.tokens):
        return sample
    following = np.append(-100, sample.next_tokens[1:])
    return replace(roll(sample, random), next_tokens=following)


def note(sample: Sample, random: SampleRandom) -> Sample:
    """Put a number that is drawn in the place of the first token."""
    tokens = sample.tokens.copy()
    tokens[0] = int(random.uniform(1)[0] * (1 << 32))
    return replace(sample, tokens=tokens)


def failing(sample: Sample, random: SampleRandom) -> Sample:
    raise ZeroDivisionError("a transform's own mistake")


WRONG: dict[str, Callable[[Sample], Any]] = {
    "nothing": lambda _: None,
    "an array": lambda sample: sample.tokens,
    "fewer tokens": lambda sample: replace(sample, tokens=sample.tokens[:-1]),
    "tokens of int64": lambda sample: replace(sample, tokens=sample.tokens.astype(np.int64)),
    "a list": lambda sample: replace(sample, tokens=sample.tokens.tolist()),
    "pieces longer than the tokens": lambda sample: with_a_piece(sample, 1, 1),
    "an empty piece": lambda sample: with_a_piece(sample, 0, -100),
    "a negative piece": lambda sample: replace(
        sample, piece_lengths=np.array([7, -1]), next_tokens=np.array([-100, -100])
    ),
    "no pieces": lambda sample: replace(
        sample, piece_lengths=sample.piece_lengths[:0], next_tokens=sample.next_tokens[:0]
    ),
    "labels": lambda sample: replace(sample, next_tokens=np.append(sample.next_tokens, 1)),
    "pieces as floats": lambda sample: replace(sample, piece_lengths=sample.piece_lengths.astype(float)),
    "a list of pieces": lambda sample: replace(sample, piece_lengths=sample.piece_lengths.tolist()),
    "labels as floats": lambda sample: replace(sample, next_tokens=sample.next_tokens.astype(float)),
    "pieces of two dimensions": lambda sample: replace(
        sample, piece_lengths=sample.piece_lengths[:, None], next_tokens=sample.next_tokens[:, None]
    ),
    "a label of -1": lambda sample: replace(sample, next_tokens=np.full_like(sample.next_tokens, -1)),
}
"""What a transform must not return."""


def with_a_piece(sample: Sample, length: int, following: int) -> Sample:
    return replace(
        sample,
        piece_lengths=np.append(sample.piece_lengths, length),
        next_tokens=np.append(sample.next_tokens, following),
    )


def wrong(what: str, sample: Sample, random: SampleRandom) -> Any:
    return WRONG[what](sample)
