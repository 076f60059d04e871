"""A plan from TOML: the same as in Python, and errors that name the key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, documents_of, write_corpus
from tokshard.errors import CorpusError, PlanError, UsageError
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


def written(text: str) -> str:
    Path("mix.toml").write_text(text, encoding="utf-8")
    return "mix.toml"


SMALL = 'corpora = { code = "shards/code", prose = "shards/prose" }\nseq_len = 8\nglobal_batch_size = 4\n'


def test_a_file_gives_the_plan_that_the_same_arguments_give_in_python(corpora: dict[str, str]) -> None:
    text = """
        weights = { code = 0.7, prose = 0.3 }
        seed = 17
        block_tokens = 40
        window_blocks = 3
        start_epoch = { prose = 2 }
        schedule = [[100, { code = 1, prose = 0 }]]
    """
    mix = load_mix(written(SMALL + text))
    plan = StreamPlan(
        corpora,
        seq_len=8,
        weights={"code": 0.7, "prose": 0.3},
        seed=17,
        block_tokens=40,
        window_blocks=3,
        start_epoch={"prose": 2},
        schedule=[(100, {"code": 1, "prose": 0})],
    )
    assert mix.global_batch_size == 4
    assert StreamPlan(**mix.arguments()).fingerprint == plan.fingerprint
    assert StreamPlan(**mix.arguments()).cursor() == plan.cursor()


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


def test_a_plan_of_a_file_with_a_mask_is_refused_instead_of_training_on_it(corpora: dict[str, str]) -> None:
    Path("out.txt").write_text("1\n", encoding="utf-8")
    with pytest.raises(PlanError, match=r"mix\.toml has a mask") as error:
        StreamPlan.load(written(SMALL + 'mask = { code = ["out.txt"] }'))
    assert "loader.mask" in error.value.hint


def test_what_a_file_leaves_out_is_what_python_leaves_out(corpora: dict[str, str]) -> None:
    plan = StreamPlan.load(written(SMALL))
    assert plan.fingerprint == StreamPlan(corpora, seq_len=8).fingerprint
    assert plan.cursor() == StreamPlan(corpora, seq_len=8).cursor()


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("take = 0.5", {"take": 0.5}),
        ("take = { code = 0.5 }\nmax_epochs = 4", {"take": {"code": 0.5}, "max_epochs": 4.0}),
    ],
)
def test_one_number_or_one_per_corpus_is_handed_to_the_plan_only_if_it_is_given(
    corpora: dict[str, str], text: str, options: dict[str, Any]
) -> None:
    found, expected = (
        StreamPlan.load(written(f"{SMALL}block_tokens = 40\n{text}")),
        StreamPlan(corpora, seq_len=8, block_tokens=40, **options),
    )
    assert (found.fingerprint, found.max_epochs) == (expected.fingerprint, expected.max_epochs)


def test_a_uri_is_not_taken_for_a_path_next_to_the_file(tmp_path: Path) -> None:
    text = 'seq_len = 8\nglobal_batch_size = 2\ncorpora = { code = "s3://bucket/code", prose = "prose" }'
    (tmp_path / "mix.toml").write_text(text)
    mix = load_mix(str(tmp_path / "mix.toml"))
    assert mix.corpora == {"code": "s3://bucket/code", "prose": str(tmp_path / "prose")}


def test_a_recipe_of_the_trainer_gives_its_data_table() -> None:
    mix = load_mix(str(ROOT / "recipes" / "quickstart_train.toml"))
    assert mix.corpora == {name: str(ROOT / "quickstart" / "shards" / name) for name in ("code", "prose")}
    assert (mix.weights, mix.seq_len, mix.global_batch_size, mix.seed) == ({"code": 0.7, "prose": 0.3}, 128, 12, 17)


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
    assert path_beside("link/a.toml", "../shards") == "link/../shards"
    assert [path_beside("recipes/a.toml", path) for path in ("/a/b", "s3://a//b")] == ["/a/b", "s3://a//b"]
    assert path_beside("a.toml", "./shards") == "./shards"


@pytest.mark.parametrize("name", ["mix.toml", "recipes/mix.toml"])
def test_a_path_that_no_file_can_have_is_refused_with_the_file_that_gives_it(name: str) -> None:
    with pytest.raises(UsageError, match=rf"{name}: the path 'a\\x00b' has a zero byte"):
        path_beside(name, "a\0b")


@pytest.mark.parametrize(
    ("text", "problem", "hint"),
    [
        (SMALL + "sed = 3", "mix.toml: no key sed", "did you mean seed?"),
        (SMALL + "xyzzy = 3", "mix.toml: no key xyzzy", "known here: corpora, seq_len"),
        (SMALL + 'seed = "3"', "mix.toml: Expected `int`, got `str` - at `seed`", "for example: seed = 17"),
        (SMALL + "seed = true", "mix.toml: Expected `int`, got `bool` - at `seed`", "for example: seed = 17"),
        (
            SMALL + "weights = [1, 2]",
            "mix.toml: Expected `object`, got `array` - at `weights`",
            "weights = { code = 0.7",
        ),
        (SMALL + 'take = "all"', "got `str` - at `take`", "take = { code = 0.1 }"),
        (
            SMALL + "schedule = [[1]]",
            "Expected `array` of length 2, got 1 - at `schedule[0]`",
            "schedule = [[1_000_000",
        ),
        (SMALL + 'block_tokens = "64k"', "mix.toml: block_tokens: '64k' may be 64000 or 65536", "give 64000 or 65536"),
        (f'[data]\n{SMALL}window_blocks = "1k"', "mix.toml: data.window_blocks: '1k' may be 1000", "1000 or 1024"),
        ("seq_len = 8", "mix.toml: no corpora", 'give corpora = { code = "shards/code" } in a mix.toml'),
        ("corpora = {}\nglobal_batch_size = 2", "mix.toml: no seq_len", "or --seq-len on the command line"),
        ("corpora = {}\nseq_len = 2", "mix.toml: no global_batch_size", "or --global-batch-size on"),
        (
            'corpora = { a = "b" }\nseq_len = 0\nglobal_batch_size = 2',
            "mix.toml: Expected `int` >= 1 - at `seq_len`",
            "for example: seq_len = 4096",
        ),
        ("[data]\nseq_lem = 8", "mix.toml: no data.corpora", "give corpora"),
        (f"[data]\n{SMALL}seq_lem = 8", "mix.toml: no key data.seq_lem", "did you mean data.seq_len?"),
        (
            f'[data]\n{SMALL}seed = "3"',
            "mix.toml: Expected `int`, got `str` - at `data.seed`",
            "for example: seed = 17",
        ),
        ("[corpora", "mix.toml is not valid TOML", "https://toml.io"),
        (f"seed = {'[' * 5_000}", "mix.toml is not valid TOML", "https://toml.io"),
        (f"seed = {'1' * 5_000}", "mix.toml is not valid TOML", "https://toml.io"),
    ],
)
def test_a_wrong_file_is_refused_with_its_name_the_key_and_a_hint(
    corpora: dict[str, str], text: str, problem: str, hint: str
) -> None:
    with pytest.raises(UsageError) as error:
        load_mix(written(text))
    assert problem in error.value.problem
    assert hint in error.value.hint
    assert error.value.exit_code == 2


def test_a_missing_file_a_missing_corpus_and_weights_of_others_are_refused(corpora: dict[str, str]) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml: No such file"):
        load_mix("nowhere.toml")
    nowhere = load_mix("nowhere", {"seq_len": 8, "global_batch_size": 2})
    with pytest.raises(CorpusError, match="nowhere"):
        StreamPlan(**nowhere.arguments())
    with pytest.raises(PlanError, match="weights are for code"):
        StreamPlan.load(written(SMALL + "weights = { code = 1 }"))
