"""A loop of plain torch, such as that of nanochat, with FSDP2 and DCP. The same command continues it on any ranks.

torchrun --nproc-per-node 2 recipes/with_torch.py CORPUS OUT STEPS
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from tokshard.runtime import StreamingLoader, StreamPlan

GLOBAL_BATCH, SEQ_LEN = 12, 32


class Everything:
    """Model and optimizer for DCP, in a form that any number of ranks loads."""

    def __init__(self, model, optimizer):
        self.model, self.optimizer = model, optimizer

    def state_dict(self):
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def save(out, step, states):
    partial, final = f"{out}/step-{step}.partial", f"{out}/step-{step}"
    checkpoint.save(states, checkpoint_id=partial)  # ends on all ranks at once
    if distributed.get_rank() == 0:
        os.rename(partial, final)  # a checkpoint is there as a whole, or not at all


def latest(out):
    """The step of the newest checkpoint, 0 if there is none; the same on every rank."""
    names = os.listdir(out) if os.path.isdir(out) else []
    found = [max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)]
    distributed.broadcast_object_list(found)
    return found[0]


def main(corpus, out, steps):
    distributed.init_process_group()  # the loader finds its rank there
    loader = StreamingLoader(StreamPlan(corpus, seq_len=SEQ_LEN, seed=17), global_batch_size=GLOBAL_BATCH)
    torch.manual_seed(17)
    model = nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    states = {"train": Everything(model, optimizer), "loader": loader}
    done = latest(out)
    if done:
        checkpoint.load(states, checkpoint_id=f"{out}/step-{done}")
    for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):  # none after the last step
        print(f"rank {distributed.get_rank()} samples {batch['sample_index'].tolist()}", flush=True)
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        weights = batch.get("loss_weights", batch["labels"] != -100).flatten()  # conversations have the key
        # step_weight is the total weight of the targets of all ranks: their totals differ, so a mean of their means is
        # wrong. FSDP divides the sum of gradients by the number of ranks; a step without targets has weight 0
        ((losses * weights).sum() / (batch["step_weight"] or 1) * distributed.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            save(out, step, states)
    loader.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
