"""The state of a job: a cursor as a line of JSON, and the checks when it is loaded. STATE.md describes it."""

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
from tokshard.runtime.cursor import (
    CorpusChange,
    CorpusIdentity,
    CorpusLength,
    Count,
    Cursor,
    Length,
    PlanIdentity,
    Sha256,
)
from tokshard.runtime.order.mixture import Balance, Segment, are_weights
from tokshard.runtime.order.windows import CorpusOrder
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.masks import load_mask
from tokshard.runtime.stop import check_pass

STATE_VERSION = 1
"""Version of the form of states. Bump when an older tokshard would misread it."""

_KEY = "cursor"
_START = re.compile(r'\{"tokshard_cursor":(\d+),')
_CHECK = ',"check":'
_DAMAGED = "load an older checkpoint, or start without the loader's state"

_FIELDS = ("order_version", "seed", "seq_len", "block_tokens", "window_blocks", "num_streams")

_MAX_PAIRS = 32
_MAX_COLUMN_BYTES = 1 << 28

Pairs = tuple[tuple[Count, Count], ...] | str


class _Corpus(CorpusIdentity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A corpus of the run: its name in the plan, and its identity."""

    name: str


class _Mask(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of masked documents; fields as in `Mask`."""

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
    seed: Annotated[int, Meta(ge=0)]
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
    lengths: tuple[Length, ...] = ()
    masks: tuple[_Mask, ...] = ()
    check: str

    def __post_init__(self) -> None:
        if wide := [name for name in _FIELDS if getattr(self, name) >> 64]:
            raise ValueError(f"expected numbers below 2**64 - at `$.{wide[0]}`")

    @property
    def identity(self) -> PlanIdentity:
        """The plan of the run."""
        corpora = (msgspec.convert(one, CorpusIdentity, from_attributes=True) for one in self.corpora)
        return PlanIdentity(fields={name: getattr(self, name) for name in _FIELDS}, corpora=tuple(corpora))

    @property
    def last_seq_len(self) -> int:
        """Tokens of a sample at the position of the run."""
        return self.lengths[-1].seq_len if self.lengths else self.seq_len


def save_state(plan: StreamPlan, cursor: Cursor) -> dict[str, Any]:
    """A cursor as one line of JSON under one key, the same on every rank.

    It holds a hash of planned changes of weights, so its size does not depend on them.
    """
    cursor = cursor.compacted(plan.mixture(cursor))
    balance, identity = cursor.balance, plan.identity
    if cursor.lengths:
        fields = {**identity.fields, "seq_len": cursor.lengths[0].seq_len}
        identity = PlanIdentity(fields=fields, corpora=identity.corpora)
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
                {"name": name, **msgspec.to_builtins(corpus)}
                for name, corpus in zip(plan.names, identity.corpora, strict=True)
            ],
            "sample": cursor.sample,
            "weights": [[part.start, part.weights] for part in (started if follows else cursor.segments)],
            "schedule": plan.schedule.fingerprint_after(cursor.sample) if follows else None,
            "counts": [] if balance is None else balance.counts.T.tolist(),
            "remainders": [] if balance is None else balance.remainders.T.tolist(),
            "skipped": _saved_pairs(cursor.skipped, 1),
            "changes": msgspec.to_builtins(cursor.changes),
            **({"lengths": msgspec.to_builtins(cursor.lengths[1:])} if cursor.lengths else {}),
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
    seq_len: Literal["same", "plan"] = "same",
) -> Cursor:
    """The cursor of a state; arguments as for `BatchLoader.load_state_dict`.

    Raises:
        PlanMismatchError: it is not a state of tokshard, was changed or damaged, or belongs to another plan.
    """
    for name, given, other in (
        ("weights", weights, "cursor"),
        ("corpora", corpora, "same"),
        ("seq_len", seq_len, "same"),
    ):
        if given not in (other, "plan"):
            raise ValueError(f"{name} must be {other!r} or 'plan', got {given!r}")
    line = _checked_line(state.get(_KEY) if isinstance(state, Mapping) else state)
    try:
        saved = msgspec.json.decode(line, type=_State)
        cursor, calls = _cursor_of(saved), [_pairs(mask.calls, 2) for mask in saved.masks]
        _check_fit(saved, cursor, calls)
    except (msgspec.MsgspecError, ArithmeticError, RecursionError, ValueError, zlib.error) as error:
        raise PlanMismatchError(f"the state is damaged: {error}", hint=_DAMAGED) from error
    _check_growth(saved, plan)
    _check_plan(saved, plan.identity, any_corpora=corpora == "plan", any_seq_len=seq_len == "plan")
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
    _check_origins(cursor, plan)
    if saved.last_seq_len != plan.seq_len:
        cursor = _resized(saved, cursor, plan)
    check_pass(plan, cursor)
    return cursor


def _check_of(content: str) -> str:
    """The checksum at the end of a line."""
    digest = hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()
    return f'{_CHECK}"{digest[:16]}"}}'


def _checked_line(line: Any) -> str:
    found = _START.match(line) if isinstance(line, str) else None
    if found is None:
        raise PlanMismatchError(
            f"this is not a state of a tokshard loader: {line!r:.100}",
            hint="give the value of StreamingLoader.state_dict(); the state of another loader cannot be continued",
        )
    if found[1] != str(STATE_VERSION):
        raise PlanMismatchError(
            f"the state has version {found[1]:.20}, this tokshard reads {STATE_VERSION}",
            hint="load it with the tokshard that saved it, or start a new run without the loader's state",
        )
    content = str(line).rpartition(_CHECK)[0]
    if line != content + _check_of(content):
        raise PlanMismatchError(
            "the state was changed after it was saved: its checksum does not match",
            hint=f"give the line as state_dict() returned it; to continue without it, {_DAMAGED}",
        )
    return str(line)


def _cursor_of(saved: _State) -> Cursor:
    """The cursor of a line, without masks and planned weights."""
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
        lengths=(Length.at_start(saved.seq_len), *saved.lengths) if saved.lengths else (),
    )


def _check_fit(saved: _State, cursor: Cursor, calls: Sequence[Sequence[tuple[int, int]]]) -> None:
    """Refuse values that are valid alone, but contradict each other.

    Args:
        calls: calls of each mask.

    Raises:
        ValueError: the values contradict each other; it names them.
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
        "changes": all(
            len(change.counts) == num_streams and (change.length is None or len(change.length.bases) == num_streams)
            for change in saved.changes
        ),
        "lengths": (changed := [length.sample for length in saved.lengths]) == sorted(set(changed))
        and all(start <= sample for start in changed)
        and all(
            len(length.origins) == len(length.left_out) == num_corpora
            and len(length.bases) == num_streams
            and all(len(counts) == num_corpora for counts in length.bases)
            for length in saved.lengths
        ),
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
                    hint=f"give generations={{{name!r}: {generation}}} to continue; to also read what is new, "
                    f"add the folder 'generation-{generation + 1:02d}' as a corpus of its own, and "
                    "load_state_dict(state, corpora='plan')",
                )


def _check_plan(saved: _State, now: PlanIdentity, *, any_corpora: bool, any_seq_len: bool) -> None:
    """Refuse the state of another plan, and name all differences."""
    before, hint = saved.identity, "give the values of the run to be resumed"
    fields = {**before.fields, "seq_len": saved.last_seq_len}
    if any_seq_len:
        del fields["seq_len"]
    elif fields["seq_len"] != now.fields["seq_len"]:
        hint += ", or load_state_dict(state, seq_len='plan') to continue with samples of another length"
    facts: list[tuple[str, Any, Any]] = [(name, value, now.fields[name]) for name, value in fields.items()]
    if not any_corpora and before.corpora != now.corpora:
        hint += ", or load_state_dict(state, corpora='plan') to continue with other corpora"
        facts.append(("the number of corpora", len(before.corpora), len(now.corpora)))
        facts += [
            (f"{word} of corpus {corpus.name!r}", getattr(corpus, field), getattr(new, field))
            for corpus, new in zip(saved.corpora, now.corpora, strict=False)
            for field in ("fingerprint", "start_epoch", "take", "pack")
            for word in ("the content" if field == "fingerprint" else field,)
        ]
    if differences := [f"{what} differs ({old!s:.20}, now {new!s:.20})" for what, old, new in facts if old != new]:
        raise PlanMismatchError(
            f"the state belongs to another plan: {'; '.join(differences)}",
            hint=f"{hint}, or start a new run without the loader's state",
        )


def _continued(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with the later planned changes of weights."""
    if saved.schedule is None:
        return cursor
    later = plan.schedule.after(cursor.sample)
    if saved.schedule != plan.schedule.fingerprint_after(cursor.sample):
        raise PlanMismatchError(
            f"the run planned other changes of weights after sample {cursor.sample} than this plan, which "
            f"changes them {f'{len(later)} times, next at sample {later[0].start}' if later else 'no more'}",
            hint="give the schedule of that run, or load_state_dict(state, weights='plan') to continue with this one",
        )
    return replace(cursor, segments=(*cursor.segments, *later))


def _adopted(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with the corpora and weights of a plan that adds, removes or reorders corpora.

    A corpus of both, identified by its content, continues where it was; so does one that was removed earlier.
    """
    before, now = saved.identity.corpora, plan.identity.corpora
    counts = cursor.mixture(plan.seed, plan.num_streams).balance_before(cursor.sample).counts.tolist()
    read = dict(zip(before, map(tuple, counts), strict=True))
    gone = {change.identity: change for change in cursor.changes if change.action == "removed"}
    go_on = {corpus: change.counts for corpus, change in gone.items()} | read
    go_on = {corpus: go_on.get(corpus, (0,) * plan.num_streams) for corpus in (*before, *now)}
    last = cursor.lengths[-1] if cursor.lengths else None
    lengths = {} if last is None else {corpus: last.of_corpus(number) for number, corpus in enumerate(before)}

    def changed(action: Literal["removed", "added"], name: str, corpus: CorpusIdentity) -> CorpusChange:
        length = lengths.get(corpus) if action == "removed" else None
        return CorpusChange(
            sample=cursor.sample, action=action, name=name, identity=corpus, counts=go_on[corpus], length=length
        )

    def length_of(number: int, corpus: CorpusIdentity, seq_len: int) -> CorpusLength:
        if (known := lengths.get(corpus)) is not None:
            return known
        order = plan.corpora[number]
        unread = _unread(order, saved.seq_len if corpus in gone else seq_len)
        known = gone[corpus].length or unread if corpus in gone else unread
        return known if known.seq_len == seq_len else _length_after(order, known, go_on[corpus], seq_len)

    removed = [
        changed("removed", one.name, corpus)
        for one, corpus in zip(saved.corpora, before, strict=True)
        if corpus not in now
    ]
    added = [changed("added", name, one) for name, one in zip(plan.names, now, strict=True) if one not in read]
    start = Balance.at_start(plan.seed, plan.num_streams, len(now))
    balance = replace(start, counts=np.array([go_on[corpus] for corpus in now], np.int64))
    adopted = replace(cursor, segments=(), balance=balance, changes=(*cursor.changes, *removed, *added))
    if last is not None:
        of_corpora = [length_of(number, corpus, last.seq_len) for number, corpus in enumerate(now)]
        first, moved = cursor.lengths[0], Length.of_corpora(last.sample, last.seq_len, of_corpora)
        adopted = replace(adopted, lengths=(first, moved))
    return adopted.rescheduled(plan.schedule)


def _check_origins(cursor: Cursor, plan: StreamPlan) -> None:
    """Refuse changes of the length that began with other parts of corpora, or with more samples than were given."""
    if not cursor.lengths[1:]:
        return
    given = plan.mixture(cursor).balance_before(cursor.sample).counts.T
    for length in cursor.lengths[1:]:
        parts = [len(origins) for origins in length.origins]
        if parts != [corpus.num_parts for corpus in plan.corpora] or bool((np.array(length.bases) > given).any()):
            raise PlanMismatchError("the state is damaged: the rest of it contradicts lengths", hint=_DAMAGED)


def _resized(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with samples of the plan's length from here on: STATE.md, section 5."""
    lengths = cursor.lengths or (Length.at_start(saved.seq_len),)
    counts, last = plan.mixture(cursor).balance_before(cursor.sample).counts.tolist(), lengths[-1]
    of_corpora = [
        _length_after(corpus, last.of_corpus(number) or _unread(corpus, last.seq_len), counts[number], plan.seq_len)
        for number, corpus in enumerate(plan.corpora)
    ]
    past = lengths[:-1] if last.sample == cursor.sample and len(lengths) > 1 else lengths
    return replace(cursor, lengths=(*past, Length.of_corpora(cursor.sample, plan.seq_len, of_corpora)))


def _unread(order: CorpusOrder, seq_len: int) -> CorpusLength:
    return CorpusLength(seq_len=seq_len, bases=(0,) * order.num_streams, origins=(0,) * order.num_parts)


def _length_after(order: CorpusOrder, length: CorpusLength, counts: Sequence[int], seq_len: int) -> CorpusLength:
    """The length of a corpus's samples after a change, given the length before and the samples of each stream."""
    before = replace(order, shape=replace(order.shape, seq_len=length.seq_len), place=length.place)
    after, left_out = before.resized(np.array(counts, np.int64), seq_len)
    assert after.place is not None, "it was just placed"
    return CorpusLength(
        seq_len=seq_len,
        bases=tuple(after.place.bases.tolist()),
        origins=tuple(after.place.origins.tolist()),
        left_out=length.left_out + left_out,
    )


def _saved_pairs(pairs: Sequence[tuple[int, int]], num_columns: int) -> Any:
    """Up to 32 pairs unchanged; more as a text of differences, so states stay small."""
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
