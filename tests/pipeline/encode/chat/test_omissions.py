"""What a template leaves out of a conversation is found in the text that it makes."""

from __future__ import annotations

import pytest
from hypothesis import given

from tests.pipeline.encode.chat.chats import records, template
from tests.pipeline.encode.chat.templates import BARE, BARS, CHATML, THINK, TURNS
from tokshard.pipeline.encode.chat.omissions import omissions
from tokshard.pipeline.encode.chat.probe import takes_of
from tokshard.pipeline.encode.chat.records import conversation

TEXTS = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
USERS = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"


@pytest.mark.parametrize("text", [CHATML, THINK, BARE, TURNS, BARS])
@given(record=records())
def test_templates_that_write_everything_leave_nothing_out(text, record):
    made = conversation(record)
    assert omissions(made, template(text, needs_spans=False).render(made.values).text) == []


# what a template takes

PARTS = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}{% endfor %}"
EITHER = "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
EITHER += "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"


def of_calls(arguments: str, *, where: str = " or []", check: str = "") -> str:
    """A template that writes calls."""
    start = "{% for m in messages %}" + check + "{{ m.content if m.content is string }}{% for c in m.tool_calls" + where
    return start + " %}{{ c.function.name }}{{ " + arguments + " }}{% endfor %}{% endfor %}"


ONCE = "{% if loop.previtem is defined and loop.previtem.role == m.role %}{{ raise_exception('') }}{% endif %}"
STRING = "'' + c.function.arguments"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (BARE, {"text": "string", "has_developer": True, "has_objects": True, "no_text": ""}),
        (EITHER, {"text": "either"}),
        (PARTS, {"text": "parts"}),
        (TEXTS, {"text": "string"}),
        (USERS, {"has_developer": False}),
        (of_calls("c.function.arguments | tojson"), {"has_objects": True}),
        (of_calls(STRING), {"has_objects": False, "no_text": ""}),
        (of_calls(STRING, check=ONCE), {"has_objects": False, "no_text": ""}),
        (of_calls(STRING, where=" if m.content is none"), {"has_objects": False, "no_text": None}),
        (BARE + "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}", {"has_bare_tools": False}),
        (CHATML, {"has_bare_tools": True, "no_text": ""}),
    ],
)
def test_what_a_template_takes_is_found_by_rendering(text, expected):
    found = takes_of(template(text, needs_spans=False))
    assert {name: getattr(found, name) for name in expected} == expected


def test_keys_of_messages_that_no_template_reads_are_unread():
    record = {"messages": [{"role": "user", "content": "q", "loss": 0, "score": 1}], "chat_template_kwargs": {"x": 1}}
    text = "{# For a loss on answers. #}{% if messages[0]['score'] %}no loss{% endif %}"
    made = conversation(record, takes_of(template(text, needs_spans=False)))
    assert made.unread == {"messages[].loss", "chat_template_kwargs.x"}
