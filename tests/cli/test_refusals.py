"""What the command line refuses: the commands of `transcripts/refusals.txt` that have a name."""

from __future__ import annotations

from tests.cli.transcripts import FOLDER, refusals

REFUSALS = refusals((FOLDER / "refusals.txt").read_text(encoding="utf-8"))


def test_a_refusal_has_a_name_of_its_own_a_problem_and_a_hint() -> None:
    assert len({row.what for row in REFUSALS}) == len(REFUSALS) > 100
    assert [row.what for row in REFUSALS if not row.problem or not row.hint] == []
