"""The build benchmark runs and says everything it promises. No time is asserted."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

ON_EACH_TEXT = {
    "build, 1 worker",
    "build, 2 workers",
    "encode_batch, unchanged",
    "encode_batch, on one CPU",
    "encoder as tokshard calls it",
    "SHA-256 of the shards",
}
NAIVE = {"datasets, 1 process", "datasets, num_proc=2"}


def benchmark(*options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.benchmark.build", "--repeats", "1", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


def test_one_run_ends_in_a_table_and_a_line_of_json_with_every_figure_on_both_texts(tmp_path):
    file = tmp_path / "line.json"

    # enough text for two tasks, so that two workers run
    done = benchmark("--megabytes", "6", "--short-megabytes", "5", "--json", str(file))

    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    line = json.loads(last)
    assert line == json.loads(file.read_text())
    assert {"commit", "versions", "machine", "tokenizer", "repeats", "texts", "figures", "side_by_side"} <= set(line)
    assert {"python", "tokshard", "tokenizers", "pyarrow", "numpy"} <= set(line["versions"])
    assert {"cpu", "cores", "memory_gb"} <= set(line["machine"])

    figures = {(entry["figure"], entry["text"]): entry for entry in line["figures"]}
    wanted = ON_EACH_TEXT | (NAIVE if importlib.util.find_spec("datasets") else set())
    assert {(figure, text) for figure in wanted for text in ("code", "prose", "short")} <= set(figures)
    assert {("start-up, 1 worker", "tiny"), ("build, 1 worker", "quarter"), ("build, 2 workers", "half")} <= set(
        figures
    )
    for entry in figures.values():
        assert 0 < entry["cpu_seconds"]["min"] <= entry["cpu_seconds"]["median"] <= entry["cpu_seconds"]["max"]
    assert figures["build, 2 workers", "code"]["processes"] == 2

    compared = {(entry["figure"], entry["text"]) for entry in line["side_by_side"]}
    for text in ("code", "prose", "short"):
        assert ("MB/CPU-s: build / encode_batch, on one CPU", text) in compared
        assert ("CPU-s/GB besides encoding and hashing", text) in compared
        assert ("CPU-s/GB: 2 workers / 1", text) in compared
    shown = "\n".join(table)
    assert all(figure in shown for figure, _ in figures)
    assert str(tmp_path.home()) not in last, "the line names a folder of this machine"


def test_a_run_without_datasets_says_how_to_get_it():
    if importlib.util.find_spec("datasets"):
        pytest.skip("datasets is installed here")

    done = benchmark("--megabytes", "0.3", "--short-megabytes", "0.3", "--only", "datasets")

    assert done.returncode == 0, done.stderr
    assert "not installed: pip install 'tokshard[hf]'" in done.stdout


def test_no_file_is_in_the_text_twice():
    write = "from tests.benchmark.texts import documents\nfrom collections import Counter\nimport itertools\n"
    write += "texts = [text for _, _, text in itertools.islice(documents(Counter()), 3000)]\n"
    write += "assert len(set(texts)) == len(texts) == 3000"
    subprocess.run([sys.executable, "-c", write], cwd=ROOT, check=True)


def test_the_stages_of_a_build_add_up_to_its_time(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "tests.benchmark.texts", str(tmp_path), "--megabytes", "3", "--short-megabytes", "1"],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    command = [sys.executable, "-m", "tests.benchmark.stages", str(tmp_path / "code.jsonl.zst"), "--repeats", "1"]
    done = subprocess.run(
        [*command, "--tokenizer", "recipes/tokenizer"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    _, _, *stages, whole = done.stdout.strip().splitlines()
    seconds = [float(line.rsplit(maxsplit=3)[1]) for line in stages]
    assert sum(seconds) == pytest.approx(float(whole.rsplit(maxsplit=2)[1]), abs=0.02)
    assert {"encode", "parse JSON", "hash and write"} <= {line.rsplit(maxsplit=3)[0].strip() for line in stages}
