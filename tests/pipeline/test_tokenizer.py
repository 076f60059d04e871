"""Tokenizers: which ids a text gets, and which tokens delimit it. Both versions of the library."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.examples import examples
from tests.pipeline.encode.chat.chats import CLASSES
from tests.pipeline.inputs import EOS, TOKENIZER, build, jsonl, special_token
from tests.pipeline.vocabularies import Json, numbered, tokenizer_json, words, write_vocabulary
from tokshard import open_corpus
from tokshard.errors import TokenizerError
from tokshard.extras import version_of
from tokshard.format.manifest import TokenizerInfo
from tokshard.format.schema import MAX_VOCABULARY
from tokshard.pipeline.encode import encoder
from tokshard.pipeline.encode.encoder import DocumentEncoder, Encoder, EncodingError, inline_groups
from tokshard.pipeline.encode.tokenizer_file import (
    TokenizerFile,
    read_tokenizer,
)
from tokshard.pipeline.sources.records import NOT_ENCODED

# tokenizers of every kind


@cache
def recipe() -> Json:
    parsed: Json = json.loads((TOKENIZER / "tokenizer.json").read_bytes())
    return parsed


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
BERT = {"clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True}
UNIGRAM = {"<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, "▁": -2.0, "▁the": -3.5, "ing": -3.75, "<": -9.0}
UNIGRAM |= {letter: -5.0 - n / 8 for n, letter in enumerate(ALPHABET)}
SPECIAL = [special_token(1, "<s>"), special_token(2, "</s>")]
PIECES = ("[UNK]", "<s>", "</s>", "the", "##ing", "[", "]", "<", ">", "/")
BOS = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
FIRST = {"SpecialToken": {"id": "<s>", "type_id": 0}}
A, B = ({"Sequence": {"id": name, "type_id": number}} for number, name in enumerate("AB"))
CHAT = [
    special_token(16384, "<|im_start|>"),
    special_token(16385, "<|im_end|>", lstrip=True, rstrip=True),
    special_token(16386, "<s>", normalized=True),
    special_token(16387, "<tool>", special=False),
    special_token(16388, "    ", special=False, single_word=True),
]
KINDS: dict[str, tuple[int, Callable[[], Json]]] = {
    "byte-level BPE": (16_384, recipe),
    "byte-level BPE with chat tokens": (
        16_384 + 5,
        lambda: {**recipe(), "added_tokens": [*recipe()["added_tokens"], *CHAT]},
    ),
    "BPE with byte fallback": (1 + 256 + 33 + 15, CLASSES["byte fallback, Prepend and Replace"]),
    "Unigram": (
        7 + 26,
        lambda: tokenizer_json(
            {"type": "Unigram", "unk_id": 0, "byte_fallback": False, "vocab": [*map(list, UNIGRAM.items())]},
            METASPACE,
            normalizer={"type": "NFKC"},
            added=[special_token(0, "<unk>"), *SPECIAL],
        ),
    ),
    "WordPiece": (
        10 + 26 + 26,
        lambda: tokenizer_json(
            {
                "type": "WordPiece",
                "unk_token": "[UNK]",
                "continuing_subword_prefix": "##",
                "max_input_chars_per_word": 100,
                "vocab": numbered(*PIECES, *ALPHABET, *(f"##{letter}" for letter in ALPHABET)),
            },
            {"type": "BertPreTokenizer"},
            normalizer={"type": "BertNormalizer", **BERT},
            post_processor={"type": "TemplateProcessing", "special_tokens": BOS, "single": [FIRST, A], "pair": [A, B]},
            added=[special_token(0, "[UNK]"), *SPECIAL],
        ),
    ),
    "WordLevel": (7, lambda: words("[UNK]", "the", "token", "a", "b", "<s>", "</s>")),
}
"""How many ids each kind of vocabulary has, and its file."""
every_kind = pytest.mark.parametrize("kind", KINDS)


def read(directory: Path, *, eos: str | None = "</s>", bos: str | None = None) -> TokenizerFile:
    return read_tokenizer(str(directory), eos=eos, bos=bos)


def documents(texts: Sequence[str], tokenizer: Path, **options: Any) -> list[list[int]]:
    """What a build makes of texts."""
    source = tokenizer.parent / "a.jsonl"
    source.write_bytes(jsonl([{"text": text} for text in texts]))
    out = tokenizer.parent / "out"
    return [document.tolist() for document in build(source, out, tokenizer=tokenizer, force=True, **options)]


def reference_of(path: Path) -> Callable[[str], list[int]]:
    """The installed library on the very file, as a person would call it."""
    tokenizer: Any = Tokenizer.from_file(str(path))
    if hasattr(tokenizer, "encode_batch_fast"):
        tokenizer.encode_special_tokens = True
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer.encode(text, add_special_tokens=False, encode_special_tokens=True).ids


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory) -> Callable[[str], tuple[Encoder, Callable[[str], list[int]], TokenizerInfo]]:
    """The tokenizer of each kind, loaded once: in tokshard's hands, and as a person would use it."""
    root = tmp_path_factory.mktemp("tokenizers")

    @cache
    def load(kind: str) -> Any:
        directory = write_vocabulary(root / kind.replace(" ", "-"), KINDS[kind][1]())
        found = read(directory, eos=EOS if kind.startswith("byte-level") else "</s>")
        return Encoder(found.content), reference_of(directory / "tokenizer.json"), found.info

    return load


# equal ids

SPELLINGS = [EOS, "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<tool>"]
SPELLINGS += ["[UNK]", "<unk>", "<0x41>", "##ing", "▁the", "Ġ"]
unicode_texts = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]),
        st.characters(min_codepoint=0x10000),
        st.characters(categories=["Mn", "Mc", "Me", "Cc", "Cf", "Zs", "Zl", "Zp"]),
        st.sampled_from("אבגדهوزحकखฃ한中文ﬁ①Å\u0301\u200d\ufe0f\u202e\u00ad\x00\x7f\x85\u2028\r\n\t "),
    ),
    max_size=40,
)
plain_texts = st.text(" \n\t'0123456789abcdefghijklmnopqrstuvwxyzTHE.,()_=\"", max_size=60)
any_texts = st.lists(st.one_of(unicode_texts, plain_texts, st.sampled_from(SPELLINGS)), max_size=5).map("".join)


@pytest.mark.slow
@every_kind
@settings(max_examples=examples(30))
@given(texts=st.lists(any_texts, max_size=6))
def test_every_generated_text_has_the_ids_of_the_installed_library(kind, texts, tokenizers):
    encode, reference, _ = tokenizers(kind)
    assert [ids.tolist() for ids in encode(texts)] == [reference(text) for text in texts]


# text is never control


@every_kind
@settings(max_examples=examples(30))
@given(before=plain_texts, after=plain_texts, spelling=st.sampled_from(SPELLINGS))
def test_no_special_id_comes_out_of_text(kind, before, after, spelling, tokenizers):
    encode, _, info = tokenizers(kind)
    assert info.vocab_size == KINDS[kind][0]
    text = before + spelling + after
    encoded = DocumentEncoder(encode, info)([text, "plain"])
    special = list(info.special_ids.values())
    assert np.isin(encoded.tokens, special).sum() == len(encoded.ends)
    # where the vocabulary holds the spelling as an ordinary piece, the document is held back; elsewhere it is text
    assert encoded.with_special == ((0,) if set(encode([text])[0].tolist()) & set(special) else ())
    assert not encoded.with_special or kind in ("Unigram", "WordLevel")


def test_a_token_for_unknown_pieces_is_text_even_where_it_is_flagged_special(tmp_path):
    for kind, unknown in (("Unigram", "<unk>"), ("WordPiece", "[UNK]"), ("BPE with byte fallback", "<unk>")):
        tokenizer = write_vocabulary(tmp_path / f".{kind}", KINDS[kind][1](), {"eos_token": "</s>"})
        assert unknown not in read(tokenizer).info.special_ids
        assert read(tokenizer, eos=unknown).info.special_ids[unknown] == 0
    assert documents(["the 数"], tmp_path / ".WordPiece") == [[3, 0, 2]]


def test_special_tokens_that_are_asked_for_are_read_where_a_text_spells_them(tmp_path):
    kind = KINDS["byte-level BPE with chat tokens"][1]()
    chat_tokenizer = write_vocabulary(tmp_path / ".chat", kind, {"eos_token": EOS})
    meant = [f"<|im_start|>user\n{number} ü<|im_end|>\n<|im_start|><|im_start|>x" for number in range(50)]
    others = [f"{EOS} <s> <tool> <|im_start <|im_ end|>", "<|IM_START|>"]
    texts = [*meant, *others, f"<|im_start|>{EOS}"]
    library: Any = Tokenizer.from_file(str(chat_tokenizer / "tokenizer.json"))
    as_text = reference_of(chat_tokenizer / "tokenizer.json")
    expected = [library.encode(text, add_special_tokens=False).ids for text in meant] + [as_text(one) for one in others]
    assert all({16384, 16385} <= {*ids} for ids in expected[:50])
    assert 16387 in expected[50], "an added token that is not special"
    expected.append([16384, *as_text(EOS)])
    assert documents(texts, chat_tokenizer, special_tokens="parse=<|im_end|>,<|im_start|>") == [
        [*ids, 0] for ids in expected
    ]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.manifest.tokenizer.special_ids == {EOS: 0, "<s>": 16386}
        assert corpus.manifest.records.with_special_text == 2
    assert documents(texts, chat_tokenizer) == [[*as_text(text), 0] for text in texts]


class GivenIds:
    """A tokenizer library for texts that are lists of ids. It fails on any other text."""

    def __init__(self, dtype: type[np.generic] = np.uint32) -> None:
        self._dtype = dtype

    def __call__(self, texts: Sequence[str]) -> list[Any]:
        if any("x" in text for text in texts):
            raise EncodingError("no x")
        return [np.array(json.loads(text), self._dtype) for text in texts]


def info_of(*special: int, vocab_size: int = 9, eos_id: int = 0, bos_id: int | None = None) -> TokenizerInfo:
    return TokenizerInfo(
        **dict.fromkeys(("name", "sha256", "canonical_sha256", "library", "library_version", "eos"), "test"),
        vocab_size=vocab_size,
        special_ids={f"t{index}": index for index in special},
        eos_id=eos_id,
        bos=None if bos_id is None else "bos",
        bos_id=bos_id,
    )


@example(documents=[[4]], special={3, 4}, eos_id=0, bos_id=None, vocab_size=20)
@given(
    documents=st.lists(st.lists(st.integers(0, 19), max_size=6) | st.just("x"), max_size=6),
    special=st.sets(st.integers(0, 19), max_size=12),
    eos_id=st.integers(0, 19),
    bos_id=st.none() | st.integers(0, 19),
    vocab_size=st.sampled_from([20, 70_000]),
)
def test_exactly_the_texts_with_a_special_id_or_on_which_the_library_fails_are_held_back(
    documents, special, eos_id, bos_id, vocab_size
):
    special |= {eos_id} if bos_id is None else {eos_id, bos_id}
    info = info_of(*special, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id)
    encoded = DocumentEncoder(GivenIds(), info)([json.dumps(document) for document in documents])
    failed = [index for index, document in enumerate(documents) if document == "x"]
    bad = [index for index, document in enumerate(documents) if special & set(document)]
    start = [] if bos_id is None else [bos_id]
    good = [[*start, *document, eos_id] for index, document in enumerate(documents) if index not in [*bad, *failed]]
    assert dict(encoded.failed) == dict.fromkeys(failed, (NOT_ENCODED, "no x"))
    assert list(encoded.with_special) == bad
    assert encoded.tokens.tolist() == [token for document in good for token in document]
    assert encoded.ends.tolist() == np.cumsum([len(document) for document in good], dtype=int).tolist()
    assert encoded.tokens.dtype == np.uint32


@pytest.mark.parametrize("text", ["[9]", "[65541]"])
def test_an_id_outside_of_the_vocabulary_is_refused_rather_than_narrowed(text):
    with pytest.raises(TokenizerError, match=r"returned the id [0-9]+, and the vocabulary has 9 ids; expected"):
        DocumentEncoder(GivenIds(), info_of(0))(["[5]", text])
    for dtype in (np.int64, np.uint16, np.float64):
        with pytest.raises(
            TokenizerError, match=rf"library returned arrays of {np.dtype(dtype)}; expected ids of the "
        ):
            DocumentEncoder(GivenIds(dtype), info_of(0))(["[5, 6]"])


def loaded(monkeypatch: pytest.MonkeyPatch, load: Callable[[Any], Any]) -> Encoder:
    """An encoder for which a function loads the library."""
    for version in ("_encoder_02x", "_encoder_1x"):
        monkeypatch.setattr(encoder, version, load)
    return Encoder(json.dumps(words("a", "</s>")).encode())


def test_a_library_with_ids_of_another_type_is_refused_before_it_encodes(monkeypatch):
    with pytest.raises(TokenizerError, match="gives ids as int64, expected uint32"):
        loaded(monkeypatch, lambda _: lambda texts: [np.zeros(1, np.int64) for _ in texts])


@pytest.mark.skipif(version_of("tokenizers") < "1", reason="tokenizers before 1.0 loads such a pattern")
def test_a_pattern_that_looks_ahead_is_refused_with_the_version_that_reads_it():
    parsed = words("a", "</s>")
    pattern = {"Regex": r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"}
    split = {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False}
    with pytest.raises(TokenizerError) as caught:
        Encoder(json.dumps({**parsed, "pre_tokenizer": split}).encode())
    assert caught.value.hint == "tokenizers 1.0 refuses patterns that look ahead or back: pip install 'tokenizers<1'"


class PanicException(BaseException):
    """As Rust code in Python raises it."""


def test_after_a_panic_of_the_library_the_tokenizer_is_loaded_again(monkeypatch):
    def load(_: Any) -> Callable[[Sequence[str]], list[Any]]:
        said: list[str] = []

        def encode(texts: Sequence[str]) -> list[Any]:
            said.extend(texts)
            if "!" in said:
                raise PanicException("called `Option::unwrap()` on a `None` value")
            return [np.zeros(1, np.uint32) for _ in texts]

        return encode

    encode = loaded(monkeypatch, load)
    with pytest.raises(EncodingError, match="fails on the text: called `Option::unwrap"):
        encode(["!"])
    assert encode(["a"])[0].tolist() == [0]


# what a tokenizer is


def test_the_vocabulary_reaches_to_the_largest_id_of_model_and_added_tokens(tmp_path):
    content = words("a", "</s>", added=[special_token(7, "<far>"), special_token(4, "<near>", special=False)])
    info = read(write_vocabulary(tmp_path / "my-tokenizer", content)).info
    assert (info.vocab_size, info.name, info.library) == (8, "my-tokenizer", "tokenizers")
    assert info.special_ids == {"</s>": 1, "<far>": 7}
    content["added_tokens"].append(special_token(MAX_VOCABULARY - 1, "<farthest>"))
    assert read(write_vocabulary(tmp_path, content)).info.vocab_size == MAX_VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize(("num_words", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_a_vocabulary_over_65_536_is_stored_as_uint32(num_words, dtype, tmp_path):
    content, last = words(*(f"w{n}" for n in range(num_words))), num_words - 1
    tokenizer = write_vocabulary(tmp_path / ".many", content, {"eos_token": f"w{last}"})
    some = [0, 1, 65_534, num_words - 2]
    assert documents([" ".join(f"w{n}" for n in some), " \n"], tokenizer) == [[*some, last], [last]]
    with open_corpus(tmp_path / "out") as corpus:
        assert corpus.dtype == np.dtype(dtype)


@given(texts=st.lists(st.text(alphabet="ab é数🙂\n", max_size=3_000), max_size=40))
def test_texts_are_encoded_in_groups_of_few_bytes_each_text_once_and_in_order(texts):
    groups = list(inline_groups(texts))
    assert [index for start, stop in groups for index in range(start, stop)] == list(range(len(texts)))
    for start, stop in groups:
        assert stop == start + 1 or sum(len(text.encode()) for text in texts[start:stop]) <= 8_192


def test_an_eos_without_the_flag_of_special_tokens_stays_text_where_a_text_spells_it(tmp_path):
    added = [{**one, "special": one["content"] != EOS} for one in recipe()["added_tokens"]]
    tokenizer = write_vocabulary(tmp_path / ".tok", {**recipe(), "added_tokens": added}, {"eos_token": EOS})
    (document,) = documents([f"a text about {EOS} tokens"], tokenizer)
    assert document.count(0) == 1


def test_special_ids_are_compared_as_ranges_without_the_ids_between():
    assert list(encoder._ranges([9, 3, 4, 6, 3])) == [(3, 5), (6, 7), (9, 10)]
