"""Checks of a view: its table against the bounds of its base, and its numbers against both."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.files import read_file
from tokshard.format.kept import ranges_of
from tokshard.format.manifest import Base, Manifest
from tokshard.format.opening import open_base
from tokshard.format.view import KeptDigest, View
from tokshard.inspect.verify.manifest_check import Tally, check_sources, false_claims
from tokshard.inspect.verify.shard_check import Problem, ShardFindings, problem_of
from tokshard.store import Store

_ROWS_AT_ONCE = 1 << 20


def check_view(store: Store, manifest: Manifest, base: Base, *, has_sources: bool) -> Iterator[Problem]:
    """The problems of a view whose table has its hash. Reads the bounds of its documents in the base, and no tokens.

    Args:
        has_sources: whether the source table can be compared.
    """
    try:
        view = View(store, manifest, open_base(store, base), load_table=read_file)
    except CorpusError as error:
        yield problem_of(store, names.KEPT, error)
        return
    if is_broken := list(_order_faults(view)):
        yield from is_broken
        return
    tally = Tally(is_shuffled=True)
    for index in range(len(view.shards)):
        findings = _findings(view, index)
        yield from findings.problems
        yield from tally.add(findings)
        view.close()
    lengths, counts = manifest.document_lengths, np.trim_zeros(tally.lengths, "b").tolist()
    kept, digest = view.kept, KeptDigest(view.base.fingerprint)
    for ((starts, stops),) in ranges_of([kept]):
        digest.add(starts, stops)
    claims: list[tuple[str, object, object]] = [
        ("fingerprints.content", view.fingerprint, digest.finish(view.num_documents, view.num_tokens)),
    ]
    if tally.is_complete:
        stated = lengths.shortest, lengths.longest, lengths.counts
        claims.append(("document_lengths", stated, (tally.shortest, tally.longest, counts)))
    yield from false_claims(names.MANIFEST, claims)
    if has_sources:
        try:
            yield from check_sources(manifest, view.sources(), tally)
        except CorpusError as error:
            yield problem_of(store, names.SOURCE_TABLE, error)


def _order_faults(view: View) -> Iterator[Problem]:
    """Stretches without documents, out of order, or beyond the base."""
    kept = view.kept
    before = 0
    for first in range(0, len(kept), _ROWS_AT_ONCE):
        rows = np.arange(first, min(first + _ROWS_AT_ONCE, len(kept)) + 1)
        documents, positions = kept.documents[rows], kept.positions[rows]
        counts, lengths = np.diff(kept.numbers[rows]), np.diff(kept.tokens[rows])
        stops = documents[:-1] + counts
        is_wrong = (counts < 1) | (lengths < counts) | (documents[:-1] < np.append(before, stops[:-1]))
        if rows[-1] == len(kept):
            is_wrong[-1] |= (documents[-1], positions[-1]) != (stops[-1], positions[-2] + lengths[-1])
        for row in np.flatnonzero(is_wrong)[:1].tolist():
            yield Problem(
                names.KEPT,
                f"has in row {first + row} {counts[row]} documents from {documents[row]} on with {lengths[row]} "
                "tokens, expected documents after those of the row before, each with tokens",
            )
            return
        before = stops[-1]


def _findings(view: View, index: int) -> ShardFindings:
    """What the table says of one shard, compared with its bounds."""
    found, (base, number) = ShardFindings(), view.stored(index)
    name, first_token = base.shards[number].name, int(base.shards.first_tokens[number])
    try:
        shard, runs = view.shard(index), view.shards.runs(index)
        bounds = [shard.bounds(batch) for batch in range(shard.num_batches)]
    except CorpusError as error:
        found.problems.append(Problem(names.KEPT, f"cannot be compared with the base: {error.problem}"))
        return found
    _, starts, stops = (np.concatenate(parts) for parts in zip(*bounds, strict=True))
    found.lengths = stops - starts
    first, stop = view.shards.first_documents[index : index + 2].tolist()
    numbers = np.arange(first, stop)
    stretches = np.unique(view.kept.stretch_of_document(numbers))
    begins = view.kept.numbers[stretches] - first
    of_table = view.kept.positions[stretches], view.kept.tokens[stretches + 1] - view.kept.tokens[stretches]
    tokens = np.add.reduceat(found.lengths, begins)
    is_wrong = (of_table[0] != starts[begins] + first_token) | (of_table[1] != tokens)
    for wrong in np.flatnonzero(is_wrong)[:1].tolist():
        found.problems.append(
            Problem(
                names.KEPT,
                f"has {of_table[1][wrong]} tokens from {of_table[0][wrong]} on for documents of {name}, expected "
                f"{tokens[wrong]} from {starts[begins][wrong] + first_token}",
            )
        )
    sources = runs.source + view.provenance(first).source - int(runs.source[0])
    found.runs = np.stack([sources, runs.record, np.ones_like(sources), found.lengths], axis=1)
    return found
