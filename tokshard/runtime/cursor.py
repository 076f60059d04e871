"""Where a job is in its plan: one integer, and the weights that got it there.

The same on every rank, a few hundred bytes, independent of world size, batch size and workers: a checkpoint stores
one copy, and a job of any size goes on from it without replaying anything.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tokshard.errors import PlanMismatchError
from tokshard.runtime.mixture import Mixture, Segment, thresholds

STATE_VERSION = 1
"""Names the form of a saved cursor. Bump when an older tokshard would misread it."""

MAX_SEGMENTS = 16
"""A longer schedule of past weights is saved as the counts it led to: a run that anneals its mix keeps a small
state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanIdentity:
    """What must be equal for a cursor to mean the same samples. Neither names, paths nor weights are in it.

    Args:
        fields: order_version, seed, seq_len, block_tokens, window_blocks, start_epoch of each corpus.
        corpora: content fingerprint of each corpus, in plan order.
        fingerprint: of all of it.
    """

    fields: Mapping[str, int | list[int]]
    corpora: tuple[str, ...]
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in a plan.

    Args:
        sample: global samples that the training loop received or skipped: the next one to read.
        segments: weights by the sample they start at, ascending.
        counts: samples of each corpus before the first segment.
        skipped: ranges of samples that were passed over, ascending.
    """

    sample: int
    segments: tuple[Segment, ...]
    counts: tuple[int, ...]
    skipped: tuple[tuple[int, int], ...] = ()

    def advanced(self, num_samples: int) -> Cursor:
        """After the loop received so many samples."""
        return replace(self, sample=self.sample + num_samples)

    def skipping(self, num_samples: int) -> Cursor:
        """After passing over so many samples, on record."""
        start, stop = self.sample, self.sample + num_samples
        if self.skipped and self.skipped[-1][1] == start:
            return replace(self, sample=stop, skipped=(*self.skipped[:-1], (self.skipped[-1][0], stop)))
        return replace(self, sample=stop, skipped=(*self.skipped, (start, stop)))

    def weighted(self, weights: tuple[float, ...]) -> Cursor:
        """With other weights from the next sample on; what a schedule had in store for later is dropped."""
        past = tuple(segment for segment in self.segments if segment.start < self.sample)
        return replace(self, segments=(*past, Segment(start=self.sample, weights=weights)))

    def rescheduled(self, planned: tuple[Segment, ...]) -> Cursor:
        """With a plan's weights from the next sample on: those in force here, and its later changes."""
        current = [segment for segment in planned if segment.start <= self.sample][-1]
        later = tuple(segment for segment in planned if segment.start > self.sample)
        now = self.weighted(current.weights)
        return replace(now, segments=(*now.segments, *later))

    def mixture(self, offset: int) -> Mixture:
        """The corpora of the samples from the first segment on."""
        return Mixture(offset=offset, segments=self.segments, counts=self.counts)

    def compacted(self, offset: int) -> Cursor:
        """The same future with at most `MAX_SEGMENTS` segments of past weights; older ones become counts."""
        past = [segment for segment in self.segments if segment.start <= self.sample]
        if len(past) <= MAX_SEGMENTS:
            return self
        current = past[-1]
        kept = self.segments[len(past) - 1 :]
        return replace(self, segments=kept, counts=self.mixture(offset).counts_before(current.start))


def save_cursor(cursor: Cursor, identity: PlanIdentity, names: tuple[str, ...]) -> str:
    """A cursor as JSON: one line, readable, the same on every rank."""
    return json.dumps(
        {
            "tokshard_cursor": STATE_VERSION,
            "plan": identity.fingerprint,
            **identity.fields,
            "corpora": dict(zip(names, identity.corpora, strict=True)),
            "sample": cursor.sample,
            "weights": [[segment.start, list(segment.weights)] for segment in cursor.segments],
            "counts": list(cursor.counts),
            "skipped": [list(part) for part in cursor.skipped],
        },
        separators=(",", ":"),
    )


def load_cursor(text: Any, identity: PlanIdentity) -> Cursor:
    """A cursor from JSON.

    Raises:
        PlanMismatchError: it is no cursor of tokshard, or of another plan; says which values differ.
    """
    saved = _parse(text)
    version = saved.get("tokshard_cursor")
    if version != STATE_VERSION:
        raise PlanMismatchError(
            f"the saved cursor has version {version!r}, this tokshard reads {STATE_VERSION}",
            hint="load it with the tokshard that saved it, or start a new run without the loader's state",
        )
    _check_identity(saved, identity)
    try:
        cursor = Cursor(
            sample=_count(saved["sample"]),
            segments=tuple(
                Segment(start=_count(start), weights=tuple(float(weight) for weight in weights))
                for start, weights in saved["weights"]
            ),
            counts=tuple(_count(count) for count in saved["counts"]),
            skipped=tuple((_count(start), _count(stop)) for start, stop in saved["skipped"]),
        )
        sizes = {len(identity.corpora), len(cursor.counts), *(len(part.weights) for part in cursor.segments)}
        starts = [segment.start for segment in cursor.segments]
        if len(sizes) != 1 or not starts or starts != sorted(set(starts)) or starts[0] > cursor.sample:
            raise ValueError(f"weights {saved['weights']} and counts {saved['counts']} do not fit the sample")
        for segment in cursor.segments:
            thresholds(segment.weights)
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise PlanMismatchError(
            f"the saved cursor is damaged: {error!r}",
            hint="load an older checkpoint, or start without the loader's state",
        ) from error
    return cursor


def _parse(text: Any) -> dict[str, Any]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or "tokshard_cursor" not in saved:
        raise PlanMismatchError(
            f"this is no state of a tokshard loader: {text!r:.100}",
            hint="give what StreamingLoader.state_dict() returned; the state of another loader cannot be continued",
        )
    return saved


def _check_identity(saved: Mapping[str, Any], identity: PlanIdentity) -> None:
    if saved.get("plan") == identity.fingerprint:
        return
    differences = [
        f"{name} differs ({saved.get(name)!r}, now {value!r})"
        for name, value in identity.fields.items()
        if saved.get(name) != value
    ]
    corpora = saved.get("corpora")
    before = list(corpora.items()) if isinstance(corpora, dict) else []
    if len(before) != len(identity.corpora):
        differences.append(f"the plan had {len(before)} corpora, now {len(identity.corpora)}")
    else:
        differences += [
            f"the content of corpus {name!r} differs ({old[:12]}..., now {new[:12]}...)"
            for (name, old), new in zip(before, identity.corpora, strict=True)
            if old != new
        ]
    raise PlanMismatchError(
        f"the saved cursor belongs to another plan: {'; '.join(differences) or 'fingerprints differ'}",
        hint="give the values of the run that is to go on, or start a new run without the loader's state",
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a count")
    return value
