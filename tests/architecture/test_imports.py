"""Which room may import which, and what the first second of a process must not pay for."""

import ast
import graphlib
import re
import shutil
import subprocess
import sys
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parents[2]
LINT_IMPORTS = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"

WRONG_ARROWS = {
    "errors.py": ["tokshard.format"],
    "wording.py": ["tokshard.format"],
    "numbers.py": ["tokshard.format"],
    "format/corpus.py": ["tokshard.pipeline", "tokshard.inspect", "tokshard.runtime.plan", "tokenizers"],
    "store/base.py": ["tokshard.format"],
    "format/decode.py": ["tokshard.pipeline", "torch"],
    "pipeline/encode/encoder.py": ["tokshard.inspect", "tokshard.cli", "torch"],
    "pipeline/encode/documents.py": ["tokshard.pipeline.tasks.writing"],
    "pipeline/workspace/receipts.py": ["tokshard.pipeline.tasks.planning"],
    "pipeline/tasks/planning.py": ["tokshard.pipeline.executors.base"],
    "pipeline/judge.py": ["tokshard.pipeline.tasks.running"],
    "pipeline/executors/base.py": ["tokshard.pipeline.work"],
    "pipeline/work.py": ["tokshard.pipeline.commit"],
    "pipeline/build.py": ["tokshard.pipeline.jobs", "tokenizers", "tokshard.runtime.plan", "tokshard.trainer.loop"],
    "pipeline/resolve.py": ["tokshard.pipeline.work"],
    "interop/tokens/megatron.py": ["tokshard.pipeline.options", "tokshard.runtime.plan"],
    "interop/tokens/lists.py": ["tokenizers"],
    "interop/export/destination.py": ["torch", "tokshard.run_files.recipe"],
    "runtime/plan.py": ["torch", "tokshard.trainer.loop", "tokshard.run_files.recipe", "tokshard.format.corpus"],
    "runtime/loader.py": ["tokshard.run_files.plan_file", "torch"],
    "runtime/order/windows.py": ["pyarrow", "tokshard.runtime.plan", "tokshard.store.posix"],
    "runtime/prefetch.py": ["tokshard.runtime.tensors"],
    "runtime/rows/steps.py": ["tokshard.runtime.plan"],
    "runtime/rows/expand.py": ["torch"],
    "runtime/bytes/corpus.py": ["tokshard.pipeline", "torch"],
    "inspect/corpus/report.py": ["tokshard.inspect.plan.run"],
    "run_files/plan_file.py": ["tokshard.inspect.plan.run", "torch"],
    "run_files/recipe.py": ["torch", "tokshard.interop.export.destination", "tokshard.runtime.tensors"],
    "run_files/checkpoint_directory.py": ["tokshard.trainer.checkpoint"],
    "trainer/backports/chunked_loss.py": ["tokshard.runtime.rows.narrow", "tokshard.errors"],
    "run_files/strict_toml.py": ["tokshard.run_files.plan_file"],
    "interop/tokens/flat.py": ["tokshard.interop.export.files"],
    "trainer/model.py": ["tokshard.trainer.parallel"],
    "trainer/launcher.py": ["tokshard.trainer.loop"],
    "trainer/loop.py": ["tokshard.pipeline", "tokshard.inspect", "tokshard.format.opening"],
    "cli/main.py": ["tokenizers", "torch"],
}
"""By module, what it may not import."""


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
    """A package with tokshard's modules, of which only the imports are left, and tokshard's contracts."""
    for path in (ROOT / "tokshard").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(imports_of(path.read_text(encoding="utf-8")))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def imports_of(source: str) -> str:
    """The import statements of a module, those inside of functions included, those for the type checker not."""
    tree = ast.parse(source)
    tree.body = [node for node in tree.body if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node))]
    return "".join(f"{ast.unparse(node)}\n" for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))


def test_the_contracts_refuse_every_wrong_arrow_and_a_room_that_they_do_not_know(miniature):
    wrong = {(importer, imported) for importer, found in WRONG_ARROWS.items() for imported in found}
    for importer, imported in wrong:
        with (miniature / "tokshard" / importer).open("a") as source:
            source.write(f"import {imported}\n")
    (miniature / "tokshard" / "undeclared_room.py").write_text("import tokshard.errors\n")
    done = lint_imports(miniature)
    assert done.returncode == 1
    # the report names each wrong chain of imports by its first arrow
    reported = {line.strip("- ").partition(" (")[0] for line in done.stdout.splitlines() if line.startswith("-")}
    expected = {f"tokshard.{importer[:-3].replace('/', '.')} -> {imported}" for importer, imported in wrong}
    assert expected <= reported, f"not refused: {sorted(expected - reported)}"
    assert "undeclared_room" in done.stdout


def test_no_module_imports_itself_in_a_circle():
    """Imports inside of functions and for the type checker alone count, too."""
    graph = grimp.build_graph("tokshard", cache_dir=None)
    imported = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    assert len(imported) > 200
    graphlib.TopologicalSorter(imported).prepare()  # raises a CycleError with the circle


def test_importing_tokshard_imports_no_heavy_library():
    modules = imported_modules("-c", "import tokshard")
    assert "tokshard" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers", "numpy"})


@pytest.mark.parametrize("command", ["", "build", "import", "copy", "select"])
def test_help_answers_without_a_heavy_library(command):
    modules = imported_modules("-m", "tokshard", *command.split(), "--help")
    assert "tokshard.cli.main" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers", "numpy"})


def test_looking_at_a_corpus_imports_nothing_that_builds_or_decodes():
    modules = imported_modules("-c", "import tokshard.cli.inspect")
    assert {name for name in modules if name.startswith("tokshard.pipeline.")} == {"tokshard.pipeline.options"}
    assert modules.isdisjoint({"torch", "tokenizers"})


def test_interop_and_what_describes_a_job_import_no_torch_also_late():
    """But for the module that reads what torch has saved, which is imported where such a file is given."""
    files = [path for room in ("interop", "run_files") for path in (ROOT / "tokshard" / room).rglob("*.py")]
    paths = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in files}
    late = {
        name for name, path in paths.items() if re.search(r"^\s*(import|from) torch\b", path.read_text(), re.MULTILINE)
    }
    assert late == {"tokshard.run_files.torch_checkpoints"}
    modules = imported_modules("-c", f"import {', '.join(sorted(paths.keys() - late))}")
    assert modules.isdisjoint({"torch"})


def test_the_order_of_a_plan_imports_neither_torch_nor_arrow():
    modules = imported_modules("-c", "import tokshard.runtime.plan")
    assert "tokshard.runtime.order.mixture" in modules
    assert modules.isdisjoint({"torch", "pyarrow", "tokenizers"})
