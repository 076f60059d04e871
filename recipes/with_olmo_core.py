"""Train under OLMo-core. The same command continues where the last one stopped, on any number of ranks.

torchrun --nproc-per-node 2 recipes/with_olmo_core.py CORPUS OUT STEPS
"""

import sys

import torch
from olmo_core.data import DataLoaderBase
from olmo_core.distributed.parallel import DataParallelType
from olmo_core.distributed.utils import get_rank, get_world_size
from olmo_core.nn.transformer import TransformerConfig
from olmo_core.optim import AdamWConfig
from olmo_core.train import Duration, TrainerConfig, prepare_training_environment, teardown_training_environment
from olmo_core.train.callbacks import CheckpointerCallback
from olmo_core.train.train_module import TransformerDataParallelConfig, TransformerTrainModuleConfig

from tokshard.runtime import StreamingLoader, StreamPlan

GLOBAL_BATCH, SEQ_LEN = 12, 32


class PlanLoader(DataLoaderBase):
    """A plan as OLMo-core reads it: one epoch without an end, and sizes in tokens."""

    def __init__(self, plan, *, global_batch_size, work_dir, dp_rank, dp_world_size):
        super().__init__(
            work_dir=work_dir,
            global_batch_size=global_batch_size * plan.seq_len,
            dp_rank=dp_rank,
            dp_world_size=dp_world_size,
        )
        self._loader = StreamingLoader(
            plan, global_batch_size=global_batch_size, dp_rank=dp_rank, dp_world_size=dp_world_size
        )
        self._seq_len = plan.seq_len

    total_batches = None  # of the epoch

    def _iter_batches(self):
        for batch in self._loader:
            print(f"rank {self.dp_rank} samples {batch['sample_index'].tolist()}", flush=True)
            if "loss_weights" in batch and not torch.equal(batch["loss_weights"], (batch["labels"] != -100).float()):
                raise ValueError(
                    "OLMo-core's loss knows no weights of targets: build the corpus without --loss weighted"
                )
            yield {key: batch[key] for key in ("input_ids", "labels")}  # its own labels would cross documents

    def state_dict(self):
        return {"tokshard": self._loader.state_dict()}

    def load_state_dict(self, state_dict):
        self._loader.load_state_dict(state_dict["tokshard"])

    def reshuffle(self, epoch=None, **_):
        self._epoch = epoch or 1  # a plan goes on from epoch to epoch by itself

    def get_mock_batch(self):
        rows = torch.zeros(self.rank_batch_size // self._seq_len, self._seq_len, dtype=torch.int64)
        return {"input_ids": rows, "labels": rows.clone()}

    def global_num_tokens_in_batch(self, _):
        return self.global_batch_size


def main(corpus, out, steps):
    prepare_training_environment(seed=17, backend="gloo", shared_filesystem=True)
    model = TransformerConfig.llama_like(d_model=64, vocab_size=2**14, n_layers=1, n_heads=4)
    train_module = TransformerTrainModuleConfig(
        rank_microbatch_size=GLOBAL_BATCH // get_world_size() * SEQ_LEN,
        max_sequence_length=SEQ_LEN,
        optim=AdamWConfig(lr=1e-3),
        dp_config=TransformerDataParallelConfig(name=DataParallelType.fsdp),
    ).build(model.build(init_device="meta"))
    group = train_module.dp_process_group
    loader = PlanLoader(
        StreamPlan(corpus, seq_len=SEQ_LEN, seed=17),
        global_batch_size=GLOBAL_BATCH,
        work_dir=f"{out}/work",
        dp_rank=get_rank(group),
        dp_world_size=get_world_size(group),
    )
    trainer = TrainerConfig(
        save_folder=out,
        max_duration=Duration.steps(steps),
        callbacks={"checkpointer": CheckpointerCallback(save_interval=3, pre_train_checkpoint=False, save_async=False)},
    ).build(train_module, loader)
    trainer.fit()
    teardown_training_environment()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
