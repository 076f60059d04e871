"""The mix follows the losses while a small model trains: a corpus is read more if its loss is higher. One process.

python recipes/mix_from_losses.py OUT STEPS NAME=CORPUS NAME=CORPUS ...
"""

import os
import sys

import torch
from torch import nn

from tokshard.runtime import StreamingLoader, StreamPlan


def main(out, steps, corpora):
    loader = StreamingLoader(StreamPlan(corpora, seq_len=32, seed=17), global_batch_size=12)
    torch.manual_seed(17)
    model = nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    states, step, means = {"model": model, "optimizer": optimizer, "loader": loader}, 0, torch.ones(len(corpora))
    if os.path.exists(out):
        step, means, saved = torch.load(out)
        for name, state in states.items():
            state.load_state_dict(saved[name])
    for batch in loader:
        print(step + 1, batch["sample_index"].tolist(), batch["corpus_index"].tolist(), flush=True)
        logits, labels = model(batch["input_ids"]).transpose(1, 2), batch["labels"]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none").sum(1)
        (losses.sum() / (labels != -100).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
        for index in batch["corpus_index"].unique().tolist():
            rows = batch["corpus_index"] == index
            means[index] = 0.9 * means[index] + 0.1 * (losses[rows].sum() / (labels[rows] != -100).sum()).item()
        loader.set_weights(dict(zip(loader.plan.names, means.tolist(), strict=True)))  # from the next step on
        step += 1
        if step % 3 == 0:
            saved = {name: state.state_dict() for name, state in states.items()}
            torch.save((step, means, saved), f"{out}.partial")
            os.replace(f"{out}.partial", out)  # the old state or the new one, as a whole
        if step >= steps:
            break
    loader.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), dict(item.split("=", 1) for item in sys.argv[3:]))
