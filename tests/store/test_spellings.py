"""A place has one spelling, and what an address must not show is neither sent nor printed."""

from __future__ import annotations

import json
import secrets

import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.examples import crossed
from tests.store.faulty_proxy import FaultyProxy
from tests.store.memory import SCHEME, MemoryStore
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import UsageError
from tokshard.store import STORES_BY_SCHEME, absolute_location, locate, open_store, real_location

TOKENIZER = ["--tokenizer", "recipes/tokenizer", "--quiet"]


@pytest.fixture(params=["memory", pytest.param("moto", marks=pytest.mark.remote)])
def place(request, monkeypatch) -> str:
    """A folder with the sources ``raw/a.jsonl`` and ``raw/b.jsonl``."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    uri = request.getfixturevalue("moto") if request.param == "moto" else f"{SCHEME}://{secrets.token_hex(4)}/folder"
    for name in ("a", "b"):
        open_store(uri).put(f"raw/{name}.jsonl", json.dumps({"text": f"text {name}"}).encode())
    return uri


def other(uri: str, slashes: str = "//") -> str:
    """The same place with more slashes after the bucket and before the last part."""
    scheme, _, path = uri.partition("://")
    first, *parts = path.split("/")
    return f"{scheme}://{slashes.join([first, *parts])}"


def build(*words: str) -> int:
    return run(["build", *words, *TOKENIZER, "--workers", "1"])


@pytest.mark.parametrize("spelled", ["{s}//c", "{s}///c", "{s}/c/", "{s}//c//"])
def test_all_spellings_of_a_place_are_one(spelled):
    uri, store = spelled.format(s="s3://b/a"), open_store(spelled.format(s="s3://b/a"))
    assert absolute_location(uri) == real_location(uri) == store.location == "s3://b/a/c"
    above, name = locate(uri)
    assert (above.location, name) == ("s3://b/a", "c")


@pytest.mark.parametrize("slashes", ["//", "///"])
def test_a_copy_over_its_own_corpus_is_refused(place, slashes, capsys):
    assert build(f"{place}/raw", "--out", f"{place}/corpus") == 0
    assert run(["copy", f"{place}/corpus", "--out", other(f"{place}/corpus", slashes), "--force"]) == 2
    assert "which the copy reads" in capsys.readouterr().err
    assert run(["verify", f"{place}/corpus"]) == 0


def test_an_output_in_a_source_is_refused(place, capsys):
    assert build(f"{place}/raw", "--out", other(f"{place}/raw/out")) == 2
    assert "lies inside the source" in capsys.readouterr().err
    assert build(other(f"{place}/raw"), "--out", f"{place}/raw/out") == 2


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ("{place}/raw/a.jsonl", "{place}//raw//a.jsonl"),
        ("{place}/raw", "{place}//raw"),
        ("{place}/raw/", "{place}/raw"),
    ],
)
def test_a_source_is_not_appended_again(place, first, again, capsys):
    assert build(first.format(place=place), "--out", f"{place}/corpus") == 0
    assert build(again.format(place=place), "--out", f"{place}/corpus", "--append") == 2
    assert "/corpus already, in generation 0" in capsys.readouterr().err
    with open_corpus(f"{place}//corpus/") as corpus:
        assert corpus.num_generations == 1


# secrets


ADDRESSES = [
    "https://127.0.0.1:{port}/x.jsonl?token=SECRET",
    "https://127.0.0.1:{port}?token=SECRET",
    "https://127.0.0.1:{port}/x.jsonl#SECRET",
    "http://user:SECRET@127.0.0.1:{port}/x.jsonl",
    "http://SECRET@127.0.0.1:{port}/x.jsonl?token=SECRET",
    "s3://user:SECRET@bucket/x.jsonl",
    "ftp://user:SECRET@127.0.0.1:{port}/x.jsonl",
    "ftp://127.0.0.1:{port}/x.jsonl?token=SECRET",
]
COMMANDS = {
    "build": ["build", "URI", "--out", "OUT", *TOKENIZER],
    "out": ["build", "SOURCE", "--out", "URI", *TOKENIZER],
    "tokenizer": ["build", "SOURCE", "--out", "OUT", "--tokenizer", "URI"],
    "dry run": ["build", "URI", "--out", "OUT", "--dry-run", *TOKENIZER],
    "import": ["import", "URI", "--out", "OUT", "--format", "npy", *TOKENIZER],
    "copy": ["copy", "URI", "--out", "OUT"],
    "copy out": ["copy", "CORPUS", "--out", "URI"],
    "export": ["export", "CORPUS", "--out", "URI", "--format", "mds"],
    "status": ["status", "URI"],
    "inspect": ["inspect", "URI"],
    "verify": ["verify", "URI"],
    "plan": ["plan", "URI", "--seq-len", "64", "--global-batch-size", "4"],
    "trace": ["trace", "URI", "--seq-len", "64", "--global-batch-size", "4", "--sample", "0"],
}


@crossed("command, address", COMMANDS, ADDRESSES)
def test_an_address_with_a_secret_is_refused_and_neither_printed_nor_sent(command, address, tmp_path, capsys):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    corpus = write_corpus(tmp_path / "corpus", sources=[Source(documents=documents_of([5, 6]))])
    places = {"OUT": str(tmp_path / "out"), "SOURCE": str(tmp_path / "a.jsonl"), "CORPUS": str(corpus)}
    with FaultyProxy(("127.0.0.1", 9)).running() as server:
        uri = address.format(port=server.port)
        code = run([uri if word == "URI" else places.get(word, word) for word in COMMANDS[command]])
    output = capsys.readouterr()
    assert code in (1, 2)
    assert "SECRET" not in output.out + output.err
    assert server.requests == []


@pytest.mark.remote
@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"])
@pytest.mark.parametrize("value", ["user:SECRET@host", "https://user:SECRET@host", "http://SECRET@127.0.0.1:9"])
def test_an_endpoint_with_a_password_is_refused_by_its_variable(name, value, monkeypatch, capsys):
    monkeypatch.setenv(name, value)
    assert run(["inspect", "s3://bucket/corpus"]) == 2
    message = capsys.readouterr().err
    assert f"{name} is " in message
    assert "expected a URL such as https://s3.example.com without a user name and password" in message
    assert "SECRET" not in message


def test_the_rest_of_an_address_is_shown():
    with pytest.raises(UsageError, match=r"^https://host/a/b\.jsonl comes with a query"):
        open_store("https://host/a/b.jsonl?token=SECRET")
    with pytest.raises(UsageError, match=r"^s3://bucket/a\?b comes with a user name or password"):
        open_store("s3://user:SECRET@bucket/a?b")
