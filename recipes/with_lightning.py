"""Train under Lightning. The same command continues where the last one stopped, with any number of devices.

python recipes/with_lightning.py CORPUS OUT STEPS DEVICES
"""

import os
import sys

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

from tokshard.runtime import StreamingLoader, StreamPlan


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14))

    def train_dataloader(self):  # is called once torch.distributed is set up, where the loader finds its rank
        return StreamingLoader(StreamPlan(corpus, seq_len=32, seed=17), global_batch_size=12)

    def training_step(self, batch, _):
        print(f"rank {self.global_rank} samples {batch['sample_index'].tolist()}", flush=True)
        logits, labels = self.layers(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        weights = batch.get("loss_weights", batch["labels"] != -100).flatten()  # conversations have the key
        # step_weight is the total weight of the targets of all ranks, 0 if there are none; Lightning averages gradients
        # over ranks
        total = torch.where(batch["step_weight"] > 0, batch["step_weight"], 1)
        return (losses * weights).sum() / total * self.trainer.world_size

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


corpus, out, steps, devices = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
trainer = lightning.Trainer(
    max_steps=steps,
    limit_train_batches=steps,  # without it, Lightning fetches a batch ahead, and a checkpoint would count that one too
    devices=devices,
    logger=False,
    callbacks=[ModelCheckpoint(out, every_n_train_steps=3, save_last=True, save_top_k=-1)],
)
last = f"{out}/last.ckpt"
trainer.fit(Model(), ckpt_path=last if os.path.exists(last) else None)
