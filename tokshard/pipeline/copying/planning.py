"""The tasks of a copy: a pure function of the shards of its corpora and of what is asked for, never of workers.

Without a shuffle:

    copy    read consecutive shards, and write those documents that are taken into shards of the copy
    merge   where few are taken: make one shard of the small ones that some tasks wrote

With one, documents are dealt to buckets by a random key:

    deal    read some shards, and write their documents into one file, bucket by bucket
    redeal  where there are more than `FAN_OUT` buckets: the same with what one bucket of the level before holds
    gather  read some buckets of the last level, put each into the order of its keys, and write shards

So a task holds `DEAL_BYTES` or one bucket at a time, however large the corpora are.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray

TASK_TOKENS = 64 << 20
"""A task that writes smaller shards writes as many as fit, because to leave a receipt has a price; and one that deals
reads so many tokens."""

BUCKET_BYTES = 32 << 20
"""About so much of the corpora is in one bucket of the last level, which a task holds three times over."""

DEAL_BYTES = 32 << 20
"""About so much of the documents is dealt at once."""

FAN_OUT = 1_024
"""Buckets that a task deals to at most: parts of 32 kB and more. One level is enough for 32 GiB, two for 32 TiB."""


class Kind(StrEnum):
    """What a task of a copy does."""

    COPY = "copy"
    DEAL = "deal"
    MERGE = "merge"
    REDEAL = "redeal"
    GATHER = "gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One task.

    Args:
        start, stop: shards of all corpora together; of `Kind.MERGE` tasks that copied; of `Kind.REDEAL` buckets of the
            level before, of `Kind.GATHER` of the last level.
        digest: names all that the files of the task follow from.
    """

    kind: Kind
    start: int
    stop: int
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Levels:
    """How the documents of a shuffle are dealt to ``fan_out ** depth`` buckets, level by level."""

    fan_out: int
    depth: int

    def buckets(self, keys: NDArray[np.uint64], level: int) -> NDArray[np.uint64]:
        """The bucket of each key among the ``fan_out ** (level + 1)`` of a level: they ascend with the keys."""
        return ((keys >> np.uint64(32)) * np.uint64(self.fan_out ** (level + 1))) >> np.uint64(32)


def deal_levels(num_bytes: int) -> Levels:
    """As few levels as there can be.

    Args:
        num_bytes: of all shards.
    """
    wanted = max(1, -(-num_bytes // BUCKET_BYTES))
    depth = 1
    while FAN_OUT**depth < wanted:
        depth += 1
    fan_out = 1
    while fan_out**depth < wanted:
        fan_out += 1
    return Levels(fan_out=fan_out, depth=depth)


def random_keys(seed: int, numbers: NDArray[np.int64]) -> NDArray[np.uint64]:
    """The key of each document, by its number; no two are equal. uint64, like `numbers`.

    References:
        Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the mixing function).
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    return _mixed(_mixed(np.array([seed % (1 << 64)], np.uint64)) + (numbers.astype(np.uint64) + np.uint64(1)) * golden)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def task_tokens(shard_tokens: int) -> int:
    """Tokens of a task at most, unless one shard or bucket has more: a whole number of shards of the copy."""
    return shard_tokens * max(1, TASK_TOKENS // shard_tokens)


def groups(num_tokens: Sequence[int], most: int) -> list[tuple[int, int]]:
    """Divide items into groups of at most `most` tokens or of one item: ``(start, stop)`` of each, in order."""
    found, start, filled = [], 0, 0
    for index, tokens in enumerate(num_tokens):
        if filled and filled + tokens > most:
            found.append((start, index))
            start, filled = index, 0
        filled += tokens
    if filled:
        found.append((start, len(num_tokens)))
    return found


def digest(*facts: object) -> str:
    """A name for some facts: 32 hexadecimal digits."""
    return hashlib.blake2b(msgspec.json.encode(facts), digest_size=16).hexdigest()


def shard_works(kind: Kind, hashes: Sequence[str], tokens: Sequence[int], most: int, *facts: object) -> list[Work]:
    """The tasks that read the shards of the corpora.

    Args:
        hashes, tokens: of each shard.
        most: tokens of a task.
        facts: what the files of the tasks follow from besides.
    """
    return [
        Work(kind=kind, start=start, stop=stop, digest=digest(kind, start, hashes[start:stop], *facts))
        for start, stop in groups(tokens, most)
    ]


def later_works(kind: Kind, ranges: Iterable[tuple[int, int]], *facts: object) -> list[Work]:
    """The tasks that read what earlier tasks wrote.

    Args:
        facts: as for `shard_works`; the digests of those tasks are among them.
    """
    common = digest(*facts)
    return [Work(kind=kind, start=start, stop=stop, digest=digest(kind, start, stop, common)) for start, stop in ranges]
