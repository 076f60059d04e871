"""HTML reports: one file, in which text of a corpus is only text.

What they say is in the session ``pages``; how they look and work is in test_browser.py.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.contract import small
from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tests.inspect.pages import EVIL, write_evil_corpus, write_metrics, write_mix
from tokshard.cli.main import run
from tokshard.inspect.page import plan as plan_page
from tokshard.inspect.page.page import embedded_json, plotly_source

ROOT = Path(__file__).parents[2]


@pytest.fixture
def page(tmp_path, monkeypatch, capsys):
    """Writes a page about something: its text, with a stand-in for the library."""
    small.without_the_library_of_pages(monkeypatch.setattr)

    def page(*arguments):
        assert run(["report", *map(str, arguments), "--out", str(tmp_path / "page.html")]) == 0, capsys.readouterr()
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return page


def sections(page):
    """The sections of a page by title."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return {section["title"]: section for section in json.loads(data)["sections"]}


def test_a_page_loads_nothing_and_nothing_in_a_document_can_become_markup_or_a_script(page, tmp_path):
    text = page(write_evil_corpus(tmp_path / "<b>corpus"))
    assert (text.count("<script"), text.count("</script")) == (3, 3)
    assert not {"<img", "<b>", "\0", "\u2028"} & {*re.findall("<img|<b>|\0|\u2028", text)}
    shown = [
        "".join(piece[0] for piece in item["parts"][0]["pieces"])
        for item in sections(text)["Documents, token by token"]["items"]
    ]
    assert shown == [f"{evil}<|endoftext|>" for evil in EVIL]
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)


def test_json_in_a_script_reads_as_what_was_put_in():
    value = {"text": "</script><!--\u2028\u2029&\0\ud800 \U0001f642"}
    assert json.loads(embedded_json(value)) == value
    assert embedded_json(value).isascii()


@pytest.mark.parametrize("weight", ["1e-3", "1e-18", "5e-324"])
def test_a_page_of_a_plan_with_a_corpus_that_is_hardly_read(page, tmp_path, weight):
    mix = write_mix(tmp_path)
    mix.write_text(mix.read_text().replace("b = 1.0", f"b = {weight}").partition("schedule")[0])
    shares = next(section for title, section in sections(page(mix)).items() if title.startswith("Mixture over time"))
    assert max(next(trace["y"] for trace in shares["traces"] if trace["name"] == "b")) <= 0.25


def test_a_page_of_a_plan_shows_no_sample_after_the_end_of_the_pass(page, tmp_path):
    write_corpus(tmp_path / "a", documents_of([100]), tokenizer=TINY_TOKENIZER)
    mix = tmp_path / "mix.toml"
    mix.write_text('corpora.a = "a"\nseq_len = 48\nglobal_batch_size = 1\nmax_epochs = 1\n')
    (items,) = (one["items"] for one in sections(page(mix)).values() if one["kind"] == "tokens")
    assert [item["title"] for item in items] == ["sample 0", "sample 1", "sample 2"]


def test_a_page_of_a_plan_has_pictures_of_the_first_eight_corpora_that_it_reads(page, tmp_path):
    lines = ["seq_len = 8", "global_batch_size = 1"]
    for number in range(10):
        write_corpus(tmp_path / f"c{number}", documents_of([3] * (90 + number)), tokenizer=TINY_TOKENIZER)
        lines += [f'corpora.c{number} = "c{number}"', f"weights.c{number} = {min(number, 1)}"]
    (tmp_path / "mix.toml").write_text("\n".join(lines))
    found = [title.partition(": position in the corpus") for title in sections(page(tmp_path / "mix.toml"))]
    assert [name for name, is_picture, _ in found if is_picture] == [f"c{number}" for number in range(1, 9)]


def test_the_picture_of_a_large_corpus_has_samples_of_a_few_windows_from_the_first_to_the_last(
    page, tmp_path, monkeypatch
):
    monkeypatch.setattr(plan_page, "_WINDOWS", 4)
    monkeypatch.setattr(plan_page, "_POINTS", 12)
    write_corpus(tmp_path / "a", documents_of([50] * 20), tokenizer=TINY_TOKENIZER)
    (tmp_path / "mix.toml").write_text(
        'corpora = { a = "a" }\nseq_len = 8\nglobal_batch_size = 1\nblock_tokens = 16\nwindow_blocks = 2\n'
        'pack = "cut"\nallow_small_blocks = true\n'
    )
    (chart,) = (
        one for title, one in sections(page(tmp_path / "mix.toml")).items() if "position in the corpus" in title
    )
    samples = [round(x * (1_000 // 8)) for x in chart["traces"][0]["x"]]
    # windows 0, 9, 19 and 29 of 31 have 4 samples each, of which the first, second and third are shown
    assert samples == [4 * window + place for window in (0, 9, 19, 29) for place in (0, 1, 2)]


@pytest.mark.parametrize("num_steps", [1_000, 1_001])
def test_steps_that_stand_out_are_listed_up_to_a_limit_and_a_note_counts_them(page, tmp_path, num_steps):
    lines = [json.dumps({"step": n, "skipped": "train.skip", "samples": [n, n + 1]}) for n in range(1, num_steps + 1)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = sections(page(tmp_path))[f"{num_steps:,} steps"]
    note = "Only the first 1,000 of 1,001 are listed."
    assert (len(found["rows"]), found["note"].endswith(note)) == (1_000, num_steps > 1_000)


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
def test_a_run_with_figures_at_the_limits_has_a_page(page, tmp_path, figures):
    lines = [json.dumps({"step": step, "grad_norm": 1.0, "lr": 1.0, **figures}) for step in range(1, 2_501)]
    lines += ['{"step": 2501, "skipped": "loss is nan"}', '{"step": 2502, "lo']  # it is being written
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    found = sections(page(tmp_path))
    assert found["Loss in training"]["traces"][0]["y"] == [pytest.approx(figures["loss"])] * 2_000
    known = dict(found["Training"]["rows"])
    assert (known["steps"], "nan" in known.get("speed", "")) == ("1 to 2,501", False)
    assert " in step 2,500, " in known["loss"]


def test_the_planned_mix_is_shown_for_all_steps_of_a_run_whose_corpora_changed(page, tmp_path):
    lines = [
        {"step": step, "corpora": {name: {"tokens": step, "weight": weight} for name, weight in weights.items()}}
        for step, weights in ((1, {"a": 3, "b": 1}), (2, {"a": 1, "c": 1}))
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {trace["name"]: trace["y"] for trace in sections(page(tmp_path))["Mix"]["traces"]}
    planned = {name: found.get(f"{name}, planned") for name in "abc"}
    assert planned == {"a": [0.75, 0.5], "b": [0.25, None], "c": [None, 0.5]}


def test_of_many_corpora_of_a_run_those_have_lines_that_were_read_most(page, tmp_path):
    names = [f"{number}" for number in range(50)]
    lines = [
        {"step": n, "corpora": {name: {"tokens": n * int(name)} for name in names}, "loss_by_corpus": {"9": 1, "10": 1}}
        for n in (1, 2)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = sections(page(tmp_path))
    assert [trace["name"] for trace in found["Mix"]["traces"]] == names[10:]
    assert [trace["name"] for trace in found["Loss in training"]["traces"]] == ["all", "10"]
    assert found["Mix"]["note"].endswith("Of 50 corpora the 40 that were read most.")


@pytest.mark.slow
def test_the_browser_of_the_user_opens_a_page_with_the_library_in_it(tmp_path):
    pytest.importorskip("plotly")
    assert "plotly.js v" in plotly_source()[:300]
    assert "</script" not in plotly_source().lower()
    path, out, seen = write_metrics(tmp_path / "run"), tmp_path / "a page.html", tmp_path / "seen"
    browser = tmp_path / "browser"
    browser.write_text(f'#!/bin/sh\necho "$1" > {shlex.quote(str(seen))}\n')
    browser.chmod(0o755)
    command = [sys.executable, "-m", "tokshard", "report", str(path), "--out", str(out), "--open"]
    env = {**os.environ, "BROWSER": f"{browser} %s"}
    subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True, timeout=240)
    assert seen.read_text().strip() == out.as_uri()
