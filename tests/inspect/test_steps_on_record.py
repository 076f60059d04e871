"""Traces of a real run of the trainer, whose steps had several sizes, compared with what its metrics say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cli.transcripts import json_of, shell
from tests.refusals import tokshard
from tests.trainer.runs import SMALL, configuration, corpora
from tokshard.run_files.recipe import resolve
from tokshard.trainer.loop import train

# DCP of torch 2.13 itself warns
pytestmark = [pytest.mark.filterwarnings("ignore::UserWarning"), pytest.mark.filterwarnings("ignore::FutureWarning")]


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of nine steps: a ramp, a step that was left out, and then other sizes after a resume."""
    directory = tmp_path_factory.mktemp("run")
    paths, out = corpora(directory), directory / "out"
    sizes = {"data__global_batch_size": 4, "data__seq_len": 16, "checkpoint__every": 3, "optimizer__warmup_steps": 0}
    sizes |= {"evaluation__corpora": {"held out": paths["code"]}, "evaluation__tokens": 16}
    for last, more in (
        (6, {"data__batch_ramp": [[1, 8], [3, 6]], "train__skip": [[2, 3]]}),
        (9, {"data__batch_ramp": []}),
    ):
        fields = configuration(paths, out, **sizes, **more, train__steps=9, train__stop_after=last)
        fields["checkpoint"]["keep"] = 9
        assert train(resolve(fields | {"model": SMALL})) == 0
    return out


def rows(*arguments):
    """The rows of a trace without text."""
    return json_of("trace", *arguments, "--no-text")


def metrics(out):
    found = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return {one["step"]: one for one in found if "samples" in one}


def test_every_step_of_a_run_has_the_samples_that_its_metrics_say_whatever_sizes_it_had(out):
    of = metrics(out)
    sizes = [stop - start for start, stop in (of[step]["samples"] for step in range(1, 10))]
    assert sizes == [8, 8, 6, 6, 6, 6, 4, 4, 4]
    checkpoint = out / "checkpoints" / "step-00000009"
    for step, one in of.items():
        if "skipped" in one:
            continue
        found = rows(checkpoint, "--step", step, "--dp-world-size", 2)
        assert sorted({row["sample"] for row in found}) == list(range(*one["samples"]))
        assert {row["step"] for row in found} == {step}
        half = (one["samples"][1] - one["samples"][0]) // 2
        first = min(found, key=lambda row: row["sample"])["rank"]  # the parts of a step are turned
        for row in found:
            part, place = divmod(row["sample"] - one["samples"][0], half)
            assert (row["rank"], row["row"]) == ((first + part) % 2, place)
        asked = ("--step", step), ("--sample", "{}:{}".format(*one["samples"]))
        by_step, by_sample = (rows(checkpoint, *words, "--dp-world-size", 3) for words in asked)
        assert sorted(map(str, by_step)) == sorted(map(str, by_sample))
    after = of[9]["samples"][1]
    assert rows(checkpoint, "--step", 11)[0]["sample"] == after + 4
    assert rows(checkpoint, "--sample", after)[0]["step"] == 10
    said = tokshard("trace", checkpoint, "--step", 2)
    assert (said.exit_code, said.problem) == (2, "step 2 was left out of the run")
    assert said.hint == "--sample 8:16 shows its documents"
    code, shown, notes = shell("trace", checkpoint, "--step", "1:4", "--no-text", "--json")
    assert (code, {json.loads(line)["step"] for line in shown.splitlines()}) == (0, {1, 3})
    assert "note: left out of the run, and not shown: step 2\n" in notes


def test_steps_on_record_have_their_samples_although_the_record_begins_later(out, tmp_path):
    moved = shutil.copytree(out, tmp_path / "moved")
    lines = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (moved / "metrics.jsonl").write_text("".join(lines[3:]))
    for step in range(4, 10):
        checkpoint = "checkpoints/step-00000009"
        code, shown, _ = shell("trace", moved / checkpoint, "--step", step, "--no-text", "--json")
        found = [json.loads(line) for line in shown.splitlines()]
        assert (code, found) == (0, rows(out / checkpoint, "--step", step))


def test_a_step_after_a_checkpoint_has_the_size_that_the_recipe_plans(out):
    start, _ = metrics(out)[4]["samples"]
    found = rows(out / "checkpoints" / "step-00000003", "--step", 4)
    assert sorted({row["sample"] for row in found}) == list(range(start, start + 6))


def test_without_the_metrics_of_its_run_steps_are_counted_back_with_a_note(out, tmp_path):
    moved = tmp_path / "a" / "b" / "step"
    shutil.copytree(out / "checkpoints" / "step-00000009", moved)
    code, shown, note = shell("trace", moved, "--step", 7, "--no-text", "--json")
    assert (code, {json.loads(line)["sample"] for line in shown.splitlines()}) == (0, set(range(40, 44)))
    assert "earlier steps are counted back from it" in note
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "samples": [0, 4]}\n')  # of another run
    shutil.copytree(moved, tmp_path / "checkpoints" / "step")
    code, _, note = shell("trace", tmp_path / "checkpoints" / "step", "--step", 7, "--no-text")
    assert (code, "earlier steps are counted back from it" in note) == (0, True)


def test_a_plan_of_a_run_warns_that_it_trains_on_what_it_is_evaluated_on(out):
    (report,) = json_of("plan", out)
    assert report["warnings"] == ["held-out corpus 'held out' shares 300 documents with 'code'"]
