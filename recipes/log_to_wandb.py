"""The trainer with its metrics in Weights & Biases; the same command continues both.

torchrun --nproc-per-node 8 recipes/log_to_wandb.py RECIPE.toml NAME [section.key=value ...]
"""

import os
import sys

import wandb

from tokshard.run_files.recipe import load_config
from tokshard.trainer.loop import train
from tokshard.trainer.metrics_file import scalars

recipe, name, *changes = sys.argv[1:]
if os.environ.get("RANK", "0") == "0":
    wandb.init(project="tokshard", id=name, resume="allow")
number = train(load_config(recipe, changes), on_record=lambda of: wandb.log(dict(scalars(of)), step=of["step"]))
sys.exit(128 + number if number else 0)  # a signal ended it after a save
