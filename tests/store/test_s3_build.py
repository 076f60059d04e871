"""A build into a bucket gives the bytes of a build on this machine, whatever stops it on the way."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.store import faulty_proxy as faults
from tests.store.faulty_proxy import FaultyProxy
from tokshard.store import files_below, open_store

pytestmark = [pytest.mark.remote, pytest.mark.timeout(240)]

TOKENIZER = str(Path(__file__).parents[2] / "recipes" / "tokenizer")
CLI = (sys.executable, "-m", "tokshard")
OWN_TO_A_RUN = {"build-report.json"}
"""Times and places of a run."""


BUILD = """
import sys
from tokshard import build_corpus
from tokshard.store import STORES_BY_SCHEME
from tokshard.store.remote import remote_store
from tokshard.store.requests import RemoteOptions
if __name__ == "__main__":
    texts, tokenizer, out, lease_seconds = sys.argv[1:]
    STORES_BY_SCHEME["s3"] = lambda uri: remote_store(uri, RemoteOptions(lease_seconds=float(lease_seconds)))
    try:
        build_corpus(texts, tokenizer=tokenizer, out=out, workers=2, task_bytes=1 << 20)
    except Exception as error:
        sys.exit(str(error))
"""
SHARDS = r"PUT .*shard-0[01]-000000[1-7]"
"""Most of them, as requests name them."""


@pytest.fixture
def texts(tmp_path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        lines = (json.dumps({"text": f"note {number} of {line} " * 100}) for line in range(600))
        (folder / f"{number:02}.jsonl").write_text("\n".join(lines))
    return folder


def command(texts: Path, out: str, *, lease_seconds: float = 60) -> list[str]:
    script = texts.parent / "build.py"
    script.write_text(BUILD)
    return [sys.executable, str(script), str(texts), TOKENIZER, out, str(lease_seconds)]


def run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def refused(*words: str) -> str:
    """What a command says that has to fail."""
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stderr


@contextlib.contextmanager
def running(*words: str) -> Iterator[subprocess.Popen[str]]:
    """A command in a process group of its own, which is killed unless it has ended."""
    process = subprocess.Popen(words, start_new_session=True, stderr=subprocess.PIPE, text=True)
    with process:
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)


def content(location: str) -> dict[str, bytes]:
    store = open_store(location)
    return {name: store.get(name) for name in files_below(store, "") if name not in OWN_TO_A_RUN}


@pytest.fixture
def expected(texts, tmp_path) -> dict[str, bytes]:
    run(*command(texts, str(tmp_path / "local")))
    return content(str(tmp_path / "local"))


@contextlib.contextmanager
def stalled(proxy: FaultyProxy, out: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """A build into a bucket that has written some of its receipts, and waits for most of its shards."""
    proxy.fail(matches=SHARDS, for_ever=faults.stall(20))
    store, deadline = open_store(out), time.monotonic() + 60
    with running(*words) as process:
        while not any("receipts/" in name for name in files_below(store, "")):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield process


def test_a_build_into_a_bucket_over_a_bad_network_gives_the_same_bytes_and_leaves_nothing_else(
    texts, s3, s3_proxy, expected
):
    kinds = [faults.status(503), faults.reset, faults.lost_answer, faults.short]
    turn = itertools.cycle(itertools.chain(*([kind, *[faults.passed_on] * 3] for kind in kinds)))

    def every_fourth(*request: Any) -> None:
        next(turn)(*request)

    s3_proxy.fail(for_ever=every_fourth)
    run(*command(texts, f"{s3}/out"))
    s3_proxy.fail()
    assert content(f"{s3}/out") == expected
    assert "complete" in run(*CLI, "status", f"{s3}/out")
    assert "4,800" in run(*CLI, "inspect", f"{s3}/out")


@pytest.mark.parametrize("is_killed", [True, False])
def test_a_build_that_is_killed_or_cannot_renew_its_lease_is_continued_by_the_same_command(
    texts, s3, s3_proxy, expected, is_killed
):
    def broken(proxy: FaultyProxy, request: faults.Request, *client: Any) -> None:
        fault = faults.status(503) if "lock" in request.line else faults.stall(20)
        fault(proxy, request, *client)

    out = f"{s3}/out"
    with stalled(s3_proxy, out, *command(texts, out, lease_seconds=60 if is_killed else 4)) as first:
        finished = [name for name in files_below(open_store(out), "") if "receipts/" in name]
        if not is_killed:
            s3_proxy.fail(matches=rf"{SHARDS}|PUT .*lock", for_ever=broken)
            lost = time.monotonic()
            assert first.wait(60) == 1
            assert time.monotonic() - lost < 4 + 8
            assert "lock was not renewed for 4 s: another process may take it now" in first.stderr.read()
    s3_proxy.fail()
    run(*command(texts, out))
    assert content(out) == expected
    assert not [line for line in s3_proxy.requests for name in finished if line.startswith("PUT") and name in line]


def test_of_two_builds_into_one_place_one_is_refused_and_told_who_writes(texts, s3, s3_proxy):
    out = f"{s3}/out"
    with stalled(s3_proxy, out, *command(texts, out)) as first:
        message = refused(*command(texts, out))
        assert f"another build is writing to {out}: process {first.pid} on " in message
        assert "has held it since 2" in message
        assert f"process {first.pid} on" in run(*CLI, "status", out)
        s3_proxy.fail()
        assert first.wait(120) == 0
    run(*CLI, "verify", out)
