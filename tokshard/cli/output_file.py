"""Writing the files that a user names: whole or not at all, through links and into pipes, and never over an input."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

from tokshard.errors import TokshardError, UsageError
from tokshard.store import NO_ROOM, is_uri, open_store, temporary_file, written

_STDOUT = 1

Write = Callable[[bytes], int]
"""Writes all of a content; returns its length."""


@contextlib.contextmanager
def output_file(path: str, *, option: str, inputs: Iterable[str] = ()) -> Iterator[Write]:
    """A function that writes to a file, which appears under `path` when the context ends, or not if something fails.

    A link is followed: its target is replaced, and the link stays. A pipe, a device or the standard output is
    written to, never replaced.

    Args:
        option: the option that named the path, for messages.
        inputs: files and directories that are read; the output may not be one of them, or a file in one of them.

    Raises:
        UsageError: the path cannot be written, is a URI, or is an input.
        TokshardError: the disk is full.
    """
    if is_uri(path):
        raise UsageError(
            f"{option} {path} is a URI, and this command writes a file of this machine",
            hint="give a path, and copy the file",
        )
    with ExitStack() as stack:
        with _own_errors(path, option):
            refuse_inputs(path, option, inputs)
            file = stack.enter_context(_opened(path))

        def write(content: bytes) -> int:
            with _own_errors(path, option):  # errors of the caller are not those of the file
                return file.write(content)

        yield write
        with _own_errors(path, option):
            stack.close()


def is_stdout(path: str) -> bool:
    """Whether a path is the standard output of this process, so nothing else should be printed there."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(_STDOUT))
    except OSError:
        return False


@contextlib.contextmanager
def _opened(path: str) -> Iterator[IO[bytes]]:
    found = _status(path)
    if found is not None and stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(0, "it is a directory")
    if (found is None or stat.S_ISREG(found.st_mode)) and not is_stdout(path):
        folder, name = os.path.split(os.path.realpath(path))
        os.stat(folder)  # a store would make it; a folder that is missing is a mistake in the option
        with written(open_store(folder), name) as file:
            if found is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            yield file
        return
    with temporary_file() as whole:  # the reader gets all of it or nothing
        yield whole
        whole.seek(0)
        # stdout by its descriptor: it may be a socket, which has no path, or a file that others append to
        with open(os.dup(_STDOUT) if is_stdout(path) else path, "wb") as file:
            shutil.copyfileobj(whole, file)


def refuse_inputs(path: str, option: str, inputs: Iterable[str]) -> None:
    """Refuse an output that is an input. Compares files instead of paths, because of links. Arguments as `output_file`.

    Raises:
        UsageError: the output is an input.
    """
    found = _status(path)
    folders = [folder for parent in Path(os.path.realpath(path)).parents if (folder := _status(parent)) is not None]
    for name in inputs:
        try:
            status = os.stat(name)
        except OSError:  # the command that reads it says why
            continue
        if not stat.S_ISDIR(status.st_mode):
            is_input = found is not None and os.path.samestat(found, status)
        else:
            is_input = any(os.path.samestat(folder, status) for folder in folders) or (
                found is not None and stat.S_ISREG(found.st_mode) and _holds(name, found)
            )
        if is_input:
            where = "is" if not stat.S_ISDIR(status.st_mode) else "belongs to"
            raise UsageError(
                f"{option} {path} {where} {name}, which this command reads", hint=f"give another {option} FILE"
            )


def _holds(directory: str, file: os.stat_result) -> bool:
    """Whether a directory contains a file under any name. Entries that are not links need no `stat`."""
    with os.scandir(directory) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                if _holds(entry.path, file):
                    return True
            elif entry.is_symlink() or entry.inode() == file.st_ino:
                status = _status(entry.path)
                if status is not None and os.path.samestat(status, file):
                    return True
    return False


def _status(path: str | Path) -> os.stat_result | None:
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None


@contextlib.contextmanager
def _own_errors(path: str, option: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        kind, way_out = (TokshardError, "make room, or give") if error.errno in NO_ROOM else (UsageError, "give")
        problem = f"{path or repr(path)} cannot be written: {error.strerror or error}"
        raise kind(problem, hint=f"{way_out} another {option} FILE") from error
