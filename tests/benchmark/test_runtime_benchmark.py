"""The runtime benchmark runs and says everything it promises. No time is asserted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.benchmark import page_cache
from tests.benchmark.compare import Tree
from tests.benchmark.shards import corpus
from tokshard.inspect.verify.verification import verify_corpus

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

TINY = ("--tokens", "200000", "--lengths", "40", "750", "--corpora", "1", "5", "--repetitions", "1", "--changes", "20")


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmark.runtime", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_run_ends_in_tables_and_a_line_of_json_with_every_case(tmp_path):
    done = benchmark(*TINY, "--folder", str(tmp_path))

    assert done.returncode == 0, done.stderr
    *tables, last = done.stdout.splitlines()
    line = json.loads(last)
    assert {"commit", "versions", "machine", "repetitions", "run_tokens", "notes"} <= set(line)
    assert line["limits"]["tokens_per_second"]["median"] > 0

    cases = {(e["document_tokens"], e["corpora"], e["read"], e["page_cache"]): e for e in line["speed"]}
    cold = ("in process", "thread")
    compact = ("compact", "compact, expanded", "compact, thread")
    modes = ("input_ids alone", *cold, *compact)
    assert set(cases) == {
        *((length, count, mode, "warm") for length in (40, 750) for count in (1, 5) for mode in modes),
        *((length, 1, mode, "cold") for length in (40, 750) for mode in cold),
    }
    for case in cases.values():
        assert 0 < case["tokens_per_second"]["min"] <= case["tokens_per_second"]["max"]
        assert case["longest_to_median"]["median"] >= 1
        assert case["of_limit"]["median"] > 0
    assert {entry["corpora"] for entry in line["state"]} == {1, 3, 500}
    assert all(entry["seconds"]["median"] > 0 for entry in line["start"])
    assert any("10^14 synthetic tokens" in entry["start"] for entry in line["start"])
    assert [entry["document_tokens"] for entry in line["memory"]] == [750, 40]
    assert all(0 < entry["own_bytes"] <= entry["peak_bytes"] for entry in line["memory"])
    assert sum(row.startswith("| ---") for row in tables) == 4
    assert str(tmp_path) not in last, "the line names a folder of this machine"


def test_one_group_is_measured_alone(tmp_path):
    done = benchmark(*TINY, "--folder", str(tmp_path), "--only", "cold", "--lengths", "750")

    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert {case["page_cache"] for case in line["speed"]} == {"cold"}
    assert line["start"] == line["state"] == line["memory"] == []


def test_two_checkouts_are_compared_by_pairs_in_turn(tmp_path):
    command = [sys.executable, "-m", "tests.benchmark.compare", str(ROOT), "--tokens", "200000", "--pairs", "1"]
    done = subprocess.run(
        [*command, "--corpora", "1", "2", "--folder", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout.splitlines()[-1])
    assert [(case["document_tokens"], case["corpora"]) for case in line["cases"]] == [
        (750, 1),
        (750, 2),
        (40, 1),
        (40, 2),
    ]
    assert all(0 < case["this_to_other"]["min"] <= case["this_to_other"]["max"] for case in line["cases"])
    assert str(tmp_path) not in done.stdout


def test_corpora_to_compare_are_made_again_for_another_tree_and_another_format(tmp_path):
    folders = set()
    for tree in ("one", "two"):
        module = tmp_path / tree / "tokshard" / "format" / "writer.py"
        module.parent.mkdir(parents=True)
        module.write_text("VERSION = 1")
        folders.add(Tree(root=tmp_path / tree, base=tmp_path).folder)
    assert Tree(root=tmp_path / "two", base=tmp_path).folder in folders
    module.write_text("VERSION = 2")
    folders.add(Tree(root=tmp_path / "two", base=tmp_path).folder)
    assert len(folders) == 3


def test_the_corpora_are_whole_have_the_sizes_that_were_asked_for_and_are_made_once(tmp_path):
    made = corpus(tmp_path, num_tokens=300_000, document_tokens=40)
    report = verify_corpus(made)

    assert report.is_ok, report.problems
    assert 300_000 <= report.num_tokens < 330_000
    assert 36 < report.num_tokens / report.num_documents < 44
    before = (made / "manifest.json").stat().st_mtime_ns
    assert (corpus(tmp_path, num_tokens=300_000, document_tokens=40) / "manifest.json").stat().st_mtime_ns == before
    other = corpus(tmp_path, num_tokens=300_000, document_tokens=40, number=1)
    assert (other / "manifest.json").read_bytes() != (made / "manifest.json").read_bytes()


def test_what_was_read_is_in_the_page_cache(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(bytes(1 << 20))
    page_cache.drop([file])
    page_cache.warm([file])
    assert page_cache.share([file]) == 1.0
