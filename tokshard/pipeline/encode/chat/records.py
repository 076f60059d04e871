"""From a record to a conversation: the fields that data sets use, and which messages are to be learned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokshard.errors import UNDECODABLE
from tokshard.pipeline.sources.chats import (
    COMPLETION,
    DOCUMENTS,
    KEYWORDS,
    MEDIA_FIELDS,
    MESSAGES,
    NO_CHAT,
    PAIR_FIELDS,
    PROMPT,
    TOOLS,
    TURNS,
)

MALFORMED_CHAT = "not a conversation"
PREFERENCES = "preference pair"
MEDIA = "images or audio"

_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "developer",
    "tool": "tool",
    "observation": "tool",
}
"""The values of ``from``."""
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a field; templates read the first two of them."""
_MAX_WEIGHT = 1_000_000
_RESERVED = frozenset({MESSAGES, "add_generation_prompt", TOOLS})


class ChatRecordError(Exception):
    """A record does not become a document.

    Args:
        reason: why, in the words by which such records are counted.
        detail: what was found, for a person.
    """

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason, self.detail = reason, detail


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """What a template is given.

    Args:
        values: ``messages``, ``tools``, ``documents``, and what the record adds.
        weights: of each message of the assistant, 0 if it is not to be learned; None where the record says nothing.
    """

    values: Mapping[str, Any]
    weights: tuple[float | None, ...]


def conversation(record: Mapping[str, Any]) -> Conversation:
    """Read a record.

    ``messages`` come first, then ``conversations``, then ``prompt`` and ``completion``. Lists may be strings of JSON.

    Raises:
        ChatRecordError: it is not a conversation, or one that cannot be learned from text alone.
    """
    if any(record.get(name) is not None for name in PAIR_FIELDS) and not (record.get(MESSAGES) or record.get(TURNS)):
        raise ChatRecordError(
            PREFERENCES, "it has chosen and rejected answers; a corpus holds conversations to imitate, not pairs"
        )
    media = next((name for name in MEDIA_FIELDS if record.get(name)), None)
    if media is not None:
        raise ChatRecordError(MEDIA, f"it has {media}; a corpus holds text alone")
    messages = [_message(place, found, is_prompt) for place, (found, is_prompt) in enumerate(_turns(record))]
    if not messages:
        raise ChatRecordError(MALFORMED_CHAT, "it has no message")
    keywords = _decoded(record, KEYWORDS) or {}
    if not isinstance(keywords, dict) or not _RESERVED.isdisjoint(keywords):
        raise ChatRecordError(MALFORMED_CHAT, f"{KEYWORDS} is {keywords!r:.80}, expected variables of the template")
    values = {name: _objects(record, name) for name in (TOOLS, DOCUMENTS)}
    weights = [weight for message, weight in messages if message["role"] == "assistant"]
    return Conversation(
        values={**values, **keywords, "messages": [message for message, _ in messages]}, weights=tuple(weights)
    )


def _turns(record: Mapping[str, Any]) -> Iterator[tuple[Any, bool]]:
    """The messages as the record has them, and whether each is of the prompt."""
    for name in (MESSAGES, TURNS):
        if record.get(name) is not None:
            yield from ((message, False) for message in _objects(record, name) or [])
            return
    for name, role in ((PROMPT, "user"), (COMPLETION, "assistant")):
        if record.get(name) is None:
            raise ChatRecordError(
                MALFORMED_CHAT,
                f"it has no {name}" if record.get(PROMPT) else f"it has {NO_CHAT}",
            )
        try:
            found = _decoded(record, name)
        except ChatRecordError:
            found = record[name]  # a text that begins as JSON does
        found = [{"role": role, "content": record[name]}] if not _is_messages(found) else found
        yield from ((message, name == PROMPT) for message in found)


def _is_messages(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(one, dict) and {"role", "from"} & one.keys() for one in found)


def _decoded(record: Mapping[str, Any], name: str) -> Any:
    """A value, of which a string is read as JSON if it begins as a list or object does."""
    value = record.get(name)
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{"}:
        return value
    try:
        return msgspec.json.decode(value)
    except UNDECODABLE as error:
        raise ChatRecordError(MALFORMED_CHAT, f"{name} is not JSON: {error}") from error


def _objects(record: Mapping[str, Any], name: str) -> list[dict[str, Any]] | None:
    found = _decoded(record, name)
    if found is None or (isinstance(found, list) and all(isinstance(item, dict) for item in found)):
        return found
    raise ChatRecordError(MALFORMED_CHAT, f"{name} is {found!r:.80}, expected a list of objects")


def _message(place: int, found: Mapping[str, Any], is_prompt: bool) -> tuple[dict[str, Any], float | None]:
    """A message as templates read it, and its weight."""
    message = dict(found)
    if "role" not in message and "from" in message:
        sender, message["content"] = message.pop("from"), message.pop("value", None)
        message = {"role": _ROLES.get(sender) if isinstance(sender, str) else None, **message}
        if message["role"] is None:
            raise ChatRecordError(
                MALFORMED_CHAT, f"message {place} is from {sender!r:.40}, expected one of {', '.join(_ROLES)}"
            )
    if not isinstance(message.get("role"), str):
        raise ChatRecordError(MALFORMED_CHAT, f"message {place} has no role")
    content = message.get("content")
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(part, str) and kind != "text":
            raise ChatRecordError(MEDIA, f"message {place} has a part of type {kind!r:.40}; a corpus holds text alone")
    weight = _weight(place, message)
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message, 0 if is_prompt else weight


def _weight(place: int, message: dict[str, Any]) -> float | None:
    """What ``weight`` or ``train`` say, which no template is to see."""
    said = [value for value in (message.pop("weight", None), message.pop("train", None)) if value is not None]
    if not said:
        return None
    if any(not isinstance(value, int | float) or not 0 <= value <= _MAX_WEIGHT or value != said[0] for value in said):
        raise ChatRecordError(
            MALFORMED_CHAT,
            f"message {place} has the weight {' and '.join(f'{value!r:.40}' for value in said)}, expected one number "
            f"from 0 to {_MAX_WEIGHT:,}",
        )
    if said[0] > 0 and message["role"] != "assistant":
        raise ChatRecordError(
            MALFORMED_CHAT, f"message {place} of role {message['role']!r:.40} is to be trained; answers alone can be"
        )
    if 0 < said[0] < 1 / _MAX_WEIGHT:
        raise ChatRecordError(MALFORMED_CHAT, f"message {place} has the weight {said[0]!r}; give 0 to leave it out")
    return float(said[0])
