"""Conversations as tokens: which ids they get, which of them are learned, and what is refused."""

from __future__ import annotations

import time
from functools import cache

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.examples import crossed
from tests.pipeline.encode.chat import chats
from tests.pipeline.encode.chat.chats import CLASSES, SPECIAL, byte_level, encode, encoder, learned, records, said
from tests.pipeline.encode.chat.templates import BARE, BARS, CHATML, INST, THINK, TURNS
from tokshard.errors import TokenizerError
from tokshard.pipeline.encode.chat.marks import READ_TOKEN
from tokshard.pipeline.encode.chat.records import ChatRecordError
from tokshard.pipeline.encode.chat.spans import NOTHING_TO_LEARN, SPLIT_CHARACTER, UNMATCHED_SPANS
from tokshard.pipeline.encode.chat.tokens import Speller, document_end

TEMPLATES = {"chatml": CHATML, "think": THINK, "bare": BARE, "inst": INST, "turns": TURNS, "bars": BARS}
every_pair = crossed("kind, name", CLASSES, TEMPLATES)
every_template = pytest.mark.parametrize("name", TEMPLATES)


@cache
def speller(kind: str) -> Speller:
    return chats.speller(CLASSES[kind]())


@cache
def made(kind: str, name: str) -> chats.ChatEncoder:
    return encoder(speller(kind), TEMPLATES[name])


@cache
def bytes_alone() -> Speller:
    return chats.speller(chats.bytes_alone())


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


@given(record=records())
def test_where_each_token_is_a_byte_the_learned_ones_are_the_marked_text(record):
    # the added token of two line feeds would lie half before the answer
    assume(not any(message["content"].startswith("\n") for message in record["messages"]))
    encode_one = encoder(bytes_alone(), CHATML)
    rendered = encode_one._template.render(chats.conversation(record).values)
    document = encode(encode_one, record)
    assert document.num_cut == 0
    assert bytes_alone().spell(document.ids[:-1]).decode() == rendered.text
    found = [bytes_alone().spell(document.ids[a:b]).decode() for a, b in document.loss.reshape(-1, 2).tolist()]
    assert found == [rendered.text[start:stop] for start, stop in rendered.spans]


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
    text = "{% set c = messages[0].content %}" + written + "<|im_end|>{% generation %}x{% endgeneration %}"
    known = speller("byte-level")
    ids = encode(encoder(known, text), {"messages": [{"role": "user", "content": contents}]}).ids
    assert ids.tolist().count(known.added["<|im_end|>"]) == 1
    assert b"<|im_end|>x" in known.spell(ids)


def test_a_template_may_write_the_role_into_its_tokens():
    answer = "{% generation %}{{ m.content }}{% endgeneration %}"
    text = "{% for m in messages %}{{ '<|' + m.role + '|>' }}" + answer + "{% endfor %}"
    content = chats.bytes_alone()
    content["added_tokens"] += [chats.special_token(270, "<|user|>"), chats.special_token(271, "<|assistant|>")]
    ids = encode(encoder(content, text), said("a user | said <|user|>", "no")).ids.tolist()
    assert (ids.count(270), ids.count(271)) == (1, 1)


def test_what_a_user_writes_stays_text_where_a_template_looks_at_answers():
    encode_one, added = made("byte-level", "think"), speller("byte-level").added
    ids = encode(encode_one, said("q <think>", "<think>\nwhy</think>\n\nyes")).ids.tolist()
    assert (ids.count(added["<think>"]), ids.count(added["</think>"])) == (1, 1)


@pytest.mark.parametrize(("kind", "name"), [("byte-level", "chatml"), ("byte-level, NFC", "bare")])
def test_the_time_of_a_conversation_grows_with_its_turns(kind, name):
    def seconds(turns: int) -> float:
        record = said(*["<|im_end|> e\u0301", *["a"] * (turns - 1)])
        started = time.process_time()
        encode(made(kind, name), record)
        return time.process_time() - started

    seconds(50)
    assert seconds(8_000) < 60 * seconds(800) + 1  # where time grows with the square: a hundred times and a minute


def test_a_token_that_is_not_special_stays_one_where_the_template_looks_at_it():
    encode_one, added = made("byte-level", "think"), speller("byte-level").added
    ids = encode(encode_one, said("q <think>", "<think>\nwhy</think>\n\nyes <|im_end|>")).ids.tolist()
    assert ids.count(added["</think>"]) == 1
    assert ids.count(added["<|im_end|>"]) == 2


def test_a_template_that_looks_at_a_special_token_of_a_message_is_refused():
    text = (
        "{{ messages[0].content.split('</s>') | length }}{% generation %}{{ messages[0].content }}{% endgeneration %}"
    )
    with pytest.raises(ChatRecordError, match="depends on a special token") as caught:
        encode(encoder(speller("byte-level"), text), said("a</s>b"))
    assert caught.value.reason == READ_TOKEN


# what is learned


def test_a_character_of_several_tokens_is_learned_whole():
    encode_one = encoder(bytes_alone(), BARE)
    document = encode(encode_one, said("q", "thanks 🧪"))
    assert [bytes(span).decode() for span in learned(document)] == ["thanks 🧪"]


def test_the_first_token_and_the_end_of_the_document_are_never_learned():
    encode_one = encoder(bytes_alone(), "{% for m in messages %}{{ m.content }}{% endfor %}", loss="all")
    document = encode(encode_one, said("abc", "def"))
    assert bytes(document.ids[:-1].tolist()) == b"abcdef"
    assert document.loss.tolist() == [1, 6]
    with pytest.raises(ChatRecordError) as caught:
        encode(encode_one, said("", "a"))
    assert caught.value.reason == NOTHING_TO_LEARN


def test_spans_that_touch_are_one_and_empty_ones_are_none():
    text = "x{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}y"
    document = encode(encoder(bytes_alone(), text), said("ab", "", "cd"))
    assert document.loss.tolist() == [1, 5]


def test_a_token_that_a_span_cuts_is_learned_and_counted():
    text = "{% for m in messages %}the oth{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    document = encode(encoder(speller("byte-level"), text), said("er"))
    assert document.num_cut == 1


def test_a_token_that_goes_on_behind_a_span_is_learned():
    text = "{% for m in messages %}the {% generation %}{{ m.content }}{% endgeneration %}er{% endfor %}"
    document = encode(encoder(speller("byte-level"), text), said("oth"))
    assert document.loss.tolist() == [1, 2]


@pytest.mark.parametrize("kind", CLASSES)
def test_an_answer_behind_text_whose_length_the_normalizer_changes_is_learned(kind):
    document = encode(made(kind, "bare"), said("e\u0301 e\u0301  a the b \u212b", "the answer"))
    (found,) = (speller(kind).spell(document.ids[a:b]).decode() for a, b in document.loss.reshape(-1, 2).tolist())
    assert found.replace("▁", " ").strip() == "the answer"


def test_the_last_answer_alone_and_messages_of_weight_0():
    last, some = (encoder(bytes_alone(), CHATML, loss=loss) for loss in ("last", "assistant"))
    record = said("q", "one", "r", "two")
    assert [bytes(span[:3]) for span in learned(encode(last, record))] == [b"two"]
    record["messages"][1]["weight"] = 0
    assert [bytes(span[:3]) for span in learned(encode(some, record))] == [b"two"]
    record["messages"][3]["train"] = False
    with pytest.raises(ChatRecordError) as caught:
        encode(some, record)
    assert caught.value.reason == NOTHING_TO_LEARN


def test_answers_have_the_weights_of_their_messages_where_that_is_asked_for():
    text = "x{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}y"
    parts = [("ab", 0.5), ("", 3), ("cd", 0.5), ("e", 2), ("f", 0), ("g", None), ("h", 1)]
    record = {"messages": [{"role": "assistant", "content": part, "weight": weight} for part, weight in parts]}
    document = encode(encoder(bytes_alone(), text, loss="weighted"), record)
    assert document.loss.tolist() == [1, 5, 5, 6, 7, 9]
    assert document.weights.tolist() == [0.5, 2, 1]
    with pytest.raises(ChatRecordError, match=r"has the weight 0\.5, which --loss weighted would keep"):
        encode(encoder(bytes_alone(), text), record)


def test_a_token_of_two_answers_has_the_weight_of_the_first():
    text = "x {% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    record = {
        "messages": [{"role": "assistant", "content": part, "weight": 2 + n} for n, part in enumerate(["th", "e"])]
    }
    document = encode(encoder(speller("byte fallback, Replace"), text, loss="weighted"), record)
    assert (document.loss.tolist(), document.weights.tolist()) == ([1, 2], [2])
    assert document.num_cut == 2


def test_answers_of_the_prompt_are_not_learned():
    record = {"prompt": said("q", "one", "r")["messages"], "completion": [{"role": "assistant", "content": "two"}]}
    assert [bytes(span[:3]) for span in learned(encode(encoder(bytes_alone(), CHATML), record))] == [b"two"]


def test_a_weight_is_refused_where_the_marked_parts_are_not_one_for_each_answer():
    text = "{% generation %}{% for m in messages %}{{ m.content }}{% endfor %}{% endgeneration %}"
    record = said("q", "one", "r", "two")
    record["messages"][1]["weight"] = 0
    with pytest.raises(ChatRecordError) as caught:
        encode(encoder(bytes_alone(), text), record)
    assert caught.value.reason == UNMATCHED_SPANS


def test_a_span_that_begins_inside_a_composed_character_is_refused():
    text = "{% for m in messages %}e{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
    with pytest.raises(ChatRecordError) as caught:
        encode(encoder(speller("byte-level, NFC"), text), said("\u0301x"))
    assert caught.value.reason == SPLIT_CHARACTER


# tokenizers


@pytest.mark.slow
@pytest.mark.parametrize(
    ("content", "named"),
    [
        (byte_level(normalizer={"type": "NFKC"}), "normalizer of the tokenizer is NFKC"),
        (byte_level(normalizer={"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}), "Lowercase"),
        (byte_level(pre_tokenizer={"type": "Whitespace"}), "pre-tokenizer of the tokenizer is Whitespace"),
        (byte_level(pre_tokenizer={**chats.BYTE_LEVEL, "add_prefix_space": True}), "add_prefix_space"),
        (
            byte_level(added_tokens=[chats.special_token(20_000, "<x>", rstrip=True)]),
            "'<x>' of the tokenizer is rstrip",
        ),
        (
            byte_level(
                pre_tokenizer={
                    "type": "Sequence",
                    "pretokenizers": [
                        {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
                        chats.BYTE_LEVEL,
                    ],
                }
            ),
            "do not spell the text",
        ),
        (byte_level(added_tokens=[chats.special_token(20_000, True)]), "not that of a tokenizer.json"),
        (byte_level(added_tokens=[{**chats.special_token(0, "<x>"), "id": 1.5}], normalizer={}), "KeyError"),
        ({**byte_level(), "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0]]}}, "Unigram"),
    ],
)
def test_a_tokenizer_whose_tokens_cannot_be_placed_is_refused_by_name(content, named):
    with pytest.raises(TokenizerError, match=named):
        chats.speller(content)


def test_the_end_of_a_document_is_a_token_that_the_template_does_not_write():
    known = speller("byte fallback, Replace")

    def end(wanted: str | None, *literals: str, written: tuple[str, ...] = ()) -> str:
        return document_end(known, wanted, config=chats.VARIABLES, literals=literals, written=written)[0]

    assert end(None) == "</s>"
    assert end(None, "a</s>") == "<pad>"
    assert end("<unk>", "a</s>") == "<unk>"
    with pytest.raises(TokenizerError, match="document_end is '</s>'") as caught:
        end("</s>", written=("</s>",))
    assert "'<pad>'" in caught.value.hint
    with pytest.raises(TokenizerError, match="no special token for the end of a document"):
        end(None, *SPECIAL, "<unk>")


@pytest.mark.parametrize(
    ("wanted", "said_of_it"),
    [
        ("<|im_start|>", "begins a turn or a text"),
        ("<|im_end|>", "the chat template writes"),
        ("<think>", "is not a special token of the tokenizer"),
    ],
)
def test_no_document_ends_in_a_token_that_begins_a_turn_and_each_refusal_has_its_reason(wanted, said_of_it):
    known = speller("byte-level")
    options = {"config": chats.VARIABLES, "literals": ["</s><|im_end|><pad><end_of_turn><|endoftext|>"], "written": ()}
    with pytest.raises(TokenizerError, match=said_of_it):
        document_end(known, wanted, **options)
    with pytest.raises(TokenizerError, match="or they begin a turn or text"):
        document_end(known, None, **options)
