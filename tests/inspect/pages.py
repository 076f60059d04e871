"""Corpora and mixes that pages are made of."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import Tokenizer

from tests.contract import small
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


def write_metrics(directory: Path, *, num_steps: int = 200, spike: int = 150, skipped: int = 120) -> Path:
    """The metrics of a run of two corpora, one of which has markup in its name."""
    evil, total = "<img src=x onerror='window.evil=6'>", {"a": 0, "b": 0}
    lines = []
    for step in range(1, num_steps + 1):
        samples = [4 * (step - 1), 4 * step]
        if step == skipped:
            lines.append({"step": step, "skipped": "train.skip", "samples": samples})
            continue
        total["a"] += 192
        total["b"] += 64
        loss = 9.0 if step == spike else 5 - min(step, 400) / 100 + step % 7 / 100
        lines.append(
            {
                "step": step,
                "lr": 1e-3,
                "samples": samples,
                "corpora": {
                    "a": {"tokens": total["a"], "epoch": 0.1, "weight": 3.0},
                    evil: {"tokens": total["b"], "epoch": 0.1, "weight": 1.0},
                },
                "loss": loss,
                "loss_by_corpus": {"a": loss, evil: None if step % 2 else loss},
                "grad_norm": {spike: 10.0, spike + 10: 9.0}.get(step, 1 + step % 5 / 100),
                "tokens": 256,
                "tokens_per_second": 1_000.0,
                "loader_wait_seconds": 0.064,
            }
        )
        if step % 50 == 0:
            lines.append({"step": step, "evaluation": {"held out": {"loss": loss + 0.1, "targets": 99}}})
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


WRAPPED = [
    lambda text: {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": text}]},
    lambda text: {"messages": [{"content": [{"type": "text", "text": text}]}]},
    lambda text: {"conversations": [{"from": "gpt", "value": text}]},
    lambda text: {"prompt": text, "completion": "two"},
    lambda text: {"answers": {"text": [["one"], [text]]}},
]


def write_leaks(directory: Path) -> None:
    """A corpus that holds items of two benchmarks, and one of them in files of other shapes."""
    rng, words = random.Random(5), ["", "one", "two", "three"]
    texts = [rng.choices([1, 2, 3], k=80) for _ in range(30)]
    source = Source(documents=[[*text, 0] for text in texts], metadata={"id": [f"d{number}" for number in range(30)]})
    columns = {"id": "string"}
    with pytest.MonkeyPatch.context() as patch:
        small.shrink(patch.setattr, batch_tokens=200)  # a shard has several record batches
        write_corpus(directory / "leaky", sources=[source], columns=columns, tokenizer=TINY_TOKENIZER, shard_tokens=500)
    spelt = [" ".join(words[token] for token in text) for text in (texts[4][10:60], texts[9][:40], texts[4][30:70])]
    items = {
        "a": [
            {"id": "q1", "question": spelt[0], "choices": ["one", spelt[1]]},
            {"id": "q2", "question": "one two three", "choices": []},
            {"id": "q3", "question": "one " * 40, "choices": ["two"]},
        ],
        "b": [{"question": spelt[2], "choices": "one"}],
        **{f"items-{number}": [wrap(spelt[0]), wrap("one two")] for number, wrap in enumerate(WRAPPED)},
    }
    for name, rows in items.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    pq.write_table(pa.Table.from_pylist(items["items-0"]), directory / "items-0.parquet")
    (directory / "ids.txt").write_text("d7\nd29\ngone\nd0\n")
