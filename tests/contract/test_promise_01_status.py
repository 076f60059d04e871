"""``tokshard status`` at any moment: an answer that can be true, nothing changed, and a command that continues."""

from __future__ import annotations

import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.contract import small
from tests.contract.commands import corpora, job_words
from tests.contract.faults import Fault
from tests.contract.table import Table
from tokshard.cli import main

pytestmark = pytest.mark.timeout(900)

BEFORE_THE_MANIFEST = Fault(on=r"open .*/\.manifest\.json")


def status(out: Path) -> dict[str, Any] | None:
    """What the command says, if it says that there is a build or a corpus: an answer that can be true."""
    with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(io.StringIO()) as errors:
        exit_code = main.run(["status", str(out), "--json"])
    answer: dict[str, Any] = json.loads(said.getvalue())
    if exit_code:
        assert re.search("holds (neither a build nor a corpus|an unfinished build)", answer["error"]), answer
        return None
    assert errors.getvalue() == ""
    assert answer["state"] in ("complete", "running", "unfinished")
    if answer["stage"] != "writing":  # see the copies of tests/pipeline
        assert 0 <= answer["bytes_done"] <= (answer["total_bytes"] or answer["bytes_done"])
    assert 0 <= answer["tasks_done"] <= (answer["num_tasks"] or answer["tasks_done"])
    assert all(answer[name] >= 0 for name in ("documents", "tokens", "records", "bad_records", "damaged_inputs"))
    return answer


@pytest.mark.parametrize("call", [1, 2])
def test_a_build_may_end_while_its_status_is_asked_for(table: Table, call: int) -> None:
    """At the moments after what was asked for is read."""
    table.clear()
    words = [*table.command("build", "plain").words, "--workers", "1"]
    assert table.run(words, BEFORE_THE_MANIFEST).exit_code == -9
    with small.when_a_status_has_read_what_was_asked_for(call, lambda: table.run(words)):
        found = status(table.out)
    assert found is not None
    assert found["state"] == "complete"
    assert corpora(table.out)


def test_a_build_that_was_stopped_after_its_manifest_is_complete(table: Table) -> None:
    table.clear()
    words = [*table.command("build", "plain").words, "--workers", "1"]
    assert table.run(words, Fault(on=r"replace .*/manifest\.json", is_after=True)).exit_code == -9
    found = status(table.out)
    assert found is not None
    assert (found["state"], found["command"]) == ("complete", [])


def test_the_status_of_an_array_counts_what_its_jobs_have_done_and_names_those_that_run(
    table: Table, capsys: pytest.CaptureFixture[str]
) -> None:
    table.clear()
    words = table.command("build", "plain").words
    assert table.run(job_words(words, 0, 3), Fault(on=r"open .*/\.shard-00-0000001-")).exit_code == -9
    left = status(table.out)
    assert main.run(["status", str(table.out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--job-index 0 --num-jobs 1" in shown
    assert f"with any job number, then tokshard commit {table.out}" in shown
    running = table.start(job_words(words, 1, 3), Fault(on=r"open .*/\.shard-", act="SIGSTOP"))
    running.until_stopped()
    found = status(table.out)
    running.resume()
    assert running.end().exit_code == 0
    assert left is not None
    assert found is not None
    assert (left["state"], found["state"]) == ("unfinished", "running")
    assert 0 < left["tasks_done"] <= found["tasks_done"] < found["num_tasks"]
    (holder,) = found["holders"]
    assert holder.startswith(f"job 1 of 3, process {running.pid} on ")
    last = status(table.out)
    assert last is not None
    assert last["tasks_done"] == last["num_tasks"], "it has done what the others left"
    assert last["documents"] > found["documents"]
