"""What TOML files, overrides and command lines of runs are refused for."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import Refusal, check, refused
from tokshard.errors import PlanError, UsageError
from tokshard.run_files.model_shape import Model, model_shape
from tokshard.run_files.plan_file import load_mix
from tokshard.run_files.recipe import check_ranks, load_config
from tokshard.run_files.saved_state import read_state
from tokshard.run_files.strict_toml import path_beside

RECIPE = """
[data]
corpora = { code = "shards/code" }
seq_len = 64
global_batch_size = 8
[train]
out = "run"
steps = 10
"""
MIX = 'corpora = { code = "shards/code", prose = "shards/prose" }\nseq_len = 8\nglobal_batch_size = 4\n'


def reading_a_recipe(*overrides: str, text: str = RECIPE) -> Callable[[Path], object]:
    def read(_: Path) -> object:
        Path("recipe.toml").write_text(text, encoding="utf-8")
        return load_config("recipe.toml", overrides)

    return read


def reading_a_mix(text: str) -> Callable[[Path], object]:
    def read(_: Path) -> object:
        Path("mix.toml").write_text(text, encoding="utf-8")
        return load_mix("mix.toml")

    return read


def reading_without_torch(_: Path) -> object:
    Path("ck.pt").write_bytes(b"PK")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "torch", None)
        return read_state("ck.pt")


def a_small_vocabulary(_: Path) -> object:
    return model_shape(Model(vocab_size=63), 64)


def on_two_ranks(**data: Any) -> Callable[[Path], object]:
    changes = [f"data.{name}={value}" for name, value in data.items()]

    def start(directory: Path) -> object:
        reading_a_recipe()(directory)
        settings = load_config("recipe.toml", ["train.micro_batch_size=3", "data.global_batch_size=12", *changes])
        return check_ranks(settings, num_ranks=2)

    return start


def of_recipe(override: str, problem: str, hint: str, *more: str) -> Refusal:
    what = " ".join(["a recipe with", override, *more])
    return Refusal(what, reading_a_recipe(override, *more), UsageError, problem, hint)


def of_value(override: str, expected: str, place: str = "", *, hint: str | None = None) -> Refusal:
    key, _, value = override.partition("=")
    said = f"recipe.toml: {expected} - at `{place or key}`"
    return Refusal(f"{key} = {value[:30]}", reading_a_recipe(override), UsageError, said, hint or ALL_KEYS)


def of_mix(what: str, text: str, problem: str, hint: str) -> Refusal:
    return Refusal(f"a mix {what}", reading_a_mix(text), UsageError, f"mix.toml{problem}", hint)


def of_key(text: str, problem: str, hint: str) -> Refusal:
    return of_mix(f"with {text}", MIX + text, f": {problem}", hint)


ALL_KEYS = "python -m tokshard.trainer --help lists all keys"
A_DIRECTORY = "give one on a file system that all ranks share, and copy checkpoints to a bucket from there"
A_PLAN = "give a mix.toml, a corpus directory or a checkpoint"
A_MIX = "give a mix such as mix.toml, or a corpus directory"
ASCENDING = "give [step, global_batch_size] in ascending order, from 1"
LOW = "give the low factor the smaller number, such as 1 and 4"
A_RANGE = "give its first step and the one after it"
DIVISIBLE = (
    "model.dim is an even multiple of num_heads, or model.head_dim an even number; num_heads a multiple of num_kv_heads"
)
FEWER_STEPS = "lower optimizer.warmup_steps or optimizer.decay_steps, or raise train.steps"
OF_TOML = "give a file of TOML, such as mix.toml; https://toml.io has its syntax"
NO_CORPORA = 'give corpora = { code = "shards/code" } in a mix.toml'
CORPORA = 'for example: corpora = { code = "shards/code" }'
NO_LENGTH = "give seq_len = 4096 in a mix.toml"
NO_SIZE = "give global_batch_size = 512 in a mix.toml"
RAMP = "for example: batch_ramp = [[1_000, 256], [5_000, 512]]"
SEED = "for example: seed = 17"
SHARES = "for example: weights = { code = 0.7, prose = 0.3 }"
SCHEDULE = "for example: schedule = [[1_000_000, { code = 0.5, prose = 0.5 }]]"
NO_FILE = "nowhere.toml: No such file or directory"

DECAY = "of decay do not fit in 10"
TWO_AND_NINE = ("optimizer.decay_steps=9", "optimizer.warmup_steps=2")
TWO_LOADS = "recipe.toml: checkpoint.load and checkpoint.load_weights are given"
SIXTEEN = "float8 needs a multiple of 16"
NO_FLOAT8 = "change it, or leave compute.float8 out"
LENGTH = "for example: seq_len = 4096"
NO_FIELD = "recipe.toml: Object missing required field `seq_len` - at `data`"
WITHOUT_LENGTH = RECIPE.replace("seq_len = 64", "")
MICRO = "train.micro_batch_size is 3, but a rank's batches have"
VOCABULARY = "model.vocab_size is 63, the corpora have 64 ids"
OF_TORCH = "ck.pt was saved by torch, which is not installed"
ZERO_BYTE = "recipes/mix.toml: the path 'a\\x00b' has a zero byte"
ONE_OR_TWO = "give a divisor: 1, 2"
A_PATH = "give the path of a file or directory"

OTHERS: list[tuple[str, Callable[[Path], object], str, str]] = [
    ("a vocabulary of fewer ids than the corpora", a_small_vocabulary, VOCABULARY, "leave it out, or raise it"),
    ("a missing recipe", lambda _: load_config("nowhere.toml"), NO_FILE, "give a recipe, such as recipes/*.toml"),
    ("a recipe without a length of samples", reading_a_recipe(text=WITHOUT_LENGTH), NO_FIELD, ALL_KEYS),
    ("micro-batches of 3 of 4 rows", on_two_ranks(global_batch_size=8), f"{MICRO} 4 rows", "give a divisor: 1, 2, 4"),
    ("micro-batches of 3 of 6 rows", on_two_ranks(batch_ramp=[[9, 16]]), f"{MICRO} 6 and 8 rows", ONE_OR_TWO),
    ("a plan that does not exist", lambda _: load_mix("nowhere"), "nowhere does not exist", A_PLAN),
    ("a checkpoint of torch, without torch", reading_without_torch, OF_TORCH, "pip install 'tokshard[torch]'"),
    ("a missing mix", lambda _: load_mix("nowhere.toml"), NO_FILE, A_MIX),
    ("a path with a zero byte in a TOML file", lambda _: path_beside("recipes/mix.toml", "a\0b"), ZERO_BYTE, A_PATH),
]

REFUSALS = [
    of_value("train.steps=many", "Expected `int`, got `str`"),
    of_value("train.steps=0", "Expected `int` >= 1"),
    of_value("optimizer.lr=nan", "Expected `float` >= 0.0"),
    of_value("optimizer.lr=inf", "Expected `float` <= 1e+38"),
    of_value("train.peak_tflops=inf", "Expected `float` <= 1e+38"),
    of_value("optimizer.beta1=1.5", "Expected `float` < 1.0"),
    of_value("optimizer.beta2=1", "Expected `float` < 1.0"),
    of_value("optimizer.eps=-1e-8", "Expected `float` >= 0.0"),
    of_value("model.num_heads=0", "Expected `int` >= 1"),
    of_value("model.rope_theta=0.0", "Expected `float` > 0.0"),
    of_value("parallel.init_timeout_seconds=10_000_000", "Expected `int` <= 1000000"),
    of_value("parallel.init_timeout_seconds=0", "Expected `int` >= 1"),
    of_value("checkpoint.every=-1", "Expected `int` >= 0"),
    of_value("parallel.precision=fp64", "Invalid enum value 'fp64'", hint="give one of fp32, bf16"),
    of_value("compute.compile=true", "Expected `str`, got `bool`", hint="give one of off, inductor, aot_eager, eager"),
    of_value("data.corpora={}", "Expected `object` of length >= 1", hint=CORPORA),
    of_value("train.skip=[[0, 5]]", "Expected `int` >= 1", "train.skip[0][0]"),
    of_value("data.batch_ramp=[[5, 0]]", "Expected `int` >= 1", "data.batch_ramp[0][1]", hint=RAMP),
    of_value(f"data.seed={'[' * 5_000}", "Expected `int`, got `str`", hint=SEED),
    of_value(f"data.seed={'1' * 5_000}", "Expected `int`, got `str`", hint=SEED),
    of_recipe("train.stepz=1", "recipe.toml: no key train.stepz", "did you mean train.steps?"),
    of_recipe("trian.steps=1", "recipe.toml: no section [trian]", "did you mean [train]?"),
    of_recipe("eval.every=1", "recipe.toml: no section [eval]", "did you mean [evaluation]?"),
    of_recipe("train.xyzzy={}", "recipe.toml: no key train.xyzzy", "known here: out, steps, stop_after, *"),
    of_recipe("train=3", "recipe.toml: train is 3, expected a section", "write [section]"),
    of_recipe("train.steps", "'train.steps' is not an override", "write section.key=value, such as train.steps=100"),
    of_recipe("train.steps.x=3", "'train.steps.x=3': steps is not a section", "write section.key=value"),
    of_recipe("train.skip=[[5, 5]]", "recipe.toml: train.skip has the range [5, 5]", A_RANGE),
    of_recipe("train.profile_steps=[13, 10]", "recipe.toml: train.profile_steps has the range [13, 10]", A_RANGE),
    of_recipe("train.out=s3://b/run", "recipe.toml: train.out is s3://b/run, expected a directory", A_DIRECTORY),
    of_recipe("train.out=", "recipe.toml: train.out is empty, expected a directory", A_DIRECTORY),
    of_recipe("data.batch_ramp=[[5, 4], [3, 8]]", "recipe.toml: data.batch_ramp is [(5, 4), (3, 8)]", ASCENDING),
    of_recipe("optimizer.warmup_steps=11", f"recipe.toml: 11 steps of warmup and 0 {DECAY}", FEWER_STEPS),
    of_recipe("optimizer.schedule=wsd", f"recipe.toml: 2 steps of warmup and 9 {DECAY}", FEWER_STEPS, *TWO_AND_NINE),
    of_recipe("checkpoint.load=a", TWO_LOADS, "give one of them", "checkpoint.load_weights=b"),
    of_recipe("model.preset=9B", "no preset '9B'", "known: 10M, 160M, 1B, 7B, 8B, 11B"),
    of_recipe("model.num_kv_heads=3", "256 wide, 4 heads, 3 KV heads do not divide", DIVISIBLE),
    of_recipe("model.dim=250", "250 wide, 4 heads, 2 KV heads do not divide", DIVISIBLE),
    of_recipe("model.head_dim=7", "256 wide, 4 heads, 2 KV heads do not divide", DIVISIBLE),
    of_recipe("model.rope_low_freq_factor=4", "model.rope_low_freq_factor is 4.0, rope_high_freq_factor 4.0", LOW),
    *(
        of_recipe(override, f"recipe.toml: {problem}, {SIXTEEN}", NO_FLOAT8, "compute.float8=rowwise", *more)
        for override, problem, *more in (
            ("data.seq_len=72", "data.seq_len is 72"),
            ("model.dim=200", "model.dim is 200"),
            ("model.hidden_dim=264", "model.hidden_dim is 264"),
            ("model.head_dim=6", "model.head_dim * num_heads is 24"),
            ("model.dim=96", "model.head_dim * num_kv_heads is 24", "model.num_kv_heads=1"),
        )
    ),
    Refusal(
        "a batch of 2^31 tokens on a rank",
        on_two_ranks(global_batch_size=1 << 26),
        PlanError,
        "a global_batch_size of 67108864 makes 33554432 rows of 64 tokens on each of 2 ranks, 2**31 tokens or more",
        "give a global_batch_size of at most 67108862",
    ),
    of_key("sed = 3", "no key sed", "did you mean seed?"),
    of_key("xyzzy = 3", "no key xyzzy", "known here: corpora, seq_len, *"),
    of_key('seed = "3"', "Expected `int`, got `str` - at `seed`", "for example: seed = 17"),
    of_key("seed = { a = 1 }", "Expected `int`, got `object` - at `seed`", "for example: seed = 17"),
    of_key("weights = [1]", "Expected `object`, got `array` - at `weights`", SHARES),
    of_key('take = "all"', "Expected `*`, got `str` - at `take`", "for example: take = { code = 0.1 }"),
    of_key("schedule = [[1]]", "Expected `array` of length 2, got 1 - at `schedule[0]`", SCHEDULE),
    of_key('block_tokens = "64k"', "block_tokens: '64k' may be 64000 or 65536", "give 64000 or 65536"),
    of_mix("without corpora", "seq_len = 8", ": no corpora", NO_CORPORA),
    of_mix("without a length of samples", "corpora = {}\nglobal_batch_size = 2", ": no seq_len", NO_LENGTH),
    of_mix("without a batch size", "corpora = {}\nseq_len = 2", ": no global_batch_size", NO_SIZE),
    of_mix("with a seq_len of 0", MIX.replace("= 8", "= 0"), ": Expected `int` >= 1 - at `seq_len`", LENGTH),
    *(
        of_mix(f"in a recipe with {text}", f"[data]\n{mix}{text}", f": {problem}", hint)
        for mix, text, problem, hint in (
            ("", "seq_lem = 8", "no data.corpora", NO_CORPORA),
            (MIX, "seq_lem = 9", "no key data.seq_lem", "did you mean data.seq_len?"),
            (MIX, 'seed = "3"', "Expected `int`, got `str` - at `data.seed`", "for example: seed = 17"),
            (MIX, 'window_blocks = "1k"', "data.window_blocks: '1k' may be 1000 or 1024", "give 1000 or 1024"),
        )
    ),
    of_mix("that is not valid TOML", "[corpora", " is not valid TOML: *", OF_TOML),
    of_mix("that is nested deeply", f"seed = {'[' * 5_000}", " is not valid TOML: *", OF_TOML),
    of_mix("with a number of 5,000 digits", f"seed = {'1' * 5_000}", " is not valid TOML: *", OF_TOML),
    *(Refusal(what, call, UsageError, problem, hint) for what, call, problem, hint in OTHERS),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
