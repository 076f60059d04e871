"""The values of a row about its own ids: which of them are padding, and where documents begin.

Trainers save rows as they batch them: padded to one length, with an ``attention_mask``; or packed, with the position
of each id in its document (axolotl, TRL), with the length of each document (TRL), or with a mask that numbers the
documents of a row from 1 (LLaMA-Factory).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.tokens.batches import TokenBatch

MASK, POSITIONS, LENGTHS = "attention_mask", "position_ids", "seq_lengths"

ROW_FIELDS = (MASK, POSITIONS, LENGTHS)
"""Columns with a list for each row: the first two have a value for each id."""

WRONG_ROW = "padding or documents of the row do not fit"
"""Reason for a record whose values say nothing about its ids."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowValues:
    """The values of one of `ROW_FIELDS` in consecutive rows.

    Args:
        values: integers or booleans, one row after another.
        counts: int64 [rows]: the number of values in each.
        is_missing: bool [rows]: the row says nothing, so it is a document without padding.
    """

    values: NDArray[np.generic]
    counts: NDArray[np.int64]
    is_missing: NDArray[np.bool_]

    def of(self, start: int, stop: int) -> RowValues:
        """The values of the rows ``[start, stop)``."""
        first = int(self.counts[:start].sum())
        counts = self.counts[start:stop]
        values = self.values[first : first + int(counts.sum())]
        return RowValues(values=values, counts=counts, is_missing=self.is_missing[start:stop])


def documents_of_rows(batch: TokenBatch, found: Mapping[str, RowValues], delimiters: Sequence[int]) -> TokenBatch:
    """The ids of rows without their padding, cut where another document begins. Costs about 50 ns per token.

    Padding lies before or after a document.

    Args:
        batch: each of its documents is a row.
        found: some of `ROW_FIELDS`, with their values for these rows.
        delimiters: ids that end a document.

    Returns:
        A batch with as many documents, which has `cuts`, `padding`, and a problem for each row that contradicts itself.
    """
    counts = np.diff(batch.ends, prepend=0)
    rows = np.repeat(np.arange(len(counts)), counts)
    places = np.arange(len(rows)) - (batch.ends - counts)[rows]
    problems: dict[int, tuple[str, str]] = {}
    aligned: dict[str, NDArray[np.int64]] = {}
    for name, missing in ((MASK, np.ones(len(rows), np.int64)), (POSITIONS, places)):
        if name in found:
            aligned[name], wrong = for_each_id(name, found[name], counts, missing)
            problems |= wrong
    mask = aligned.get(MASK, np.ones(len(rows), np.int64))
    real = np.flatnonzero(mask)
    is_first = np.diff(rows[real], prepend=-1) != 0
    starts = is_first.copy()
    if LENGTHS in found:
        at, wrong = _starts_by_length(found[LENGTHS], np.bincount(rows[real], minlength=len(counts)))
        starts[at] = True
        problems |= wrong
    tokens = batch.tokens[real]
    ended = np.isin(tokens, delimiters)
    checks = [
        *(_number_documents(mask[real], is_first, starts) if MASK in found else ()),
        *(_restart(aligned[POSITIONS][real], is_first, starts, tokens, ended) if POSITIONS in found else ()),
    ]
    is_apart = np.diff(places[real], prepend=0) != 1
    is_hole = is_apart & ~starts & np.append(False, ~ended[:-1])
    checks.append((is_hole, f"{MASK} is 0 before token {{place}}, inside a document: padding is at its start or end"))
    wrong_ids = [(real[np.flatnonzero(is_wrong)], what) for is_wrong, what in checks]
    if batch.loss is not None:
        is_lost = (mask == 0) & (batch.loss > 0)
        wrong_ids.append(
            (np.flatnonzero(is_lost), f"token {{place}} is trained, and {MASK} is 0 there, as for padding")
        )
    for at, what in wrong_ids:
        for row, index in zip(*np.unique(rows[at], return_index=True), strict=True):
            values = {name: int(values[at[index]]) for name, values in aligned.items()}
            problems.setdefault(int(row), (WRONG_ROW, what.format(place=f"{int(places[at[index]]):,}", **values)))
    problems |= batch.problems
    is_good = ~np.isin(np.arange(len(counts)), list(problems))
    num_real = np.bincount(rows[real], minlength=len(counts)).astype(np.int64)
    return replace(
        batch,
        tokens=tokens,
        ends=np.cumsum(num_real),
        cuts=np.flatnonzero(starts & ~is_first & is_good[rows[real]]),
        padding=(counts - num_real) * is_good,
        problems=problems,
        loss=None if batch.loss is None else batch.loss[real],
    )


_Check = tuple[NDArray[np.bool_], str]
"""The wrong ids, and the message for the first in a row, with its place and the values of columns there."""


def _number_documents(
    numbers: NDArray[np.int64], is_first: NDArray[np.bool_], starts: NDArray[np.bool_]
) -> list[_Check]:
    """Add the starts of documents by a mask that is 1 for the first document of a row, 2 for the second."""
    steps = np.diff(numbers, prepend=0)
    is_next = ~is_first & (steps == 1)
    starts |= is_next
    is_wrong = np.where(is_first, numbers != 1, ~is_next & (steps != 0))
    expected = "expected 0 for padding and 1 for ids, or 1, 2, 3 ... for the documents of a row"
    return [(is_wrong, f"{MASK} is {{{MASK}}} at token {{place}}, {expected}")]


def _restart(
    positions: NDArray[np.int64],
    is_first: NDArray[np.bool_],
    starts: NDArray[np.bool_],
    tokens: NDArray[Any],
    ended: NDArray[np.bool_],
) -> list[_Check]:
    """Add the starts of documents by the positions of ids in them."""
    is_restart = positions == 0
    starts |= is_restart
    is_wrong = ~is_restart & (is_first | (np.diff(positions, prepend=0) != 1))
    expected = "expected 0 where a document begins, and one more at each id"
    # padding looks like documents of one and the same id, which does not end a document
    is_single = is_restart & np.append(starts[1:], True)
    is_same = np.append(False, (tokens[1:] == tokens[:-1]) & is_single[:-1] & ~ended[:-1])
    return [
        (is_wrong, f"{POSITIONS} is {{{POSITIONS}}} at token {{place}}, {expected}"),
        (
            is_single & is_same & ~is_first,
            f"{POSITIONS} is 0 at token {{place}} and before it, and both ids are equal: padding that no {MASK} shows",
        ),
    ]


def for_each_id(
    name: str,
    found: RowValues,
    counts: NDArray[np.int64],
    missing: NDArray[Any],
    *,
    reason: str = WRONG_ROW,
    may_miss: bool = True,
) -> tuple[NDArray[Any], dict[int, tuple[str, str]]]:
    """A value for each id, and the rows with more or fewer values than ids: their index to the reason and detail.

    Args:
        counts: int64 [rows]: ids of each row.
        missing: the values of rows that have none, or another number of them: [ids].
        may_miss: a row without values is right.
    """
    is_same = (found.counts == counts) & ~(found.is_missing & may_miss)
    if is_same.all():
        return found.values.astype(missing.dtype, copy=False), {}
    aligned = missing.copy()
    aligned[np.repeat(is_same, counts)] = found.values[np.repeat(is_same, found.counts)]
    return aligned, {
        row: (reason, f"{name} has {int(found.counts[row]):,} values for {int(counts[row]):,} ids")
        for row in np.flatnonzero(~is_same & ~(found.is_missing & may_miss)).tolist()
    }


def _starts_by_length(
    found: RowValues, counts: NDArray[np.int64]
) -> tuple[NDArray[np.int64], dict[int, tuple[str, str]]]:
    """Where documents begin, counted over the ids of all rows, and the rows with impossible lengths.

    Args:
        counts: int64 [rows]: ids of each row, without padding.
    """
    lengths = found.values.astype(np.int64)
    starts, problems = [np.empty(0, np.int64)], {}
    bounds = np.append(0, np.cumsum(found.counts)).tolist()
    firsts = (np.cumsum(counts) - counts).tolist()
    for row, first in enumerate(firsts):
        of_row = lengths[bounds[row] : bounds[row + 1]]
        if found.is_missing[row]:
            continue
        if int(of_row.sum()) == counts[row] and ((of_row > 0) & (of_row <= counts[row])).all():
            starts.append(first + np.cumsum(of_row) - of_row)
        else:
            said = f"{LENGTHS} of the row are {of_row[:8].tolist()}{', ...' if len(of_row) > 8 else ''}"
            detail = f"{said}, expected numbers above 0 whose sum is {int(counts[row]):,}, its ids"
            problems[row] = WRONG_ROW, detail
    return np.concatenate(starts), problems
