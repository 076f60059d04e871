"""The HTML report: one file, in which text of a corpus is only text. How it looks and works is in test_browser.py."""

import json
import re
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.corpora import TOKENIZER, Source, change_table, write_corpus
from tests.inspect.pages import EVIL, write_evil_corpus, write_mix
from tokshard.cli.main import run
from tokshard.errors import UsageError
from tokshard.inspect.page.page import embedded_json, plotly_source, render_page


@pytest.fixture
def page(tmp_path, monkeypatch, capsys):
    """Writes a page about something: its text, with a stand-in for the library."""
    monkeypatch.setattr("tokshard.inspect.page.page.plotly_source", lambda: "/* the library */")

    def page(*arguments):
        assert run(["report", *map(str, arguments), "--out", str(tmp_path / "page.html")]) == 0, capsys.readouterr()
        return (tmp_path / "page.html").read_text(encoding="utf-8")

    return page


def sections(page):
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    return json.loads(data)["sections"]


def test_nothing_in_a_document_can_end_a_script_or_become_markup(page, tmp_path):
    text = page(write_evil_corpus(tmp_path / "<b>corpus"))
    assert text.count("<script") == 3
    assert text.count("</script") == 3
    assert "<img" not in text
    assert "<b>" not in text
    assert "\0" not in text
    assert "\u2028" not in text
    (tokens,) = [section for section in sections(text) if section["kind"] == "tokens"]
    shown = ["".join(piece[0] for piece in item["parts"][0]["pieces"]) for item in tokens["items"]]
    assert shown == [f"{evil}<|endoftext|>" for evil in EVIL]


def test_a_document_on_a_page_has_its_kept_columns_and_says_how_much_is_shown_if_not_all_is(page, tmp_path):
    """The first is long. The second is shown whole, although it has more lines than an excerpt on a terminal."""
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    documents = [[*tokenizer.encode(text).ids, 0] for text in ("word " * 2000, "a\n" * 40)]
    source = Source(documents=documents, metadata={"id": ["x", "y"], "lang": [None, "en"]})
    columns = {"id": "string", "lang": "string"}
    text = page(write_corpus(tmp_path / "corpus", sources=[source], columns=columns))
    (tokens,) = [section for section in sections(text) if section["kind"] == "tokens"]
    titles = [item["title"] for item in tokens["items"]]
    assert re.fullmatch(
        r"document 0: 2,\d\d\d tokens, the first \d+ shown, record 1 of source-0.jsonl, id x", titles[0]
    )
    count = len(documents[1])
    assert titles[1] == f"document 1: {count} tokens, record 2 of source-0.jsonl, id y, lang en"


def test_json_in_a_script_reads_as_what_was_put_in():
    value = {"text": "</script><!--\u2028\u2029&\0\ud800 \U0001f642"}
    assert json.loads(embedded_json(value)) == value
    assert embedded_json(value).isascii()


def test_a_page_loads_nothing_and_runs_only_its_own_scripts(page, tmp_path):
    text = page(write_evil_corpus(tmp_path / "corpus"))
    (policy,) = re.findall('http-equiv="Content-Security-Policy" content="(.*?)"', text)
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.partition("style-src")[0]
    assert not re.findall(r"(?:src|href)=\"(?!data:)", text)


def test_a_page_of_a_corpus_has_totals_lengths_tokens_samples_and_every_shard(page, tmp_path):
    corpus = write_evil_corpus(tmp_path / "corpus")
    found = sections(page(corpus))
    assert [section["kind"] for section in found] == [
        "heading", "facts", "chart", "chart", "table", "tokens", "table",
    ]  # fmt: skip
    assert len(found[-1]["rows"]) == len(list(corpus.glob("shard-*")))
    documents, tokens = found[2]["traces"]
    known = dict(found[1]["rows"])
    assert known["documents"].startswith("3, of ")
    assert "at most, in tokens: 1 % " in known["lengths"]
    assert " ids in use (" in known["vocabulary"]
    assert sum(documents["y"][:-1]) == pytest.approx(1)
    assert sum(tokens["y"][:-1]) == pytest.approx(1)


def test_a_page_of_a_plan_has_its_mixture_epochs_shuffle_and_samples(page, tmp_path):
    found = sections(page(write_mix(tmp_path)))
    charts = [section for section in found if section["kind"] == "chart"]
    assert [chart["title"].split(":")[0] for chart in charts] == ["Mixture over time", "Epochs per corpus", "a", "b"]
    shares = {trace["name"]: trace["y"] for trace in charts[0]["traces"]}
    assert sum(shares["a"][:50]) / 50 == pytest.approx(0.75, abs=0.05)
    assert sum(shares["a"][-50:]) / 50 == pytest.approx(0.25, abs=0.05)
    epochs = {trace["name"]: trace["y"] for trace in charts[1]["traces"]}
    assert epochs["a"][-1] > epochs["a"][0] == 0
    places = charts[2]["traces"][0]["y"]
    assert len(set(places)) == len(places) > 50
    assert places != sorted(places)
    assert found[-1]["items"][0]["parts"][0]["title"].startswith("document ")


@pytest.mark.parametrize("tokens", [[], ["--tokens", "100_000"]])
def test_a_page_of_a_plan_shows_the_steps_that_tokshard_plan_counts(page, tmp_path, capsys, tokens):
    mix = write_mix(tmp_path)
    found = sections(page(mix, *tokens))
    capsys.readouterr()
    assert run(["plan", str(mix), *tokens, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for chart in found[2:4]:
        assert [max(trace["x"]) for trace in chart["traces"]] == [report["num_steps"]] * 2
    assert {trace["name"]: trace["y"][-1] for trace in found[3]["traces"]} == {
        corpus["name"]: pytest.approx(corpus["epochs"]) for corpus in report["corpora"]
    }
    assert dict(found[1]["rows"])["steps"].startswith(f"{report['num_steps']:,}, {report['num_tokens']:,} tokens")


@pytest.mark.parametrize("weight", ["1e-3", "1e-18", "5e-324"])
def test_a_page_of_a_plan_with_a_corpus_that_is_hardly_read(page, tmp_path, weight):
    mix = write_mix(tmp_path)
    mix.write_text(mix.read_text().replace("b = 1.0", f"b = {weight}").partition("schedule")[0])
    shares = {trace["name"]: trace["y"] for trace in sections(page(mix))[2]["traces"]}
    assert max(shares["b"]) <= 0.25


def test_a_page_of_more_samples_than_have_a_number_is_refused(tmp_path, capsys, page):
    mix = write_mix(tmp_path)
    mix.write_text(f'corpora = {{ a = "{tmp_path / "a"}" }}\nseq_len = 1\nglobal_batch_size = 1\n')
    assert run(["report", str(mix), "--out", str(tmp_path / "x"), "--tokens", str((1 << 62) + 1)]) == 2
    assert "is beyond 2**62" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_tokens_are_for_the_page_of_a_plan(tmp_path, capsys, page):
    corpus = write_evil_corpus(tmp_path / "corpus")
    assert run(["report", str(corpus), "--out", str(tmp_path / "x"), "--tokens", "5"]) == 2
    assert "--tokens is for the page of a plan" in capsys.readouterr().err


def test_a_document_of_an_unknown_source_is_shown_as_such(page, tmp_path):
    corpus = write_evil_corpus(tmp_path / "corpus")

    def change(rows):
        rows["run_source"][0] = [-1]
        return rows

    change_table(corpus, "shards.arrow", change)
    (tokens,) = [section for section in sections(page(corpus)) if section["kind"] == "tokens"]
    assert tokens["items"][0]["title"].endswith(", record 1 of unknown")


def test_a_page_of_several_corpora_starts_with_them_side_by_side(page, tmp_path):
    write_mix(tmp_path)
    found = sections(page(tmp_path / "a", tmp_path / "b"))
    assert [section["title"] for section in found[:3]] == ["Side by side", "Corpora", "Document lengths"]
    assert [row[:2] for row in found[1]["rows"]] == [["a", "200"], ["b", "100"]]
    assert [trace["name"] for trace in found[2]["traces"]] == ["a", "b"]


def test_a_page_of_a_plan_ends_where_a_corpus_is_used_up(page, tmp_path):
    mix = write_mix(tmp_path)
    mix.write_text("max_epochs = { a = 0.5 }\n" + mix.read_text())
    found = sections(page(mix))
    assert "a is used up" in [row[0] for row in found[1]["rows"]]
    epochs = next(section for section in found if section.get("title") == "Epochs per corpus")["traces"][0]["y"]
    assert epochs[-1] == pytest.approx(0.5, abs=0.01)


def test_corpora_and_a_mix_have_no_common_page(tmp_path, capsys):
    mix = write_mix(tmp_path)
    assert run(["report", str(mix), str(tmp_path / "a"), "--out", str(tmp_path / "x.html")]) == 2
    assert "a page shows corpora, or one mix, or one run" in capsys.readouterr().err


def test_a_missing_library_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(UsageError, match="needs plotly") as caught:
        render_page(title="", subtitle="", sections=[])
    assert caught.value.hint == "pip install 'tokshard[report]'"


def test_the_library_comes_from_its_package():
    pytest.importorskip("plotly")
    assert "plotly.js v" in plotly_source()[:300]
    assert "</script" not in plotly_source().lower()


def test_a_page_that_cannot_be_written_says_so(page, tmp_path, capsys):
    corpus = write_evil_corpus(tmp_path / "corpus")
    assert run(["report", str(corpus), "--out", str(Path(tmp_path) / "no" / "page.html")]) == 2
    assert "cannot be written" in capsys.readouterr().err
