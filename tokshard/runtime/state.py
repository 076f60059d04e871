"""The state of a job: a cursor as a line of JSON, and the checks when it is loaded. STATE.md describes it."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta, Struct

from tokshard.errors import PlanError, PlanMismatchError
from tokshard.forking import decodable
from tokshard.runtime.cursor import (
    CorpusChange,
    CorpusIdentity,
    Count,
    Cursor,
    Length,
    PlanIdentity,
    Sha256,
)
from tokshard.runtime.order.mixture import Balance, Segment, are_weights
from tokshard.runtime.order.windows import BLOCK_SECTIONS
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.rows.masks import load_mask
from tokshard.runtime.stop import check_pass
from tokshard.wording import counted

STATE_VERSION = 1
"""Version of the form of states. Bump when an older tokshard would misread it."""

_KEY = "cursor"
_START = re.compile(r'\{"tokshard_cursor":(\d+),')
_CHECK = ',"check":'
_DAMAGED = "load an older checkpoint, or start without the loader's state"

_FIELDS = ("order_version", "seed", "seq_len", "block_tokens", "window_blocks", "num_streams")


Pairs = tuple[tuple[Count, Count], ...]


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


@decodable
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
    planned: str
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
    masks = [{name: getattr(mask, name) for name in _Mask.__struct_fields__} for mask in cursor.masks]
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
            "planned": plan.schedule.fingerprint_from(cursor.sample),
            "counts": balance.counts.T.tolist(),
            "remainders": balance.remainders.T.tolist(),
            "skipped": cursor.skipped,
            "changes": msgspec.to_builtins(cursor.changes),
            **({"lengths": msgspec.to_builtins(cursor.lengths[1:])} if cursor.lengths else {}),
            **({"masks": masks} if masks else {}),
        },
        separators=(",", ":"),
    )
    return {_KEY: f"{line[:-1]}{_check_of(line[:-1])}"}


def plan_of_run(plan: StreamPlan, state: Any) -> StreamPlan:
    """The plan with `block_tokens` and `window_blocks` of the run of a state, where it was not given its own.

    Raises:
        PlanMismatchError: the state cannot be read, or the plan cannot have these sizes.
    """
    saved = _decoded(state)
    try:
        return plan.with_sizes_of(saved.block_tokens, saved.window_blocks)
    except PlanError as error:
        longest = saved.block_tokens // BLOCK_SECTIONS
        raise PlanMismatchError(
            f"the run has block_tokens={saved.block_tokens} and window_blocks={saved.window_blocks}, which do not "
            f"go with this plan: {error}",
            hint=f"give a seq_len that divides {longest}; a new run may grow its seq_len to any that divides "
            f"block_tokens / {BLOCK_SECTIONS}"
            if "whole" in {order.pack for order in plan.corpora}
            else "give the sizes of the run that is to go on, or start a new run without the loader's state",
        ) from error


class OtherWeights(NamedTuple):
    """The weights that a plan sets at the sample of a state, where its run has others.

    Args:
        sample: of the state.
        before, now: weights in plan order: those in force there, 0 for a corpus that the run has not, and the plan's.
    """

    sample: int
    before: tuple[float, ...]
    now: tuple[float, ...]


def other_weights(plan: StreamPlan, state: Any) -> OtherWeights | None:
    """The change of weights that a plan makes at a state; None: no change.

    Weights that were set in the run itself are no change: the plan is compared with the plan that saved the state. With
    other corpora, or in another order, its weights are compared with those in force.

    Raises:
        PlanMismatchError: it is not a state of tokshard, was changed or damaged.
    """
    return _other_weights(_decoded(state), plan)


def _other_weights(saved: _State, plan: StreamPlan) -> OtherWeights | None:
    of_run, of_plan = saved.identity.corpora, plan.identity.corpora
    in_force = [weights for start, weights in saved.weights if start <= saved.sample][-1]
    known = dict(zip(of_run, in_force, strict=True))
    before, now = tuple(known.get(one, 0.0) for one in of_plan), plan.schedule.at(saved.sample).weights
    is_same = saved.planned == plan.schedule.fingerprint_from(saved.sample) if of_run == of_plan else before == now
    return None if len(of_plan) == 1 or is_same else OtherWeights(saved.sample, before, now)


def _check_weights(saved: _State, plan: StreamPlan) -> None:
    """Refuse a plan that sets other weights from here on than the plan that saved the state."""
    if (other := _other_weights(saved, plan)) is None:
        return
    before, now = (
        ", ".join(f"{name}={weight:g}" for name, weight in zip(plan.names, weights, strict=True))
        for weights in (other.before, other.now)
    )
    raise PlanMismatchError(
        f"this plan sets other weights after sample {saved.sample} than the plan that saved the state: {now}"
        f"{', and other changes later' if before == now else ''}; the run has {before} there",
        hint="give the weights and the schedule of that run, or load_state_dict(state, weights='plan') to read with "
        "those of this plan from here on, or weights='cursor' to keep what the run has",
    )


def _decoded(state: Any) -> _State:
    line = _checked_line(state.get(_KEY, [*state]) if isinstance(state, Mapping) else state)
    try:
        saved = msgspec.convert(json.loads(line), _State)  # msgspec's own parser refuses half a character in a name
        _check_fit(saved, _cursor_of(saved))
    except (msgspec.MsgspecError, RecursionError, ArithmeticError, ValueError) as error:
        raise PlanMismatchError(f"the state is damaged: {error}", hint=_DAMAGED) from error
    return saved


def load_state(
    plan: StreamPlan,
    state: Any,
    *,
    weights: Literal["same", "cursor", "plan"] = "same",
    corpora: Literal["same", "plan"] = "same",
    seq_len: Literal["same", "plan"] = "same",
    mask_files: Sequence[str] = (),
) -> Cursor:
    """The cursor of a state; arguments as for `BatchLoader.load_state_dict`.

    Args:
        mask_files: new places of lists of masked documents that were moved.

    Raises:
        PlanMismatchError: it is not a state of tokshard, was changed or damaged, or belongs to another plan.
    """
    for name, given in (("weights", weights), ("corpora", corpora), ("seq_len", seq_len)):
        words = ("same", "cursor", "plan") if name == "weights" else ("same", "plan")
        if given not in words:
            raise ValueError(f"{name} must be {' or '.join(map(repr, words))}, got {given!r}")
    saved = _decoded(state)
    cursor = _cursor_of(saved)
    _check_growth(saved, plan)
    _check_plan(saved, plan.identity, any_corpora=corpora == "plan", any_seq_len=seq_len == "plan")
    masks = (  # whose files are read only after the plans were compared
        load_mask(mask.file, mask.calls, mask.sha256, fingerprint=mask.fingerprint, name=mask.name, others=mask_files)
        for mask in saved.masks
    )
    cursor = replace(cursor, masks=tuple(masks))
    if saved.identity.corpora != plan.identity.corpora:
        cursor = _adopted(saved, cursor, plan)
        _warn_of_unmasked(saved, cursor, plan)
    elif weights == "plan":
        cursor = cursor.rescheduled(plan.schedule)
    else:
        if weights == "same":
            _check_weights(saved, plan)
        cursor = _continued(saved, cursor, plan)
    _check_bases(cursor, plan)
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
    remainders = np.array(saved.remainders, np.uint64).T
    balance = Balance(counts=np.array(saved.counts, np.int64).T, remainders=remainders)
    return Cursor(
        sample=saved.sample,
        segments=tuple(Segment(start=start, weights=weights) for start, weights in saved.weights),
        balance=balance,
        skipped=saved.skipped,
        changes=saved.changes,
        lengths=(Length.at_start(saved.seq_len), *saved.lengths) if saved.lengths else (),
    )


def _check_fit(saved: _State, cursor: Cursor) -> None:
    """Refuse values that are valid alone, but contradict each other.

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
        "counts": (balance.counts.shape, balance.remainders.shape) == shapes,
        "skipped": bounds == sorted(bounds) and all(start < stop for start, stop in cursor.skipped),
        "changes": (changed_at := [change.sample for change in saved.changes]) == sorted(changed_at)
        and all(change.sample <= sample and len(change.counts) == num_streams for change in saved.changes),
        "lengths": (changed := [length.sample for length in saved.lengths]) == sorted(set(changed))
        and all(start <= sample for start in changed)
        and all(
            len(length.bases) == num_streams and all(len(counts) == num_corpora for counts in length.bases)
            for length in saved.lengths
        ),
        "masks": all(
            mask.calls and mask.calls[-1][0] <= sample and np.all(np.diff([(-1, 0), *mask.calls], axis=0) > 0)
            for mask in saved.masks
        ),
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
    before, hint = (
        saved.identity,
        "give the values of the run to be resumed (sizes of blocks and windows may be left out)",
    )
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
    if len(plan.names) > 1 and saved.schedule != plan.schedule.fingerprint_after(cursor.sample):
        raise PlanMismatchError(
            f"the run planned other changes of weights after sample {cursor.sample} than this plan, which "
            f"changes them {f'{len(later)} times, next at sample {later[0].start}' if later else 'no more'}",
            hint="give the schedule of that run, or load_state_dict(state, weights='plan') to continue with this one",
        )
    return replace(cursor, segments=(*cursor.segments, *later))


def _adopted(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with the corpora and weights of a plan that adds, removes or reorders corpora.

    A corpus of both, identified by its content, continues where it was.

    Raises:
        PlanMismatchError: the plan has a corpus that was removed earlier.
    """
    before, now = saved.identity.corpora, plan.identity.corpora
    counts = cursor.mixture(plan.seed, plan.num_streams).balance_before(cursor.sample).counts.tolist()
    unread = (0,) * plan.num_streams
    read = dict(zip(before, map(tuple, counts), strict=True))
    gone = {change.identity: change.sample for change in cursor.changes if change.action == "removed"}
    for name, corpus in zip(plan.names, now, strict=True):
        if corpus in gone:
            raise PlanMismatchError(
                f"corpus {name!r} was removed from the run at sample {gone[corpus]}, and this plan has it again",
                hint=f"give start_epoch={{{name!r}: {corpus.start_epoch + 1}}} to read it anew; a corpus that is to "
                "pause stays in the plan, with weight 0",
            )

    def changed(action: Literal["removed", "added"], name: str, corpus: CorpusIdentity) -> CorpusChange:
        found = read.get(corpus, unread)
        return CorpusChange(sample=cursor.sample, action=action, name=name, identity=corpus, counts=found)

    removed = [
        changed("removed", one.name, corpus)
        for one, corpus in zip(saved.corpora, before, strict=True)
        if corpus not in now
    ]
    added = [changed("added", name, one) for name, one in zip(plan.names, now, strict=True) if one not in read]
    start = Balance.at_start(plan.seed, plan.num_streams, len(now))
    balance = replace(start, counts=np.array([read.get(corpus, unread) for corpus in now], np.int64))
    places = [before.index(corpus) if corpus in read else None for corpus in now]
    lengths = tuple(
        msgspec.structs.replace(
            length,
            bases=tuple(tuple(0 if at is None else of_stream[at] for at in places) for of_stream in length.bases),
        )
        for length in cursor.lengths
    )
    changes = (*cursor.changes, *removed, *added)
    return replace(cursor, segments=(), balance=balance, changes=changes, lengths=lengths).rescheduled(plan.schedule)


def _warn_of_unmasked(saved: _State, cursor: Cursor, plan: StreamPlan) -> None:
    """Warn of masks of a corpus that the plan does not read any more: another may have its documents."""
    gone = {one.fingerprint for one in saved.corpora} - {source.fingerprint for source in plan.sources}
    for mask in cursor.masks:
        if mask.fingerprint in gone:
            warnings.warn(
                f"the run masks {counted(len(mask.documents), 'document')} of corpus {mask.name!r}, listed in "
                f"{mask.file}, and the plan no longer has this corpus: if others have these documents, as views, "
                "copies and generations of it may, they are in the loss there until a list for that corpus masks them",
                stacklevel=4,
            )


def _check_bases(cursor: Cursor, plan: StreamPlan) -> None:
    """Refuse changes of the length that began with more samples than were given by then."""
    given = [*(length.of_corpora for length in cursor.lengths[1:])]
    given.append(plan.mixture(cursor).balance_before(cursor.sample).counts)
    if any((earlier > later).any() for earlier, later in pairwise(given)):
        raise PlanMismatchError("the state is damaged: the rest of it contradicts lengths", hint=_DAMAGED)


def _resized(saved: _State, cursor: Cursor, plan: StreamPlan) -> Cursor:
    """The cursor with samples of the plan's length from here on: STATE.md, section 4."""
    lengths = cursor.lengths or (Length.at_start(saved.seq_len),)
    past = lengths[:-1] if lengths[-1].sample == cursor.sample and len(lengths) > 1 else lengths
    counts = plan.mixture(cursor).balance_before(cursor.sample).counts.T.tolist()
    now = Length(sample=cursor.sample, seq_len=plan.seq_len, bases=tuple(map(tuple, counts)))
    resized = replace(cursor, lengths=(*past, now))
    _warn_of_left_out(plan, replace(cursor, lengths=past), resized)
    return resized


def _warn_of_left_out(plan: StreamPlan, before: Cursor, now: Cursor) -> None:
    """Warn of the tokens of each corpus that a change of the length leaves out."""
    left_out = [after - earlier for earlier, after in zip(plan.left_out(before), plan.left_out(now), strict=True)]
    found = [
        f"{count:,} tokens of {name!r} ({count / order.padded_tokens:.1%} of an epoch)"
        for name, order, count in zip(plan.names, plan.corpora, left_out, strict=True)
        if count
    ]
    if found:
        seq_len = before.lengths[-1].seq_len
        warnings.warn(
            f"the change of seq_len from {seq_len:,} to {plan.seq_len:,} leaves out {', '.join(found)}, which the next "
            f"epoch reads; a multiple of {seq_len:,} leaves out only what some streams have not read yet",
            stacklevel=4,
        )
