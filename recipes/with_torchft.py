"""Replicas under torchft, one of which is killed in every third step and comes back: no sample is lost or read twice.

    python recipes/with_torchft.py CORPUS OUT STEPS REPLICAS

It starts a lighthouse and the replicas, each of one process. Each writes its steps to OUT/replica-N.jsonl. The losses
are those of a run in which nothing is killed.
"""

import json
import multiprocessing
import os
import signal
import sys
import time

import torch
from torch import distributed, nn
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from tokshard.runtime import StreamingLoader, StreamPlan

GLOBAL_BATCH, SEQ_LEN, LEAST_REPLICAS = 16, 32, 2


class Kills:
    """Which replica is killed when. Training needs none of this."""

    def __init__(self, steps, replicas):
        self.steps, self.replicas = steps, replicas
        self.done = multiprocessing.RawValue("q", 0)  # steps that are done
        self.step = multiprocessing.RawValue("q", -1)  # of the last kill

    def wait_for_all(self, manager):
        """Wait for the replica that was killed."""
        while self.is_due(manager.current_step()) and manager.num_participants() < self.replicas:
            time.sleep(0.2)
            manager.start_quorum()

    def is_due(self, step):
        """Whether a step is for all replicas, and none was killed in it."""
        return (step % 3 < 2 or step == self.steps - 1) and self.step.value < step

    def kill(self, step, rank):
        if step % 3 == 1 and self.is_due(step) and rank == step // 3 % self.replicas:
            self.step.value = step
            os.kill(os.getpid(), signal.SIGKILL)


def begin(corpus):
    plan = StreamPlan(corpus, seq_len=SEQ_LEN, seed=17)
    loader = StreamingLoader(plan, global_batch_size=GLOBAL_BATCH, dp_rank=0, dp_world_size=1, uneven="pad")
    torch.manual_seed(17)
    model = nn.Sequential(nn.Embedding(2**14, 16), nn.Linear(16, 2**14))
    return loader, model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def loss_of(model, batch):
    """The part of this replica in the loss of a step: step_weight is of all replicas, however many there are."""
    logits, labels = model(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten()
    losses = nn.functional.cross_entropy(logits, labels, reduction="none")
    weights = batch.get("loss_weights", batch["labels"] != -100).flatten()  # conversations have the key
    return (losses * weights).sum() / (batch["step_weight"] or 1)  # 0 in a step without targets


def train(corpus, out, lighthouse, number, kills):
    torch.set_num_threads(1)
    loader, model, optimizer = begin(corpus)
    states = {"loader": loader, "model": model, "optimizer": optimizer}
    store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # torchrun has one
    group = ProcessGroupGloo()
    manager = Manager(
        pg=group,
        # a replica that joins gets the states of one that trains
        load_state_dict=lambda found: [state.load_state_dict(found[name]) for name, state in states.items()],
        state_dict=lambda: {name: state.state_dict() for name, state in states.items()},
        min_replica_size=LEAST_REPLICAS,
        use_async_quorum=False,  # or a replica that joins would have no rows in its first step
        lighthouse_addr=lighthouse,
        replica_id=f"replica-{number}",
        store_addr="localhost",
        store_port=store.port,
        rank=0,
        world_size=1,
    )
    batches, parameters = iter(loader), list(model.parameters())
    while manager.current_step() < kills.steps:
        manager.start_quorum()
        kills.wait_for_all(manager)
        step, rank, replicas = manager.current_step(), manager.participating_rank(), manager.num_participants()
        before = loader.state_dict()
        loader.resize(rank, replicas)
        batch = next(batches)
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        kills.kill(step, rank)
        sums = torch.cat([loss.detach()[None], *(each.grad.flatten() for each in parameters)])
        manager.allreduce(sums, reduce_op=distributed.ReduceOp.SUM).wait()  # a sum: the parts add up to the loss
        if not manager.should_commit():  # a replica was lost, so the others read this step again
            loader.load_state_dict(before)
            group.abort()  # or a replica that waits for this one, and not for the lost one, would wait on
            continue
        for each, gradient in zip(parameters, sums[1:].split([each.numel() for each in parameters]), strict=True):
            each.grad.copy_(gradient.view_as(each))
        optimizer.step()
        samples = [sample for sample in batch["sample_index"].tolist() if sample >= 0]  # rows of padding have -1
        line = {"step": step, "replicas": replicas, "samples": samples, "loss": sums[0].item()}
        with open(f"{out}/replica-{number}.jsonl", "a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
        kills.done.value = step + 1
    loader.close()
    manager.shutdown()


def main(corpus, out, steps, replicas):
    context = multiprocessing.get_context("forkserver")  # it imports torch once, for all replicas
    context.set_forkserver_preload(["torch", "torch._dynamo", "torchft", "tokshard.runtime"])
    # a step waits for all replicas that are alive, and they say so ten times a second
    times = {"join_timeout_ms": 60_000, "heartbeat_timeout_ms": 1_000}
    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=LEAST_REPLICAS, **times)
    kills = Kills(steps, replicas)

    def start(number):
        arguments = corpus, out, lighthouse.address(), number, kills
        process = context.Process(target=train, args=arguments, daemon=True)  # daemon: it ends with this one
        process.start()
        return process

    running = {number: start(number) for number in range(replicas)}
    while running:
        time.sleep(0.01)
        for number, process in list(running.items()):
            if process.exitcode == -signal.SIGKILL and kills.done.value < steps:
                if kills.done.value > kills.step.value:  # the others have read the step without it
                    running[number] = start(number)
            elif process.exitcode is not None:
                del running[number]
                if process.exitcode not in (0, -signal.SIGKILL):
                    sys.exit(f"replica {number} failed")
    lighthouse.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
