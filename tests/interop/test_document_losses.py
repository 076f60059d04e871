"""The recipe for losses of documents: under the checkpoint before a step, they are what the step trained with."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.interop.real_text import ROOT, run
from tests.trainer.runs import SMALL, VOCABULARY, as_toml, configuration, corpora, steps_of
from tokshard.run_files.recipe import resolve
from tokshard.runtime import StreamPlan
from tokshard.trainer.loop import train

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]


def test_the_losses_of_the_step_after_a_checkpoint_are_those_that_it_was_trained_with(tmp_path: Path) -> None:
    out, losses, recipe = tmp_path / "out", tmp_path / "losses.parquet", tmp_path / "recipe.toml"
    sizes = {"data__global_batch_size": 4, "data__seq_len": 16, "train__steps": 4, "checkpoint__every": 3}
    fields = configuration(corpora(tmp_path), out, **sizes)
    fields["model"] = SMALL | {"vocab_size": VOCABULARY}  # one that is padded loses its padding in an export
    recipe.write_text(as_toml(fields))
    train(resolve(fields))
    run("-m", "tokshard.trainer.hugging_face", out / "checkpoints" / "step-00000003", "--out", tmp_path / "llama")
    step = steps_of(out)[3]
    first, stop = step["samples"]
    program = [ROOT / "recipes" / "document_losses.py", recipe, tmp_path / "llama"]
    with pytest.raises(AssertionError, match="invalid samples value: '3'"):  # it is neither sample 3 nor 0 to 3
        run(*program, 3, losses)
    run(*program, f"{first}:{stop}", losses)
    rows = pq.read_table(losses).to_pylist()
    for name in ("code", "prose"):
        parts = [(row["loss_weights"], row["loss"]) for row in rows if row["corpus"] == name and row["targets"]]
        mean = sum(weight * loss for weight, loss in parts) / sum(weight for weight, _ in parts)
        assert mean == pytest.approx(step["loss_by_corpus"][name], rel=1e-4)
    plan = StreamPlan.load(recipe)
    expected = [(sample, piece.document, piece.start) for sample in range(first, stop) for piece in plan.trace(sample)]
    assert [(row["sample"], row["document"], row["start"]) for row in rows] == expected
