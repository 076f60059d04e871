"""The remote benchmark runs and says everything it promises, and its server is as far and narrow as asked."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.benchmark.range_server import range_server
from tests.benchmark.remote_steps import counted
from tests.benchmark.shards import corpus, repeated
from tokshard.format.opening import open_corpus
from tokshard.store import open_store

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

TINY = ("--window-tokens", "200000", "--shards", "3", "--shard-tokens", "100000", "--rows", "4", "--milliseconds", "1")


def test_one_run_ends_in_two_tables_and_a_line_of_json_with_every_case(tmp_path):
    command = [sys.executable, "-m", "tests.benchmark.remote", *TINY, "--repetitions", "1", "--folder", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    line = json.loads(last)
    assert {"commit", "versions", "machine", "repetitions", "milliseconds", "megabytes_per_second"} <= set(line)
    groups = ["start", "start", "start", "speed", "waits", "waits", "nodes", "nodes", "disk", "disk", "local"]
    assert [case["group"] for case in line["cases"]] == groups
    for case in line["cases"]:
        assert case["tokens_per_second"]["median"] > 0
        assert 0 < case["open_seconds"]["median"] < case["first_batch_seconds"]["median"]
        is_remote = case["group"] != "local"
        assert (case["start_bytes"]["median"] > 0) == (case["start_requests"]["median"] > 0) == is_remote
    second_epoch = line["cases"][-2]
    assert second_epoch["bytes_per_token"]["median"] == 0
    assert sum(row.startswith("| ---") for row in tables) == 2
    assert str(tmp_path) not in last, "the line names a folder of this machine"


def test_the_server_sends_no_more_than_its_bandwidth_and_counts_what_it_sends(tmp_path):
    (tmp_path / "shard-0").write_bytes(bytes(4_000_000))
    (tmp_path / "other").write_bytes(b"0123456789")
    with range_server(tmp_path, milliseconds=30, megabytes_per_second=10) as url:
        store = open_store(url)
        started = time.monotonic()
        assert store.read("other", [(2, 3)]) == [b"234"]
        assert time.monotonic() - started >= 0.03
        started = time.monotonic()
        assert store.read("shard-0", [(0, 1_000_000), (3_000_000, 1_000_000)]) == [bytes(1_000_000)] * 2
        assert time.monotonic() - started >= 0.18
        counts = counted(url)

    assert (counts["shard_requests"], counts["shard_bytes"]) == (2, 2_000_000)
    assert (counts["other_requests"], counts["other_bytes"]) == (1, 3)
    assert counts["most_at_once"] == 2


def test_one_shard_is_served_as_every_shard_of_a_larger_corpus(tmp_path):
    one = corpus(tmp_path, num_tokens=50_000, document_tokens=40, shard_tokens=100_000)
    many = repeated(tmp_path, one, num_shards=1_100)
    (shard,) = one.glob("shard-*")
    with open_corpus(one) as small, range_server(many, milliseconds=0, megabytes_per_second=0, shard=shard) as url:
        large = open_corpus(url)

        assert large.num_tokens == 1_100 * small.num_tokens
        found = open_store(url).read(large.shards[1_099].name, [(0, small.shards[0].num_bytes)])
        assert found == [shard.read_bytes()]
