"""Reads the batches of recipes/with_megatron_lm.py on gloo ranks, as the training loop of Megatron-LM does.

python -m torch.distributed.run --nproc-per-node 4 tests/interop/megatron_on_cpu.py OUT CASES

The process groups and the iterator around the loader are those of megatron-core. Its wheel has no training loop: here
TP rank 0 reads and broadcasts, and the state of the loader is saved under the name that Megatron-LM gives it.
"""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state as mpu
from megatron.core.rerun_state_machine import RerunDataIterator, initialize_rerun_state_machine

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "recipes"))
from with_megatron_lm import datasets  # noqa: E402

GLOBAL_BATCH = 12


def next_batch(iterator: RerunDataIterator | None) -> dict[str, torch.Tensor]:
    """The next micro-batch of this rank's group of tensor parallelism, which its rank 0 reads."""
    sent = [None if iterator is None else next(iterator)]
    group, source = mpu.get_tensor_model_parallel_group(), mpu.get_tensor_model_parallel_src_rank()
    torch.distributed.broadcast_object_list(sent, src=source, group=group)
    assert sent[0] is not None
    return sent[0]


def main(out: Path, case: dict[str, Any]) -> None:
    """Read the steps of a case, and save the state and what this rank read."""
    sizes = {f"{name}_parallel_size": case.get(name, 1) for name in ("tensor_model", "pipeline_model", "context")}
    mpu.initialize_model_parallel(**sizes)
    args = Namespace(**case["args"], save=str(out), load=str(out), valid_data_path=None)
    train, *_ = datasets(args, case.get("vp_stage"))
    assert (train is None) == (mpu.get_tensor_model_parallel_rank() > 0)
    iterator = train and RerunDataIterator(train)
    dp_rank, read = mpu.get_data_parallel_rank(), list[dict[str, torch.Tensor]]()
    for step in range(args.iteration + 1, case["stop"] + 1):
        num_micro_batches = GLOBAL_BATCH // args.micro_batch_size // mpu.get_data_parallel_world_size()
        read += [next_batch(iterator) for _ in range(num_micro_batches)]
        if step % 3 == 0 and iterator and mpu.is_pipeline_first_stage(ignore_virtual=True):
            place = "mp_rank_00" if mpu.get_pipeline_model_parallel_world_size() == 1 else "mp_rank_00_000"
            path = Path(args.dataloader_save, f"iter_{step:07d}", place, f"train_dataloader_dprank{dp_rank:03d}.pt")
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save({"dataloader_state_dict": iterator.iterable.save_state()}, path)
    rank = torch.distributed.get_rank()
    torch.save({"dp_rank": dp_rank, "read": read}, out / f"{case['name']}-{rank}.pt")
    torch.distributed.barrier()
    mpu.destroy_model_parallel()


if __name__ == "__main__":
    torch.distributed.init_process_group("gloo")
    initialize_rerun_state_machine()
    for each in json.loads(sys.argv[2]):
        main(Path(sys.argv[1]), each)
    torch.distributed.destroy_process_group()
