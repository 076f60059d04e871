"""A scan finds every document that shares n tokens in a row with an item of a benchmark, and no other."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.corpora import TINY_TOKENIZER, Source, documents_of, write_corpus
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.format import writer
from tokshard.inspect.corpus import ngrams
from tokshard.inspect.corpus.ngrams import Grams, grams_of
from tokshard.runtime import NumpyLoader, StreamPlan

ROOT = Path(__file__).parents[2]
EOS = 0
WORDS = {1: "one", 2: "two", 3: "three"}
token_lists = st.lists(st.integers(1, 3), max_size=30)


def grams(texts: list[tuple[int, list[int]]], n: int) -> Grams:
    return grams_of([(item, np.array(tokens, np.uint32)) for item, tokens in texts], n, delimiters=[EOS])


def shared(found: Grams, documents: list[list[int]]) -> dict[tuple[int, int], int]:
    """(document, item) to the distinct n-grams that they share."""
    tokens = np.array([token for document in documents for token in [*document, EOS]], np.uint16)
    ends = np.cumsum([len(document) + 1 for document in documents]).astype(np.int64)
    rows = found.shared(tokens, ends)
    return {(document, item): count for document, item, count in zip(*(row.tolist() for row in rows), strict=True)}


def windows(tokens: list[int], n: int) -> set[tuple[int, ...]]:
    return {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}


@given(
    texts=st.lists(st.tuples(st.integers(0, 4), token_lists), max_size=8),
    documents=st.lists(token_lists, min_size=1, max_size=6),
    n=st.integers(2, 6),
    chunk=st.sampled_from([1, 3, 8, 1 << 15]),
)
def test_documents_share_the_n_grams_that_a_comparison_of_all_windows_finds(texts, documents, n, chunk):
    expected = {}
    for item in range(5):
        of_item = set().union(*(windows(tokens, n) for number, tokens in texts if number == item))
        for number, document in enumerate(documents):
            if of_item & windows(document, n):
                expected[number, item] = len(of_item & windows(document, n))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngrams, "_CHUNK", chunk)
        assert shared(grams(texts, n), documents) == expected


def test_n_grams_do_not_cross_documents_even_if_an_item_spells_the_delimiter():
    found = grams([(0, [1, 2, EOS, 3, 1, 2]), (1, [2, 3, 2])], 3)
    assert shared(found, [[1, 2], [3, 1, 2], [2], [3, 2]]) == {(1, 0): 1}


def test_tokens_are_compared_and_not_only_hashes():
    found = grams([(0, [1, 2, 3])], 3)
    assert shared(found, [[1, 2, 3]]) == {(0, 0): 1}
    assert shared(dataclasses.replace(found, tokens=found.tokens + np.uint32(1)), [[1, 2, 3]]) == {}


def text_of(tokens: list[int]) -> str:
    return " ".join(WORDS[token] for token in tokens if token != EOS)


@pytest.fixture
def documents() -> list[list[int]]:
    generator = np.random.default_rng(5)
    return [[*generator.integers(1, 4, 80).tolist(), EOS] for _ in range(30)]


@pytest.fixture
def corpus(tmp_path: Path, documents: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(writer, "MAX_BATCH_TOKENS", 200)  # a shard has several record batches
    sources = [Source(documents=documents, metadata={"id": [f"d{number}" for number in range(30)]})]
    return write_corpus(
        tmp_path / "corpus",
        sources=sources,
        columns={"id": "string"},
        tokenizer=TINY_TOKENIZER,
        shard_tokens=500,
    )


@pytest.fixture
def benchmarks(tmp_path: Path, documents: list[list[int]]) -> list[str]:
    first = [
        {"id": "q1", "question": text_of(documents[4][10:60]), "choices": ["one", text_of(documents[9][:40])]},
        {"id": "q2", "question": "one two three", "choices": []},
        {"id": "q3", "question": "one " * 40, "choices": ["two"]},
    ]
    second = [{"question": text_of(documents[4][30:70]), "choices": "one"}]
    for name, rows in (("a.jsonl", first), ("b.jsonl", second)):
        (tmp_path / name).write_text("\n".join(map(json.dumps, rows)))
    return [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]


def scan(corpus: Path, benchmarks: list[str], *options: str) -> int:
    against = [word for file in benchmarks for word in ("--against", file)]
    fields = ["--text-field", "question", "--text-field", "choices"]
    return run(["scan", str(corpus), *against, *fields, "--ngram", "20", *options])


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_scan_counts_by_benchmark_and_item_and_lists_the_documents(
    corpus: Path, benchmarks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    out, numbers = tmp_path / "leaked.jsonl", tmp_path / "leaked.txt"
    options = ["--workers", workers, "--out", str(out), "--numbers", str(numbers)]
    assert scan(corpus, benchmarks, *options, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert [tuple(one.values())[1:] for one in found["benchmarks"]] == [(3, 1, 1, 2), (1, 0, 1, 1)]
    assert [(item["id"], item["row"], item["documents"]) for item in found["items"]] == [("q1", 1, 2), (None, 1, 1)]
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    with open_corpus(corpus) as opened:
        fingerprint = opened.fingerprint
    assert [(row["document"], row["id"], row["fingerprint"]) for row in rows] == [
        (4, "d4", fingerprint),
        (9, "d9", fingerprint),
    ]
    assert [(one["id"], one["shared"], one["ngrams"]) for one in rows[0]["items"]] == [("q1", 31, 52), (None, 21, 21)]
    assert numbers.read_text() == "4\n9\n"
    assert scan(corpus, benchmarks, "--workers", workers) == 0
    shown = capsys.readouterr().out
    assert "2 documents share 20 tokens" in shown
    assert "q1" in shown


@pytest.mark.parametrize(
    ("wrap", "options"),
    [
        (lambda text: {"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": text}]}, []),
        (lambda text: {"messages": [{"content": [{"type": "text", "text": text}]}]}, []),
        (lambda text: {"conversations": [{"from": "gpt", "value": text}]}, []),
        (lambda text: {"prompt": text, "completion": "two"}, []),
        (lambda text: {"answers": {"text": [["one"], [text]]}}, ["--text-field", "answers.text"]),
        (lambda text: {"messages": [{"role": text, "content": text}]}, ["--text-field", "messages.content"]),
    ],
)
def test_items_may_be_conversations_and_have_texts_at_any_depth(
    corpus: Path, documents: list[list[int]], tmp_path: Path, wrap: Callable[[str], Any], options: list[str]
) -> None:
    rows = [wrap(text_of(documents[4][10:60])), wrap("one two")]
    (tmp_path / "items.jsonl").write_text("\n".join(map(json.dumps, rows)))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "items.parquet")
    for name in ("items.jsonl", "items.parquet"):
        out = tmp_path / "found.jsonl"
        words = ["--against", str(tmp_path / name), "--ngram", "20", "--out", str(out)]
        assert run(["scan", str(corpus), *words, *options]) == 0
        (found,) = map(json.loads, out.read_text().splitlines())
        assert (found["document"], [item["row"] for item in found["items"]]) == (4, [1])
        out.unlink()


def test_copy_and_mask_take_what_a_scan_finds(
    corpus: Path, benchmarks: list[str], documents: list[list[int]], tmp_path: Path
) -> None:
    out, numbers = tmp_path / "leaked.jsonl", tmp_path / "leaked.txt"
    assert scan(corpus, benchmarks, "--workers", "1", "--out", str(out), "--numbers", str(numbers)) == 0
    assert run(["copy", str(corpus), "--out", str(tmp_path / "clean"), "--drop-ids", str(out), "--workers", "1"]) == 0
    with open_corpus(tmp_path / "clean") as clean:
        assert [document.tolist() for document in clean] == [
            document for number, document in enumerate(documents) if number not in {4, 9}
        ]
    sizes: dict[str, Any] = {"seq_len": 32, "seed": 17, "block_tokens": 256, "window_blocks": 4}
    plan = StreamPlan({"c": str(corpus)}, **sizes, allow_small_blocks=True)
    with NumpyLoader(plan, global_batch_size=2) as loader:
        loader.mask("c", numbers)
        assert loader.stats()["masked_documents"] == 2


def test_a_list_of_ids_becomes_numbers_and_what_it_names_in_vain_is_shown(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids, numbers = tmp_path / "ids.txt", tmp_path / "numbers.txt"
    ids.write_text("d7\nd29\ngone\nd0\n")
    assert run(["scan", str(corpus), "--ids", str(ids), "--numbers", str(numbers)]) == 0
    assert numbers.read_text() == "0\n7\n29\n"
    shown = capsys.readouterr().out
    assert "3 documents listed" in shown
    assert "1 row without a document: gone" in shown
    out = tmp_path / "out.jsonl"
    ids.rename(tmp_path / "ids")
    (tmp_path / "ids.jsonl").write_text('{"document": 3}\n{"document": 30}\n')
    assert run(["scan", str(corpus), "--ids", str(tmp_path / "ids.jsonl"), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["missing"] == ["document 30"]
    assert json.loads(out.read_text())["id"] == "d3"


@pytest.mark.parametrize("workers", ["1", "2"])
def test_damage_stops_a_scan_and_leaves_no_list(
    corpus: Path, benchmarks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], workers: str
) -> None:
    shard = sorted(corpus.glob("shard-*"))[1]
    content = bytearray(shard.read_bytes())
    place = content.index(bytes([3, 0, 3, 0]))
    content[place] ^= 1
    shard.write_bytes(content)
    out = tmp_path / "leaked.jsonl"
    assert scan(corpus, benchmarks, "--workers", workers, "--out", str(out)) == 1
    assert shard.name in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ([], "scan needs something to find"),
        (["--against", "a.jsonl", "--ids", "a.jsonl"], "--against and --ids exclude each other"),
        (["--ids", "a.jsonl", "--ngram", "13"], "--ngram has no meaning for a list of ids"),
        (["--ids", "a.jsonl", "--text-field", "text"], "--text-field has no meaning for a list of ids"),
        (["--against", "a.jsonl"], "row 1 of a.jsonl has no text in text"),
        (["--against", "empty.jsonl"], "empty.jsonl has no items"),
        (["--against", "missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["--against", "a.jsonl", "--out", "a.jsonl"], "which this command reads"),
    ],
)
def test_what_cannot_be_scanned_is_refused(
    corpus: Path,
    benchmarks: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    problem: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("")
    assert run(["scan", str(corpus), *options]) == 2
    assert problem in capsys.readouterr().err


def test_numbers_of_several_corpora_are_refused(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_corpus(tmp_path / "other", documents_of([3]), tokenizer=TINY_TOKENIZER)
    command = ["scan", str(corpus), str(other), "--ids", "x", "--numbers", str(tmp_path / "n")]
    assert run(command) == 2
    assert "--numbers is for one corpus" in capsys.readouterr().err


def test_the_lists_of_a_scan_are_two_files(
    corpus: Path, benchmarks: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "link").symlink_to("leaked")
    assert scan(corpus, benchmarks, "--out", str(tmp_path / "leaked"), "--numbers", str(tmp_path / "link")) == 2
    assert "--out and --numbers are the same file" in capsys.readouterr().err
    assert not (tmp_path / "leaked").exists()


def test_a_list_that_goes_to_stdout_is_alone_there(corpus: Path, benchmarks: list[str]) -> None:
    command = [sys.executable, "-m", "tokshard", "scan", str(corpus), "--against", benchmarks[0], "--ngram", "20"]
    fields = ["--text-field", "question", "--text-field", "choices"]
    done = subprocess.run(
        [*command, *fields, "--out", "/dev/stdout", "--json"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["document"] for line in done.stdout.splitlines()] == [4, 9]
    assert json.loads(done.stderr)["ngram"] == 20
