"""What every error says, wherever it is shown."""

from __future__ import annotations

import pickle
import traceback

from tokshard.errors import PlanError


def test_a_traceback_shows_the_hint_also_of_an_error_that_another_process_sent() -> None:
    error = PlanError("seq_len is 0, expected at least 1", hint="give seq_len=4096")
    for shown in (error, pickle.loads(pickle.dumps(error))):
        lines = traceback.format_exception(shown)
        assert lines[-2:] == [
            "tokshard.errors.PlanError: seq_len is 0, expected at least 1\n",
            "hint: give seq_len=4096\n",
        ]
        assert (str(shown), shown.hint) == (error.problem, error.hint)
