"""What every store can do. A second implementation is added to `STORES` and has to pass the same tests."""

from __future__ import annotations

import multiprocessing
import pickle
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.store.memory import SCHEME, MemoryStore
from tokshard.errors import UsageError
from tokshard.store import STORES_BY_SCHEME, Store, files_below, local_file, locate, open_store, written

STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "posix": lambda request: open_store(request.getfixturevalue("tmp_path") / "store"),
    "memory": lambda request: open_store(f"{SCHEME}:/{request.getfixturevalue('tmp_path')}/store"),
    "moto": lambda request: open_store(request.getfixturevalue("moto")),
    "seaweedfs": lambda request: open_store(request.getfixturevalue("seaweedfs")),
}
"""From the request of a test to an empty store."""

S3 = [pytest.param(name, marks=pytest.mark.remote) for name in ("moto", "seaweedfs")]


@pytest.fixture(params=["posix", "memory", *S3])
def store(request, monkeypatch) -> Store:
    monkeypatch.setitem(STORES_BY_SCHEME, SCHEME, MemoryStore)
    return STORES[request.param](request)


@pytest.fixture(params=["posix", *S3])
def shared_store(request) -> Store:
    """Of those that several processes share."""
    return STORES[request.param](request)


def names_of(store: Store) -> list[str]:
    return sorted(files_below(store, ""))


def test_a_store_that_nothing_was_put_into_has_no_files(store):
    assert names_of(store) == list(store.list()) == list(store.list("a/b")) == []


def test_what_was_put_is_there_whole(store):
    store.put("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    with store.open("a/b.bin") as file:
        file.seek(4)
        assert file.read(3) == b"456"
    assert store.stat("a/b.bin").size == 10
    store.put("a/b.bin", b"")
    assert store.get("a/b.bin") == b""


def test_a_file_that_is_replaced_has_another_version(store):
    store.put("a", b"one")
    before = store.stat("a")
    assert before == store.stat("a")
    store.put("a", b"three")
    assert store.stat("a").version != before.version


def test_ranges_are_read_in_the_order_they_are_asked_for(store):
    store.put("a", bytes(range(200)))
    version = store.stat("a").version
    assert list(store.read("a", [(100, 3), (0, 1), (199, 1), (5, 0)], version=version)) == [b"def", b"\0", b"\xc7", b""]
    assert list(store.read("a", [])) == []


@pytest.mark.parametrize("wanted", [(195, 6), (200, 1), (1000, 1)])
def test_a_range_beyond_the_end_is_an_error_and_never_a_short_answer(store, wanted):
    store.put("a", bytes(200))
    with pytest.raises(OSError, match="ends"):
        store.read("a", [(0, 1), wanted])


def test_ranges_of_a_file_that_was_replaced_are_refused(store):
    store.put("a", b"one")
    before = store.stat("a").version
    store.put("a", b"other")
    with pytest.raises(OSError, match="replaced"):
        store.read("a", [(0, 1)], version=before)


def test_a_name_that_is_not_there_is_an_error_as_for_files(store):
    store.put("a/b", b"")
    for missing in ("c", "a/c", "c/d"):
        for call in (store.get, store.open, store.stat, lambda name: store.read(name, [(0, 1)])):
            with pytest.raises(FileNotFoundError):
                call(missing)
        store.delete(missing)


def test_a_folder_is_listed_in_bytewise_order_with_the_facts_of_its_files(store):
    for name in ("b", "a", "a-b", "\u00e9", "z/1", "z/\U0001f600", "z/\uffee", "z/deep/x"):
        store.put(name, name.encode())
    assert [entry.name for entry in store.list()] == ["a", "a-b", "b", "z/", "\u00e9"]
    assert [entry.name for entry in store.list("z")] == ["z/1", "z/deep/", "z/\uffee", "z/\U0001f600"]
    for entry in [*store.list(), *store.list("z")]:
        if not entry.name.endswith("/"):
            assert entry == store.stat(entry.name)
            assert entry.size == len(entry.name.encode())
    assert len({entry.identity for entry in store.list()}) == 5


def test_all_files_below_a_folder_are_found(store):
    for name in ("shard-1", "train/shard-1", "train/deep/x"):
        store.put(name, b"")
    assert names_of(store) == ["shard-1", "train/deep/x", "train/shard-1"]
    assert sorted(files_below(store, "train")) == ["train/deep/x", "train/shard-1"]
    assert list(files_below(store, "trai")) == []


def test_the_names_in_one_folder_tell_files_from_folders(store):
    for name in ("a", "b/c", "b/d/e"):
        store.put(name, b"")
    assert sorted(store.names()) == ["a", "b/"]
    assert sorted(store.names("b")) == ["c", "d/"]
    with pytest.raises(NotADirectoryError):
        store.names("a")


def test_a_store_of_a_folder_has_the_names_of_that_folder(store):
    train = store.below("train")
    train.put("a", b"x")
    assert names_of(store) == ["train/a"]
    assert names_of(train) == ["a"]
    assert store.where("train/a") == train.where("a")


def test_a_file_is_located_by_its_store_and_name(store):
    store.put("train/a", b"x")
    folder, name = locate(store.where("train/a"))
    assert (folder.get(name), name) == (b"x", "a")
    above, name = locate(folder.location)
    assert (above.get("train/a"), name) == (b"x", "train")


def test_deleted_files_are_gone_and_so_are_folders_without_files(store):
    for name in ("a/b", "a/c", "d/e/f"):
        store.put(name, b"")
    store.delete("a/b", "a/b", "d/e/f", "not there")
    assert names_of(store) == ["a/c"]
    assert list(store.names()) == ["a/"]


def test_a_folder_is_deleted_with_all_its_files(store):
    for name in ("a/1", "a/b/3", "ab", "c/d"):
        store.put(name, b"")
    store.delete("a/", "c/d/", "not there/")
    assert names_of(store) == ["ab", "c/d"]
    store.delete("c/")
    assert list(store.names()) == ["ab"]


# large files


def test_a_spooled_file_can_be_read_here_and_appears_when_it_is_put(store):
    spool = store.spool("a/b")
    spool.file.write(b"content")
    spool.file.flush()
    with open(spool.path, "rb") as file:
        assert file.read() == b"content"
    with pytest.raises(FileNotFoundError):
        store.get("a/b")
    spool.put()
    assert store.get("a/b") == b"content"
    assert names_of(store) == ["a/b"]
    spool.discard()
    assert store.get("a/b") == b"content"


def test_a_discarded_spool_leaves_nothing(store):
    spool = store.spool("b")
    spool.file.write(b"content")
    spool.discard()
    spool.discard()
    assert names_of(store) == []


def test_two_spools_of_one_name_do_not_meet(store):
    one, other = store.spool("a"), store.spool("a")
    one.file.write(b"one")
    other.file.write(b"other")
    one.put()
    assert store.get("a") == b"one"
    other.put()
    assert store.get("a") == b"other"


def test_a_file_whose_writer_fails_never_appears(store):
    def write_and_fail() -> None:
        with written(store, "a") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    store.put("a", b"before")
    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert store.get("a") == b"before"
    assert names_of(store) == ["a"]
    with written(store, "a") as file:
        file.write(b"whole")
    assert store.get("a") == b"whole"


def test_a_file_can_be_read_by_its_path_on_this_machine(store):
    store.put("a", b"content")
    with local_file(store, "a") as path:
        assert Path(path).read_bytes() == b"content"


# attempts


def test_an_attempt_puts_files_and_leaves_no_other(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    attempt.store.put("a", b"x")
    attempt.store.below("train").put("shard", b"y")
    attempt.end()
    assert names_of(store) == ["a", "train/shard"]


def test_what_an_attempt_left_behind_goes_when_the_next_takes_over(store):
    first = store.attempt("work/partial", "one")
    first.take_over()
    first.store.spool("a").file.close()
    store.attempt("work/partial", "two").take_over()
    assert names_of(store) == []


def test_an_attempt_that_joins_leaves_those_under_way_alone(store):
    first, second = (store.attempt("work/partial", token) for token in ("one", "two"))
    first.join()
    with written(first.store, "a") as file:
        file.write(b"x")
        second.join()
        second.store.put("b", b"y")
        second.end()
    assert (store.get("a"), store.get("b")) == (b"x", b"y")


def test_what_workers_of_an_attempt_left_behind_is_discarded(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    attempt.store.spool("a").file.close()
    attempt.discard_spooled()
    assert names_of(store) == []
    attempt.store.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_store_pickles_with_its_attempt(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    again = pickle.loads(pickle.dumps(attempt.store.below("b")))
    again.put("a", b"x")
    assert store.get("b/a") == b"x"


# leases


def _hold(store: Store, held, end) -> None:
    with store.lease("work/lock").hold("the other one"):
        held.set()
        end.wait(30)


def test_a_lease_is_held_by_one_process_and_says_by_whom(shared_store):
    lease = shared_store.lease("work/lock")
    assert lease.holder() is None
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(shared_store, held, end))
    other.start()
    try:
        assert held.wait(30)
        assert lease.holder() == "the other one"
        with pytest.raises(BlockingIOError), lease.hold("this one"):
            pass
    finally:
        end.set()
        other.join()
    assert lease.holder() is None
    with lease.hold("this one") as is_alone:
        assert is_alone


def test_a_lease_is_held_once_and_says_by_whom(store):
    lease = store.lease("work/lock")
    assert lease.holder() is None
    with lease.hold("this one") as is_alone:
        assert (is_alone, lease.holder()) == (True, "this one")
        with pytest.raises(BlockingIOError), store.lease("work/lock").hold("the other one"):
            pass
    assert lease.holder() is None


def test_a_lease_ends_with_the_process_that_holds_it(shared_store):
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(shared_store, held, end))
    other.start()
    assert held.wait(30)
    other.kill()
    other.join()
    with shared_store.lease("work/lock").hold("this one") as is_alone:
        assert is_alone


def test_the_file_of_a_lease_may_be_deleted_while_it_is_held(store):
    with store.lease("work/lock").hold("this one"):
        store.delete("work/lock")
    assert names_of(store) == []


# locations


def test_a_uri_of_an_unknown_scheme_is_refused():
    with pytest.raises(UsageError, match=r"is a URI.*expected one of s3://"):
        open_store("ftp://bucket/corpus")


def test_a_uri_without_the_extra_is_refused_with_the_command_that_installs_it(monkeypatch):
    for name in [*sys.modules]:
        if name.partition(".")[0] == "obstore" or name.startswith("tokshard.store.remote"):
            monkeypatch.delitem(sys.modules, name)
    for name in ("failures", "providers", "bucket"):
        monkeypatch.delitem(sys.modules, f"tokshard.store.{name}", raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)
    with pytest.raises(UsageError, match="is a URI, and obstore is not installed") as refused:
        open_store("s3://bucket/corpus")
    assert "pip install 'tokshard[remote]'" in refused.value.hint


def test_a_store_names_its_files_as_its_location_was_given():
    store = open_store("some/where")
    assert (store.location, store.where("a/b"), store.below("a").where("b")) == (
        "some/where",
        "some/where/a/b",
        "some/where/a/b",
    )
    assert (open_store(".").where("a"), open_store("some//where/").location) == ("a", "some/where")
