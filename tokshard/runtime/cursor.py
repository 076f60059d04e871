"""The position of a job in its plan: one integer, and the weights so far.

A cursor is the same on every rank and does not depend on world size, batch size or workers. A checkpoint stores one
copy, a few hundred bytes. A job of any size continues from it and replays nothing.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Literal

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from tokshard.forking import cached_property, decodable
from tokshard.runtime.order.mixture import Balance, Mixture, Segment
from tokshard.runtime.order.permutation import ORDER_VERSION
from tokshard.runtime.order.windows import CorpusOrder, Pack, Shape
from tokshard.runtime.rows.masks import Mask

MAX_SAMPLE = 1 << 62
"""The largest sample number. It leaves room in 64 bits for batches made ahead."""

Count = Annotated[int, Meta(ge=0, le=MAX_SAMPLE + 1)]
"""A number of samples or an index in a state. A run that has read the largest sample number stands one after it."""

SeqLen = Annotated[int, Meta(ge=1, le=(1 << 32) - 1)]

Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]

MAX_SEGMENTS = 16
"""Started segments that are saved. Earlier ones are saved as their balance, so states stay small."""


@dataclass(frozen=True)
class Schedule:
    """The weights that a plan sets. A state holds a hash of the planned changes.

    Args:
        segments: segments by first sample, ascending; the first starts at 0.
    """

    segments: tuple[Segment, ...]

    def at(self, sample: int) -> Segment:
        """The weights in force at a sample."""
        return self.segments[self._num_started(sample) - 1]

    def after(self, sample: int) -> tuple[Segment, ...]:
        """The weights that start after a sample."""
        return self.segments[self._num_started(sample) :]

    def fingerprint_after(self, sample: int) -> str:
        """A hash of the weights that start after a sample; empty if there are none."""
        return _fingerprint(self.after(sample))

    def fingerprint_from(self, sample: int) -> str:
        """The same hash, of the weights in force at a sample, as if they started there, and of all later ones."""
        now = Segment(start=sample, weights=self.at(sample).weights)
        return _fingerprint((now, *self.after(sample)))

    def _num_started(self, sample: int) -> int:
        return bisect_right(self.segments, sample, key=lambda segment: segment.start)


def _fingerprint(changes: Sequence[Segment]) -> str:
    """A hash of changes of weights; empty if there are none."""
    content = (struct.pack(f"<q{len(one.weights)}d", one.start, *one.weights) for one in changes)
    return hashlib.sha256(b"tokshard schedule 1\n" + b"".join(content)).hexdigest() if changes else ""


@decodable
class CorpusIdentity(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The settings of a corpus in a plan that determine its samples.

    Args:
        fingerprint: fingerprint of its content.
        start_epoch: number of its first epoch.
        take: share of it that is read.
        pack: how its rows are filled.
    """

    fingerprint: Sha256
    start_epoch: Count
    take: float
    pack: Pack = "cut"


@dataclass(frozen=True, kw_only=True)
class PlanIdentity:
    """The settings that determine the samples at a cursor. It has no names, paths or weights.

    Args:
        fields: order_version, seed, seq_len, block_tokens, window_blocks and num_streams.
        corpora: in plan order.
    """

    fields: Mapping[str, int]
    corpora: tuple[CorpusIdentity, ...]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the identity: 64 hexadecimal digits. Numbers are eight bytes each, and so is `take`."""
        content = struct.pack(f"<{len(self.fields)}Q", *self.fields.values())
        for corpus in self.corpora:
            content += struct.pack("<32sQd", bytes.fromhex(corpus.fingerprint), corpus.start_epoch, corpus.take)
            content += b"whole" if corpus.pack == "whole" else b""
        return hashlib.sha256(b"tokshard plan 1\n" + content).hexdigest()


def identity_of(shape: Shape, seed: int, num_streams: int, corpora: Sequence[CorpusOrder]) -> PlanIdentity:
    """The identity of a plan."""
    fields = {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "seq_len": shape.seq_len,
        "block_tokens": shape.block_tokens,
        "window_blocks": shape.window_blocks,
        "num_streams": num_streams,
    }
    identities = (
        CorpusIdentity(fingerprint=one.source.fingerprint, start_epoch=one.start_epoch, take=one.take, pack=one.pack)
        for one in corpora
    )
    return PlanIdentity(fields=fields, corpora=tuple(identities))


class Length(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The length of samples from some sample on.

    Args:
        sample: the first sample of this length.
        bases: for each stream, the samples of each corpus that it had before; empty: the run starts there.
    """

    sample: Count
    seq_len: SeqLen
    bases: tuple[tuple[Count, ...], ...]

    @classmethod
    def at_start(cls, seq_len: int) -> Length:
        """The length of a run's first samples."""
        return cls(sample=0, seq_len=seq_len, bases=())

    @property
    def of_corpora(self) -> NDArray[np.int64]:
        """The bases by corpus: int64 [corpora, streams]."""
        return np.array(self.bases, np.int64).T


class CorpusChange(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A corpus that was added to a run or removed from it.

    Args:
        sample: the first sample that is read with or without it.
        name: name in the plan.
        identity: identity of the corpus.
        counts: samples of it that each stream read before.
    """

    sample: Count
    action: Literal["removed", "added"]
    name: str
    identity: CorpusIdentity
    counts: tuple[Count, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in a plan.

    Args:
        sample: the next global sample: the number of samples that the training loop received or skipped.
        segments: weights by first sample, ascending.
        balance: balance at the first segment's start.
        skipped: ranges of skipped samples, ascending.
        changes: corpora that were added to the run or removed from it.
        masks: documents that were taken out of the loss, by file.
        lengths: lengths of samples by first sample, the first at 0; empty: the length of the plan.
    """

    sample: int
    segments: tuple[Segment, ...]
    balance: Balance
    skipped: tuple[tuple[int, int], ...] = ()
    changes: tuple[CorpusChange, ...] = ()
    masks: tuple[Mask, ...] = ()
    lengths: tuple[Length, ...] = ()

    def advanced(self, num_samples: int) -> Cursor:
        """The cursor after the loop has received so many samples."""
        return replace(self, sample=self.sample + num_samples)

    def skipping(self, num_samples: int) -> Cursor:
        """The cursor after so many samples are skipped, on record."""
        start, stop = self.sample, self.sample + num_samples
        if self.skipped and self.skipped[-1][1] == start:
            return replace(self, sample=stop, skipped=(*self.skipped[:-1], (self.skipped[-1][0], stop)))
        return replace(self, sample=stop, skipped=(*self.skipped, (start, stop)))

    def restarted(self, start: Cursor) -> Cursor:
        """The start of another pass. All masks count from its first sample on."""
        return replace(start, masks=tuple(mask.from_start() for mask in self.masks))

    def weighted(self, weights: tuple[float, ...]) -> Cursor:
        """The cursor with other weights from the next sample on; planned changes after it are dropped."""
        past = tuple(segment for segment in self.segments if segment.start < self.sample)
        return replace(self, segments=(*past, Segment(start=self.sample, weights=weights)))

    def rescheduled(self, schedule: Schedule) -> Cursor:
        """The cursor with a plan's weights from the next sample on: the weights in force there, and later changes."""
        now = self.weighted(schedule.at(self.sample).weights)
        return replace(now, segments=(*now.segments, *schedule.after(self.sample)))

    def mixture(self, seed: int, num_streams: int) -> Mixture:
        """The corpora of the samples from the first segment on."""
        return Mixture(seed=seed, num_streams=num_streams, segments=self.segments, balance=self.balance)

    def compacted(self, mixture: Mixture) -> Cursor:
        """The same future with a shorter past: the last 16 started segments, and the balance before them."""
        num_dropped = self.num_started - MAX_SEGMENTS
        if num_dropped <= 0:
            return self
        kept = self.segments[num_dropped:]
        return replace(self, segments=kept, balance=mixture.balance_before(kept[0].start))

    def tokens_of(self, counts: Sequence[int], seq_len: int) -> list[int]:
        """Tokens of samples of each corpus.

        Args:
            counts: samples of each, from the start of the run to any place.
            seq_len: tokens of a sample, for a run that did not change it.
        """
        sizes = [length.seq_len for length in self.lengths] or [seq_len]
        at_changes = [[sum(of_streams) for of_streams in zip(*one.bases, strict=True)] for one in self.lengths[1:]]
        return [_tokens(count, sizes, of) for count, *of in zip(counts, *at_changes, strict=True)]

    def tokens_before(self, sample: int, seq_len: int) -> int:
        """Tokens of all samples before one; `seq_len` as for `tokens_of`."""
        sizes = [length.seq_len for length in self.lengths] or [seq_len]
        return _tokens(sample, sizes, [length.sample for length in self.lengths[1:]])

    @property
    def num_started(self) -> int:
        """Segments that start at the next sample or before."""
        return bisect_right(self.segments, self.sample, key=lambda segment: segment.start)


def _tokens(num_samples: int, sizes: Sequence[int], changes: Sequence[int]) -> int:
    """Tokens of the first samples, whose size changes after so many samples each."""
    bounds = [0, *(min(change, num_samples) for change in changes), num_samples]
    return sum(size * (stop - start) for size, (start, stop) in zip(sizes, pairwise(bounds), strict=True))
