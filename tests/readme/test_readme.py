"""The examples of the pages for users run as they are written."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Self

import pytest

from tokshard.run_files.plan_file import Mix

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / name
    for name in (
        "README.md",
        "tokshard/cli/README.md",
        "tokshard/run_files/README.md",
        "recipes/README.md",
        "recipes/clusters.md",
    )
]
"""In this order: the later ones use files that the examples of the first have made."""
TEXT = "".join(page.read_text(encoding="utf-8") for page in PAGES)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which a reader tries the examples, with the recipes of the repository."""
    path = tmp_path_factory.mktemp("reader")
    shutil.copytree(ROOT / "recipes", path / "recipes")
    return path


def examples() -> list[tuple[str, str]]:
    """Commands and Python examples, in the order in which a reader meets them."""
    blocks = re.findall(r"^```(console|python)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    found = []
    for kind, block in blocks:
        if kind == "console":
            found += [(kind, line[2:]) for line in block.splitlines() if line.startswith("$ ")]
        else:
            found.append((kind, block))
    return found


def may_fork(kind: str, example: str) -> bool:
    """Whether most of an example's time would be what it imports. Commands with workers are processes of their own."""
    if kind == "python":
        return "runtime import" in example
    return example.startswith("tokshard ") and not example.startswith(("tokshard build", "tokshard copy"))


def run(arguments: list[str] | str, directory: Path) -> None:
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        arguments,
        cwd=directory,
        shell=isinstance(arguments, str),
        env={**os.environ, "PATH": tools},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, f"{arguments}\n{done.stdout}{done.stderr}"


class Forks:
    """Runs scripts and command lines of tokshard, each in a fork of a process that has imported torch. A context."""

    def __init__(self, directory: Path) -> None:
        command = [sys.executable, "-c", "from tests.readme import test_readme; test_readme.serve()"]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            command,
            cwd=directory,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._server.communicate()

    def run(self, arguments: list[str]) -> None:
        """Run `tokshard` with arguments, or a script."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(arguments) + "\n")
        self._server.stdin.flush()
        exit_code, said = json.loads(self._server.stdout.readline())
        assert exit_code == 0, f"{arguments}\n{said}"


def serve() -> None:
    """The process of `Forks`."""
    import torch.utils.data  # noqa: F401

    import tokshard.cli.inspect
    import tokshard.cli.main
    import tokshard.cli.trace
    import tokshard.run_files.torch_checkpoints
    import tokshard.runtime.tensors  # noqa: F401

    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            if not (pid := os.fork()):
                _become(json.loads(line), output.fileno())
            _, status = os.waitpid(pid, 0)
            output.seek(0)
            sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), output.read()]) + "\n")
            sys.stdout.flush()


def _become(arguments: list[str], output: int) -> None:
    from tokshard.cli.main import main

    code = 1
    try:
        for descriptor in (1, 2):
            os.dup2(output, descriptor)
        sys.argv = arguments
        if arguments[0] == "tokshard":
            main()
        else:
            runpy.run_path(arguments[0], run_name="__main__")
        code = 0
    except SystemExit as end:
        code = int(end.code or 0)
    except BaseException:  # noqa: BLE001 - the edge of the process
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@pytest.mark.timeout(300)  # some thirty processes, one after another
def test_the_commands_and_the_python_examples_run_one_after_another(directory: Path) -> None:
    assert {kind for kind, _ in examples()} == {"console", "python"}
    with Forks(directory) as forks:
        for number, (kind, example) in enumerate(examples()):
            script = directory / f"example_{number}.py"
            script.write_text(example, encoding="utf-8")
            if may_fork(kind, example):
                forks.run([str(script)] if kind == "python" else shlex.split(example))
            else:
                run([sys.executable, str(script)] if kind == "python" else example, directory)


def test_every_block_says_what_it_is() -> None:
    kinds = re.findall(r"^```(.*)\n", TEXT, re.MULTILINE)[::2]
    assert set(kinds) == {"console", "python", "py", "text", "toml"}


def test_the_table_of_keys_names_every_key_of_a_mix_in_toml() -> None:
    keys = re.findall(r"^\| `(\w+)` \|", TEXT.partition("| key of a `mix.toml`")[2], re.MULTILINE)
    assert sorted(keys) == sorted(item.name for item in dataclasses.fields(Mix))
    assert keys[:3] == ["corpora", "seq_len", "global_batch_size"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_file_and_section_that_a_page_links_to_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^):]+)\)", text)
    assert links
    for link in links:
        name, _, section = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), link
        if section:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert section in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, link
