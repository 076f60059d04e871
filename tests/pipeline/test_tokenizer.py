"""Tokenizers: which ids a text gets, which tokens delimit it, and what is refused. Both versions of the library."""

from __future__ import annotations

import json
import random
import re
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from tests.examples import examples
from tests.pipeline.inputs import EOS, TOKENIZER, build, jsonl, special_token, write_byte_tokenizer
from tokshard import build_corpus
from tokshard.errors import ConfigurationChangedError, SourceError, TokenizerError, UsageError
from tokshard.extras import version_of
from tokshard.format.manifest import TokenizerInfo
from tokshard.format.schema import MAX_VOCABULARY
from tokshard.pipeline.encode import encoder, tokenizer_file
from tokshard.pipeline.encode.encoder import DocumentEncoder, Encoder, EncodingError, inline_groups
from tokshard.pipeline.encode.tokenizer_file import (
    BOS_FROM_TOKENIZER,
    TokenizerFile,
    read_tokenizer,
)
from tokshard.pipeline.sources.records import NOT_ENCODED

Json = dict[str, Any]


# tokenizers of every kind, small enough to be read


def tokenizer_json(model: Json, pre_tokenizer: Json | None = None, added: Sequence[Json] = (), **parts: Any) -> Json:
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": list(added),
        "normalizer": None,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None,
        "decoder": None,
        "model": model,
        **parts,
    }


def words(*tokens: str, **parts: Any) -> Json:
    """A WordLevel tokenizer of these words, split at white space; the first stands for unknown ones."""
    model = {"type": "WordLevel", "vocab": {token: n for n, token in enumerate(tokens)}, "unk_token": tokens[0]}
    return tokenizer_json(model, {"type": "WhitespaceSplit"}, **parts)


@cache
def recipe() -> Json:
    parsed: Json = json.loads((TOKENIZER / "tokenizer.json").read_bytes())
    return parsed


def with_added(*added: Json) -> Json:
    return {**recipe(), "added_tokens": [*recipe()["added_tokens"], *added]}


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
ALPHABET = "abcdefghijklmnopqrstuvwxyz"
KINDS: dict[str, Callable[[], Json]] = {
    "byte-level BPE": recipe,
    "byte-level BPE with chat tokens": lambda: with_added(
        special_token(16384, "<|im_start|>"),
        special_token(16385, "<|im_end|>", lstrip=True, rstrip=True),
        special_token(16386, "<s>", normalized=True),
        special_token(16387, "<tool>", special=False),
        special_token(16388, "    ", special=False, single_word=True),
    ),
    "BPE with byte fallback": lambda: tokenizer_json(
        {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": {
                token: n
                for n, token in enumerate(
                    [
                        "<unk>",
                        "<s>",
                        "</s>",
                        *(f"<0x{byte:02X}>" for byte in range(256)),
                        "▁",
                        *ALPHABET,
                        "th",
                        "the",
                        "▁the",
                    ]
                )
            },
            "merges": ["t h", "th e", "▁ the"],
        },
        normalizer={
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "▁"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
            ],
        },
        added=[special_token(0, "<unk>"), special_token(1, "<s>"), special_token(2, "</s>")],
    ),
    "Unigram": lambda: tokenizer_json(
        {
            "type": "Unigram",
            "unk_id": 0,
            "byte_fallback": False,
            "vocab": [
                ["<unk>", 0.0],
                ["<s>", 0.0],
                ["</s>", 0.0],
                ["▁", -2.0],
                ["▁the", -3.5],
                ["ing", -3.75],
                ["<", -9.0],
                *([letter, -5.0 - n / 8] for n, letter in enumerate(ALPHABET)),
            ],
        },
        METASPACE,
        normalizer={"type": "NFKC"},
        added=[special_token(0, "<unk>"), special_token(1, "<s>"), special_token(2, "</s>")],
    ),
    "WordPiece": lambda: tokenizer_json(
        {
            "type": "WordPiece",
            "unk_token": "[UNK]",
            "continuing_subword_prefix": "##",
            "max_input_chars_per_word": 100,
            "vocab": {
                token: n
                for n, token in enumerate(
                    [
                        "[UNK]",
                        "<s>",
                        "</s>",
                        "the",
                        "##ing",
                        "[",
                        "]",
                        "<",
                        ">",
                        "/",
                        *ALPHABET,
                        *(f"##{c}" for c in ALPHABET),
                    ]
                )
            },
        },
        {"type": "BertPreTokenizer"},
        normalizer={
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        added=[special_token(0, "[UNK]"), special_token(1, "<s>"), special_token(2, "</s>")],
    ),
    "WordLevel": lambda: words("[UNK]", "the", "token", "a", "b", "<s>", "</s>", added=[]),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def write(directory: Path, content: Json, config: Json | None = None) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    if config is not None:
        (directory / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return directory


def read(directory: Path, *, eos: str | None = "</s>", bos: str | None = None) -> TokenizerFile:
    return read_tokenizer(str(directory), eos=eos, bos=bos)


def reference_of(path: Path) -> Callable[[str], list[int]]:
    """The installed library on the very file, as a person would call it."""
    tokenizer: Any = Tokenizer.from_file(str(path))
    if hasattr(tokenizer, "encode_batch_fast"):
        tokenizer.encode_special_tokens = True
        return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    return lambda text: tokenizer.encode(text, add_special_tokens=False, encode_special_tokens=True).ids


class Loaded(NamedTuple):
    """A tokenizer in tokshard's hands, and as a person would use it."""

    encode: Encoder
    reference: Callable[[str], list[int]]
    info: TokenizerInfo


@pytest.fixture(scope="session")
def tokenizers(tmp_path_factory) -> Callable[[str], Loaded]:
    """The tokenizer of each kind, loaded once."""
    root = tmp_path_factory.mktemp("tokenizers")

    @cache
    def load(kind: str) -> Loaded:
        directory = write(root / kind.replace(" ", "-"), KINDS[kind]())
        found = read(directory, eos=EOS if kind.startswith("byte-level") else "</s>")
        return Loaded(Encoder(found.content), reference_of(directory / "tokenizer.json"), found.info)

    return load


# equal ids

SPELLINGS = [
    EOS,
    "<s>",
    "</s>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool>",
    "[UNK]",
    "<unk>",
    "<0x41>",
    "##ing",
    "▁the",
    "Ġ",
]
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


@every_kind
def test_real_text_has_the_ids_of_the_installed_library(kind, tokenizers):
    encode, reference, _ = tokenizers(kind)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = ["this.py", "heapq.py", "_pydecimal.py", "tkinter/ttk.py", "encodings/cp1251.py", "html/entities.py"]
    texts = [(stdlib / name).read_text(encoding="utf-8")[:60_000] for name in names if (stdlib / name).exists()]
    assert sum(map(len, texts)) > 100_000
    assert [ids.tolist() for ids in encode(texts)] == [reference(text) for text in texts]


def bytes_of_ids() -> dict[int, bytes]:
    """What each id of the recipe's tokenizer stands for; its vocabulary spells bytes as characters."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    byte_of = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
    vocabulary = recipe()["model"]["vocab"]
    return {index: bytes(byte_of[c] for c in token) for token, index in vocabulary.items() if token != EOS}


@settings(max_examples=examples(60))
@given(text=any_texts)
def test_ids_of_the_quickstart_tokenizer_spell_the_text_byte_for_byte(text, tokenizers):
    encode = tokenizers("byte-level BPE").encode
    (ids,) = encode([text])
    spelled = bytes_of_ids()
    assert b"".join(spelled[index] for index in ids.tolist()) == text.encode()


# text is never control


@every_kind
@settings(max_examples=examples(30))
@given(before=plain_texts, after=plain_texts, spelling=st.sampled_from(SPELLINGS))
def test_no_special_id_comes_out_of_text(kind, before, after, spelling, tokenizers):
    encode, _, info = tokenizers(kind)
    text = before + spelling + after
    encoded = DocumentEncoder(encode, info)([text, "plain"])
    special = list(info.special_ids.values())
    assert np.isin(encoded.tokens, special).sum() == len(encoded.ends)
    # where the vocabulary holds the spelling as an ordinary piece, the document is held back; elsewhere it is text
    assert encoded.with_special == ((0,) if set(encode([text])[0].tolist()) & set(special) else ())
    assert not encoded.with_special or kind in ("Unigram", "WordLevel")


def test_a_token_for_unknown_pieces_is_text_even_where_it_is_flagged_special(tmp_path):
    for kind, unknown in (("Unigram", "<unk>"), ("WordPiece", "[UNK]"), ("BPE with byte fallback", "<unk>")):
        tokenizer = write(tmp_path / f".{kind}", KINDS[kind](), {"eos_token": "</s>"})
        assert unknown not in read(tokenizer).info.special_ids
        assert read(tokenizer, eos=unknown).info.special_ids[unknown] == 0
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "the 数"}]))
    corpus = build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tmp_path / ".WordPiece")
    assert corpus.document(0).tolist() == [3, 0, 2]


def test_an_added_token_that_is_not_special_is_used_in_text(tokenizers):
    encode = tokenizers("byte-level BPE with chat tokens").encode
    (ids,) = encode(["a<tool>b<|im_start|>"])
    assert 16387 in ids.tolist()
    assert 16384 not in ids.tolist()


@pytest.mark.parametrize("workers", [1, 2])
def test_special_tokens_in_text_stay_text_in_every_worker(workers, tmp_path):
    tokenizer = write(tmp_path / ".chat", KINDS["byte-level BPE with chat tokens"](), {"eos_token": "<|im_end|>"})
    texts = [f"{number} <|im_start|>user<|im_end|> {EOS}<s></s>" for number in range(2_000)]
    pad = "x" * 1_500
    for half in (0, 1):
        records = [{"text": text, "pad": pad} for text in texts[half::2]]
        (tmp_path / f"{half}.jsonl").write_bytes(jsonl(records))
    corpus = build(
        [tmp_path / "0.jsonl", tmp_path / "1.jsonl"],
        tmp_path / "out",
        tokenizer=tokenizer,
        workers=workers,
        task_bytes=1 << 20,
    )
    reference = reference_of(tokenizer / "tokenizer.json")
    assert corpus.eos_id == 16385
    for index, text in enumerate(texts[0::2] + texts[1::2]):
        ids = corpus.document(index).tolist()
        assert ids == [*reference(text), 16385]
        assert {0, 16384, 16386}.isdisjoint(ids)
    if workers > 1:
        assert len({shard.name for shard in corpus.shards}) > 2


PARSED = "parse=<|im_end|>,<|im_start|>"


@pytest.fixture
def chat_tokenizer(tmp_path) -> Path:
    return write(tmp_path / ".chat", KINDS["byte-level BPE with chat tokens"](), {"eos_token": EOS})


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_special_tokens_that_are_asked_for_are_read_where_a_text_spells_them(workers, chat_tokenizer, tmp_path):
    meant = [f"<|im_start|>user\n{number} ü<|im_end|>\n<|im_start|><|im_start|>x" for number in range(50)]
    others = [f"{EOS} <s> <tool> <|im_start <|im_ end|>", "<|IM_START|>"]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": text} for text in [*meant, *others, f"<|im_start|>{EOS}"]]))
    corpus = build(
        [tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=chat_tokenizer, workers=workers, special_tokens=PARSED
    )
    library: Any = Tokenizer.from_file(str(chat_tokenizer / "tokenizer.json"))
    as_text = reference_of(chat_tokenizer / "tokenizer.json")
    expected = [library.encode(text, add_special_tokens=False).ids for text in meant] + [as_text(one) for one in others]
    assert all(16384 in ids and 16385 in ids for ids in expected[:50])
    expected.append([16384, *as_text(EOS)])
    assert [document.tolist() for document in corpus] == [[*ids, corpus.eos_id] for ids in expected]
    assert corpus.manifest.tokenizer.special_ids == {EOS: 0, "<s>": 16386}
    assert corpus.manifest.records.with_special_text == 2


@pytest.mark.slow
def test_what_texts_mean_is_part_of_the_recipe(chat_tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "plain"}]))
    made = {
        name: build([tmp_path / "a.jsonl"], tmp_path / name, tokenizer=chat_tokenizer, workers=1, special_tokens=given)
        for name, given in (
            ("none", None),
            ("two", PARSED),
            ("turned", "parse=<|im_start|>,<|im_end|>,<|im_start|>"),
            ("one", "parse=<|im_end|>"),
        )
    }
    recipes = {name: corpus.manifest.fingerprints.recipe for name, corpus in made.items()}
    assert recipes["two"] == recipes["turned"]
    assert len(set(recipes.values())) == 3
    assert made["two"].manifest.build.special_tokens == "parse=<|im_start|>,<|im_end|>"
    (tmp_path / "b.jsonl").write_bytes(jsonl([{"text": "more"}]))
    with pytest.raises(ConfigurationChangedError, match="an append keeps"):
        build([tmp_path / "b.jsonl"], tmp_path / "two", tokenizer=chat_tokenizer, workers=1, append=True)
    build(
        [tmp_path / "b.jsonl"],
        tmp_path / "two",
        tokenizer=chat_tokenizer,
        workers=1,
        append=True,
        special_tokens=PARSED,
    )


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"special_tokens": "parse=<|im_start|>,<|end|>"}, "'<|end|>', which is no special token"),
        ({"special_tokens": "parse=<tool>"}, "'<tool>', which is no special token"),
        ({"special_tokens": f"parse={EOS}"}, f"'{EOS}', which delimits documents"),
        ({"special_tokens": "parse=<s>", "bos": "<s>"}, "'<s>', which delimits documents"),
        ({"special_tokens": "parse="}, "'', which is no special token"),
        ({"special_tokens": "<|im_start|>"}, "special_tokens is '<|im_start|>'"),
        ({"special_tokens": "parse=<s>", "chat": "own"}, "--special-tokens does not go with --chat"),
    ],
)
def test_tokens_that_text_cannot_mean_are_refused_with_those_that_it_can(options, named, chat_tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "plain"}]))
    with pytest.raises(UsageError, match=re.escape(named)) as caught:
        build([tmp_path / "a.jsonl"], tmp_path / "out", tokenizer=chat_tokenizer, workers=1, **options)
    assert "<|im_start|>" in caught.value.hint or "chat" in named
    assert not (tmp_path / "out").exists()


class SpecialIds:
    """A tokenizer that gives any ids, for texts that are lists of them."""

    def __call__(self, texts: Sequence[str]) -> list[Any]:
        return [np.array(json.loads(text), np.uint32) for text in texts]


def info_of(special_ids: dict[str, int], *, vocab_size: int, eos_id: int, bos_id: int | None) -> TokenizerInfo:
    return TokenizerInfo(
        name="test",
        sha256="0" * 64,
        canonical_sha256="0" * 64,
        vocab_size=vocab_size,
        library="tokenizers",
        library_version="0",
        special_ids=special_ids,
        eos="eos",
        eos_id=eos_id,
        bos=None if bos_id is None else "bos",
        bos_id=bos_id,
    )


@given(
    documents=st.lists(st.lists(st.integers(0, 19), max_size=6), max_size=6),
    special=st.sets(st.integers(0, 19), max_size=12),
    eos_id=st.integers(0, 19),
    bos_id=st.none() | st.integers(0, 19),
    vocab_size=st.sampled_from([20, 70_000]),
)
def test_exactly_the_texts_with_a_special_id_are_held_back(documents, special, eos_id, bos_id, vocab_size):
    special |= {eos_id} if bos_id is None else {eos_id, bos_id}
    info = info_of({f"t{n}": n for n in special}, vocab_size=vocab_size, eos_id=eos_id, bos_id=bos_id)
    encoded = DocumentEncoder(SpecialIds(), info)([json.dumps(document) for document in documents])
    bad = [index for index, document in enumerate(documents) if special & set(document)]
    start = [] if bos_id is None else [bos_id]
    good = [[*start, *document, eos_id] for index, document in enumerate(documents) if index not in bad]
    assert list(encoded.with_special) == bad
    assert encoded.tokens.tolist() == [token for document in good for token in document]
    assert encoded.ends.tolist() == np.cumsum([len(document) for document in good], dtype=int).tolist()
    assert encoded.tokens.dtype == np.uint32


class Faulty:
    """A tokenizer that fails on texts with an `x`, and gives ids of some type."""

    def __init__(self, dtype: type[np.generic] = np.uint32) -> None:
        self._dtype = dtype

    def __call__(self, texts: Sequence[str]) -> list[Any]:
        if any("x" in text for text in texts):
            raise EncodingError("no x")
        return [np.array(json.loads(text), self._dtype) for text in texts]


INFO = info_of({"eos": 0, "s": 1}, vocab_size=9, eos_id=0, bos_id=None)


def test_exactly_the_texts_on_which_the_library_fails_are_held_back():
    encoded = DocumentEncoder(Faulty(), INFO)(["[5]", "x", "[1]", "[6, 7]", "[x]"])
    assert dict(encoded.failed) == {1: (NOT_ENCODED, "no x"), 4: (NOT_ENCODED, "no x")}
    assert encoded.with_special == (2,)
    assert (encoded.tokens.tolist(), encoded.ends.tolist()) == ([5, 0, 6, 7, 0], [2, 5])


@pytest.mark.parametrize("dtype", [np.int64, np.uint16, np.uint8, np.float64])
def test_ids_of_another_width_are_refused_rather_than_read_as_other_ids(dtype):
    with pytest.raises(TokenizerError, match=rf"library returned arrays of {np.dtype(dtype)}; expected ids of the voc"):
        DocumentEncoder(Faulty(dtype), INFO)(["[5, 6]"])


@pytest.mark.parametrize("text", ["[9]", "[65541]"])
def test_an_id_outside_of_the_vocabulary_is_refused_rather_than_narrowed(text):
    with pytest.raises(TokenizerError, match=r"returned the id [0-9]+, and the vocabulary has 9 ids; expected"):
        DocumentEncoder(Faulty(), INFO)(["[5]", text])


def test_a_library_with_ids_of_another_type_is_refused_before_it_encodes(monkeypatch):
    for version in ("_encoder_02x", "_encoder_1x"):
        monkeypatch.setattr(encoder, version, lambda _: lambda texts: [np.zeros(1, np.int64) for _ in texts])
    with pytest.raises(TokenizerError, match="gives ids as int64, expected uint32"):
        Encoder(json.dumps(words("a", "</s>")).encode())


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
    loaded = 0

    def load(_: Any) -> Callable[[Sequence[str]], list[Any]]:
        nonlocal loaded
        loaded += 1
        broken = False

        def encode(texts: Sequence[str]) -> list[Any]:
            nonlocal broken
            broken = broken or "!" in "".join(texts)
            if broken:
                raise PanicException("called `Option::unwrap()` on a `None` value")
            return [np.zeros(1, np.uint32) for _ in texts]

        return encode

    for version in ("_encoder_02x", "_encoder_1x"):
        monkeypatch.setattr(encoder, version, load)
    encode = Encoder(json.dumps(words("a", "</s>")).encode())
    with pytest.raises(EncodingError, match="fails on the text: called `Option::unwrap"):
        encode(["!"])
    assert (encode(["a"])[0].tolist(), loaded) == ([0], 2)


# truncation and padding


@pytest.mark.parametrize("block", ["truncation", "padding", "both"])
def test_blocks_that_cut_or_pad_documents_are_ignored_with_a_note(block, tmp_path):
    content = words("[UNK]", "a", "</s>", "[PAD]")
    blocks: Json = {
        "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
        "padding": {
            "strategy": {"Fixed": 9},
            "direction": "Right",
            "pad_to_multiple_of": None,
            "pad_id": 3,
            "pad_type_id": 0,
            "pad_token": "[PAD]",
        },
    }
    asked = {name: value for name, value in blocks.items() if block in (name, "both")}
    tokenizer = write(tmp_path / ".cutting", {**content, **asked}, {"eos_token": "</s>"})
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "a " * 50}, {"text": "a"}]))
    corpus = build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    assert [document.tolist() for document in corpus.documents()] == [[1] * 50 + [2], [1, 2]]
    assert read(tokenizer).notes == tuple(
        f"the tokenizer asks for {name}; documents are never truncated or padded, so this is ignored" for name in asked
    )
    # the tokenizer lies next to the shards as it was given
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (tokenizer / "tokenizer.json").read_bytes()


def test_a_tokenizer_without_such_blocks_has_no_note(tmp_path):
    assert read(write(tmp_path, words("a", "</s>"))).notes == ()


@pytest.mark.parametrize("truncation", [None, {"max_length": 3, "strategy": "LongestFirst", "stride": 0}])
def test_a_vocabulary_with_a_lone_surrogate_is_left_to_the_library_to_judge(truncation, tmp_path):
    content = {**words("a", "</s>", "\ud83d"), "truncation": truncation}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    found = read(tmp_path)
    with pytest.raises(TokenizerError, match="cannot load the tokenizer"):
        Encoder(found.content)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tokenizer_config.json", b'{"bos_token": "\\ud800"}'),
        ("tokenizer_config.json", b'{"bos_token": "\xff"}'),
        ("chat_template.jinja", b"{{ '\xff' }}"),
    ],
)
def test_a_file_next_to_the_tokenizer_that_is_not_utf_8_is_refused_by_name(name, content, tmp_path):
    write(tmp_path, words("a", "</s>"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"{name} (holds characters that are not valid UTF-8|is not JSON)"):
        read(tmp_path)


# what changes text


NFKC, LOWERCASE, SEQUENCE = {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Sequence"}


@pytest.mark.parametrize(
    ("normalizer", "name"),
    [
        (None, None),
        ({**SEQUENCE, "normalizers": []}, None),
        (NFKC, "NFKC"),
        ({**SEQUENCE, "normalizers": [NFKC, {**SEQUENCE, "normalizers": [LOWERCASE, NFKC]}]}, "NFKC, Lowercase"),
        ({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}, "Replace"),
    ],
)
def test_a_normalizer_that_changes_text_is_named_by_its_steps(normalizer, name, tmp_path):
    assert read(write(tmp_path, words("a", "</s>", normalizer=normalizer))).normalizer == name


def test_spelling_spaces_and_bytes_as_the_vocabulary_does_is_no_change_of_text(tmp_path):
    space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    steps = [{"type": "Prepend", "prepend": "▁"}, space, {"type": "ByteLevel"}]
    normalizer = {"type": "Sequence", "normalizers": steps}
    assert read(write(tmp_path, words("a", "</s>", normalizer=normalizer))).normalizer is None


# EOS and BOS


@pytest.mark.parametrize(
    "eos", ["</s>", {"content": "</s>", "lstrip": False}, {"__type": "AddedToken", "content": "</s>", "special": True}]
)
def test_eos_comes_from_the_configuration_as_text_or_as_an_object(eos, tmp_path):
    info = read(write(tmp_path, words("a", "b", "</s>"), {"eos_token": eos}), eos=None).info
    assert (info.eos, info.eos_id, info.bos, info.bos_id) == ("</s>", 2, None, None)
    assert info.special_ids == {"</s>": 2}


def test_the_option_goes_before_the_configuration(tmp_path):
    directory = write(tmp_path, words("a", "b", "</s>"), {"eos_token": "</s>"})
    assert read(directory, eos="b").info.eos_id == 1


@pytest.mark.parametrize("config", [None, {}, {"eos_token": None}, {"eos_token": ""}, {"eos_token": {"special": True}}])
def test_a_tokenizer_that_names_no_eos_is_refused_with_the_tokens_to_choose_from(config, tmp_path):
    content = words("a", "<s>", "</s>", added=[special_token(1, "<s>"), special_token(2, "</s>")])
    with pytest.raises(TokenizerError, match="names no EOS token, and every document has to end in one") as caught:
        read(write(tmp_path, content, config), eos=None)
    assert caught.value.hint == "give it with --eos TOKEN; its special tokens are '<s>', '</s>'"
    assert caught.value.exit_code == 2


def test_bos_is_added_only_when_asked_for(tmp_path):
    content = words("a", "<s>", "</s>", "<start>", added=[special_token(1, "<s>")])
    directory = write(tmp_path / ".tok", content, {"eos_token": "</s>", "bos_token": {"content": "<s>"}})
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "a a"}]))
    for bos, ids in ((None, [0, 0, 2]), (BOS_FROM_TOKENIZER, [1, 0, 0, 2]), ("<start>", [3, 0, 0, 2])):
        corpus = build(tmp_path / "a.jsonl", tmp_path / f"out-{bos}", tokenizer=directory, bos=bos)
        assert corpus.document(0).tolist() == ids
        assert corpus.bos_id == (None if bos is None else ids[0])


def test_bos_from_a_configuration_that_names_none_is_refused(tmp_path):
    directory = write(tmp_path, words("a", "</s>"), {"eos_token": "</s>", "bos_token": None})
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json names no bos_token, which --bos auto asks for"):
        read(directory, bos=BOS_FROM_TOKENIZER)


def test_a_configuration_that_asks_for_bos_is_not_passed_over_in_silence(tmp_path):
    config = {"eos_token": "</s>", "bos_token": "<s>", "add_bos_token": True}
    directory = write(tmp_path, words("a", "<s>", "</s>"), config)
    assert read(directory).notes == (
        "the tokenizer's configuration asks for BOS; documents get it with --bos auto only",
    )
    assert read(directory, bos="auto").notes == ()
    assert read(write(tmp_path, words("a", "</s>"), {"add_bos_token": True})).notes == ()


@pytest.mark.parametrize(("option", "tokens"), [("--eos", {"eos": "<gone>"}), ("--bos", {"bos": "<gone>"})])
def test_a_delimiter_that_is_not_in_the_vocabulary_is_refused(option, tokens, tmp_path):
    content = words("a", "</s>", added=[special_token(1, "</s>")])
    with pytest.raises(TokenizerError, match=rf"token '<gone>' \({option}\) is not in the vocabulary of") as caught:
        read(write(tmp_path, content), **tokens)
    assert caught.value.hint == "give one of its tokens, such as '</s>'"


# what a tokenizer is


def test_the_vocabulary_reaches_to_the_largest_id_of_model_and_added_tokens(tmp_path):
    content = words("a", "</s>", added=[special_token(7, "<far>"), special_token(4, "<near>", special=False)])
    info = read(write(tmp_path / "my-tokenizer", content)).info
    assert (info.vocab_size, info.name, info.library) == (8, "my-tokenizer", "tokenizers")
    assert info.special_ids == {"</s>": 1, "<far>": 7}


@pytest.mark.parametrize(
    ("kind", "vocab_size"),
    [
        ("byte-level BPE", 16_384),
        ("byte-level BPE with chat tokens", 16_384 + 5),
        ("BPE with byte fallback", 3 + 256 + 27 + 3),
        ("Unigram", 7 + 26),
        ("WordPiece", 10 + 26 + 26),
        ("WordLevel", 7),
    ],
)
def test_the_size_of_every_kind_of_vocabulary_is_known(kind, vocab_size, tokenizers):
    assert tokenizers(kind).info.vocab_size == vocab_size


def test_a_vocabulary_with_an_id_far_away_is_refused(tmp_path):
    content = words("a", "</s>", added=[special_token(MAX_VOCABULARY - 1, "near")])
    assert read(write(tmp_path, content)).info.vocab_size == MAX_VOCABULARY
    content["added_tokens"].append(special_token(2**32 - 1, "far"))
    with pytest.raises(TokenizerError, match=r"gives 'far' the id 4,294,967,295; ids up to 16,777,215 are supported"):
        read(write(tmp_path, content))


def test_an_id_far_away_is_refused_although_an_added_token_gives_its_token_another(tmp_path):
    content = words("a", "</s>", added=[special_token(5, "b")])
    content["model"]["vocab"]["b"] = 2**32 - 1
    with pytest.raises(TokenizerError, match=r"gives 'b' the id 4,294,967,295"):
        read(write(tmp_path, content))


def test_a_file_or_its_directory_name_the_same_tokenizer(tmp_path):
    directory = write_byte_tokenizer(tmp_path / "bytes")
    of_directory = read_tokenizer(str(directory), eos=None, bos=None).info
    assert of_directory.name == "bytes"
    assert read_tokenizer(str(directory / "tokenizer.json"), eos=None, bos=None).info == of_directory
    other = directory / "other.json"
    other.write_bytes((directory / "tokenizer.json").read_bytes())
    assert read_tokenizer(str(other), eos=None, bos=None).info.name == "other.json"


def test_layout_changes_the_hash_of_the_file_and_not_that_of_its_meaning(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps(words("a", "</s>"), indent=3))
    loose = read(tmp_path).info
    (tmp_path / "tokenizer.json").write_text(json.dumps(words("a", "</s>"), sort_keys=True))
    tight = read(tmp_path).info
    assert loose.sha256 != tight.sha256
    assert loose.canonical_sha256 == tight.canonical_sha256
    assert read(write(tmp_path, words("b", "</s>"))).info.canonical_sha256 != tight.canonical_sha256


@pytest.mark.slow
@pytest.mark.parametrize(("num_words", "dtype"), [(65_536, "uint16"), (65_537, "uint32"), (70_001, "uint32")])
def test_a_vocabulary_over_65_536_is_stored_as_uint32(num_words, dtype, tmp_path):
    tokenizer = write(
        tmp_path / ".many", words(*(f"w{n}" for n in range(num_words))), {"eos_token": f"w{num_words - 1}"}
    )
    some = [0, 1, 65_534, num_words - 2]
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": " ".join(f"w{n}" for n in some)}]))
    corpus = build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    assert corpus.dtype == np.dtype(dtype)
    assert corpus.document(0).tolist() == [*some, num_words - 1]


# what is not a tokenizer


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\xff\xfe", "is not JSON"),
        (b"[]", "is not JSON: it holds a list, expected an object"),
        (b"[" * 100_000, "is not JSON"),
        (b"{}", "is not a tokenizer.json: KeyError('model')"),
        (b'{"model": {}}', "is not a tokenizer.json: KeyError('vocab')"),
        (b'{"model": {"vocab": {}}}', "the vocabulary is empty"),
        (b'{"model": {"vocab": {"a": "x"}}}', "is not a tokenizer.json: ValueError"),
        (b'{"model": {"vocab": {"a": Infinity}}}', "is not a tokenizer.json: OverflowError"),
        (b'{"model": {"vocab": {"a": -1}}}', "the vocabulary has a negative id"),
        (
            b'{"model": {"vocab": {"a": 0}}, "added_tokens": [{"content": "b"}]}',
            "is not a tokenizer.json: KeyError('id')",
        ),
        (b'{"model": {"vocab": 7}}', "is not a tokenizer.json: TypeError"),
    ],
)
def test_a_file_that_is_no_tokenizer_is_refused(content, problem, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(TokenizerError) as caught:
        read(tmp_path)
    assert problem in caught.value.problem
    assert caught.value.problem.startswith(f"{tmp_path / 'tokenizer.json'} ")
    assert caught.value.hint == "give a Hugging Face tokenizer.json with --tokenizer"


def test_a_configuration_that_is_not_json_is_named(tmp_path):
    write(tmp_path, words("a", "</s>"))
    (tmp_path / "tokenizer_config.json").write_text("{eos_token: </s>}")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json is not JSON"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["typo.json", "typo.model", "typo.tiktoken"])
def test_a_file_that_does_not_exist_is_not_looked_for_on_the_hub(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=rf"^tok/{name} cannot be read: No such file or directory"):
        read(Path("tok", name))


@pytest.mark.parametrize("is_folder_there", [False, True])
def test_a_mistyped_path_is_said_not_to_exist_before_the_hub_is_named(is_folder_there, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if is_folder_there:
        (tmp_path / "tok").mkdir()

    def refuse(location: str) -> None:
        raise SourceError(f"{location} cannot be fetched: no network", hint="check the network")

    monkeypatch.setattr(tokenizer_file, "fetch_tokenizer", refuse)
    with pytest.raises(SourceError, match=r"^there is no file or folder tok/typo, and on the hub: tok/typo") as caught:
        read(Path("tok/typo"))
    assert caught.value.hint == "correct the path; or, if a model of the hub is meant: check the network"


@pytest.mark.parametrize("location", ["./typo", "../typo"])
def test_a_path_that_begins_with_a_dot_is_never_looked_for_on_the_hub(location, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=r"typo cannot be read: No such file or directory"):
        read_tokenizer(location, eos=None, bos=None)


def test_a_name_without_an_owner_is_no_model_of_the_hub(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TokenizerError, match=r"(?m)^there is no file or folder gpt2$") as caught:
        read(Path("gpt2"))
    assert caught.value.hint.endswith("or a model of the hub with its owner, such as openai-community/gpt2")


@pytest.mark.parametrize("place", ["nowhere", "empty", "nowhere.json"])
def test_a_missing_tokenizer_is_named(place, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(TokenizerError, match="cannot be read: No such file or directory") as caught:
        read(tmp_path / place)
    assert caught.value.hint == "give a tokenizer.json, or a directory that holds one, with --tokenizer"


def test_a_model_that_the_library_does_not_know_is_refused_by_the_build(tmp_path):
    content = words("a", "</s>")
    content["model"]["type"] = "Telepathy"
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "a"}]))
    with pytest.raises(TokenizerError, match=r"^tokenizers [0-9].* cannot load the tokenizer: ") as caught:
        build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=write(tmp_path / ".bad", content), eos="</s>")
    assert caught.value.hint == "check that it is a tokenizer.json, and try another version of tokenizers"


def test_a_text_without_any_token_is_a_document_of_its_delimiter(tmp_path):
    tokenizer = write(tmp_path / ".words", words("a", "</s>"), {"eos_token": "</s>"})
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": " \n"}, {"text": "a"}]))
    corpus = build(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer)
    assert [document.tolist() for document in corpus.documents()] == [[1], [0, 1]]


def test_long_texts_are_encoded_whole(tokenizers):
    encode, reference, _ = tokenizers("byte-level BPE")
    rng = random.Random(7)
    text = " ".join(rng.choice(["stream", "Größe", "数据", "🙂", "\n\n", "x" * 50]) for _ in range(20_000))
    (ids,) = encode([text])
    assert ids.tolist() == reference(text)
    assert len(ids) > 30_000


@given(texts=st.lists(st.text(alphabet="ab é数🙂\n", max_size=3_000), max_size=40))
def test_texts_are_encoded_in_groups_of_few_bytes_each_text_once_and_in_order(texts):
    groups = list(inline_groups(texts))
    assert [index for start, stop in groups for index in range(start, stop)] == list(range(len(texts)))
    for start, stop in groups:
        assert stop == start + 1 or sum(len(text.encode()) for text in texts[start:stop]) <= 8_192


def test_short_texts_encoded_in_groups_have_the_ids_that_each_has_alone():
    """Of sizes around the bound of a group, among them the empty text."""
    encode = Encoder((TOKENIZER / "tokenizer.json").read_bytes())
    words = "def f(x):\n    return x + 1  # größer 数据 🙂 <|endoftext|>\n"
    texts = [
        (words * 200)[offset : offset + size] for offset in range(9) for size in (0, 1, 30, 900, 4_096, 8_191, 8_193)
    ]
    together = encode(texts)
    assert len(together) == len(texts)
    for text, ids in zip(texts, together, strict=True):
        assert ids.tolist() == encode([text])[0].tolist()


@pytest.mark.parametrize(
    ("ids", "named"), [((16484, 16485), "16484.* gives it 16384"), ((16384, 16384), "16384.* gives it 16385")]
)
def test_a_file_that_gives_special_tokens_other_ids_than_the_library_is_refused(ids, named, tmp_path):
    added = [special_token(number, token) for number, token in zip(ids, ["<|a|>", "<|b|>"], strict=True)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_added(*added)))
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([{"text": "one"}]))
    with pytest.raises(TokenizerError, match=named):
        build(source, tmp_path / "out", tokenizer=str(tmp_path), eos=EOS)
    assert not (tmp_path / "out").exists()


def test_an_eos_without_the_flag_of_special_tokens_stays_text_where_a_text_spells_it(tmp_path):
    parsed = with_added()
    (entry,) = (one for one in parsed["added_tokens"] if one["content"] == EOS)
    parsed["added_tokens"] = [{**entry, "special": False}]
    (tmp_path / "tokenizer.json").write_text(json.dumps(parsed))
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([{"text": f"a text about {EOS} tokens"}]))
    with build(source, tmp_path / "out", tokenizer=str(tmp_path), eos=EOS) as corpus:
        assert [document.tolist().count(corpus.eos_id) for document in corpus] == [1]


def test_texts_that_spell_added_tokens_which_are_not_special_are_counted_by_token(tmp_path):
    flags = {"special": False, "rstrip": True}
    added = [special_token(16384, "<|fim|>", special=False), special_token(16385, "<sep>", **flags)]
    (tmp_path / "tokenizer.json").write_text(json.dumps(with_added(*added)))
    source = tmp_path / "in.jsonl"
    source.write_bytes(jsonl([{"text": "a <|fim|> b <|fim|>"}, {"text": f"<|fim|> {EOS}"}, {"text": "c <sep>  d"}]))
    found = build_corpus([source], tokenizer=str(tmp_path), eos=EOS, out=tmp_path / "out", workers=1)
    assert found.notes == (
        "the added token '<sep>' takes white space beside it out of texts (rstrip)",
        "1 text spells '<sep>', an added token that is not special: it is that token there",
        "2 texts spell '<|fim|>', an added token that is not special: it is that token there",
    )
