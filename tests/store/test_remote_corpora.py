"""A corpus in a bucket or on a web server: the batches, findings and messages of the same corpus on this machine."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.store import faulty_proxy as faults
from tests.store.memory import SCHEME, MemoryStore
from tests.store.servers import copied
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.errors import DamagedCorpusError, StoreError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.runtime import Cache, NumpyLoader, StreamingLoader, StreamPlan
from tokshard.store import STORES_BY_SCHEME, open_store

pytestmark = pytest.mark.timeout(120)

SIZES = {"seq_len": 64, "block_tokens": 256, "window_blocks": 8, "allow_small_blocks": True}


@pytest.fixture
def local(tmp_path: Path) -> Path:
    """A corpus of some shards with kept columns."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 200, 300).tolist()
    names = [str(number) for number in range(len(lengths))]
    return write_corpus(
        tmp_path / "corpus",
        sources=[Source(documents=documents_of(lengths), metadata={"name": names})],
        columns={"name": "string"},
        shard_tokens=3_000,
        tokenizer=TINY_TOKENIZER,
    )


@pytest.fixture
def remote(s3: str, local: Path) -> str:
    """The same corpus in a bucket."""
    return copied(local, f"{s3}/corpus")


@pytest.fixture
def grown(local: Path) -> Path:
    """The corpus on this machine, with three generations more."""
    for number in range(3):
        source = Source(documents=documents_of([40 + number, 7]), metadata={"name": ["a", "b"]})
        append_generation(local, sources=[source], columns={"name": "string"})
    return local


def shards_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("shard-*.arrow"))


def plan_of(*corpora: object, **options: Any) -> StreamPlan:
    return StreamPlan({f"c{number}": str(corpus) for number, corpus in enumerate(corpora)}, **SIZES, **options)


def rows(loader: NumpyLoader | StreamingLoader, count: int) -> list[list[list[int]]]:
    batches = iter(loader)
    return [next(batches)["input_ids"].tolist() for _ in range(count)]


def first_rows(plan: StreamPlan, count: int) -> list[list[list[int]]]:
    with NumpyLoader(plan, global_batch_size=8) as loader:
        return rows(loader, count)


def all_that_is_said(location: str, other: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The batches of a corpus, also resumed and in a mixture; its documents; what commands print."""
    plan, mixed = plan_of(location), plan_of(location, other, start_epoch={"c1": 9})
    with NumpyLoader(plan, global_batch_size=8) as loader:
        batches = rows(loader, 10)
    with StreamingLoader(plan, global_batch_size=8) as resumed:
        resumed.load_state_dict(loader.state_dict())
        batches += rows(resumed, 10)
    corpus, second = open_corpus(location), open_corpus(location, generation=2)
    sizes = ["--seq-len", "64", "--global-batch-size", "4"]
    printed = []
    for command, *options in (["inspect"], ["plan", *sizes], ["trace", *sizes, "--sample", "3"]):
        assert run([command, location, *options, "--json"]) == 0
        printed.append(capsys.readouterr().out.replace(location, "CORPUS"))
    return {
        "fingerprints": (plan.fingerprint, corpus.fingerprint),
        "batches": batches,
        "mixed": first_rows(mixed, 10),
        "documents": [document.tolist() for document in corpus],
        "sources": corpus.sources(),
        "generations": (corpus.num_generations, second.num_documents),
        "checked": [
            (report.problems, report.num_generations, report.checked_bytes)
            for report in (verify_corpus(location, is_quick=is_quick) for is_quick in (False, True))
        ],
        "printed": printed,
    }


REMOTE = ["http", "small_s3", pytest.param("seaweedfs", marks=pytest.mark.remote)]


@pytest.mark.parametrize("place", ["memory", *REMOTE])
def test_all_that_is_said_of_a_corpus_is_the_same_wherever_it_lies(
    place, grown, tmp_path, files, request, monkeypatch, capsys
):
    """A web server lists no files."""
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    shutil.copytree(grown, tmp_path / "other")
    if place == "http":
        shutil.copytree(grown, files / "corpus")
        location = f"{request.getfixturevalue(place)}/corpus"
    else:
        root = f"{SCHEME}:/{tmp_path}" if place == "memory" else request.getfixturevalue(place)
        location = copied(grown, f"{root}/corpus")
    here = all_that_is_said(str(grown), tmp_path / "other", capsys)
    assert here["generations"] == (4, 304)
    assert [problems for problems, *_ in here["checked"]] == [(), ()]
    assert all_that_is_said(location, tmp_path / "other", capsys) == here


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda before: bytes(len(before)), r"s3://.*/shard-.*\.arrow: tokens .* have the hash .*, expected"),
        (None, r"shard-.*\.arrow is missing"),
        (lambda _: b"short", r"shard-.*\.arrow: the file ends at byte 5, before \d+"),
    ],
    ids=["replaced", "gone", "of another size"],
)
def test_a_shard_that_changes_under_a_running_job_is_refused_by_name(local, remote, content, message):
    plan, store = plan_of(remote, cache=Cache(memory_bytes=0)), open_store(remote)
    plan.sample(0)
    for name in shards_of(local):
        store.delete(name)
        if content:
            store.put(name, content((local / name).read_bytes()))
    with pytest.raises(DamagedCorpusError, match=message):
        [plan.sample(sample) for sample in range(200)]  # more than the corpus has blocks


def test_what_is_wrong_in_a_bucket_is_found_and_a_store_that_does_not_answer_is_no_damage(local, remote, s3_proxy):
    first, second, third = shards_of(local)[:3]
    store = open_store(remote)
    store.delete(first)
    store.put(second, store.get(second)[:-8])
    store.put("notes.txt", b"x")
    s3_proxy.fail(matches=f"GET .*{third}", for_ever=faults.wrong_bytes)
    found = {problem.file: problem.message for problem in verify_corpus(remote).problems}
    assert found.keys() == {first, second, third, "notes.txt"}
    assert (found[first], found["notes.txt"]) == ("is missing", "is not part of this corpus")
    assert found[second].startswith("has ")
    s3_proxy.fail(matches=f"GET .*{third}", for_ever=faults.status(403, "AccessDenied"))
    with pytest.raises(StoreError, match="access denied: 403"):
        verify_corpus(remote)
