"""A copy holds the chosen documents, with their sources and records, and is a corpus like any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.store.memory import SCHEME, MemoryStore
from tokshard import copy_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import DamagedCorpusError, UsageError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.interop.copy import shuffling
from tokshard.interop.copy.selection import Selection
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME

LENGTHS = [1 + 7 * index % 90 for index in range(120)]


def corpus_of(directory: Path, lengths: list[int] = LENGTHS, **options: Any) -> Path:
    """Two sources, the second of which left records out, with a column that repeats."""
    half = len(lengths) // 2
    documents = documents_of(lengths)
    sources = [
        Source(documents=documents[:half], path="a.jsonl", metadata={"lang": ["en", "fr", None] * (half // 3)}),
        Source(
            documents=documents[half:],
            path="b.jsonl",
            records=[2 * number for number in range(half)],
            metadata={"lang": ["de", "en", "fr"] * (half // 3)},
            left_out={"empty": half},
        ),
    ]
    return write_corpus(
        directory, sources=sources, columns={"lang": "string"}, tokenizer=TINY_TOKENIZER, shard_tokens=400, **options
    )


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return corpus_of(tmp_path / "corpus")


def rows(directory: Path | str) -> list[tuple[Any, ...]]:
    """Tokens, kept columns and origin of every document of an intact corpus."""
    report = verify_corpus(str(directory))
    assert report.is_ok, report.problems
    with open_corpus(directory) as opened:
        sources = [(opened.manifest.arguments[one.argument], one.path) for one in opened.sources()]
        return [
            (tuple(opened[index].tolist()), opened.metadata(index), sources[place.source], place.record)
            for index in range(len(opened))
            for place in [opened.provenance(index)]
        ]


def test_a_copy_in_other_shards_has_the_documents_origins_and_order_of_the_corpus(corpus, tmp_path):
    done = copy_corpus(corpus, out=tmp_path / "copy", shard_tokens=100_000)
    assert rows(tmp_path / "copy") == rows(corpus)
    assert done.manifest.num_shards == 1
    with open_corpus(corpus) as first, open_corpus(tmp_path / "copy") as second:
        assert len(first.shards) > 5
        assert second.fingerprint == first.fingerprint
        assert second.sources() == first.sources()
    sizes = {"seq_len": 32, "seed": 17, "block_tokens": 256, "window_blocks": 4, "allow_small_blocks": True}
    plans = [StreamPlan({"c": str(directory)}, **sizes) for directory in (corpus, tmp_path / "copy")]
    assert plans[0].fingerprint == plans[1].fingerprint
    for sample in range(40):
        assert np.array_equal(*(plan.sample(sample)["input_ids"] for plan in plans))


def test_documents_are_not_copied_twice_by_mistake(corpus, tmp_path):
    copy_corpus(corpus, out=tmp_path / "copy", shard_tokens=100_000)
    with pytest.raises(UsageError, match=r"/copy holds the same documents as "):
        copy_corpus([corpus, tmp_path / "copy"], out=tmp_path / "both")
    assert not (tmp_path / "both").exists()


def test_corpora_and_generations_become_one_corpus(corpus, tmp_path):
    other = write_corpus(tmp_path / "other", documents_of([5, 6]), tokenizer=TINY_TOKENIZER)
    append_generation(other, documents_of([9, 1]))
    with pytest.raises(UsageError, match="kept columns"):
        copy_corpus([corpus, other], out=tmp_path / "both")
    done = copy_corpus([corpus, other], out=tmp_path / "both", with_columns=False)
    found = [(tokens, {}, place, record) for tokens, _, place, record in rows(corpus)] + rows(other)
    assert rows(tmp_path / "both") == found
    copied = done.manifest.build.copied
    with open_corpus(corpus) as first, open_corpus(other) as second:
        assert copied.corpora == [first.fingerprint, second.fingerprint]


@pytest.mark.parametrize(
    ("selection", "is_wanted"),
    [
        (Selection(min_tokens=10, max_tokens=40), lambda row: 10 <= len(row[0]) <= 40),
        (Selection(where={"lang": "fr"}), lambda row: row[1]["lang"] == "fr"),
        (
            Selection(source="*b.jsonl", where={"lang": "en"}),
            lambda row: row[2][1] == "b.jsonl" and row[1]["lang"] == "en",
        ),
    ],
)
def test_a_copy_takes_the_documents_that_meet_all_conditions(corpus, tmp_path, selection, is_wanted):
    wanted = [row for row in rows(corpus) if is_wanted(row)]
    assert 0 < len(wanted) < len(LENGTHS)
    done = copy_corpus(corpus, out=tmp_path / "copy", selection=selection)
    assert rows(tmp_path / "copy") == wanted
    assert done.manifest.records.left_out["not copied"] == len(LENGTHS) - len(wanted)
    assert done.manifest.records.left_out["empty"] == len(LENGTHS) // 2


def test_ranges_of_hashes_divide_a_corpus_and_keep_equal_documents_together(corpus, tmp_path):
    parts = []
    for number, hashes in enumerate([(0.0, 0.3), (0.3, 0.9), (0.9, 1.0)]):
        copy_corpus(corpus, out=tmp_path / str(number), selection=Selection(hashes=hashes))
        parts.append({row[0] for row in rows(tmp_path / str(number))})
    everything = {row[0] for row in rows(corpus)}
    assert sum(map(len, parts)) == len(everything)
    assert parts[0] | parts[1] | parts[2] == everything
    assert len(parts[0]) < len(parts[1])


# a random order


def test_a_shuffled_copy_is_a_permutation_that_the_seed_alone_decides(corpus, tmp_path, monkeypatch):
    copy_corpus(corpus, out=tmp_path / "one", shuffle=17)
    monkeypatch.setattr(shuffling, "BUCKET_BYTES", 500)
    copy_corpus(corpus, out=tmp_path / "many", shuffle=17)
    copy_corpus(corpus, out=tmp_path / "other", shuffle=18)
    found = {name: rows(tmp_path / name) for name in ("one", "many", "other")}
    assert found["many"] == found["one"] != found["other"]
    before = rows(corpus)
    key = str
    assert sorted(found["one"], key=key) == sorted(found["other"], key=key) == sorted(before, key=key)
    assert found["one"] != before


def test_a_shuffle_moves_documents_of_both_halves_to_all_places():
    keys = shuffling.random_keys(17, 0, 10_000)
    assert np.array_equal(keys[500:600], shuffling.random_keys(17, 500, 100))
    order = np.argsort(keys)
    shares = [(part < 5_000).mean() for part in np.array_split(order, 10)]
    assert 0.44 < min(shares) <= max(shares) < 0.56


@pytest.mark.soak
def test_a_shuffled_copy_of_a_corpus_that_is_sorted_by_topic_has_even_batches(tmp_path):
    """The variance of topics between batches; that of the sorted corpus depends on its windows, which are an eighth."""
    rng = np.random.default_rng(0)
    lengths, topics = rng.integers(64, 448, 8_000), np.sort(rng.integers(1, 4, 8_000))
    documents = [[topic] * (length - 1) + [0] for length, topic in zip(lengths.tolist(), topics.tolist(), strict=True)]
    write_corpus(tmp_path / "sorted", documents, tokenizer=TINY_TOKENIZER)
    copy_corpus(tmp_path / "sorted", out=tmp_path / "shuffled", shuffle=17)
    found = {}
    for name in ("sorted", "shuffled"):
        sizes = {"seq_len": 256, "seed": 3, "block_tokens": 8_192, "window_blocks": 32, "allow_small_blocks": True}
        with NumpyLoader(StreamPlan({"c": str(tmp_path / name)}, epochs=1, **sizes), global_batch_size=32) as loader:
            counts = np.array([np.bincount(batch["input_ids"].ravel(), minlength=4)[1:4] for batch in loader])
        found[name] = np.var(counts / counts.sum(axis=1, keepdims=True), axis=0).sum()
    assert found["sorted"] > 1.3 * found["shuffled"]


# all or nothing


def test_a_flipped_token_stops_the_copy_and_nothing_appears(corpus, tmp_path):
    with open_corpus(corpus) as opened:
        info, place = opened.shards[2], opened.shards.batch_places(2)[0]
    content = bytearray((corpus / info.name).read_bytes())
    content[place.values_position] ^= 1
    (corpus / info.name).write_bytes(content)
    for shuffle in (None, 1):
        with pytest.raises(DamagedCorpusError, match=info.name):
            copy_corpus(corpus, out=tmp_path / "copy", shuffle=shuffle)
    assert [path.name for path in tmp_path.iterdir()] == ["corpus"]


def test_a_copy_into_a_bucket_and_back_is_the_corpus(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    there = f"{SCHEME}://{tmp_path.name}/copy"
    copy_corpus(corpus, out=there)
    copy_corpus(there, out=tmp_path / "back")
    assert rows(tmp_path / "back") == rows(there) == rows(corpus)
    with pytest.raises(UsageError, match="not empty"):
        copy_corpus(corpus, out=there)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--where", "lang"], "not a condition"),
        (["--where", "country=en"], "no kept column 'country'"),
        (["--hash", "0.9:0.1"], "not a part of 0:1"),
        (["--source", "nothing"], "no source is called nothing"),
        (["--min-tokens", "1M"], "no document meets"),
    ],
)
def test_conditions_that_make_no_sense_are_refused(corpus, tmp_path, capsys, options, problem):
    assert run(["copy", str(corpus), "--out", str(tmp_path / "copy"), *options]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "copy").exists()


def test_the_command_says_what_it_took(corpus, tmp_path, capsys):
    command = ["copy", str(corpus), "--out", str(tmp_path / "copy"), "--where", "lang=de"]
    assert run(command) == 0
    assert "20 of 120" in capsys.readouterr().out
    assert run(["copy", str(corpus), "--out", str(tmp_path / "all"), "--json"]) == 0
    with open_corpus(corpus) as opened:
        assert json.loads(capsys.readouterr().out)["fingerprints"]["content"] == opened.fingerprint
