"""Chat templates: where one comes from, and how it renders conversations."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, Any

from tokshard.errors import UsageError
from tokshard.extras import extra_module
from tokshard.pipeline.sources.chats import TemplateSource

if TYPE_CHECKING:
    from tokshard.pipeline.encode.chat.sandbox import Rendered, Syntax

_MARKERS = "TRL has templates with them for many models, in trl/chat_templates; give one with --chat FILE.jinja"
_OLDEST_JINJA = (3, 1, 6)
"""Older versions let templates out of the sandbox."""
VARIABLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Keys of ``tokenizer_config.json`` that templates read as variables."""


def own_template(config: Mapping[str, Any], file: str | None, location: str) -> str:
    """The chat template of a tokenizer.

    Args:
        config: content of ``tokenizer_config.json``.
        file: content of its ``chat_template.jinja``; it comes first. None if there is none.
        location: of the tokenizer, for messages.

    Raises:
        UsageError: there is none, or it has several.
    """
    found = file if file is not None else config.get("chat_template")
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        if len(named) > 1:
            raise UsageError(
                f"{location} has several chat templates: {', '.join(named)}",
                hint="write the one that you mean into a file, and give it with --chat FILE.jinja",
            )
        found = next(iter(named.values()), None)
    if not isinstance(found, str) or not found:
        raise UsageError(f"{location} has no chat template", hint="give one with --chat FILE.jinja")
    return found


def template_variables(config: Mapping[str, Any]) -> dict[str, str]:
    """The tokens that ``tokenizer_config.json`` names, as variables of a template."""
    found = {}
    for name in VARIABLES:
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


class ChatTemplate:
    """Renders conversations, one after another, in this process.

    Args:
        needs_spans: the targets are the parts that ``{% generation %}`` marks.
        max_characters: a longer text is refused.

    Raises:
        UsageError: jinja2 is missing or too old; the template is wrong, has no markers, or needs a date.
    """

    def __init__(self, source: TemplateSource, *, needs_spans: bool, max_characters: int) -> None:
        jinja2 = extra_module("jinja2", "a chat template needs jinja2, which is not installed", extra="chat")
        if tuple(map(int, jinja2.__version__.split(".")[:3])) < _OLDEST_JINJA:
            raise UsageError(
                f"jinja2 {jinja2.__version__} is installed, whose sandbox is known to be open",
                hint="pip install 'jinja2>=3.1.6'",
            )
        from tokshard.pipeline.encode.chat import sandbox

        self.error: type[Exception] = sandbox.RenderError
        self._variables = dict(source.variables)
        self._sandbox = sandbox.Sandbox(_date(source.date), max_characters)
        try:
            self._template, self.syntax = sandbox.parsed(self._sandbox, source.text)
        except SyntaxError as error:  # its line is one of the Python code that jinja2 makes
            raise UsageError(
                f"the chat template cannot be compiled: {error.msg}",
                hint="write {% break %} and {% continue %} outside of {% generation %}, and nest fewer than 20 loops",
            ) from error
        except (jinja2.TemplateError, sandbox.RenderError, RecursionError, ValueError) as error:
            line = getattr(error, "lineno", None)
            raise UsageError(
                f"the chat template cannot be read: {error}" + (f", line {line}" if line else ""),
                hint="correct the template, or give another one with --chat FILE.jinja",
            ) from error
        _check(self.syntax, source, needs_spans=needs_spans)

    def render(self, values: Mapping[str, Any]) -> Rendered:
        """Render a conversation.

        Args:
            values: ``messages``, ``tools``, ``documents``, and other variables of the record.

        Raises:
            RenderError: the template refuses it, fails on it, or writes too much. `error` is this class.
        """
        return self._sandbox.render(self._template, {**self._variables, **values, "add_generation_prompt": False})

    def written_variables(self) -> set[str]:
        """The tokens that it may write through variables."""
        return {token for name, token in self._variables.items() if name in self.syntax.names}


def _check(syntax: Syntax, source: TemplateSource, *, needs_spans: bool) -> None:
    if needs_spans and not syntax.has_spans:
        raise UsageError("the chat template marks nothing as {% generation %}", hint=_MARKERS)
    if needs_spans and syntax.is_nested:
        raise UsageError(
            "the chat template has {% generation %} in a macro, a set or a filter, where its place is not known",
            hint="write the block where the text is written",
        )
    if "strftime_now" in syntax.names and source.date is None:
        raise UsageError(
            "the chat template writes the date of today, so another day would make other tokens",
            hint="give the date with --chat-date, such as --chat-date 2026-11-23",
        )


def _date(text: str | None) -> datetime | None:
    try:
        return None if text is None else datetime.fromisoformat(text)
    except ValueError as error:
        raise UsageError(f"chat_date is {text!r:.60}", hint="give a date such as 2026-11-23") from error
