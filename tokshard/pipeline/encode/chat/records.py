"""The normal form of conversations: from the fields and spellings of data sets to the values that a template gets.

recipes/guides/forms-of-conversations.md describes it for users.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import msgspec

from tokshard.errors import UNDECODABLE
from tokshard.pipeline.sources.chats import (
    COMPLETION,
    DOCUMENTS,
    HISTORY,
    KEYWORDS,
    MEDIA_FIELDS,
    MESSAGES,
    NO_CHAT,
    PAIR_FIELDS,
    PROMPT,
    SYSTEM,
    SYSTEM_PROMPT,
    TOOLS,
    TURNS,
)

MALFORMED_CHAT = "not a conversation"
PREFERENCES = "preference pair"
MEDIA = "images or audio"

_CALL = "function_call"
_ROLES = {
    **dict.fromkeys(("user", "human"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "ai", "bot"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "tool_response", "ipython"), "tool"),
    **dict.fromkeys((_CALL, "tool_call"), _CALL),
    "system": "system",
    "developer": "developer",
}
"""Roles in every spelling, in lower case, to those that templates know; `_CALL` is an answer that calls a tool."""
_ROLE_KEYS = ("role", "from")
_TEXT_KEYS = ("content", "value", "text")
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""The names of a field; templates read the first two of them."""
_PLAIN_ROLES, _PLAIN_KEYS = frozenset({"user", "assistant", "system", "tool"}), frozenset({"role", "content"})
_KNOWN_KEYS = frozenset({"role", "content", "name", "tool_calls", "tool_call_id", *_REASONING})
_OF_FORM = frozenset({*_ROLE_KEYS, *_TEXT_KEYS})
_PARTS_OF_TEXT = frozenset({"text", "input_text", "output_text"})
_PARTS_OF_THINKING = frozenset({"thinking", "reasoning"})
_KINDS_OF_MEDIA = ("image", "audio", "video", "file")
_ARGUMENTS = ("arguments", "parameters", "input")
_OF_CALL = frozenset({"type", "id", "index", "function"})
_MAX_WEIGHT = 1_000_000
_FORMS = (MESSAGES, TURNS, PROMPT, COMPLETION, *PAIR_FIELDS)
"""Fields that hold a conversation, in order of preference; those of pairs are never read."""
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
class Takes:
    """The forms of input that a template takes, where templates differ. `probe.takes_of` finds them.

    Args:
        text: ``string``: parts of a text are joined; ``either``: they stay parts; ``parts``: a string becomes one.
        has_developer: it writes messages of the role ``developer``; else they become those of ``system``.
        has_objects: it takes the arguments of calls as objects, not as strings of JSON.
        has_bare_tools: it takes a tool without ``"type": "function"`` around it; else that is put around it.
        no_text: the content of a message that has calls and no text.
        roles: roles that it names besides those that all know.
        words: its names and strings, among them the keys that it reads; None: not known.
    """

    text: Literal["string", "either", "parts"] = "string"
    has_developer: bool = True
    has_objects: bool = True
    has_bare_tools: bool = True
    no_text: str | None = ""
    roles: frozenset[str] = frozenset()
    words: frozenset[str] | None = None


DEFAULT_TAKES = Takes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """A conversation as a template gets it.

    Args:
        values: ``messages``, ``tools``, ``documents``, and variables that the record adds.
        weights: weight of each message of the assistant, 0 if it is not to be learned; None if the record has none.
        places: the number of each message in the record; -1 for one that is not among its messages.
        unread: keys of messages, and variables of the template, that nothing reads.
    """

    values: Mapping[str, Any]
    weights: tuple[float | None, ...]
    places: tuple[int, ...]
    unread: frozenset[str] = frozenset()


def conversation(record: Mapping[str, Any], takes: Takes = DEFAULT_TAKES) -> Conversation:
    """Read a record.

    ``messages`` come first, then ``conversations``, then ``prompt`` and ``completion``. Where an object or a list is
    meant, a string is read as JSON. A null, an empty list and an empty string stand for a key that is not there.

    Raises:
        ChatRecordError: it is not a conversation, or one that cannot be learned from text alone.
    """
    record = {name: value for name, value in _without_nulls(record).items() if not _is_absent(name, value)}
    if any(name in record for name in PAIR_FIELDS) and MESSAGES not in record and TURNS not in record:
        raise ChatRecordError(
            PREFERENCES, "it has chosen and rejected answers; a corpus holds conversations to imitate, not pairs"
        )
    media = next((name for name in MEDIA_FIELDS if record.get(name)), None)
    if media is not None:
        raise ChatRecordError(MEDIA, f"it has {media}; a corpus holds text alone")
    turns = _with_what_is_beside(record, list(_turns(record)))
    keywords = _decoded(record.get(KEYWORDS, {}), KEYWORDS)
    if not isinstance(keywords, dict) or not _RESERVED.isdisjoint(keywords):
        raise ChatRecordError(MALFORMED_CHAT, f"{KEYWORDS} is {keywords!r:.80}, expected variables of the template")
    messages: list[dict[str, Any]] = []
    weights: list[float | None] = []
    is_given = MESSAGES in record, TURNS in record
    others = _FORMS[1 + is_given.index(True) :] if any(is_given) else ()
    unread = {name for name in others if record.get(name)}
    for turn in turns:
        message, weight = _message(turn, takes)
        messages.append(message)
        if message["role"] == "assistant":
            weights.append(0 if turn.is_prompt else weight)
        if takes.words is not None and not message.keys() <= _KNOWN_KEYS:
            unread.update(f"messages[].{name}" for name in message.keys() - _KNOWN_KEYS - takes.words)
        if takes.words is not None:
            for call in message.get("tool_calls", ()):
                unread.update(f"messages[].tool_calls[].{name}" for name in _others(call, takes.words))
    if takes.words is not None:
        unread.update(f"{KEYWORDS}.{name}" for name in keywords.keys() - takes.words)
    tools, documents = (_objects(record[name], name) if name in record else None for name in (TOOLS, DOCUMENTS))
    return Conversation(
        values={
            TOOLS: None if tools is None else [_tool(tool, takes) for tool in tools],
            DOCUMENTS: documents,
            **keywords,
            "messages": messages,
        },
        weights=tuple(weights),
        places=tuple(turn.place for turn in turns),
        unread=frozenset(unread),
    )


def _without_nulls(value: Any) -> Any:
    """A value without the keys that are null: all structs of a table have the same keys, and JSON is made of them."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _is_absent(name: str, value: Any) -> bool:
    """Whether the value of a field of a record stands for none. An empty prompt or completion is a text."""
    if isinstance(value, str):
        return value.strip() in ("", "null", "[]") and name not in (PROMPT, COMPLETION)
    return isinstance(value, list) and not value


@dataclass(frozen=True, slots=True)
class _Turn:
    """A message in the form of the record.

    Args:
        place: its number in the record; -1 for one that is not among its messages.
        is_prompt: it is not to be learned.
    """

    place: int
    found: dict[str, Any]
    is_prompt: bool

    def error(self, problem: str) -> ChatRecordError:
        where = f"message {self.place}" if self.place >= 0 else f"the {SYSTEM} prompt or the {HISTORY}"
        return ChatRecordError(MALFORMED_CHAT, f"{where} {problem}")


def _turns(record: Mapping[str, Any]) -> Iterator[_Turn]:
    """The messages, wherever the record has them."""
    for name in (MESSAGES, TURNS):
        if name in record:
            for place, found in enumerate(_objects(record[name], name)):
                yield _Turn(place, found, is_prompt=False)
            return
    place = 0
    for name, role in ((PROMPT, "user"), (COMPLETION, "assistant")):
        if name not in record:
            raise ChatRecordError(MALFORMED_CHAT, f"it has no {name}" if record.get(PROMPT) else f"it has {NO_CHAT}")
        for found in _messages_of(record[name]) or [{"role": role, "content": record[name]}]:
            yield _Turn(place, found, is_prompt=name == PROMPT)
            place += 1


def _messages_of(value: Any) -> list[dict[str, Any]] | None:
    """The messages in a prompt or a completion; None if it is a text, which may begin like JSON."""
    try:
        found = _objects(value, "")
    except ChatRecordError:
        return None
    return found if all(not set(_ROLE_KEYS).isdisjoint(one) for one in found) else None


def _with_what_is_beside(record: Mapping[str, Any], turns: list[_Turn]) -> list[_Turn]:
    """The messages with the system prompt and the history that stand beside them."""
    if not turns:
        raise ChatRecordError(MALFORMED_CHAT, "it has no message")
    said = {name: record[name] for name in (SYSTEM, SYSTEM_PROMPT) if name in record}
    first = turns[:1] if str(_first(turns[0].found, _ROLE_KEYS)).lower() in (SYSTEM, "developer") else []
    for name, text in said.items():
        if not isinstance(text, str):
            raise ChatRecordError(MALFORMED_CHAT, f"{name} is {text!r:.80}, expected a text")
    own = "".join(_text(first[0])[0] or "") if said and first else ""
    texts = {*said.values(), own} - {""}
    if len(texts) > 1:
        names = [*said, *("message 0" for _ in first)]
        raise ChatRecordError(MALFORMED_CHAT, f"it has several system prompts: {' and '.join(names)} differ")
    before, turns = first, turns[len(first) :]
    if said and not own:
        before = [_Turn(-1, {"role": SYSTEM, "content": texts.pop()}, is_prompt=False)]
    is_prompt = PROMPT in record and MESSAGES not in record and TURNS not in record
    history = _decoded(record.get(HISTORY) or [], HISTORY)
    for pair in history if isinstance(history, list) else [history]:
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise ChatRecordError(MALFORMED_CHAT, f"{HISTORY} has {pair!r:.80}, expected pairs of question and answer")
        for role, text in zip(("user", "assistant"), pair, strict=True):
            before.append(_Turn(-1, {"role": role, "content": text}, is_prompt=is_prompt))
    return [*before, *turns]


def _first(found: Mapping[str, Any], names: Sequence[str]) -> Any:
    return next((found[name] for name in names if name in found), None)


def _decoded(value: Any, name: str) -> Any:
    """A list or an object; a string is read as JSON.

    Raises:
        ChatRecordError: the string is not JSON.
    """
    if not isinstance(value, str) or value.lstrip()[:1] not in {"[", "{"}:
        return value
    try:
        return msgspec.json.decode(value)
    except UNDECODABLE as error:
        raise ChatRecordError(MALFORMED_CHAT, f"{name} is not JSON: {error}") from error


def _objects(value: Any, name: str) -> list[dict[str, Any]]:
    """A list of objects; the list or any object may be a string of JSON."""
    found: Any = _decoded(value, name)
    if isinstance(found, list):
        if any(isinstance(item, str) for item in found):
            found = [_decoded(item, name) for item in found]
        if found is not value:
            found = _without_nulls(found)
        if all(isinstance(item, dict) for item in found):
            return list(found)
    raise ChatRecordError(MALFORMED_CHAT, f"{name} is {found!r:.80}, expected a list of objects")


def _tool(tool: dict[str, Any], takes: Takes) -> dict[str, Any]:
    """A tool in the form that templates read."""
    if isinstance(tool.get("function"), str):
        tool = {**tool, "function": _decoded(tool["function"], "a tool's function")}
    is_bare = "name" in tool and "function" not in tool
    return {"type": "function", "function": tool} if is_bare and not takes.has_bare_tools else tool


def _message(turn: _Turn, takes: Takes) -> tuple[dict[str, Any], float | None]:
    """A message as templates read it, and its weight."""
    if turn.found.keys() == _PLAIN_KEYS and takes.text != "parts":  # nearly all have this form
        role, content = turn.found["role"], turn.found["content"]
        if isinstance(role, str) and isinstance(content, str) and role in _PLAIN_ROLES:
            return turn.found, None
    role = _role(turn, takes)
    text, thought = _text(turn)
    rest = {
        name: value
        for name, value in turn.found.items()
        if name not in _OF_FORM and not (isinstance(value, str | list) and not value)
    }
    calls = []
    if role == _CALL:
        role, text, calls = "assistant", "", _objects(_listed(text), f"the call in message {turn.place}")
    weight = _weight(turn, rest, role)
    _name_reasoning(turn, rest, thought)
    if "tool_calls" in rest:
        calls = _objects(rest.pop("tool_calls"), f"tool_calls of message {turn.place}")
    if isinstance(rest.get(_CALL), dict | str):  # OpenAI's older form
        calls = [*calls, {"function": rest.pop(_CALL)}]
    if calls:
        rest["tool_calls"] = [_call(turn, number, call, takes) for number, call in enumerate(calls)]
    if text is None and not calls:
        raise turn.error(f"has no text: {', '.join(_TEXT_KEYS)} are missing or null")
    return {"role": role, "content": _content(text, takes, has_calls=bool(calls)), **rest}, weight


def _role(turn: _Turn, takes: Takes) -> str:
    """The role of a message in the spelling of templates."""
    found = [turn.found[name] for name in _ROLE_KEYS if name in turn.found]
    roles = [_ROLES.get(role.lower(), role) if isinstance(role, str) else None for role in found]
    if not roles:
        raise turn.error("has no role")
    if roles[0] != roles[-1]:
        raise turn.error(f"has the roles {found[0]!r:.40} and {found[-1]!r:.40}")
    role = roles[0]
    if role is None or (role not in _ROLES and role not in takes.roles):
        raise turn.error(
            f"has the role {found[0]!r:.40}, expected one that the template names, or one of {', '.join(_ROLES)}"
        )
    return SYSTEM if role == "developer" and not takes.has_developer else role


def _text(turn: _Turn) -> tuple[str | list[str] | None, str]:
    """The text of a message, whole or in parts, None if it has none; and the thinking in its parts."""
    found = [turn.found[name] for name in _TEXT_KEYS if name in turn.found]
    if len(found) > 1:  # an empty one stands for none
        found = [text for text in found if text] or found[:1]
    if any(text != found[0] for text in found):
        raise turn.error(f"has {' and '.join(name for name in _TEXT_KEYS if turn.found.get(name))}, which differ")
    if not found or isinstance(found[0], str):
        return (found[0] if found else None), ""
    parts = [found[0]] if isinstance(found[0], dict) else found[0]
    if not isinstance(parts, list):
        raise turn.error(f"has the text {found[0]!r:.40}, expected a string, or a list of parts")
    texts, thoughts = [], []
    for part in parts:
        kind = str(part.get("type", "text")) if isinstance(part, dict) else "text"
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, dict) else None
        thought = part.get(kind, text) if kind in _PARTS_OF_THINKING else None
        if isinstance(thought, str | list):
            inner, deeper = _text(replace(turn, found={"content": thought}))
            thoughts += [*(inner or ""), deeper]
        elif kind in _PARTS_OF_THINKING and part.keys() == {"type"}:
            continue  # it holds nothing
        elif kind in _PARTS_OF_TEXT and isinstance(text, str):
            texts.append(text)
        elif any(medium in kind.lower() for medium in _KINDS_OF_MEDIA):
            raise ChatRecordError(
                MEDIA, f"message {turn.place} has a part of type {kind!r:.40}; a corpus holds text alone"
            )
        else:
            raise turn.error(
                f"has a part {part!r:.60}, expected one of type 'text'; calls belong in tool_calls, and their results "
                "in messages of the role tool"
            )
    return texts, "".join(thoughts)


def _listed(text: str | list[str] | None) -> Any:
    """The call or calls in a message of the role `_CALL`."""
    found = _decoded(text if isinstance(text, str) else "".join(text or ()), _CALL)
    return [found] if isinstance(found, dict) else found


def _content(text: str | list[str] | None, takes: Takes, *, has_calls: bool) -> Any:
    """The text as the template takes it."""
    if has_calls and not text:
        return takes.no_text
    if takes.text == "string" or (takes.text == "either" and isinstance(text, str)):
        return text if isinstance(text, str) else "".join(text or ())
    return [{"type": "text", "text": part} for part in ([text] if isinstance(text, str) else text or [])]


def _name_reasoning(turn: _Turn, rest: dict[str, Any], thought: str) -> None:
    """Give the reasoning of a message the names by which templates read it."""
    said = [rest[name] for name in _REASONING if name in rest] + [thought] * bool(thought)
    if not said:
        return
    if any(one != said[0] for one in said):
        raise turn.error("has reasoning under several names, which differ")
    if not isinstance(said[0], str):
        raise turn.error(f"has the reasoning {said[0]!r:.40}, expected a text")
    rest |= {"thinking": said[0], "reasoning_content": said[0]}


def _call(turn: _Turn, number: int, call: dict[str, Any], takes: Takes) -> dict[str, Any]:
    """A call of a tool, whose arguments are an object, or a string of JSON for a template that takes these."""
    where = f"call {number} of message {turn.place}"
    function = _decoded(call["function"], f"the function of {where}") if "function" in call else call
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise turn.error(f"has the call {call!r:.60}, expected the name of a function")
    is_around = function is not call
    holders, said = [function, call] if is_around else [call], []
    for value in (holder[name] for holder in holders for name in _ARGUMENTS if name in holder):
        arguments = _decoded(value, f"the arguments of {where}") if not isinstance(value, str) or value.strip() else {}
        if not isinstance(arguments := {} if arguments is None else arguments, dict):
            raise turn.error(f"has the arguments {arguments!r:.60} in call {number}, expected an object")
        said.append(arguments)
    found = [arguments for arguments in said if arguments] or [{}]
    if any(arguments != found[0] for arguments in found):
        raise turn.error(f"has several arguments in call {number}, which differ: {found[0]!r:.60} and others")
    given: Any = found[0] if takes.has_objects else json.dumps(found[0], ensure_ascii=False)
    outside = {
        name: value for name, value in call.items() if name in ("id", "type") or (is_around and name not in _ARGUMENTS)
    }
    inside = {
        "arguments" if name in _ARGUMENTS else name: value
        for name, value in function.items()
        if is_around or name not in outside
    }
    return {"type": "function", **outside, "function": {**inside, "arguments": given}}


def _others(call: Mapping[str, Any], words: frozenset[str]) -> frozenset[str]:
    """The keys of a call, and of its function, that neither the normal form nor the template knows."""
    return frozenset((call.keys() - _OF_CALL) | (call["function"].keys() - {"name", "arguments"})) - words


def _weight(turn: _Turn, rest: dict[str, Any], role: str) -> float | None:
    """The weight in ``weight`` or ``train``, which no template is to see; None if there is none."""
    said = [value for value in (rest.pop("weight", None), rest.pop("train", None)) if value is not None]
    if not said:
        return None
    if any(not isinstance(value, int | float) or not 0 <= value <= _MAX_WEIGHT or value != said[0] for value in said):
        raise turn.error(
            f"has the weight {' and '.join(f'{value!r:.40}' for value in said)}, expected one number from 0 to "
            f"{_MAX_WEIGHT:,}"
        )
    if said[0] > 0 and role != "assistant":
        raise turn.error(f"of role {role!r:.40} is to be trained; answers alone can be")
    if 0 < said[0] < 1 / _MAX_WEIGHT:
        raise turn.error(f"has the weight {said[0]!r}; give 0 to leave it out")
    return float(said[0])
