"""``tokshard trace`` says of a row what the loader gives. `transcripts/trace*.txt` have what it prints."""

from __future__ import annotations

import json
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save

from tests.contract.builds import WORDS
from tests.corpora import TOKENIZER
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.runtime import StreamingLoader, StreamPlan

MIX = """
corpora = { code = "shards/code", prose = "shards/prose" }
weights = { code = 0.7, prose = 0.3 }
seq_len = 32
global_batch_size = 6
seed = 17
"""

Rows = Callable[..., list[dict[str, Any]]]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two corpora, one with ids and kept columns, and a mix of both."""
    path = tmp_path_factory.mktemp("trace")
    rng = random.Random(5)
    for name, count in (("code", 60), ("prose", 90)):
        with (path / f"{name}.jsonl").open("w") as file:
            for n in range(count):
                text = f"{name} {n} " + " ".join(rng.choices(WORDS, k=rng.randint(1, 90)))
                record = {"text": text, "at": f"{name}/{n // 2}", "score": n / 3, "lang": None if n % 2 else "en"}
                file.write(json.dumps(record) + "\n")
        kept = ["--id-field", "at", "--keep-field", "score:float64", "--keep-field", "lang"] if name == "code" else []
        words = [path / f"{name}.jsonl", "--tokenizer", TOKENIZER.parent, "--out", path / "shards" / name]
        assert run(["build", *map(str, words), *kept, "--shard-tokens", "2000", "--quiet"]) == 0
    (path / "mix.toml").write_text(MIX)
    return path


@pytest.fixture
def rows(capsys, directory, monkeypatch) -> Rows:
    """The rows of a trace in the directory of the mix, from its JSON."""
    monkeypatch.chdir(directory)

    def rows(*arguments: object) -> list[dict[str, Any]]:
        exit_code = run(["trace", *map(str, arguments), "--json"])
        captured = capsys.readouterr()
        assert exit_code == 0
        assert not captured.err or "does not say its step" in captured.err
        return [json.loads(line) for line in captured.out.splitlines()]

    return rows


def tokens_of(rows: list[dict[str, Any]], rank: int, row: int) -> list[int]:
    """What the documents of a row hold on disk."""
    found = []
    for one in rows:
        if (one["rank"], one["row"]) == (rank, row):
            with open_corpus(f"shards/{one['corpus']}") as corpus:
                found += corpus.document(one["document"])[one["start"] : one["stop"]].tolist()
    return found


@pytest.mark.parametrize("deal", ["order", "cost"])
def test_every_row_of_every_rank_is_what_the_loader_gives_to_that_rank(rows, deal):
    plan = StreamPlan.load("mix.toml")
    for rank in range(3):
        options = "--dp-world-size", "3", "--dp-rank", rank, "--no-text", "--deal", deal
        found = rows("mix.toml", "--step", "1:5", *options)
        assert {one["rank"] for one in found} == {rank}
        with StreamingLoader(plan, global_batch_size=6, dp_rank=rank, dp_world_size=3, deal=deal) as loader:
            for step, batch in zip(range(1, 5), loader, strict=False):
                mine = [one for one in found if one["step"] == step]
                samples = {(one["row"], one["sample"], one["corpus"]) for one in mine}
                names = [plan.names[index] for index in batch["corpus_index"].tolist()]
                assert samples == set(zip(range(2), batch["sample_index"].tolist(), names, strict=True))
                for row in range(2):
                    assert tokens_of(mine, rank, row) == batch["input_ids"][row].tolist()


def test_a_row_says_where_its_document_comes_from_and_what_it_says(rows):
    found = rows("mix.toml", "--step", "2:40", "--text", "5000")
    for one in found:
        with open_corpus(f"shards/{one['corpus']}") as corpus:
            assert corpus.shards[corpus.shards.find(one["document"])[0]].name == one["shard"]
        number = one["record_number"] - 1
        assert one["source"] == f"{one['corpus']}.jsonl"
        record = json.loads(Path(f"{one['corpus']}.jsonl").read_text().splitlines()[number])
        if one["corpus"] == "code":
            assert one["id"] == record["at"]
            assert one["metadata"] == {"score": record["score"], "lang": record["lang"]}
        else:
            assert (one["id"], one["metadata"]) == (None, {})
        if one["stop"] - one["start"] == one["num_tokens"]:
            assert one["text"] == record["text"] + "<|endoftext|>"
    assert {one["corpus"] for one in found} == {"code", "prose"}
    assert len({one["shard"] for one in found}) > 2


def test_a_document_is_found_at_the_steps_whose_trace_shows_it_and_at_no_other(rows):
    traced = rows("mix.toml", "--sample", "0:400", "--no-text")
    keys = ("sample", "step", "rank", "row", "start", "stop")
    for name, documents in (("code", range(0, 60, 21)), ("prose", range(0, 90, 31))):
        for document in documents:
            (found,) = rows("mix.toml", "--document", f"{name}:#{document}", "--epochs", "0:20")
            places = sorted(tuple(one[key] for key in keys) for one in found["occurrences"] if one["sample"] < 400)
            shown = [one for one in traced if (one["corpus"], one["document"]) == (name, document)]
            assert places == sorted(tuple(one[key] for key in keys) for one in shown)


def saved_in_each_way(directory: Path, loader: StreamingLoader) -> Iterator[Path]:
    """A checkpoint as the trainer, torch.save and torch.distributed.checkpoint make it, and its state as JSON."""
    state = loader.state_dict()
    (directory / "trainer").mkdir()
    (directory / "trainer" / "state.json").write_text(json.dumps({"step": 5, "loader": state, "config": {}}))
    torch.save({"model": torch.zeros(9), "loader": state}, directory / "file.pt")
    with warnings.catch_warnings(action="ignore"):  # DCP of torch 2.13 itself warns
        save({"model": torch.zeros(9), "loader": loader}, checkpoint_id=directory / "dcp", no_dist=True)
    (directory / "state.json").write_text(json.dumps(state))
    return (directory / name for name in ("trainer", "file.pt", "dcp", "state.json"))


def test_a_checkpoint_of_any_kind_says_which_samples_were_skipped_and_when_a_document_was_read(rows, tmp_path):
    seen = []
    with StreamingLoader(StreamPlan.load("mix.toml"), global_batch_size=6) as loader:
        for skipped in (0, 0, 0, 12, 5):
            loader.skip(skipped)
            seen.append(next(iter(loader))["sample_index"].tolist())
    for checkpoint in saved_in_each_way(tmp_path, loader):
        arguments = ["mix.toml", "--checkpoint", checkpoint]
        found = rows(*arguments, "--step", "1:8", "--no-text")
        by_step = {step: sorted({one["sample"] for one in found if one["step"] == step}) for step in range(1, 8)}
        assert [by_step[step] for step in range(1, 6)] == seen
        assert by_step[6] == list(range(47, 53))
    for sample, when in ((3, "read"), (18, "skipped"), (36, "skipped"), (41, "read"), (50, "to come")):
        (one, *_) = rows(*arguments, "--sample", sample, "--no-text")
        name = f"{one['corpus']}:{'#' if one['corpus'] == 'code' else ''}{one['document']}"
        (document,) = rows(*arguments, "--document", name)
        assert {place["when"] for place in document["occurrences"] if place["sample"] == sample} == {when}


def test_what_a_trace_shows_as_masked_has_no_labels(rows, directory, tmp_path):
    (first, *_) = rows("mix.toml", "--sample", 40)
    plan = StreamPlan.load(str(directory / "mix.toml"))
    with StreamingLoader(plan, global_batch_size=6) as loader:
        loader.skip(30)
        (tmp_path / "masked.txt").write_text(f"{first['document']}\n")
        loader.mask(first["corpus"], tmp_path / "masked.txt")
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
        alone = plan.sample(40, loader.cursor)
    length = first["stop"] - first["start"]
    assert set(alone["labels"][:length].tolist()) == {-100}
    place = (first["corpus"], first["document"])
    for row in rows("mix.toml", "--checkpoint", tmp_path / "state.json", "--sample", "0:80"):
        is_masked = (row["corpus"], row["document"]) == place and row["sample"] >= 30
        assert row["masked"] == ("labels" if is_masked else None)
