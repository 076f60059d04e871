"""Finds the forms of input that a template takes, by rendering short conversations before the first record."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokshard.pipeline.encode.chat.records import Takes
from tokshard.pipeline.encode.chat.template import ChatTemplate

_ASKED, _ANSWERED = ("Harbour seven", "Mill nine"), ("Gate ten", "Wall two")
_NAME, _ARGUMENT, _RESULT = "find_ferry", "Quay four", "Pier five"
_TOOL = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Finds it.",
        "parameters": {
            "type": "object",
            "properties": {"q": {"type": "string", "description": "Where."}},
            "required": ["q"],
        },
    },
}
_ID = "call00001"
"""Nine letters or digits: Mistral's templates take no other."""
_CALLS: Sequence[tuple[str | None, Any]] = (
    ("", {"q": _ARGUMENT}),
    (None, {"q": _ARGUMENT}),
    ("", f'{{"q": "{_ARGUMENT}"}}'),
    (None, f'{{"q": "{_ARGUMENT}"}}'),
)
"""The content and the arguments of a message that calls a tool, the forms that transformers documents first."""


def takes_of(template: ChatTemplate) -> Takes:
    """The forms of input that a template takes. Costs 2 ms."""

    def shown(*messages: Mapping[str, Any], **others: Any) -> str:
        try:
            return template.render({"messages": list(messages), "tools": None, "documents": None, **others}).text
        except template.error:
            return ""

    def turns(asked: Any, answered: Any) -> tuple[Mapping[str, Any], ...]:
        return {"role": "user", "content": asked}, {"role": "assistant", "content": answered}

    def parts(*texts: str) -> list[dict[str, str]]:
        return [{"type": "text", "text": text} for text in texts]

    texts = (*_ASKED, *_ANSWERED)
    in_parts = shown(*turns(parts(*_ASKED), parts(*_ANSWERED)))
    has_parts = all(in_parts.count(text) == 1 for text in texts) and re.search(r"""["']type["']""", in_parts) is None
    joined = ["".join(_ASKED), "".join(_ANSWERED)]
    in_strings = shown(*turns(*joined))
    has_strings = all(in_strings.count(text) == 1 for text in joined)
    no_text, arguments = next(
        (
            given
            for given in _CALLS
            if _is_call_in(
                shown(*turns(_ASKED[0], given[0])[:1], *_call(*given), *turns(_ASKED[1], _ANSWERED[0]), tools=[_TOOL])
            )
        ),
        _CALLS[0],
    )
    told = {"role": "developer", "content": "Mole six"}
    return Takes(
        text=("either" if has_strings else "parts") if has_parts else "string",
        has_developer=told["content"] in shown(told, *turns(_ASKED[0], _ANSWERED[0])),
        has_objects=not isinstance(arguments, str),
        has_bare_tools=_NAME in shown(*turns(_ASKED[0], _ANSWERED[0]), tools=[_TOOL["function"]]),
        no_text=no_text,
        roles=frozenset(template.syntax.literals),
        words=template.syntax.names | frozenset(template.syntax.constants),
    )


def _call(content: str | None, arguments: Any) -> tuple[Mapping[str, Any], ...]:
    call = {"id": _ID, "type": "function", "function": {"name": _NAME, "arguments": arguments}}
    return (
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "content": _RESULT, "tool_call_id": _ID, "name": _NAME},
        {"role": "assistant", "content": _ANSWERED[1]},
    )


def _is_call_in(text: str) -> bool:
    r"""Whether a call is shown, and its arguments are no string of JSON in a string, such as ``"{\"q\": ..."``."""
    place = text.find(_ARGUMENT)
    return place > 0 and _NAME in text[:place] and "\\" not in text[place - 3 : place]
