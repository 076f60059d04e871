"""A slow model of the state of a job, STATE.md, written from the page alone.

What is refused as damage is not in it: tests/runtime/test_state.py.
"""

# ruff: noqa: N806 - the letters of the page

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests.spec.order import ORDER_VERSION, Corpus, Cut, Mixture, Plan, Run, Segment, Used, changed

# ----------------------------------------------------------------------------------------------- 1. The plan hash


def identity(used: Used) -> dict[str, Any]:
    """What is hashed of a corpus."""
    found = {"fingerprint": used.documents.content.hex(), "start_epoch": used.start_epoch, "take": float(used.take)}
    return found | ({"pack": "whole"} if used.pack == "whole" else {})


def identities(plan: Plan) -> list[dict[str, Any]]:
    return list(map(identity, plan.used))


def identity_of(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in ("fingerprint", "start_epoch", "take", "pack") if key in entry}


def plan_hash(fields: Sequence[int], identities: Sequence[dict[str, Any]]) -> str:
    packed = b"tokshard plan 1\n" + struct.pack("<6Q", *fields)
    for each in identities:
        packed += bytes.fromhex(each["fingerprint"]) + struct.pack("<Qd", each["start_epoch"], each["take"])
        packed += each.get("pack", "").encode("ascii")
    return hashlib.sha256(packed).hexdigest()


# -------------------------------------------------------------------------------------------- 2. The state


def schedule_hash(changes: Sequence[Segment]) -> str:
    packed = b"".join(struct.pack(f"<q{len(weights)}d", start, *weights) for start, weights in changes)
    return hashlib.sha256(b"tokshard schedule 1\n" + packed).hexdigest() if changes else ""


def planned_hash(plan: Plan, g: int) -> str:
    """Of what a plan sets from a sample on."""
    return schedule_hash(plan.segments_from(g))


def saved(run: Run) -> str:
    plan, mixture = run.plan, run.mixture.compacted(run.sample)
    later = [segment for segment in mixture.segments if segment[0] > run.sample]
    is_planned = later == plan.changes_after(run.sample)
    written = mixture.segments[: len(mixture.segments) - len(later)] if is_planned else mixture.segments
    facts: dict[str, Any] = {
        "tokshard_cursor": 1,
        "plan": plan_hash((ORDER_VERSION, plan.seed, run.first_seq_len, plan.B, plan.W, plan.C), identities(plan)),
        "order_version": ORDER_VERSION,
        "seed": plan.seed,
        "seq_len": run.first_seq_len,
        "block_tokens": plan.B,
        "window_blocks": plan.W,
        "num_streams": plan.C,
        "corpora": [{"name": used.name, **identity(used)} for used in plan.used],
        "sample": run.sample,
        "weights": [[start, list(weights)] for start, weights in written],
        "schedule": schedule_hash(later) if is_planned else None,
        "planned": planned_hash(plan, run.sample),
        "counts": mixture.counts,
        "remainders": mixture.remainders,
        "skipped": run.skipped,
        "changes": run.changes,
    }
    if run.lengths:
        facts["lengths"] = run.lengths
    if run.masks:
        facts["masks"] = run.masks
    body = json.dumps(facts, separators=(",", ":"))[:-1]
    return f'{body},"check":"{check(body)}"}}'


def check(body: str) -> str:
    return hashlib.sha256(body.encode("ascii")).hexdigest()[:16]


class RefusedError(ValueError):
    """A state that a plan does not resume."""


def refuse(is_so: bool, reason: str) -> None:
    if is_so:
        raise RefusedError(reason)


def resumed(
    plan: Plan,
    line: str,
    *,
    weights: str | None = None,
    corpora: str | None = None,
    seq_len: str | None = None,
    max_epochs: Sequence[float | None] | None = None,
) -> Run:
    """The run that a state describes, in a plan."""
    facts = json.loads(line)
    run = Run(plan, max_epochs)
    g = run.sample = facts["sample"]
    run.first_seq_len, run.changes = facts["seq_len"], facts["changes"]
    run.lengths, run.masks = facts.get("lengths", []), facts.get("masks", [])
    run.skipped = facts["skipped"]
    S = run.lengths[-1]["seq_len"] if run.lengths else run.first_seq_len
    is_same = [identity_of(entry) for entry in facts["corpora"]] == identities(plan)
    refuse(fields_of(facts) != (ORDER_VERSION, plan.seed, run.first_seq_len, plan.B, plan.W, plan.C), "other fields")
    refuse(S != plan.S and seq_len != "plan", "another seq_len; seq_len='plan' takes it")
    refuse(not is_same and corpora != "plan", "other corpora; corpora='plan' takes them")
    run.mixture = mixture_of(facts, plan, weights, is_same=is_same)
    if not is_same:
        take_other_corpora(run, facts)
    run.cuts = [cut_after(corpus, i, run.first_seq_len, run.lengths) for i, corpus in enumerate(plan.corpora)]
    refuse(plan.epochs is not None and run.mixture.counts_before(g) != [[g]], "a finite pass of another corpus")
    if S != plan.S:
        take_other_seq_len(run)
    return run


def fields_of(facts: dict[str, Any]) -> tuple[int, ...]:
    keys = ("order_version", "seed", "seq_len", "block_tokens", "window_blocks", "num_streams")
    return tuple(facts[key] for key in keys)


def mixture_of(facts: dict[str, Any], plan: Plan, weights: str | None, *, is_same: bool) -> Mixture:
    """The mixture of the state, and for the same corpora the changes of the plan behind it."""
    g = facts["sample"]
    segments = [(start, tuple(values)) for start, values in facts["weights"]]
    counts, remainders = (tuple(map(tuple, facts[key])) for key in ("counts", "remainders"))
    mixture = Mixture(plan.C, tuple(segments), counts, remainders)
    if is_same and weights == "plan":
        segments = [segment for segment in segments if segment[0] < g] + plan.segments_from(g)
    elif is_same:
        is_other = len(plan.used) > 1 and facts["planned"] != planned_hash(plan, g)
        refuse(is_other and weights != "cursor", "other weights from the sample on")
    if is_same and weights != "plan" and facts["schedule"] is not None:
        is_other = len(plan.used) > 1 and facts["schedule"] != schedule_hash(plan.changes_after(g))
        refuse(is_other, "other planned changes after the sample")
        segments += plan.changes_after(g)
    return replace(mixture, segments=tuple(segments))


# 3. Other corpora (and the end of section 4)


def take_other_corpora(run: Run, facts: dict[str, Any]) -> None:
    plan, g, none = run.plan, run.sample, (0,) * run.plan.C
    old = [identity_of(entry) for entry in facts["corpora"]]
    given = list(zip(*run.mixture.counts_before(g), strict=True))  # of each old corpus in each stream
    removed = [entry["identity"] for entry in run.changes if entry["action"] == "removed"]
    refuse(any(identity(used) in removed for used in plan.used), "a corpus that was removed before")
    places = [old.index(identity(used)) if identity(used) in old else None for used in plan.used]
    counts = [none if at is None else given[at] for at in places]
    run.changes = [
        *run.changes,
        *(
            change(g, "removed", entry["name"], identity_of(entry), each)
            for entry, each in zip(facts["corpora"], given, strict=True)
            if identity_of(entry) not in identities(plan)
        ),
        *(
            change(g, "added", used.name, identity(used), none)
            for used, at in zip(plan.used, places, strict=True)
            if at is None
        ),
    ]
    run.lengths = [
        {**entry, "bases": [[0 if at is None else each[at] for at in places] for each in entry["bases"]]}
        for entry in run.lengths
    ]
    run.mixture = Mixture.of_start(plan.seed, plan.C, plan.segments_from(g), tuple(zip(*counts, strict=True)))


def change(g: int, action: str, name: str, identity: dict[str, Any], counts: Sequence[int]) -> dict[str, Any]:
    return {"sample": g, "action": action, "name": name, "identity": identity, "counts": list(counts)}


# 4. "In the state"


def cut_after(corpus: Corpus, i: int, first_seq_len: int, lengths: Sequence[dict[str, Any]]) -> Cut:
    """The cut of corpus i after all changes of the length."""
    cut = Cut.of_start(corpus, first_seq_len)
    for entry in lengths:
        cut = changed(corpus, cut, [each[i] for each in entry["bases"]], entry["seq_len"])
    return cut


def take_other_seq_len(run: Run) -> None:
    bases = [list(counts) for counts in run.mixture.counts_before(run.sample)]
    entry = {"sample": run.sample, "seq_len": run.plan.S, "bases": bases}
    run.lengths = [*(each for each in run.lengths if each["sample"] < run.sample), entry]
    corpora = enumerate(run.plan.corpora)
    run.cuts = [cut_after(corpus, i, run.first_seq_len, run.lengths) for i, corpus in corpora]
