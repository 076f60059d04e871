"""From arguments to inputs: which files, in which order, and what is refused."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.pipeline import inputs
from tests.pipeline.inputs import jsonl
from tokshard.errors import SourceError
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.opening import vanished
from tokshard.store import open_store

LINE = jsonl([{"text": "a"}])


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def write(*paths: str, content: bytes = LINE) -> None:
    for path in paths:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(content)


file_names = st.from_regex(r"[ab_0Zé-][ab._0Zé-]{0,2}(/[ab_0Zé-]{1,3})?", fullmatch=True)


@given(paths=st.sets(file_names.map(lambda name: f"{name}.jsonl"), min_size=1, max_size=8))
def test_the_order_of_a_directory_is_that_of_the_bytes_of_its_paths(paths, tmp_path_factory):
    directory = tmp_path_factory.mktemp("ordered")
    write(*(str(directory / path) for path in paths))
    inputs_found = discover([str(directory)], input_format=None).inputs
    assert [source.path for source in inputs_found] == sorted(paths, key=os.fsencode)


SUFFIXES = {"": None, ".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz", ".GZ": "gzip"}
KNOWN = {"jsonl": "jsonl", "json": "jsonl", "NDJSON": "jsonl", "txt": "txt", "csv": "csv", "TSV": "tsv"}
WHOLE = {"parquet": "parquet", "feather": "arrow", "arrow": "arrow-stream"}


def test_formats_are_known_by_suffix_whatever_its_case_and_by_the_start_of_an_arrow_file():
    kinds = {f"{kind}{suffix}": (KNOWN[kind], SUFFIXES[suffix]) for kind in KNOWN for suffix in SUFFIXES}
    write(*(f"d/a.{name}" for name in kinds))
    rows = inputs.table([{"text": "a"}])
    write("d/a.arrow", content=inputs.arrow_stream_bytes(rows))
    write("d/a.parquet", "d/a.feather", content=inputs.arrow_bytes(rows))
    found = {each.path: (each.format, each.compression) for each in discover(["d"], input_format=None).inputs}
    assert found == {
        f"a.{name}": kind for name, kind in (kinds | {name: (WHOLE[name], None) for name in WHOLE}).items()
    }


def test_the_format_option_reads_every_file_as_one_format():
    write("d/a", "d/b.txt", "d/c.json", "d/d.log.gz")
    found = [(each.index, each.path, each.format) for each in discover(["d"], input_format="jsonl").inputs]
    assert found == [(number, name, "jsonl") for number, name in enumerate(("a", "b.txt", "c.json", "d.log.gz"))]


@pytest.mark.parametrize("is_loop", [False, True])
@pytest.mark.parametrize(
    ("name", "source"), [("d/b.jsonl", "d"), ("d/b.arrow", "d"), ("d/b.txt", "d"), ("d/b.jsonl", "d/*.jsonl")]
)
def test_a_link_to_nothing_or_itself_is_left_out_and_listed_if_that_is_asked_for(name, source, is_loop, tmp_path):
    write("d/a.jsonl")
    os.symlink(Path(name).name if is_loop else "gone", name)
    corpus = inputs.build(source, tmp_path / "out", on_bad_source="skip")
    assert [source.left_out for source in corpus.sources()] == [{}, {"damaged input": 1}]
    (reject,) = map(json.loads, (tmp_path / "out" / "rejects.jsonl").read_text().splitlines())
    assert (reject["source"], reject["reason"]) == (f"{Path(source).name}/{Path(name).name}", "damaged input")


def test_files_that_are_not_read_are_counted_by_suffix_also_if_that_is_not_utf_8(tmp_path):
    write("d/a.jsonl")
    Path("d/b." + os.fsdecode(b"\xff")).touch()
    inputs.build("d", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "build-report.json").read_text())["ignored_files"] == {".\\udcff": 1}


@pytest.mark.parametrize("source", ["d", "d/**/*.jsonl"])
def test_a_directory_that_cannot_be_listed_is_named(source, monkeypatch):
    write("d/a.jsonl", "d/locked/b.jsonl")
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied")
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(SourceError, match=r"(?m)^d/locked cannot be listed: Permission denied$"):
        discover([source], input_format=None)


def test_a_place_that_cannot_be_looked_at_is_not_said_to_be_gone():
    with pytest.raises(SourceError, match=r"x\.jsonl cannot be read: File name too long"):
        discover(["x" * 300 + ".jsonl"], input_format=None)


def test_a_file_without_permission_is_not_said_to_be_gone():
    write("a.jsonl")
    (input_,) = discover(["a.jsonl"], input_format=None).inputs
    assert vanished(input_, PermissionError(13, "Permission denied")).hint.startswith("check its permissions and run")


def test_a_table_of_inputs_that_is_saved_goes_to_other_processes_as_a_reference(tmp_path):
    write(*(f"d/{number:04d}.jsonl" for number in range(300)))
    inputs_found = discover(["d"], input_format=None).inputs
    inputs_found.absolute().save(open_store(tmp_path), "inputs.arrow")  # the same inputs with other roots
    reference = pickle.dumps(inputs_found)
    assert len(reference) < 1_000
    assert list(pickle.loads(reference)) == list(inputs_found)
