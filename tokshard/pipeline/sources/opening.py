"""Opens inputs in any store, and makes the errors for inputs that cannot be read."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
from collections.abc import Iterable
from typing import IO

import pyarrow as pa

from tokshard.errors import BadSourceError, SourceError
from tokshard.pipeline.options import DOCUMENTS, VIEW
from tokshard.pipeline.sources.inputs import PINNED, Input, Needs
from tokshard.store import Entry, Store, is_uri, locate, open_store

_POINTER, _POINTER_BYTES = b"version https://git-lfs", 1_024
"""The start of what Git has in place of a file that LFS did not fetch, and the bytes that it has at most."""


def open_file(input_: Input) -> IO[bytes]:
    """The raw bytes of an input, seekable and buffered.

    Raises:
        BadSourceError: the file is gone, or a pointer of Git LFS, which would be a text.
    """
    try:
        store, name = input_.place or store_of(input_.location)
        file = store.open(name)
        start = b""
        if input_.num_bytes < _POINTER_BYTES:
            start = file.read(len(_POINTER))
            file.seek(0)
    except OSError as error:
        raise vanished(input_, error) from error
    if start == _POINTER:
        file.close()
        raise damaged(input_, "it is a pointer of Git LFS; 'git lfs pull' fetches the file")
    return file


def store_of(location: str) -> tuple[Store, str]:
    """`locate` for a file, without making the store again for each of many files in one folder."""
    folder, name = os.path.split(location)
    is_absolute = os.path.isabs(folder) and name  # a store of a relative folder stays with its working directory
    return (_store_of_folder(folder), name) if is_absolute else locate(location)


@functools.lru_cache(maxsize=16)
def _store_of_folder(folder: str) -> Store:
    return open_store(folder)


def open_for_arrow(input_: Input) -> pa.NativeFile:
    """The raw bytes of an input, for Arrow.

    It is never mapped: truncating a mapped file ends the process with SIGBUS.

    Raises:
        BadSourceError: as for `open_file`.
    """
    if input_.num_bytes < _POINTER_BYTES:
        open_file(input_).close()
    store, name = store_of(input_.location)
    path = store.local_path(name)
    try:
        return pa.PythonFile(store.open(name), mode="r") if path is None else pa.OSFile(path)
    except OSError as error:
        raise vanished(input_, error) from error


def needed_names(name: str, needs: Needs) -> list[str]:
    """The files that reading a file requires, such as its index.

    Args:
        needs: for each needed file, the suffix to remove from the name (``/``: all but the folder; ``*NAME``: this part
            of it), and its replacement.
    """
    folder = name[: name.rfind("/") + 1]
    base = name.removeprefix(folder)
    return [
        folder + (base.replace(end[1:], other) if end[:1] == "*" else base.removesuffix(end) * (end != "/") + other)
        for end, other in needs
    ]


def with_needed(store: Store, entry: Entry, needs: Needs, form: str) -> Entry:
    """The facts of a file, with a version that also changes with the files that it needs.

    Raises:
        BadSourceError: one of them cannot be read.
    """
    if not needs:
        return entry
    versions = [entry.version]
    for name in needed_names(entry.name, needs):
        try:
            versions.append(store.stat(name).version)
        except OSError as error:
            raise BadSourceError(
                f"{store.where(name)} cannot be read: {error.strerror or error}; "
                f"{store.where(entry.name)} needs it as {form}",
                hint="put it there, or say with --format what the file is",
            ) from error
    return dataclasses.replace(entry, version="+".join(versions))


def check_unchanged(input_: Input, start_over: str = "start over with --force") -> None:
    """Refuse an input that has changed since the build began.

    Args:
        start_over: how the user does that, as the end of a sentence.

    Raises:
        SourceError: it is missing, or has another size or version.
    """
    if input_.is_read_once:
        return
    store, name = store_of(input_.location)
    try:
        _compare(input_, with_needed(store, store.stat(name), input_.needs, input_.format), start_over)
    except OSError as error:
        raise vanished(input_, error) from error


def check_all_unchanged(inputs: Iterable[Input], start_over: str) -> None:
    """Refuse inputs if one has changed since the build began. A missing one is left to the task that reads it.

    Costs about as much as listing them: in a bucket a request for 1,000 files of a folder, or for a single file.

    Raises:
        SourceError: one has another size or version, or its facts cannot be read.
    """
    for folder, some in itertools.groupby(inputs, lambda one: os.path.dirname(one.location)):
        held = [one for one in some if not one.is_read_once and one.version and one.format not in {DOCUMENTS, VIEW}]
        is_listed = is_uri(folder) and len(held) > 1 and all(one.path for one in held)
        try:
            found = {one.name: one for one in open_store(folder).list()} if is_listed else {}
        except OSError as error:
            raise vanished(held[0], error) from error
        for one in held:
            entry = found.get(os.path.basename(one.location))
            try:
                if not is_listed or one.needs:
                    check_unchanged(one, start_over)
                elif entry is not None:
                    _compare(one, entry, start_over)
            except SourceError as error:
                if not isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
                    raise


def _compare(input_: Input, found: Entry, start_over: str) -> None:
    if input_.version not in (found.version, PINNED):
        change = f"its version was {input_.version}, now it is {found.version}"
    elif input_.num_bytes != found.size:
        change = f"it had {input_.num_bytes:,} bytes, now it has {found.size:,}"
    else:
        return
    raise SourceError(
        f"{input_.location} was modified since the build began: {change}",
        hint=f"put the file back, or {start_over}",
    )


def check_not_cut(input_: Input) -> None:
    """Refuse a local file that has become shorter: old versions of Arrow return stale memory for the missing bytes.

    Raises:
        BadSourceError: it is missing, or has fewer bytes than when the build began.
    """
    store, name = store_of(input_.location)
    path = store.local_path(name)
    if path is None:
        return
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise vanished(input_, error) from error
    if size < input_.num_bytes:
        raise damaged(input_, f"it was cut to {size:,} bytes while it was read, of {input_.num_bytes:,}")


def vanished(input_: Input, error: OSError) -> BadSourceError:
    """The error for an input that cannot be opened."""
    way_out = "check its permissions" if isinstance(error, PermissionError) else "put the file back"
    return BadSourceError(
        f"{input_.location} cannot be read: {error.strerror or error}",
        hint=f"{way_out} and run the same command again; finished tasks are kept",
    )


def damaged(input_: Input, reason: str) -> BadSourceError:
    """The error for an input whose container is broken."""
    return BadSourceError(
        f"{input_.location} is damaged: {reason}",
        hint="fetch the file again and start over with --force, or leave it out with --on-bad-source skip",
    )
