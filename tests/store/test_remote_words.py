"""What a user reads when a bucket is missing, credentials are wrong, or the extra is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.store import faulty_proxy as faults
from tokshard.cli.main import run
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.remote, pytest.mark.timeout(60)]

KEYS = ["--seq-len", "64", "--global-batch-size", "4"]


def words(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """The exit code of a command, and what it says on standard error, without the progress."""
    code = run(list(arguments))
    return code, capsys.readouterr().err


BUILD = ["--tokenizer", "recipes/tokenizer", "--quiet", "--out", "OUT"]
COMMANDS = {
    "build": ["build", "URI", *BUILD],
    "glob": ["build", "URI/*.jsonl", *BUILD],
    "tokenizer": ["build", "recipes", "--tokenizer", "URI", "--out", "OUT"],
    "out": ["build", "recipes", "--tokenizer", "recipes/tokenizer", "--out", "URI"],
    "copy": ["copy", "URI", "--out", "OUT"],
    "inspect": ["inspect", "URI"],
    "verify": ["verify", "URI"],
    "status": ["status", "URI"],
    "plan": ["plan", "URI", *KEYS],
    "trace": ["trace", "URI", *KEYS, "--sample", "0"],
}


def with_places(command: str, uri: str, out: Path) -> list[str]:
    return [word.replace("URI", uri).replace("OUT", str(out)) for word in COMMANDS[command]]


@pytest.mark.parametrize("uri", ["s3://no-such-bucket", "s3://no-such-bucket/corpus"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_bucket_is_named_with_what_to_check(s3, command, uri, tmp_path, capsys):
    code, err = words(capsys, *with_places(command, uri, tmp_path / "out"))
    assert code == 2
    assert "s3://no-such-bucket does not exist: there is no such bucket" in err
    assert "check its name, AWS_ENDPOINT_URL and AWS_REGION" in err


@pytest.mark.parametrize("command", ["build", "copy", "inspect", "verify", "plan", "trace"])
def test_a_folder_that_does_not_exist_is_told_from_a_missing_bucket(s3, command, tmp_path, capsys):
    open_store(s3).put("beside", b"")
    code, err = words(capsys, *with_places(command, f"{s3}/not/there", tmp_path / "out"))
    assert code == 2
    assert f"{s3}/not/there does not exist" in err
    assert "no such bucket" not in err


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["plan", *KEYS], ["trace", *KEYS, "--sample", "0"]])
def test_a_folder_of_a_bucket_without_a_corpus_is_no_corpus(s3, command, capsys):
    open_store(s3).put("in/a.jsonl", b"{}")
    code, err = words(capsys, command[0], f"{s3}/in", *command[1:])
    assert code == 1
    assert f"{s3}/in is not a corpus: it has no manifest.json" in err


@pytest.mark.parametrize("command", ["inspect", "verify", "status"])
def test_refused_credentials_are_told_with_the_variables_to_check(s3, s3_proxy, command, capsys):
    s3_proxy.fail(for_ever=faults.status(403, "InvalidAccessKeyId"))
    code, err = words(capsys, command, f"{s3}/corpus")
    assert code == 1
    assert "access denied: 403" in err
    assert "AWS_ACCESS_KEY_ID" in err
    assert "the-secret" not in err


def test_a_build_with_refused_credentials_says_so(s3, s3_proxy, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    s3_proxy.fail(for_ever=faults.status(403, "InvalidAccessKeyId"))
    arguments = ["--tokenizer", "recipes/tokenizer", "--out", f"{s3}/out", "--quiet"]
    code, err = words(capsys, "build", str(tmp_path / "a.jsonl"), *arguments)
    assert code == 1
    assert "access denied: 403" in err


@pytest.mark.parametrize("endpoint", ["", "127.0.0.1:9000", "https://"])
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
def test_an_endpoint_that_is_not_a_url_is_refused_by_its_variable(s3, name, endpoint, capsys, monkeypatch):
    monkeypatch.setenv(name, endpoint)
    code, err = words(capsys, "inspect", f"{s3}/corpus")
    assert code == 2
    assert f"{name} is '{endpoint}', expected a URL such as https://s3.example.com" in err


WITHOUT_THE_EXTRA = """
import sys
sys.modules["obstore"] = None
from tokshard.cli.main import run
sys.exit(run(sys.argv[1:]))
"""


@pytest.mark.parametrize("command", [["inspect"], ["verify"], ["status"], ["plan", *KEYS]])
def test_a_missing_extra_is_named_with_the_command_that_installs_it(command):
    words = [sys.executable, "-c", WITHOUT_THE_EXTRA, command[0], "s3://bucket/corpus", *command[1:]]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 2
    assert "s3://bucket/corpus is a URI, and obstore is not installed" in done.stderr
    assert "pip install 'tokshard[remote]'" in done.stderr


def test_one_corpus_in_a_bucket_needs_the_sizes_of_a_plan_and_is_not_said_to_be_missing(s3, tmp_path, capsys):
    corpus = write_corpus(tmp_path / "corpus", sources=[Source(documents=documents_of([5, 6]))])
    store = open_store(f"{s3}/corpus")
    for name in files_below(open_store(corpus), ""):
        store.put(name, (corpus / name).read_bytes())
    code, err = words(capsys, "plan", f"{s3}/corpus")
    assert code == 2
    assert "no seq_len" in err
