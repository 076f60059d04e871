"""Recipes: strict TOML, overrides, errors that name what is wrong."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tokshard.errors import UsageError
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
    more = '[checkpoint]\nload_weights = "../weights"\n[evaluation]\ncorpora = { code = "/held/out" }\n'
    (tmp_path / "recipes" / "r.toml").write_text(RECIPE + more)
    config = load_config("../recipes/r.toml", ["data.corpora.prose=prose", "checkpoint.load_weights=w"])
    assert config.data.corpora == {"code": "../recipes/shards/code", "prose": "prose"}
    assert (config.train.out, config.evaluation.corpora) == ("../recipes/run", {"code": "/held/out"})
    assert (config.checkpoint.load_weights, config.checkpoint.load) == ("w", "")
    assert load_config("../recipes/r.toml").checkpoint.load_weights == "../weights"


def test_a_checkpoint_holds_paths_that_mean_the_same_everywhere(
    recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    start = "checkpoint.load_weights=base"
    config = load_config("recipe.toml", [start, "data.mask.code=['s3://b/ids.txt']"])
    saved = saved_form(config)
    assert saved["data"]["corpora"] == {"code": str(tmp_path / "shards" / "code")}
    assert saved["data"]["mask"] == {"code": ["s3://b/ids.txt"]}
    assert (saved["train"]["out"], saved["checkpoint"]["load"]) == (str(tmp_path / "run"), "")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    check_start(load_config("../recipe.toml", ["checkpoint.load_weights=../base"]).checkpoint, saved, "run/step-1")
    with pytest.raises(UsageError, match=r"checkpoint\.load_weights is base, but run/step-1 was saved by a command"):
        check_start(load_config("../recipe.toml", [start]).checkpoint, saved, "run/step-1")


@pytest.mark.parametrize("text", ["2026-11-22", "07:32:00", "2026-11-22 07:32", "a#b", "bare", '"quoted"'])
def test_dates_and_bare_words_are_text(recipe: str, text: str) -> None:
    config = load_config(recipe, [f"train.out={text}", f"data.corpora.code={text}"])
    assert config.train.out == config.data.corpora["code"] == text.strip('"')


def test_a_configuration_cannot_be_changed(recipe: str) -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        load_config(recipe).train.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "problem", "hint"),
    [
        ("train.stepz=1", "no key train.stepz", "did you mean train.steps?"),
        ("trian.steps=1", "no section [trian]", "did you mean [train]?"),
        ("eval.every=1", "no section [eval]", "did you mean [evaluation]?"),
        ("train.xyzzy=1", "no key train.xyzzy", "known here: out, steps"),
        ("train=3", "train is 3, expected a section", "write [section]"),
        ("train.steps=many", "Expected `int`, got `str` - at `train.steps`", "lists all keys"),
        ("train.steps=0", "Expected `int` >= 1 - at `train.steps`", "lists all keys"),
        ("optimizer.lr=nan", "Expected `float` >= 0.0 - at `optimizer.lr`", "lists all keys"),
        ("optimizer.lr=inf", "Expected `float` <= 1e+38 - at `optimizer.lr`", "lists all keys"),
        ("optimizer.beta1=1.5", "Expected `float` < 1.0 - at `optimizer.beta1`", "lists all keys"),
        ("optimizer.beta2=1", "Expected `float` < 1.0 - at `optimizer.beta2`", "lists all keys"),
        ("optimizer.eps=-1e-8", "Expected `float` >= 0.0 - at `optimizer.eps`", "lists all keys"),
        ("model.num_heads=0", "Expected `int` >= 1 - at `model.num_heads`", "lists all keys"),
        ("model.rope_theta=0.0", "Expected `float` > 0.0 - at `model.rope_theta`", "lists all keys"),
        ("parallel.init_timeout_seconds=10_000_000", "Expected `int` <= 1000000 - at", "lists all keys"),
        ("parallel.precision=fp64", "Invalid enum value 'fp64' - at `parallel.precision`", "lists all keys"),
        ("train.skip=[[5, 5]]", "train.skip has the range [5, 5]", "the one after it"),
        ("train.skip=[[0, 5]]", "Expected `int` >= 1 - at `train.skip", "lists all keys"),
        ("train.profile_steps=[13, 10]", "train.profile_steps has the range [13, 10]", "the one after it"),
        ("data.batch_ramp=[[5, 4], [3, 8]]", "data.batch_ramp is [(5, 4), (3, 8)]", "ascending order, from 1"),
        ("data.batch_ramp=[[5, 0]]", "Expected `int` >= 1 - at `data.batch_ramp", "lists all keys"),
        ("data.corpora={}", "Expected `object` of length >= 1 - at `data.corpora`", "lists all keys"),
        ("train.out=s3://bucket/run", "train.out is s3://bucket/run, expected a directory", "a file system that all"),
        ("compute.compile=true", "Expected `str`, got `bool` - at `compute.compile`", "lists all keys"),
        ("optimizer.warmup_steps=11", "11 steps of warmup and 0 of decay do not fit in 10", "optimizer.warmup_steps"),
        ("train.steps", "'train.steps' is not an override", "section.key=value"),
    ],
)
def test_a_wrong_value_is_refused_with_its_name_and_a_hint(recipe: str, override: str, problem: str, hint: str) -> None:
    with pytest.raises(UsageError) as error:
        load_config(recipe, [override])
    assert problem in error.value.problem
    assert hint in error.value.hint
    assert error.value.exit_code == 2


def test_a_missing_key_a_missing_file_and_invalid_toml_are_refused(recipe: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        load_config(str(tmp_path / "nowhere.toml"))
    Path(recipe).write_text(RECIPE.replace("seq_len = 64", ""))
    with pytest.raises(UsageError, match=r"missing required field `seq_len` - at `data`"):
        load_config(recipe)
    for seed in ("[" * 5_000, "1" * 5_000):
        with pytest.raises(UsageError, match=r"data\.seed"):
            load_config(recipe, [f"data.seed={seed}"])
    Path(recipe).write_text("[data")
    with pytest.raises(UsageError, match="is not valid TOML"):
        load_config(recipe)


def test_every_recipe_of_the_repository_is_valid() -> None:
    recipes = list((ROOT / "recipes").glob("*_train.toml"))
    assert recipes
    for path in recipes:
        assert load_config(str(path)).train.steps > 0


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["data.seq_len=72"], "data.seq_len is 72"),
        (["model.dim=200"], "model.dim is 200"),
        (["model.hidden_dim=264"], "model.hidden_dim is 264"),
        (["model.dim=96", "model.num_heads=4", "model.num_kv_heads=1"], "num_kv_heads is 24"),
    ],
)
def test_float8_needs_sizes_that_are_multiples_of_16(recipe: str, changes: list[str], problem: str) -> None:
    load_config(recipe, changes)
    assert load_config(recipe, ["compute.float8=rowwise"]).compute.float8 == "rowwise"
    with pytest.raises(UsageError, match=f"{problem}, float8 needs a multiple of 16"):
        load_config(recipe, ["compute.float8=rowwise", *changes])
