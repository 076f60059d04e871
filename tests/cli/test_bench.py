"""``tokshard bench``: real runs of a fraction of a second, and what it refuses."""

from __future__ import annotations

import json
import re
import sys
import time

import pytest

from tests.cli.transcripts import shell
from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus

SHORT = ("--seconds", "0.05")


@pytest.fixture
def mix(tmp_path, monkeypatch):
    """A mix file next to its corpora, in the working directory."""
    monkeypatch.chdir(tmp_path)
    small.shrink(monkeypatch.setattr, memory_seconds=0.01)
    for name, lengths in (("code", [2_000] * 40), ("prose", [20, 7] * 400)):
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    text = 'corpora = { code = "code", prose = "prose" }\nweights = { code = 3, prose = 1 }\nseq_len = 64\n'
    (tmp_path / "mix.toml").write_text(text)
    return "mix.toml"


@pytest.mark.timeout(300)
def test_every_form_of_batches_is_shown_and_the_speed_of_one_process(mix):
    exit_code, out, err = shell("bench", mix, "--seconds", "0.1")
    assert (exit_code, err) == (0, "")
    lines, shown = out.splitlines(), " ".join(out.split())
    assert re.match(r"speed [\d.]+[kMB]? tokens/s in one process: \d+% of the limit, at which one core copies", shown)
    assert "mix         code 75.0%, prose 25.0%" in lines
    assert re.search("plan 64 tokens x 8 samples a step, seed 0: [0-9a-f]{12} ", shown)
    assert "data        90,800 tokens in documents of 53 on average" in lines
    assert [line.split("  ")[0] for line in lines if " ms (" in line] == ["full", "compact", "one row"]
    assert "batches tokens/s first batch median step longest step" in shown
    assert "GPU" not in shown
    assert "90,800 tokens are few" in shown


def test_times_are_those_of_the_run(mix):
    began = time.perf_counter()
    exit_code, out, _ = shell("bench", mix, *SHORT, "--json")
    took = time.perf_counter() - began
    assert exit_code == 0
    assert all(0 < reading["first_batch_seconds"] < took for reading in json.loads(out)["readings"])


@pytest.mark.timeout(60)
def test_a_mix_that_soon_uses_up_a_corpus_is_read_on(mix):
    with open(mix, "a") as file:
        file.write("max_epochs = 0.01\n")
    exit_code, _, err = shell("bench", mix, *SHORT)
    assert (exit_code, err) == (0, "")


def test_a_narrow_terminal_and_a_busy_machine_are_taken_into_account(mix, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0, 0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    exit_code, out, _ = shell("bench", mix, *SHORT)
    assert exit_code == 0
    assert max(map(len, out.splitlines())) <= 60
    assert "note the load was 0.75 per CPU before the measurement" in " ".join(out.split())
    monkeypatch.setattr("os.getloadavg", lambda: (0.9, 2, 2))
    assert "per CPU" not in shell("bench", mix, *SHORT)[1]


def test_without_torch_the_hint_says_how_to_get_it(mix, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    exit_code, out, err = shell("bench", mix)
    assert (exit_code, out) == (2, "")
    assert err == "error: batches are tensors, and torch is not installed\nhint: pip install 'tokshard[torch]'\n"
