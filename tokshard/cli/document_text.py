"""Documents, matches and differences, as text for people and as plain values for ``--json``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from tokshard.format.corpus import Corpus
from tokshard.inspect.corpus.documents import DocumentView, Match, TokenPiece
from tokshard.wording import counted, one_line, printable

if TYPE_CHECKING:
    from tokshard.inspect.corpus.difference import Difference  # imports plans, too

_BOUNDARY = "\u2502"
_OPEN, _CLOSE = "\u27e6", "\u27e7"
"""Around tokens that are trained."""


def view_text(view: DocumentView) -> str:
    """A document, its control characters escaped; if it was split into tokens, with a bar after each."""
    place = f"record {view.record_number:,} of {one_line(view.source)}"
    lines = [f"document {view.document:,}: {counted(view.num_tokens, 'token')}, {place}"]
    if view.loss_spans is not None:
        trained = counted(sum(stop - start for start, stop in view.loss_spans), "trained token")
        marks = f", between {_OPEN} and {_CLOSE}" if view.pieces and view.loss_spans else ""
        lines.append(f"loss: {trained} in {counted(len(view.loss_spans), 'span')}{marks}")
    lines += [f"{one_line(name)}: {one_line(str(value))}" for name, value in view.metadata.items()]
    more = " ..." if view.is_excerpt else ""
    lines.append(printable(bounded_text(view.pieces) + more if view.pieces else view.text))
    return "\n".join(lines)


def bounded_text(pieces: Iterable[TokenPiece]) -> str:
    """The text of pieces, with a bar after each, and what is trained in brackets."""
    parts = []
    for is_trained, run in itertools.groupby(pieces, lambda piece: bool(piece.is_trained)):
        text = "".join(piece.text + _BOUNDARY for piece in run)
        parts.append(f"{_OPEN}{text}{_CLOSE}" if is_trained else text)
    return "".join(parts)


def match_text(match: Match) -> str:
    """Two lines: where the match is, and its context, with the match in angle quotes."""
    more = "" if match.count == 1 else f", {match.count:,} places"
    name = "" if match.id is None else f" ({one_line(str(match.id))})"
    return (
        f"document {match.document:,}{name}: record {match.record_number:,} of {one_line(match.source)}{more}\n"
        f"    {one_line(match.before)}\u00bb{one_line(match.text)}\u00ab{one_line(match.after)}"
    )


def difference_text(difference: Difference, labels: tuple[str, str]) -> str:
    """The verdict, and three lines for each field that differs."""
    lines = [
        f"{'equal' if difference.is_equal else 'different'}: {difference.verdict}",
        *map(one_line, difference.notes),
    ]
    width = max(len(one_line(label)) for label in labels)
    for field, values in difference.fields.items():
        lines.append(one_line(field))
        lines += [
            f"  {one_line(label):<{width}}  {'(none)' if value is None else one_line(str(value))}"
            for label, value in zip(labels, values, strict=True)
        ]
    return "\n".join(lines)


def view_json(view: DocumentView) -> dict[str, Any]:
    """A document as plain values."""
    plain = asdict(view)
    del plain["pieces"]
    if view.pieces:
        plain["pieces"] = [
            {"ids": list(piece.ids), "text": piece.text}
            | ({} if piece.is_trained is None else {"is_trained": piece.is_trained})
            for piece in view.pieces
        ]
    plain["metadata"] = {name: plain_value(value) for name, value in view.metadata.items()}
    return plain


def plain_value(value: Any) -> Any:
    """A metadata value as JSON can hold it: numbers that are not finite become text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def match_json(match: Match, corpus: Corpus) -> dict[str, Any]:
    """A match as plain values."""
    return {"corpus": corpus.location, **asdict(match), "id": plain_value(match.id)}


def difference_json(difference: Difference) -> dict[str, Any]:
    """Differences as plain values."""
    return {
        "equal": difference.is_equal,
        "hashed": difference.is_hashed,
        "verdict": difference.verdict,
        "fields": {name: list(values) for name, values in difference.fields.items()},
        "notes": difference.notes,
    }
