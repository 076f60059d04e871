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

_MAX_PAIRS = 32
_MAX_COLUMN_BYTES = 1 << 28

Pairs = tuple[tuple[Count, Count], ...] | str


class _Corpus(CorpusIdentity, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A corpus of the run, and its name in the plan."""

    name: str


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
    def identities(self) -> tuple[CorpusIdentity, ...]:
        """The corpora without their names."""
        return tuple(
            CorpusIdentity(fingerprint=corpus.fingerprint, start_epoch=corpus.start_epoch, take=corpus.take)
            for corpus in self.corpora
        )


def save_state(plan: StreamPlan, cursor: Cursor) -> dict[str, Any]:
    """A cursor as one line of JSON under one key, the same on every rank.

    It holds a hash of planned changes of weights, so its size does not depend on them.
    """
    cursor = cursor.compacted(plan.mixture(cursor))
    balance, identity = cursor.balance, plan.identity
    started, later = cursor.segments[: cursor.num_started], cursor.segments[cursor.num_started :]
    follows = later == plan.schedule.after(cursor.sample)
    masks = [
        {
            "fingerprint": mask.corpus,
            "name": mask.name,
            "file": mask.path,
            "calls": _saved_pairs(mask.calls, num_columns=2),
            "sha256": mask.sha256,
        }
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
            "skipped": _saved_pairs(cursor.skipped, num_columns=1),
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
        cursor, calls = _cursor_of(saved), [_calls_of(mask, saved.sample) for mask in saved.masks]
    except (msgspec.MsgspecError, ArithmeticError, RecursionError, ValueError, zlib.error) as error:
        raise PlanMismatchError(f"the state is damaged: {error}", hint=_DAMAGED) from error
    _check_growth(saved, plan)
    _check_fields(saved, plan.identity)
    if corpora == "same":
        _check_corpora(saved, plan.identity)
    masks = (  # whose files are read only after the plans were compared
        load_mask(mask.file, calls_of, mask.sha256, corpus=mask.fingerprint, name=mask.name)
        for mask, calls_of in zip(saved.masks, calls, strict=True)
    )
    cursor = replace(cursor, masks=tuple(masks))
    if saved.identities != plan.identity.corpora:
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
    starts, num_corpora, num_streams = [start for start, _ in saved.weights], len(saved.corpora), saved.num_streams
    if starts != sorted(set(starts)) or starts[0] > saved.sample:
        raise ValueError(f"weights that start at {starts} do not fit sample {saved.sample}")
    if saved.schedule is not None and starts[-1] > saved.sample:
        raise ValueError(f"weights start at {starts[-1]}, and a schedule is named")
    if any(len(weights) != num_corpora or not are_weights(weights) for _, weights in saved.weights):
        raise ValueError(f"weights {saved.weights} are not those of {num_corpora} corpora")
    if any(len(change.counts) != num_streams for change in saved.changes):
        raise ValueError(f"counts of changes are not of {num_streams} streams")
    balance = None
    if saved.counts or saved.remainders:
        balance = Balance(counts=np.array(saved.counts, np.int64).T, remainders=np.array(saved.remainders, np.uint64).T)
        shapes = (num_corpora, num_streams), (num_corpora - 1, num_streams)
        if (balance.counts.shape, balance.remainders.shape) != shapes:
            raise ValueError(f"counts and remainders are not of {num_streams} streams and {num_corpora} corpora")
    elif starts[0]:
        raise ValueError(f"counts before sample {starts[0]} are missing")
    skipped = _pairs(saved.skipped, num_columns=1)
    bounds = [0, *(bound for part in skipped for bound in part), saved.sample]
    if bounds != sorted(bounds) or any(start == stop for start, stop in skipped):
        raise ValueError(f"skipped {skipped!r:.100} does not fit sample {saved.sample}")
    return Cursor(
        sample=saved.sample,
        segments=tuple(Segment(start=start, weights=weights) for start, weights in saved.weights),
        balance=balance,
        skipped=skipped,
        changes=saved.changes,
    )


def _calls_of(mask: _Mask, sample: int) -> tuple[tuple[int, int], ...]:
    calls = _pairs(mask.calls, num_columns=2)
    samples, sizes = ([*column] for column in zip((-1, 0), *calls, strict=True))
    if not calls or samples[-1] > sample or any(column != sorted(set(column)) for column in (samples, sizes)):
        raise ValueError(f"calls {calls!r:.100} of a mask do not fit sample {sample}")
    return calls


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


def _check_fields(saved: _State, identity: PlanIdentity) -> None:
    differences = [
        f"{name} differs ({getattr(saved, name)}, now {value})"
        for name, value in identity.fields.items()
        if getattr(saved, name) != value
    ]
    if differences:
        raise _mismatch(differences, "give the values of the run to be resumed")
    # the hash of what is saved: other corpora are compared next
    if saved.plan != PlanIdentity(fields=identity.fields, corpora=saved.identities).fingerprint:
        raise PlanMismatchError("the state is damaged: its plan hash is not that of its plan", hint=_DAMAGED)


def _check_corpora(saved: _State, identity: PlanIdentity) -> None:
    before, now = saved.identities, identity.corpora
    if before == now:
        return
    if len(before) != len(now):
        differences = [f"the plan had {len(before)} corpora, now {len(now)}"]
    else:
        words = {"fingerprint": "the content", "start_epoch": "start_epoch", "take": "take"}
        differences = [
            f"{word} of corpus {corpus.name!r} differs ({str(getattr(old, field))[:12]}, "
            f"now {str(getattr(new, field))[:12]})"
            for corpus, old, new in zip(saved.corpora, before, now, strict=True)
            for field, word in words.items()
            if getattr(old, field) != getattr(new, field)
        ]
    hint = "give the corpora of the run to be resumed, or load_state_dict(state, corpora='plan') to continue with these"
    raise _mismatch(differences, hint)


def _mismatch(differences: Sequence[str], hint: str) -> PlanMismatchError:
    return PlanMismatchError(
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
    before, now = saved.identities, plan.identity.corpora
    counts = cursor.mixture(plan.seed, plan.num_streams).balance_before(cursor.sample).counts.tolist()
    read = dict(zip(before, map(tuple, counts), strict=True))
    unread = (0,) * plan.num_streams
    go_on = {change.identity: change.counts for change in cursor.changes if change.action == "removed"} | read

    def changed(action: Literal["removed", "added"], name: str, corpus: CorpusIdentity) -> CorpusChange:
        counts = go_on.get(corpus, unread)
        return CorpusChange(sample=cursor.sample, action=action, name=name, identity=corpus, counts=counts)

    names = [corpus.name for corpus in saved.corpora]
    removed = [changed("removed", name, one) for name, one in zip(names, before, strict=True) if one not in now]
    added = [changed("added", name, one) for name, one in zip(plan.names, now, strict=True) if one not in read]
    balance = replace(
        Balance.at_start(plan.seed, plan.num_streams, len(now)),
        counts=np.array([go_on.get(corpus, unread) for corpus in now], np.int64),
    )
    adopted = replace(cursor, segments=(), balance=balance, changes=(*cursor.changes, *removed, *added))
    return adopted.rescheduled(plan.schedule)


def _saved_pairs(pairs: Sequence[tuple[int, int]], *, num_columns: int) -> Any:
    """Pairs as they are; more than 32 as a text of differences, so that states stay small."""
    if len(pairs) <= _MAX_PAIRS:
        return pairs
    numbers = np.array(pairs, np.int64).reshape(-1, num_columns)
    steps = np.diff(numbers, axis=0, prepend=0).astype("<i8").reshape(-1, 2)
    # first members before second ones, and low bytes before high ones, which compresses best
    content = steps.T.copy().view(np.uint8).reshape(-1, 8).T.tobytes()
    return base64.b64encode(zlib.compress(content, 9)).decode()


def _pairs(saved: Pairs, *, num_columns: int) -> tuple[tuple[int, int], ...]:
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
