"""Records as data sets have them, and the conversations that they are."""

from __future__ import annotations

import json

import pytest

from tokshard.pipeline.encode.chat.records import (
    MALFORMED_CHAT,
    MEDIA,
    PREFERENCES,
    ChatRecordError,
    conversation,
)

ASKED = {"role": "user", "content": "q"}
ANSWERED = {"role": "assistant", "content": "a"}
BOTH = [ASKED, ANSWERED]


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
    ],
)
def test_each_form_is_the_same_conversation(record):
    found = conversation(record)
    assert found.values == {"messages": BOTH, "tools": None, "documents": None}
    assert found.weights == (None,)


def test_a_prompt_that_looks_like_json_is_text():
    for prompt in ("[1, 2]", "{", '{"role": "user"}'):
        assert conversation({"prompt": prompt, "completion": "a"}).values["messages"][0]["content"] == prompt


def test_tools_variables_and_reasoning_reach_the_template():
    reasoned = {**ANSWERED, "thinking": "why"}
    record = {"messages": [ASKED, reasoned], "tools": '[{"b": 1, "a": 2}]', "chat_template_kwargs": '{"x": true}'}
    values = conversation(record).values
    assert list(values["tools"][0]) == ["b", "a"]
    assert values["x"] is True
    assert values["messages"][1] == {**reasoned, "reasoning_content": "why"}


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
        ({"messages": BOTH, "chat_template_kwargs": {"messages": []}}, MALFORMED_CHAT, "variables of the template"),
    ],
)
def test_what_is_no_conversation_is_refused_with_a_reason(record, reason, named):
    with pytest.raises(ChatRecordError, match=named) as caught:
        conversation(record)
    assert caught.value.reason == reason
