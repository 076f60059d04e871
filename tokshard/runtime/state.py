"""The state of a job: a cursor as a line of JSON, and every reason to refuse one. STATE.md describes it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray

from tokshard.errors import PlanMismatchError
from tokshard.runtime.cursor import CorpusChange, CorpusIdentity, Count, Cursor, PlanIdentity, Sha256
from tokshard.runtime.order.mixture import Balance, Segment, are_weights
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.masks import load_mask
from tokshard.runtime.stop import check_pass

STATE_VERSION = 1
"""Names the form of a state. Bump when an older tokshard would misread it."""

_KEY = "cursor"
_START = re.compile(r'\{"tokshard_cursor":(\d+),')
_CHECK = ',"check":'
_DAMAGED = "load an older checkpoint, or start without the loader's state"

_FIELDS = ("order_version", "seed", "seq_len", "block_tokens", "window_blocks", "num_streams")

_MAX_PAIRS = 32
_MAX_COLUMN_BYTES = 1 << 28

Pairs = tuple[tuple[Count, Count], ...] | str


class _Corpus(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A corpus of the run: its name in the plan, and what it is."""

    name: str
    fingerprint: Sha256
    start_epoch: Count
    take: float


class _Mask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of masked documents; fields as of `Mask`."""

    fingerprint: Sha256
    name: str
    file: str
    calls: Pairs
    sha256: Sha256


class _State(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The line of JSON, key by key."""

    tokshard_cursor: int
    plan: Sha256
    order_version: Count
    seed: Count
    seq_len: Count
    block_tokens: Count
    window_blocks: Count
    num_streams: Annotated[int, Meta(ge=1)]
    corpora: tuple[_Corpus, ...]
    sample: Count
    weights: Annotated[tuple[tuple[Count, tuple[float, ...]], ...], Meta(min_length=1)]
    schedule: str | None
    counts: list[list[Count]]
    remainders: list[list[Annotated[int, Meta(ge=0)]]]
    skipped: Pairs
    changes: tuple[CorpusChange, ...]
    masks: tuple[_Mask, ...] = ()
    check: str

    @property
    def identity(self) -> PlanIdentity:
        """The plan of the run."""
        corpora = (msgspec.convert(one, CorpusIdentity, from_attributes=True) for one in self.corpora)
        return PlanIdentity(fields={name: getattr(self, name) for name in _FIELDS}, corpora=tuple(corpora))


def save_state(plan: StreamPlan, cursor: Cursor) -> dict[str, Any]:
    """A cursor as one line of JSON under one key, the same on every rank.

    It holds a hash of planned changes of weights, so its size does not depend on them.
    """
    cursor = cursor.compacted(plan.mixture(cursor))
    balance, identity = cursor.balance, plan.identity
    started, later = cursor.segments[: cursor.num_started], cursor.segments[cursor.num_started :]
    follows = later == plan.schedule.after(cursor.sample)
    masks = [
        {name: getattr(mask, name) for name in _Mask.__struct_fields__} | {"calls": _saved_pairs(mask.calls, 2)}
        for mask in cursor.masks
    ]
    line = json.dumps(
        {
            "tokshard_cursor": STATE_VERSION,
            "plan": identity.fingerprint,
            **identity.fields,
            "corpora": [
                {"name": name, **msgspec.structs.asdict(corpus)}
                for name, corpus in zip(plan.names, identity.corpora, strict=True)
            ],
            "sample": cursor.sample,
            "weights": [[part.start, part.weights] for part in (started if follows else cursor.segments)],
            "schedule": plan.schedule.fingerprint_after(cursor.sample) if follows else None,
            "counts": [] if balance is None else balance.counts.T.tolist(),
            "remainders": [] if balance is None else balance.remainders.T.tolist(),
            "skipped": _saved_pairs(cursor.skipped, 1),
            "changes": msgspec.to_builtins(cursor.changes),
            **({"masks": masks} if masks else {}),
        },
        separators=(",", ":"),
    )
    return {_KEY: f"{line[:-1]}{_check_of(line[:-1])}"}


def load_state(
    plan: StreamPlan,
    state: Any,
    *,
    weights: Literal["cursor", "plan"] = "cursor",
    corpora: Literal["same", "plan"] = "same",
) -> Cursor:
    """The cursor of a state; arguments as for `BatchLoader.load_state_dict`.

    Raises:
        PlanMismatchError: it is not a state of tokshard, was changed or damaged, or belongs to another plan.
    """
    if weights not in ("cursor", "plan"):
        raise ValueError(f"weights must be 'cursor' or 'plan', got {weights!r}")
    if corpora not in ("same", "plan"):
        raise ValueError(f"corpora must be 'same' or 'plan', got {corpora!r}")
    line = _checked_line(state.get(_KEY) if isinstance(state, Mapping) else state)
    try:
        saved = msgspec.json.decode(line, type=_State)
        cursor, calls = _cursor_of(saved), [_pairs(mask.calls, 2) for mask in saved.masks]
        _check_fit(saved, cursor, calls)
    except (msgspec.MsgspecError, ArithmeticError, RecursionError, ValueError, zlib.error) as error:
        raise PlanMismatchError(f"the state is damaged: {error}", hint=_DAMAGED) from error
    _check_growth(saved, plan)
    _check_plan(saved, plan.identity, any_corpora=corpora == "plan")
    masks = (  # whose files are read only after the plans were compared
        load_mask(mask.file, of_mask, mask.sha256, fingerprint=mask.fingerprint, name=mask.name)
        for mask, of_mask in zip(saved.masks, calls, strict=True)
    )
    cursor = replace(cursor, masks=tuple(masks))
    if saved.identity.corpora != plan.identity.corpora:
        cursor = _adopted(saved, cursor, plan)
    elif weights == "plan":
        cursor = cursor.rescheduled(plan.schedule)
    else:
        cursor = _continued(saved, cursor, plan)
    check_pass(plan, cursor)
    return cursor


def _check_of(content: str) -> str:
    """The end of a line, by which it is known to be as it was saved."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return f'{_CHECK}"{digest[:16]}"}}'


def _checked_line(line: Any) -> str:
    found = _START.match(line) if isinstance(line, str) else None
    if found is None:
        raise PlanMismatchError(
            f"this is not a state of a tokshard loader: {line!r:.100}",
            hint="give what StreamingLoader.state_dict() returned; the state of another loader cannot be continued",
        )
    if found[1] != str(STATE_VERSION):
        raise PlanMismatchError(
            f"the state has version {found[1]:.20}, this tokshard reads {STATE_VERSION}",
            hint="load it with the tokshard that saved it, or start a new run without the loader's state",
        )
    content = str(line).rpartition(_CHECK)[0]
    if line != content + _check_of(content):
        raise PlanMismatchError(
            "the state was changed after it was saved: its checksum is not that of its line",
            hint=f"give the line as state_dict() returned it; to go on without it, {_DAMAGED}",
        )
    return str(line)


def _cursor_of(saved: _State) -> Cursor:
    """The cursor that a line says, without masks and planned weights."""
    balance = None
    if saved.counts or saved.remainders:
        remainders = np.array(saved.remainders, np.uint64).T
        balance = Balance(counts=np.array(saved.counts, np.int64).T, remainders=remainders)
    return Cursor(
        sample=saved.sample,
        segments=tuple(Segment(start=start, weights=weights) for start, weights in saved.weights),
        balance=balance,
        skipped=_pairs(saved.skipped, 1),
        changes=saved.changes,
    )


def _check_fit(saved: _State, cursor: Cursor, calls: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Refuse values that are right one by one, and cannot be together.

    Args:
        calls: of each mask.

    Raises:
        ValueError: names them.
    """
    sample, starts = saved.sample, [segment.start for segment in cursor.segments]
    num_streams, num_corpora = saved.num_streams, len(saved.corpora)
    shapes = (num_corpora, num_streams), (num_corpora - 1, num_streams)
    balance, bounds = cursor.balance, [0, *(bound for part in cursor.skipped for bound in part), sample]
    fits = {
        "plan": saved.plan == saved.identity.fingerprint,
        "weights": starts == sorted(set(starts))
        and starts[0] <= sample
        and all(len(one.weights) == num_corpora and are_weights(one.weights) for one in cursor.segments),
        "schedule": saved.schedule is None or starts[-1] <= sample,
        "counts": not starts[0] if balance is None else (balance.counts.shape, balance.remainders.shape) == shapes,
        "skipped": bounds == sorted(bounds) and all(start < stop for start, stop in cursor.skipped),
        "changes": all(len(change.counts) == num_streams for change in saved.changes),
        "masks": all(of and of[-1][0] <= sample and np.all(np.diff([(-1, 0), *of], axis=0) > 0) for of in calls),
    }
    if wrong := [name for name, is_right in fits.items() if not is_right]:
        raise ValueError(f"the rest of it contradicts {', '.join(wrong)}")


def _check_growth(saved: _State, plan: StreamPlan) -> None:
    """Refuse a corpus that has grown since: it would be read from its start again."""
    read = {corpus.fingerprint for corpus in saved.corpora}
    gone = read - {source.fingerprint for source in plan.sources}
    for name, source in zip(plan.names, plan.sources, strict=True):
        if source.fingerprint in read:
            continue  # the run read this corpus as it is; an earlier generation was another corpus of the run
        earlier = source.earlier_fingerprints
        for generation, fingerprint in enumerate(earlier):
            if fingerprint in gone:
                raise PlanMismatchError(
                    f"corpus {name!r} has grown: the run reads it up to generation {generation}, the plan up to "
                    f"generation {len(earlier)}",
                    hint=f"give generations={{{name!r}: {generation}}} to go on; to read what was appended too, add "
                    f"its folder 'generation-{generation + 1:02d}' as a corpus of its own, and "
                    "load_state_dict(state, corpora='plan')",
                )


def _check_plan(saved: _State, now: PlanIdentity, *, any_corpora: bool) -> None:
    """Refuse the state of another plan, and name all that differs."""
    before, hint = saved.identity, "give the values of the run to be resumed"
    facts: list[tuple[str, Any, Any]] = [(name, value, now.fields[name]) for name, value in before.fields.items()]
    if not any_corpora and before.corpora != now.corpora:
        hint += ", or load_state_dict(state, corpora='plan') to continue with other corpora"
        facts.append(("the number of corpora", len(before.corpora), len(now.corpora)))
        facts += [
            (f"{word} of corpus {corpus.name!r}", getattr(corpus, field), getattr(new, field))
            for corpus, new in zip(saved.corpora, now.corpora, strict=False)
            for field, word in (("fingerprint", "the content"), ("start_epoch", "start_epoch"), ("take", "take"))
        ]
    if differences := [f"{what} differs ({old!s:.20}, now {new!s:.20})" for what, old, new in facts if old != new]:
        raise PlanMismatchError(
            f"the state belongs to another plan: {'; '.join(differences)}",
            hint=f"{hint}, or start a new run without the loader's state",
        )


def _continued(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with the planned changes of weights that are still to come."""
    if saved.schedule is None:
        return cursor
    later = plan.schedule.after(cursor.sample)
    if saved.schedule != plan.schedule.fingerprint_after(cursor.sample):
        raise PlanMismatchError(
            f"the run was to change its weights after sample {cursor.sample} in another way than this plan, which "
            f"changes them {f'{len(later)} times, next at sample {later[0].start}' if later else 'no more'}",
            hint="give the schedule of that run, or load_state_dict(state, weights='plan') to continue with this one",
        )
    return replace(cursor, segments=(*cursor.segments, *later))


def _adopted(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with the corpora and weights of a plan that adds some, removes some, or has them in another order.

    A corpus of both, known by its content, continues where it was; so does one that was removed earlier.
    """
    before, now = saved.identity.corpora, plan.identity.corpora
    counts = cursor.mixture(plan.seed, plan.num_streams).balance_before(cursor.sample).counts.tolist()
    read = dict(zip(before, map(tuple, counts), strict=True))
    go_on = {change.identity: change.counts for change in cursor.changes if change.action == "removed"} | read
    go_on = {corpus: go_on.get(corpus, (0,) * plan.num_streams) for corpus in (*before, *now)}

    def changed(action: Literal["removed", "added"], name: str, corpus: CorpusIdentity) -> CorpusChange:
        return CorpusChange(sample=cursor.sample, action=action, name=name, identity=corpus, counts=go_on[corpus])

    removed = [
        changed("removed", one.name, corpus)
        for one, corpus in zip(saved.corpora, before, strict=True)
        if corpus not in now
    ]
    added = [changed("added", name, one) for name, one in zip(plan.names, now, strict=True) if one not in read]
    start = Balance.at_start(plan.seed, plan.num_streams, len(now))
    balance = replace(start, counts=np.array([go_on[corpus] for corpus in now], np.int64))
    adopted = replace(cursor, segments=(), balance=balance, changes=(*cursor.changes, *removed, *added))
    return adopted.rescheduled(plan.schedule)


def _saved_pairs(pairs: Sequence[tuple[int, int]], num_columns: int) -> Any:
    """Pairs as they are; more than 32 as a text of differences, so that states stay small."""
    if len(pairs) <= _MAX_PAIRS:
        return pairs
    numbers = np.array(pairs, np.int64).reshape(-1, num_columns)
    steps = np.diff(numbers, axis=0, prepend=0).astype("<i8").reshape(-1, 2)
    # first members before second ones, and low bytes before high ones, which compresses best
    content = steps.T.copy().view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _pairs(saved: Pairs, num_columns: int) -> tuple[tuple[int, int], ...]:
    if not isinstance(saved, str):
        return saved
    decoder = zlib.decompressobj()
    content = decoder.decompress(base64.b64decode(saved, validate=True), _MAX_COLUMN_BYTES)
    if not decoder.eof or decoder.unused_data:
        raise ValueError("a column is cut, or more follows")
    planes: NDArray[np.uint8] = np.frombuffer(content, np.uint8).reshape(8, -1)
    steps = planes.T.copy().view("<i8").reshape(2, -1).T.reshape(-1, num_columns)
    numbers = np.cumsum(steps, axis=0).reshape(-1, 2)
    return tuple(map(tuple, numbers.tolist()))
