"""Compare what training runs read with what the plan says that an undisturbed run reads.

    python recipes/quickstart_compare.py RECIPE.toml OUT [RESUMED_OUT ...]

Each step of a run's metrics.jsonl has the samples that its ranks received and a digest of their tokens and labels. The
samples are made again here, one by one, by the plan alone.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from tokshard.run_files.recipe import load_config
from tokshard.runtime.plan import StreamPlan
from tokshard.trainer.metrics_file import row_digest, step_digest

TOLERANCE = 1e-5
"""How far the losses of another number of ranks may lie, in fp32: other sums are rounded in another order."""

NEXT = """
Text of this machine became two corpora. A model was trained, and continued on other numbers of ranks: they read the
samples of an undisturbed run, and the losses agree within {tolerance}. Next, list the documents of step {step}, and
write a page about the run:

  {tokshard} trace {recipe} --step {step}
  {tokshard} report {run} --out {run}.html
"""


def power(number: float) -> str:
    """A small number in one digit, such as ``2e-7``."""
    return f"{number:.0e}".replace("e-0", "e-")


def main() -> None:
    """Print one line per run, and what to try next; exit 1 if the samples or the losses differ."""
    recipe, *runs = sys.argv[1:]
    settings = load_config(recipe).data
    plan, batch = StreamPlan(**settings.arguments()), settings.global_batch_size
    expected: dict[int, str] = {}
    undisturbed: dict[int, float] = {}
    for run in runs:
        lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        steps = [record for record in lines if "digest" in record]  # the others are evaluations and left-out steps
        for record in steps:
            step = record["step"]
            if step not in expected:
                made = ((g, plan.sample(g)) for g in range((step - 1) * batch, step * batch))
                expected[step] = step_digest(row_digest(g, row["input_ids"], row["labels"]) for g, row in made)
            if record["digest"] != expected[step]:
                sys.exit(f"{run}: step {step} read {record['samples']}, which is not what the plan says")
        first, last = steps[0], steps[-1]
        losses = f"loss {first['loss']:.3f} to {last['loss']:.3f}"
        if undisturbed:
            difference, step = max((abs(one["loss"] - undisturbed[one["step"]]), one["step"]) for one in steps)
            if not difference <= TOLERANCE:
                sys.exit(
                    f"{run}: the loss of step {step} is {difference:.1e} from that of {runs[0]}, not {power(TOLERANCE)}"
                )
            losses += f", at most {power(difference)} from that of {runs[0]}"
        undisturbed = undisturbed or {record["step"]: record["loss"] for record in steps}
        print(
            f"{run}: steps {first['step']} to {last['step']} read exactly samples {first['samples'][0]} to "
            f"{last['samples'][1] - 1} of an undisturbed run\n  {losses}"
        )
    tokshard = os.path.relpath(Path(sys.executable).with_name("tokshard"))
    print(
        NEXT.format(recipe=recipe, run=runs[0], step=max(undisturbed), tokshard=tokshard, tolerance=power(TOLERANCE)),
        end="",
    )


if __name__ == "__main__":
    main()
