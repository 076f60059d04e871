"""What a build says of ``--executor ray`` before it needs Ray."""

from __future__ import annotations

import io
import sys

import pytest

from tests.pipeline.places import TEXTS, build
from tokshard import build_corpus
from tokshard.errors import UsageError


@pytest.fixture
def with_ray(monkeypatch):
    """Ray seems to be installed."""
    monkeypatch.setitem(sys.modules, "ray", io)


def test_without_the_package_the_extra_is_named_and_nothing_is_written(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match="--executor ray needs the package ray") as caught:
        build(place, executor="ray")
    assert caught.value.hint == "pip install 'tokshard[ray]'"
    assert not (place / "out").exists()


def test_a_local_build_does_not_import_ray(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    build(place)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"executor": "dask"}, "executor is 'dask'"),
        ({"ray_address": "auto"}, "ray_address is given, and executor is local"),
        ({"executor": "ray", "ray_address": 6379}, r"ray_address is 6379: expected str \| null, got int"),
    ],
)
def test_a_wrong_executor_or_address_is_refused(options, problem, place, with_ray):
    with pytest.raises(UsageError, match=problem):
        build(place, **options)
    assert not (place / "out").exists()


@pytest.mark.parametrize("sources", ["-", iter(TEXTS), [{"text": text} for text in TEXTS]])
def test_what_only_this_process_can_read_is_refused(sources, place, with_ray, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "x"}\n')))
    options = {"tokenizer": place / "tok", "out": place / "out", "executor": "ray"}
    if sources == "-":
        options["input_format"] = "jsonl"
    with pytest.raises(UsageError, match="--executor ray reads its sources on other machines") as caught:
        build_corpus(sources, **options)
    assert "leave out --executor" in caught.value.hint
    assert not (place / "out").exists()
