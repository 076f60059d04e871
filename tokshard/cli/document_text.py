"""Documents, matches and differences as text."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from tokshard.cli.tables import table
from tokshard.inspect.corpus.documents import COLUMN_CHARACTERS, DocumentView, Match, TokenPiece
from tokshard.wording import counted, one_line, printable, shorten

if TYPE_CHECKING:
    from tokshard.inspect.corpus.difference import Difference  # imports plans, too

_MAX_VALUE = 40
_DERIVED = ("fingerprints.", "document_lengths.counts", "num_bytes", "shards")
"""Fields that follow from others, which only a program compares."""

_BOUNDARY = "\u2502"
_OPEN, _CLOSE = "\u27e6", "\u27e7"
"""Around targets."""


def view_text(view: DocumentView, *, is_whole: bool = False) -> str:
    """A document, its control characters escaped; if it was split into tokens, with a bar after each.

    Args:
        is_whole: long values of kept columns are shown as they are.
    """
    place = f"record {view.record_number:,} of {one_line(view.source)}"
    lines = [f"document {view.document:,}: {counted(view.num_tokens, 'token')}, {place}"]
    if view.loss_spans is not None:
        num_targets = sum(stop - start for start, stop in view.loss_spans)
        marks = f", between {_OPEN} and {_CLOSE}" if view.pieces and view.loss_spans else ""
        lines.append(f"targets: {num_targets:,} in {counted(len(view.loss_spans), 'loss span')}{marks}")
    kept = {name: value for name, value in view.metadata.items() if value is not None}
    texts = {name: one_line(str(value)) for name, value in kept.items()}
    lines += [
        f"{one_line(name)}: {text if is_whole else shorten(text, COLUMN_CHARACTERS)}" for name, text in texts.items()
    ]
    more = " ..." if view.is_excerpt else ""
    lines.append(printable(bounded_text(view.pieces) + more if view.pieces else view.text))
    return "\n".join(lines)


def bounded_text(pieces: Iterable[TokenPiece]) -> str:
    """The text of pieces, with a bar after each, and targets in brackets."""
    parts = []
    for is_target, run in itertools.groupby(pieces, lambda piece: bool(piece.is_target)):
        text = "".join(piece.text + _BOUNDARY for piece in run)
        parts.append(f"{_OPEN}{text}{_CLOSE}" if is_target else text)
    return "".join(parts)


def match_text(match: Match) -> str:
    """Two lines: where the match is, and its context, with the match in angle quotes."""
    more = "" if match.count == 1 else f", {match.count:,} places"
    name = "" if match.id is None else f" ({shorten(one_line(str(match.id)), COLUMN_CHARACTERS)})"
    return (
        f"document {match.document:,}{name}: record {match.record_number:,} of {one_line(match.source)}{more}\n"
        f"    {one_line(match.before)}\u00bb{one_line(match.text)}\u00ab{one_line(match.after)}"
    )


def difference_text(difference: Difference, labels: Sequence[str], *, is_verbose: bool, width: int) -> str:
    """The verdict, and a table of the fields that differ.

    Args:
        labels: of the two corpora or mixes.
        is_verbose: show also the fields that say nothing to people, and long values as they are, in lines of their own.
        width: characters per line of the table.
    """
    verdict = f"{'equal' if difference.is_equal else 'different'}: {difference.verdict}"
    parts = ["\n".join([verdict, *map(one_line, difference.notes)])]
    rows = [(one_line(name), *map(_value_text, values)) for name, values in difference.fields.items()]
    shown = [row for row in rows if max(map(len, row[1:])) <= _MAX_VALUE and not row[0].startswith(_DERIVED)]
    if shown:
        parts.append(table([("field", *map(one_line, labels)), *shown], width=width))
    hidden = [row for row in rows if row not in shown]
    if is_verbose:
        parts += ["\n".join([row[0], *(f"  {value}" for value in row[1:])]) for row in hidden]
    elif hidden:
        parts.append(f"different, too (see -v): {', '.join(row[0] for row in hidden)}")
    return "\n\n".join(parts)


def _value_text(value: Any) -> str:
    if value is None:
        return "(none)"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else one_line(str(value))
