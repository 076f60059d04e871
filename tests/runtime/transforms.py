"""Transforms of samples. They import no torch, so that a worker process that gets one starts in a moment."""

from __future__ import annotations

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


def note(sample: Sample, random: SampleRandom) -> Sample:
    """Put a number that is drawn in the place of the first token."""
    tokens = sample.tokens.copy()
    tokens[0] = int(random.uniform(1)[0] * (1 << 32))
    return replace(sample, tokens=tokens)


def failing(sample: Sample, random: SampleRandom) -> Sample:
    raise ZeroDivisionError("a transform's own mistake")


def wrong(change: str, sample: Sample, random: SampleRandom) -> Any:
    lengths, following = sample.piece_lengths, sample.next_tokens
    return {
        "nothing": lambda: None,
        "an array": lambda: sample.tokens,
        "fewer tokens": lambda: replace(sample, tokens=sample.tokens[:-1]),
        "tokens of int64": lambda: replace(sample, tokens=sample.tokens.astype(np.int64)),
        "a list": lambda: replace(sample, tokens=sample.tokens.tolist()),
        "pieces longer than the tokens": lambda: replace(
            sample, piece_lengths=np.append(lengths, 1), next_tokens=np.append(following, 1)
        ),
        "an empty piece": lambda: replace(
            sample, piece_lengths=np.append(lengths, 0), next_tokens=np.append(following, -100)
        ),
        "a negative piece": lambda: replace(
            sample, piece_lengths=np.array([7, -1]), next_tokens=np.array([-100, -100])
        ),
        "no pieces": lambda: replace(sample, piece_lengths=lengths[:0], next_tokens=following[:0]),
        "labels": lambda: replace(sample, next_tokens=np.append(following, 1)),
        "pieces as floats": lambda: replace(sample, piece_lengths=lengths.astype(float)),
        "a list of pieces": lambda: replace(sample, piece_lengths=lengths.tolist()),
        "labels as floats": lambda: replace(sample, next_tokens=following.astype(float)),
        "pieces of two dimensions": lambda: replace(
            sample, piece_lengths=lengths[:, None], next_tokens=following[:, None]
        ),
        "a label of -1": lambda: replace(sample, next_tokens=np.full_like(following, -1)),
    }[change]()
