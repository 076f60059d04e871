"""Single documents of a corpus, for a person to read."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.decode import Decode
from tokshard.format.tables import SourceInfo
from tokshard.inspect.corpus.pieces import TokenPiece, bounded_text, token_pieces
from tokshard.inspect.corpus.summary import source_name
from tokshard.inspect.terminal import one_line, printable
from tokshard.wording import counted

_EXCERPT_TOKENS = 512
_EXCERPT_CHARACTERS = 300
_EXCERPT_LINES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentView:
    """One document, decoded.

    Args:
        document: its number in the corpus, counted from 0.
        source: the input that it comes from.
        record_number: of its record in that input, counted from 1, as in error messages and the rejects file.
        metadata: kept columns.
        text: what its tokens say, delimiters included.
        is_excerpt: the text is the start of the document and its last token.
        pieces: the text token by token, if that was asked for.
    """

    document: int
    num_tokens: int
    source: str
    record_number: int
    metadata: dict[str, Any]
    text: str
    is_excerpt: bool
    pieces: tuple[TokenPiece, ...] = ()


def spread(count: int, length: int) -> list[int]:
    """`count` indices of ``range(length)``, the same distance apart; all of them if there are no more."""
    if count >= length:
        return list(range(length))
    return [(2 * index + 1) * length // (2 * count) for index in range(count)]


def view_document(
    corpus: Corpus,
    sources: Sequence[SourceInfo],
    decode: Decode,
    index: int,
    *,
    as_excerpt: bool,
    with_boundaries: bool = False,
) -> DocumentView:
    """Read and decode a document.

    Args:
        as_excerpt: decode its start only: about 300 characters in at most 8 lines, and the last token.
        with_boundaries: also say where each token ends.

    Raises:
        UsageError: the corpus has no such document.
        CorpusError: the document cannot be read.
    """
    if index >= corpus.num_documents:
        raise UsageError(
            f"{corpus.directory} has no document {index}: it has {corpus.num_documents:,}, counted from 0",
            hint=f"give --document 0 to {corpus.num_documents - 1}",
        )
    tokens = corpus.document(index)
    place = corpus.provenance(index)
    text, is_excerpt = decode(tokens[:_EXCERPT_TOKENS] if as_excerpt else tokens), False
    if as_excerpt:
        start = "".join(text[:_EXCERPT_CHARACTERS].splitlines(keepends=True)[:_EXCERPT_LINES])
        if len(tokens) > _EXCERPT_TOKENS or len(start) < len(text):
            text, is_excerpt = f"{start.rstrip()} ... {decode(tokens[-1:])}", True
    pieces: list[TokenPiece] = []
    if with_boundaries:
        pieces = token_pieces(tokens[:_EXCERPT_TOKENS] if is_excerpt else tokens, decode)
    if is_excerpt:
        room = itertools.accumulate(len(piece.text) for piece in pieces)
        pieces = [piece for piece, stop in zip(pieces, room, strict=True) if stop <= _EXCERPT_CHARACTERS]
    return DocumentView(
        document=index,
        num_tokens=len(tokens),
        source=source_name(corpus.manifest, sources, place.source),
        record_number=place.record,
        metadata=corpus.metadata(index),
        text=text,
        is_excerpt=is_excerpt,
        pieces=tuple(pieces),
    )


def view_text(view: DocumentView) -> str:
    """A view as text, its control characters escaped."""
    place = f"record {view.record_number:,} of {one_line(view.source)}"
    lines = [f"document {view.document:,}: {counted(view.num_tokens, 'token')}, {place}"]
    lines += [f"{one_line(name)}: {one_line(str(value))}" for name, value in view.metadata.items()]
    more = " ..." if view.is_excerpt else ""
    lines.append(printable(bounded_text(view.pieces) + more if view.pieces else view.text))
    return "\n".join(lines)


def view_json(view: DocumentView) -> dict[str, Any]:
    """A view as plain values; JSON has no word for a number that is not finite, so that is text."""
    plain = asdict(view)
    del plain["pieces"]
    if view.pieces:
        plain["pieces"] = [{"ids": list(piece.ids), "text": piece.text} for piece in view.pieces]
    for name, value in view.metadata.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain["metadata"][name] = str(value)
    return plain
