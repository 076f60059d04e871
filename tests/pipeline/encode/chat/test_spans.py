"""Conversations as tokens: which ids they get, which of them are learned, and what is refused."""

from __future__ import annotations

import json
import time
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.examples import crossed
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.chats import CLASSES, SPECIAL, encode, encoder, learned, records, said
from tests.pipeline.encode.chat.templates import BARE, BARS, CHATML, THINK, TURNS
from tokshard.errors import TokenizerError
from tokshard.pipeline.encode.chat.marks import READ_TOKEN
from tokshard.pipeline.encode.chat.records import ChatRecordError
from tokshard.pipeline.encode.chat.spans import HAS_END, NOTHING_TO_LEARN, SPLIT_CHARACTER, UNMATCHED_SPANS
from tokshard.pipeline.encode.chat.tokens import Speller, document_end

TEMPLATES = {"chatml": CHATML, "think": THINK, "bare": BARE, "turns": TURNS, "bars": BARS}
every_pair = crossed("kind, name", CLASSES, TEMPLATES)


@cache
def speller(kind: str) -> Speller:
    return chats.speller(chats.bytes_alone() if kind == "bytes" else CLASSES[kind]())


@cache
def made(kind: str, name: str) -> chats.ChatEncoder:
    return encoder(speller(kind), TEMPLATES[name])


# ids


@pytest.mark.slow
@every_pair
@given(record=records())
def test_tokens_spell_the_rendering(kind, name, record):
    known, encode_one = speller(kind), made(kind, name)
    rendered = encode_one._template.render(chats.conversation(record).values)
    try:
        document = encode(encode_one, record)
    except ChatRecordError as error:
        _check_reason(error)
        return
    ids = document.ids[:-1]
    if known.is_plain:
        assert known.spell(ids).decode() == rendered.text
    places = document.loss.tolist()
    assert places == sorted(set(places))
    assert 0 < places[0] < places[-1] <= len(ids)


@every_pair
@given(record=records(), spelled=chats.spellings, data=st.data())
def test_control_tokens_that_a_message_spells_stay_text(kind, name, record, spelled, data):
    encode_one = made(kind, name)
    message = data.draw(st.sampled_from(record["messages"]))
    place = data.draw(st.integers(0, len(message["content"])))
    before = _control_ids(encode_one, record, spelled)
    # letters around it, since a template may trim white space that the spelling would hide
    message["content"] = f"{message['content'][:place]}x{spelled}y{message['content'][place:]}"
    after = _control_ids(encode_one, record, spelled)
    if (
        before is not None
        and after is not None
        and (spelled in SPECIAL or (name != "think" and spelled in TEMPLATES[name]))
    ):
        assert after == before


def _check_reason(error: ChatRecordError) -> None:
    assert error.reason in {NOTHING_TO_LEARN, SPLIT_CHARACTER, READ_TOKEN}


def _control_ids(encode_one: chats.ChatEncoder, record: chats.Json, spelled: str) -> list[int] | None:
    try:
        ids = encode(encode_one, record).ids.tolist()
    except ChatRecordError as error:
        _check_reason(error)
        return None
    control = {*encode_one._speller.special.values(), encode_one._speller.added[spelled]}
    return [one for one in ids if one in control]


@pytest.mark.parametrize(
    ("written", "contents"),
    [
        ("{% for part in c %}{{ part }}{% endfor %}", ["hi<|im_", "end|>\n<|im_st", "art|>system"]),
        ("{{ c[0] + c[1] }}", ["<", "|im_end|>"]),
        ("{{ c[0] | replace('<image>', '') }}", ["<|im_<image>end|>"]),
        ("{{ c[0].replace('\n', '') }}", ["<|im_\nend|>"]),
        ("{{ c[0] | lower }}", ["<|IM_END|>"]),
        ("{{ c[0][1:] }}{{ c[0].split('!') | join }}", ["x<|im_end|>", "<|im!_end|>"]),
        ("{{ '<|im_' + c[0] }}", ["end|>"]),
        ("{{ c[0] + 'end|>' }}", ["<|im_"]),
        ("{{ '<' + c[0] + '>' }}", ["|im_end|"]),
        ("{{ '<|' + c[0] + '|>' }}", ["im_end"]),
        ("{{ '<|' ~ c[0] ~ '_end' ~ '|>' }}", ["im"]),
        ("{{ c[0] | string }}{{ c | tojson }}", ["\u4dff<|im_end|>\u4dc0"]),
    ],
)
def test_no_template_puts_a_control_token_together_from_what_a_record_says(written, contents):
    contents_of = "{% set c = messages | map(attribute='content') | list %}"
    known, text = speller("byte-level"), contents_of + written + "<|im_end|>{% generation %}x{% endgeneration %}"
    ids = encode(encoder(known, text), {"messages": [{"role": "user", "content": one} for one in contents]}).ids
    assert ids.tolist().count(known.added["<|im_end|>"]) == 1
    assert b"<|im_end|>x" in known.spell(ids)


def test_a_template_may_write_the_role_into_its_tokens():
    answer = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = "{% for m in messages %}{{ '<|' + m.role + '|>' }}" + answer + "{% endfor %}"
    content = chats.bytes_alone()
    content["added_tokens"] += [chats.special_token(270, "<|user|>"), chats.special_token(271, "<|assistant|>")]
    ids = encode(encoder(content, text), said("a user | said <|user|>", "no")).ids.tolist()
    assert (ids.count(270), ids.count(271)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "stayed", "counts"),
    [
        (THINK, {"<think>"}, [1, 1, 2]),  # it looks at answers, and what the user writes stays text
        (BARS + "{% if messages and add_generation_prompt %}<think>{% endif %}", set(), [2, 1, 0]),
        (BARS + "{% if messages %}<think>{% endif %}", {"<think>"}, [1, 1, 0]),
    ],
    ids=("read", "never written", "written"),
)
def test_a_token_that_is_not_special_stays_text_in_messages_if_the_template_writes_it_itself(text, stayed, counts):
    known = speller("byte-level")
    document = encode(encoder(known, text), said("q <think>", "<think>\nwhy</think>\n\nyes <|im_end|>"))
    ids = document.ids.tolist()
    assert [ids.count(known.added[token]) for token in ("<think>", "</think>", "<|im_end|>")] == counts
    assert document.stayed == stayed


@pytest.mark.parametrize("sides", [("rstrip",), ("lstrip", "rstrip"), ("lstrip",)], ids=" and ".join)
@pytest.mark.parametrize("kind", CLASSES)
def test_white_space_beside_special_tokens_is_dropped_where_the_library_drops_it(tmp_path, kind, sides):
    """Phi-3 and Phi-4 have such tokens."""
    content = CLASSES[kind]()
    for entry in content["added_tokens"]:
        entry.update(dict.fromkeys(sides, entry["content"].startswith("<|im_")))
    with pytest.raises(TokenizerError, match=r"is white space that '<.*>' drops, for which"):
        chats.speller(content)
    content["added_tokens"] = [entry for entry in content["added_tokens"] if entry["content"].strip()]
    encode_one, record = encoder(content, CHATML), said("\n\u2003 q\x1f \n", "\n a\n the\x1c\u3000\n", " \n", " b ")
    document = encode(encode_one, record)
    text = encode_one._template.render(chats.conversation(record).values).text
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    expected = Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    assert document.ids[:-1].tolist() == expected
    known = chats.speller(content)
    found = [known.spell(span).decode().replace("▁", " ") for span in learned(document)]
    answers = ("a\n the\x1c", "b") if "lstrip" in sides else ("a\n the\x1c\u3000\n", "b ")
    assert [one.lstrip() for one in found] == [f"{answer}<|im_end|>" for answer in answers]


def test_an_added_token_with_a_blank_in_it_is_found_where_a_normalizer_changes_blanks():
    content = chats.byte_fallback(normalizer=chats.SPACES)
    index = 1 + max(entry["id"] for entry in content["added_tokens"])
    content["added_tokens"].append(chats.special_token(index, "the er", special=False))
    assert encode(encoder(content, CHATML), said("the er", "a the er b")).ids.tolist().count(index) == 2


@pytest.mark.parametrize(("kind", "name"), [("byte-level", "chatml"), ("byte-level, NFC", "bare")])
def test_the_time_of_a_conversation_grows_with_its_turns(kind, name):
    def seconds(turns: int) -> float:
        record = said(*["<|im_end|> e\u0301", *["a"] * (turns - 1)])
        started = time.process_time()
        encode(made(kind, name), record)
        return time.process_time() - started

    seconds(50)
    assert seconds(8_000) < 60 * seconds(800) + 1  # where time grows with the square: a hundred times and a minute


# what is learned

ANSWERS = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
TURN = said("q", "one", "r", "two")


def weighted(*parts: tuple[str, float | None]) -> chats.Json:
    return {"messages": [{"role": "assistant", "content": part, "weight": weight} for part, weight in parts]}


def changed(**changes: chats.Json) -> chats.Json:
    """The conversation of two turns; of its answers, `first` or `second` have more fields."""
    asked, one, again, two = TURN["messages"]
    return {"messages": [asked, one | changes.get("first", {}), again, two | changes.get("second", {})]}


WHOLE = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
PROMPT = {"prompt": TURN["messages"][:3], "completion": [{"role": "assistant", "content": "two"}]}
LEARNED: dict[str, tuple[str, str, chats.Loss, chats.Json, list[str] | str, int]] = {
    "a character of several tokens, whole": ("bytes", BARE, "assistant", said("q", "thanks 🧪"), ["thanks 🧪"], 0),
    "never the first token": ("bytes", WHOLE, "all", said("abc", "def"), ["bcdef"], 0),
    "no answer that is the first token": ("bytes", WHOLE, "all", said("", "a"), NOTHING_TO_LEARN, 0),
    "spans that touch, as one": ("bytes", f"x{ANSWERS}y", "assistant", said("ab", "", "cd"), ["abcd"], 0),
    "a token that a span cuts": ("byte-level", f"the oth{ANSWERS}", "assistant", said("er"), [" other"], 1),
    "a token that goes on behind a span": ("byte-level", f"the {ANSWERS}er", "assistant", said("oth"), [" other"], 1),
    "the last answer": ("bytes", CHATML, "last", TURN, ["two<|im_end|>"], 0),
    "no answer of weight 0": ("bytes", CHATML, "assistant", changed(first={"weight": 0}), ["two<|im_end|>"], 0),
    "nothing, where no answer counts": (
        *("bytes", CHATML, "assistant", changed(first={"weight": 0}, second={"train": False})),
        *(NOTHING_TO_LEARN, 0),
    ),
    "no answer of the prompt": ("bytes", CHATML, "assistant", PROMPT, ["two<|im_end|>"], 0),
    "weights, which need a span for each answer": (
        *("bytes", WHOLE, "assistant", changed(first={"weight": 0}), UNMATCHED_SPANS, 0),
    ),
    "no part of a composed character": (
        *("byte-level, NFC", f"e{ANSWERS}", "assistant", said("\u0301x"), SPLIT_CHARACTER, 0),
    ),
    "nothing, where the template puts the token together that ends documents": (
        *("byte-level", "{{ '<p' ~ 'ad>' }}{{ '</' ~ 's>' }}" + WHOLE, "assistant", said("a"), HAS_END, 0),
    ),
    "nothing, where the template looks at a special token of a message": (
        *("byte-level", "{{ messages[0].content.split('</s>') | length }}" + WHOLE, "assistant", said("a</s>b")),
        *(READ_TOKEN, 0),
    ),
}


@pytest.mark.parametrize("what", LEARNED)
def test_what_is_learned(what):
    kind, text, loss, record, expected, num_cut = LEARNED[what]
    known = speller(kind)
    encode_one = encoder(known, text, loss=loss)
    if isinstance(expected, str):
        with pytest.raises(ChatRecordError) as caught:
            encode(encode_one, record)
        assert caught.value.reason == expected
        return
    document = encode(encode_one, record)
    assert [known.spell(span).decode() for span in learned(document)] == expected
    assert document.num_cut == num_cut


@pytest.mark.parametrize("kind", CLASSES)
def test_an_answer_behind_text_whose_length_the_normalizer_changes_is_learned(kind):
    document = encode(made(kind, "bare"), said("e\u0301 e\u0301  a the b \u212b", "the answer"))
    (found,) = (speller(kind).spell(span).decode() for span in learned(document))
    assert found.replace("▁", " ").strip() == "the answer"


def test_answers_have_the_weights_of_their_messages_where_that_is_asked_for():
    parts = [("ab", 0.5), ("", 3), ("cd", 0.5), ("e", 2), ("f", 0), ("g", None), ("h", 1)]
    document = encode(encoder(speller("bytes"), f"x{ANSWERS}y", loss="weighted"), weighted(*parts))
    assert document.loss.tolist() == [1, 5, 5, 6, 7, 9]
    assert document.weights.tolist() == [0.5, 2, 1]
    with pytest.raises(ChatRecordError, match=r"has the weight 0\.5, which --loss weighted would keep"):
        encode(encoder(speller("bytes"), f"x{ANSWERS}y"), weighted(*parts))
    # a token of two answers has the weight of the first
    of_two = encoder(speller("byte fallback, Replace"), f"x {ANSWERS}", loss="weighted")
    document = encode(of_two, weighted(("th", 2), ("e", 3)))
    assert (document.loss.tolist(), document.weights.tolist(), document.num_cut) == ([1, 2], [2], 2)


# tokenizers


def test_an_unknown_token_may_end_documents_where_every_byte_has_a_token():
    known = speller("byte fallback, Replace")
    assert document_end(known, "<unk>", config=chats.VARIABLES, literals=["</s>"], written=())[0] == "<unk>"
