"""Versions of installed packages, and modules that need an extra of tokshard."""

from __future__ import annotations

import functools
import importlib.metadata
from importlib import import_module
from typing import Any

from tokshard.errors import UsageError


@functools.cache
def version_of(package: str) -> str:
    """The version of a package, looked up once in a process.

    Raises:
        importlib.metadata.PackageNotFoundError: it is not installed.
    """
    return importlib.metadata.version(package)


def extra_module(module: str, problem: str, *, extra: str) -> Any:
    """A module of a package that an extra of tokshard installs.

    Args:
        problem: what needs the package, and that it is not installed.

    Raises:
        UsageError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name not in (module, module.partition(".")[0]):
            raise
        raise UsageError(problem, hint=f"pip install 'tokshard[{extra}]'") from error
