"""The ledger by which a resume is judged finds what was lost and what was repeated, and nothing else."""

import numpy as np
import pytest

from benchmark.peers.ledger import DELIMITER, Account, account, bounds, write_corpus


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


def test_a_row_that_is_missing_is_lost_and_one_that_is_read_again_is_repeated_once_for_each_time(corpus):
    rows = corpus.reshape(-1, 10)
    missing, again = (int(np.count_nonzero(part != DELIMITER)) for part in (rows[42], rows[:3]))
    assert account(corpus, [np.delete(rows, 42, axis=0)]) == Account(lost=missing, repeated=0, foreign=0)
    assert account(corpus, [rows, rows[:3], rows[:3]]) == Account(lost=0, repeated=2 * again, foreign=0)
    both = [np.delete(rows, 42, axis=0), rows[:3]]  # they do not cancel
    assert account(corpus, both) == Account(lost=missing, repeated=again, foreign=0)


def test_padding_and_ids_of_no_token_are_foreign(corpus):
    delimiter_place = int(np.flatnonzero(corpus == DELIMITER)[0]) + 1  # the id that this token does not have
    strangers = np.array([-1, 5_000, delimiter_place, DELIMITER])
    assert account(corpus, [corpus, strangers]) == Account(lost=0, repeated=0, foreign=3)
