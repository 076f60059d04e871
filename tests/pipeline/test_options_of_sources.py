"""Every kind of source with every option that leaves out, puts elsewhere and counts."""

from __future__ import annotations

import base64
import bz2
import json
import lzma
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.pipeline.inputs import (
    EOS,
    FORMATS,
    TOKENIZER,
    arrow_stream_bytes,
    jsonl,
    patch_chunk_bytes,
    table,
    tar_bytes,
    texts_of,
    write_byte_tokenizer,
)
from tokshard import build_corpus, open_corpus
from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.pipeline import estimate
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.sources import hub


@dataclass(frozen=True)
class Kind:
    """A source of some texts, none of which holds a newline.

    Args:
        write: puts it into a directory; returns what to give to a build.
        options: that it needs.
        num_passed_over: records that are not meant to be read.
    """

    write: Callable[[Path, Sequence[str]], Path]
    options: dict[str, Any] = field(default_factory=dict)
    num_passed_over: int = 0


def _file(name: str, encode: Callable[[Sequence[str]], bytes]) -> Callable[[Path, Sequence[str]], Path]:
    def write(directory: Path, texts: Sequence[str]) -> Path:
        (directory / name).write_bytes(encode(texts))
        return directory / name

    return write


def _records(name: str) -> Kind:
    return Kind(_file(name, lambda texts: FORMATS[name]([{"text": text} for text in texts], 90)))


def _texts(directory: Path, texts: Sequence[str]) -> Path:
    (directory / "texts").mkdir()
    for number, text in enumerate(texts):
        (directory / "texts" / f"{number:04d}.txt.bz2").write_bytes(bz2.compress(text.encode()))
    return directory / "texts"


def _saved(directory: Path, texts: Sequence[str]) -> Path:
    files = [f"data-{number}.arrow" for number in range(3)]
    (directory / "saved").mkdir()
    for number, name in enumerate(files):
        part = texts[len(texts) * number // 3 : len(texts) * (number + 1) // 3]
        (directory / "saved" / name).write_bytes(arrow_stream_bytes(table([{"text": text} for text in part]), 70))
    (directory / "saved" / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in files]}))
    (directory / "saved" / "dataset_info.json").write_text("{}")
    return directory / "saved"


def _samples(texts: Sequence[str]) -> bytes:
    return tar_bytes(
        [
            (f"{n:04d}.{end}", data)
            for n, text in enumerate(texts)
            for end, data in (("png", b"x"), ("txt", text.encode()))
        ]
    )


def _archive(texts: Sequence[str]) -> bytes:
    others = [("picture.png", b"x"), (".hidden", b"x"), ("another.png", b"x")]
    members = [(f"{number:04d}.txt", text.encode()) for number, text in enumerate(texts)]
    return tar_bytes([others[0], *members[: len(members) // 2], others[1], *members[len(members) // 2 :], others[2]])


KINDS = {
    **{name: _records(name) for name in FORMATS},
    "files of text": Kind(_texts),
    "text by line": Kind(_file("a.txt", lambda texts: "\n".join(texts).encode()), {"text_unit": "line"}),
    "compressed text by line": Kind(
        _file("a.txt.xz", lambda texts: lzma.compress("\n".join(texts).encode())), {"text_unit": "line"}
    ),
    "text by paragraph": Kind(
        _file("a.txt.bz2", lambda texts: bz2.compress("\n\n".join(texts).encode(), 1)), {"text_unit": "paragraph"}
    ),
    "members of text": Kind(_file("a.tar", _archive), {}, 3),
    "samples": Kind(_file("a.tar", _samples), {"text_field": "txt"}),
    "saved data set": Kind(_saved),
}
FAST = ("members.tar.zst", "text by line", "saved data set")
DIVIDED = (*FAST, "plain.jsonl", "table.parquet")
"""One of each way to cut an input into tasks."""

UNIQUE = [f"text {number}, " + "abc " * (2_000 + number % 9) for number in range(300)]
TEXTS = [text for n, unique in enumerate(UNIQUE) for text in ([unique, UNIQUE[n // 2]] if n % 5 == 0 else [unique])]
"""2.9 MB of text, so that spawned workers have several tasks; every sixth is a duplicate."""


def facts(out: Path) -> dict[str, tuple[list[str], list[str], dict[str, int], int]]:
    """Of each corpus of a split: shard hashes, texts, what was left out, and documents that spell special tokens."""
    found = {}
    for name in (names.TRAIN, names.VALIDATION):
        assert verify_corpus(out / name).problems == ()
        with open_corpus(out / name) as corpus:
            sources, records = corpus.sources(), corpus.manifest.records
            assert all(s.records_read == s.documents + sum(s.left_out.values()) for s in sources)
            hashes = [shard.sha256 for shard in corpus.shards]
            found[name] = hashes, texts_of(corpus), records.left_out, records.with_special_text
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(name, marks=[] if name in DIVIDED else pytest.mark.soak) for name in KINDS],
)
def test_duplicates_and_the_split_are_the_same_for_any_number_of_workers(kind, tmp_path):
    write_byte_tokenizer(tmp_path / ".tokenizer")
    source = KINDS[kind].write(tmp_path, TEXTS)
    options: dict[str, Any] = {"dedup": "exact", "validation_fraction": 0.2, "task_bytes": 1 << 20}
    found = []
    for workers in (1, 3):
        out = tmp_path / f"out-{workers}"
        build_corpus(
            [source], tokenizer=tmp_path / ".tokenizer", out=out, workers=workers, **options, **KINDS[kind].options
        )
        found.append(facts(out))
    assert found[0] == found[1]
    train, validation = found[0].values()
    assert sorted([*train[1], *validation[1]]) == sorted(UNIQUE)
    assert [train[2]["duplicate"], validation[2]["duplicate"]] == [len(TEXTS) - len(UNIQUE)] * 2


SHORT = ["a", "bb", "bb", f"{EOS} is text", *(f"document {number}" for number in range(120)), "c" * 100, "document 7"]
KEPT = ["bb", f"{EOS} is text", *(f"document {number}" for number in range(120))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "limit"),
    [
        pytest.param(name, limit, marks=[] if name in FAST or (limit is None and name in DIVIDED) else pytest.mark.soak)
        for name in KINDS
        for limit in (None, 7, 60)
    ],
)
def test_all_options_at_once_count_every_record_of_every_kind_of_source(kind, limit, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 256)
    write_byte_tokenizer(tmp_path / ".tokenizer")
    source = KINDS[kind].write(tmp_path, SHORT)
    options: dict[str, Any] = {
        "dedup": "exact",
        "validation_fraction": 0.3,
        "min_tokens": 3,
        "max_tokens": 50,
        "max_documents": limit,
        # members of an archive have a KiB each
        "task_bytes": 8_192 if str(source).endswith(".tar") else 512,
        **KINDS[kind].options,
    }
    tokenizer, out = tmp_path / ".tokenizer", tmp_path / "out"
    build_corpus([source], tokenizer=tokenizer, out=out, workers=1, **options)
    found = facts(out)
    written = [*found[names.TRAIN][1], *found[names.VALIDATION][1]]
    assert sorted(written) == sorted(KEPT[:limit])
    assert sum(corpus[3] for corpus in found.values()) == 1
    left_out = found[names.TRAIN][2]
    assert (left_out["under min-tokens"], left_out["duplicate"]) == (1, 1 if limit else 2)
    if limit is None:
        assert left_out["over max-tokens"] == 1
        assert sum(n for reason, n in left_out.items() if "archive member" in reason) == KINDS[kind].num_passed_over
    again = build_corpus([source], tokenizer=tokenizer, out=out, workers=1, **options)
    assert not again.is_new


@pytest.fixture(scope="module")
def long_texts() -> list[str]:
    """5 MB that hardly compress, so that their files are longer than what is read ahead of them."""
    draw = random.Random(17)
    return [base64.b64encode(draw.randbytes(6_000 + 5 * (number % 9))).decode() for number in range(630)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_an_estimate_is_within_5_percent_for_every_kind_of_source(kind, long_texts, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 1 << 16)
    monkeypatch.setattr(estimate, "_TEXT_BYTES_PER_PLACE", 1 << 18)
    monkeypatch.setattr(estimate, "_TEXT_BYTES_PER_COMPRESSED_PLACE", 3 << 20)
    source = KINDS[kind].write(tmp_path, long_texts)
    tokenizer = write_byte_tokenizer(tmp_path / ".tokenizer")
    options: dict[str, Any] = {"task_bytes": 1 << 21, **KINDS[kind].options}
    asked = BuildOptions(tokenizer=str(tokenizer), out=str(tmp_path / "out"), workers=1, **options)
    found = estimate.estimate_build([str(source)], asked)
    assert found.documents == pytest.approx(len(long_texts), rel=0.05)
    assert found.tokens == pytest.approx(sum(len(text) + 1 for text in long_texts), rel=0.05)
    assert found.sampled_documents < len(long_texts)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("task_bytes", [512, 1 << 24])
def test_a_damaged_part_of_a_data_set_is_left_out_whole(task_bytes, tmp_path, monkeypatch):
    patch_chunk_bytes(monkeypatch, 256)
    write_byte_tokenizer(tmp_path / ".tokenizer")
    saved = _saved(tmp_path, [f"document {number}" for number in range(300)])
    (saved / "data-1.arrow").write_bytes((saved / "data-1.arrow").read_bytes()[:-300])
    fetched = hub.HubFiles(str(tmp_path / "cache"), "hf://a/b@0123:train", ["1.jsonl", "2.jsonl.xz", "3.jsonl"])
    (tmp_path / "cache").mkdir()
    for name in fetched.paths:
        (tmp_path / "cache" / name).write_bytes(jsonl([{"text": name}] * 40))  # the second is not xz
    monkeypatch.setattr(hub, "fetch_dataset", lambda argument: fetched)
    options: dict[str, Any] = {
        "tokenizer": tmp_path / ".tokenizer",
        "out": tmp_path / "out",
        "workers": 1,
        "on_bad_source": "skip",
        "dedup": "exact",
        "task_bytes": task_bytes,
    }
    result = build_corpus([saved, "hf://a/b"], **options)
    assert verify_corpus(tmp_path / "out").problems == ()
    kept = [f"document {number}" for number in range(300) if not 100 <= number < 200]
    with open_corpus(tmp_path / "out") as corpus:
        assert texts_of(corpus) == [*kept, "1.jsonl", "3.jsonl"]
        damaged = [source.path for source in corpus.sources() if source.left_out == {"damaged input": 1}]
        assert damaged == ["data-1.arrow", "2.jsonl.xz"]
        records = corpus.manifest.records
        assert records.read == records.written + sum(records.left_out.values())
        assert corpus.manifest.arguments == ["saved", "hf://a/b@0123:train"]
    assert result.is_new
    assert not build_corpus([saved, "hf://a/b"], **options).is_new


def test_a_text_unit_that_is_none_is_refused(tmp_path):
    with pytest.raises(UsageError, match="text_unit is 'page'") as caught:
        build_corpus([tmp_path], tokenizer=TOKENIZER, out=tmp_path / "out", text_unit="page")
    assert caught.value.hint == "give one of file, line, paragraph"
