"""Train with JAX, data-parallel. The same command continues where the last one stopped, with any number of processes.

python recipes/with_jax.py CORPUS OUT STEPS COORDINATOR:PORT PROCESSES PROCESS
"""

import json
import os
import sys

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tokshard.runtime import NumpyLoader, StreamPlan

GLOBAL_BATCH, SEQ_LEN, VOCABULARY, WIDTH = 12, 32, 2**14, 16


def mean_loss(parameters, input_ids, labels, weights):
    logits = parameters["embedding"][input_ids] @ parameters["head"]
    logs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    total = weights.sum()  # over the global batch; 0 if it has no targets
    return -(logs * weights).sum() / jnp.where(total > 0, total, 1)


@jax.jit
def train_step(parameters, *rows):
    loss, gradients = jax.value_and_grad(mean_loss)(parameters, *rows)
    return jax.tree.map(lambda value, gradient: value - 0.1 * gradient, parameters, gradients), loss


def main(corpus, out, steps):
    rank, world_size = jax.process_index(), jax.process_count()
    loader = NumpyLoader(
        StreamPlan(corpus, seq_len=SEQ_LEN, seed=17),
        global_batch_size=GLOBAL_BATCH,
        dp_rank=rank,
        dp_world_size=world_size,
    )
    rng, done, loss, path = np.random.default_rng(17), 0, np.nan, f"{out}/checkpoint.npz"
    parameters = {
        "embedding": rng.normal(size=(VOCABULARY, WIDTH)).astype(np.float32),
        "head": rng.normal(size=(WIDTH, VOCABULARY)).astype(np.float32),
    }
    if os.path.exists(path):
        with np.load(path) as saved:
            parameters = {name: saved[name] for name in parameters}
            state = json.loads(str(saved["state"]))
        done = state["step"]
        loader.load_state_dict(state["loader"])
    mesh = Mesh(jax.devices(), ("data",))
    by_rows, everywhere = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("data",), ()))
    parameters = jax.tree.map(lambda value: jax.make_array_from_process_local_data(everywhere, value), parameters)
    for step, batch in zip(range(done + 1, steps + 1), loader, strict=False):  # none after the last step
        print(f"rank {rank} samples {batch['sample_index'].tolist()}", flush=True)
        weights = batch.get("loss_weights", batch["labels"] != -100)  # conversations have the key
        # astype copies: the loader uses the memory of a batch again, and JAX on the CPU would go on reading it
        parts = batch["input_ids"].astype(np.int32), batch["labels"].astype(np.int32), weights.astype(np.float32)
        rows = [jax.make_array_from_process_local_data(by_rows, part) for part in parts]
        parameters, loss = train_step(parameters, *rows)
        if step % 3 == 0 and rank == 0:  # one copy: state and parameters are the same in every process
            arrays = {name: np.asarray(value) for name, value in parameters.items()}
            state = json.dumps({"step": step, "loader": loader.state_dict()})
            os.makedirs(out, exist_ok=True)
            np.savez(f"{path}.partial.npz", **arrays, state=state)
            os.replace(f"{path}.partial.npz", path)
    print(f"step {steps} loss {float(loss):.4f}", flush=True)
    loader.close()


if __name__ == "__main__":
    # on Slurm, Kubernetes, Cloud TPU and under MPI, initialize() finds these itself
    jax.distributed.initialize(sys.argv[4], num_processes=int(sys.argv[5]), process_id=int(sys.argv[6]))
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    jax.distributed.shutdown()
