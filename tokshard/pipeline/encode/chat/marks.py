"""Who wrote a control token: the template, or the record.

Characters of the record with which a control token could begin, end or be filled in are replaced before it is rendered.
So nothing that a template does with text puts such a token together: joins, `replace`, slices, changes of case.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

from tokshard.pipeline.encode.chat.records import ChatRecordError
from tokshard.pipeline.encode.chat.template import ChatTemplate
from tokshard.pipeline.encode.chat.tokens import alternatives

if TYPE_CHECKING:
    from tokshard.pipeline.encode.chat.sandbox import Rendered

READ_TOKEN = "chat template reads a control token of the text"

_STAND_INS = tuple(map(chr, chain(range(0x4DC0, 0x4E00), range(0x1D300, 0x1D357), range(0x100000, 0x10FFFE))))[:65_536]
"""Signs that stand for marked characters: no letters, no white space, and printed by Python as they are."""


class Author:
    """Renders conversations so that it is known which control tokens the template wrote.

    Args:
        special: control tokens that no text may make.
        others: control tokens that are not special. A template may look for them in texts, as for ``</think>``.
    """

    def __init__(self, template: ChatTemplate, special: Collection[str], others: Collection[str]) -> None:
        self._template = template
        written = [*template.syntax.literals, *template.written_variables()]
        self._marked = _marked_characters([*special, *others], written)
        self._constants = frozenset(template.syntax.constants) | template.syntax.names
        constants = (text.strip() for text in template.syntax.constants)
        sought = {
            text
            for text in constants
            if len(text) > 2
            and {text[0], text[-1]} <= self._marked
            and not any(text in token or token in text for token in special)
        }
        self._sought = alternatives({*others, *sought})

    def __call__(self, values: Mapping[str, Any]) -> tuple[Rendered, str]:
        """Render a conversation.

        Returns:
            The rendering, and its text in which each character that the record wrote, and that could be part of a
            control token, is another one. Both have the same length.

        Raises:
            ChatRecordError: what the template writes depends on these characters.
        """
        plain = self._template.render(values)
        marks = _Marks(self._marked, self._constants, plain.text)
        texts: list[str | None] = []
        # where the template looks for a token such as </think>, those of answers stay, or else those of all messages
        for kept, in_answers in ((None, None), (None, self._sought), (self._sought, self._sought)):
            marked = marks.mark(values, kept, in_answers)
            if marked is values:
                return plain, plain.text
            try:
                rendered = self._template.render(marked)
            except self._template.error:
                continue
            texts.append(marks.without(rendered.text))
            if texts[-1] == plain.text and rendered.spans == plain.spans:
                return plain, rendered.text
            if self._sought is None:
                break
        found = next((text for text in texts if text is not None), "")
        place = next((n for n, (a, b) in enumerate(zip(plain.text, found, strict=False)) if a != b), 0)
        raise ChatRecordError(
            READ_TOKEN,
            "what the template writes depends on a special token that is spelled in a message, or on one of "
            f"{' '.join(sorted(self._marked))} there, near {plain.text[max(0, place - 20) : place + 40]!r}",
        )


class _Marks:
    """Marks the characters of values. Costs 1 us for each text with such characters."""

    def __init__(self, characters: frozenset[str], constants: frozenset[str], text: str) -> None:
        free = iter(_STAND_INS) if text.isascii() else (sign for sign in _STAND_INS if sign not in text)
        self._pairs = [(character, next(free)) for character in sorted(characters)]
        # a template compares words, such as types, and names keys
        self._signs = [pair for pair in self._pairs if not pair[0].isalnum()]
        self._constants = constants

    def without(self, text: str) -> str:
        """A text that was marked, as it was."""
        for character, mark in self._pairs:
            text = text.replace(mark, character)
        return text

    def mark(self, value: Any, kept: re.Pattern[str] | None, in_answers: re.Pattern[str] | None) -> Any:
        """A value with marks; the value itself if there are none.

        Args:
            kept: finds what stays without a mark.
            in_answers: the same, in messages of the assistant.
        """
        if isinstance(value, str):
            return self._text(value, kept, self._signs if value in self._constants else self._pairs)
        if isinstance(value, list):
            items = [self.mark(item, kept, in_answers) for item in value]
            return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
        if isinstance(value, Mapping):
            kept = in_answers if value.get("role") == "assistant" else kept
            found = [
                (
                    self.mark(key, None, None),
                    self._text(item, None, self._signs)
                    if key == "role" and isinstance(item, str)
                    else self.mark(item, kept, in_answers),
                )
                for key, item in value.items()
            ]
            pairs = zip(found, value.items(), strict=True)
            return dict(found) if any(new[0] is not old[0] or new[1] is not old[1] for new, old in pairs) else value
        return value

    def _text(self, text: str, kept: re.Pattern[str] | None, pairs: Sequence[tuple[str, str]]) -> str:
        if kept is not None:
            borders = [0, *chain.from_iterable(found.span() for found in kept.finditer(text)), len(text)]
            return "".join(
                text[start:stop] if number % 2 else self._text(text[start:stop], None, pairs)
                for number, (start, stop) in enumerate(pairwise(borders))
            )
        for character, mark in pairs:
            if character in text:
                text = text.replace(character, mark)
        return text


def _marked_characters(tokens: Collection[str], written: Collection[str]) -> frozenset[str]:
    """The characters of a record that have to be marked.

    They are the first and the last of each token. If a template writes both ends of a token itself, such as ``<|`` and
    ``|>``, they are also the characters between.

    Args:
        written: all texts that the template writes of its own.
    """
    longest = max(map(len, tokens), default=0)
    begins = frozenset(text[:stop] for text in written for stop in range(1, min(len(text), longest) + 1))
    ends = frozenset(text[-size:] for text in written for size in range(1, min(len(text), longest) + 1))
    parts = frozenset(text for text in written if not text.isalnum())
    found = set[str]()
    for token in tokens:
        found |= {token[0], token[-1]}
        size = len(token)
        starts = [n for n in range(1, size) if token[:n] in ends or any(token[start:n] in parts for start in range(n))]
        stops = [
            n
            for n in range(1, size)
            if token[n:] in begins or any(token[n:stop] in parts for stop in range(n + 1, size))
        ]
        found |= {token[start] for start in starts if stops and start < stops[-1]}
    return frozenset(found)
