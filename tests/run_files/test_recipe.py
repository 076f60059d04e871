"""Recipes: strict TOML, overrides, errors that name what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tokshard.run_files.recipe import check_start, load_config, saved_form

ROOT = Path(__file__).parents[2]
RECIPE = """
[data]
corpora = { code = "shards/code" }
seq_len = 64
global_batch_size = 8
[train]
out = "run"
steps = 10
"""


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE)
    return str(path)


def test_overrides_win_and_are_typed_as_in_toml(recipe: str) -> None:
    overrides = [
        "train.steps=20",
        "optimizer.lr=1e-3",
        "data.weights.code=2",
        "parallel.precision=bf16",
        "train.out=a/b",
    ]
    config = load_config(recipe, overrides)
    assert (config.train.steps, config.optimizer.lr, config.data.weights) == (20, 1e-3, {"code": 2.0})
    assert (config.parallel.precision, config.train.out, config.data.seq_len) == ("bf16", "a/b", 64)


def test_paths_in_a_recipe_are_relative_to_it_and_those_of_the_command_line_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("recipes", "elsewhere"):
        (tmp_path / folder).mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    more = '[checkpoint]\nload_weights = "../weights"\n[evaluation]\ncorpora = { code = "held/out" }\n'
    (tmp_path / "recipes" / "r.toml").write_text(RECIPE + more)
    config = load_config("../recipes/r.toml", ["data.corpora.prose=prose", "checkpoint.load_weights=w"])
    assert config.data.corpora == {"code": "../recipes/shards/code", "prose": "prose"}
    assert (config.train.out, config.evaluation.corpora) == ("../recipes/run", {"code": "../recipes/held/out"})
    assert (config.checkpoint.load_weights, config.checkpoint.load) == ("w", "")
    assert load_config("../recipes/r.toml").checkpoint.load_weights == "../weights"


def test_a_checkpoint_holds_paths_that_mean_the_same_everywhere(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("recipe.toml", ["checkpoint.load_weights=base", "data.mask.code=['s3://b/ids.txt']"])
    saved = saved_form(config)
    assert saved["data"]["corpora"] == {"code": str(tmp_path / "shards" / "code")}
    assert saved["data"]["mask"] == {"code": ["s3://b/ids.txt"]}
    assert (saved["train"]["out"], saved["checkpoint"]["load"]) == (str(tmp_path / "run"), "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_start(load_config("../recipe.toml", ["checkpoint.load_weights=../base"]).checkpoint, saved, "run/step-1")


@pytest.mark.parametrize("text", ["2026-11-22", "07:32:00", "2026-11-22 07:32", "a#b", "bare", '"quoted"'])
def test_dates_and_bare_words_are_text(recipe: str, text: str) -> None:
    config = load_config(recipe, [f"train.out={text}", f"data.corpora.code={text}"])
    assert config.train.out == config.data.corpora["code"] == text.strip('"')


def test_every_recipe_of_the_repository_is_valid() -> None:
    recipes = list((ROOT / "recipes").glob("*_train.toml"))
    assert recipes
    for path in recipes:
        assert load_config(str(path)).train.steps > 0
