"""What only a store in a directory promises: durability, links, file systems without locks, attempts that end."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re

import pytest

from tokshard.store import NotRegularFileError, files_below, locate, obstacle, open_store, real_location


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


@pytest.fixture
def theirs(tmp_path):
    """A folder with a file that belong to somebody else."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("theirs")
    return tmp_path / "theirs"


@pytest.mark.parametrize("use", ["stat", "get", "open", "list", "names"])
def test_a_path_that_can_not_be_is_an_error_of_a_file(store, use):
    for name in ("a\0b", "a\ud800b"):
        with pytest.raises(OSError, match="no path has a"):
            list(getattr(store, use)(name))
    with pytest.raises(OSError, match="no path has a zero byte"):
        open_store("a\0b").put("name", b"")


def test_a_file_is_synced_before_it_is_renamed_and_its_directory_afterwards(store, monkeypatch):
    steps = []
    fsync, replace = os.fsync, os.replace

    def stepping_fsync(descriptor):
        steps.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def stepping_replace(before, after):
        steps.append(("replace", before))
        replace(before, after)

    store.put("a/b", b"")
    monkeypatch.setattr(os, "fsync", stepping_fsync)
    monkeypatch.setattr(os, "replace", stepping_replace)
    store.put("a/b", b"x")
    partial = steps[0][1]
    assert steps == [("fsync", partial), ("replace", partial), ("fsync", store.where("a"))]
    assert re.fullmatch(rf"\.b\.[^.]*-{os.getpid()}-[0-9a-f]+\.partial", os.path.basename(partial))


def test_an_attempt_that_another_took_over_from_puts_nothing_and_opens_nothing(store):
    first = store.attempt("work/partial", "one")
    first.take_over()
    late = first.store.spool("a")
    store.attempt("work/partial", "two").take_over()
    with pytest.raises(FileNotFoundError):
        late.put()
    with pytest.raises(FileNotFoundError):
        first.store.put("a", b"")
    assert sorted(os.listdir(store.where("work"))) == ["partial"]
    assert os.listdir(store.where("work/partial")) == ["two"]


def test_links_are_deleted_and_not_followed(store, theirs):
    store.put("work/a", b"")
    os.symlink(theirs, store.where("work/link"))
    assert obstacle(store, "work/link") == "a link"
    assert sorted(files_below(store, "work")) == ["work/a", "work/link"]
    os.makedirs(store.where("work/empty/deep"))
    store.delete("work/link/", "work/")
    assert list(store.names()) == []
    assert (theirs / "data").read_text() == "theirs"


def test_what_stands_in_the_place_of_a_folder_is_told_and_a_location_may_itself_be_a_link(store, theirs, tmp_path):
    for name in ("a", "b/c"):
        store.put(name, b"")
    assert (obstacle(store, "a"), obstacle(store, "b"), obstacle(store, "c")) == ("a file", None, None)
    in_a_file = open_store(theirs / "data")
    assert obstacle(in_a_file, "") == "a file"
    with pytest.raises(NotADirectoryError):
        in_a_file.put("a", b"")
    (tmp_path / "link").symlink_to(theirs)
    linked = open_store(tmp_path / "link")
    linked.put("a", b"x")
    assert obstacle(linked, "") is None
    assert (theirs / "a").read_bytes() == b"x"


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_there_are_no_locks_a_lease_says_that_it_keeps_nobody_out(store, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.hold("lock", "one") as is_alone:
        assert not is_alone
        assert store.holder("lock") is None


def test_a_disk_that_is_full_leaves_nothing(store, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.put("a", b"x")
    assert list(store.names()) == []


@pytest.mark.parametrize("code", [errno.EINVAL, errno.EIO])
def test_a_folder_that_cannot_be_synced_is_an_error_unless_its_file_system_syncs_none(store, monkeypatch, code):
    fsync = os.fsync

    def of_files_alone(descriptor):
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(code, os.strerror(code))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", of_files_alone)
    fails = pytest.raises(OSError, match="Input/output error") if code == errno.EIO else contextlib.nullcontext()
    with fails:
        store.put("a", b"x")


@pytest.mark.timeout(20)
def test_a_short_read_is_continued(store, monkeypatch):
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, start: pread(file, min(length, 3), start))
    store.put("a", b"all of these bytes")
    assert list(store.read("a", [(4, 10)])) == [b"of these b"]


def test_links_to_folders_are_followed_when_a_folder_is_listed_unless_they_lead_back(store, theirs):
    (theirs / "back").symlink_to(store.location)
    store.put("a/b", b"")
    os.symlink(theirs, store.where("a/link"))
    os.symlink("nowhere", store.where("a/nothing"))
    os.symlink("b", store.where("a/other"))
    found = {entry.name: entry for entry in store.list("a")}
    assert list(found) == ["a/b", "a/link/", "a/nothing", "a/other"]
    assert found["a/nothing"].version == ""
    assert (found["a/b"].is_link, found["a/other"].is_link) == (False, True)
    assert found["a/b"].identity == found["a/other"].identity
    assert [entry.name for entry in store.list("a/link")] == ["a/link/data"]


def test_folders_and_pipes_are_told_from_files(store):
    store.put("a/b", b"")
    os.mkfifo(store.where("pipe"))
    with pytest.raises(IsADirectoryError):
        store.stat("a")
    with pytest.raises(NotRegularFileError):
        store.stat("pipe")
    assert {entry.name: entry.version for entry in store.list()} == {"a/": "", "pipe": ""}


@pytest.mark.parametrize(
    ("time_ns", "expected"),
    [
        (1_700_000_000_123_456_789, "2023-11-14T22:13:20.123456789Z/1"),
        (5, "1970-01-01T00:00:00.000000005Z/1"),
        (-1, "1969-12-31T23:59:59.999999999Z/1"),
    ],
)
def test_a_version_shows_when_the_file_was_modified(store, time_ns, expected):
    store.put("a", b"x")
    os.utime(store.where("a"), ns=(0, time_ns))
    assert store.stat("a").version == expected


def test_a_path_is_located_by_its_directory_and_the_working_directory_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for location, expected in {
        "a": (".", "a"),
        "a/b": ("a", "b"),
        "/a": ("/", "a"),
        ".": (str(tmp_path), "here"),
    }.items():
        store, name = locate(location)
        assert (store.location, name) == expected
    (tmp_path / "link").symlink_to("here")
    assert real_location(tmp_path / "link") == real_location(".") == os.path.realpath(tmp_path / "here")
