"""Which rooms touch files: those listed here reach theirs through `tokshard.store`, so that an object store will do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "tokshard"

THROUGH_THE_STORE = ["format", "interop/tokens", "pipeline", "runtime"]

LOCAL = {
    "format/arrow_file.py": "maps memory that belongs to no file",
    "format/whole_corpus.py": "maps a shard that lies on this machine, to give back the pages that it has read",
    "pipeline/append.py": "asks whether a source on this machine is a link",
    "pipeline/encode/chat/sandbox.py": "asks the system how much memory this process has",
    "pipeline/encode/encoder.py": "gives the library a tokenizer as a temporary file",
    "pipeline/estimate.py": "tells what is free on a disk of this machine",
    "pipeline/executors/ray_cluster.py": "starts Ray in an empty directory, because workers may import from there",
    "pipeline/executors/ray.py": "changes to the current directory of the driver, where relative paths start",
    "pipeline/sources/opening.py": "asks whether a mapped file was cut",
    "pipeline/spool.py": "reads standard input",
}
"""Modules of these rooms that open what no store has, and why."""

PURE = {
    "setsid",
    *("fsencode", "fsdecode", "getcwd", "sched_getaffinity", "sysconf", "uname", "getppid", "environ.update"),
    *("fspath", "getpid", "PathLike", "cpu_count", "environ.get", "environ.pop", "register_at_fork", "_exit"),
    *("strerror", "kill"),
    *("path.join", "path.split", "path.basename", "path.dirname", "path.splitext", "path.normpath", "path.abspath"),
    "path.relpath",
}
"""What may be used of `os`."""

MODULES = {"shutil", "tempfile", "glob", "fcntl", "mmap"}
"""No function of these may be called."""

METHODS = {
    *("read_bytes", "read_text", "write_bytes", "write_text", "touch", "mkdir", "rmdir", "unlink", "iterdir", "glob"),
    *("rglob", "exists", "is_dir", "is_file", "is_symlink", "resolve", "samefile", "symlink_to", "hardlink_to"),
}
"""Of `pathlib.Path`."""


def file_calls(source: str) -> Iterator[str]:
    """The calls of a module that touch files, other than those of a store, with their lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _touches_files(node):
            yield f"line {node.lineno}: {ast.unparse(node.func)}"


def _touches_files(call: ast.Call) -> bool:
    receiver, _, name = ast.unparse(call.func).rpartition(".")
    module, _, rest = f"{receiver}.{name}".partition(".")
    if not receiver:
        return name == "open"
    if module == "os":
        return rest not in PURE and not receiver.startswith("os.path.splitext(")
    if (module, rest) == ("glob", "escape"):
        return False
    if module in MODULES or (module, name) == ("io", "open"):
        return True
    is_of_a_store = receiver.rpartition(".")[2] in {"store", "_store", "out", "_files"}
    if name in {"open", "stat"}:
        return not is_of_a_store and not receiver.endswith(("ipc", "tail"))
    return name in METHODS


def modules_of(place: str) -> list[Path]:
    path = PACKAGE / place
    return [path] if path.is_file() else sorted(path.rglob("*.py"))


@pytest.mark.parametrize("place", THROUGH_THE_STORE)
def test_a_room_touches_files_through_the_store_alone(place):
    modules = modules_of(place)
    assert modules
    found = {str(path.relative_to(PACKAGE)): list(file_calls(path.read_text(encoding="utf-8"))) for path in modules}
    assert {name for name, calls in found.items() if calls} == {name for name in LOCAL if name.startswith(place)}, found


@pytest.mark.parametrize(
    "call",
    [
        "open('x')",
        "os.replace(a, b)",
        "os.open(a)",
        "os.path.exists(a)",
        "shutil.rmtree(a)",
        "Path(a).open()",
        "path.stat()",
        "(directory / name).read_bytes()",
        "path.unlink(missing_ok=True)",
        "tempfile.mkdtemp()",
    ],
)
def test_a_call_that_touches_files_is_found(call):
    assert list(file_calls(f"def f():\n    return {call}\n")) != []
