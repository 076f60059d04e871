"""The page of a training run. How it looks is in test_browser.py."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.inspect.pages import write_metrics, write_mix
from tests.trainer.runs import SMALL, configuration, corpora
from tokshard.cli.main import run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def sections(tmp_path, monkeypatch, capsys):
    """Writes the page of a run: its sections by title."""
    monkeypatch.setattr("tokshard.inspect.page.page.plotly_source", lambda: "/* the library */")

    def sections(target):
        assert run(["report", str(target), "--out", str(tmp_path / "page.html")]) == 0, capsys.readouterr()
        page = (tmp_path / "page.html").read_text(encoding="utf-8")
        (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
        assert "<img" not in page
        return {section["title"]: section for section in json.loads(data)["sections"]}

    return sections


def test_a_page_of_a_run_has_its_losses_mix_speed_waits_and_evaluations(sections, tmp_path):
    found = sections(write_metrics(tmp_path / "run"))
    known = dict(found["Training"]["rows"])
    assert known["steps"] == "1 to 200"
    assert known["tokens"] == f"{199 * 256:,}"
    assert known["speed"] == "1,000 tokens/s in the median step; 25.0% of the time waited for data"
    assert known["evaluation"] == "after step 200: held out 3.1400"
    every, first, second, peak = found["Loss in training"]["traces"]
    assert (every["x"], every["y"][0], every["y"][119]) == (list(range(1, 201)), pytest.approx(5.0), None)
    assert (first["name"], first["y"]) == ("a", every["y"])
    assert second["y"][:2] == [None, pytest.approx(5.0)]
    assert (peak["x"], peak["y"]) == ([150], [9.0])
    assert [trace["y"][-1] for trace in found["Mix"]["traces"]] == [0.75, 0.25]
    assert found["Mix"]["traces"][0]["y"][119] is None  # a step that read nothing
    assert set(found["Tokens per second"]["traces"][0]["y"]) == {1_000.0, None}
    assert set(found["Wait for data"]["traces"][0]["y"]) == {0.064, None}
    (evaluated,) = found["Evaluations"]["traces"]
    assert (evaluated["name"], evaluated["x"]) == ("held out", [50, 100, 150, 200])


def test_steps_that_stand_out_are_listed_with_the_command_that_traces_them(sections, tmp_path):
    write_metrics(tmp_path / "run")
    rows = sections(tmp_path / "run")["2 steps"]["rows"]
    assert rows == [
        [120, "skipped: train.skip", "", "", "tokshard trace RECIPE.toml --sample 476:480"],
        [150, "loss", "9.0000", "1.0000", "tokshard trace RECIPE.toml --step 150"],
    ]


def test_a_long_run_is_drawn_with_few_points_and_a_peak_stays_where_it_was(sections, tmp_path):
    path = write_metrics(tmp_path / "run", num_steps=20_000, spike=12_345, skipped=0)
    found = sections(path)
    for title in ("Loss in training", "Mix", "Wait for data"):
        assert len(found[title]["traces"][0]["x"]) == 2_000
        assert "about 10 steps" in found[title]["note"]
    assert 12_345 in found["Loss in training"]["traces"][-1]["x"]
    assert [trace["y"][1_000] for trace in found["Mix"]["traces"]] == [0.75, 0.25]


def test_a_run_whose_losses_were_never_finite_has_a_page(sections, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1, "skipped": "loss is nan", "loss": None, "samples": [0, 4]}) + "\n")
    found = sections(tmp_path)
    assert "loss" not in dict(found["Training"]["rows"])
    assert found["1 step"]["rows"][0][-1] == "tokshard trace RECIPE.toml --step 1"


@pytest.mark.parametrize(
    "figures",
    [
        {"loss": 1.7e308, "grad_norm": 1.7e308},
        {"loss": 1.0, "tokens": 256, "tokens_per_second": 0, "loader_wait_seconds": 0.1},
        {"loss": 1.0, "tokens": 1.7e308, "tokens_per_second": 1e-300, "loader_wait_seconds": 1.7e308},
        {"loss": 1.0, "lr": 1.7e308, "loss_by_corpus": {"a": -1.7e308}, "corpora": {"a": {"tokens": 1.7e308}}},
    ],
    ids=["losses whose sum is infinite", "no speed", "tokens whose sum is infinite", "others whose sum is infinite"],
)
def test_a_run_with_figures_at_the_limits_has_a_page(sections, tmp_path, figures):
    lines = [{"step": step, "grad_norm": 1.0, "lr": 1.0, **figures} for step in range(1, 2_501)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = sections(tmp_path)
    assert found["Loss in training"]["traces"][0]["y"] == [pytest.approx(figures["loss"])] * 2_000
    assert "nan" not in dict(found["Training"]["rows"]).get("speed", "")


@pytest.mark.parametrize("make", [lambda path: path.write_text("no folder"), lambda path: path.symlink_to(path)])
def test_checkpoints_that_are_no_folder_are_named(tmp_path, capsys, make):
    path = write_metrics(tmp_path / "run")
    make(path.parent / "checkpoints")
    assert run(["report", str(path.parent), "--out", str(tmp_path / "page.html")]) == 1
    assert f"{path.parent}/checkpoints cannot be listed: " in capsys.readouterr().err


def test_the_line_that_a_run_writes_at_this_moment_is_left_out(sections, tmp_path):
    path = write_metrics(tmp_path / "run")
    path.write_text(path.read_text() + '{"step": 201, "lo')
    assert dict(sections(path)["Training"]["rows"])["steps"] == "1 to 200"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "has no step yet"),
        ('{"text": "a"}\n', "line 1 is not one of a training run"),
        ("]\n", "line 1 is not one"),
        ('{"step": 9223372036854775808}\n', "line 1 is not one of a training run"),
        ('{"step": -1}\n', "line 1 is not one of a training run"),
    ],
)
def test_a_file_that_is_not_of_a_run_is_refused(tmp_path, capsys, content, problem):
    (tmp_path / "metrics.jsonl").write_text(content)
    assert run(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_a_run_and_a_mix_have_no_common_page(tmp_path, capsys):
    path, mix = write_metrics(tmp_path / "run"), write_mix(tmp_path)
    assert run(["report", str(path), str(mix), "--out", str(tmp_path / "page.html")]) == 2
    assert "a page shows corpora, or one mix, or one run" in capsys.readouterr().err
    assert run(["report", str(path), "--tokens", "5", "--out", str(tmp_path / "page.html")]) == 2
    assert "--tokens is for the page of a plan" in capsys.readouterr().err


def test_a_page_can_lie_in_the_directory_of_its_run_but_not_replace_its_metrics(tmp_path, capsys, sections):
    path = write_metrics(tmp_path / "run")
    assert run(["report", str(tmp_path / "run"), "--out", str(tmp_path / "run" / "page.html")]) == 0
    before = path.read_bytes()
    assert run(["report", str(tmp_path / "run"), "--out", str(path)]) == 2
    assert "which this command reads" in capsys.readouterr().err
    assert path.read_bytes() == before


@pytest.mark.slow
def test_the_browser_of_the_user_opens_the_page(tmp_path):
    pytest.importorskip("plotly")
    path, page, seen = write_metrics(tmp_path / "run"), tmp_path / "a page.html", tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {shlex.quote(str(seen))}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "tokshard", "report", str(path), "--out", str(page), "--open"]
    env = {**os.environ, "BROWSER": f"{browser} %s"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=60)
    assert seen.read_text().strip() == page.as_uri()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")  # DCP of torch 2.13 itself warns
def test_the_command_for_a_step_of_a_real_run_shows_the_samples_that_it_read(sections, tmp_path, capsys):
    """Of a run whose steps are skipped: one left out, and all whose losses are not finite."""
    from tokshard.run_files.recipe import resolve
    from tokshard.trainer.loop import train

    changes = {"train__steps": 4, "checkpoint__every": 2, "train__skip": [[2, 3]], "optimizer__warmup_steps": 0}
    fields = configuration(corpora(tmp_path / "corpora"), tmp_path / "out", **changes) | {"model": SMALL}
    fields["optimizer"] |= {"lr": 1e30}
    fields["train"] |= {"on_non_finite": "skip"}
    assert train(resolve(fields)) == 0
    read = {line["step"]: line["samples"] for line in map(json.loads, (tmp_path / "out" / "metrics.jsonl").open())}
    rows = next(found for title, found in sections(tmp_path / "out").items() if re.match(r"\d+ steps?$", title))["rows"]
    assert len(rows) >= 2
    for step, _, _, _, command in rows:
        capsys.readouterr()
        assert f"step-{2 if step <= 2 else 4:08d}" in command
        assert run([*shlex.split(command)[1:], "--json"]) == 0
        samples = {json.loads(line)["sample"] for line in capsys.readouterr().out.splitlines()}
        assert sorted(samples) == list(range(*read[step]))
        assert not math.isnan(step)
