"""A corpus in a bucket or on a web server: the batches, findings and messages of the same corpus on this machine."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.contract.test_promise_01_faults import write_tokenizer
from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.store import faulty_proxy as faults
from tokshard import build_corpus, open_corpus
from tokshard.cli.main import run
from tokshard.errors import DamagedCorpusError, StoreError
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.runtime import NumpyLoader, StreamingLoader, StreamPlan
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.remote, pytest.mark.timeout(120)]

SIZES = {"seq_len": 64, "block_tokens": 256, "window_blocks": 8, "allow_small_blocks": True}


@pytest.fixture
def local(tmp_path) -> Path:
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


def copy_to(location: str, directory: Path) -> str:
    store = open_store(location)
    for name in files_below(open_store(directory), ""):
        store.put(name, (directory / name).read_bytes())
    return location


@pytest.fixture
def remote(s3, local) -> str:
    """The same corpus in a bucket."""
    return copy_to(f"{s3}/corpus", local)


def shards_of(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("shard-*.arrow"))


def plan_of(*corpora: object, **options: Any) -> StreamPlan:
    return StreamPlan({f"c{number}": str(corpus) for number, corpus in enumerate(corpora)}, **SIZES, **options)


def rows(loader: NumpyLoader | StreamingLoader, count: int) -> list[list[list[int]]]:
    batches = iter(loader)
    return [next(batches)["input_ids"].tolist() for _ in range(count)]


def read_all(plan: StreamPlan) -> None:
    """More samples than the corpus has blocks."""
    for sample in range(200):
        plan.sample(sample)


# reading


def test_a_corpus_in_a_bucket_has_the_batches_of_its_copy_on_this_machine(local, remote):
    assert plan_of(remote).fingerprint == plan_of(local).fingerprint
    with NumpyLoader(plan_of(local), global_batch_size=8) as here:
        expected = rows(here, 20)
    with NumpyLoader(plan_of(remote), global_batch_size=8) as there:
        assert rows(there, 10) == expected[:10]
        state = there.state_dict()
    with StreamingLoader(plan_of(remote), global_batch_size=8) as resumed:
        resumed.load_state_dict(state)
        assert rows(resumed, 10) == expected[10:]


def test_a_mixture_of_a_bucket_and_a_directory_has_the_batches_of_two_directories(local, remote, tmp_path):
    shutil.copytree(local, tmp_path / "other")
    with NumpyLoader(plan_of(local, tmp_path / "other", start_epoch={"c1": 9}), global_batch_size=8) as here:
        expected = rows(here, 10)
    with NumpyLoader(plan_of(remote, tmp_path / "other", start_epoch={"c1": 9}), global_batch_size=8) as there:
        assert rows(there, 10) == expected


def test_documents_are_found_in_a_bucket_as_on_this_machine(local, remote):
    here, there = plan_of(local), plan_of(remote)
    for sample in (0, 7, 100):
        assert there.trace(sample) == here.trace(sample)
    assert list(there.find("c0", 123)) == list(here.find("c0", 123))


def test_batches_over_a_bad_network_are_the_same(local, s3, s3_proxy):
    remote = copy_to(f"{s3}/corpus", local)
    with NumpyLoader(plan_of(local), global_batch_size=8) as here:
        expected = rows(here, 5)
    plan = plan_of(remote)
    s3_proxy.fail(faults.status(503), faults.reset, faults.short, faults.lost_answer, matches="GET .*shard-")
    with NumpyLoader(plan, global_batch_size=8) as there:
        assert rows(there, 5) == expected
    assert s3_proxy.faults == []


def test_a_shard_that_is_replaced_by_other_tokens_under_a_running_job_is_refused_by_name(local, remote):
    plan = plan_of(remote)
    plan.sample(0)
    for name in shards_of(local):
        content = bytearray((local / name).read_bytes())
        content[len(content) // 2] ^= 1
        open_store(remote).put(name, bytes(content))
    with pytest.raises(DamagedCorpusError, match=r"s3://.*/shard-.*\.arrow: tokens .* have the hash .*, expected"):
        read_all(plan)


def test_a_shard_that_vanishes_under_a_running_job_is_named(local, remote):
    plan = plan_of(remote)
    open_store(remote).delete(*shards_of(local))
    with (
        NumpyLoader(plan, global_batch_size=8) as loader,
        pytest.raises(DamagedCorpusError, match=r"shard-.*\.arrow is missing"),
    ):
        next(iter(loader))


def test_a_shard_of_another_size_is_refused_by_name(local, remote):
    plan = plan_of(remote)
    for name in shards_of(local):
        open_store(remote).put(name, b"short")
    with pytest.raises(DamagedCorpusError, match=r"shard-.*\.arrow: the file ends at byte 5, before \d+"):
        plan.sample(0)


def test_a_step_asks_for_its_ranges_together_and_not_for_whole_shards(s3, s3_proxy, local):
    remote = copy_to(f"{s3}/corpus", local)
    plan = plan_of(remote)
    s3_proxy.fail()
    plan.sample(0)
    shards = [line for line in s3_proxy.requests if "shard-" in line]
    assert 1 <= len([line for line in shards if line.startswith("GET")]) <= 3 * len(shards_of(local))


# web servers


def test_a_corpus_is_read_from_a_web_server_although_that_lists_no_files(http, files, local):
    shutil.copytree(local, files / "corpus")
    here, there = plan_of(local), plan_of(f"{http}/corpus")
    for sample in range(20):
        assert there.sample(sample)["input_ids"].tolist() == here.sample(sample)["input_ids"].tolist()
    assert verify_corpus(f"{http}/corpus").is_ok
    (files / "corpus" / shards_of(local)[0]).unlink()
    plan = plan_of(f"{http}/corpus")
    with pytest.raises(DamagedCorpusError, match=r"shard-.* is missing"):
        read_all(plan)


def test_bytes_that_change_on_the_way_never_reach_a_batch(http_proxy, files, local):
    shutil.copytree(local, files / "corpus")
    with NumpyLoader(plan_of(local), global_batch_size=8) as here:
        expected = rows(here, 20)
    plan = plan_of(f"http://127.0.0.1:{http_proxy.port}/corpus")
    http_proxy.fail(faults.wrong_bytes, faults.wrong_bytes, matches="GET .*shard-")
    with NumpyLoader(plan, global_batch_size=8) as there:
        assert rows(there, 20) == expected
        assert there.stats()["fetched"]["wrong_strides"] > 0
    plan = plan_of(f"http://127.0.0.1:{http_proxy.port}/corpus")
    http_proxy.fail(matches="GET .*shard-", for_ever=faults.wrong_bytes)
    with (
        NumpyLoader(plan, global_batch_size=8) as there,
        pytest.raises(DamagedCorpusError, match=r"shard-.*: tokens \d+ to \d+, from byte \d+ on, have the hash"),
    ):
        next(iter(there))


# verify


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_whole_corpus_in_a_bucket_is_ok(local, remote, is_quick):
    found, expected = verify_corpus(remote, is_quick=is_quick), verify_corpus(local, is_quick=is_quick)
    assert found.is_ok
    assert found.checked_bytes == expected.checked_bytes


@pytest.mark.parametrize("place", range(3))
def test_one_flipped_bit_in_any_file_is_found_in_a_bucket(local, remote, place):
    for name in files_below(open_store(local), ""):
        if name == "build-report.json":
            continue
        content = (local / name).read_bytes()
        changed = bytearray(content)
        changed[place * (len(content) - 1) // 2] ^= 4
        open_store(remote).put(name, bytes(changed))
        (local / name).write_bytes(bytes(changed))
        assert not verify_corpus(remote).is_ok
        assert verify_corpus(remote).problems == verify_corpus(local).problems
        open_store(remote).put(name, content)
        (local / name).write_bytes(content)


def test_what_is_missing_and_what_is_foreign_is_found_in_a_bucket(local, remote):
    first, second = shards_of(local)[:2]
    store = open_store(remote)
    store.delete(first)
    store.put(second, store.get(second)[:-8])
    store.put("notes.txt", b"x")
    found = {problem.file: problem.message for problem in verify_corpus(remote).problems}
    assert found[first] == "is missing"
    assert found[second].startswith("has ")
    assert found["notes.txt"] == "is not part of this corpus"


def test_bytes_that_change_on_the_way_are_found(s3, s3_proxy, local):
    remote = copy_to(f"{s3}/corpus", local)
    name = shards_of(local)[1]
    s3_proxy.fail(matches=f"GET .*{name}", for_ever=faults.wrong_bytes)
    found = verify_corpus(remote)
    assert {problem.file for problem in found.problems} == {name}


def test_a_store_that_does_not_answer_is_no_damage(s3, s3_proxy, local):
    remote = copy_to(f"{s3}/corpus", local)
    s3_proxy.fail(matches=f"GET .*{shards_of(local)[1]}", for_ever=faults.status(403, "AccessDenied"))
    with pytest.raises(StoreError, match="access denied: 403"):
        verify_corpus(remote)


# corpora that grew


@pytest.fixture
def grown(local) -> Path:
    """The corpus on this machine, with three generations more."""
    for number in range(3):
        source = Source(documents=documents_of([40 + number, 7]), metadata={"name": ["a", "b"]})
        append_generation(local, sources=[source], columns={"name": "string"})
    return local


@pytest.mark.parametrize("place", ["moto", "seaweedfs", "http"])
def test_a_corpus_that_grew_is_read_and_verified_where_it_lies(place, grown, files, request):
    if place != "http":
        location = copy_to(f"{request.getfixturevalue(place)}/corpus", grown)
    else:
        location = f"{request.getfixturevalue('http')}/corpus"
        shutil.copytree(grown, files / "corpus")
    here, there = open_corpus(grown), open_corpus(location)
    assert (there.num_generations, there.fingerprint) == (4, here.fingerprint)
    assert [document.tolist() for document in there] == [document.tolist() for document in here]
    assert there.sources() == here.sources()
    assert [there.provenance(index) for index in (0, 299, 300, 305)] == [
        here.provenance(index) for index in (0, 299, 300, 305)
    ]
    assert open_corpus(location, generation=2).num_documents == 304
    plans = [plan_of(grown), plan_of(location)]
    assert plans[0].fingerprint == plans[1].fingerprint
    assert plans[0].sample(100)["input_ids"].tolist() == plans[1].sample(100)["input_ids"].tolist()
    report = verify_corpus(location)
    assert (report.problems, report.num_generations) == ((), 4)


def test_a_corpus_in_a_bucket_is_appended_to_again_and_again(s3, tmp_path):
    options = {"tokenizer": write_tokenizer(tmp_path), "workers": 1, "validation_fraction": 0.3, "dedup": "exact"}
    for number in range(4):
        source = tmp_path / f"{number}.jsonl"
        source.write_text("".join(f'{{"text": "text {line}"}}\n' for line in range(10 * number, 10 * number + 15)))
        for out in (tmp_path / "corpus", f"{s3}/corpus"):
            build_corpus(source, out=out, append=number > 0, **options)
    for split in ("train", "validation"):
        here, there = open_store(tmp_path / "corpus" / split), open_store(f"{s3}/corpus/{split}")
        found = sorted(files_below(there, ""))
        assert found == sorted(files_below(here, ""))
        assert [name for name in found if "report" not in name and there.get(name) != here.get(name)] == []
        assert verify_corpus(f"{s3}/corpus/{split}").problems == ()
        assert open_corpus(f"{s3}/corpus/{split}").num_generations == 4


# commands


def test_a_plan_of_uris_is_shown_and_traced_like_one_of_directories(local, remote, tmp_path, capsys):
    keys = "seq_len = 64\nglobal_batch_size = 4\nblock_tokens = 256\nwindow_blocks = 8\nallow_small_blocks = true\n"
    outputs = []
    for name, corpus in (("here", local), ("there", remote)):
        mix = tmp_path / f"{name}.toml"
        mix.write_text(f'corpora = {{ code = "{corpus}" }}\n{keys}')
        for command in (["plan", str(mix), "--json"], ["trace", str(mix), "--sample", "3", "--json"]):
            assert run(command) == 0, capsys.readouterr().err
            outputs.append(capsys.readouterr().out.replace(str(corpus), "CORPUS"))
    assert outputs[1] == outputs[3]
    here, there = json.loads(outputs[0]), json.loads(outputs[2])
    assert there == here
    assert run(["plan", remote, "--seq-len", "64", "--global-batch-size", "4"]) == 0
    assert "corpus" in capsys.readouterr().out


def test_a_corpus_in_a_bucket_is_verified_and_inspected_by_the_command_line(local, remote, capsys):
    assert run(["verify", remote]) == 0
    assert capsys.readouterr().out.startswith(f"ok: {remote}: 300 documents")
    name = shards_of(local)[0]
    content = open_store(remote).get(name)
    open_store(remote).put(name, content[:-1] + bytes([content[-1] ^ 1]))
    assert run(["verify", remote]) == 1
    assert name in capsys.readouterr().out
