"""Places of commands have one spelling, lie in no corpus, show no secret, and are named if they are not there."""

from __future__ import annotations

import json
import re
import secrets

import pytest

from tests.corpora import documents_of, write_corpus
from tests.examples import crossed
from tests.store import faulty_proxy as faults
from tests.store.memory import REQUESTS, SCHEME, MemoryStore
from tests.store.servers import copied
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.store import (
    STORES_BY_SCHEME,
    absolute_location,
    files_below,
    joined_location,
    locate,
    open_store,
    real_location,
)

pytestmark = pytest.mark.timeout(60)

TOKENIZER = ["--tokenizer", "recipes/tokenizer", "--quiet", "--workers", "1"]
SIZES = ["--seq-len", "64", "--global-batch-size", "4"]
COMMANDS = {
    "build": ["build", "URI", "--out", "OUT", *TOKENIZER],
    "glob": ["build", "URI/*.jsonl", "--out", "OUT", *TOKENIZER],
    "out": ["build", "SOURCE", "--out", "URI", *TOKENIZER],
    "force": ["build", "SOURCE", "--out", "URI", *TOKENIZER, "--force"],
    "tokenizer": ["build", "SOURCE", "--out", "OUT", "--tokenizer", "URI"],
    "dry run": ["build", "URI", "--out", "OUT", "--dry-run", *TOKENIZER],
    "import": ["import", "URI", "--out", "OUT", "--format", "npy", *TOKENIZER],
    "copy": ["copy", "URI", "--out", "OUT"],
    "copy out": ["copy", "CORPUS", "--out", "URI"],
    "export": ["export", "CORPUS", "--out", "URI", "--format", "mds"],
    "status": ["status", "URI"],
    "inspect": ["inspect", "URI"],
    "verify": ["verify", "URI"],
    "plan": ["plan", "URI", *SIZES],
    "trace": ["trace", "URI", *SIZES, "--sample", "0"],
}
READS = ["build", "copy", "inspect", "verify", "plan", "trace"]
WRITES = ["out", "force", "copy out", "export"]


@pytest.fixture
def say(tmp_path, capsys):
    """Runs a command about a URI; gives its exit code and all that it says."""
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    places = {"OUT": tmp_path / "out", "SOURCE": tmp_path / "a.jsonl"}
    places["CORPUS"] = write_corpus(tmp_path / "other", documents_of([7]))

    def said(command: str, uri: str, *more: str) -> tuple[int, str]:
        words = [str(places.get(word, word)).replace("URI", uri) for word in COMMANDS[command]]
        code = run([*words, *more])
        return code, "".join(capsys.readouterr())

    return said


@pytest.fixture(params=["directory", "memory", "small_s3"])
def place(request, tmp_path, monkeypatch) -> str:
    """A folder with the sources ``raw/a.jsonl`` and ``raw/b.jsonl`` and the corpus ``one``."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    folders = {"directory": str(tmp_path / "folder"), "memory": f"{SCHEME}://{secrets.token_hex(4)}/folder"}
    folder = folders.get(request.param) or request.getfixturevalue("small_s3")
    for name in ("a", "b"):
        open_store(folder).put(f"raw/{name}.jsonl", json.dumps({"text": f"text {name}"}).encode())
    copied(write_corpus(tmp_path / "written", documents_of([5, 6])), f"{folder}/one")
    return folder


# inside a corpus


@crossed("command, folder", WRITES, ["below", "generation-01", "x/y", "x/y/z/below"])
def test_nothing_is_written_into_the_folders_of_a_corpus(command, folder, place, say):
    before = set(files_below(open_store(place), ""))
    code, said = say(command, f"{place}/one/{folder}")
    assert (code, f"{folder} lies inside the corpus {place}/one" in said) == (2, True)
    assert set(files_below(open_store(place), "")) == before


def test_nothing_is_written_into_a_corpus_through_a_link(say, tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "other")
    code, said = say("export", f"{tmp_path}/link/x/y")
    assert (code, f"lies inside the corpus {tmp_path}/other" in said) == (2, True)


@pytest.mark.parametrize("command", WRITES)
def test_a_place_beside_a_corpus_is_free(command, place, say):
    open_store(place).put("manifest.json", b'{"name": "a manifest of another program"}')
    assert say(command, f"{place}/two/three")[0] == 0


def test_each_folder_above_costs_one_request(say, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    REQUESTS.clear()
    assert say("export", f"{SCHEME}://bucket/{secrets.token_hex(4)}/a/b/c")[0] == 0
    assert REQUESTS["stat"] == 4
    assert REQUESTS["names"] + REQUESTS["list"] <= 1


# spellings


def other(place: str, slashes: str = "//") -> str:
    """The same place with more slashes."""
    return re.sub(r"(?<=\w)/(?=\w)", slashes, place)


@pytest.mark.parametrize("spelled", ["{s}//c", "{s}///c", "{s}/c/", "{s}//c//"])
def test_all_spellings_of_a_place_are_one(spelled):
    uri = spelled.format(s="s3://b/a")
    assert absolute_location(uri) == real_location(uri) == open_store(uri).location == "s3://b/a/c"
    above, name = locate(uri)
    assert (above.location, name) == ("s3://b/a", "c")


@pytest.mark.parametrize("scheme", ["s3", "http"])
def test_a_relative_path_never_leads_to_another_bucket_or_server(scheme):
    folder = f"{scheme}://b/a"
    paths = ("../c", "../../c", "../../../c", "x/../../c", "../x/.././c")
    assert {joined_location(folder, path) for path in paths} == {f"{scheme}://b/c"}
    assert joined_location(folder, "..") == joined_location(f"{scheme}://b", ".") == f"{scheme}://b"


@pytest.mark.parametrize("slashes", ["//", "///"])
def test_a_place_that_a_command_reads_is_not_written_into_however_it_is_spelled(place, slashes, say):
    code, said = say("copy", f"{place}/one", "--out", other(f"{place}/one", slashes), "--force")
    assert (code, "which the copy reads" in said) == (2, True)
    for source, out in (f"{place}/raw", other(f"{place}/raw/out")), (other(f"{place}/raw"), f"{place}/raw/out"):
        code, said = say("build", source, "--out", out)
        assert (code, "lies inside the source" in said) == (2, True)
    assert say("verify", f"{place}/one")[0] == 0


@pytest.mark.parametrize(
    ("first", "again"), [("raw/a.jsonl", "/raw//a.jsonl"), ("raw", "/raw"), ("raw/", "raw"), ("raw", "raw/*.jsonl")]
)
def test_a_source_is_not_appended_again(place, first, again, say):
    assert say("build", f"{place}/{first}", "--out", f"{place}/corpus")[0] == 0
    code, said = say("build", f"{place}/{again}", "--out", f"{place}/corpus", "--append")
    assert (code, "/corpus already, in generation 0" in said) == (2, True)
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


@crossed("command, address", COMMANDS, ADDRESSES)
def test_an_address_with_a_secret_is_refused_and_neither_printed_nor_sent(command, address, say):
    with faults.FaultyProxy(("127.0.0.1", 9)).running() as server:
        code, said = say(command, address.format(port=server.port))
    assert (code in (1, 2), "SECRET" in said, server.requests) == (True, False, [])


# what is not there

NO_BUCKET = (
    "s3://no-such-bucket does not exist: there is no such bucket.*check its name, AWS_ENDPOINT_URL and AWS_REGION"
)


@pytest.mark.parametrize(
    ("uri", "commands", "words"),
    [
        ("s3://no-such-bucket", COMMANDS, NO_BUCKET),
        ("s3://no-such-bucket/a", COMMANDS, NO_BUCKET),
        ("{s3}/not/there", READS, "{s3}/not/there does not exist"),
        ("{s3}/in", READS[2:], "{s3}/in is not a corpus: it has no manifest.json"),
    ],
)
def test_what_is_not_in_a_bucket_is_named_with_what_to_check(uri, commands, words, s3, say):
    open_store(s3).put("in/a.jsonl", b"{}")
    for command in commands:
        code, said = say(command, uri.format(s3=s3))
        assert code == 2, command
        assert re.search(words.format(s3=s3), said, re.DOTALL), said
        assert ("no such bucket" in said) == (words == NO_BUCKET)
