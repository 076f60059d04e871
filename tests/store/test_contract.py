"""What every store can do. A second implementation is added to `STORES` and has to pass the same tests."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.examples import examples
from tests.store.memory import SCHEME, MemoryStore
from tokshard.store import STORES_BY_SCHEME, Store, files_below, local_file, locate, open_store, written

STORES: dict[str, Callable[[pytest.FixtureRequest], Store]] = {
    "posix": lambda request: open_store(request.getfixturevalue("tmp_path") / "store"),
    "memory": lambda request: open_store(f"{SCHEME}:/{request.getfixturevalue('tmp_path')}/store"),
    "small_s3": lambda request: open_store(request.getfixturevalue("small_s3")),
    "seaweedfs": lambda request: open_store(request.getfixturevalue("seaweedfs")),
}
"""From the request of a test to an empty store."""

S3 = ["small_s3", pytest.param("seaweedfs", marks=pytest.mark.remote)]


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


# a store is a dictionary of names

NAMES = ["a", "a-b", "b", "ab/c", "\u00e9", "z/1", "z/\U0001f600", "z/\uffee", "z/deep/x", "z/deep/y"]
FOLDERS = ["", "ab", "z", "z/deep", "not/there", "zz"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["put", "spool", "discard", "fail"]), st.sampled_from(NAMES), st.binary(max_size=9)),
        st.tuples(
            st.just("delete"), st.lists(st.sampled_from([*NAMES, "c", "z/", "z/deep/", "ab/", "no/"]), max_size=3)
        ),
    ),
    max_size=12,
)


def take(store: Store, model: dict[str, bytes], step: tuple[Any, ...]) -> None:
    """Take one step in a store and in the dictionary that it should be."""
    match step:
        case ("put", name, content):
            store.put(name, content)
            model[name] = content
        case ("spool", name, content):
            spool = store.spool(name)
            spool.file.write(content)
            spool.file.flush()
            assert Path(spool.path).read_bytes() == content  # it can be read here
            check_file(store, model, name)  # and is not there yet
            spool.put()
            assert not os.path.exists(spool.path)
            model[name] = content
            check(store, model)
            spool.discard()  # of what was put: nothing
        case ("discard", name, content):
            spool = store.spool(name)
            spool.file.write(content)
            spool.discard()
            spool.discard()
        case ("fail", name, content):
            with contextlib.suppress(KeyboardInterrupt), written(store, name) as file:
                file.write(content)
                raise KeyboardInterrupt
        case ("delete", names):
            store.delete(*names)
            for name in names:
                for gone in [each for each in model if each == name or (name.endswith("/") and each.startswith(name))]:
                    del model[gone]


def check(store: Store, model: dict[str, bytes]) -> None:
    """Compare all that a store says with a dictionary."""
    assert names_of(store) == sorted(model)
    for folder in FOLDERS:
        prefix = f"{folder}/" if folder else ""
        inside = {name.removeprefix(prefix) for name in model if name.startswith(prefix)}
        expected = sorted(
            {first + slash for first, slash, _ in (name.partition("/") for name in inside)}, key=os.fsencode
        )
        with contextlib.nullcontext() if inside else contextlib.suppress(FileNotFoundError):
            assert sorted(store.names(folder), key=os.fsencode) == expected
        assert [entry.name for entry in store.list(folder)] == [f"{prefix}{name}" for name in expected]
        assert sorted(files_below(store, folder)) == sorted(f"{prefix}{name}" for name in inside)
        for entry in store.list(folder):
            if not entry.name.endswith("/"):
                assert (entry, entry.size) == (store.stat(entry.name), len(model[entry.name]))
    for name in NAMES:
        check_file(store, model, name)


def check_file(store: Store, model: dict[str, bytes], name: str) -> None:
    """Compare what a store says of one file."""
    if name in model:
        content = model[name]
        assert store.get(name) == content
        with store.open(name) as file:
            file.seek(len(content) // 2)
            assert file.read(3) == content[len(content) // 2 :][:3]
        with local_file(store, name) as path:
            assert Path(path).read_bytes() == content
    else:
        for read in (store.get, store.open, store.stat, lambda name: store.read(name, [(0, 1)])):
            with pytest.raises(FileNotFoundError):
                read(name)


@settings(max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(steps=[("discard", "ab/c", b"")])  # the folder that was made for it goes with it
@given(steps=STEPS)
def test_a_store_holds_what_a_dictionary_would(store: Store, steps: list[tuple[Any, ...]]) -> None:
    place, model = store.below(secrets.token_hex(4)), dict[str, bytes]()
    check(place, model)
    for step in steps:
        take(place, model, step)
        check(place, model)


def test_ranges_are_read_in_their_order_and_to_their_ends_of_the_version_that_is_meant(store):
    store.put("a", bytes(range(200)))
    before = store.stat("a")
    ranges = [(100, 3), (0, 1), (199, 1), (5, 0)]
    assert list(store.read("a", ranges, version=before.version)) == [b"def", b"\0", b"\xc7", b""]
    assert list(store.read("a", [])) == []
    for beyond in (195, 6), (200, 1), (1000, 1):
        with pytest.raises(OSError, match="ends"):
            store.read("a", [(0, 1), beyond])
    store.put("a", bytes(300))
    assert store.stat("a").version != before.version
    with pytest.raises(OSError, match="replaced"):
        store.read("a", [(0, 1)], version=before.version)


def test_a_file_is_no_folder_and_files_of_a_folder_are_told_apart(store):
    for name in ("a", "b/c", "b/d"):
        store.put(name, b"")
    with pytest.raises(NotADirectoryError):
        store.names("a")
    assert len({entry.identity for entry in [*store.list("b"), store.stat("a")]}) == 3


def test_a_folder_is_a_store_and_a_file_is_located_by_its_store_and_name(store):
    train = store.below("train")
    train.put("a", b"x")
    assert (names_of(store), names_of(train)) == (["train/a"], ["a"])
    assert store.where("train/a") == train.where("a")
    folder, name = locate(store.where("train/a"))
    assert (folder.get(name), name) == (b"x", "a")
    above, name = locate(folder.location)
    assert (above.get("train/a"), name) == (b"x", "train")


def test_of_two_files_written_under_one_name_the_last_that_is_put_stays(store):
    with written(store, "a") as one:
        one.write(b"one")
        with written(store, "a") as other:
            other.write(b"other")
        assert store.get("a") == b"other"
    assert store.get("a") == b"one"


# attempts


def test_an_attempt_puts_files_and_leaves_no_other_also_from_another_process(store):
    attempt = store.attempt("work/partial", "one")
    attempt.take_over()
    pickle.loads(pickle.dumps(attempt.store.below("train"))).put("shard", b"y")
    attempt.store.spool("a").file.close()
    attempt.discard_spooled()
    assert names_of(store) == ["train/shard"]
    attempt.store.put("a", b"x")
    attempt.end()
    assert {name: store.get(name) for name in names_of(store)} == {"a": b"x", "train/shard": b"y"}


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


# leases


def _hold(store: Store, held: Any) -> None:
    with store.hold("work/lock", "the other one"):
        held.set()
        time.sleep(60)


@contextlib.contextmanager
def another_holder(store: Store) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that holds the lease until it is killed."""
    context = multiprocessing.get_context("spawn")
    held = context.Event()
    other = context.Process(target=_hold, args=(store, held))
    other.start()
    try:
        assert held.wait(30)
        yield other
    finally:
        other.kill()
        other.join()


def test_a_lease_is_held_by_one_process_that_it_names_and_ends_with_it(shared_store):
    with another_holder(shared_store):
        assert shared_store.holder("work/lock") == "the other one"
        with pytest.raises(BlockingIOError), shared_store.hold("work/lock", "this one"):
            pass
    assert shared_store.holder("work/lock") is None
    with shared_store.hold("work/lock", "this one") as is_alone:
        assert is_alone


def test_a_lease_is_held_once_and_says_by_whom(store):
    assert store.holder("work/lock") is None
    with store.hold("work/lock", "this one") as is_alone:
        assert (is_alone, store.holder("work/lock")) == (True, "this one")
        with pytest.raises(BlockingIOError), store.hold("work/lock", "the other one"):
            pass
    assert store.holder("work/lock") is None
    with store.hold("work/lock", "this one"):  # its file may be deleted meanwhile
        store.delete("work/lock")
    assert names_of(store) == []


# locations


def test_a_store_names_its_files_as_its_location_was_given():
    store = open_store("some/where")
    assert store.location == "some/where"
    assert store.where("a/b") == store.below("a").where("b") == "some/where/a/b"
    assert (open_store(".").where("a"), open_store("some//where/").location) == ("a", "some/where")
