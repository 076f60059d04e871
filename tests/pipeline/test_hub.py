"""Tokenizers and data sets of the hub, fetched from one that runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.pipeline.fake_hub import COMMIT, serve
from tests.pipeline.inputs import EOS, jsonl, parquet_bytes, table, texts_of, write_byte_tokenizer
from tokshard import open_corpus

TEXTS = [f"document {number}" for number in range(40)]


def rows(start: int, stop: int) -> bytes:
    return parquet_bytes(table([{"text": text} for text in TEXTS[start:stop]]), 7)


CONFIGS = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*.jsonl
- config_name: large
  data_files:
  - split: train
    path: large/train-*.parquet
  - split: test
    path: large/test.parquet
---
A data set card.
"""


Done = tuple[int, str, str]
"""The exit code of a command line, and what it printed."""

SCRIPT = """
import contextlib, io, json, sys
from tokshard.cli.main import run
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = run(arguments)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""


class Hub(NamedTuple):
    environment: dict[str, str]
    asked: list[str]
    directory: Path

    def builds(self, *lines: Sequence[str], **environment: str) -> list[Done]:
        """Builds in one other process, which imports the libraries of the hub once."""
        words = [["build", "--out", "out", "--workers", "1", "--quiet", *line] for line in lines]
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, json.dumps(words)],
            env={**self.environment, **environment},
            cwd=self.directory,
            capture_output=True,
            timeout=600,
            check=True,
        )
        return [tuple(json.loads(line)) for line in done.stdout.splitlines()]


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[Hub]:
    tokenizer = write_byte_tokenizer(tmp_path / "tokenizer") / "tokenizer.json"
    repositories = {
        "models/someone/bytes": {
            "README.md": b"A model.",
            "tokenizer.json": tokenizer.read_bytes(),
            "tokenizer_config.json": json.dumps({"eos_token": EOS}).encode(),
            "model.safetensors": b"weights" * 1_000,
            "tokenizer.py": b"raise SystemExit('code of a repository was run')",
        },
        "models/someone/pieces": {"tokenizer.model": b"pieces"},
        "datasets/someone/plain": {"data/train-00000.parquet": rows(0, 20), "data/train-00001.parquet": rows(20, 40)},
        "datasets/someone/configured": {
            "README.md": CONFIGS.encode(),
            "small/a.jsonl": jsonl([{"text": text} for text in TEXTS[:3]]),
            "large/train-0.parquet": rows(0, 10),
            "large/train-1.parquet": rows(10, 30),
            "large/test.parquet": rows(30, 40),
        },
        "datasets/someone/scripted": {"scripted.py": b"raise SystemExit('code of a repository was run')"},
    }
    (tmp_path / "a.jsonl").write_bytes(jsonl([{"text": "from disk"}]))
    with serve(repositories) as (address, asked):
        environment = {
            **os.environ,
            "HF_ENDPOINT": address,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
            "NO_PROXY": "127.0.0.1",
        }
        yield Hub(environment, asked, tmp_path)


# tokenizers


@pytest.mark.slow
def test_a_tokenizer_of_the_hub_is_fetched_alone_and_its_commit_recorded_unless_a_local_path_has_its_name(fake):
    locations = {"id": "someone/bytes", "uri": "hf://someone/bytes", "commit": f"someone/bytes@{COMMIT}"}
    done = fake.builds(*(["a.jsonl", "--tokenizer", where, "--out", out] for out, where in locations.items()))
    assert [code for code, _, _ in done] == [0] * 3, done
    for out in locations:
        corpus = open_corpus(fake.directory / out)
        assert texts_of(corpus) == ["from disk"]
        assert corpus.manifest.tokenizer.name == f"someone/bytes@{COMMIT}"
    fetched = {path.rpartition("/")[2] for path in fake.asked if "/resolve/" in path}
    assert fetched == {"tokenizer.json", "tokenizer_config.json"}
    fake.asked.clear()
    write_byte_tokenizer(fake.directory / "someone" / "bytes")
    assert fake.builds(["a.jsonl", "--tokenizer", "someone/bytes"])[0][0] == 0
    assert open_corpus(fake.directory / "out").manifest.tokenizer.name == "bytes"
    assert fake.asked == []


NO_TOKENIZERS = {
    "someone/nobody": (
        "there is no file or folder someone/nobody, and on the hub: someone/nobody cannot be used: ",
        "correct the path; or, if a model of the hub is meant: check the id",
    ),
    "hf://someone/bytes@v9": ("hf://someone/bytes@v9 cannot be used: ", "check the id"),
    "hf://someone/pieces": (
        "hf://someone/pieces has no tokenizer.json; it has tokenizer.model",
        "download tokenizer.model, and make a tokenizer.json of it, as recipes/convert_tokenizer.py does",
    ),
    "hf://someone": ("hf://someone is not a model of the hub", "give hf://OWNER/NAME[@REVISION]"),
}


@pytest.mark.slow
def test_a_tokenizer_that_the_hub_does_not_have_is_named_and_a_hub_that_does_not_answer_is_an_error_of_the_run(fake):
    done = fake.builds(*(["a.jsonl", "--tokenizer", location] for location in NO_TOKENIZERS))
    for (exit_code, _, said), (problem, hint) in zip(done, NO_TOKENIZERS.values(), strict=True):
        assert exit_code == 2
        assert said.startswith(f"error: {problem}")
        assert f"hint: {hint}" in said
    words = ["a.jsonl", "--tokenizer", "hf://someone/bytes"]
    ((exit_code, _, said),) = fake.builds(words, HF_ENDPOINT="http://127.0.0.1:9")
    assert exit_code == 1
    assert said.startswith("error: hf://someone/bytes cannot be fetched: ")
    assert "HF_ENDPOINT" in said


# data sets

PLAIN, SMALL, LARGE = (f"hf://someone/{name}@{COMMIT}" for name in ("plain", "configured/small", "configured/large"))
DATASETS: dict[str, tuple[list[str], str]] = {
    "hf://someone/plain": (TEXTS, f"{PLAIN}:train"),
    "hf://datasets/someone/plain": (TEXTS, f"{PLAIN}:train"),
    "hf://someone/plain@main:train": (TEXTS, f"{PLAIN}:train"),
    "hf://someone/configured/small": (TEXTS[:3], f"{SMALL}:train"),
    "hf://someone/configured/large:train": (TEXTS[:30], f"{LARGE}:train"),
    f"hf://someone/configured/large@{COMMIT}:test": (TEXTS[30:], f"{LARGE}:test"),
}


@pytest.mark.interop
@pytest.mark.parametrize("argument", DATASETS)
def test_a_data_set_of_the_hub_is_read_and_its_commit_recorded(argument, fake):
    texts, label = DATASETS[argument]
    words = [argument, "--tokenizer", "tokenizer"]
    first, again = fake.builds(words, words)
    assert (first[0], again[0]) == (0, 0), (first, again)
    assert "nothing to do" in again[1]
    corpus = open_corpus(fake.directory / "out")
    assert texts_of(corpus) == texts
    assert corpus.manifest.arguments == [label]
    assert all(source.path.endswith((".parquet", ".jsonl")) for source in corpus.sources())


@pytest.mark.interop
def test_another_commit_is_another_source(fake):
    sources = ("hf://someone/plain", "hf://someone/configured/large:train")
    first, other = fake.builds(*([source, "--tokenizer", "tokenizer"] for source in sources))
    assert (first[0], other[0]) == (0, 2)
    assert COMMIT in (fake.directory / "out" / "manifest.json").read_text()
    assert f"the sources were {PLAIN}:train, now hf://someone/configured/large" in other[2]


UNCLEAR = {
    "hf://someone/none": "hf://someone/none cannot be used: ",
    "hf://someone/plain@v9": "hf://someone/plain@v9 cannot be used: ",
    "hf://someone/configured": "hf://someone/configured cannot be used: Config name is missing",
    "hf://someone/configured/huge": "hf://someone/configured/huge cannot be used: BuilderConfig 'huge' not found",
    "hf://someone/configured/large": "hf://someone/configured/large has 2 splits; it has train, test",
    "hf://someone/plain:dev": "hf://someone/plain:dev has no split 'dev'; it has train",
    "hf://someone/scripted": "hf://someone/scripted cannot be used: ",
}


@pytest.mark.interop
def test_a_data_set_that_is_not_clear_is_refused(fake):
    done = fake.builds(*([argument, "--tokenizer", "tokenizer"] for argument in UNCLEAR))
    for (exit_code, _, said), problem in zip(done, UNCLEAR.values(), strict=True):
        assert exit_code == 2, said
        assert said.startswith(f"error: {problem}")
        assert "was run" not in said.replace("never run", "")
