"""``tokshard bench``: real runs of a fraction of a second, and what it refuses."""

from __future__ import annotations

import json
import re
import sys

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.store.memory import SCHEME, MemoryStore
from tokshard.cli.main import run
from tokshard.inspect.plan import bench
from tokshard.store import STORES_BY_SCHEME, files_below, open_store

SHORT = ("--seconds", "0.05")


@pytest.fixture
def mix(tmp_path, monkeypatch):
    """A mix file next to its corpora, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench, "_MEMORY_SECONDS", 0.01)
    for name, lengths in (("code", [2_000] * 40), ("prose", [20, 7] * 400)):
        write_corpus(tmp_path / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    text = 'corpora = { code = "code", prose = "prose" }\nweights = { code = 3, prose = 1 }\nseq_len = 64\n'
    (tmp_path / "mix.toml").write_text(text)
    return "mix.toml"


@pytest.fixture
def shell(capsys):
    """Runs ``tokshard bench`` in this process: exit code, stdout, stderr."""

    def shell(*arguments):
        exit_code = run(["bench", *arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


@pytest.mark.timeout(300)
def test_every_form_of_batches_is_shown_with_the_limit_and_the_gpus_that_it_feeds(shell, mix):
    exit_code, out, err = shell(mix, "--seconds", "0.1")
    assert (exit_code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == "mix         code 75.0%, prose 25.0%"
    assert lines[1].startswith("plan        64 tokens x 8 samples a step, seed 0: ")
    assert lines[2] == "data        90,800 tokens in documents of 53 on average"
    assert lines[3].startswith("limit       ")
    assert [line.split("  ")[0] for line in lines if " ms (" in line] == ["full", "compact", "one row"]
    shown = " ".join(out.split())
    assert "M tokens/s, at which one core copies documents of 1,000 tokens from random places of memory" in shown
    assert "batches M tokens/s of limit first batch" in shown
    assert "one loader process feeds" in shown
    assert "GPUs of 4,550 tokens/s (IBM's figure for training 7B parameters on an A100; --gpu-tokens" in shown
    assert "one loader process per GPU, each of which reads one row of a step, takes" in shown
    assert "90,800 tokens are few" in shown


def test_a_corpus_in_a_store_comes_with_what_the_store_gives(shell, mix, tmp_path, monkeypatch):
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    remote = f"{SCHEME}:/{tmp_path}/prose"
    for name in files_below(open_store(tmp_path / "prose"), ""):
        open_store(remote).put(name, (tmp_path / "prose" / name).read_bytes())
    text = (tmp_path / mix).read_text().replace('prose = "prose"', f'prose = "{remote}"')
    (tmp_path / mix).write_text(text)
    exit_code, out, err = shell(mix, *SHORT)
    assert (exit_code, err) == (0, "")
    shown = " ".join(out.split())
    assert re.search(r"stores give [\d,]+ MB/s with 64 requests at once", shown)
    assert re.search(r"the loader fetched [\d,]+ MB/s; [\d.]+% of the pieces were in memory", shown)
    exit_code, out, err = shell(mix, *SHORT, "--json")
    found = json.loads(out)
    # a quarter of the samples are of the corpus in the store, whose tokens have two bytes
    enough = found["store_bytes_per_second"] / 2 / 0.25
    assert found["limit_tokens_per_second"] == pytest.approx(min(enough, found["memory_tokens_per_second"]))
    assert found["readings"][0]["fetched"]["hits"] > 0


def test_a_narrow_terminal_and_a_busy_machine_are_taken_into_account(shell, mix, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setattr("os.getloadavg", lambda: (1.5, 0, 0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    exit_code, out, _ = shell(mix, *SHORT)
    assert exit_code == 0
    assert max(map(len, out.splitlines())) <= 60
    assert "note this machine was busy: 75% of its CPUs were in use before the measurement" in " ".join(out.split())
    monkeypatch.setattr("os.getloadavg", lambda: (0.9, 2, 2))
    assert "busy" not in shell(mix, *SHORT)[1]


def test_json_holds_the_same_numbers(shell, mix):
    exit_code, out, err = shell(mix, *SHORT, "--seed", "3", "--seq-len", "1000", "--gpu-tokens", "10k", "--json")
    report = json.loads(out)
    assert (exit_code, err) == (0, "")
    assert (report["seq_len"], report["global_batch_size"], report["seed"]) == (1000, 8, 3)
    assert report["shares"] == {"code": 0.75, "prose": 0.25}
    assert report["gpu_tokens_per_second"] == 10_000
    assert report["cores_per_gpu"] > 0
    assert report["store_bytes_per_second"] is None
    assert report["limit_tokens_per_second"] == report["memory_tokens_per_second"]
    assert [reading["batches"] for reading in report["readings"]] == ["full", "compact", "one row"]
    for reading in report["readings"]:
        speed = reading["tokens_per_second"]
        assert reading["of_limit"] == pytest.approx(speed / report["limit_tokens_per_second"])
        assert reading["gpus_fed"] == speed // 10_000
        assert 0 < reading["median_step_seconds"] <= reading["longest_step_seconds"]
        assert reading["first_batch_seconds"] > 0


def test_one_corpus_directory_needs_no_options(shell, mix):
    exit_code, out, _ = shell("code", *SHORT)
    assert exit_code == 0
    assert out.startswith("mix         code 100.0%\nplan        4,096 tokens x 8 samples a step, seed 0: ")


def test_a_finite_pass_is_read_again_until_the_time_is_over(shell, mix, tmp_path):
    (tmp_path / "pass.toml").write_text('corpora = { code = "code" }\nseq_len = 20_000\nepochs = 1\n')
    exit_code, _, err = shell("pass.toml", *SHORT)
    assert (exit_code, err) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "error", "hint"),
    [
        (["nowhere.toml"], "nowhere.toml: No such file or directory", "give a mix such as mix.toml, or a corpus"),
        (["mix.toml", "--gpu-tokens", "0"], "invalid value for '--gpu-tokens': must be at least 1", "bench --help"),
        (["mix.toml", "--seq-len", "0"], "mix.toml: Expected `int` >= 1 - at `seq_len`", "seq_len = 4096"),
        (["mix.toml", "--gpu-token", "5"], "no option --gpu-token", "did you mean --gpu-tokens?"),
        (["wrong.toml"], "wrong.toml: no key sed", "did you mean seed?"),
    ],
)
def test_wrong_usage_is_refused_with_a_hint(shell, mix, tmp_path, arguments, error, hint):
    (tmp_path / "wrong.toml").write_text('corpora = { code = "code" }\nsed = 3\n')
    exit_code, out, err = shell(*arguments)
    assert (exit_code, out) == (2, "")
    assert error in err
    assert hint in err


def test_a_directory_that_is_not_a_corpus_is_refused(shell, tmp_path):
    exit_code, _, err = shell(str(tmp_path))
    assert exit_code == 2
    assert "error: " in err


def test_without_torch_the_hint_says_how_to_get_it(shell, mix, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    exit_code, out, err = shell(mix)
    assert (exit_code, out) == (2, "")
    assert err == "error: batches are tensors, and torch is not installed\nhint: pip install 'tokshard[torch]'\n"
