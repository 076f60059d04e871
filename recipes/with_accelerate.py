"""Train under Accelerate. The same command continues where the last one stopped, on any number of processes.

accelerate launch --num_processes 2 recipes/with_accelerate.py CORPUS OUT STEPS
"""

import os
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from tokshard.runtime import StreamingLoader, StreamPlan

corpus, out, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
accelerator = Accelerator()  # sets up torch.distributed, where the loader finds its rank: so the loader comes after it
loader = StreamingLoader(StreamPlan(corpus, seq_len=32, seed=17), global_batch_size=12)
accelerator.register_for_checkpointing(loader)  # and is not prepared: each rank has its own rows already

torch.manual_seed(17)
model = nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14))
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

names = os.listdir(out) if os.path.isdir(out) else []
done = max((int(name[5:]) for name in names if name[5:].isdigit()), default=0)
if done:
    accelerator.load_state(f"{out}/step-{done}")
for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):  # none after the last step
    print(f"rank {accelerator.process_index} samples {batch['sample_index'].tolist()}", flush=True)
    tensors = send_to_device(batch, accelerator.device)
    labels = tensors["labels"].flatten()
    losses = nn.functional.cross_entropy(model(tensors["input_ids"]).flatten(0, 1), labels, reduction="none")
    weights = tensors.get("loss_weights", tensors["labels"] != -100).flatten().float()  # conversations have the key
    # the weighted mean over the targets of all ranks; gradients are averaged over ranks, and a step without targets has
    # weight 0
    share = accelerator.num_processes / (batch["step_weight"] or 1)
    accelerator.backward((losses * weights).sum() * share)
    optimizer.step()
    optimizer.zero_grad()
    if step % 3 == 0:
        accelerator.save_state(f"{out}/step-{step}.partial")
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            os.rename(f"{out}/step-{step}.partial", f"{out}/step-{step}")  # a kill during a save leaves no such name
loader.close()
accelerator.end_training()
