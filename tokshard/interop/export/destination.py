"""Where an export goes: a new directory that appears when it is complete, or an empty place in a bucket."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator

from tokshard.errors import ExportError, UsageError
from tokshard.format.opening import check_outside_corpora
from tokshard.store import NO_ROOM, Store, is_uri, open_store, present


@contextlib.contextmanager
def new_place(out: str, *, is_marked: bool) -> Iterator[Store]:
    """A store to write files into. They appear at `out` when the context ends; on an error nothing does.

    On this machine they are written next to `out` and renamed together. A bucket cannot do that: files appear one by
    one, and only the index, which comes last, keeps readers away; on an error the writer removes its files.

    Args:
        is_marked: the format has an index without which its readers find nothing.

    Raises:
        UsageError: something is at `out`, it lies in a corpus, or the format cannot go there.
        ExportError: the files cannot be written.
    """
    check_outside_corpora(out)
    try:
        with _in_bucket(out, is_marked=is_marked) if is_uri(out) else _in_directory(out) as store:
            yield store
    except OSError as error:
        way_out = "make room" if error.errno in NO_ROOM else "check its place and permissions"
        raise ExportError(
            f"{out} cannot be written: {error.strerror or error}", hint=f"{way_out}, or give another --out"
        ) from error


@contextlib.contextmanager
def _in_directory(out: str) -> Iterator[Store]:
    path = os.path.abspath(open_store(out).location)  # refuses an empty one
    _refuse_what_is_there(path, out)
    folder, name = os.path.split(path)
    partial = os.path.join(folder, f".{name}.{secrets.token_hex(4)}.partial")
    is_new = not os.path.isdir(folder)
    os.makedirs(partial)
    try:
        yield open_store(partial)
        _refuse_what_is_there(path, out)
        if os.path.isdir(path):
            shutil.copymode(path, partial)
        os.rename(partial, path)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        if is_new:
            with contextlib.suppress(OSError):  # another export writes there
                os.rmdir(folder)
        raise


def _refuse_what_is_there(path: str, out: str) -> None:
    """An empty directory is replaced; anything else at the place is refused."""
    if not os.path.lexists(path):
        return
    if os.path.islink(path) or not os.path.isdir(path):
        raise UsageError(f"{out} is there already, and is not a directory", hint="give another --out, or remove it")
    if os.listdir(path):
        raise UsageError(f"{out} is not empty: it has {_some(os.listdir(path))}", hint="give a new --out, or remove it")
    # the system refuses to replace the one, and whoever is in the other would see nothing of the export
    for what, is_it in {"a mount point": os.path.ismount(path), "the current directory": _is_current(path)}.items():
        if is_it:
            raise UsageError(f"{out} is {what}, which an export cannot replace", hint="give a new directory in it")


def _is_current(path: str) -> bool:
    with contextlib.suppress(OSError):
        return os.path.samefile(path, os.curdir)
    return False


@contextlib.contextmanager
def _in_bucket(out: str, *, is_marked: bool) -> Iterator[Store]:
    if not is_marked:
        raise UsageError(
            f"{out} is in an object store, where an export of this format would look complete before it is",
            hint="export to a directory, and copy that; mds has an index that is written last",
        )
    store = open_store(out)
    if there := present(store):
        raise UsageError(f"{out} is not empty: it has {_some(there)}", hint="give a new --out, or remove it")
    yield store


def _some(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(found[:3]) + (", ..." if len(found) > 3 else "")
