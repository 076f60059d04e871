"""Tokenizers and data sets of the hub, fetched from one that runs on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from tests.pipeline.fake_hub import COMMIT, serve
from tests.pipeline.inputs import EOS, jsonl, parquet_bytes, table, texts_of, write_byte_tokenizer
from tokshard import open_corpus
from tokshard.errors import UsageError
from tokshard.pipeline.sources import hub

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


class Hub(NamedTuple):
    environment: dict[str, str]
    asked: list[str]
    directory: Path

    def build(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "tokshard", "build", *arguments, "--out", "out", "--workers", "1", "--quiet"]
        return subprocess.run(
            command,
            env={**self.environment, **environment},
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )

    def builds(self, *arguments: list[str]) -> list[tuple[int, str]]:
        """Exit code and stderr of each build, all in one process, which imports the libraries of the hub once."""
        script = (
            "import contextlib, io, json, sys\n"
            "from tokshard.cli.main import run\n"
            "for arguments in json.loads(sys.argv[1]):\n"
            "    with contextlib.redirect_stderr(io.StringIO()) as err, contextlib.redirect_stdout(io.StringIO()):\n"
            "        code = run(arguments)\n"
            "    print(json.dumps([code, err.getvalue()]))\n"
        )
        lines = [["build", *line, "--workers", "1", "--quiet"] for line in arguments]
        done = subprocess.run(
            [sys.executable, "-c", script, json.dumps(lines)],
            env=self.environment,
            cwd=self.directory,
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    def texts(self) -> list[str]:
        return texts_of(open_corpus(self.directory / "out"))


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
def test_a_tokenizer_of_the_hub_is_fetched_alone_and_its_commit_recorded(fake):
    locations = {"id": "someone/bytes", "uri": "hf://someone/bytes", "commit": f"someone/bytes@{COMMIT}"}
    done = fake.builds(*(["a.jsonl", "--tokenizer", where, "--out", out] for out, where in locations.items()))
    assert [code for code, _ in done] == [0] * 3, done
    for out in locations:
        corpus = open_corpus(fake.directory / out)
        assert texts_of(corpus) == ["from disk"]
        assert corpus.manifest.tokenizer.name == f"someone/bytes@{COMMIT}"
    fetched = {path.rpartition("/")[2] for path in fake.asked if "/resolve/" in path}
    assert fetched == {"tokenizer.json", "tokenizer_config.json"}


def test_a_local_path_goes_before_a_model_of_the_hub(fake):
    write_byte_tokenizer(fake.directory / "someone" / "bytes")
    assert fake.build("a.jsonl", "--tokenizer", "someone/bytes").returncode == 0
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
        "download it, and then: tokshard",
    ),
    "hf://someone": ("hf://someone is not a model of the hub", "give hf://OWNER/NAME[@REVISION]"),
}


@pytest.mark.slow
def test_a_tokenizer_that_the_hub_does_not_have_is_named(fake):
    done = fake.builds(*(["a.jsonl", "--tokenizer", location, "--out", "out"] for location in NO_TOKENIZERS))
    for (code, shown), (problem, hint) in zip(done, NO_TOKENIZERS.values(), strict=True):
        assert code == 2
        assert shown.startswith(f"error: {problem}")
        assert f"hint: {hint}" in shown


@pytest.mark.slow
def test_a_hub_that_does_not_answer_is_an_error_of_the_run(fake):
    done = fake.build("a.jsonl", "--tokenizer", "hf://someone/bytes", HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 1
    assert done.stderr.startswith("error: hf://someone/bytes cannot be fetched: ")
    assert "HF_ENDPOINT" in done.stderr


# data sets


def test_a_library_that_may_run_the_code_of_a_repository_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(__version__="3.6.0"))
    with pytest.raises(UsageError, match=r"needs datasets 4 or later, this is 3\.6\.0, which may run the code of"):
        hub.fetch_dataset("hf://someone/rows")


def test_a_data_set_of_the_hub_needs_an_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UsageError, match="hf://someone/plain needs the packages datasets") as caught:
        hub.fetch_dataset("hf://someone/plain")
    assert caught.value.hint == "pip install 'tokshard[hf]'"


@pytest.mark.parametrize("argument", ["hf://", "hf://plain", "hf://a/b/c/d", "hf://a/b:x y", "hf://a/b:train:test"])
def test_an_id_of_another_form_is_refused(argument):
    with pytest.raises(UsageError, match="is not a dataset of the hub") as caught:
        hub.fetch_dataset(argument)
    assert caught.value.hint == "give hf://OWNER/NAME[/CONFIG][@REVISION][:SPLIT]"


DATASETS: dict[str, tuple[list[str], str]] = {
    "hf://someone/plain": (TEXTS, f"hf://someone/plain@{COMMIT}:train"),
    "hf://datasets/someone/plain": (TEXTS, f"hf://someone/plain@{COMMIT}:train"),
    "hf://someone/plain@main:train": (TEXTS, f"hf://someone/plain@{COMMIT}:train"),
    "hf://someone/configured/small": (TEXTS[:3], f"hf://someone/configured/small@{COMMIT}:train"),
    "hf://someone/configured/large:train": (TEXTS[:30], f"hf://someone/configured/large@{COMMIT}:train"),
    f"hf://someone/configured/large@{COMMIT}:test": (TEXTS[30:], f"hf://someone/configured/large@{COMMIT}:test"),
}


@pytest.mark.interop
@pytest.mark.parametrize("argument", DATASETS)
def test_a_data_set_of_the_hub_is_read_and_its_commit_recorded(argument, fake):
    texts, label = DATASETS[argument]
    done = fake.build(argument, "--tokenizer", "tokenizer")
    assert done.returncode == 0, done.stderr
    assert fake.texts() == texts
    corpus = open_corpus(fake.directory / "out")
    assert corpus.manifest.arguments == [label]
    assert all(source.path.endswith((".parquet", ".jsonl")) for source in corpus.sources())
    again = fake.build(argument, "--tokenizer", "tokenizer")
    assert (again.returncode, "nothing to do" in again.stdout) == (0, True)


@pytest.mark.interop
def test_another_commit_is_another_source(fake):
    assert fake.build("hf://someone/plain", "--tokenizer", "tokenizer").returncode == 0
    manifest: Any = fake.directory / "out" / "manifest.json"
    assert COMMIT in manifest.read_text()
    done = fake.build("hf://someone/configured/large:train", "--tokenizer", "tokenizer")
    assert done.returncode == 2
    assert f"the sources were hf://someone/plain@{COMMIT}:train, now hf://someone/configured/large" in done.stderr


@pytest.mark.interop
@pytest.mark.parametrize(
    ("argument", "problem"),
    [
        ("hf://someone/none", "hf://someone/none cannot be used: "),
        ("hf://someone/plain@v9", "hf://someone/plain@v9 cannot be used: "),
        ("hf://someone/configured", "hf://someone/configured cannot be used: Config name is missing"),
        ("hf://someone/configured/huge", "hf://someone/configured/huge cannot be used: BuilderConfig 'huge' not found"),
        ("hf://someone/configured/large", "hf://someone/configured/large has 2 splits; it has train, test"),
        ("hf://someone/plain:dev", "hf://someone/plain:dev has no split 'dev'; it has train"),
        ("hf://someone/scripted", "hf://someone/scripted cannot be used: "),
    ],
)
def test_a_data_set_that_is_not_clear_is_refused(argument, problem, fake):
    done = fake.build(argument, "--tokenizer", "tokenizer")
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"error: {problem}")
    assert "was run" not in done.stderr.replace("never run", "")
