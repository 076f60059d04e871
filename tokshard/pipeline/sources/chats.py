"""The fields of conversations, and the conversation of a record as one text of JSON."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from tokshard.pipeline.sources.kept_values import is_missing, json_text

MESSAGES, TURNS, PROMPT, COMPLETION = "messages", "conversations", "prompt", "completion"
TOOLS, DOCUMENTS, KEYWORDS = "tools", "documents", "chat_template_kwargs"
SYSTEM, SYSTEM_PROMPT, HISTORY = "system", "system_prompt", "history"
MEDIA_FIELDS = ("images", "image", "audios", "audio", "videos", "video")
PAIR_FIELDS = ("chosen", "rejected")
_OWN_FIELDS = (MESSAGES, TURNS, PROMPT, COMPLETION, *PAIR_FIELDS, *MEDIA_FIELDS)
"""A record without any of them is no conversation."""
CHAT_FIELDS = (*_OWN_FIELDS, TOOLS, DOCUMENTS, KEYWORDS, SYSTEM, SYSTEM_PROMPT, HISTORY)
"""All fields of a record that say something about its conversation."""
NO_CHAT = "no messages, conversations, or prompt and completion"


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateSource:
    """A template before jinja2 reads it.

    Args:
        text: the template.
        variables: the tokenizer's own tokens by the names that templates have for them, such as ``bos_token``.
        date: for ``strftime_now``, in ISO form; None if none was given.
    """

    text: str
    variables: Mapping[str, str]
    date: str | None = None

    @property
    def sha256(self) -> str:
        """The checksum of the text and the variables."""
        return hashlib.sha256(json.dumps([self.text, dict(sorted(self.variables.items()))]).encode()).hexdigest()


def is_chat(names: Iterable[str]) -> bool:
    """Whether a record with these fields may be a conversation."""
    return not set(_OWN_FIELDS).isdisjoint(names)


def chat_text(record: Mapping[Any, Any]) -> str | None:
    """The conversation of a record of Python objects as JSON; None if it has none."""
    found = {name: record[name] for name in CHAT_FIELDS if not is_missing(record.get(name))}
    return json_text(found) if is_chat(found) else None
