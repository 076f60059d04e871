"""A document as the texts of its tokens."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from numpy.typing import NDArray

from tokshard.format.decode import Decode

BOUNDARY = "\u2502"
_BROKEN = "\ufffd"
_MAX_JOINED = 8


class TokenPiece(NamedTuple):
    """The text of one token, or of the few that spell a character together.

    Args:
        ids: of the tokens.
        text: what they add to the text before them.
    """

    ids: tuple[int, ...]
    text: str


def token_pieces(tokens: NDArray[Any], decode: Decode) -> list[TokenPiece]:
    """The pieces of a document in order; joined, their texts are the decoded document.

    Each piece is what decoding gives beyond the piece before, because decoders treat the start of a text differently.
    Costs two decodings of a few tokens per token.
    """
    ids = tokens.tolist()
    pieces: list[TokenPiece] = []
    before = start = 0  # the piece before, and the one that is being collected
    for stop in range(1, len(ids) + 1):
        context = decode(tokens[before:start]) if start > before else ""
        text = decode(tokens[before:stop])
        is_broken = text.endswith(_BROKEN) and stop < len(ids) and stop - start < _MAX_JOINED
        if is_broken or not text.startswith(context):
            if stop < len(ids) and stop - start < _MAX_JOINED:
                continue
            text, context = decode(tokens[start:stop]), ""
        pieces.append(TokenPiece(tuple(ids[start:stop]), text[len(context) :]))
        before, start = start, stop
    return pieces


def bounded_text(pieces: Iterable[TokenPiece]) -> str:
    """Pieces with a bar after each."""
    return "".join(piece.text + BOUNDARY for piece in pieces)
