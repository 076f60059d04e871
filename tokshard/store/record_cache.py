"""Records of files elsewhere, kept on a disk of this machine and shared by its processes.

A file of the cache is a mirror with holes: a record lies where its number says, followed by a checksum that covers its
content, its number and its file. A record counts as missing if it was never written, was torn by a kill or a crash,
belongs to another file, or was changed; then it is written again. Processes need no locks, because all of them write
the same bytes.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tokshard.errors import UsageError

_FILE_RECORDS = 4_096
"""Records in a file of the cache, which is dropped as a whole when there is no room."""

_CHECKSUM_BYTES = 8
_FULL_AT, _DROP_TO = 0.98, 0.9
"""Parts of the limit: above the first, files are dropped until the cache has the second."""

_LOOK_AFTER = 0.01
"""The files are counted anew after this process has written this part of the limit."""

_USED_EVERY = 60.0
"""A file is marked as used at most once in so many seconds."""

_NAME = re.compile(r"[0-9a-f]{64}-[0-9]+-[0-9]+")


@dataclass(frozen=True, slots=True)
class RecordFile:
    """A file elsewhere as a sequence of records.

    Args:
        content: hash of its content, 64 hexadecimal digits: files of the same content are one.
        num_records: number of records.
        record_bytes: bytes of each record but the last.
        last_bytes: bytes of the last one.
    """

    content: str
    num_records: int
    record_bytes: int
    last_bytes: int

    def bytes_of(self, record: int) -> int:
        """Bytes of one record."""
        return self.last_bytes if record == self.num_records - 1 else self.record_bytes


class RecordCache:
    """Records on a disk of this machine, up to a limit. Threads and processes may share it.

    The least recently used files are dropped when there is no room. The limit holds for the space that the file system
    allocates; each writing process may exceed it by 1 % before it counts. Files of other programs in the directory are
    left alone. After an error of the disk, a record counts as missing.

    Args:
        directory: made when it is first needed.
        max_bytes: the limit.

    Raises:
        UsageError: the directory cannot be written.
    """

    def __init__(self, directory: str, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        try:
            os.makedirs(directory, exist_ok=True)
        except OSError as error:
            raise UsageError(
                f"{directory} cannot be a cache: {error.strerror}", hint="give a directory that can be written"
            ) from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise UsageError(f"{directory} cannot be written", hint="give another directory for the cache")
        self._counting, self._pid = threading.Lock(), os.getpid()
        self._uncounted = max_bytes  # so that the first write counts
        self._used: dict[str, float] = {}

    def read(self, file: RecordFile, first: int, stop: int) -> list[memoryview | None]:
        """Consecutive records; None for each missing one."""
        found: list[memoryview | None] = []
        for part, start, end in _parts(first, stop):
            content = memoryview(self._read_part(file, part, start, end))
            size = file.record_bytes + _CHECKSUM_BYTES
            for index, record in enumerate(range(start, end)):
                slot = content[index * size : (index + 1) * size]
                data = slot[: file.bytes_of(record)]
                is_right = len(slot) == size and slot[-_CHECKSUM_BYTES:] == _checksum(file, record, data)
                found.append(data if is_right else None)
        return found

    def write(self, file: RecordFile, first: int, records: Sequence[bytes | memoryview]) -> None:
        """Keep consecutive records."""
        for part, start, end in _parts(first, first + len(records)):
            slots = []
            for record in range(start, end):
                data = records[record - first]
                slots += [data, bytes(file.record_bytes - len(data)), _checksum(file, record, data)]
            with contextlib.suppress(OSError):
                self._write_part(file, part, start, b"".join(slots))
        self._make_room()

    def _read_part(self, file: RecordFile, part: int, start: int, end: int) -> bytes:
        size = file.record_bytes + _CHECKSUM_BYTES
        path = self._path(file, part)
        try:
            with _opened(path, os.O_RDONLY) as descriptor:
                content = os.pread(descriptor, (end - start) * size, (start - part * _FILE_RECORDS) * size)
                now = time.monotonic()
                if content and now - self._used.get(path, -_USED_EVERY) >= _USED_EVERY:
                    self._used[path] = now
                    with contextlib.suppress(OSError):  # it is another user's
                        os.utime(descriptor)
        except OSError:
            return b""
        return content

    def _write_part(self, file: RecordFile, part: int, start: int, content: bytes) -> None:
        size = file.record_bytes + _CHECKSUM_BYTES
        path = self._path(file, part)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with _opened(path, os.O_RDWR | os.O_CREAT) as descriptor:
            whole = min(_FILE_RECORDS, file.num_records - part * _FILE_RECORDS) * size
            if os.fstat(descriptor).st_size != whole:
                os.ftruncate(descriptor, whole)  # file systems allocate beyond the end of a file that grows
            os.pwrite(descriptor, content, (start - part * _FILE_RECORDS) * size)
        self._uncounted += len(content)

    def _make_room(self) -> None:
        """Drop files if there are too many; counts them only now and then."""
        if self._pid != os.getpid():  # a thread of the parent may have been counting when this process was forked
            self._counting, self._pid = threading.Lock(), os.getpid()
        if self._uncounted < _LOOK_AFTER * self._max_bytes or not self._counting.acquire(blocking=False):
            return
        try:
            self._uncounted = 0
            files = sorted(self._files())
            total = sum(num_bytes for _, num_bytes, _ in files)
            if total <= _FULL_AT * self._max_bytes:
                return
            for _, num_bytes, path in files:
                if total <= _DROP_TO * self._max_bytes:
                    break
                with contextlib.suppress(OSError):  # another process dropped it
                    os.unlink(path)
                self._used.pop(path, None)
                total -= num_bytes
        finally:
            self._counting.release()

    def _files(self) -> Iterator[tuple[float, int, str]]:
        """The files of the cache: when they were used, the bytes that they take, and their paths."""
        with contextlib.suppress(OSError), os.scandir(self._directory) as folders:
            for folder in folders:
                if len(folder.name) != 2 or not folder.is_dir(follow_symlinks=False):
                    continue
                with contextlib.suppress(OSError), os.scandir(folder.path) as entries:
                    for entry in entries:
                        if _NAME.fullmatch(entry.name):
                            with contextlib.suppress(OSError):
                                found = entry.stat(follow_symlinks=False)
                                yield found.st_mtime, 512 * found.st_blocks, entry.path

    def _path(self, file: RecordFile, part: int) -> str:
        return os.path.join(self._directory, file.content[:2], f"{file.content}-{file.record_bytes}-{part}")


def _parts(first: int, stop: int) -> Iterator[tuple[int, int, int]]:
    """Records by the file of the cache that holds them: its number, the first one and the one after the last."""
    while first < stop:
        part = first // _FILE_RECORDS
        end = min(stop, (part + 1) * _FILE_RECORDS)
        yield part, first, end
        first = end


def _checksum(file: RecordFile, record: int, data: bytes | memoryview) -> bytes:
    seed = zlib.crc32(f"{file.content} {record} {len(data)}".encode())
    return (zlib.crc32(data, seed) | 1 << 32).to_bytes(
        _CHECKSUM_BYTES, "little"
    )  # never that of a hole, which is zeros


@contextlib.contextmanager
def _opened(path: str, flags: int) -> Iterator[int]:
    """A file of the cache. Anything else, or a link, is an error of the disk, so that no pipe blocks."""
    folder, name = os.path.split(path)
    with contextlib.ExitStack() as stack:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        stack.callback(os.close, inside)
        descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666, dir_fd=inside)
        stack.callback(os.close, descriptor)
        yield descriptor
