"""What only a store in a directory promises: durability, links, file systems without locks, attempts that end."""

from __future__ import annotations

import errno
import fcntl
import os
import re

import pytest

from tokshard.store import open_store


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path / "store")


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
    late = first.spool("a")
    store.attempt("work/partial", "two").take_over()
    with pytest.raises(FileNotFoundError):
        late.put()
    with pytest.raises(FileNotFoundError):
        first.put("a", b"")
    assert sorted(os.listdir(store.where("work"))) == ["partial"]
    assert os.listdir(store.where("work/partial")) == ["two"]


def test_links_are_deleted_and_not_followed(store, tmp_path):
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "data").write_text("theirs")
    store.put("work/a", b"")
    os.symlink(tmp_path / "theirs", store.where("work/link"))
    assert store.obstacle("work/link") == "a link"
    assert sorted(entry.name for entry in store.list("work/")) == ["work/a", "work/link"]
    store.delete_below("work")
    assert list(store.names()) == []
    assert (tmp_path / "theirs" / "data").read_text() == "theirs"


def test_a_location_may_itself_be_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = open_store(tmp_path / "link")
    store.put("a", b"x")
    assert store.obstacle("") is None
    assert (tmp_path / "real" / "a").read_bytes() == b"x"


def test_a_location_that_is_a_file_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    store = open_store(tmp_path / "file")
    assert store.obstacle("") == "a file"
    with pytest.raises(NotADirectoryError):
        store.put("a", b"")


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK])
def test_where_there_are_no_locks_a_lease_says_that_it_keeps_nobody_out(store, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    with store.lease("lock", "one") as is_alone:
        assert not is_alone
        assert store.lease_holder("lock") is None


def test_a_disk_that_is_full_leaves_nothing(store, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        store.put("a", b"x")
    assert list(store.names()) == []
