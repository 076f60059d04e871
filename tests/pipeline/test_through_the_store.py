"""Builds from and into stores other than directories: the same bytes, and no path of this machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipeline import foreign
from tests.pipeline.arrays import commit_corpus, run_job
from tests.pipeline.foreign import EOS
from tests.pipeline.inputs import FORMATS, jsonl, write_byte_tokenizer
from tests.store.memory import REQUESTS
from tests.store.servers import file_server
from tokshard import build_corpus, import_corpus
from tokshard.pipeline.estimate import estimate_build
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.sources.discover import discover
from tokshard.store import files_below, open_store

TASK_BYTES = 1 << 20
RECORDS = [{"text": f"text {number} of some words \u00e9", "name": str(number)} for number in range(300)]


@pytest.fixture
def remote(bucket, tmp_path, monkeypatch) -> str:
    """An empty location in a store, and as the working directory an empty one on this machine."""
    monkeypatch.chdir(tmp_path)
    return bucket


def put_everywhere(remote: str, content: dict[str, bytes]) -> None:
    for name, data in content.items():
        open_store(remote).put(name, data)
        open_store(".").put(name, data)


def sources() -> dict[str, bytes]:
    found = {
        f"sources/deep/{number}-{name}": encode(RECORDS, 64) for number, (name, encode) in enumerate(FORMATS.items())
    }
    found["sources/.hidden/a.jsonl"] = b"not read"
    found["sources/ignored.bin"] = b"not read"
    return found


def shards_of(location: str | Path) -> dict[str, bytes]:
    store = open_store(location)
    return {name: store.get(name) for name in files_below(store, "") if name.endswith(".arrow")}


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["sources", "sources/**/*", "sources/deep/*"])
@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_a_build_from_and_into_another_store_has_the_same_bytes(remote, argument, dedup, tmp_path):
    put_everywhere(remote, sources())
    directory = write_byte_tokenizer(tmp_path / "tokenizer")
    for path in directory.iterdir():
        open_store(f"{remote}/tokenizer").put(path.name, path.read_bytes())
    options = {"task_bytes": 4096, "workers": 1, "dedup": dedup}
    there = {"tokenizer": f"{remote}/tokenizer", "out": f"{remote}/out", **options}
    build_corpus(argument, tokenizer="tokenizer", out="out", **options)
    for index in range(3):
        run_job(f"{remote}/{argument}", job_index=index, num_jobs=3, **{**there, "out": f"{remote}/jobs"})
    commit_corpus(f"{remote}/jobs")
    assert build_corpus(f"{remote}/{argument}", **there).is_new
    assert not build_corpus(f"{remote}/{argument}", **there).is_new
    assert shards_of(f"{remote}/out") == shards_of(f"{remote}/jobs") == shards_of("out")


def test_what_can_be_read_once_is_spooled_into_the_store(remote, tmp_path):
    bad = [{"text": 7}] * 3_000  # so that it is read on after a limit of one
    options = {"tokenizer": write_byte_tokenizer(tmp_path / "tokenizer"), "on_bad_record": "skip", "workers": 1}
    for out in ("out", f"{remote}/out"):
        build_corpus(iter([*bad, {"text": "a"}, {"text": "b"}]), out=out, max_documents=1, **options)
        assert {name for name in files_below(open_store(out), "") if "/" in name} == set()
    assert shards_of(f"{remote}/out") == shards_of("out")


def test_a_source_in_a_store_is_called_like_one_in_a_directory(remote):
    put_everywhere(remote, {"in/only.jsonl": b"{}"})
    for argument, names in (("in", ["only.jsonl"]), ("in/only.jsonl", [""]), ("in/*", ["only.jsonl"])):
        here, there = (discover([place], input_format=None) for place in (argument, f"{remote}/{argument}"))
        assert there.arguments == here.arguments
        assert [each.path for each in there.inputs] == [each.path for each in here.inputs] == names


def test_an_estimate_for_a_store_tells_no_free_space_of_this_machine(remote, tmp_path):
    put_everywhere(remote, {"a.jsonl": FORMATS["plain.jsonl"](RECORDS, 64)})
    options = {"tokenizer": str(write_byte_tokenizer(tmp_path / "tokenizer")), "workers": 1}
    here = estimate_build(["a.jsonl"], BuildOptions(out="out", **options))
    there = estimate_build([f"{remote}/a.jsonl"], BuildOptions(out=f"{remote}/out", **options))
    assert here.free_bytes
    assert there.free_bytes is None
    assert there.refused is None
    assert (there.documents, there.tokens, there.disk_bytes) == (here.documents, here.tokens, here.disk_bytes)


def test_the_files_of_a_folder_are_listed_and_not_asked_for_one_by_one(in_memory):
    for number in range(100):
        open_store(in_memory).put(f"sources/{number}.jsonl", b"")
    REQUESTS.clear()
    assert len(discover([f"{in_memory}/sources"], input_format=None).inputs) == 100
    assert REQUESTS["stat"] < 10


def test_a_build_into_a_bucket_reads_each_receipt_once_and_nothing_that_it_wrote(remote, tmp_path):
    num_tasks = 40
    line = jsonl([{"text": "some words", "rest": "x" * 10_000}])  # little to encode, many bytes to cut into tasks
    (tmp_path / "a.jsonl").write_bytes(line * (num_tasks * TASK_BYTES // len(line)))
    write_byte_tokenizer(tmp_path / "tokenizer")
    REQUESTS.clear()
    build_corpus("a.jsonl", tokenizer="tokenizer", out=f"{remote}/out", task_bytes=TASK_BYTES, workers=1)
    assert REQUESTS["get"] < num_tasks + 15
    assert REQUESTS["stat"] < 15
    assert len(shards_of(f"{remote}/out")) == num_tasks + 2


@pytest.mark.parametrize("tokenizer", ["tokenizer", "tokenizer/tokenizer.json"])
def test_files_on_a_web_server_which_lists_nothing_are_read_like_their_copies_on_this_machine(tmp_path, tokenizer):
    (tmp_path / "a.jsonl.zst").write_bytes(FORMATS["frames.jsonl.zst"](RECORDS, 64))
    write_byte_tokenizer(tmp_path / "tokenizer")
    foreign.fms(tmp_path / "tokens", [[1, 2, EOS], [3, EOS]])
    with file_server(tmp_path) as port:
        for name, root in (("there", f"http://127.0.0.1:{port}"), ("here", str(tmp_path))):
            options = {"tokenizer": f"{root}/{tokenizer}", "workers": 1}
            build_corpus(f"{root}/a.jsonl.zst", out=tmp_path / name / "built", task_bytes=4096, **options)
            import_corpus(f"{root}/tokens/data/en/part.arrow", out=tmp_path / name / "imported", **options)
    for each in ("built", "imported"):
        assert shards_of(tmp_path / "there" / each) == shards_of(tmp_path / "here" / each)
