"""The fields of conversations, and a record of them as one text of JSON: what a build of chats reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MESSAGES, TURNS, PROMPT, COMPLETION = "messages", "conversations", "prompt", "completion"
TOOLS, DOCUMENTS, KEYWORDS = "tools", "documents", "chat_template_kwargs"
MEDIA_FIELDS = ("images", "image", "audios", "audio", "videos", "video")
PAIR_FIELDS = ("chosen", "rejected")
CHAT_FIELDS = (MESSAGES, TURNS, PROMPT, COMPLETION, TOOLS, DOCUMENTS, KEYWORDS, *PAIR_FIELDS, *MEDIA_FIELDS)
"""All fields of a record that say something about its conversation."""
NO_CHAT = "no messages, conversations, or prompt and completion"
OWN = "own"
"""Value of ``--chat`` that stands for the tokenizer's own template."""


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


def chat_text(record: Mapping[Any, Any]) -> str | None:
    """The conversation of a record of Python objects as JSON; None if it has none."""
    found = {name: without_padding(record[name]) for name in CHAT_FIELDS if record.get(name) is not None}
    return json.dumps(found, ensure_ascii=False, default=str) if found else None


def without_padding(value: Any) -> Any:
    """A value of a table without the nulls that stand for keys that a struct does not have.

    All structs of a column have the same keys, so a null and a missing key look alike there. The content of a message
    stays: templates tell it from a missing one.
    """
    if isinstance(value, list | tuple):
        return [without_padding(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: without_padding(item)
        for key, item in value.items()
        if item is not None or (key == "content" and "role" in value)
    }
