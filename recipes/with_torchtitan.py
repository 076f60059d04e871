"""Train under torchtitan. The same command continues where the last one stopped, on any number of ranks.

torchrun --nproc-per-node 2 recipes/with_torchtitan.py CORPUS OUT STEPS
"""

import os
import sys
from dataclasses import dataclass

import torch
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.models.llama3.config_registry import llama3_debugmodel

from tokshard.runtime import StreamingLoader, StreamPlan

GLOBAL_BATCH = 12


class Loader(BaseDataLoader):
    """A plan as torchtitan reads it: without its own split by rank, and without its state by rank."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        seed: int = 17

    def __init__(self, config, *, dp_rank, dp_world_size, seq_len, local_batch_size, **_):
        plan = StreamPlan(config.dataset_path, seq_len=seq_len, seed=config.seed)
        # the rank is that among the data-parallel ones, so it is right under tensor and pipeline parallelism too
        self._loader = StreamingLoader(
            plan, global_batch_size=local_batch_size * dp_world_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        self._dp_rank = dp_rank

    def __iter__(self):
        for batch in self._loader:
            print(f"rank {self._dp_rank} samples {batch['sample_index'].tolist()}", flush=True)
            if "loss_weights" in batch and not torch.equal(batch["loss_weights"], (batch["labels"] != -100).float()):
                raise ValueError(
                    "torchtitan's loss knows no weights of targets: build the corpus without --loss weighted"
                )
            yield {"input": batch["input_ids"], "positions": batch["position_ids"]}, batch["labels"]

    def state_dict(self):
        return self._loader.state_dict()

    def load_state_dict(self, state_dict):
        self._loader.load_state_dict(state_dict)


class NoTokenizer(BaseTokenizer):
    """A corpus is tokenized already."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, *_, **__):
        super().__init__()

    def encode(self, *_):
        raise NotImplementedError

    decode = get_vocab_size = encode


def main(corpus, out, steps):
    config = llama3_debugmodel()  # any configuration of torchtitan, by its name
    config.tokenizer = NoTokenizer.Config()
    config.dataloader = Loader.Config(dataset_path=corpus)
    config.training.seq_len = 32
    config.training.steps = steps
    config.training.global_batch_size = GLOBAL_BATCH
    config.training.local_batch_size = GLOBAL_BATCH // int(os.environ["WORLD_SIZE"])
    config.checkpoint = CheckpointManager.Config(enable=True, folder=out, interval=3, last_save_model_only=False)
    config.parallelism.spmd_backend = "partial_dtensor"  # the default needs a nightly build of torch
    config.validator.enable = False
    trainer = config.build()
    try:
        trainer.train()
    finally:
        trainer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
