"""The standard streams of a command: if one is closed or full, output is dropped and the work continues."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class ReaderGoneError(BrokenPipeError):
    """The reader of stdout has seen enough, as in ``| head``."""


class Sink(io.FileIO):
    """A file descriptor that remembers its first write error and drops everything after it.

    Args:
        raises_reader_gone: raise once if the reader of a pipe is gone, so that a long listing ends early.
    """

    def __init__(self, descriptor: int, *, raises_reader_gone: bool) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self.error: OSError | None = None
        self._raises_reader_gone = raises_reader_gone

    def write(self, data: Any, /) -> int:
        """Write, unless that failed before."""
        if self.error is None:
            try:
                return super().write(data)
            except OSError as error:
                self.error = error  # buffered output is dropped, too: the interpreter flushes when it exits
                if self._raises_reader_gone and isinstance(error, BrokenPipeError):
                    raise ReaderGoneError(*error.args) from error
        return memoryview(data).nbytes


def open_streams() -> Sink:
    """Replace stdout and stderr by streams that a command can always write to.

    Descriptors 0 to 2 that are closed become /dev/null, before another file takes their numbers. Characters that the
    encoding of a stream lacks are written as escapes.

    Returns:
        The sink of stdout; check its error when the command is done.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor, which is this one
    stdout = Sink(1, raises_reader_gone=True)
    sys.stdout = _text(stdout, sys.stdout)
    sys.stderr = _text(Sink(2, raises_reader_gone=False), sys.stderr)
    return stdout


def _text(sink: Sink, before: TextIO | None) -> TextIO:
    """A text stream with the settings of the one that Python made, which is missing if its descriptor was closed."""
    return io.TextIOWrapper(
        io.BufferedWriter(sink),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",  # a terminal without UTF-8 shows what it can
        line_buffering=before is None or bool(before.line_buffering),
        write_through=isinstance(before, io.TextIOWrapper) and before.write_through,
    )
