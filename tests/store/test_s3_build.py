"""A build into a bucket gives the bytes of a build on this machine, whatever stops it on the way."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.store import faulty_proxy as faults
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.remote, pytest.mark.timeout(240)]

TOKENIZER = str(Path(__file__).parents[2] / "recipes" / "tokenizer")
OWN_TO_A_RUN = {"build-report.json"}
"""Times and places of a run."""


BUILD = """
import sys
from tokshard import build_corpus
if __name__ == "__main__":
    texts, tokenizer, out = sys.argv[1:]
    try:
        build_corpus(texts, tokenizer=tokenizer, out=out, workers=2, task_bytes=1 << 20)
    except Exception as error:
        sys.exit(str(error))
"""


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        lines = (json.dumps({"text": f"note {number} of {line} " * 100}) for line in range(600))
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines))
    return folder


def command(texts: Path, out: str) -> list[str]:
    script = texts.parent / "build.py"
    script.write_text(BUILD)
    return [sys.executable, str(script), str(texts), TOKENIZER, out]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def content(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {name: store.get(name) for name in files_below(store, "") if name not in OWN_TO_A_RUN}


@pytest.fixture
def expected(texts, tmp_path) -> dict[str, bytes]:
    run(*command(texts, str(tmp_path / "local")))
    return content(str(tmp_path / "local"))


def wait_for_receipts(store, number: int) -> None:
    deadline = time.monotonic() + 60
    while sum("receipts/" in name for name in files_below(store, "")) < number:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_build_into_a_bucket_gives_the_same_bytes_and_leaves_nothing_else(texts, s3, expected):
    run(*command(texts, f"{s3}/out"))
    assert content(f"{s3}/out") == expected
    assert "complete" in run(sys.executable, "-m", "tokshard", "status", f"{s3}/out")
    assert "4,800" in run(sys.executable, "-m", "tokshard", "inspect", f"{s3}/out")


def test_a_build_over_a_bad_network_gives_the_same_bytes(texts, s3, s3_proxy, expected):
    kinds = itertools.cycle([faults.status(503), faults.reset, faults.lost_answer, faults.short])
    turn = itertools.count()

    def every_fourth(proxy, request, client) -> None:
        if next(turn) % 4 == 0:
            next(kinds)(proxy, request, client)
        else:
            client.sendall(proxy.forward(request))

    s3_proxy.fail(for_ever=every_fourth)
    run(*command(texts, f"{s3}/out"))
    s3_proxy.fail()
    assert content(f"{s3}/out") == expected


def test_a_build_that_is_killed_is_continued_by_the_same_command(texts, s3, s3_proxy, expected):
    # most shards do not arrive
    s3_proxy.fail(matches=r"PUT .*shard-00-000000[2-7]", for_ever=faults.stall(20))
    process = subprocess.Popen(command(texts, f"{s3}/out"), start_new_session=True)
    store = open_store(f"{s3}/out")
    wait_for_receipts(store, 1)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    finished = [name for name in files_below(store, "") if "receipts/" in name]
    s3_proxy.fail()
    run(*command(texts, f"{s3}/out"))
    assert content(f"{s3}/out") == expected
    again = [name for name in finished if any(line.startswith("PUT") and name in line for line in s3_proxy.requests)]
    assert again == []


def test_of_two_builds_into_one_place_one_is_refused_and_told_who_writes(texts, s3, s3_proxy, expected):
    s3_proxy.fail(matches=r"PUT .*shard-00-000000[2-7]", for_ever=faults.stall(20))
    first = subprocess.Popen(command(texts, f"{s3}/out"), start_new_session=True)
    try:
        wait_for_receipts(open_store(f"{s3}/out"), 1)
        second = subprocess.run(command(texts, f"{s3}/out"), capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert f"another build is writing to {s3}/out: process {first.pid} on " in second.stderr
        assert "has held it since 2" in second.stderr
        assert f"process {first.pid} on" in run(sys.executable, "-m", "tokshard", "status", f"{s3}/out")
        s3_proxy.fail()
        assert first.wait(120) == 0
    finally:
        if first.poll() is None:
            os.killpg(first.pid, signal.SIGKILL)
        first.wait()
    assert content(f"{s3}/out") == expected
