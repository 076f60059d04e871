"""A scan finds every document that shares n tokens in a row with an item of a benchmark, and no other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.transcripts import json_of
from tests.format.test_damage import in_buffer
from tests.inspect.pages import write_leaks
from tests.refusals import tokshard
from tokshard.errors import TokshardError
from tokshard.format.opening import open_corpus
from tokshard.inspect.corpus import ngrams
from tokshard.inspect.corpus.ngrams import Grams, grams_of
from tokshard.inspect.corpus.workers import in_order

ROOT = Path(__file__).parents[2]
EOS = 0
token_lists = st.lists(st.integers(1, 3), max_size=30)


def grams(texts: list[tuple[int, list[int]]], n: int) -> Grams:
    return grams_of([(item, np.array(tokens, np.uint32)) for item, tokens in texts], n, delimiters=[EOS])


def shared(found: Grams, documents: list[list[int]]) -> dict[tuple[int, int], int]:
    """(document, item) to the distinct n-grams that they share."""
    tokens = np.array([token for document in documents for token in [*document, EOS]], np.uint16)
    ends = np.cumsum([len(document) + 1 for document in documents]).astype(np.int64)
    return {
        (document, item): count
        for document, items, counts in found.shared(tokens, ends)
        for item, count in zip(items.tolist(), counts.tolist(), strict=True)
    }


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


def test_a_phrase_in_all_items_and_documents_costs_no_memory_for_each_pair_of_them():
    phrase = list(range(1, 21))
    found = grams([(item, phrase) for item in range(1000)], 13)
    tokens, ends = np.array([*phrase, EOS] * 1000, np.uint16), np.arange(21, 21_001, 21)
    tracemalloc.start()
    try:
        rows = list(found.shared(tokens, ends))
        assert tracemalloc.get_traced_memory()[1] < 10 << 20
    finally:
        tracemalloc.stop()
    assert [document for document, _, _ in rows] == list(range(1000))
    assert all(len(items) == 1000 and set(counts.tolist()) == {8} for _, items, counts in rows)


@pytest.fixture
def leaks(tmp_path: Path) -> Path:
    write_leaks(tmp_path)
    return tmp_path


SCAN = ["scan", "leaky", "--against", "a.jsonl", "--text-field", "question", "--text-field", "choices", "--ngram", "20"]


@pytest.mark.parametrize("workers", ["1", "2"])
def test_damage_stops_a_scan_and_leaves_no_list(leaks: Path, workers: str) -> None:
    shard = sorted((leaks / "leaky").glob("shard-*"))[1]
    shard.write_bytes(in_buffer("tokens", 3, 4, b"\0\0")(shard.read_bytes()))
    with contextlib.chdir(leaks):
        said = tokshard(*SCAN, "--workers", workers, "--out", "leaked.jsonl")
    assert (said.exit_code, shard.name in said.problem) == (1, True)
    assert not (leaks / "leaked.jsonl").exists()


def test_an_item_with_an_empty_text_is_one_that_is_too_short(leaks: Path) -> None:
    rows = [{"text": "", "messages": [{"content": "one"}]}, {"text": "two"}, {"text": ""}]
    (leaks / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (found,) = json_of("scan", leaks / "leaky", "--against", leaks / "some.jsonl", "--ngram", 2)
    assert found["benchmarks"][0]["not_scanned"] == 3


def test_a_list_that_goes_to_stdout_is_alone_there(leaks: Path) -> None:
    command = [sys.executable, "-m", "tokshard", *SCAN, "--out", "/dev/stdout", "--json"]
    done = subprocess.run(
        command, cwd=leaks, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True
    )
    assert [json.loads(line)["document"] for line in done.stdout.splitlines()] == [4, 9]
    assert json.loads(done.stderr)["ngram"] == 20


def test_a_scan_that_is_stopped_while_its_workers_start_says_only_that(leaks: Path) -> None:
    command = [sys.executable, "-m", "tokshard", *SCAN, "--workers", "2"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=leaks, env=environment, stderr=subprocess.PIPE, text=True) as scan:
        children = Path(f"/proc/{scan.pid}/task/{scan.pid}/children")
        while len(children.read_text().split()) < 2:  # a tracker, and the server that forks the workers
            time.sleep(0.001)
        time.sleep(0.01)  # it waits for its first worker
        scan.terminate()
        assert scan.communicate(timeout=100)[1] == "terminated\n"
    assert scan.returncode == 143


def killed(*_: object) -> list[int]:
    os.kill(os.getpid(), signal.SIGKILL)
    return []


def test_a_worker_that_is_killed_is_an_error_with_a_way_out(leaks: Path) -> None:
    with (
        open_corpus(leaks / "leaky") as corpus,
        pytest.raises(TokshardError, match="a worker process was killed") as refused,
        in_order(corpus, range(2), killed, workers=2) as results,
    ):
        list(results)
    assert "fewer --workers" in refused.value.hint


@pytest.mark.skipif(sys.version_info >= (3, 14), reason="Python 3.14 takes a shorter directory by itself")
def test_a_temporary_directory_with_a_long_path_is_named_by_a_scan_too(leaks: Path) -> None:
    folder = leaks / ("long" * 20)
    folder.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "tokshard", *SCAN, "--workers", "2"]
    done = subprocess.run(command, cwd=leaks, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr.startswith(f"error: worker processes cannot be started in the temporary directory {folder}")
    assert done.returncode == 1
