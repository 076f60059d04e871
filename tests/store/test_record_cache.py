"""The cache on disk: what was kept is read, what is damaged, foreign or torn is not there, and the limit holds."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tokshard.store import record_cache
from tokshard.store.record_cache import RecordCache, RecordFile

SIZE = 4_096


def file_of(content: str, num_records: int = 10, last_bytes: int = 100) -> RecordFile:
    return RecordFile(content=content * 64, num_records=num_records, record_bytes=SIZE, last_bytes=last_bytes)


def record(file: RecordFile, number: int) -> bytes:
    size = file.last_bytes if number + 1 == file.num_records else SIZE
    return bytes([ord(file.content[0]), number]) * (size // 2)


def records(file: RecordFile, first: int, stop: int) -> list[bytes]:
    return [record(file, number) for number in range(first, stop)]


def kept_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def allocated(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in kept_files(directory))


@pytest.fixture
def cache(tmp_path: Path) -> RecordCache:
    return RecordCache(str(tmp_path / "cache"), 1 << 30)


def test_what_was_kept_is_there_for_every_process_and_nothing_else(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(record_cache, "_FILE_RECORDS", 4)
    one, other = file_of("a"), file_of("b")
    assert cache.read(one, 0, 10) == [None] * 10
    cache.write(one, 2, records(one, 2, 5))
    cache.write(one, 9, records(one, 9, 10))
    again = RecordCache(str(tmp_path / "cache"), 1 << 30)
    assert again.read(one, 0, 10) == [None, None, *records(one, 2, 5), *[None] * 4, record(one, 9)]
    assert again.read(other, 0, 10) == [None] * 10
    cache.write(one, 2, records(one, 2, 10))
    assert len(kept_files(tmp_path)) == 3
    assert cache.read(one, 0, 10) == [None, None, *records(one, 2, 10)]


BLOCK = SIZE + 8
"""Bytes of a record and its checksum."""


def flip(path: Path, content: bytes) -> None:
    at = 3 * BLOCK + 17
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])


def replace(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink()
    make(path)


ALL = set(range(10))


@pytest.mark.timeout(20)  # a pipe is not waited for
@pytest.mark.parametrize(
    ("change", "wrong", "is_written_again"),
    [
        (flip, {3}, True),
        (lambda path, _: os.truncate(path, 4 * BLOCK + 5), set(range(4, 10)), True),
        (lambda path, _: os.truncate(path, 0), ALL, True),
        (lambda path, content: path.write_bytes(bytes(len(content))), ALL, True),
        (lambda path, content: path.write_bytes(content[BLOCK:]), ALL, True),
        # these stay: the cache did not make them
        (lambda path, _: replace(path, Path.mkdir), ALL, False),
        (lambda path, _: replace(path, lambda path: path.symlink_to("/etc/hostname")), ALL, False),
        (lambda path, _: replace(path, os.mkfifo), ALL, False),
    ],
    ids=["flipped", "truncated", "empty", "zeros", "moved", "folder", "link", "pipe"],
)
def test_what_is_damaged_is_not_there_and_is_written_again(tmp_path, cache, change, wrong, is_written_again):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 10))
    (path,) = kept_files(tmp_path)
    change(path, path.read_bytes())
    found = cache.read(one, 0, 10)
    assert {number for number in range(10) if found[number] is None} == wrong
    assert [each for each in found if each is not None] == [record(one, n) for n in range(10) if n not in wrong]
    cache.write(one, 0, records(one, 0, 10))
    assert cache.read(one, 0, 10) == (records(one, 0, 10) if is_written_again else [None] * 10)


def test_the_records_of_another_file_are_not_there(tmp_path, cache):
    one, other = file_of("a"), file_of("b")
    for file in (one, other):
        cache.write(file, 0, records(file, 0, 10))
    path, foreign = sorted(kept_files(tmp_path))
    path.write_bytes(foreign.read_bytes())
    assert cache.read(one, 0, 10) == [None] * 10


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path):
    cache = RecordCache(str(tmp_path / "cache"), 40 * SIZE)
    files = [file_of(character, num_records=8) for character in "123456789abcdef"]
    (tmp_path / "cache" / "notes.txt").write_text("not of the cache")
    (tmp_path / "theirs").mkdir()
    theirs = tmp_path / "theirs" / f"{'0' * 64}-{SIZE}-0"
    theirs.write_bytes(bytes(SIZE))
    os.utime(theirs, (1, 1))
    (tmp_path / "cache" / "00").symlink_to("../theirs")
    for age, file in enumerate(files):
        cache.write(file, 0, records(file, 0, 8))
        assert allocated(tmp_path / "cache") <= 42 * SIZE + 10 * SIZE
        assert len(kept_files(tmp_path / "cache")) > min(age + 1, 3)  # no more is dropped than has to be; and the notes
        for path in kept_files(tmp_path / "cache"):  # a clock that ticks
            if path.name.startswith(file.content):
                os.utime(path, (1e9 + age, 1e9 + age))
    assert cache.read(files[-1], 0, 8) == records(files[-1], 0, 8)
    assert cache.read(files[0], 0, 8) == [None] * 8
    assert (tmp_path / "cache" / "notes.txt").read_text() == "not of the cache"
    assert theirs.exists()


def test_a_file_that_is_read_counts_as_used(tmp_path, cache):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 8))
    (path,) = kept_files(tmp_path)
    os.utime(path, (1e9, 1e9))
    cache.read(one, 0, 1)
    assert time.time() - path.stat().st_mtime < 100


def test_what_another_user_has_kept_is_there_though_only_its_owner_may_mark_it_as_used(cache, monkeypatch):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 8))

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "utime", refuse)
    assert cache.read(one, 0, 8) == records(one, 0, 8)


def test_nothing_is_read_or_written_through_a_linked_folder(tmp_path, cache):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 10))
    (tmp_path / "cache" / "aa").rename(tmp_path / "elsewhere")
    (tmp_path / "cache" / "aa").symlink_to(tmp_path / "elsewhere")
    before = [path.read_bytes() for path in kept_files(tmp_path / "elsewhere")]
    assert cache.read(one, 0, 10) == [None] * 10
    cache.write(one, 0, records(one, 2, 5))
    assert [path.read_bytes() for path in kept_files(tmp_path / "elsewhere")] == before


def test_a_hole_is_not_there_even_where_the_checksum_of_zeros_is_zero(cache, monkeypatch):
    monkeypatch.setattr(record_cache.zlib, "crc32", lambda *_: 0)  # by chance, once in 2**32 records
    one = file_of("a")
    cache.write(one, 3, records(one, 3, 4))
    assert [found is not None for found in cache.read(one, 0, 10)] == [number == 3 for number in range(10)]


def test_each_process_counts_at_its_first_write_however_little_it_writes(tmp_path, cache):
    for content in "0123456789":
        one = file_of(content, num_records=25, last_bytes=SIZE)
        cache.write(one, 0, records(one, 0, 25))
    limit = allocated(tmp_path) // 2
    one = file_of("f")
    RecordCache(str(tmp_path / "cache"), limit).write(one, 0, records(one, 0, 1))
    assert 0.01 * limit > SIZE
    assert allocated(tmp_path) <= limit


def test_a_disk_that_fails_makes_no_error(tmp_path, cache, monkeypatch):
    one = file_of("a")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    cache.write(one, 0, records(one, 0, 8))
    assert cache.read(one, 0, 8) == [None] * 8
