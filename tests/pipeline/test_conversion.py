"""SentencePiece models and tiktoken ranks: converted only where every text gets the ids of their own libraries."""

from __future__ import annotations

import base64
import json
import random
import sys
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline.inputs import EOS, TOKENIZER, build, jsonl
from tokshard.cli.convert_tokenizer import convert_tokenizer
from tokshard.errors import TokenizerError, UsageError
from tokshard.interop import tiktoken_ranks
from tokshard.interop import tokenizers as conversion
from tokshard.pipeline.encode.encoder import Encoder
from tokshard.pipeline.encode.tokenizer_file import TokenizerFile, read_tokenizer

# as cl100k_base; tokenizers 1.x has no regular expressions but those of well-known encodings
LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
WORDS = LETTERS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def real_texts() -> list[str]:
    """Sources and their tables of scripts and entities, in paragraphs."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = ["heapq.py", "argparse.py", "_pydecimal.py", "html/entities.py", "encodings/cp1251.py", "textwrap.py"]
    parts = [part for name in names for part in (stdlib / name).read_text(encoding="utf-8").split("\n\n")]
    rng = random.Random(7)
    scripts = "".join(chr(rng.randrange(0xA0, 0x3000)) for _ in range(20_000))
    return [*parts, *(scripts[start : start + 50] for start in range(0, len(scripts), 50)), "\n\n".join(parts[:400])]


def write_ranks(directory: Path, name: str = "small.tiktoken", *, has_pattern: bool = True) -> Path:
    """The recipe's byte-level vocabulary as ranks."""
    byte_of = {character: byte for byte, character in tiktoken_ranks._byte_characters()}
    vocabulary = json.loads((TOKENIZER / "tokenizer.json").read_bytes())["model"]["vocab"]
    ranks = {bytes(byte_of[c] for c in token): index for token, index in vocabulary.items() if token != EOS}
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda i: i[1]))
    (directory / name).write_bytes(b"".join(lines))
    if has_pattern:
        content = {"pat_str": WORDS, "special_tokens": {EOS: vocabulary[EOS], "<|pad|>": len(vocabulary)}}
        (directory / "tiktoken.json").write_text(json.dumps(content))
    return directory / name


def convert_and_read(path: Path, *, bos: str | None = None) -> TokenizerFile:
    """The tokenizer that a build reads once the file is converted."""
    made = conversion.convert_tokenizer(path, path.parent / "converted")
    return read_tokenizer(str(made.directory), eos=None, bos=bos)


def encoder_of(found: TokenizerFile) -> Callable[[str], list[int]]:
    encode = Encoder(found.content)
    return lambda text: encode([text])[0].tolist()


# SentencePiece

KINDS: dict[str, dict[str, Any]] = {
    "bytes, nothing normalized": {"remove_extra_whitespaces": False},
    "bytes, extra spaces removed": {"remove_extra_whitespaces": True},
    "bytes, no prefix, user symbols": {
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "user_defined_symbols": ["<pad>", "\n\n"],
    },
    "unknown pieces, digits split": {"byte_fallback": False, "split_digits": True},
    "pieces over several words": {"split_by_whitespace": False},
}


def train(directory: Path, name: str, **options: Any) -> Path:
    sentencepiece = pytest.importorskip("sentencepiece")
    (directory / "texts").write_text("\n".join(text for text in real_texts() if text.isascii()), encoding="utf-8")
    fixed = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 1_500, "minloglevel": 2}
    settings = {**fixed, "normalization_rule_name": "identity", **options}
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "texts"), model_prefix=str(directory / name), character_coverage=0.999, **settings
    )
    return directory / f"{name}.model"


@pytest.mark.interop
@pytest.mark.parametrize("kind", KINDS)
def test_a_bpe_model_gives_the_ids_of_sentencepiece(kind, tmp_path):
    from sentencepiece import SentencePieceProcessor

    path = train(tmp_path, "tokenizer", **KINDS[kind])
    found = convert_and_read(path, bos="auto")
    assert (found.info.eos, found.info.eos_id, found.info.bos_id) == ("</s>", 2, 1)
    note = conversion.convert_tokenizer(path, tmp_path / "converted").note
    assert note.startswith("converted from the SentencePiece model tokenizer.model, SHA-256 ")
    encode, original = encoder_of(found), SentencePieceProcessor(model_file=str(path)).encode
    texts = [*real_texts(), "<s>x</s><unk><0x41>", "the <pad> and <pad><pad>the"]
    assert [encode(text) for text in texts] == [original(text) for text in texts]

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def every_text(text: str) -> None:
        assert encode(text) == original(text)

    every_text()


@pytest.mark.interop
def test_a_build_with_a_sentencepiece_model_is_as_any_other(tmp_path):
    path = train(tmp_path, "m")
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "def f(</s>): pass"}] * 3))
    corpus = build(
        tmp_path / "a.jsonl", tmp_path / "out", tokenizer=conversion.convert_tokenizer(path, tmp_path / "tok").directory
    )
    assert corpus.manifest.tokenizer.name == "tok"
    assert (tmp_path / "out" / "tokenizer.json").exists()
    assert corpus.document(0).tolist().count(2) == 1


@pytest.mark.interop
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"model_type": "unigram"}, "it is not a BPE model"),
        ({"model_type": "char"}, "it is not a BPE model"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes characters"),
        ({"treat_whitespace_as_suffix": True}, "it treats white space in an unusual way"),
        # tokenizers normalizes each part between such symbols by itself, and puts a prefix before each
        ({"user_defined_symbols": ["<x>"]}, "'<x>' has the ids .* by its own library and .* by tokenizers"),
    ],
)
def test_a_model_that_cannot_be_expressed_is_refused(options, problem, tmp_path):
    path = train(tmp_path, "m", vocab_size=700, **options)
    with pytest.raises(TokenizerError, match=rf"m\.model cannot become a tokenizer\.json: {problem}") as caught:
        convert_and_read(path)
    assert "tokenizer.json" in caught.value.hint


# tiktoken


@pytest.mark.interop
def test_ranks_give_the_ids_of_tiktoken(tmp_path):
    import tiktoken

    path = write_ranks(tmp_path)
    found = convert_and_read(path)
    assert (found.info.eos, found.info.special_ids) == (EOS, {EOS: 0, "<|pad|>": 16384})
    ranks = dict(_ranks(path))
    original = tiktoken.Encoding("small", pat_str=WORDS, mergeable_ranks=ranks, special_tokens={EOS: 0})
    encode = encoder_of(found)
    texts = [*real_texts(), f"a{EOS}b<|pad|>", "a" * 3_000]
    assert [encode(text) for text in texts] == [original.encode_ordinary(text) for text in texts]

    @given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
    def every_text(text: str) -> None:
        assert encode(text) == original.encode_ordinary(text)

    every_text()


def _ranks(path: Path) -> Sequence[tuple[bytes, int]]:
    lines = (line.split() for line in path.read_bytes().splitlines())
    return [(base64.b64decode(token), int(rank)) for token, rank in lines]


@pytest.mark.interop
def test_ranks_of_a_known_name_have_to_be_those_that_tiktoken_knows(tmp_path):
    path = write_ranks(tmp_path, "cl100k_base.tiktoken", has_pattern=False)
    with pytest.raises(TokenizerError, match="is not the cl100k_base that tiktoken knows"):
        convert_and_read(path)


@pytest.mark.interop
def test_ranks_alone_do_not_say_how_words_are_split(tmp_path):
    path = write_ranks(tmp_path, has_pattern=False)
    with pytest.raises(
        TokenizerError, match="does not say how words are split, and small is not an encoding"
    ) as caught:
        convert_and_read(path)
    assert caught.value.hint.startswith("put tiktoken.json next to it")


@pytest.mark.interop
@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "is neither a SentencePiece model nor a tiktoken rank file"),
        (b"{}", "is neither a SentencePiece model nor a tiktoken rank file"),
        (b"YQ== 0\nno rank\n", "is not a tiktoken rank file"),
        (b"YQ== 0\n", "byte 0x00 has no rank"),
    ],
)
def test_a_file_that_is_neither_is_refused(content, problem, tmp_path):
    write_ranks(tmp_path)
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=problem):
        convert_and_read(tmp_path / "a.model")


# without the packages


@pytest.mark.parametrize(
    ("package", "content", "what"),
    [("sentencepiece", b"\n\x0e\n", "a SentencePiece model"), ("tiktoken", b"YQ== 0\n", "a tiktoken rank file")],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(package, content, what, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    (tmp_path / "a.model").write_bytes(content)
    with pytest.raises(TokenizerError, match=rf"a\.model cannot be read as {what}: a package is missing") as caught:
        convert_and_read(tmp_path / "a.model")
    assert caught.value.hint.startswith("pip install 'tokshard[convert]'")


def test_a_conversion_that_differs_on_one_text_is_refused(tmp_path, monkeypatch):
    def convert(path: Path) -> conversion.Conversion:
        content = (TOKENIZER / "tokenizer.json").read_bytes()
        return conversion.Conversion(content=content, config={"eos_token": EOS}, original=lambda _: [1, 2], note="")

    monkeypatch.setattr(conversion, "convert", convert)
    with pytest.raises(TokenizerError, match=r"a\.model cannot become a tokenizer\.json: '' has the ids \[1, 2\] by"):
        convert_and_read(tmp_path / "a.model")


# the command


@pytest.fixture
def same_as_the_recipe(monkeypatch):
    """A conversion without its packages: every file becomes the recipe's tokenizer."""
    found = conversion.Conversion(
        content=(TOKENIZER / "tokenizer.json").read_bytes(),
        config={"eos_token": EOS},
        original=lambda _: [],
        note="made",
    )
    monkeypatch.setattr(conversion, "convert", lambda _: found)
    monkeypatch.setattr(conversion, "probes", lambda _: iter([""]))


def test_a_build_names_the_command_that_converts_what_it_does_not_read(tmp_path):
    (tmp_path / "a.model").write_bytes(b"")
    with pytest.raises(TokenizerError, match=r"a\.model is not a tokenizer\.json") as caught:
        read_tokenizer(str(tmp_path / "a.model"), eos=None, bos=None)
    assert "tokshard convert-tokenizer" in caught.value.hint


@pytest.mark.usefixtures("same_as_the_recipe")
def test_the_command_writes_a_directory_that_a_build_takes(tmp_path):
    made = CliRunner().invoke(convert_tokenizer, [str(tmp_path / "a.model"), "--out", str(tmp_path / "tok")])
    assert (made.exit_code, made.output.splitlines()[0]) == (0, "made")
    assert read_tokenizer(str(tmp_path / "tok"), eos=None, bos=None).info.eos == EOS


@pytest.mark.usefixtures("same_as_the_recipe")
def test_a_conversion_replaces_no_other_tokenizer(tmp_path):
    conversion.convert_tokenizer(tmp_path / "a.model", tmp_path)
    conversion.convert_tokenizer(tmp_path / "a.model", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UsageError, match="exists and would be replaced"):
        conversion.convert_tokenizer(tmp_path / "a.model", tmp_path)


@pytest.mark.usefixtures("same_as_the_recipe")
def test_an_eos_that_the_vocabulary_lacks_is_refused(tmp_path):
    with pytest.raises(TokenizerError, match=r"token '<nothing>' \(--eos\) is not in the vocabulary"):
        conversion.convert_tokenizer(tmp_path / "a.model", tmp_path, eos="<nothing>")
