"""Which room may import which, and what the first second of a process must not pay for."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

ROOMS_WITHOUT_A_WRONG_ARROW = {
    "__init__.py": "",
    "__main__.py": "import tokshard.cli.main",
    "errors.py": "",
    "format/__init__.py": "import tokshard.errors",
    "format/reader.py": "import pyarrow",
    "build/__init__.py": "import tokshard.format.reader",
    "build/tokenizer.py": "import tokenizers",
    "inspect/__init__.py": "import tokshard.format.reader, tokshard.runtime.plan",
    "inspect/decode.py": "import tokenizers",
    **{
        f"runtime/{name}.py": ""
        for name in ("arguments", "copying", "cursor", "finding", "infilling", "layout", "mixture", "packing")
    },
    **{f"runtime/{name}.py": "" for name in ("permutation", "seeds", "steps", "transforms", "windows")},
    "runtime/__init__.py": "",
    "runtime/plan.py": "import tokshard.runtime.reader",
    "runtime/mix.py": "import tokshard.runtime.plan, tokshard.runtime.recipes",
    "runtime/recipes.py": "import tokshard.errors",
    "runtime/reader.py": "import tokshard.format.reader",
    "runtime/checkpoints.py": "import torch, tokshard.errors",
    "runtime/loader.py": "import torch, tokshard.runtime.plan",
    "trainer/__init__.py": "",
    "trainer/config.py": "import tokshard.errors, tokshard.runtime.recipes",
    "trainer/loop.py": "import torch, tokshard.runtime.loader, tokshard.errors",
    "cli/__init__.py": "",
    "cli/main.py": "import tokshard.build, tokshard.inspect, tokshard.format, tokshard.errors",
}
WRONG_ARROWS = [
    ("errors.py", "tokshard.format"),
    ("format/reader.py", "tokshard.build"),
    ("format/reader.py", "tokshard.inspect"),
    ("format/reader.py", "tokenizers"),
    ("build/tokenizer.py", "tokshard.inspect"),
    ("build/tokenizer.py", "tokshard.cli"),
    ("build/tokenizer.py", "torch"),
    ("build/pipeline.py", "tokenizers"),
    ("inspect/decode.py", "tokshard.build"),
    ("inspect/decode.py", "torch"),
    ("cli/main.py", "tokenizers"),
    ("build/pipeline.py", "tokshard.runtime.plan"),
    ("runtime/plan.py", "torch"),
    ("runtime/windows.py", "pyarrow"),
    ("runtime/reader.py", "tokshard.build"),
    ("runtime/reader.py", "torch"),
    ("format/reader.py", "tokshard.runtime.plan"),
    ("trainer/loop.py", "tokshard.build"),
    ("trainer/loop.py", "tokshard.inspect"),
    ("trainer/loop.py", "tokshard.format.reader"),
    ("build/pipeline.py", "tokshard.trainer.config"),
    ("runtime/plan.py", "tokshard.trainer.config"),
    ("cli/main.py", "torch"),
    ("undeclared_room.py", "tokshard.errors"),
]


def lint_imports(directory: Path) -> subprocess.CompletedProcess[str]:
    return run("-c", LINT_IMPORTS, cwd=directory)


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=False)


def imported_modules(*arguments: str) -> set[str]:
    """Every module that a fresh interpreter imports while it runs `arguments`, which must succeed."""
    done = run("-X", "importtime", *arguments)
    imports = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    rest = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 0, "\n".join(rest)
    return {line.rpartition("|")[2].strip() for line in imports}


def test_every_arrow_between_rooms_is_allowed():
    done = lint_imports(ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def miniature(tmp_path: Path) -> Path:
    """A package with tokshard's rooms, tokshard's contracts and no wrong arrow."""
    for name, source in ROOMS_WITHOUT_A_WRONG_ARROW.items():
        path = tmp_path / "tokshard" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source + "\n")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def test_the_contracts_accept_rooms_without_a_wrong_arrow(miniature):
    done = lint_imports(miniature)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(("importer", "imported"), WRONG_ARROWS)
def test_the_contracts_refuse_a_wrong_arrow(miniature, importer, imported):
    with (miniature / "tokshard" / importer).open("a") as source:
        source.write(f"import {imported}\n")
    done = lint_imports(miniature)
    assert done.returncode == 1
    assert "BROKEN" in done.stdout


def test_importing_tokshard_imports_no_heavy_library():
    modules = imported_modules("-c", "import tokshard")
    assert "tokshard" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers", "numpy"})


def test_help_answers_without_a_heavy_library():
    modules = imported_modules("-m", "tokshard", "--help")
    assert "tokshard.cli.main" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers", "numpy"})


def test_the_order_of_a_plan_imports_neither_torch_nor_arrow():
    modules = imported_modules("-c", "import tokshard.runtime.plan")
    assert "tokshard.runtime.mixture" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers"})
