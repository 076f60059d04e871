"""The keys of every TOML file, for ``--help`` of the trainer and on their page, which is made here.

``python -m tests.run_files.test_keys`` writes the page.
"""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from tests.contract import small
from tokshard.run_files.keys import Key, help_text, keys_of, sections
from tokshard.run_files.plan_file import Mix

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "recipes" / "guides" / "keys-of-toml-files.md"
KINDS = sections()
HEAD = """\
# The keys of every TOML file

tokshard reads three kinds of TOML files. Unknown keys and wrong types are refused with what was expected. Paths in a
file are relative to that file. Paths on a command line, in options and in `section.key=value`, are relative to the
working directory.

| file | read by | example |
|---|---|---|
| [build recipe](#a-build-recipe) | `tokshard build RECIPE.toml` | [corpora.toml](../corpora.toml) |
| [mix](#a-mix) | `tokshard plan`, `trace`, `bench`, `report`, and `StreamPlan.load` | [below](#a-mix) |
| [training recipe](#a-training-recipe) | the trainer, and whatever reads a mix | [train_7b.toml](../train_7b.toml) |

`python -m tests.run_files.test_keys` writes this page from the code.
"""
BUILDS = """\
## A build recipe

A table `[corpora.NAME]` for each corpus, and `[defaults]` for all. Keys are options of `tokshard build`.
"""
MIXES = """\
## A mix

```toml
corpora = { code = "shards/code", prose = "s3://bucket/shards/prose" }
weights = { code = 0.7, prose = 0.3 }
seq_len = 4096
global_batch_size = 512
seed = 17
```

Most keys are arguments of `StreamPlan`. `memory_bytes`, `cache_dir` and `cache_bytes` are arguments of its `Cache`;
`global_batch_size`, `uneven`, `deal` and [`mask`](../../tokshard/runtime/README.md#masks) belong to the loader.
"""
RECIPES = """\
## A training recipe

Any key can be given on the command line: `train.steps=200`. `python -m tokshard.trainer --help` lists them, too.

### `[data]`

All keys of a mix, and:
"""


def page() -> str:
    mix = {key.name for key in keys_of(Mix)}
    parts = [HEAD, BUILDS, table(keys_of_builds()), MIXES, table(keys_of(Mix)), RECIPES]
    for section, kind in KINDS.items():
        more = [key for key in keys_of(kind) if section != "data" or key.name not in mix]
        first = (kind.__doc__ or "").partition("\n")[0].replace("``", "`")
        parts += [table(more)] if section == "data" else [f"### `[{section}]`\n\n{first}\n", table(more)]
    return "\n".join(parts)


def keys_of_builds() -> Iterator[Key]:
    yield Key("sources", "required", "files, directories, globs and URIs: one, or a list.")
    for name, option in small.options_of_build_recipes().items():
        text, _, note = (option.help or "").rstrip("]").partition("  [")
        default = "required" if note == "required" else ""
        if option.default not in (None, (), False) and isinstance(option.default, str | int | float):
            default = f'"{option.default}"' if isinstance(option.default, str) else str(option.default)
        text = f"{text} Default: {note.removeprefix('default: ')}." if note.startswith("default: ") else text
        if isinstance(option.type, click.Choice):
            text = f"{text} One of {', '.join(f'`{value}`' for value in option.type.choices)}."
        kinds = {option.multiple: " A list.", option.is_flag: " `true` or `false`."}
        yield Key(name, "false" if option.is_flag else default, text + kinds.get(True, ""))


def table(keys: Iterator[Key] | list[Key]) -> str:
    rows = [f"| `{key.name}` | {cell(key.default)} | {key.meaning[0].upper()}{key.meaning[1:]} |" for key in keys]
    return "\n".join(["| key | default | meaning |", "|---|---|---|", *rows, ""])


def cell(default: str) -> str:
    return default if default in ("", "required") else f"`{default}`"


@pytest.mark.parametrize("section", KINDS)
def test_every_key_has_a_meaning_and_every_meaning_has_a_key(section: str) -> None:
    keys = keys_of(KINDS[section])
    assert sorted(key.name for key in keys) == sorted(item.name for item in dataclasses.fields(KINDS[section]))
    assert KINDS[section].__dataclass_params__.frozen
    assert all(len(key.meaning) > 5 for key in keys), [key for key in keys if len(key.meaning) <= 5]


def test_the_page_has_all_keys_as_the_code_has_them() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.run_files.test_keys"


def test_help_says_what_a_key_is_if_nothing_is_said() -> None:
    lines = [" ".join(line.split()) for line in help_text().splitlines()]
    assert "[parallel] How the model is distributed over ranks." in lines
    assert "seq_len (required) tokens of a sample." in lines
    assert 'cache_bytes = "100GiB" limit of the directory.' in lines
    assert (
        "asynchronous = false train on while a save is written; needs memory for a copy of this rank's tensors."
        in lines
    )
    assert max(map(len, help_text().splitlines())) <= 120


@pytest.mark.slow
@pytest.mark.parametrize(("arguments", "exit_code"), [(["--help"], 0), ([], 2)])
def test_the_trainer_lists_the_keys_of_a_recipe(arguments: list[str], exit_code: int) -> None:
    """Without torch: it answers at once."""
    command = [sys.executable, "-X", "importtime", "-m", "tokshard.trainer", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == exit_code
    assert "| torch\n" not in done.stderr
    said = done.stdout if exit_code == 0 else done.stderr
    assert "usage: torchrun --nproc-per-node N -m tokshard.trainer RECIPE.toml [section.key=value ...]\n" in said
    assert done.stdout.endswith(help_text() + "\n") == (exit_code == 0)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
