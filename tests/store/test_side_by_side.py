"""Questions to a store on another machine are asked many at a time, and answered in order."""

from __future__ import annotations

import itertools
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from tests.corpora import TINY_TOKENIZER, Source, append_generation, documents_of, write_corpus
from tests.store import memory
from tests.store.memory import MemoryStore
from tests.store.servers import copied
from tokshard import open_corpus, select_corpus
from tokshard.runtime import StreamPlan
from tokshard.store import STORES_BY_SCHEME, open_store, side_by_side

_NUMBERS = itertools.count()


@pytest.fixture
def remote() -> MemoryStore:
    return MemoryStore(f"{memory.SCHEME}://side-by-side-{next(_NUMBERS)}")


@pytest.mark.parametrize("count", [0, 1, 2, 200])
def test_answers_come_in_the_order_of_the_questions(remote, tmp_path, count):
    for store in (remote, open_store(tmp_path)):
        assert list(side_by_side(store, lambda item: item * item, iter(range(count)))) == [i * i for i in range(count)]


def test_a_store_elsewhere_is_asked_many_things_at_a_time(remote):
    meeting = threading.Barrier(8, timeout=10)
    assert len(list(side_by_side(remote, lambda _: meeting.wait(), range(16)))) == 16


def test_no_more_than_256_answers_wait(remote):
    asked = []
    answers = side_by_side(remote, asked.append, itertools.count())
    for number, _ in enumerate(itertools.islice(answers, 2_000), 1):
        assert len(asked) <= number + 256


def test_a_store_on_this_machine_is_asked_in_this_thread(tmp_path):
    asked = side_by_side(open_store(tmp_path), lambda _: threading.get_ident(), range(5))
    assert set(asked) == {threading.get_ident()}


def test_slow_questions_are_asked_many_at_a_time_on_this_machine_too(tmp_path):
    meeting = threading.Barrier(8, timeout=10)
    assert len(list(side_by_side(open_store(tmp_path), lambda _: meeting.wait(), range(16), are_slow=True))) == 16


def test_an_error_comes_in_its_turn_and_ends_the_questions(remote):
    asked = []

    def ask(item: int) -> int:
        asked.append(item)
        if item == 3:
            raise FileNotFoundError(item)
        if item > 3:
            time.sleep(0.5)
        return item

    answers = side_by_side(remote, ask, itertools.count())
    assert list(itertools.islice(answers, 3)) == [0, 1, 2]
    with pytest.raises(FileNotFoundError):
        next(answers)
    assert max(asked) < 50  # of 64 that were to be asked


def test_the_generations_of_a_corpus_are_asked_for_side_by_side(tmp_path, monkeypatch):
    corpus = write_corpus(tmp_path / "corpus", documents_of([3, 5]), tokenizer=TINY_TOKENIZER)
    for number in range(3):
        append_generation(corpus, documents_of([4 + number]))
    monkeypatch.setitem(STORES_BY_SCHEME, memory.SCHEME, MemoryStore)
    location = copied(corpus, f"{memory.SCHEME}:/{tmp_path}/corpus")
    get, meeting = MemoryStore.get, threading.Barrier(2, timeout=10)

    def get_in_pairs(store: MemoryStore, name: str) -> bytes:
        if re.search(r"/generation-0[23]/manifest\.json$", store.where(name)):
            meeting.wait()
        return get(store, name)

    monkeypatch.setattr(MemoryStore, "get", get_in_pairs)
    grown, here = open_corpus(location), open_corpus(corpus)
    assert grown.num_generations == 4
    assert [document.tolist() for document in grown] == [document.tolist() for document in here]
    assert grown.sources() == here.sources()


def test_the_cells_of_a_corpus_are_written_and_opened_side_by_side(in_memory, tmp_path, monkeypatch):
    documents = Source(documents=documents_of([9] * 9), metadata={"topic": [*"abc"] * 3})
    base = write_corpus(tmp_path / "base", sources=[documents], columns={"topic": "string"})
    meeting = threading.Barrier(2, timeout=10)

    def in_pairs(call: Callable[..., Any]) -> Callable[..., Any]:
        def met(store: MemoryStore, name: str, *rest: Any, **options: Any) -> Any:
            if re.search(r"/topic=[bc]/manifest\.json$", store.where(name)):
                meeting.wait()
            return call(store, name, *rest, **options)

        return met

    for method in ("put", "get"):
        monkeypatch.setattr(MemoryStore, method, in_pairs(getattr(MemoryStore, method)))
    location = copied(base, f"{in_memory}/base")
    select_corpus(location, out=f"{in_memory}/cells", by="topic", workers=1)
    plan = StreamPlan({name: f"{in_memory}/cells/topic={name}" for name in "abc"}, seq_len=8, allow_small_blocks=True)
    assert [source.num_tokens for source in plan.sources] == [27, 27, 27]
