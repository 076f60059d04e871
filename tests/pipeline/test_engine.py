"""``--engine``: another library encodes texts, if it gives the ids of `tokenizers`."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.pipeline.inputs import TOKENIZER, build, write_byte_tokenizer
from tests.pipeline.places import write
from tests.pipeline.vocabularies import words, write_vocabulary
from tokshard.errors import ConfigurationChangedError, TokenizerError
from tokshard.extras import version_of
from tokshard.pipeline.encode import encoder, engine
from tokshard.pipeline.encode.encoder import Encoder, EncodeTexts
from tokshard.pipeline.encode.engine import hard_texts

pytest.importorskip("fastokens")

TEXTS = ["ab", "", "é\0\U0001f600 x" * 9_000, "<|endoftext|>", *map(str, range(300))]
ENGINE = {"engine": "fastokens"}


@pytest.fixture(autouse=True)
def few_characters(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Try the first characters alone, but where all are the matter."""
    if "tokenizer" not in request.fixturenames:
        monkeypatch.setattr(engine, "_LAST", 0x250)


@pytest.fixture
def wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that gives one more id to texts with a ``Q`` between underscores."""
    right: Callable[[Any], EncodeTexts] = encoder._encoder_fastokens

    def load(tokenizer: Any) -> EncodeTexts:
        encode = right(tokenizer)
        extra = np.ones(1, np.uint32)
        return lambda texts: [
            np.concatenate([ids, extra]) if "_Q_" in text else ids
            for text, ids in zip(texts, encode(texts), strict=True)
        ]

    monkeypatch.setattr(encoder, "_encoder_fastokens", load)


@pytest.mark.parametrize("options", [{}, {"workers": 2, "task_bytes": 1 << 20}, {"dedup": "exact"}])
def test_an_engine_writes_the_same_shards_and_is_named_in_the_manifest(options, tmp_path):
    source = write(tmp_path / "a.jsonl", TEXTS * 40 if "workers" in options else TEXTS)
    usual, fast = (build(source, tmp_path / name, **options, **more) for name, more in (("a", {}), ("b", ENGINE)))
    assert fast.fingerprint == usual.fingerprint
    assert [*fast.manifest.files] == [*usual.manifest.files]
    for shard in (tmp_path / "a").glob("*.arrow"):
        assert (tmp_path / "b" / shard.name).read_bytes() == shard.read_bytes()
    version = version_of("fastokens")
    assert (fast.manifest.tokenizer.library, fast.manifest.tokenizer.library_version) == ("fastokens", version)
    assert (usual.manifest.build.engine, fast.manifest.build.engine) == (None, f"fastokens {version}")
    assert fast.manifest.fingerprints.recipe != usual.manifest.fingerprints.recipe


@pytest.mark.parametrize("tokenizer", ["bytes", "recipe"])
def test_an_engine_gives_the_ids_of_tokenizers_for_hard_texts(tokenizer, tmp_path):
    content = ((write_byte_tokenizer(tmp_path) if tokenizer == "bytes" else TOKENIZER) / "tokenizer.json").read_bytes()
    expected, found = Encoder(content), Encoder(content, engine="fastokens")
    texts = [text for some in hard_texts(content) for text in some]
    assert all(any(part in text for text in texts) for part in ("<|endoftext|>", "\U0001f469", "\U00016ebb"))
    for text, first, second in zip(texts, expected(texts), found(texts), strict=True):
        assert np.array_equal(first, second), text


@pytest.mark.usefixtures("wrong")
@pytest.mark.parametrize("name", ["a.jsonl", "b.txt", "c.csv"])
def test_an_engine_with_other_ids_for_a_text_of_an_input_is_refused_before_anything_is_written(name, tmp_path):
    write(tmp_path / "a.jsonl", TEXTS)
    for other in ("b.txt", "c.csv"):
        (tmp_path / other).write_text("text\nplain\n")
    text = "now _Q_".ljust(61, ".")  # one more than is shown
    with (tmp_path / name).open("a") as file:
        file.write(f'{{"text": "{text}"}}\n' if name == "a.jsonl" else f"{text}\n")
    shown = re.escape(repr((f"text\nplain\n{text}" if name == "b.txt" else text)[:60]))
    expected = rf"fastokens \S+ gives other ids than tokenizers \S+ for {shown}\.\.\. in .*/{name}"
    with pytest.raises(TokenizerError, match=expected) as caught:
        build(tmp_path, tmp_path.parent / "out", **ENGINE)
    assert caught.value.hint.startswith("leave out --engine;")
    assert not (tmp_path.parent / "out").exists()


@pytest.mark.usefixtures("wrong")
def test_an_engine_is_compared_with_the_beginnings_of_inputs_spread_over_all(tmp_path):
    (tmp_path / "in").mkdir()
    for number in range(64):
        (tmp_path / "in" / f"{number:02}.txt").write_text("_Q_" if number % 4 else "plain")
    assert build(tmp_path / "in", tmp_path / "out", **ENGINE).num_documents == 64
    (tmp_path / "in" / "60.txt").write_text("_Q_")
    with pytest.raises(TokenizerError, match=r"in .*/60\.txt"):
        build(tmp_path / "in", tmp_path / "other", **ENGINE)


def test_an_engine_whose_tokenizer_is_of_another_kind_is_refused_with_its_name(tmp_path):
    tokenizer = write_vocabulary(tmp_path / "tok", words("[UNK]", "a", "</s>"), {"eos_token": "</s>"})
    with pytest.raises(TokenizerError, match=r"^fastokens \S+ cannot load the tokenizer: .*unsupported") as caught:
        build(write(tmp_path / "a.jsonl", TEXTS), tmp_path / "out", tokenizer=tokenizer, **ENGINE)
    assert caught.value.hint == "leave out --engine"


def test_a_build_does_not_continue_with_another_engine(tmp_path):
    source = write(tmp_path / "a.jsonl", TEXTS)
    build(source, tmp_path / "out", **ENGINE)
    with pytest.raises(ConfigurationChangedError, match=r"--engine was 'fastokens \S+', now not given"):
        build(source, tmp_path / "out")
