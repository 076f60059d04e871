"""The cache on disk: what was kept is read, what is damaged, foreign or torn is not there, and the limit holds."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tokshard.errors import UsageError
from tokshard.store import record_cache
from tokshard.store.record_cache import RecordCache, RecordFile

SIZE = 4_096


def file_of(content: str, num_records: int = 10, last_bytes: int = 100) -> RecordFile:
    return RecordFile(content=content * 64, num_records=num_records, record_bytes=SIZE, last_bytes=last_bytes)


def record(file: RecordFile, number: int) -> bytes:
    return bytes([ord(file.content[0]), number]) * (file.bytes_of(number) // 2)


def records(file: RecordFile, first: int, stop: int) -> list[bytes]:
    return [record(file, number) for number in range(first, stop)]


def kept_files(directory: Path) -> list[Path]:
    return [path for path in directory.rglob("*") if path.is_file()]


def allocated(directory: Path) -> int:
    return sum(512 * path.stat().st_blocks for path in kept_files(directory))


@pytest.fixture
def cache(tmp_path: Path) -> RecordCache:
    return RecordCache(str(tmp_path / "cache"), 1 << 30)


def test_what_was_kept_is_there_for_every_process_and_nothing_else(tmp_path, cache):
    one, other = file_of("a"), file_of("b")
    assert cache.read(one, 0, 10) == [None] * 10
    cache.write(one, 2, records(one, 2, 5))
    cache.write(one, 9, records(one, 9, 10))
    again = RecordCache(str(tmp_path / "cache"), 1 << 30)
    assert again.read(one, 0, 10) == [None, None, *records(one, 2, 5), *[None] * 4, record(one, 9)]
    assert again.read(other, 0, 10) == [None] * 10


def test_records_on_both_sides_of_the_end_of_a_file_are_kept(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(record_cache, "_FILE_RECORDS", 4)
    one = file_of("a")
    cache.write(one, 2, records(one, 2, 10))
    assert len(kept_files(tmp_path)) == 3
    assert cache.read(one, 0, 10) == [None, None, *records(one, 2, 10)]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "zeros", "moved", "foreign", "folder", "link"])
def test_what_is_damaged_is_not_there_and_is_written_again(tmp_path, cache, damage):
    one, other = file_of("a"), file_of("b")
    cache.write(one, 0, records(one, 0, 10))
    (path,) = kept_files(tmp_path)
    content = bytearray(path.read_bytes())
    wrong = set(range(10))
    if damage == "flipped":
        content[3 * (SIZE + 8) + 17] ^= 1
        path.write_bytes(content)
        wrong = {3}
    elif damage == "truncated":
        os.truncate(path, 4 * (SIZE + 8) + 5)
        wrong = set(range(4, 10))
    elif damage == "empty":
        os.truncate(path, 0)
    elif damage == "zeros":
        path.write_bytes(bytes(len(content)))
    elif damage == "moved":
        path.write_bytes(content[SIZE + 8 :])
    elif damage == "foreign":
        cache.write(other, 0, records(other, 0, 10))
        (foreign,) = set(kept_files(tmp_path)) - {path}
        path.write_bytes(foreign.read_bytes())
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
        else:
            path.symlink_to("/etc/hostname")
    found = cache.read(one, 0, 10)
    assert {number for number in range(10) if found[number] is None} == wrong
    assert [each for each in found if each is not None] == [record(one, n) for n in range(10) if n not in wrong]
    cache.write(one, 0, records(one, 0, 10))
    if damage not in ("folder", "link"):  # those stay: the cache did not make them
        assert cache.read(one, 0, 10) == records(one, 0, 10)


def test_the_limit_holds_and_what_was_used_last_stays(tmp_path):
    cache = RecordCache(str(tmp_path / "cache"), 40 * SIZE)
    files = [file_of(character, num_records=8) for character in "0123456789abcdef"]
    (tmp_path / "cache" / "notes.txt").write_text("not of the cache")
    for age, file in enumerate(files):
        cache.write(file, 0, records(file, 0, 8))
        assert allocated(tmp_path / "cache") <= 42 * SIZE + 10 * SIZE
        for path in kept_files(tmp_path / "cache"):  # a clock that ticks
            if path.name.startswith(file.content):
                os.utime(path, (1e9 + age, 1e9 + age))
    assert cache.read(files[-1], 0, 8) == records(files[-1], 0, 8)
    assert cache.read(files[0], 0, 8) == [None] * 8
    assert (tmp_path / "cache" / "notes.txt").read_text() == "not of the cache"


def test_a_file_that_is_read_counts_as_used(tmp_path, cache):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 8))
    (path,) = kept_files(tmp_path)
    os.utime(path, (1e9, 1e9))
    cache.read(one, 0, 1)
    assert time.time() - path.stat().st_mtime < 100


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_file_is_not_waited_for(tmp_path, cache):
    one = file_of("a")
    cache.write(one, 0, records(one, 0, 10))
    (path,) = kept_files(tmp_path / "cache")
    path.unlink()
    os.mkfifo(path)
    assert cache.read(one, 0, 10) == [None] * 10
    cache.write(one, 0, records(one, 0, 10))
    assert cache.read(one, 0, 10) == [None] * 10


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


def test_a_directory_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"file cannot be a cache: File exists"):
        RecordCache(str(tmp_path / "file"), 1 << 30)


def test_a_disk_that_fails_makes_no_error(tmp_path, cache, monkeypatch):
    one = file_of("a")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", fail)
    cache.write(one, 0, records(one, 0, 8))
    assert cache.read(one, 0, 8) == [None] * 8


WRITER = """
import sys
from tests.store.test_record_cache import file_of, records
from tokshard.store.record_cache import RecordCache
cache = RecordCache(sys.argv[1], 1 << 30)
print("ready", flush=True)
while True:
    for content in "0123456789abcdef":
        file = file_of(content, num_records=64, last_bytes=4096)
        for first in range(0, 64, 8):
            cache.write(file, first, records(file, first, first + 8))
"""


@pytest.mark.slow
def test_processes_that_are_killed_in_the_middle_leave_nothing_wrong(tmp_path):
    directory = str(tmp_path / "cache")
    for attempt in range(3):
        writers = [
            subprocess.Popen(
                [sys.executable, "-c", WRITER, directory], stdout=subprocess.PIPE, cwd=Path(__file__).parents[2]
            )
            for _ in range(2)
        ]
        for writer in writers:
            assert writer.stdout is not None
            writer.stdout.readline()
        time.sleep(0.05 + 0.1 * attempt + secrets.randbelow(100) / 1000)
        for writer in writers:
            os.kill(writer.pid, signal.SIGKILL)
            writer.wait()
            assert writer.stdout is not None
            writer.stdout.close()
        cache = RecordCache(directory, 1 << 30)
        num_kept = 0
        for content in "0123456789abcdef":
            file = file_of(content, num_records=64, last_bytes=4096)
            for number, found in enumerate(cache.read(file, 0, 64)):
                assert found in (None, record(file, number))
                num_kept += found is not None
        assert num_kept
