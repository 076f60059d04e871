"""Run tokshard's trainer under Ray Train. The same command continues the run, with any number of workers.

python recipes/with_ray_train.py RECIPE.toml WORKERS section.key=value ...

All nodes need the shards and train.out at the same paths, which Ray Train takes relative to a directory of its own: so
give absolute ones.
"""

import sys

from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def run(arguments):
    from tokshard.run_files.recipe import load_config
    from tokshard.trainer.loop import train

    train(load_config(arguments["recipe"], arguments["overrides"]))  # uses the process group that Ray Train has made


def main(recipe, num_workers, overrides, *, use_gpu):
    trainer = TorchTrainer(
        run,
        train_loop_config={"recipe": recipe, "overrides": overrides},
        # the trainer adds up counts on the CPU, so NCCL alone will not do
        torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if use_gpu else "gloo"),
        scaling_config=ScalingConfig(num_workers=num_workers, use_gpu=use_gpu),
        run_config=RunConfig(failure_config=FailureConfig(max_failures=3)),  # each attempt continues
    )
    trainer.fit()


if __name__ == "__main__":
    import torch

    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:], use_gpu=torch.cuda.is_available())
