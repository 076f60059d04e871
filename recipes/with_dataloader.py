"""Train with torchdata's StatefulDataLoader. The same command continues where the last one stopped, on any world size.

torchrun --nproc-per-node 2 recipes/with_dataloader.py CORPUS OUT STEPS
"""

import os
import sys

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from tokshard.runtime import StreamDataset, StreamPlan, belong_to_the_loop


def main(corpus, out, steps):
    distributed.init_process_group("gloo")  # the dataset finds its rank there
    dataset = StreamDataset(StreamPlan(corpus, seq_len=32, seed=17), global_batch_size=12)
    loader = StatefulDataLoader(
        dataset,
        batch_size=None,
        sampler=dataset.sampler,
        num_workers=2,
        multiprocessing_context="spawn",
        worker_init_fn=belong_to_the_loop,  # so that SIGTERM of a launcher does not take them before the loop has saved
    )
    torch.manual_seed(17)
    model = DistributedDataParallel(nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done, path = 0, f"{out}/checkpoint.pt"
    if os.path.exists(path):
        saved = torch.load(path)
        done = saved["step"]
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        dataset.sampler.load_state_dict(saved["loader"])  # of any number of ranks and workers
    for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):  # none after the last step
        print(f"rank {distributed.get_rank()} samples {batch['sample_index'].tolist()}", flush=True)
        logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        weights = batch.get("loss_weights", batch["labels"] != -100).flatten()  # conversations have the key
        # step_weight is the total weight of the targets of all ranks, 0 if there are none;
        # DistributedDataParallel divides the sum of gradients by the number of ranks
        ((losses * weights).sum() / (batch["step_weight"] or 1) * distributed.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 3 == 0:
            states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict()}
            if distributed.get_rank() == 0:  # one copy: the state of the loader is the same on every rank
                os.makedirs(out, exist_ok=True)
                torch.save({"step": step, **states}, f"{path}.partial")
                os.replace(f"{path}.partial", path)  # a kill during a save leaves the checkpoint before it
    distributed.destroy_process_group()


if __name__ == "__main__":  # the loader's workers import this file
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
