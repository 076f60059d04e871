"""Programs in forks of one process that has imported torch and the trainer, on which each would spend seconds."""

from __future__ import annotations

import contextlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path

from tests.ranks import forked

ROOT = Path(__file__).parents[1]


class Forks:
    """Runs scripts, modules and command lines of tokshard, one after another."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self._server = subprocess.Popen(
            [sys.executable, "-m", "tests.forks"],
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        self._server.communicate()

    def run(self, arguments: list[str], directory: Path, *, seconds: int = 60) -> str:
        """Run a script, a module (`python -m ...`) or a command of tokshard, and return what it printed.

        Args:
            directory: where it runs.
            seconds: it is killed after so many, with the processes that it has started.
        """
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps([seconds, str(directory), *arguments]) + "\n")
        self._server.stdin.flush()
        exit_code, said = json.loads(self._server.stdout.readline())
        assert exit_code == 0, f"{arguments}\n{said}"
        return str(said)


def _serve() -> None:
    # what most of the programs import
    import tokenizers  # noqa: F401
    import torch._dynamo
    import torch.utils.data  # noqa: F401

    import tokshard.run_files.torch_checkpoints
    import tokshard.runtime.tensors
    import tokshard.trainer.loop  # noqa: F401
    from tests.contract import small

    small.import_commands("inspect", "trace")
    for line in sys.stdin:
        with tempfile.TemporaryFile("w+") as output:
            seconds, directory, *arguments = json.loads(line)
            pid = forked(partial(_run, arguments, directory, output.fileno()), seconds=seconds)
            _, status = os.waitpid(pid, 0)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            output.seek(0)
            sys.stdout.write(json.dumps([os.waitstatus_to_exitcode(status), output.read()]) + "\n")
            sys.stdout.flush()


def _run(arguments: list[str], directory: str, output: int) -> int:
    from tokshard.cli.main import main

    os.setsid()
    os.chdir(directory)
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    sys.argv = arguments
    try:
        if arguments[0] == "tokshard":
            main()
        elif arguments[:2] == ["python", "-m"]:
            sys.argv = arguments[2:]
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


if __name__ == "__main__":
    _serve()
