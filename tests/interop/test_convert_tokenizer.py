"""The recipe that makes a `tokenizer.json`: the ids of SentencePiece and tiktoken for every text, or nothing."""

from __future__ import annotations

import base64
import json
import random
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from tokshard import build_corpus, open_corpus

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
EOS = "<|endoftext|>"
# as cl100k_base
PATTERN = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
PATTERN += r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def texts() -> list[str]:
    """Sources with tables of scripts, in paragraphs, and characters of all scripts."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    names = ["heapq.py", "argparse.py", "_pydecimal.py", "encodings/cp1251.py", "textwrap.py"]
    rng = random.Random(7)
    scripts = "".join(chr(rng.randrange(0xA0, 0x3000)) for _ in range(10_000))
    parts = [part for name in names for part in (stdlib / name).read_text(encoding="utf-8").split("\n\n")]
    return [part for part in parts if part] + [scripts[start : start + 50] for start in range(0, len(scripts), 50)]


def train(directory: Path, **options: Any) -> Path:
    import sentencepiece

    (directory / "texts").write_text("\n".join(text for text in texts() if text.isascii()), encoding="utf-8")
    settings = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 1_500, "minloglevel": 2}
    settings |= {"normalization_rule_name": "identity", "remove_extra_whitespaces": False, **options}
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "texts"), model_prefix=str(directory / "m"), character_coverage=0.999, **settings
    )
    return directory / "m.model"


def converted(source: Path, *pattern: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "recipes" / "convert_tokenizer.py", source, source.parent / "new", *pattern]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)


def built_ids(directory: Path, eos: str) -> list[list[int]]:
    """What a build makes of the texts with the new tokenizer."""
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts())
    (directory / "a.jsonl").write_text(lines, encoding="utf-8")
    build_corpus([directory / "a.jsonl"], out=directory / "out", tokenizer=directory / "new", eos=eos, workers=1)
    with open_corpus(directory / "out") as corpus:
        return [corpus.document(index).tolist()[:-1] for index in range(len(corpus))]


@pytest.mark.parametrize("options", [{}, {"add_dummy_prefix": False}, {"split_by_whitespace": False}])
def test_a_build_with_a_converted_model_has_the_ids_of_sentencepiece(tmp_path, options):
    from sentencepiece import SentencePieceProcessor

    done = converted(train(tmp_path, **options))
    assert done.returncode == 0, done.stderr
    original = SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    assert built_ids(tmp_path, "</s>") == [original.encode(text) for text in texts()]


def test_a_model_that_encodes_otherwise_is_not_written(tmp_path):
    done = converted(train(tmp_path, model_type="unigram"))
    assert done.returncode == 1
    assert "not written: " in done.stderr
    assert not (tmp_path / "new").exists()


def test_a_build_with_converted_ranks_has_the_ids_of_tiktoken(tmp_path):
    import tiktoken
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    byte_of = {character: byte for byte, character in bytes_to_unicode().items()}
    vocabulary = json.loads((ROOT / "recipes" / "tokenizer" / "tokenizer.json").read_bytes())["model"]["vocab"]
    ranks = {bytes(byte_of[c] for c in token): rank for token, rank in vocabulary.items() if token != EOS}
    lines = (base64.b64encode(token) + b" %d\n" % rank for token, rank in sorted(ranks.items(), key=lambda i: i[1]))
    (tmp_path / "small.tiktoken").write_bytes(b"".join(lines))
    done = converted(tmp_path / "small.tiktoken", PATTERN)
    assert done.returncode == 0, done.stderr
    found = PreTrainedTokenizerFast.from_pretrained(tmp_path / "new")
    found.add_special_tokens({"eos_token": EOS})
    found.save_pretrained(tmp_path / "new")
    original = tiktoken.Encoding("small", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    assert built_ids(tmp_path, EOS) == [original.encode_ordinary(text) for text in texts()]
