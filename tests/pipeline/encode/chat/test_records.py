"""Records as data sets have them, and the conversations that they are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tokshard.pipeline.encode.chat.records import (
    MALFORMED_CHAT,
    MEDIA,
    PREFERENCES,
    ChatRecordError,
    Takes,
    conversation,
)

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
PART = {"type": "text", "text": "q"}
BOTH = [ASKED, ANSWERED]
SYSTEM = {"role": "system", "content": "s"}


@pytest.mark.parametrize(
    "record",
    [
        {"messages": BOTH},
        {"messages": json.dumps(BOTH)},
        {"messages": BOTH, "prompt": "q", "chosen": "c"},
        {"conversations": BOTH},
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        {"prompt": "q", "completion": "a"},
        {"prompt": [ASKED], "completion": [ANSWERED]},
        {"prompt": [ASKED], "completion": "a"},
        {"messages": [json.dumps(ASKED), json.dumps(ANSWERED)]},
        {"messages": [{"role": "User", "value": "q"}, {"from": "GPT", "text": "a"}], "system": "", "tools": "null"},
        {"messages": [{**ASKED, "name": None, "tool_calls": []}, {**ANSWERED, "value": None, "thinking": ""}]},
        {"messages": [{"role": "human", "content": [PART]}, {"role": "model", "content": ["a"]}]},
        {"messages": [], "prompt": "q", "completion": "a", "history": None, "documents": []},
        {"messages": BOTH, "prompt": "", "completion": ""},
        {"conversations": "", "messages": BOTH, "tools": ""},
    ],
)
def test_each_form_is_the_same_conversation(record):
    found = conversation(record)
    assert found.values == {"messages": BOTH, "tools": None, "documents": None}
    assert found.weights == (None,)


@pytest.mark.parametrize("prompt", ["[1, 2]", "{", '{"role": "user"}'])
def test_a_prompt_that_looks_like_json_is_text(prompt):
    assert conversation({"prompt": prompt, "completion": "a"}).values["messages"][0]["content"] == prompt


def test_tools_variables_and_reasoning_reach_the_template():
    reasoned = {**ANSWERED, "thinking": "why"}
    record = {"messages": [ASKED, reasoned], "tools": '[{"b": 1, "a": 2}]', "chat_template_kwargs": '{"x": true}'}
    values = conversation(record).values
    assert list(values["tools"][0]) == ["b", "a"]
    assert values["x"] is True
    assert values["messages"][1] == {**reasoned, "reasoning_content": "why"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"system": "s", "conversations": BOTH}, [SYSTEM, *BOTH]),
        ({"system_prompt": "s", "messages": [SYSTEM, *BOTH]}, [SYSTEM, *BOTH]),
        ({"history": [["q", "a"]], "messages": [SYSTEM, *BOTH]}, [SYSTEM, *BOTH, *BOTH]),
        ({"history": '[["q", "a"]]', "system": "s", "prompt": "q", "completion": "a"}, [SYSTEM, *BOTH, *BOTH]),
    ],
)
def test_a_system_prompt_and_a_history_beside_the_messages_belong_to_the_conversation(record, messages):
    found = conversation(record)
    assert found.values["messages"] == messages
    assert found.weights == ((0, None) if "prompt" in record else (None,) * (len(messages) // 2))
    assert found.places[-1] == len(messages) - 1 - found.places.count(-1)


def calling(call: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", **more, "tool_calls": [call]}


ARGUMENTS = {"q": "x", "n": None}
CALLED = calling({"type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}, content="")
FUNCTION = {"name": "f", "arguments": '{"q": "x", "n": null}'}


@pytest.mark.parametrize(
    "message",
    [
        calling({"type": "function", "function": FUNCTION}),
        calling({}, content=None) | {"tool_calls": json.dumps([{"function": json.dumps(FUNCTION)}])},
        calling(FUNCTION, content=""),
        {"role": "assistant", "content": None, "function_call": FUNCTION},
        {"from": "function_call", "value": json.dumps(FUNCTION)},
        {"from": "Tool_Call", "value": json.dumps([FUNCTION])},
    ],
)
def test_each_form_of_a_call_is_the_same_call_whose_arguments_are_an_object(message):
    result = {"from": "observation", "value": "y"}
    found = conversation({"messages": [ASKED, message, result]})
    assert found.values["messages"] == [ASKED, CALLED, {"role": "tool", "content": "y"}]
    assert found.weights == (None,)


def test_a_template_gets_what_it_takes():
    parts = [PART, {"type": "text", "text": "r"}]
    record = {"messages": [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}, CALLED]}

    def given(**takes: Any) -> list[Any]:
        _, asked, called = conversation(record, Takes(**takes)).values["messages"]
        return [asked["content"], called["content"], called["tool_calls"][0]["function"]["arguments"]]

    assert given() == ["qr", "", {"q": "x"}]
    assert given(text="either", has_objects=False, no_text=None) == [parts, None, '{"q": "x"}']
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


def test_thinking_is_read_under_its_names_and_in_parts():
    thinking = {"type": "thinking", "thinking": "why"}
    for said in ({"reasoning": "why"}, {"reasoning_content": "why", "thinking": "why"}, {"thinking": "why"}):
        message = conversation({"messages": [{**ANSWERED, **said}]}).values["messages"][0]
        assert (message["reasoning_content"], message["thinking"]) == ("why", "why")
    message = {"role": "assistant", "content": [thinking, {"type": "text", "text": "a"}]}
    assert conversation({"messages": [message]}).values["messages"] == [
        {**ANSWERED, "thinking": "why", "reasoning_content": "why"}
    ]


def test_weights_are_read_and_hidden_from_the_template():
    messages = [{**ASKED, "weight": 0}, {**ANSWERED, "weight": 1.0, "train": None}, {**ANSWERED, "train": False}]
    found = conversation({"messages": messages})
    assert found.weights == (1, 0)
    assert found.values["messages"] == [ASKED, ANSWERED, ANSWERED]


@pytest.mark.parametrize(
    ("record", "reason", "named"),
    [
        ({"chosen": BOTH, "rejected": BOTH}, PREFERENCES, "not pairs"),
        ({"prompt": "q", "chosen": "a", "rejected": "b"}, PREFERENCES, "chosen and rejected"),
        ({"messages": BOTH, "images": ["x"]}, MEDIA, "text alone"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, MEDIA, "part of type 'image'"),
        ({"text": "a"}, MALFORMED_CHAT, "no messages, conversations, or prompt"),
        ({"prompt": "q"}, MALFORMED_CHAT, "no completion"),
        ({"messages": []}, MALFORMED_CHAT, "no message"),
        ({"messages": "hello"}, MALFORMED_CHAT, "expected a list of objects"),
        ({"messages": "[{"}, MALFORMED_CHAT, "not JSON"),
        ({"messages": [{"content": "x"}]}, MALFORMED_CHAT, "message 0 has no role"),
        ({"conversations": [{"from": "bob", "value": "x"}]}, MALFORMED_CHAT, "the role 'bob'"),
        *(
            ({"messages": [{**ANSWERED, "weight": weight}]}, MALFORMED_CHAT, "expected one number from 0 to")
            for weight in (-0.5, float("nan"), float("inf"), "1", [1])
        ),
        ({"messages": [{**ANSWERED, "weight": 1e-9}]}, MALFORMED_CHAT, "give 0 to leave it out"),
        ({"messages": [{**ANSWERED, "weight": 0, "train": True}]}, MALFORMED_CHAT, "0 and True"),
        ({"messages": [{**ASKED, "train": True}]}, MALFORMED_CHAT, "answers alone"),
        ({"messages": [ASKED, {"role": "assistant", "content": None}]}, MALFORMED_CHAT, "message 1 has no text"),
        ({"conversations": [{"from": "gpt", "value": None}]}, MALFORMED_CHAT, "message 0 has no text"),
        ({"messages": [{"role": "assistant", "content": {"a": 1}}]}, MALFORMED_CHAT, "message 0 has a part"),
        ({"messages": [{"role": "assistant", "content": 5}]}, MALFORMED_CHAT, "message 0 has the text 5"),
        ({"messages": [{**ASKED, "value": "r"}]}, MALFORMED_CHAT, "content and value, which differ"),
        ({"messages": [{**ASKED, "from": "gpt"}]}, MALFORMED_CHAT, "the roles 'user' and 'gpt'"),
        ({"messages": [{"role": "nobody", "content": "x"}]}, MALFORMED_CHAT, "the role 'nobody'"),
        ({"messages": [SYSTEM, *BOTH], "system": "t"}, MALFORMED_CHAT, "several system prompts"),
        ({"messages": BOTH, "history": ["q"]}, MALFORMED_CHAT, "pairs of question and answer"),
        ({"messages": [{"from": "function_call", "value": "f(x)"}]}, MALFORMED_CHAT, "the call in message 0"),
        ({"messages": [calling({"function": {"name": "f", "arguments": "x"}})]}, MALFORMED_CHAT, "'x' in call 0"),
        ({"messages": [{**ASKED, "content": [{"type": "tool_result"}]}]}, MALFORMED_CHAT, "belong in tool_calls"),
        ({"messages": [{**ANSWERED, "thinking": "a", "reasoning": "b"}]}, MALFORMED_CHAT, "several names"),
        ({"messages": BOTH, "chat_template_kwargs": {"messages": []}}, MALFORMED_CHAT, "variables of the template"),
    ],
)
def test_what_is_no_conversation_is_refused_with_a_reason(record, reason, named):
    with pytest.raises(ChatRecordError, match=named) as caught:
        conversation(record)
    assert caught.value.reason == reason
