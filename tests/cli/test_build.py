"""``tokshard build`` with recipes and ``--dry-run``, and ``tokshard status``."""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.pipeline.inputs import jsonl, patch_chunk_bytes, write_byte_tokenizer
from tokshard import open_corpus
from tokshard.cli.main import run
from tokshard.format import names
from tokshard.pipeline.workspace.lease import lock
from tokshard.pipeline.workspace.places import open_workspace
from tokshard.store import STORES_BY_SCHEME
from tokshard.store.addresses import BUCKETS

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture
def shell(tmp_path, monkeypatch, capsys):
    """Runs a command line in an empty directory with a tokenizer: exit code, stdout, stderr."""
    write_byte_tokenizer(tmp_path / ".tokenizer")
    monkeypatch.chdir(tmp_path)

    def shell(*arguments):
        exit_code = run(list(arguments))
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell


def write(name, texts):
    Path(name).write_bytes(jsonl([{"text": text, "n": number} for number, text in enumerate(texts)]))


RECIPE = """
[defaults]
tokenizer = ".tokenizer"
workers = 1
quiet = true
shard_tokens = "1K"

[corpora.one]
sources = "one.jsonl"
out = "shards/one"
keep_field = ["n:int64"]

[corpora.two]
sources = ["two.jsonl", "three.jsonl"]
out = "shards/two"
shard_tokens = 50
dedup = "exact"
"""


def test_a_recipe_builds_several_corpora_and_then_there_is_nothing_to_do(shell):
    for name in ("one", "two", "three"):
        write(f"{name}.jsonl", [name, "same"])
    Path("r.toml").write_text(RECIPE)
    exit_code, out, err = shell("build", "r.toml")
    assert (exit_code, err) == (0, "")
    assert [line for line in out.splitlines() if "corpora." in line] == ["r.toml: corpora.one", "r.toml: corpora.two"]
    with open_corpus("shards/one") as one, open_corpus("shards/two") as two:
        assert (one.manifest.build.shard_tokens, one.manifest.columns) == (1_000, {"n": "int64"})
        assert (two.manifest.build.shard_tokens, two.num_documents) == (50, 3)
    exit_code, out, _ = shell("build", "r.toml", "--json")
    assert [json.loads(line)["is_new"] for line in out.splitlines()] == [False, False]


def test_the_command_line_wins_over_a_recipe(shell):
    for name in ("one", "two", "three"):
        write(f"{name}.jsonl", [name, "same"])
    Path("r.toml").write_text(RECIPE)
    assert shell("build", "r.toml", "--max-documents", "1", "--shard-tokens", "70")[0] == 0
    for name in ("one", "two"):
        with open_corpus(f"shards/{name}") as corpus:
            assert (corpus.num_documents, corpus.manifest.build.shard_tokens) == (1, 70)


def test_a_chosen_corpus_of_a_recipe_is_written_elsewhere(shell):
    for name in ("one", "two", "three"):
        write(f"{name}.jsonl", [name, "same"])
    Path("r.toml").write_text(RECIPE)
    assert shell("build", "r.toml", "one", "--out", "elsewhere")[0] == 0
    with open_corpus("elsewhere") as corpus:
        assert corpus.num_documents == 2
    assert not Path("shards").exists()
    exit_code, _, err = shell("build", "r.toml", "--out", "elsewhere")
    assert (exit_code, "are written into the same directory" in err) == (2, True)


def test_a_corpus_that_fails_stops_a_recipe_and_the_finished_ones_stay(shell):
    write("one.jsonl", ["one"])
    write("three.jsonl", ["three"])
    Path("two.jsonl").write_text("{")
    Path("r.toml").write_text(RECIPE + '[corpora.last]\nsources = ["three.jsonl"]\nout = "shards/last"\n')
    exit_code, _, err = shell("build", "r.toml")
    assert exit_code == 1
    assert err.startswith("error: two.jsonl, line 1: malformed")
    assert Path("shards/one", names.MANIFEST).exists()
    assert not Path("shards/last").exists()
    write("two.jsonl", ["two"])
    exit_code, out, _ = shell("build", "r.toml", "--json")
    assert [json.loads(line)["is_new"] for line in out.splitlines()] == [False, True, True]


@pytest.mark.parametrize(
    ("change", "error", "hint"),
    [
        (("dedup =", "dedupe ="), "r.toml: corpora.two: no key 'dedupe'", "did you mean dedup?"),
        (("shard_tokens = 50", "shard-tokens = 50"), "no key 'shard-tokens'", "did you mean shard_tokens?"),
        (("[defaults]", "[default]"), "r.toml: no key 'default'", "did you mean defaults?"),
        (("workers = 1", "worker = 1"), "r.toml: defaults: no key 'worker'", "did you mean workers?"),
        (("workers = 1", "sources = 1"), "r.toml: defaults: no key 'sources'", None),
        (('"exact"', '"exakt"'), "r.toml: corpora.two: dedup: 'exakt' is not one of 'none', 'exact'", None),
        (('"1K"', '"1Q"'), "shard_tokens: '1Q' is not a whole number such as 4096", None),
        (('"1K"', "true"), "r.toml: corpora.one: shard_tokens is True, expected a string or a number", None),
        (("quiet = true", "quiet = 1"), "quiet is 1, expected true or false", None),
        (('["n:int64"]', '"n"'), "keep_field is 'n', expected a list", None),
        (('tokenizer = ".tokenizer"', ""), "r.toml: corpora.one has no tokenizer", None),
        (('"shards/two"', '"shards/one/two"'), "r.toml: corpora.two and corpora.one are written into the same", None),
        (('"one.jsonl"', "[]"), "r.toml: corpora.one: sources is [], expected a list of paths", None),
        (("[defaults]", "[defaults"), "r.toml is not valid TOML: ", None),
        (("workers = 1", f"workers = {'[' * 5000}"), "r.toml is not valid TOML: ", None),
        (("workers = 1", f"workers = {'1' * 5000}"), "r.toml is not valid TOML: ", None),
    ],
)
def test_a_wrong_recipe_is_refused_before_anything_is_built(shell, change, error, hint):
    for name in ("one", "two", "three"):
        write(f"{name}.jsonl", [name])
    Path("r.toml").write_text(RECIPE.replace(*change))
    exit_code, out, err = shell("build", "r.toml")
    assert (exit_code, out) == (2, ""), err
    problem, shown_hint = err.splitlines()
    assert error in problem
    assert hint is None or shown_hint == f"hint: {hint}"
    assert not Path("shards").exists()


def test_a_recipe_without_corpora_or_that_is_not_there_is_refused(shell):
    Path("r.toml").write_text("[defaults]\n")
    assert shell("build", "r.toml")[2].startswith("error: r.toml asks for no corpus\nhint: add [corpora.NAME]")
    assert shell("build", "none.toml")[2].startswith("error: none.toml: No such file")


@pytest.mark.parametrize("missing", ["tokenizer", "out"])
def test_without_a_recipe_tokenizer_and_directory_are_required(shell, missing):
    write("one.jsonl", ["one"])
    options = {"tokenizer": ".tokenizer", "out": "out"}
    del options[missing]
    exit_code, _, err = shell(
        "build", "one.jsonl", *(word for key, value in options.items() for word in (f"--{key}", value))
    )
    assert (exit_code, err) == (2, f"error: missing option '--{missing}'\nhint: give --{missing}\n")


def test_the_recipe_of_the_repository_is_one(shell):
    Path("recipes").mkdir()
    shutil.copy(RECIPES / "corpora.toml", "recipes")
    shutil.copytree(".tokenizer", "recipes/tokenizer")
    assert shell("build", "recipes/corpora.toml", "--dry-run")[2].startswith("error: notes.jsonl does not exist")
    write("notes.jsonl", ["one", "two", "one"])
    write("note.txt", ["three"])
    exit_code, out, err = shell("build", "recipes/corpora.toml", "--json", "--quiet")
    assert (exit_code, err) == (0, "")
    assert [json.loads(line)["corpora"][0]["manifest"]["num_documents"] for line in out.splitlines()] == [2, 1]


def test_paths_in_a_recipe_are_relative_to_the_recipe_and_options_to_the_working_directory(shell, monkeypatch):
    folder = Path("my [1] recipes")
    (folder / "raw").mkdir(parents=True)
    Path("here").mkdir()
    shutil.copytree(".tokenizer", folder / "tokenizers" / "tiny")
    write("one.jsonl", ["one", "two"])
    for name in ("a.txt", "b.txt"):
        (folder / "raw" / name).write_text(name)
    (folder / "r.toml").write_text(
        '[defaults]\ntokenizer = "tokenizers/tiny"\nworkers = 1\n[corpora.one]\nsources = "../one.jsonl"\n'
        'out = "../one"\n[corpora.two]\nsources = ["raw/*.txt"]\nout = "shards/two"\n'
    )
    monkeypatch.chdir("here")
    recipe = f"../{folder}/r.toml"
    assert shell("build", recipe, "--quiet")[0] == 0
    with open_corpus("../one") as one, open_corpus(f"../{folder}/shards/two") as two:
        assert (one.num_documents, [two.text(number) for number in range(2)]) == (2, ["a.txt", "b.txt"])
    monkeypatch.chdir("..")
    assert shell("build", recipe[3:], "--quiet")[1].count("nothing to do") == 2, "the same build, from elsewhere"
    shutil.move(folder / "tokenizers", "tokenizers")
    assert shell("build", recipe[3:], "--quiet", "--tokenizer", "tokenizers/tiny")[1].count("nothing to do") == 2
    exit_code, _, err = shell("build", recipe[3:], "--quiet")
    assert (exit_code, err.splitlines()) == (
        2,
        [
            f"error: {recipe[3:]}: corpora.one: there is no {folder}/tokenizers/tiny",
            "hint: paths in a recipe are relative to the recipe, and tokenizers/tiny is in the working directory",
        ],
    )


# dry runs


def test_a_dry_run_estimates_and_writes_nothing(shell):
    texts = [f"text {number}" * (1 + number % 7) for number in range(500)]
    write("a.jsonl", texts)
    Path("b.jsonl.gz").write_bytes(gzip.compress(Path("a.jsonl").read_bytes()))
    options = ["a.jsonl", "b.jsonl.gz", "--tokenizer", ".tokenizer", "--out", "new/out", "--workers", "1", "--quiet"]
    exit_code, out, err = shell("build", *options, "--dry-run", "--json")
    assert (exit_code, err) == (0, "")
    assert not Path("new").exists()
    estimate = json.loads(out)
    _, out, _ = shell("build", *options, "--json")
    manifest = json.loads(out)["corpora"][0]["manifest"]
    # all of it is in the sample, so that nothing is left to estimate
    assert estimate["documents"] == estimate["sampled_documents"] == manifest["num_documents"]
    assert estimate["tokens"] == manifest["num_tokens"]
    assert manifest["num_tokens"] * 2 <= estimate["disk_bytes"] < manifest["num_bytes"] * 1.1
    assert estimate["free_bytes"] > 0
    assert estimate["seconds"] > 0
    exit_code, out, _ = shell(
        "build", *options[:2], *options[2:4], "--out", "other", "--dry-run", "--max-documents", "10"
    )
    assert exit_code == 0
    assert "documents   about 10, by --max-documents\n" in out
    assert out.endswith("nothing was written to other\n")
    assert not Path("other").exists()


def test_a_dry_run_counts_kept_columns(shell):
    Path("a.jsonl").write_bytes(jsonl([{"text": "text", "page": "<p>" * 1_000, "n": 1}] * 50))
    options = ["a.jsonl", "--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--quiet", "--json"]
    options += ["--keep-field", "page", "--keep-field", "n:int64"]
    estimate, built = (json.loads(shell("build", *options, *more)[1]) for more in (["--dry-run"], []))
    assert 0.9 <= estimate["disk_bytes"] / built["corpora"][0]["manifest"]["num_bytes"] <= 1.1


def test_a_dry_run_of_a_build_that_cannot_fit_on_the_disk_exits_1(shell, monkeypatch):
    write("a.jsonl", ["text"])
    options = ["--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--dry-run"]
    assert shell("build", "a.jsonl", *options)[0] == 0
    monkeypatch.setattr("tokshard.pipeline.estimate.shutil.disk_usage", lambda _: SimpleNamespace(free=1))
    exit_code, out, _ = shell("build", "a.jsonl", *options)
    assert exit_code == 1
    assert out.startswith("refused     the disk is too small for this build\n")
    assert re.search(r"^disk {8}about [\d.]+ B needed, 1 B free$", out, re.MULTILINE)
    exit_code, out, _ = shell("build", "a.jsonl", *options, "--json")
    assert (exit_code, json.loads(out)["fits"]) == (1, False)
    Path("r.toml").write_text(
        '[defaults]\ntokenizer = ".tokenizer"\nworkers = 1\n'
        + "".join(f'[corpora.{name}]\nsources = "a.jsonl"\nout = "{name}"\n' for name in "ab")
    )
    exit_code, out, _ = shell("build", "r.toml", "--dry-run")
    assert (exit_code, out.count("the disk is too small")) == (1, 2)


# the summary


def summary(out):
    return {line[:12].strip(): line[12:] for line in out.splitlines()}


def test_the_summary_says_what_is_unusual_and_writes_numbers_one_way(shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    monkeypatch.setenv("COLUMNS", "200")
    tokenizer = json.loads(Path(".tokenizer/tokenizer.json").read_bytes())
    tokenizer["normalizer"] = {"type": "NFKC"}
    Path(".tokenizer/tokenizer.json").write_text(json.dumps(tokenizer))
    write("a.jsonl", ["text"] * 19 + ["a <|endoftext|>"])
    options = ["--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--quiet"]
    exit_code, out, err = shell("build", "a.jsonl", *options, "--task-bytes", "64")
    assert (exit_code, err) == (0, "")
    lines = summary(out)
    assert lines["normalizer"] == "NFKC: text is changed before it is encoded"
    assert "shards" not in lines  # there are few
    assert lines["specials"].startswith("1 document spells a special token")
    assert re.fullmatch(r"\S+ s with 1 process, \S+ CPU-seconds", lines["time"])
    monkeypatch.setattr("tokshard.cli.build_text._MANY_SHARDS", 2)
    lines = summary(shell("build", "a.jsonl", *options, "--task-bytes", "64")[1])
    assert lines["shards"] == "14 tokens each, because a shard ends with its task, of 64 B here: see --task-bytes"
    lines = summary(shell("build", "a.jsonl", *options, "--force")[1])
    assert "shards" not in lines  # one is as large as it can be
    assert lines["on disk"].endswith(" in 1 shard")


def test_the_summary_of_a_build_has_ten_lines_on_a_terminal_of_80_columns(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    write("a.jsonl", ["", "text", "text", *(f"text {number}" for number in range(20))])
    options = ["--tokenizer", ".tokenizer", "--workers", "1", "--quiet", "--dedup", "exact"]
    for split in ([], ["--validation-fraction", "0.25"]):
        _, out, _ = shell("build", "a.jsonl", *options, *split, "--out", f"out{len(split)}")
        assert len(out.splitlines()) <= 10
        assert "settings" not in out
    _, out, _ = shell("build", "a.jsonl", *options, "--out", "out0", "-v")
    assert {"sources", "settings", "content", "recipe"} <= summary(out).keys()


def test_the_summary_of_a_split_shows_both_parts_in_one_table(shell, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    write("a.jsonl", ["", *(f"text {number}" for number in range(19)), "a <|endoftext|>"])
    options = ["--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--quiet"]
    _, out, _ = shell("build", "a.jsonl", *options, "--validation-fraction", "0.25")
    parts = [open_corpus(f"out/{split}") for split in ("train", "validation")]
    lines = out.splitlines()
    assert lines[0].split() == ["train", "validation"]
    assert lines[1].split() == ["documents", *(f"{part.num_documents:,}" for part in parts)]
    assert lines[2].split() == ["tokens", *(f"{part.num_tokens:,}" for part in parts)]
    train, validation = (part.num_documents for part in parts)
    assert summary(out)["records"] == (
        f"21 read = {train} for train + {validation} for validation + 1 left out (1 empty)"
    )
    assert summary(out)["specials"].startswith("1 document spells")


def test_side_by_side_a_document_of_the_other_part_is_not_left_out(shell):
    write("a.jsonl", ["", *(f"text {number}" for number in range(20))])
    options = ["--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--quiet"]
    shell("build", "a.jsonl", *options, "--validation-fraction", "0.25")
    _, out, _ = shell("inspect", "out", "--sample", "0")
    (line,) = (line for line in out.splitlines() if line.startswith("records left out"))
    assert line.split()[3:] == ["1", "1"]


# names that steer a terminal

ESCAPE = "\x1b]0;x\x07\u202e"


def test_no_name_reaches_the_terminal_unescaped(shell):
    write(f"{ESCAPE}.jsonl", ["a"])
    Path(f"{ESCAPE}.tar").write_bytes(b"x")
    Path(f"{ESCAPE}bad.jsonl").write_text("{")
    options = ["--tokenizer", ".tokenizer", "--workers", "1", "--on-bad-source", "skip"]
    for arguments in (
        ["build", f"{ESCAPE}.jsonl", f"{ESCAPE}.tar", *options, "--out", f"{ESCAPE}out", "-v"],
        ["build", f"{ESCAPE}.jsonl", *options, "--out", "new" + ESCAPE, "--dry-run"],
        ["build", f"{ESCAPE}.jsonl", f"{ESCAPE}bad.jsonl", *options, "--out", "unfinished" + ESCAPE],
        ["status", "unfinished" + ESCAPE],
        ["status", f"{ESCAPE}out"],
    ):
        _, out, err = shell(*arguments)
        assert "\\x1b]0;x\\x07\\u202e" in out + err, arguments
        assert not set(ESCAPE[0] + ESCAPE[-1] + "\x07") & set(out + err), arguments


# verbosity


def test_verbose_shows_a_line_for_each_task(shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("a.jsonl", ["some text that is long", "more text that is long", "text"])
    options = ["--tokenizer", ".tokenizer", "--out", "out", "--workers", "1", "--task-bytes", "64", "-v", "--quiet"]
    exit_code, _, err = shell("build", "a.jsonl", *options)
    assert exit_code == 0
    assert err.splitlines() == [
        "a.jsonl: 64 B, 2 documents of 2 records, 46 tokens",
        "a.jsonl, segment 1: 47 B, 1 document of 1 record, 5 tokens",
    ]


# status


def test_the_status_of_an_unfinished_build_says_how_far_it_is_and_how_to_continue(shell, monkeypatch):
    patch_chunk_bytes(monkeypatch, 64)
    write("a.jsonl", ["text"] * 20)
    Path("b c.jsonl").write_bytes(b'{"text": 7}\n{"text": ""}\n' * 30 + b"{")
    Path("d.jsonl").write_bytes(b"{")
    build = ["a.jsonl", "b c.jsonl", "d.jsonl", "--tokenizer", ".tokenizer", "--out", "out", "--task-bytes", "64"]
    skip = ["--on-bad-record", "skip", "--max-bad-records", "30", "--workers", "1"]
    assert shell("build", *build, *skip, "--quiet")[0] == 1
    exit_code, out, err = shell("status", "out")
    assert (exit_code, err) == (0, "")
    lines = {line[:12].strip(): line[12:] for line in out.splitlines()}
    assert lines["state"] == "unfinished, writing"
    assert lines["written"] == "20 documents, 100 tokens"
    assert lines["left out"] == "30 empty, 1 malformed, 30 text is not a string"
    assert "--task-bytes 64" in lines["continue"]
    command = shlex.split(lines["continue"])
    assert command[:5] == ["cd", str(Path.cwd()), "&&", "tokshard", "build"]
    status = json.loads(shell("status", "out", "--json")[1])
    assert (status["state"], status["documents"], status["bad_records"]) == ("unfinished", 20, 31)
    assert 0 < status["tasks_done"] < status["num_tasks"]
    with lock(open_workspace(Path("out"))):
        assert json.loads(shell("status", "out", "--json")[1])["state"] == "running"
        state, holder = shell("status", "out")[1].splitlines()[1:3]
        assert state == "state       running, writing"
        assert holder.strip().startswith(f"process {os.getpid()} on ")
    words = [word if word != "30" else "40" for word in command[4:]]
    assert shell(*words, "--quiet")[0] == 0
    exit_code, out, _ = shell("status", "out")
    assert (exit_code, out.splitlines()[1]) == (0, "state       complete: 20 documents, 100 tokens")


def test_status_of_a_directory_without_a_build_is_refused(shell):
    exit_code, _, err = shell("status", "nowhere")
    assert exit_code == 2
    assert err.startswith("error: nowhere holds neither a build nor a corpus\nhint: give the directory of")


@pytest.mark.parametrize(
    ("start", "end", "schemes"),
    [
        ("A SOURCE is", "Documents keep", STORES_BY_SCHEME.keys() - {"http"}),
        ("--out DIR", "--append", BUCKETS.keys()),
    ],
)
def test_help_names_the_uris_that_it_takes(shell, start, end, schemes):
    shown = shell("build", "--help")[1].partition(start)[2].partition(end)[0]
    assert {word.partition("://")[0] for word in re.findall(r"\w+://", shown)} - {"hf"} == schemes


@pytest.mark.parametrize("dedup", ["none", "exact"])
def test_the_status_of_an_array_whose_tasks_are_done_names_the_commit(shell, monkeypatch, dedup):
    monkeypatch.setenv("COLUMNS", "300")
    write("a.jsonl", ["text", "text"])
    build = ["build", "a.jsonl", "--tokenizer", ".tokenizer", "--out", "out", "--dedup", dedup, "--quiet"]
    assert shell(*build, "--num-jobs", "3", "--job-index", "1")[0] == 0
    *_, then = (line[12:] for line in shell("status", "out")[1].splitlines())
    assert then == "tokshard commit out"
    assert "all tasks are done" in shell("status", "out")[1]
    assert json.loads(shell("status", "out", "--json")[1])["command"] == ["tokshard", "commit", "out"]
    assert shell(*shlex.split(then)[1:])[0] == 0
    with open_corpus("out") as corpus:
        assert corpus.num_documents == (2 if dedup == "none" else 1)
