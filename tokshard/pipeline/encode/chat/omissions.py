"""Finds what a template leaves out of a conversation, by searching the rendered text for the values."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokshard.pipeline.encode.chat.records import Conversation

TEXT, REASONING, CALLS, TOOLS, DOCUMENTS = KINDS = ("text", "reasoning", "calls", "tools", "documents")
"""Parts that may be left out. The first three are of messages, the others of the whole conversation."""

OF_MESSAGES = frozenset({TEXT, REASONING, CALLS})

Omission = tuple[str, int]
"""One of `KINDS`, and the number of the message in the record; -1 for none."""


def omissions(conversation: Conversation, rendered: str) -> list[Omission]:
    """The parts of a conversation that its rendered text lacks, in the order of the messages.

    White space at both ends of a value does not count, and a value may be written as a string of JSON. A short text
    that is left out is not noticed if the same words stand elsewhere. Costs some 5 us for 2 kB in six messages.
    """
    values = conversation.values
    found: list[Omission] = []
    place = 0
    for number, message in zip(conversation.places, values["messages"], strict=True):
        content = message["content"]
        for text in [part["text"] for part in content] if isinstance(content, list) else [content]:
            if not text or not (text := text.strip()):
                continue
            here = rendered.find(text, place)  # texts mostly come in order, so all searches together read it once
            if here >= 0:
                place = here + len(text)
            elif not _has(rendered, text):
                found += [(kind, number) for kind in _halves(text, rendered)]
        if len(message) > _FEW_KEYS:
            found += [(kind, number) for kind in _beside_text(message, rendered)]
    return [*found, *((kind, -1) for kind in _beside_messages(values, rendered))]


_FEW_KEYS = 2
"""Most messages have a role and a content, and nothing else."""


def _beside_text(message: Mapping[str, Any], rendered: str) -> Iterator[str]:
    reasoning = message.get("reasoning_content")
    if reasoning is not None and not _has(rendered, reasoning.strip()):
        yield REASONING
    if not all(_has_call(rendered, call["function"]) for call in message.get("tool_calls", ())):
        yield CALLS


def _beside_messages(values: Mapping[str, Any], rendered: str) -> Iterator[str]:
    if values[TOOLS] is not None and not all(_has_leaf(rendered, _name_of(tool)) for tool in values[TOOLS]):
        yield TOOLS
    if values[DOCUMENTS] is not None and not all(
        _has_leaf(rendered, text) for one in values[DOCUMENTS] for text in one.values()
    ):
        yield DOCUMENTS


def _halves(text: str, rendered: str) -> Iterator[str]:
    """The missing kinds of a text, which templates cut into reasoning and answer at ``</think>``."""
    thought, mark, answer = text.rpartition("</think>")
    if not _has(rendered, answer.strip()):
        yield TEXT
    if mark and not _has(rendered, thought.strip().removeprefix("<think>").strip()):
        yield REASONING


def _has(rendered: str, text: str) -> bool:
    """Whether a text is there, as it is or inside a string of JSON."""
    if text in rendered:
        return True
    return any(json.dumps(text, ensure_ascii=is_ascii)[1:-1] in rendered for is_ascii in (False, True))


def _has_call(rendered: str, function: Mapping[str, Any]) -> bool:
    if function["name"] not in rendered:
        return False
    arguments = function["arguments"]
    if isinstance(arguments, str):
        return _has(rendered, arguments)
    return json.dumps(arguments, ensure_ascii=False) in rendered or all(
        _has_leaf(rendered, leaf) for leaf in _leaves(arguments)
    )


def _leaves(value: Any) -> Iterator[Any]:
    """The keys in a value, and the values in it that are neither lists nor objects."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield key
            yield from _leaves(item)
    elif isinstance(value, list):
        for item in value:
            yield from _leaves(item)
    else:
        yield value


def _has_leaf(rendered: str, value: Any) -> bool:
    """Whether a value is there. Booleans and nulls have many spellings, and are not looked for."""
    if isinstance(value, str):
        return _has(rendered, value.strip())
    return not isinstance(value, int | float) or isinstance(value, bool) or str(value) in rendered


def _name_of(tool: Mapping[str, Any]) -> Any:
    function = tool.get("function")
    return function.get("name") if isinstance(function, Mapping) else tool.get("name")
