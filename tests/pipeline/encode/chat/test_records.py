"""Records as data sets have them, and the conversations that they are."""

from __future__ import annotations

from typing import Any

import pytest

from tokshard.pipeline.encode.chat.records import (
    ChatRecordError,
    Takes,
    conversation,
)

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
PART = {"type": "text", "text": "q"}
BOTH = [ASKED, ANSWERED]
SYSTEM = {"role": "system", "content": "s"}


CALL = {"type": "function", "function": {"name": "f", "arguments": {"q": "ü"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


def test_a_template_gets_what_it_takes():
    parts = [PART, {"type": "text", "text": "r"}]
    record = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, CALLED]}

    def given(**takes: Any) -> list[Any]:
        _, asked, called = conversation(record, Takes(**takes)).values["messages"]
        return [asked["content"], called["content"], called["tool_calls"][0]["function"]["arguments"]]

    assert given() == ["qr", "", {"q": "ü"}]
    assert given(text="either", has_objects=False, no_text=None) == [parts, None, '{"q": "ü"}']
    assert conversation({"messages": BOTH}, Takes(text="parts")).values["messages"][1]["content"] == [
        {"type": "text", "text": "a"}
    ]
    told = conversation(record, Takes(has_developer=False)).values["messages"][0]
    assert told == SYSTEM
    narrator = {"messages": [{"role": "narrator", "content": "n"}, ANSWERED]}
    assert conversation(narrator, Takes(roles=frozenset({"narrator"}))).values["messages"][0]["role"] == "narrator"
    assert conversation({"messages": BOTH, "tools": [{"name": "f"}]}, Takes(has_bare_tools=False)).values["tools"] == [
        {"type": "function", "function": {"name": "f"}}
    ]


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_json_is_refused(weight):
    with pytest.raises(ChatRecordError, match="expected one number from 0 to"):
        conversation({"messages": [{**ANSWERED, "weight": weight}]})
