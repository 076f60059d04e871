"""What a build says of ``--ray`` before it needs Ray."""

from __future__ import annotations

import io
import sys

import pytest

from tests.pipeline.places import TEXTS, build
from tokshard import build_corpus
from tokshard.cli.build import build as build_command
from tokshard.errors import UsageError


@pytest.fixture
def with_ray(monkeypatch):
    """Ray seems to be installed."""
    monkeypatch.setitem(sys.modules, "ray", io)


def test_without_the_package_the_extra_is_named_and_nothing_is_written(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--ray needs the package ray") as caught:
        build(place, ray="auto")
    assert caught.value.hint == "pip install 'tokshard[ray]'"
    assert not (place / "out").exists()


def test_a_local_build_does_not_import_ray(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    build(place)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"ray": "notes.jsonl"}, "ray is 'notes.jsonl', which is not the address of a cluster"),
        ({"ray": f"head:{10**20}"}, "ray is 'head:1000.*', which is not the address of a cluster"),
        ({"ray": 6379}, r"ray is 6379: expected str \| null, got int"),
    ],
)
def test_a_wrong_address_is_refused(options, problem, place, with_ray):
    with pytest.raises(UsageError, match=problem):
        build(place, **options)
    assert not (place / "out").exists()


@pytest.mark.parametrize("sources", ["-", iter(TEXTS), [{"text": text} for text in TEXTS]])
def test_what_only_this_process_can_read_is_refused(sources, place, with_ray, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "x"}\n')))
    options = {"tokenizer": place / "tok", "out": place / "out", "ray": "auto"}
    if sources == "-":
        options["format"] = "jsonl"
    with pytest.raises(UsageError, match="--ray reads its sources on other machines") as caught:
        build_corpus(sources, **options)
    assert "leave out --ray" in caught.value.hint
    assert not (place / "out").exists()


def test_a_source_behind_the_option_is_not_taken_for_an_address():
    with pytest.raises(UsageError, match=r"ray is 'notes\.jsonl', which is not the address") as caught:
        build_command.make_context("build", ["--ray", "notes.jsonl", "--tokenizer", "tok", "--out", "out"])
    assert "--ray=auto" in caught.value.hint
    context = build_command.make_context("build", ["notes.jsonl", "--ray", "--tokenizer", "tok", "--out", "out"])
    assert (context.params["ray"], context.params["sources"]) == ("auto", ("notes.jsonl",))
