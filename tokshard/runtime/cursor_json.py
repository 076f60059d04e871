"""Cursors as lines of JSON: saving, loading, and every reason to refuse one."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import numpy as np

from tokshard.errors import PlanMismatchError
from tokshard.runtime.cursor import MAX_SAMPLE, CorpusChange, Cursor, Schedule
from tokshard.runtime.identity import CorpusIdentity, PlanIdentity
from tokshard.runtime.order.mixture import Balance, Segment, are_weights
from tokshard.runtime.rows.masks import load_masks

STATE_VERSION = 1
"""Names the form of a saved cursor. Bump when an older tokshard would misread it."""

_MAX_COUNT = MAX_SAMPLE + (MAX_SAMPLE >> 1)
"""A run may have read on from the last sample that can be given."""

_MAX_PAIRS = 32
_MAX_SKIP_BYTES = 1 << 28

_DAMAGED = "load an older checkpoint, or start without the loader's state"


def save_cursor(cursor: Cursor, identity: PlanIdentity, names: tuple[str, ...], schedule: Schedule) -> str:
    """A cursor as one line of JSON, the same on every rank; STATE.md says what it holds.

    It holds a hash of planned changes of weights, so its size does not depend on them.
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
            "counts": [] if cursor.balance is None else cursor.balance.counts.T.tolist(),
            "remainders": [] if cursor.balance is None else cursor.balance.remainders.T.tolist(),
            "skipped": _saved_skips(cursor.skipped),
            "changes": [asdict(change) for change in cursor.changes],
            **({"masks": [mask.saved() for mask in cursor.masks]} if cursor.masks else {}),
        },
        separators=(",", ":"),
    )


def load_cursor(
    text: Any, identity: PlanIdentity, schedule: Schedule, *, weights: Literal["cursor", "plan"] = "cursor"
) -> Cursor:
    """A cursor from JSON.

    Args:
        text: the line, or what `parsed` found in it.
        schedule: of the plan. If the run followed the schedule of its plan, the changes still to come must be the same.
        weights: ``"plan"``: continue with this schedule instead, whatever weights were in force and planned.

    Raises:
        PlanMismatchError: it is not a cursor of tokshard, or belongs to another plan; names the values that differ.
    """
    saved = parsed(text)
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

    A corpus of both plans, known by its content, continues where it was; so does one that was removed earlier. The
    weights are those of the plan. If the corpora are the same, this is `load_cursor`.

    Args:
        names: of the plan.
        schedule: of the plan.

    Raises:
        PlanMismatchError: it is not a cursor of tokshard, or more than the corpora differ.
    """
    saved = parsed(text)
    _check_fields(saved, identity)
    if saved.corpora == identity.corpora:
        return _continued(saved, schedule, weights)
    cursor = _masked(saved)
    mixture = cursor.mixture(identity.fields["seed"], identity.num_streams)
    counts = mixture.balance_before(cursor.sample).counts.tolist()
    read = dict(zip(saved.corpora, map(tuple, counts), strict=True))
    unread = (0,) * identity.num_streams
    put_aside = {change.identity: change.counts for change in cursor.changes if change.action == "removed"}
    removed = [
        CorpusChange(sample=cursor.sample, action="removed", name=name, identity=corpus, counts=read[corpus])
        for name, corpus in zip(saved.names, saved.corpora, strict=True)
        if corpus not in identity.corpora
    ]
    added = [
        CorpusChange(
            sample=cursor.sample, action="added", name=name, identity=corpus, counts=put_aside.get(corpus, unread)
        )
        for name, corpus in zip(names, identity.corpora, strict=True)
        if corpus not in read
    ]
    go_on = put_aside | read
    segments = (
        Segment(start=cursor.sample, weights=schedule.at(cursor.sample).weights),
        *schedule.after(cursor.sample),
    )
    return replace(
        cursor,
        segments=segments,
        balance=replace(
            Balance.at_start(identity.fields["seed"], identity.num_streams, len(identity.corpora)),
            counts=np.array([go_on.get(corpus, unread) for corpus in identity.corpora], np.int64),
        ),
        changes=(*cursor.changes, *removed, *added),
    )


def _masked(saved: SavedCursor) -> Cursor:
    """The saved cursor with its masks, whose files are read only after the plans were compared."""
    try:
        return replace(saved.cursor, masks=load_masks(saved.fields.get("masks", ()), saved.cursor.sample))
    except (ArithmeticError, KeyError, TypeError, ValueError) as error:
        raise PlanMismatchError(f"the saved cursor is damaged: {error!r}", hint=_DAMAGED) from error


def _continued(saved: SavedCursor, schedule: Schedule, weights: Literal["cursor", "plan"]) -> Cursor:
    cursor = _masked(saved)
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
class SavedCursor:
    """What a line says, before it is compared with a plan."""

    fields: Mapping[str, Any]
    names: tuple[str, ...]
    corpora: tuple[CorpusIdentity, ...]
    cursor: Cursor
    schedule: str | None


def parsed(text: Any) -> SavedCursor:
    """A line of JSON, decoded once for all that is checked of it; itself, if it was decoded before.

    Raises:
        PlanMismatchError: it is not a cursor of tokshard, or damaged.
    """
    if isinstance(text, SavedCursor):
        return text
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
            balance=_balance(saved, len(corpora)),
            skipped=_skipped(saved["skipped"], saved["sample"]),
            changes=tuple(_change(entry, _num_streams(saved)) for entry in saved["changes"]),
        )
        sizes = {
            len(corpora),
            *(len(part.weights) for part in cursor.segments),
        }
        starts = [segment.start for segment in cursor.segments]
        if len(sizes) != 1 or not starts or starts != sorted(set(starts)) or starts[0] > cursor.sample:
            raise ValueError(f"weights {saved['weights']} and counts {saved['counts']} do not fit the sample")
        if not all(are_weights(segment.weights) for segment in cursor.segments):
            raise ValueError(f"weights {saved['weights']} say nothing")
        if cursor.balance is None and starts[0]:
            raise ValueError(f"counts before sample {starts[0]} are missing")
        schedule = saved["schedule"]
        if schedule is not None and (not isinstance(schedule, str) or starts[-1] > cursor.sample):
            raise ValueError(f"weights {saved['weights']} and schedule {schedule!r} do not fit the sample")
        return SavedCursor(
            fields=saved,
            names=tuple(str(entry["name"]) for entry in saved["corpora"]),
            corpora=corpora,
            cursor=cursor,
            schedule=schedule,
        )
    except (ArithmeticError, KeyError, TypeError, ValueError, zlib.error) as error:
        raise PlanMismatchError(
            f"the saved cursor is damaged: {error!r}",
            hint=_DAMAGED,
        ) from error


def _corpus_identity(entry: Mapping[str, Any]) -> CorpusIdentity:
    return CorpusIdentity(
        fingerprint=bytes.fromhex(entry["fingerprint"]).hex(),
        start_epoch=_count(entry["start_epoch"]),
        take=float(entry["take"]),
    )


def _num_streams(saved: Mapping[str, Any]) -> int:
    number = saved["num_streams"]
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"num_streams is {number!r:.100}")
    return number


def _balance(saved: Mapping[str, Any], num_corpora: int) -> Balance | None:
    num_streams, counts, remainders = _num_streams(saved), saved["counts"], saved["remainders"]
    if counts == remainders == []:
        return None
    sizes = [(len(of_stream), len(carried) + 1) for of_stream, carried in zip(counts, remainders, strict=True)]
    if sizes != [(num_corpora, num_corpora)] * num_streams:
        raise ValueError(f"counts and remainders are not of {num_streams} streams and {num_corpora} corpora")
    return Balance(
        counts=np.array([[_count(count) for count in of_stream] for of_stream in counts], np.int64).T,
        remainders=np.array([[_remainder(value) for value in carried] for carried in remainders], np.uint64).T,
    )


def _change(entry: Mapping[str, Any], num_streams: int) -> CorpusChange:
    counts = entry["counts"]
    if len(counts) != num_streams:
        raise ValueError(f"counts {counts!r:.100} are not of {num_streams} streams")
    return CorpusChange(
        sample=_count(entry["sample"]),
        action=str(entry["action"]),
        name=str(entry["name"]),
        identity=_corpus_identity(entry["identity"]),
        counts=tuple(_count(count) for count in counts),
    )


def _parse(text: Any) -> dict[str, Any]:
    try:
        saved = json.loads(text)
    except (TypeError, ValueError, RecursionError):
        saved = None
    if not isinstance(saved, dict) or "tokshard_cursor" not in saved:
        raise PlanMismatchError(
            f"this is not a state of a tokshard loader: {text!r:.100}",
            hint="give what StreamingLoader.state_dict() returned; the state of another loader cannot be continued",
        )
    return saved


def _check_fields(saved: SavedCursor, identity: PlanIdentity) -> None:
    before, now = saved.fields, identity.fields
    differences = [
        f"{name} differs ({before.get(name)!r}, now {value!r})"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if differences:
        raise _mismatch(differences, "give the values of the run to be resumed")
    # the hash of what is saved: other corpora are compared next
    if PlanIdentity(fields=identity.fields, corpora=saved.corpora).fingerprint != saved.fields.get("plan"):
        raise PlanMismatchError(
            f"the saved cursor is damaged: its plan hash {saved.fields.get('plan')!r:.100} is not that of its corpora "
            "and values",
            hint=_DAMAGED,
        )


def _check_corpora(saved: SavedCursor, identity: PlanIdentity) -> None:
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
        "give the corpora of the run to be resumed, or load_state_dict(state, corpora='plan') to continue with these",
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


def _saved_skips(skipped: tuple[tuple[int, int], ...]) -> Any:
    """Ranges as pairs; of many, the differences of all bounds as text, so that states stay small."""
    if len(skipped) <= _MAX_PAIRS:
        return [list(part) for part in skipped]
    steps = np.diff(np.array(skipped, np.int64).ravel(), prepend=0).astype("<i8")
    # gaps before lengths, and low bytes before high ones, which compresses best
    content = steps.reshape(-1, 2).T.copy().view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _skipped(saved: Any, sample: int) -> tuple[tuple[int, int], ...]:
    if isinstance(saved, str):
        decoder = zlib.decompressobj()
        content = decoder.decompress(base64.b64decode(saved, validate=True), _MAX_SKIP_BYTES)
        if not decoder.eof or decoder.unused_data:
            raise ValueError("skipped is cut, or more follows")
        planes = np.frombuffer(content, np.uint8).reshape(8, -1)
        bounds_of = np.cumsum(planes.T.copy().view("<i8").reshape(2, -1).T.ravel()).tolist()
        saved = list(zip(bounds_of[::2], bounds_of[1::2], strict=True))
    found = tuple((_count(start), _count(stop)) for start, stop in saved)
    bounds = [bound for part in found for bound in part]
    if bounds != sorted(bounds) or any(start == stop for start, stop in found) or (bounds and bounds[-1] > sample):
        raise ValueError(f"skipped {saved!r:.100} does not fit the sample")
    return found


def _remainder(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 64:
        raise ValueError(f"{value!r} is not a remainder")
    return value
