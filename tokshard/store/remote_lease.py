"""Holding a name alone in an object store: a small object that its holder replaces every few seconds."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from tokshard.errors import StoreError
from tokshard.store.bucket import Bucket, Tag

_BEATS = 6
"""Renewals in the time after which a lease without any would end."""

_TRIES = 5


class LeaseRecord(msgspec.Struct, kw_only=True, frozen=True):
    """The content of the object.

    Args:
        holder: for messages.
        since: when it was taken, by the clock of the holder.
        seconds: from its last beat until the lease ends.
        token: of this lease and no other.
        machine, process: the process that holds it, where it can be told apart from all others; else empty.
        beat: counts the renewals.
    """

    holder: str
    since: str
    seconds: float
    token: str
    machine: str
    process: str
    beat: int


@dataclass(slots=True)
class _Found:
    record: LeaseRecord
    tag: Tag
    age: float


@dataclass(frozen=True, slots=True)
class RemoteLease:
    """A lease that ends some time after its holder was last heard of; at once, if that was a process of this machine.

    Should another process take it over (because the holder was stopped for longer than that), every later put of the
    holder through `bucket` fails.
    """

    bucket: Bucket
    key: str

    @contextlib.contextmanager
    def hold(self, holder: str) -> Iterator[bool]:
        """As `tokshard.store.base.Lease`; the error says who holds it, since when, and when that ends."""
        record = LeaseRecord(
            holder=holder,
            since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
            seconds=self.bucket.options.lease_seconds,
            token=secrets.token_hex(8),
            machine=_machine(),
            process=_process(os.getpid()),
            beat=0,
        )
        tag = _take(self.bucket, self.key, record)
        ended = threading.Event()
        renewal = threading.Thread(target=_renew, args=(self.bucket, self.key, record, tag, ended), daemon=True)
        renewal.start()
        try:
            yield True
        finally:
            ended.set()
            renewal.join()
            if self.bucket.requests.fence is None:
                _release(self.bucket, self.key, record)

    def holder(self) -> str | None:
        found = _find(self.bucket, self.key)
        if found is None or _is_dead(found.record) or found.age > found.record.seconds:
            return None
        return found.record.holder


def _take(bucket: Bucket, key: str, record: LeaseRecord) -> Tag:
    tag: Tag | None = None
    for _ in range(_TRIES):
        try:
            return bucket.put_if(key, msgspec.json.encode(record), tag)
        except FileExistsError:
            found = _find(bucket, key)
            tag = None if found is None else _tag_of_dead(bucket, key, found)
    raise BlockingIOError(errno.EAGAIN, "other processes keep taking and releasing it", bucket.where(key))


def _tag_of_dead(bucket: Bucket, key: str, found: _Found) -> Tag:
    """What names the content that a dead holder left.

    Clocks may differ, so a lease that looks old is watched for two beats: its holder would renew it in that time.
    """
    record = found.record
    if _is_dead(record):
        return found.tag
    if found.age > record.seconds:
        time.sleep(2 * record.seconds / _BEATS)
        now = _find(bucket, key)
        if now is None or now.tag == found.tag:
            return found.tag
        found = now
    age = max(0.0, found.age)
    raise BlockingIOError(
        errno.EAGAIN,
        f"{record.holder} has held it since {record.since} and was last heard of {age:.0f} s ago; if that process is "
        f"gone, it can be taken over in {max(1.0, record.seconds - age):.0f} s",
        bucket.where(key),
    )


def _renew(bucket: Bucket, key: str, record: LeaseRecord, tag: Tag, ended: threading.Event) -> None:
    while not ended.wait(record.seconds / _BEATS):
        record = msgspec.structs.replace(record, beat=record.beat + 1)
        try:
            tag = bucket.put_if(key, msgspec.json.encode(record), tag, abandoned=ended)
        except FileExistsError:
            found = _find(bucket, key)
            if found is not None and found.record.token == record.token:
                tag = found.tag  # the answer to an earlier beat was lost
            elif found is not None:
                bucket.requests.fence = (
                    f"{bucket.where(key)} was taken over by {found.record.holder} at {found.record.since}: this "
                    f"process had not been heard of for {record.seconds:.0f} s"
                )
                return
        except FileNotFoundError:  # deleted by its holder
            return
        except StoreError:  # patience has ended: the next beat tries again, and finds out who holds the lease
            continue


def _release(bucket: Bucket, key: str, record: LeaseRecord) -> None:
    found = _find(bucket, key)
    if found is not None and found.record.token == record.token:
        bucket.delete([key])


def _find(bucket: Bucket, key: str) -> _Found | None:
    try:
        content, tag, age = bucket.tagged(key)
    except FileNotFoundError:
        return None
    try:
        return _Found(msgspec.json.decode(content, type=LeaseRecord), tag, age)
    except msgspec.MsgspecError:
        raise BlockingIOError(errno.EAGAIN, "the object is not a lease", bucket.where(key)) from None


def _is_dead(record: LeaseRecord) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    pid = record.process.partition(":")[0]
    return bool(record.machine) and record.machine == _machine() and record.process != _process(int(pid))


def _machine() -> str:
    """This boot of this machine, and its process ids as this process sees them; empty where that is not known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _process(pid: int) -> str:
    """A process, by its id and the time that it began: ids are used again."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return f"{pid}:"
    # a zombie is dead, although it still has its id
    return f"{pid}:" if fields[0] == b"Z" else f"{pid}:{int(fields[19])}"
