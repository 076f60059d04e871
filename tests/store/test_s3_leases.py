"""Leases in a bucket: they expire, are renewed and lost, and need conditional writes that the store really checks."""

from __future__ import annotations

import json
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from tests.examples import some
from tests.store import faulty_proxy as faults
from tests.store.test_contract import another_holder
from tokshard.errors import StoreError
from tokshard.store import files_below, open_store
from tokshard.store.remote import RemoteStore, remote_store
from tokshard.store.requests import RemoteOptions

pytestmark = pytest.mark.slow

OPTIONS = RemoteOptions(patience=6, first_patience=3, lease_seconds=1.5)


def held_while(store: RemoteStore, *steps: Callable[[], object]) -> None:
    """Hold the lease, take the steps, and wait for half a minute."""
    with store.hold("work/lock", "this one"):
        for step in steps:
            step()
        time.sleep(30)


@pytest.fixture
def other_holder(s3: str) -> Iterator[multiprocessing.process.BaseProcess]:
    """A process that holds ``work/lock`` of the store until it is killed."""
    with another_holder(remote_store(s3, OPTIONS)) as process:
        yield process


@pytest.fixture
def another_machine(monkeypatch):
    """This process takes itself to be on another machine than the processes it started."""
    monkeypatch.setattr("tokshard.store.remote_lease._machine", lambda: "another")


@pytest.mark.parametrize("wrong", [0, 3600])
def test_a_living_holder_keeps_its_lease_and_is_named_whatever_the_clock_says(
    s3, other_holder, another_machine, monkeypatch, wrong
):
    time.sleep(2 * OPTIONS.lease_seconds)  # it is renewed
    clock = time.time
    monkeypatch.setattr("tokshard.store.bucket.time.time", lambda: clock() + wrong)
    words = r"\] the other one has held it since 2.*it can be taken over in "
    with pytest.raises(BlockingIOError, match=words), remote_store(s3, OPTIONS).hold("work/lock", "this one"):
        pass


def test_a_living_holder_that_proc_hides_as_it_is_of_another_user_keeps_its_lease(s3, other_holder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr("tokshard.store.remote_lease._process", "{}:".format)
        patched.setattr("os.kill", mock.Mock(side_effect=PermissionError))
        with pytest.raises(BlockingIOError):
            remote_store(s3, OPTIONS).hold("work/lock", "this one").__enter__()


def test_the_lease_of_a_dead_holder_elsewhere_ends_by_itself(s3, other_holder, another_machine):
    store = remote_store(s3, OPTIONS)
    other_holder.kill()
    other_holder.join()
    with pytest.raises(BlockingIOError, match="can be taken over in"), store.hold("work/lock", "this one"):
        pass
    time.sleep(OPTIONS.lease_seconds + 1)  # times of S3 are whole seconds
    assert store.holder("work/lock") is None
    with store.hold("work/lock", "this one") as is_alone:
        assert is_alone
        assert store.holder("work/lock") == "this one"


def test_a_holder_whose_lease_another_took_is_interrupted_and_puts_nothing_more(s3, monkeypatch):
    first, second = remote_store(s3, OPTIONS), remote_store(s3, OPTIONS)
    taken, end = threading.Event(), threading.Event()

    def take() -> None:
        with second.hold("work/lock", "the second"):
            second.put("a", b"")
            taken.set()
            end.wait(30)

    other = threading.Thread(target=take)
    steps = (lambda: monkeypatch.setattr("tokshard.store.remote_lease._is_dead", lambda record: True), other.start)
    with pytest.raises(StoreError, match=r"work/lock was taken over by the second at 2"):
        held_while(first, *steps)
    assert taken.is_set()
    with pytest.raises(StoreError, match="taken over by the second"):
        first.below("train").put("b", b"")
    end.set()
    other.join()
    assert sorted(files_below(second, "")) == ["a"]


@some("fault", [faults.lost_answer, faults.status(503), faults.reset])
def test_a_lease_whose_answer_was_lost_is_held(s3, s3_proxy, fault):
    store = remote_store(s3, RemoteOptions(patience=6, first_patience=3, lease_seconds=9))
    s3_proxy.fail(fault, fault, matches="PUT")
    with store.hold("work/lock", "this one"):
        assert store.holder("work/lock") == "this one"
        s3_proxy.fail(fault, fault, fault, matches="PUT")
        time.sleep(5)
        assert s3_proxy.faults == []
        store.put("a", b"")  # not fenced
        assert store.holder("work/lock") == "this one"
    assert store.holder("work/lock") is None


# losing a lease


@pytest.mark.parametrize(("hears_interruptions", "is_removed"), [(True, False), (False, False), (True, True)])
def test_a_holder_that_cannot_renew_is_interrupted_before_another_may_take_over(
    s3, s3_proxy, hears_interruptions, is_removed
):
    """One that does not hear it, as shells start commands in the background, is terminated."""
    store = remote_store(s3, RemoteOptions(patience=60, lease_seconds=3))

    def lose() -> None:
        if is_removed:
            open_store(s3).delete("work/lock")
        else:
            s3_proxy.fail(matches="PUT .*lock", for_ever=faults.status(503))

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    if not hears_interruptions:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    began = time.monotonic()
    try:
        with pytest.raises(StoreError, match="work/lock was not renewed for 3 s: another process may take it now"):
            held_while(store, lose)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert time.monotonic() - began < 3 + (3 if hears_interruptions else 27)
    with pytest.raises(StoreError, match="was not renewed"):
        store.put("a", b"")
    assert [*files_below(store, "")] == ([] if is_removed else ["work/lock"])


def test_a_put_that_is_tried_again_stops_when_the_lease_is_lost(s3, s3_proxy):
    store = remote_store(s3, RemoteOptions(patience=60, lease_seconds=3))
    taken = threading.Event()

    def put() -> None:
        taken.set()
        store.put("a", b"")

    def hold() -> None:
        with pytest.raises(StoreError, match="was not renewed"):
            held_while(store, put)

    holder = threading.Thread(target=hold)
    s3_proxy.fail(matches="PUT .*folder/a", for_ever=faults.status(503))
    holder.start()
    assert taken.wait(10)
    s3_proxy.fail(matches="PUT", for_ever=faults.status(503))
    holder.join(20)
    assert not holder.is_alive()
    s3_proxy.fail()
    time.sleep(1)
    assert not any("folder/a" in line for line in s3_proxy.requests)


# stores that cannot keep a second holder out


on_small_s3 = pytest.mark.parametrize("s3", ["small_s3"], indirect=True)  # it checks no signatures


@on_small_s3
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (faults.without("if-none-match", "if-match"), "s3://bucket cannot be built into: its store ignores If-None-M"),
        (faults.without("if-none-match"), "s3://bucket cannot be built into: its store ignores If-None-Match"),
        (faults.without("if-match"), "s3://bucket cannot be built into: its store ignores If-Match"),
        (faults.refusing("if-match"), "the store cannot do what was asked: 501 .*NotImplemented"),
        (faults.refusing("if-none-match"), "the store cannot do what was asked: 501 .*NotImplemented"),
    ],
)
def test_a_store_without_conditional_writes_is_refused_and_nothing_is_left(s3, s3_proxy, fault, message):
    s3_proxy.fail(for_ever=fault)
    store = remote_store(s3, OPTIONS)
    with pytest.raises(StoreError, match=message) as refused, store.hold("work/lock", "this one"):
        pytest.fail("the lease was given")
    assert "build into a directory, and copy its files there" in refused.value.hint
    assert list(files_below(open_store(s3), "")) == []


@on_small_s3
def test_of_two_processes_whose_creates_both_won_one_has_the_lease(s3, s3_proxy):
    other = remote_store(s3, OPTIONS)
    others = []

    def let_both_win(proxy, request, client) -> None:
        """Store the lock of another process in place of this one, as a store that looks first and writes then."""
        answer = proxy.forward(request)
        record = json.loads(request.body)
        others.append(json.dumps(record | {"holder": "the other one", "token": "other"}).encode())
        other.put("work/lock", others[0])
        client.sendall(answer)

    s3_proxy.fail(let_both_win, matches="PUT .*lock")
    with pytest.raises(BlockingIOError), remote_store(s3, OPTIONS).hold("work/lock", "this one"):
        pytest.fail("the lease was given")
    assert other.get("work/lock") == others[0]


@pytest.mark.parametrize(
    "change", [{"process": "abc"}, {"process": ""}, {"process": "1" * 5000 + ":"}, {"seconds": -5}, {"seconds": 0}]
)
def test_a_lease_that_makes_no_sense_is_held_by_somebody(s3, change):
    store = remote_store(s3, OPTIONS)
    with store.hold("work/lock", "this one"):
        record = json.loads(store.get("work/lock"))
    store.put("work/lock", json.dumps(record | change).encode())
    with pytest.raises(BlockingIOError), store.hold("work/lock", "this one"):
        pytest.fail("the lease was given")
    assert store.holder("work/lock") is not None
