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


@pytest.mark.parametrize("thinking", ["why so", [{"type": "text", "text": "why"}, " so"]])
def test_thinking_in_a_part_is_a_text_or_has_parts_of_its_own(thinking):
    parts = [{"type": "thinking", "thinking": thinking}, {"type": "text", "text": "a"}]
    (message,) = conversation({"messages": [{"role": "assistant", "content": parts}]}).values["messages"]
    assert message == {**ANSWERED, "thinking": "why so", "reasoning_content": "why so"}
    with pytest.raises(ChatRecordError, match="has a part"):
        conversation({"messages": [{"role": "assistant", "content": [{"type": "reasoning", "summary": ["s"]}]}]})


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_of_json_is_refused(weight):
    with pytest.raises(ChatRecordError, match="expected one number from 0 to"):
        conversation({"messages": [{**ANSWERED, "weight": weight}]})


@pytest.mark.parametrize("name", ["arguments", "parameters", "input"])
@pytest.mark.parametrize("is_around", [False, True])
def test_the_arguments_of_a_call_are_found_under_the_names_that_data_sets_have(name, is_around):
    function = {name: {"q": "ü"}, "name": "f"}
    called = {"role": "assistant", "tool_calls": [{"function": function} if is_around else function]}
    _, message = conversation({"messages": [ASKED, called]}).values["messages"]
    assert message["tool_calls"] == [CALL]
    assert list(message["tool_calls"][0]["function"]) == ["arguments", "name"]


@pytest.mark.parametrize("inside", [{}, {"arguments": " "}, {"arguments": {}}, {"input": {"q": "ü"}}])
def test_arguments_beside_the_function_are_its_own(inside):
    call = {"function": {"name": "f", **inside}, "arguments": '{"q": "ü"}'}
    _, message = conversation({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]}).values["messages"]
    assert message["tool_calls"] == [CALL]


def test_two_arguments_of_one_call_are_refused():
    call = {"name": "f", "parameters": {"q": 1}, "arguments": {"q": 2}}
    with pytest.raises(ChatRecordError, match="several arguments in call 0, which differ: "):
        conversation({"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}]})


def test_what_a_call_and_a_record_have_besides_is_named():
    call = {"function": {"name": "f", "kwargs": {"q": 1}, "seen": 1}, "id": "1", "extra": 1}
    record = {"messages": [ASKED, {"role": "assistant", "tool_calls": [call]}], "conversations": [ASKED], "prompt": "q"}
    assert conversation(record, Takes(words=frozenset({"seen"}))).unread == {
        *("conversations", "prompt", "messages[].tool_calls[].extra", "messages[].tool_calls[].kwargs")
    }
    assert conversation({"conversations": BOTH, "chosen": "c", "completion": "c"}).unread == {"chosen", "completion"}


@pytest.mark.parametrize("content", ["", [], [{"type": "text", "text": ""}], "s", [{"type": "text", "text": "s"}]])
def test_a_system_prompt_in_another_field_is_read_once_beside_an_empty_or_equal_one(content):
    record = {"system": "s", "messages": [{"role": "system", "content": content}, *BOTH]}
    assert conversation(record).values["messages"] == [SYSTEM, *BOTH]
