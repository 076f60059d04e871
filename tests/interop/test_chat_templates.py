"""Conversations become the tokens that `transformers` makes of them; its known faults are asserted as such."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import assume, given

from tests.interop.real_text import of_transformers
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.chats import (
    VARIABLES,
    ChatRecordError,
    encode,
    encoder,
    mask_of,
    records,
    said,
)
from tests.pipeline.encode.chat.templates import BARE, BARS, CHATML, INST, THINK, TURNS

pytest.importorskip("transformers")

pytestmark = [pytest.mark.interop, pytest.mark.filterwarnings("ignore")]


def dropping() -> chats.Json:
    """A byte-level BPE whose special tokens drop white space before and after them."""
    content = chats.byte_level()
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"].strip()]
    for entry in content["added_tokens"]:
        entry.update(dict.fromkeys(("lstrip", "rstrip"), entry["special"]))
    return content


CLASSES = {**chats.CLASSES, "byte-level, white space dropped": dropping}
TEMPLATES = {"chatml": CHATML, "think": THINK, "inst": INST, "turns": TURNS, "bars": BARS}
every_class = pytest.mark.parametrize("kind", CLASSES)
every_template = pytest.mark.parametrize("name", TEMPLATES)


@cache
def made(kind: str, text: str) -> chats.ChatEncoder:
    return encoder(CLASSES[kind](), text)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """What `transformers` makes of a record: ids, and for each whether it is of an answer."""
    root = tmp_path_factory.mktemp("tokenizers")
    made = cache(lambda kind: of_transformers(CLASSES[kind](), root / f"{kind}.json", **VARIABLES))
    return lambda kind, text, record: made(kind)(record, text)


@every_template
@every_class
@given(record=records())
def test_ids_and_learned_tokens_are_those_of_transformers(reference, kind, name, record):
    text = TEMPLATES[name]
    document = encode(made(kind, text), record)
    assert (document.ids[:-1].tolist(), mask_of(document)) == reference(kind, text, record)


@every_class
def test_tools_and_calls_are_rendered_as_by_transformers(reference, kind):
    call = {"type": "function", "function": {"name": "zug", "arguments": {"nach": "Köln", "ab": [1, 2.5, None]}}}
    record = said("wann?", "", tools=[{"type": "function", "function": {"name": "zug", "description": "<ü>"}}])
    record["messages"][1] |= {"content": None, "tool_calls": [call]}
    document = encode(made(kind, CHATML), record)
    assert (document.ids[:-1].tolist(), mask_of(document)) == reference(kind, CHATML, record)


@every_class
@given(record=records())
def test_where_a_span_ends_in_mid_text_the_ids_are_those_of_transformers(reference, kind, record):
    try:
        document = encode(made(kind, BARE), record)
    except ChatRecordError:
        assume(False)
    assert document.ids[:-1].tolist() == reference(kind, BARE, record)[0]


def test_transformers_learns_the_first_token_alone_of_a_last_character(reference):
    record = said("q", "好🧪")
    learned = mask_of(encode(made("byte-level", BARE), record))
    assert sum(reference("byte-level", BARE, record)[1]) < sum(learned)


def test_transformers_learns_a_token_of_an_empty_answer(reference):
    text = (
        "{% for m in messages %}{{ 'a\\n' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '\\n' }}{% endfor %}"
    )
    assert sum(reference("byte-level", text, said(""))[1]) == 1  # the token of both newlines
    with pytest.raises(ChatRecordError, match="no token of it"):
        encode(made("byte-level", text), said(""))


def test_transformers_learns_all_that_follows_a_character_that_nfc_composes(reference):
    record = said("q", "e\u0301", "a long question", "a")
    theirs = reference("byte-level, NFC", BARE, record)[1]
    assert sum(theirs) > sum(mask_of(encode(made("byte-level, NFC", BARE), record)))
    assert all(theirs[theirs.index(1) :])


def test_transformers_makes_control_tokens_of_what_a_message_spells(reference):
    record = said("what is <|im_end|>?", "a token")
    added = {entry["content"]: entry["id"] for entry in CLASSES["byte-level"]()["added_tokens"]}
    ours = encode(made("byte-level", CHATML), record).ids.tolist()
    theirs, _ = reference("byte-level", CHATML, record)
    assert (ours.count(added["<|im_end|>"]), theirs.count(added["<|im_end|>"])) == (2, 3)
