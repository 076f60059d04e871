"""Holding a name alone in an object store: a small object that its holder replaces every few seconds."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import msgspec

from tokshard.errors import UNDECODABLE, StoreError, TokshardError
from tokshard.forking import decodable
from tokshard.store.bucket import Bucket, Tag
from tokshard.store.failures import CONDITIONS
from tokshard.store.requests import LOST

_BEATS = 6
"""Renewals in the time that a lease lasts without one."""

_TRIES = 5


@decodable
class LeaseRecord(msgspec.Struct, kw_only=True, frozen=True):
    """The content of the object.

    Args:
        holder: for messages.
        since: the time it was taken, by the holder's clock.
        seconds: from its last beat until the lease ends.
        token: unique to this lease.
        machine, process: the process that holds it, where it can be told apart from all others; else empty.
        beat: counts the renewals.
    """

    holder: str
    since: str
    seconds: Annotated[float, msgspec.Meta(gt=0)]
    token: str
    machine: str
    process: Annotated[str, msgspec.Meta(pattern=r"^(\d{1,9}:\d{0,20})?$")]
    beat: int


@dataclass(frozen=True, slots=True)
class _Found:
    record: LeaseRecord
    tag: Tag
    age: float


@contextlib.contextmanager
def hold(bucket: Bucket, key: str, holder: str) -> Iterator[bool]:
    """As `Store.hold`; the error says who holds it, since when, and when that ends.

    A lease ends some time after its last renewal; at once, if its holder was a process of this machine. A holder that
    cannot renew it in that time, or finds another one in its place, has lost it. The main thread is then interrupted
    as by Ctrl-C, if it is the holder. The context and every later put through `bucket` end in a `StoreError`.

    Raises:
        StoreError: the store knows no conditional writes, or the lease was lost.
    """
    record = LeaseRecord(
        holder=holder,
        since=datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        seconds=bucket.options.lease_seconds,
        token=secrets.token_hex(8),
        machine=_machine(),
        process=_process(os.getpid()),
        beat=0,
    )
    tag = _take(bucket, key, record)
    try:
        _prove(bucket, key, record, tag)
        with _renewed(bucket, key, record, tag):
            yield True
    except BaseException as error:
        if (problem := bucket.requests.lost()) is None:
            with contextlib.suppress(TokshardError, OSError):  # the first error says more; a lease ends by itself
                _release(bucket, key, record)
        elif not isinstance(error, StoreError):
            raise StoreError(problem, hint=LOST) from error
        raise
    else:
        if bucket.requests.lost() is None:
            _release(bucket, key, record)
    finally:
        bucket.requests.leases.pop(key, None)


def holder_of(bucket: Bucket, key: str) -> str | None:
    """As `Store.holder`."""
    try:
        found = _find(bucket, key)
    except BlockingIOError:
        return "an unknown process"
    if found is None or _is_dead(found.record) or found.age > found.record.seconds:
        return None
    return found.record.holder


def _take(bucket: Bucket, key: str, record: LeaseRecord) -> Tag:
    tag: Tag | None = None
    for _ in range(_TRIES):
        try:
            return _put(bucket, key, record, tag)
        except FileExistsError:
            found = _find(bucket, key)
            tag = None if found is None else _tag_of_dead(bucket, key, found)
        except FileNotFoundError:
            if tag is None:  # then no dead holder left it
                raise
            tag = None
    raise BlockingIOError(errno.EAGAIN, "other processes keep taking and releasing it", bucket.where(key))


def _put(bucket: Bucket, key: str, record: LeaseRecord, tag: Tag | None, ended: threading.Event | None = None) -> Tag:
    tag, since = bucket.put_if(key, msgspec.json.encode(record), tag, abandoned=ended)
    bucket.requests.leases[key] = since + record.seconds
    return tag


def _prove(bucket: Bucket, key: str, record: LeaseRecord, tag: Tag) -> None:
    """Have the store refuse to create the object again, and to replace other content than it has.

    Otherwise two processes could hold the lease. Both requests put the content that is there already. A store may look
    first and write then. Once it has answered both, it has written what another process put at the same moment.

    Raises:
        StoreError: the store knows no conditional writes.
        BlockingIOError: another process has it, too.
    """
    content = msgspec.json.encode(record)
    other = {name: f"{value[:-1]}0{value[-1:]}" for name, value in tag.items()}  # a tag in quotes, or a number
    for condition, wrong in (("If-None-Match", None), ("If-Match", other)):
        if not bucket.refuses(key, content, wrong):
            raise StoreError(
                f"{bucket.address.root} cannot be built into: its store ignores {condition}, so that two builds could "
                "write to one place at once",
                hint=CONDITIONS,
            )
    found = _find(bucket, key)
    if found is None or found.record.token != record.token:
        raise BlockingIOError(errno.EAGAIN, "another process took it at the same moment", bucket.where(key))


def _tag_of_dead(bucket: Bucket, key: str, found: _Found) -> Tag:
    """The tag of the content that a dead holder left.

    Clocks may differ, so a lease that seems old is watched for two beats, in which its holder would renew it.
    """
    record = found.record
    if _is_dead(record):
        return found.tag
    if found.age > record.seconds:
        time.sleep(2 * record.seconds / _BEATS)
        later = _find(bucket, key)
        if later is None or later.tag == found.tag:
            return found.tag
        found = later
    age = max(0.0, found.age)
    raise BlockingIOError(
        errno.EAGAIN,
        f"{record.holder} has held it since {record.since} and was last heard of {age:.0f} s ago; if that process is "
        f"gone, it can be taken over in {max(1.0, record.seconds - age):.0f} s",
        bucket.where(key),
    )


@contextlib.contextmanager
def _renewed(bucket: Bucket, key: str, record: LeaseRecord, tag: Tag) -> Iterator[None]:
    """Renew the lease until the context ends, and interrupt this thread if it is lost before."""
    ended = threading.Event()
    threads = [
        threading.Thread(target=_renew, args=(bucket, key, record, tag, ended), daemon=True),
        threading.Thread(target=_watch, args=(bucket, ended, threading.current_thread()), daemon=True),
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _renew(bucket: Bucket, key: str, record: LeaseRecord, tag: Tag, ended: threading.Event) -> None:
    while not ended.wait(record.seconds / _BEATS):
        record = msgspec.structs.replace(record, beat=record.beat + 1)
        # whatever goes wrong, the next beat tries again and finds out who holds the lease, until it is late
        with contextlib.suppress(TokshardError, OSError):
            try:
                tag = _put(bucket, key, record, tag, ended)
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


def _watch(bucket: Bucket, ended: threading.Event, holder: threading.Thread) -> None:
    """Interrupt the thread that holds a lease when it is lost: it may wait for processes that write on."""
    while not ended.wait(0.5):
        if bucket.requests.lost() is not None:
            handled = [number for number in (signal.SIGINT, signal.SIGTERM) if callable(signal.getsignal(number))]
            if handled and holder is threading.main_thread() and holder.ident is not None:
                signal.pthread_kill(holder.ident, handled[0])
            return


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
    except UNDECODABLE:
        words = f"{bucket.where(key)} was not written by tokshard: remove it if nobody builds there"
        raise BlockingIOError(errno.EAGAIN, words, bucket.where(key)) from None


def _is_dead(record: LeaseRecord) -> bool:
    """Whether the holder was a process of this machine that is gone."""
    pid = record.process.partition(":")[0]
    if not pid or record.machine != _machine() or record.process == _process(int(pid)):
        return False
    try:
        os.kill(int(pid), 0)  # sends nothing
    except OSError as error:
        return not isinstance(error, PermissionError)  # of another user, whose processes /proc may hide
    return True


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
