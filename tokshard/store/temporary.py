"""Temporary files. Their errors name the temporary directory: it may be full where outputs have room."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Iterator
from typing import IO, Any

from tokshard.errors import StoreError


def temporary_file() -> IO[bytes]:
    """A file without a name, to write and read. It is gone when it is closed, or its process killed.

    Raises:
        StoreError: it cannot be made; also from its writes.
    """
    with _own_errors(), tempfile.TemporaryFile(buffering=0) as file:
        return io.BufferedRandom(TemporaryFile(os.dup(file.fileno()), "r+b"))


@contextlib.contextmanager
def named_temporary_file() -> Iterator[IO[bytes]]:
    """A file whose `name` is its path, for libraries that read only files. Flush it first.

    Raises:
        StoreError: as `temporary_file`.
    """
    with contextlib.ExitStack() as stack:
        with _own_errors():
            name = stack.enter_context(tempfile.NamedTemporaryFile()).name
            file = stack.enter_context(io.BufferedRandom(TemporaryFile(name, "r+b")))
        yield file


class TemporaryFile(io.FileIO):
    """An open file of the temporary directory, whose errors of writing say so."""

    def write(self, data: Any) -> int:
        with _own_errors():
            return super().write(data)


@contextlib.contextmanager
def _own_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise no_temporary_file(error) from error


def no_temporary_file(error: OSError) -> StoreError:
    """The error for a temporary file that cannot be made or written."""
    place = f" {tempfile.tempdir}" if tempfile.tempdir else ""  # none, if no place is usable: the error lists them
    return StoreError(
        f"the temporary directory{place} cannot be written: {error.strerror or error}",
        hint="make room there, or name another one with TMPDIR",
    )
