"""A plan from TOML: the same as in Python, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.errors import UsageError
from tokshard.run_files.plan_file import load_mix
from tokshard.run_files.strict_toml import path_beside
from tokshard.runtime.plan import StreamPlan

ROOT = Path(__file__).parents[2]


@pytest.fixture
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Two corpora, named by paths relative to the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, lengths in (("code", [3, 4, 600]), ("prose", [20, 7] * 9)):
        write_corpus(tmp_path / "shards" / name, documents_of(lengths), tokenizer=TINY_TOKENIZER)
    return {"code": "shards/code", "prose": "shards/prose"}


def test_a_run_in_a_bucket_has_to_be_copied_first() -> None:
    with pytest.raises(UsageError, match=r"s3://bucket/run: no seq_len") as caught:
        load_mix("s3://bucket/run")
    assert caught.value.hint.endswith("; runs and checkpoints have to be on this machine")


def written(text: str) -> str:
    Path("mix.toml").write_text(text, encoding="utf-8")
    return "mix.toml"


SMALL = 'corpora = { code = "shards/code", prose = "shards/prose" }\nseq_len = 8\nglobal_batch_size = 4\n'


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("block_tokens = 40\ntake = 0.5", {"block_tokens": 40, "take": 0.5}),
        (
            "block_tokens = 40\ntake = { code = 0.5 }\nmax_epochs = 4",
            {"block_tokens": 40, "take": {"code": 0.5}, "max_epochs": 4.0},
        ),
        (
            "weights = { code = 0.7, prose = 0.3 }\nseed = 17\nwindow_blocks = 3\nstart_epoch = { prose = 2 }",
            {"weights": {"code": 0.7, "prose": 0.3}, "seed": 17, "window_blocks": 3, "start_epoch": {"prose": 2}},
        ),
        ("schedule = [[100, { code = 1, prose = 0 }]]", {"schedule": [(100, {"code": 1, "prose": 0})]}),
    ],
)
def test_a_file_gives_the_plan_that_the_same_arguments_give_in_python(
    corpora: dict[str, str], text: str, options: dict[str, Any]
) -> None:
    found, expected = StreamPlan.load(written(SMALL + text)), StreamPlan(corpora, seq_len=8, **options)
    assert (found.fingerprint, found.max_epochs) == (expected.fingerprint, expected.max_epochs)
    assert found.cursor() == expected.cursor()


def test_a_plan_is_loaded_from_a_file_of_a_mix_or_of_a_training_run(corpora: dict[str, str], tmp_path: Path) -> None:
    mix = Path(written(SMALL + "seed = 17\nwindow_blocks = 3\nmemory_bytes = 4096"))
    plan = StreamPlan.load(mix)
    assert plan.fingerprint == StreamPlan.load(str(mix)).fingerprint
    assert (plan.seed, plan.names) == (17, ("code", "prose"))
    assert plan.sources[0].memory_bytes == 0, "it is mapped"
    (tmp_path / "recipe.toml").write_text(f"[data]\n{mix.read_text()}", encoding="utf-8")
    assert StreamPlan.load(tmp_path / "recipe.toml").fingerprint == plan.fingerprint
    mix.write_text(mix.read_text().replace("global_batch_size = 4\n", ""), encoding="utf-8")
    assert StreamPlan.load(mix).fingerprint == plan.fingerprint
    assert StreamPlan.load("shards/../mix.toml").fingerprint == plan.fingerprint


def test_one_corpus_is_a_mix_with_the_options(corpora: dict[str, str]) -> None:
    mix = load_mix("shards/code", {"seq_len": 16, "global_batch_size": 2, "seed": None})
    assert (mix.corpora, mix.seq_len, mix.global_batch_size, mix.seed) == ({"code": "shards/code"}, 16, 2, 0)
    assert StreamPlan(**mix.arguments()).fingerprint == StreamPlan("shards/code", seq_len=16).fingerprint


def test_options_override_the_file_and_defaults_do_not(corpora: dict[str, str]) -> None:
    mix = load_mix(written(SMALL), {"seed": 5, "seq_len": None}, defaults={"seq_len": 99, "window_blocks": 7})
    assert (mix.seed, mix.seq_len, mix.window_blocks) == (5, 8, 7)


def test_counts_may_be_written_as_on_the_command_line(corpora: dict[str, str]) -> None:
    mix = load_mix(written(SMALL.replace("= 4", '= "1.5k"').replace("= 8", '= "4_096"')))
    assert (mix.global_batch_size, mix.seq_len) == (1_500, 4_096)


@pytest.mark.parametrize("name", ["mix.toml", "recipe.toml"])
def test_paths_are_relative_to_the_file_and_those_of_options_to_the_working_directory(
    corpora: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    away = tmp_path / "elsewhere"
    away.mkdir()
    monkeypatch.chdir(away)
    text = SMALL.replace('"shards/prose"', f'"{tmp_path}/shards/prose"')
    text += 'cache_dir = "cache"\nmask = { code = ["a.txt", "s3://a/b"] }\n'
    (tmp_path / name).write_text("[data]\n" * (name == "recipe.toml") + text, encoding="utf-8")
    mix = load_mix(f"../{name}")
    assert mix.corpora == {"code": "../shards/code", "prose": f"{tmp_path}/shards/prose"}
    assert (mix.cache_dir, mix.mask) == ("../cache", {"code": ["../a.txt", "s3://a/b"]})
    assert StreamPlan(**mix.arguments()).names == ("code", "prose")
    assert load_mix(f"../{name}", {"cache_dir": "here"}).cache_dir == "here"


def test_a_path_beside_a_file_is_short_unless_a_link_makes_a_difference(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("recipes", "far/away"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "link").symlink_to("far/away")
    assert path_beside("recipes/a.toml", "../shards/code") == "shards/code"
    assert path_beside("recipes/a.toml", "shards") == "recipes/shards"
    assert path_beside("link/a.toml", "../shards") == str(tmp_path.resolve() / "far" / "shards")
    assert [path_beside("recipes/a.toml", path) for path in ("/a/b", "s3://a//b")] == ["/a/b", "s3://a//b"]
    assert path_beside("a.toml", "./shards") == "./shards"
