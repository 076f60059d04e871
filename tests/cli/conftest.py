"""A command line in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tokshard.cli.main import run


@pytest.fixture
def shell(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs a command line: exit code, stdout, stderr."""

    def shell(*arguments: object) -> tuple[int, str, str]:
        exit_code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return exit_code, captured.out, captured.err

    return shell
