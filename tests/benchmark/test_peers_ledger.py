"""The ledger by which a resume is judged finds what was lost and what was repeated, and nothing else."""

import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmark.peers import loading
from tests.benchmark.peers.frame import Frame
from tests.benchmark.peers.ledger import DELIMITER, Account, account, bounds, write_corpus

PROGRAM = """
import numpy as np
from tests.benchmark.peers.programs.common import CannotError
from tests.benchmark.peers.programs.reading import Opened, rows, run

def make(settings):
    print("made")

def opened(settings, states):
    if settings["workers"] == 2:
        raise CannotError("It has one worker.")
    place = states[0] if states else 0
    every, each, taken = rows(settings)[place:], settings["rows"] // settings["world"], [place]

    def batches():
        for first in range(settings["rank"] * each, len(every), settings["rows"]):
            taken[0] += settings["rows"]
            yield every[first : first + each]

    def state():
        if settings.get("forgets"):
            raise CannotError("It has no state.")
        return taken[0]

    return Opened(batches=batches(), ids=lambda batch: batch, state=state)

run(make, opened, [])
"""


class Here:
    """Finds no environment but this one."""

    def python(self, _: str) -> str:
        return sys.executable

    def newer_tokenizers(self) -> str:
        raise NotImplementedError


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return np.load(write_corpus(tmp_path_factory.mktemp("ledger"), num_tokens=1_000, document_tokens=50))


def test_every_token_but_the_delimiters_has_an_id_of_its_own(corpus):
    others = corpus[corpus != DELIMITER]
    assert len(np.unique(others)) == len(others)
    assert np.count_nonzero(corpus == DELIMITER) == len(bounds(1_000, 50)) - 1 > 5


def test_an_epoch_in_any_order_and_shape_has_neither_losses_nor_repeats(corpus):
    rows = np.random.default_rng(1).permutation(corpus.reshape(-1, 10))
    readings = [rows[:37].reshape(-1), rows[37:]]
    assert account(corpus, readings) == Account(lost=0, repeated=0, foreign=0)


def test_a_row_that_is_missing_is_lost(corpus):
    rows = corpus.reshape(-1, 10)
    missing = int(np.count_nonzero(rows[42] != DELIMITER))
    assert account(corpus, [np.delete(rows, 42, axis=0)]) == Account(lost=missing, repeated=0, foreign=0)


def test_a_row_that_another_process_reads_again_is_repeated_once_for_each_time(corpus):
    rows = corpus.reshape(-1, 10)
    again = int(np.count_nonzero(rows[:3] != DELIMITER))
    assert account(corpus, [rows, rows[:3], rows[:3]]) == Account(lost=0, repeated=2 * again, foreign=0)


def test_a_loss_and_a_repeat_of_the_same_size_do_not_cancel(corpus):
    rows = corpus[corpus != DELIMITER][:900].reshape(-1, 10)
    whole = corpus[corpus != DELIMITER]
    reading = np.concatenate([rows[:-1].reshape(-1), rows[0], whole[900:]])
    assert account(corpus, [reading]) == Account(lost=10, repeated=10, foreign=0)


def test_padding_and_ids_of_no_token_are_foreign(corpus):
    delimiter_place = int(np.flatnonzero(corpus == DELIMITER)[0]) + 1  # the id that this token does not have
    strangers = np.array([-1, 5_000, delimiter_place, DELIMITER])
    assert account(corpus, [corpus, strangers]) == Account(lost=0, repeated=0, foreign=3)


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The cells of a loader that reads rows in order, has one worker, and is given more settings."""
    (tmp_path / "fakes").mkdir()
    (tmp_path / "fakes" / "fake.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr("tests.benchmark.peers.frame.PROGRAMS", "fakes")
    given = {"tokens": write_corpus(tmp_path / "ledger", num_tokens=1 << 16, document_tokens=300), "steps": 0}
    given |= {"seq_len": 128, "rows": 8, "world": 2, "workers": 1, "limit": 20, "data": tmp_path / "data"}
    frame = Frame(quick=True, work=tmp_path, environments=Here())
    return lambda **settings: loading._ledger(frame, "fake", given | settings)


def test_a_cell_has_what_a_resume_lost_and_repeated_or_what_the_peer_said(ledger):
    found = ledger()
    assert found["workers"] == "refuses: It has one worker."
    assert {found[name] for name in ("whole", "same", "world", "rows")} == {"none"}


def test_where_no_state_is_saved_only_the_epoch_without_a_stop_has_figures(ledger):
    found = ledger(forgets=True)
    assert found["whole"] == "none"
    assert {found[name] for name in ("same", "workers", "world", "rows")} == {"refuses: It has no state."}
