"""From a conversation to a chat document: its ids, and the tokens that are targets."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle, pairwise
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.forking import cached_property
from tokshard.pipeline.encode.chat.marks import Author
from tokshard.pipeline.encode.chat.omissions import OF_MESSAGES, Omission, omissions
from tokshard.pipeline.encode.chat.records import MALFORMED_CHAT, ChatRecordError, Conversation
from tokshard.pipeline.encode.chat.template import ChatTemplate
from tokshard.pipeline.encode.chat.tokens import Engine, Part, Speller, alternatives
from tokshard.pipeline.encode.encoder import EncodingError
from tokshard.pipeline.sources.records import NOT_ENCODED

if TYPE_CHECKING:
    from tokshard.pipeline.encode.chat.sandbox import Rendered

Loss = Literal["assistant", "last", "all", "weighted"]
"""The targets: the parts that the template marks, the last of these, everything, or each answer by its weight."""
Span = tuple[int, int, float]
"""Start, stop and weight."""

NOTHING_TO_LEARN = "nothing to learn"
NOT_RENDERED = "chat template fails on the record"
NOT_SPELLED = "tokens do not spell the text"
SPLIT_CHARACTER = "loss begins inside a character"
UNMATCHED_SPANS = "answers and marked parts differ in number"
HAS_END = "document end in the conversation"
LEFT_OUT = "chat template leaves something out"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatDocument:
    """A conversation as a document of a corpus.

    Args:
        ids: uint32 [tokens], the document's end included.
        loss: uint32 [2 x spans]: start, stop, start, ... of the tokens that are targets; ascending, not touching,
            without the first token and the last.
        weights: float32 [spans].
        num_cut: spans that begin inside a token; the whole token is a target.
        omitted: what the template left out.
        unread: keys of messages, and variables of the template, that nothing read.
        stayed: tokens that a message spells and the template writes, of those that are not special: they are text.
    """

    ids: NDArray[np.uint32]
    loss: NDArray[np.uint32]
    weights: NDArray[np.float32]
    num_cut: int
    omitted: Sequence[Omission] = ()
    unread: frozenset[str] = frozenset()
    stayed: frozenset[str] = frozenset()


class ChatEncoder:
    """Makes documents of conversations, one after another. Costs some 150 us for 2 kB of text.

    Args:
        end_id: id of the token that ends each document.
        is_strict: refuse a conversation of which the template leaves something out.

    Attributes:
        control: tokens that are text where a message spells them.
    """

    def __init__(
        self, template: ChatTemplate, speller: Speller, *, loss: Loss, end_id: int, is_strict: bool = False
    ) -> None:
        self._is_strict = is_strict
        self._template, self._speller, self._loss, self._end_id = template, speller, loss, end_id
        literals = template.syntax.literals
        others = frozenset(
            token
            for token in speller.added
            if token not in speller.special and not token.isspace() and any(token in literal for literal in literals)
        )
        self._author = Author(template, speller.special, others)
        self.control = frozenset({*speller.special, *others})
        self._control = alternatives(self.control)
        self._others, self._spelled_others = others, alternatives(others)

    @cached_property
    def _literal(self) -> Engine:
        """Encodes text in which all control tokens are spelled, not meant."""
        return self._speller.engine(self._others)

    def __call__(self, conversation: Conversation) -> ChatDocument:
        """Make the document of a conversation.

        Raises:
            ChatRecordError: it becomes no document, with the reason.
        """
        try:
            rendered, marked = self._author(conversation.values)
            shown = rendered.text
            omitted = omissions(conversation, shown)
            if omitted and self._is_strict:
                raise ChatRecordError(LEFT_OUT, _left_out_text(omitted))
            spans = self._learned(conversation, rendered)
            ids, places, stayed = self._encoded(rendered.text, marked, spans)
        except self._template.error as error:
            raise ChatRecordError(NOT_RENDERED, str(error)) from error
        except EncodingError as error:
            raise ChatRecordError(NOT_ENCODED, str(error)) from error
        except UnicodeError as error:
            raise ChatRecordError(MALFORMED_CHAT, f"its text is not UTF-8: {error}") from error
        if (ids == self._end_id).any():
            raise ChatRecordError(HAS_END, "the template writes the token that ends documents into this conversation")
        loss, weights, num_cut = _tokens_of(self._speller.lengths(ids), places)
        if not len(loss):
            raise ChatRecordError(NOTHING_TO_LEARN, "no token of it is a target")
        return ChatDocument(
            ids=np.append(ids, np.uint32(self._end_id)),
            loss=loss,
            weights=weights,
            num_cut=num_cut,
            omitted=omitted,
            unread=frozenset(key for key in conversation.unread if f'"{key.rpartition(".")[2]}"' not in shown),
            stayed=stayed,
        )

    def _learned(self, conversation: Conversation, rendered: Rendered) -> Sequence[Span]:
        """The characters that are targets."""
        said = [1.0 if weight is None else weight for weight in conversation.weights]
        if self._loss != "weighted" and not {0, 1}.issuperset(said):
            found = next(weight for weight in said if weight not in (0, 1))
            raise ChatRecordError(MALFORMED_CHAT, f"an answer has the weight {found}, which --loss weighted would keep")
        if self._loss == "all":
            if 0 in said:
                raise ChatRecordError(
                    UNMATCHED_SPANS, "a message is not to be learned, and the loss is on everything that is rendered"
                )
            return [(0, len(rendered.text), 1.0)]
        if self._loss != "last" and {1}.issuperset(said):
            return [(*span, 1.0) for span in rendered.spans]
        if len(said) != len(rendered.spans):
            raise ChatRecordError(
                UNMATCHED_SPANS,
                f"it has {len(said)} messages of the assistant, and the template marks {len(rendered.spans)} parts",
            )
        wanted = list(zip(rendered.spans, said, strict=True))[-1 if self._loss == "last" else 0 :]
        return [(*span, weight) for span, weight in wanted if weight]

    def _encoded(
        self, text: str, marked: str, spans: Sequence[Span]
    ) -> tuple[NDArray[np.uint32], list[Span], frozenset[str]]:
        """The ids of a text, where the spans lie in the bytes that they spell, and the tokens that stayed text.

        Args:
            marked: the text in which the record spells no control token.
        """
        pieces = _pieces(text, marked, self._control, self._speller.strips)
        stayed = frozenset[str]()
        if marked is not text and self._spelled_others is not None:
            found = self._spelled_others.findall
            stayed = frozenset(token for _, piece, is_text in pieces if is_text for token in found(piece))
        engine = self._literal if stayed else self._speller.plain
        encoded = iter(
            engine.encode([piece for _, piece, is_text in pieces if is_text], has_start=bool(pieces and pieces[0][2]))
        )
        ids: list[NDArray[np.uint32]] = []
        parts: list[Part] = []
        for start, piece, is_text in pieces:
            if is_text is None:
                parts.append(Part(start, piece, None, b""))
                continue
            if not is_text:
                ids.append(np.array([self._speller.added[piece]], np.uint32))
                parts.append(Part(start, piece, None, piece.encode()))
                continue
            ids.append(next(encoded))
            found_parts = engine.parts(piece, start)
            parts += found_parts
            if self._speller.spell(ids[-1]) != b"".join(part.spelled for part in found_parts):
                raise ChatRecordError(NOT_SPELLED, f"the tokens of {piece!r:.60} are those of another text")
        borders = iter(_places(parts, [border for start, stop, _ in spans if start < stop for border in (start, stop)]))
        places = [(next(borders), next(borders), weight) for start, stop, weight in spans if start < stop]
        return np.concatenate(ids) if ids else np.empty(0, np.uint32), places, stayed


def _left_out_text(omitted: Sequence[Omission]) -> str:
    parts = [f"the {kind} of {_named(number)}" if kind in OF_MESSAGES else f"its {kind}" for kind, number in omitted]
    return f"the template does not write {' and '.join(parts[:_MOST_NAMED])}{', ...' if parts[_MOST_NAMED:] else ''}"


def _named(number: int) -> str:
    """A message by its number; what stands beside the messages has none."""
    return f"message {number}" if number >= 0 else "the system prompt or the history"


_MOST_NAMED = 4


def _places(parts: Sequence[Part], borders: Sequence[int]) -> Iterator[int]:
    """Where ascending characters of a text lie in the bytes that its tokens spell.

    Each border goes on from the one before, so the time is linear in the text.

    Raises:
        ChatRecordError: one of them lies inside what the tokenizer makes one character.
    """
    starts = [part.start for part in parts]
    ends = [0, *accumulate(len(part.spelled) for part in parts)]
    number, done, at = -1, 0, 0
    for border in borders:
        now = max(0, bisect_right(starts, border) - 1)
        if now != number:
            number, done, at = now, 0, 0
        part = parts[number]
        more = part.spell(done, border - part.start)
        if not part.spelled.startswith(more, at):
            raise ChatRecordError(
                SPLIT_CHARACTER, f"it begins or ends in the middle of {part.text[max(0, done - 20) :]!r:.60}"
            )
        done, at = border - part.start, at + len(more)
        yield ends[number] + at


_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(map(chr, range(0x2000, 0x200B)))
"""What tokenizers drop beside added tokens: Unicode's property of this name, less than `str.isspace`."""


def _pieces(
    text: str, marked: str, control: re.Pattern[str] | None, strips: Mapping[str, tuple[bool, bool]]
) -> list[tuple[int, str, bool | None]]:
    """A text cut at its control tokens: where each piece begins, the piece, and whether it is text.

    None in place of the last: it is white space that the control token beside it drops.
    """
    tokens = [found.span() for found in control.finditer(marked)] if control is not None else []
    borders, drops_after = [0], False
    for start, stop in [*tokens, (len(text), len(text))]:
        drops_before, drops_next = strips.get(text[start:stop], (False, False))
        begin = start - len(text[borders[-1] : start].lstrip(_WHITE_SPACE)) if drops_after else borders[-1]
        end = begin + len(text[begin:start].rstrip(_WHITE_SPACE)) if drops_before else start
        borders += [begin, end, start, stop]
        drops_after = drops_next
    pairs = zip(pairwise(borders), cycle((None, True, None, False)))
    return [(start, text[start:stop], kind) for (start, stop), kind in pairs if start < stop]


def _tokens_of(
    lengths: NDArray[np.int64], places: Sequence[Span]
) -> tuple[NDArray[np.uint32], NDArray[np.float32], int]:
    """The tokens that have a byte in a span, the weights of their spans, and how many begin inside a token.

    Args:
        lengths: int64 [tokens]: bytes of each.
        places: ascending spans of bytes. A token of two spans has the weight of the first.
    """
    ends = np.cumsum(lengths)
    starts = ends - lengths
    loss: list[int] = []
    weights: list[float] = []
    num_cut = 0
    for start, stop, weight in places:
        if start >= stop:
            continue
        first, last = int(ends.searchsorted(start, "right")), int(starts.searchsorted(stop, "left"))
        num_cut += int(starts[first]) < start
        first = max(first, loss[-1] if loss else 1)  # nothing predicts the first token
        if first >= last:
            continue
        if loss and first == loss[-1] and weight == weights[-1]:
            loss[-1] = last
        else:
            loss += [first, last]
            weights.append(weight)
    return np.array(loss, np.uint32), np.array(weights, np.float32), num_cut
