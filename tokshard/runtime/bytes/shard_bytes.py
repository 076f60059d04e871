"""The bytes of shards by range, from a directory or from another store."""

from __future__ import annotations

import errno
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format import names
from tokshard.store import Store

_GAP_BYTES = 32 << 10
"""Ranges of a shard that are nearer to each other are asked for as one: bytes for a millisecond, a request for tens."""


@dataclass(frozen=True, slots=True)
class ShardFile:
    """A shard as its corpus knows it.

    Args:
        name: in the store.
        path: for messages.
        num_bytes: as the shard table says.
    """

    name: str
    path: str
    num_bytes: int


class ShardBytes:
    """Reads parts of the shards of a corpus. Threads may share it.

    A shard in another store keeps the version that it has when it is first read: another one is refused, unless the
    bytes are checked by their hashes, which spares a request. In a directory its size has to stay; a file may be
    touched or moved back.

    Args:
        on_read: called with the number of requests and of bytes of each read.
    """

    def __init__(self, store: Store, on_read: Callable[[int, int], None]) -> None:
        self._store, self._on_read = store, on_read
        self._is_local = store.local_path(names.MANIFEST) is not None
        self._versions: dict[str, str] = {}

    def read(self, shard: ShardFile, places: Sequence[tuple[int, int]], *, has_hashes: bool = False) -> list[bytes]:
        """Parts of one shard, each given as its first byte and its length.

        Args:
            has_hashes: the bytes will be checked.

        Raises:
            DamagedCorpusError: the shard is missing, was replaced, or is not what the manifest says.
            StoreError: the store does not answer.
        """
        for position, length in places:  # before memory is allocated for them
            if not 0 <= position <= position + length <= shard.num_bytes:
                raise DamagedCorpusError(
                    f"{shard.path} has {shard.num_bytes} bytes, the shard table names {length} at {position}",
                    hint=RESTORE,
                )
        joined = joined_ranges(places)
        try:
            version = self._version(shard) if self._is_local or not has_hashes else None
            parts = self._store.read(shard.name, joined, version=None if self._is_local else version)
        except OSError as error:
            raise _problem(shard, error) from error
        self._on_read(len(joined), sum(map(len, parts)))
        return list(_cut_out(places, joined, parts))

    def _version(self, shard: ShardFile) -> str:
        version = self._versions.get(shard.name)
        if version is None:
            found = self._store.stat(shard.name)
            self._on_read(1, 0)
            if found.size != shard.num_bytes:
                raise DamagedCorpusError(
                    f"{shard.path} has {found.size} bytes, expected {shard.num_bytes}", hint=RESTORE
                )
            version = self._versions.setdefault(shard.name, found.version)
        return version


def _problem(shard: ShardFile, error: OSError) -> CorpusError:
    """What the failure of a read says about a shard."""
    if isinstance(error, FileNotFoundError):
        return DamagedCorpusError(f"{shard.path} is missing", hint=RESTORE)
    if error.errno == errno.ESTALE:
        return DamagedCorpusError(
            f"{shard.path} was replaced under the running job",
            hint="start the job again from its last checkpoint; 'tokshard verify' tells whether the shard is the same "
            "as before",
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return CorpusError(
            f"{shard.path} cannot be opened: {error.strerror}", hint="raise the limit of open files: 'ulimit -n'"
        )
    if error.errno == errno.ENODATA:
        return DamagedCorpusError(f"{shard.path}: {error.strerror}: it was cut under the running job", hint=RESTORE)
    return DamagedCorpusError(f"{shard.path} cannot be read: {error.strerror}", hint=RESTORE)


def joined_ranges(places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The first byte and the length of ranges that cover some others, ascending, with no short gap between two."""
    found: list[tuple[int, int]] = []
    for position, length in sorted(places):
        if found and position <= sum(found[-1]) + _GAP_BYTES:
            start, known = found[-1]
            found[-1] = start, max(known, position + length - start)
        else:
            found.append((position, length))
    return found


def _cut_out(
    places: Sequence[tuple[int, int]], joined: Sequence[tuple[int, int]], parts: Sequence[bytes]
) -> Iterator[bytes]:
    starts = [start for start, _ in joined]
    for position, length in places:
        part = bisect_right(starts, position) - 1
        within = position - starts[part]
        yield parts[part][within : within + length]
