"""A store in a directory. The only module that renames, syncs, locks, and knows directories."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
import secrets
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from stat import S_ISDIR, S_ISLNK, S_ISREG
from typing import IO

from tokshard.store.base import Attempt, Entry, NotRegularFileError, Spool, Store

_NO_LOCKS = frozenset({errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK, errno.EINVAL})
_LEASE_TRIES = 5
_LEASE_SECONDS = 0.02
_HOLDER_BYTES = 256
_FOLDER_TRIES = 5
"""Tries to make a folder for a file: another process may remove it with the last file in it."""


@dataclass(frozen=True, slots=True)
class PosixStore:
    """Files in a directory, which is made when the first file is put.

    A file is written under a unique name in `scratch`, synced and renamed, so readers see the whole file or none.

    Args:
        location: the directory.
        scratch: of an attempt: where unfinished files are, on the same file system; None: next to the finished ones.
        root: what a relative `location` is relative to, whatever directory the program goes to later; empty: the
            working directory.
    """

    location: str
    scratch: str | None = None
    root: str = field(default="", compare=False)

    def where(self, name: str) -> str:
        return os.path.join(self.location, name) if name and self.location != "." else name or self.location

    def below(self, folder: str) -> PosixStore:
        return replace(self, location=self.where(folder))

    def list(self, folder: str = "") -> Iterator[Entry]:
        path = self.local_path(folder)
        try:
            with os.scandir(path) as entries:
                found = sorted(os.fsencode(entry.name) + (b"/" if _is_folder(entry) else b"") for entry in entries)
        except FileNotFoundError:
            return
        above: frozenset[str] | None = None
        for name in map(os.fsdecode, found):
            inside = f"{folder}/{name}" if folder else name
            if name.endswith("/"):
                above = _real_folders(self, folder) if above is None else above
                if os.path.realpath(os.path.join(path, name)) not in above:
                    yield Entry(inside)
                continue
            try:
                yield _entry(inside, os.path.join(path, name))
            except FileNotFoundError:
                if os.path.lexists(self.local_path(inside)):  # a link to nothing; otherwise it was removed meanwhile
                    yield Entry(inside, is_link=True)
            except OSError:
                yield Entry(inside)

    def names(self, folder: str = "") -> Sequence[str]:
        with os.scandir(self.local_path(folder)) as entries:
            return [f"{entry.name}/" if entry.is_dir(follow_symlinks=False) else entry.name for entry in entries]

    def stat(self, name: str) -> Entry:
        return _entry(name, self.local_path(name))

    def open(self, name: str) -> IO[bytes]:
        return open(self.local_path(name), "rb")

    def read(self, name: str, ranges: Sequence[tuple[int, int]], *, version: str | None = None) -> Sequence[bytes]:
        path = self.local_path(name)
        with open(path, "rb", buffering=0) as file:
            if version is not None and _version(os.fstat(file.fileno())) != version:
                raise OSError(errno.ESTALE, "the file was replaced", path)
            return [_read_range(file, start, length, path) for start, length in ranges]

    def get(self, name: str) -> bytes:
        with open(self.local_path(name), "rb") as file:
            return file.read()

    def put(self, name: str, content: bytes) -> None:
        spool = self.spool(name)
        try:
            spool.file.write(content)
            spool.publish()
        except BaseException:
            spool.discard()
            raise

    def delete(self, *names: str) -> None:
        folders = dict[str, None]()
        for name in names:
            if name.endswith("/"):
                _delete_folder(self, name[:-1])
                folders[os.path.dirname(name[:-1])] = None
                continue
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(self.local_path(name))
                folders[os.path.dirname(name)] = None
        for folder in folders:
            _sync_directory(self.local_path(folder))
            _remove_empty(self, folder)

    def local_path(self, name: str) -> str:
        path = os.path.join(self.root, self.where(name))
        if "\0" in path:  # Python raises ValueError, which callers do not expect of a file
            raise OSError(errno.EINVAL, "no path has a zero byte", path)
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:
            raise OSError(errno.EINVAL, "no path has a lone surrogate", path) from error
        return path

    def spool(self, name: str) -> Spool:
        """A file next to its final place, or in the scratch folder of an attempt, until it is renamed."""
        final = self.local_path(name)
        folder, base = os.path.split(final)
        path = os.path.join(self.scratch or folder, f".{base}.{_attempt_name()}.partial")
        # if another attempt has taken over, making its scratch folder again would undo that
        file, has_made_folder = _begun(path, may_make_folder=self.scratch is None)
        tidy = partial(_remove_empty, self, os.path.dirname(name)) if has_made_folder else None
        return Spool(file=file, path=path, publish=partial(_publish, file, path, final), tidy=tidy)

    def attempt(self, folder: str, token: str) -> Attempt:
        place = self.local_path(folder)
        store, clear = replace(self, scratch=f"{place}/{token}"), partial(_clear_attempts, place, token)
        return Attempt(store=store, scratch=f"{place}/{token}", mode=0o777, clear=clear)

    @contextlib.contextmanager
    def hold(self, name: str, holder: str) -> Iterator[bool]:
        """A lock on a file; it dies with the process, so that a killed one leaves nothing behind."""
        descriptor, is_locked = _locked(self.local_path(name))
        try:
            os.truncate(descriptor, 0)
            os.write(descriptor, holder.encode())
            yield is_locked
        finally:
            os.close(descriptor)

    def holder(self, name: str) -> str | None:
        try:
            descriptor = os.open(self.local_path(name), os.O_RDONLY)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return os.read(descriptor, _HOLDER_BYTES).decode("utf-8", "replace") or "a process"
        except OSError:  # a file system without locks
            pass
        finally:
            os.close(descriptor)
        return None


def _clear_attempts(folder: str, token: str) -> None:
    """Remove the folders of all attempts. The token names the folder that this attempt moves away."""
    with contextlib.suppress(FileNotFoundError):
        # a process of an earlier attempt then finds no file there to rename, and can open none
        os.rename(folder, f"{folder}-stale-{token}")
    parent, name = os.path.split(folder)
    for stale in os.listdir(parent) if os.path.isdir(parent) else ():
        if stale.startswith(f"{name}-stale-"):
            _remove(os.path.join(parent, stale))


def _locked(path: str) -> tuple[int, bool]:
    """A descriptor of the file that is at `path`, and whether it is locked."""
    tries = 0
    while True:
        tries += 1
        with contextlib.ExitStack() as stack:
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
                stack.callback(os.close, descriptor)
                is_locked = _lock(descriptor)
            except (FileNotFoundError, BlockingIOError):
                if tries >= _LEASE_TRIES:
                    raise
                # the holder before removed the folder just now, or `PosixStore.holder` has the lock for a moment
                time.sleep(_LEASE_SECONDS)
                continue
            if _is_at(path, descriptor):
                stack.pop_all()
                return descriptor, is_locked


def _lock(descriptor: int) -> bool:
    """Lock an open file; False on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def _begun(path: str, *, may_make_folder: bool) -> tuple[IO[bytes], bool]:
    """A new file, and whether its folder was made for it."""
    tries = 0
    while True:
        try:
            return open(path, "wb"), tries > 0
        except FileNotFoundError:
            tries += 1
            if not may_make_folder or tries == _FOLDER_TRIES:
                raise
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)


def _publish(file: IO[bytes], path: str, final: str) -> None:
    """Sync and rename a file."""
    file.flush()
    os.fsync(file.fileno())
    file.close()
    folder = os.path.dirname(final) or "."
    tries = 0
    while True:
        # if another attempt has taken over, the unfinished file is gone, and the folder must not come back
        if not os.path.isdir(folder) and os.path.lexists(path):
            os.makedirs(folder, exist_ok=True)
        try:
            os.replace(path, final)  # readers see the whole file or none
            break
        except FileNotFoundError:
            tries += 1
            if tries == _FOLDER_TRIES or not os.path.lexists(path):
                raise
    _sync_directory(folder)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link that cannot be followed, such as one to itself: `_entry` says why
        return False


def _real_folders(store: PosixStore, folder: str) -> frozenset[str]:
    """The real path of a folder and of all folders above it in this store."""
    parts = folder.split("/") if folder else []
    return frozenset(os.path.realpath(store.local_path("/".join(parts[:count]))) for count in range(len(parts) + 1))


def _delete_folder(store: PosixStore, folder: str) -> None:
    path = store.local_path(folder)
    try:
        found = [] if os.path.islink(path) else store.names(folder)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in found:
        inside = f"{folder}/{name}"
        if name.endswith("/"):
            _delete_folder(store, inside[:-1])
        else:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(store.local_path(inside))
    if path != store.scratch:
        with contextlib.suppress(OSError):  # another process put a file there
            os.rmdir(path)


def _remove_empty(store: PosixStore, folder: str) -> None:
    with contextlib.suppress(OSError):  # it has other files
        while folder:
            os.rmdir(store.local_path(folder))
            folder = os.path.dirname(folder)


def _attempt_name() -> str:
    """A name that no process uses again, on any machine."""
    host = "".join(letter for letter in platform.node() if letter.isalnum())[:16]
    return f"{host}-{os.getpid()}-{secrets.token_hex(4)}"


def _entry(name: str, path: str) -> Entry:
    found = os.lstat(path)
    is_link = S_ISLNK(found.st_mode)
    if is_link:
        found = os.stat(path)
    if not S_ISREG(found.st_mode):
        if S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise NotRegularFileError(errno.EINVAL, "not a regular file", path)
    # some network file systems give no inode numbers
    identity = hash((found.st_dev, found.st_ino)) if found.st_ino else os.path.realpath(path)
    return Entry(name, found.st_size, _version(found), identity, is_link)


def _version(found: os.stat_result) -> str:
    """Modification time and size, in a form that messages can show."""
    seconds, nanoseconds = divmod(found.st_mtime_ns, 10**9)
    try:
        time_of_day = datetime.fromtimestamp(seconds, UTC).isoformat().removesuffix("+00:00")
    except (ValueError, OverflowError, OSError):  # beyond the year 9999
        time_of_day = str(seconds)
    return f"{time_of_day}.{nanoseconds:09}Z/{found.st_size}"


def _read_range(file: IO[bytes], start: int, length: int, path: str) -> bytes:
    content = os.pread(file.fileno(), length, start)
    while len(content) < length:
        more = os.pread(file.fileno(), length - len(content), start + len(content))
        if not more:
            size = os.fstat(file.fileno()).st_size
            raise OSError(errno.ENODATA, f"the file ends at byte {size}, before {start + length}", path)
        content += more
    return content


def _is_at(path: str, descriptor: int) -> bool:
    """Whether an open file is still in its place: the holder before may have removed it between open and flock."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


_NOT_OPENED = frozenset({errno.EACCES, errno.EISDIR, errno.EINVAL, errno.ENOTSUP})
"""Some network file systems do not open directories; one that may not be read can be written nevertheless."""

_NOT_SYNCED = frozenset({errno.EINVAL, errno.EBADF, errno.ENOTSUP, errno.ENOSYS})
"""Errors of file systems that cannot sync directories, such as SMB, 9p and some of FUSE."""

_GONE = frozenset({errno.ENOENT, errno.ENOTDIR})


def _sync_directory(path: str) -> None:
    """Make the names in a directory durable, where the file system can, and if it is still there.

    Raises:
        OSError: the disk fails: a rename may be lost.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in _NOT_OPENED | _GONE:
            return
        raise
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NOT_SYNCED:
            raise OSError(error.errno, error.strerror, path) from error
    finally:
        os.close(descriptor)


def _remove(path: str) -> None:
    """Remove a file, a link, or a folder with all that it holds."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)


def obstacle(store: Store, name: str) -> str | None:
    """What blocks files named ``name/...`` on this machine: ``a file``, ``a link``, ``a link to nothing``, or None."""
    path = store.local_path(name)
    if path is None:
        return None
    if name and os.path.islink(path):
        return "a link"
    if os.path.isdir(path) or not os.path.lexists(path):
        return None
    return "a file" if os.path.exists(path) else "a link to nothing"
