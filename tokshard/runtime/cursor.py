"""Where a job is in its plan: one integer, and the weights that got it there.

The same on every rank, a few hundred bytes, independent of world size, batch size and workers: a checkpoint stores
one copy, and a job of any size goes on from it without replaying anything.
"""

from __future__ import annotations

import hashlib
import json
import struct
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

from tokshard.errors import PlanMismatchError
from tokshard.runtime.arguments import MAX_SAMPLE
from tokshard.runtime.order.mixture import Balance, Mixture, Segment, are_weights
from tokshard.runtime.order.seeds import derive_key

STATE_VERSION = 1
"""Names the form of a saved cursor. Bump when an older tokshard would misread it."""

_MAX_COUNT = MAX_SAMPLE + (MAX_SAMPLE >> 1)
"""A run may have read on from the last sample that can be given."""

_DAMAGED = "load an older checkpoint, or start without the loader's state"

MAX_SEGMENTS = 16
"""A longer schedule of past weights is saved as the balance that it led to: a run that anneals its mix keeps a small
state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIdentity:
    """What must be equal for a corpus of a plan to read the same samples.

    Args:
        fingerprint: of its content.
        ordinal: how often that content is listed before it.
        start_epoch: the epoch that counts as its first.
        take: the part of it that is read.
    """

    fingerprint: str
    ordinal: int
    start_epoch: int
    take: float


@dataclass(frozen=True, kw_only=True)
class PlanIdentity:
    """What must be equal for a cursor to mean the same samples. Neither names, paths nor weights are in it.

    Args:
        fields: order_version, seed, seq_len, block_tokens, window_blocks.
        corpora: in plan order.
    """

    fields: Mapping[str, int]
    corpora: tuple[CorpusIdentity, ...]

    @cached_property
    def fingerprint(self) -> str:
        """A hash of all of it."""
        corpora = [asdict(corpus) for corpus in self.corpora]
        content = json.dumps([dict(self.fields), corpora], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"tokshard plan 1\n" + content.encode()).hexdigest()


@dataclass(frozen=True)
class Schedule:
    """The weights that a plan sets. A state names by a hash those that are still to come.

    Args:
        segments: by the sample that they start at, ascending, the first at 0.
    """

    segments: tuple[Segment, ...]

    def at(self, sample: int) -> Segment:
        """What is in force at a sample."""
        return self.segments[self._num_started(sample) - 1]

    def after(self, sample: int) -> tuple[Segment, ...]:
        """What starts after a sample."""
        return self.segments[self._num_started(sample) :]

    def fingerprint_after(self, sample: int) -> str:
        """A hash of what starts after a sample; empty if nothing does."""
        return self._fingerprints[self._num_started(sample)]

    @cached_property
    def _fingerprints(self) -> list[str]:
        """Of the segments from each one on, and of none."""
        found = [b""]
        for segment in reversed(self.segments):
            content = struct.pack(f"<q{len(segment.weights)}d", segment.start, *segment.weights)
            found.append(hashlib.sha256(b"tokshard schedule 1\n" + found[-1] + content).digest())
        return [digest.hex() for digest in reversed(found)]

    def _num_started(self, sample: int) -> int:
        return bisect_right(self.segments, sample, key=lambda segment: segment.start)


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusChange:
    """A corpus that a run took up or put aside.

    Args:
        sample: the first sample without or with it.
        action: ``"added"`` or ``"removed"``.
        name: in the plan.
        identity: which corpus it is.
        count: samples of it that were read before.
    """

    sample: int
    action: str
    name: str
    identity: CorpusIdentity
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A position in a plan.

    Args:
        sample: global samples that the training loop received or skipped: the next one to read.
        segments: weights by the sample they start at, ascending.
        balance: of the corpora at the first segment's start.
        skipped: ranges of samples that were passed over, ascending.
        changes: corpora that were added and removed on the way.
    """

    sample: int
    segments: tuple[Segment, ...]
    balance: Balance
    skipped: tuple[tuple[int, int], ...] = ()
    changes: tuple[CorpusChange, ...] = ()

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

    def rescheduled(self, schedule: Schedule) -> Cursor:
        """With a plan's weights from the next sample on: those in force here, and its later changes."""
        now = self.weighted(schedule.at(self.sample).weights)
        return replace(now, segments=(*now.segments, *schedule.after(self.sample)))

    def mixture(self, seed: int) -> Mixture:
        """The corpora of the samples from the first segment on."""
        key = derive_key(seed, "mixture", words=len(self.balance.remainders))
        return Mixture(key=key, segments=self.segments, balance=self.balance)

    def compacted(self, mixture: Mixture) -> Cursor:
        """The same future. More than `MAX_SEGMENTS` started segments become a balance, all but the last."""
        num_past = self.num_started
        if num_past <= MAX_SEGMENTS:
            return self
        kept = self.segments[num_past - 1 :]
        return replace(self, segments=kept, balance=mixture.balance_before(kept[0].start))

    @property
    def num_started(self) -> int:
        """Segments that start at the next sample or before."""
        return bisect_right(self.segments, self.sample, key=lambda segment: segment.start)


def save_cursor(cursor: Cursor, identity: PlanIdentity, names: tuple[str, ...], schedule: Schedule) -> str:
    """A cursor as JSON: one line, readable, the same on every rank.

    Changes of weights that the plan has in store are not in it, only a hash of them; its size does not depend on them.
    """
    started, later = cursor.segments[: cursor.num_started], cursor.segments[cursor.num_started :]
    follows = later == schedule.after(cursor.sample)
    return json.dumps(
        {
            "tokshard_cursor": STATE_VERSION,
            "plan": identity.fingerprint,
            **identity.fields,
            "corpora": [{"name": name, **asdict(corpus)} for name, corpus in zip(names, identity.corpora, strict=True)],
            "sample": cursor.sample,
            "weights": [[part.start, list(part.weights)] for part in (started if follows else cursor.segments)],
            "schedule": schedule.fingerprint_after(cursor.sample) if follows else None,
            "counts": list(cursor.balance.counts),
            "remainders": list(cursor.balance.remainders),
            "skipped": [list(part) for part in cursor.skipped],
            "changes": [asdict(change) for change in cursor.changes],
        },
        separators=(",", ":"),
    )


def load_cursor(
    text: Any, identity: PlanIdentity, schedule: Schedule, *, weights: Literal["cursor", "plan"] = "cursor"
) -> Cursor:
    """A cursor from JSON.

    Args:
        schedule: of the plan. A run that followed the schedule of its plan needs the same changes still to come.
        weights: ``"plan"``: continue with this schedule instead, whatever was in force and planned.

    Raises:
        PlanMismatchError: it is no cursor of tokshard, or of another plan; says which values differ.
    """
    saved = _saved(text)
    _check_fields(saved, identity)
    _check_corpora(saved, identity)
    return _continued(saved, schedule, weights)


def adopt_cursor(
    text: Any,
    identity: PlanIdentity,
    names: tuple[str, ...],
    schedule: Schedule,
    *,
    weights: Literal["cursor", "plan"] = "cursor",
) -> Cursor:
    """A cursor of a run with other corpora, for a plan that adds some, removes some, or lists them in another order.

    A corpus of both goes on where it was, by its content; one that was removed before goes on where it was then. The
    weights are those of the plan. If the corpora are the same, this is `load_cursor`.

    Args:
        names: of the plan.
        schedule: of the plan.

    Raises:
        PlanMismatchError: it is no cursor of tokshard, or more than the corpora differ.
    """
    saved = _saved(text)
    _check_fields(saved, identity)
    if saved.corpora == identity.corpora:
        return _continued(saved, schedule, weights)
    cursor = saved.cursor
    seed = identity.fields["seed"]
    counts = cursor.mixture(seed).counts_before(cursor.sample)
    read = dict(zip(saved.corpora, counts, strict=True))
    put_aside = {change.identity: change.count for change in cursor.changes if change.action == "removed"}
    removed = [
        CorpusChange(sample=cursor.sample, action="removed", name=name, identity=corpus, count=read[corpus])
        for name, corpus in zip(saved.names, saved.corpora, strict=True)
        if corpus not in identity.corpora
    ]
    added = [
        CorpusChange(sample=cursor.sample, action="added", name=name, identity=corpus, count=put_aside.get(corpus, 0))
        for name, corpus in zip(names, identity.corpora, strict=True)
        if corpus not in read
    ]
    go_on = put_aside | read
    return replace(
        cursor,
        segments=(
            Segment(start=cursor.sample, weights=schedule.at(cursor.sample).weights),
            *schedule.after(cursor.sample),
        ),
        balance=replace(
            Balance.at_start(len(identity.corpora)), counts=tuple(go_on.get(corpus, 0) for corpus in identity.corpora)
        ),
        changes=(*cursor.changes, *removed, *added),
    )


def _continued(saved: _Saved, schedule: Schedule, weights: Literal["cursor", "plan"]) -> Cursor:
    cursor = saved.cursor
    if weights == "plan":
        return cursor.rescheduled(schedule)
    if saved.schedule is None:
        return cursor
    if saved.schedule != schedule.fingerprint_after(cursor.sample):
        later = [segment.start for segment in schedule.after(cursor.sample)]
        raise PlanMismatchError(
            f"the run was to change its weights after sample {cursor.sample} in another way than this plan, which "
            f"changes them {f'{len(later)} times, next at sample {later[0]}' if later else 'no more'}",
            hint="give the schedule of that run, or load_state_dict(state, weights='plan') to continue with this one",
        )
    return replace(cursor, segments=(*cursor.segments, *schedule.after(cursor.sample)))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Saved:
    fields: Mapping[str, Any]
    names: tuple[str, ...]
    corpora: tuple[CorpusIdentity, ...]
    cursor: Cursor
    schedule: str | None


def _saved(text: Any) -> _Saved:
    saved = _parse(text)
    version = saved.get("tokshard_cursor")
    if version != STATE_VERSION:
        raise PlanMismatchError(
            f"the saved cursor has version {version!r}, this tokshard reads {STATE_VERSION}",
            hint="load it with the tokshard that saved it, or start a new run without the loader's state",
        )
    try:
        corpora = tuple(_corpus_identity(entry) for entry in saved["corpora"])
        cursor = Cursor(
            sample=_count(saved["sample"]),
            segments=tuple(
                Segment(start=_count(start), weights=tuple(float(weight) for weight in weights))
                for start, weights in saved["weights"]
            ),
            balance=Balance(
                counts=tuple(_count(count) for count in saved["counts"]),
                remainders=tuple(_remainder(value) for value in saved["remainders"]),
            ),
            skipped=_skipped(saved["skipped"], saved["sample"]),
            changes=tuple(_change(entry) for entry in saved["changes"]),
        )
        sizes = {
            len(corpora),
            len(cursor.balance.counts),
            len(cursor.balance.remainders) + 1,
            *(len(part.weights) for part in cursor.segments),
        }
        starts = [segment.start for segment in cursor.segments]
        if len(sizes) != 1 or not starts or starts != sorted(set(starts)) or starts[0] > cursor.sample:
            raise ValueError(f"weights {saved['weights']} and counts {saved['counts']} do not fit the sample")
        if not all(are_weights(segment.weights) for segment in cursor.segments):
            raise ValueError(f"weights {saved['weights']} say nothing")
        schedule = saved["schedule"]
        if schedule is not None and (not isinstance(schedule, str) or starts[-1] > cursor.sample):
            raise ValueError(f"weights {saved['weights']} and schedule {schedule!r} do not fit the sample")
        return _Saved(
            fields=saved,
            names=tuple(str(entry["name"]) for entry in saved["corpora"]),
            corpora=corpora,
            cursor=cursor,
            schedule=schedule,
        )
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise PlanMismatchError(
            f"the saved cursor is damaged: {error!r}",
            hint=_DAMAGED,
        ) from error


def _corpus_identity(entry: Mapping[str, Any]) -> CorpusIdentity:
    return CorpusIdentity(
        fingerprint=str(entry["fingerprint"]),
        ordinal=_count(entry["ordinal"]),
        start_epoch=_count(entry["start_epoch"]),
        take=float(entry["take"]),
    )


def _change(entry: Mapping[str, Any]) -> CorpusChange:
    return CorpusChange(
        sample=_count(entry["sample"]),
        action=str(entry["action"]),
        name=str(entry["name"]),
        identity=_corpus_identity(entry["identity"]),
        count=_count(entry["count"]),
    )


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


def _check_fields(saved: _Saved, identity: PlanIdentity) -> None:
    differences = [
        f"{name} differs ({saved.fields.get(name)!r}, now {value!r})"
        for name, value in identity.fields.items()
        if saved.fields.get(name) != value
    ]
    if differences:
        raise _mismatch(differences, "give the values of the run that is to go on")
    # what the hash covers, of the saved corpora: other corpora are looked at next
    if PlanIdentity(fields=identity.fields, corpora=saved.corpora).fingerprint != saved.fields.get("plan"):
        raise PlanMismatchError(
            f"the saved cursor is damaged: its plan hash {saved.fields.get('plan')!r:.100} is not that of its corpora "
            "and values",
            hint=_DAMAGED,
        )


def _check_corpora(saved: _Saved, identity: PlanIdentity) -> None:
    before, now = saved.corpora, identity.corpora
    if before == now:
        return
    if len(before) != len(now):
        differences = [f"the plan had {len(before)} corpora, now {len(now)}"]
    else:
        differences = [
            f"{_words(field)} of corpus {name!r} differs ({str(value)[:12]}, now {str(getattr(new, field))[:12]})"
            for name, old, new in zip(saved.names, before, now, strict=True)
            for field, value in asdict(old).items()
            if value != getattr(new, field)
        ]
    raise _mismatch(
        differences,
        "give the corpora of the run that is to go on, or load_state_dict(state, corpora='plan') to go on with these",
    )


def _words(field: str) -> str:
    return "the content" if field == "fingerprint" else field


def _mismatch(differences: Sequence[str], hint: str) -> PlanMismatchError:
    return PlanMismatchError(
        f"the saved cursor belongs to another plan: {'; '.join(differences)}",
        hint=f"{hint}, or start a new run without the loader's state",
    )


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_COUNT:
        raise ValueError(f"{value!r:.100} is not a count")
    return value


def _skipped(saved: Any, sample: int) -> tuple[tuple[int, int], ...]:
    found = tuple((_count(start), _count(stop)) for start, stop in saved)
    bounds = [bound for part in found for bound in part]
    if bounds != sorted(bounds) or any(start == stop for start, stop in found) or (bounds and bounds[-1] > sample):
        raise ValueError(f"skipped {saved!r:.100} does not fit the sample")
    return found


def _remainder(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or abs(value) >> 66:
        raise ValueError(f"{value!r} is not a remainder")
    return value
