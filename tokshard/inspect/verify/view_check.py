"""Checks of the table of a view: its order, and the bounds of its base. The rest is checked as of any corpus."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.kept import ranges_of
from tokshard.format.view import KeptDigest, View
from tokshard.inspect.verify.shard_check import Problem, ShardFindings

_ROWS_AT_ONCE = 1 << 20


def check_shards(view: View) -> Iterator[ShardFindings]:
    """What the table says of each shard. Reads the bounds of its documents in the base, and no tokens."""
    for index in range(len(view.shards)):
        yield _findings(view, index)
        view.close()


def view_fingerprint(view: View) -> str:
    """The content fingerprint of the documents that the table names."""
    digest = KeptDigest(view.base.fingerprint)
    for ((starts, stops),) in ranges_of([view.kept]):
        digest.add(starts, stops)
    return digest.finish(view.num_documents, view.num_tokens)


def order_faults(view: View) -> Iterator[Problem]:
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
