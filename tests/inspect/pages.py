"""Corpora and mixes that pages are made of."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from tests.corpora import TINY_TOKENIZER, TOKENIZER, Source, documents_of, write_corpus

EVIL = [
    "<script>window.evil = 1; console.error('evil')</script>",
    '</script><img src=x onerror="window.evil = 2">',
    "<!-- <b>\u2028\u2029 \0 \u202e &lt; &amp; ${window.evil = 3}",
]


def write_evil_corpus(directory: Path) -> Path:
    """Documents, a source and a directory that would be markup if anything let them."""
    encode = Tokenizer.from_file(str(TOKENIZER)).encode
    documents = [[*encode(text, add_special_tokens=False).ids, 0] for text in EVIL]
    source = Source(documents=documents, path="<img src=x onerror='window.evil = 4'>.jsonl", left_out={"<b>": 1})
    return write_corpus(directory, sources=[source], shard_tokens=10)


def write_mix(directory: Path) -> Path:
    """Two corpora, and weights that change."""
    for name in ("a", "b"):
        lengths = [30 + 7 * (number % 11) for number in range(200 if name == "a" else 100)]
        write_corpus(directory / name, documents_of(lengths), tokenizer=TINY_TOKENIZER, shard_tokens=3_000)
    mix = directory / "mix.toml"
    mix.write_text(
        f'corpora = {{ a = "{directory / "a"}", b = "{directory / "b"}" }}\n'
        "weights = { a = 3.0, b = 1.0 }\nseq_len = 64\nglobal_batch_size = 4\n"
        "schedule = [[100, { a = 1.0, b = 3.0 }]]\n"
    )
    return mix
