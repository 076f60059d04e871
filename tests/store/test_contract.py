"""What every store can do. A second implementation is added to `STORES` and has to pass the same tests."""

from __future__ import annotations

import multiprocessing
import pickle
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tokshard.errors import UsageError
from tokshard.store import Store, local_file, open_store, written

STORES: dict[str, Callable[[Path], Store]] = {"posix": lambda directory: open_store(directory / "store")}
"""From a folder of the test to an empty store."""


@pytest.fixture(params=STORES.values(), ids=STORES.keys())
def store(request, tmp_path) -> Store:
    return request.param(tmp_path)


def names_of(store: Store, prefix: str = "") -> list[str]:
    return sorted(entry.name for entry in store.list(prefix))


def test_a_store_that_nothing_was_put_into_has_no_files(store):
    assert names_of(store) == names_of(store, "a/") == names_of(store, "a/b") == []
    assert store.obstacle("") is None
    assert store.obstacle("a") is None


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


def test_files_are_listed_by_prefix_at_any_depth(store):
    for name in ("shard-1", "shard-2", "tables", "train/shard-1", "train/deep/x"):
        store.put(name, name.encode())
    assert names_of(store) == ["shard-1", "shard-2", "tables", "train/deep/x", "train/shard-1"]
    assert names_of(store, "shard-") == ["shard-1", "shard-2"]
    assert names_of(store, "train/") == ["train/deep/x", "train/shard-1"]
    assert names_of(store, "train/s") == ["train/shard-1"]
    assert names_of(store, "trai") == ["train/deep/x", "train/shard-1"]
    assert {entry.name: entry.size for entry in store.list("shard-")} == {"shard-1": 7, "shard-2": 7}
    for entry in store.list():
        assert entry == store.stat(entry.name)


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
    above = train.parent()
    assert above is not None
    assert (above[0].get("train/a"), above[1]) == (b"x", "train")


def test_deleted_files_are_gone_and_so_are_folders_without_files(store):
    for name in ("a/b", "a/c", "d/e/f"):
        store.put(name, b"")
    store.delete("a/b", "a/b", "d/e/f", "not there")
    assert names_of(store) == ["a/c"]
    assert list(store.names()) == ["a/"]


def test_all_files_of_a_folder_are_deleted_but_for_those_to_keep(store):
    for name in ("a/1", "a/2", "a/b/3", "ab"):
        store.put(name, b"")
    store.delete_below("a", keep=frozenset({"a/2"}))
    assert names_of(store) == ["a/2", "ab"]
    store.delete_below("a")
    store.delete_below("not there")
    assert list(store.names()) == ["ab"]


def test_what_stands_in_the_place_of_a_folder_is_told(store):
    store.put("a", b"")
    store.put("b/c", b"")
    assert (store.obstacle("a"), store.obstacle("b"), store.obstacle("c")) == ("a file", None, None)


def test_only_one_of_many_creates_a_file(store):
    won = []

    def race(number: int) -> None:
        try:
            store.create_exclusive("a/lease", str(number).encode())
        except FileExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [str(number).encode() for number in won] == [store.get("a/lease")]
    assert names_of(store) == ["a/lease"]


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
    attempt.put("a", b"x")
    attempt.below("train").put("shard", b"y")
    assert names_of(store) == ["a", "train/shard"]


def test_what_an_attempt_left_behind_goes_when_the_next_takes_over(store):
    first = store.attempt("work/partial", "one")
    first.take_over()
    first.spool("a").file.close()
    store.attempt("work/partial", "two").take_over()
    assert names_of(store) == []


def test_what_workers_of_an_attempt_left_behind_is_discarded(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    attempt.spool("a").file.close()
    attempt.discard_spooled()
    assert names_of(store) == []
    attempt.put("a", b"x")
    assert store.get("a") == b"x"


def test_a_store_pickles_with_its_attempt(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    again = pickle.loads(pickle.dumps(attempt.below("b")))
    again.put("a", b"x")
    assert store.get("b/a") == b"x"


# leases


def _hold(store: Store, held, end) -> None:
    with store.lease("work/lock", "the other one"):
        held.set()
        end.wait(30)


def test_a_lease_is_held_by_one_process_and_says_by_whom(store):
    assert store.lease_holder("work/lock") is None
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(store, held, end))
    other.start()
    try:
        assert held.wait(30)
        assert store.lease_holder("work/lock") == "the other one"
        with pytest.raises(BlockingIOError), store.lease("work/lock", "this one"):
            pass
    finally:
        end.set()
        other.join()
    assert store.lease_holder("work/lock") is None
    with store.lease("work/lock", "this one") as is_alone:
        assert is_alone


def test_a_lease_ends_with_the_process_that_holds_it(store):
    context = multiprocessing.get_context("spawn")
    held, end = context.Event(), context.Event()
    other = context.Process(target=_hold, args=(store, held, end))
    other.start()
    assert held.wait(30)
    other.kill()
    other.join()
    with store.lease("work/lock", "this one") as is_alone:
        assert is_alone


def test_the_file_of_a_lease_may_be_deleted_while_it_is_held(store):
    with store.lease("work/lock", "this one"):
        store.delete("work/lock")
    assert names_of(store) == []


# locations


def test_a_uri_is_refused():
    with pytest.raises(UsageError, match="is a URI"):
        open_store("s3://bucket/corpus")


def test_a_store_names_its_files_as_its_location_was_given():
    store = open_store("some/where")
    assert (store.location, store.where("a/b"), store.below("a").where("b")) == (
        "some/where",
        "some/where/a/b",
        "some/where/a/b",
    )
    assert (open_store(".").where("a"), open_store("some//where/").location) == ("a", "some/where")
