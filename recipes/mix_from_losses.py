"""The trainer with a mix that follows the losses: a corpus whose loss is above the mean is read more from then on.

torchrun --nproc-per-node 8 recipes/mix_from_losses.py RECIPE.toml [section.key=value ...]
"""

import math
import sys

from tokshard.run_files.recipe import load_config
from tokshard.trainer.loop import train

RATE, LEAST = 0.1, 0.05


def follow(record):
    """Weights after a step, from its line alone: a run that was killed and resumed gets the same ones."""
    losses, mean = record.get("loss_by_corpus"), record.get("loss")
    if not losses:
        return None  # an evaluation, or a step that was skipped
    weights = {name: corpus["weight"] for name, corpus in record["corpora"].items()}
    for name, loss in losses.items():
        weights[name] *= 1.0 if loss is None else math.exp(RATE * (loss - mean))  # None: the step read nothing of it
    total = sum(weights.values())
    return {name: weight and max(LEAST, weight / total) for name, weight in weights.items()}  # 0 pauses a corpus


if __name__ == "__main__":
    number = train(load_config(sys.argv[1], sys.argv[2:]), on_record=follow)
    sys.exit(128 + number if number else 0)  # a signal ended it after a save
