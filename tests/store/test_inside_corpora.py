"""Nothing is written into the folders of a corpus, at any depth, by any command."""

from __future__ import annotations

import json
import secrets

import pytest

from tests.corpora import Source, documents_of, write_corpus
from tests.examples import crossed
from tests.store.memory import REQUESTS, SCHEME, MemoryStore
from tokshard.cli.main import run
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

COMMANDS = {
    "build": ["build", "SOURCE", "--tokenizer", "recipes/tokenizer", "--quiet", "--workers", "1"],
    "force": ["build", "SOURCE", "--tokenizer", "recipes/tokenizer", "--quiet", "--workers", "1", "--force"],
    "copy": ["copy", "OTHER"],
    "export": ["export", "OTHER", "--format", "mds"],
}


@pytest.fixture(params=["directory", "memory", pytest.param("moto", marks=pytest.mark.remote)])
def corpus(request, tmp_path, monkeypatch) -> str:
    """A corpus."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    written = write_corpus(tmp_path / "corpora" / "one", sources=[Source(documents=documents_of([5, 6]))])
    if request.param == "directory":
        return str(written)
    root = request.getfixturevalue("moto") if request.param == "moto" else f"{SCHEME}://{secrets.token_hex(4)}/folder"
    for name in files_below(open_store(written), ""):
        open_store(f"{root}/one").put(name, (written / name).read_bytes())
    return f"{root}/one"


def words_of(command: str, tmp_path) -> list[str]:
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "a"}))
    other = write_corpus(tmp_path / "other", sources=[Source(documents=documents_of([7]))])
    places = {"SOURCE": str(tmp_path / "a.jsonl"), "OTHER": str(other)}
    return [places.get(word, word) for word in COMMANDS[command]]


@crossed("command, folder", COMMANDS, ["below", "generation-01", "x/y", "x/y/z/below"])
def test_a_place_in_another_corpus_is_refused(command, folder, corpus, tmp_path, capsys):
    before = set(files_below(open_store(corpus), ""))
    assert run([*words_of(command, tmp_path), "--out", f"{corpus}/{folder}"]) == 2
    assert f"{folder} lies inside the corpus {corpus}" in capsys.readouterr().err
    assert set(files_below(open_store(corpus), "")) == before


def test_a_split_of_an_export_is_not_put_into_a_corpus(corpus, tmp_path, capsys):
    assert run([*words_of("export", tmp_path), "--out", corpus, "--split", "train"]) == 2
    assert f"lies inside the corpus {corpus}" in capsys.readouterr().err
    assert run(["verify", corpus]) == 0


def test_a_link_into_a_corpus_is_followed(tmp_path, capsys):
    corpus = write_corpus(tmp_path / "one", sources=[Source(documents=documents_of([5, 6]))])
    (tmp_path / "link").symlink_to(corpus)
    assert run([*words_of("export", tmp_path), "--out", str(tmp_path / "link" / "x" / "y")]) == 2
    assert f"lies inside the corpus {corpus}" in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_place_beside_a_corpus_is_free(command, corpus, tmp_path):
    place = corpus.removesuffix("/one")
    open_store(place).put("manifest.json", b'{"name": "a manifest of another program"}')
    assert run([*words_of(command, tmp_path), "--out", f"{place}/two/three"]) == 0


def test_each_folder_above_costs_one_request(tmp_path, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    words = words_of("export", tmp_path)
    REQUESTS.clear()
    assert run([*words, "--out", f"{SCHEME}://bucket/{secrets.token_hex(4)}/a/b/c"]) == 0
    assert REQUESTS["stat"] == 4
    assert REQUESTS["names"] + REQUESTS["list"] <= 1
