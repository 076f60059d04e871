"""What the launcher of a job told this process: its rank, and which GPU is its own."""

from __future__ import annotations

from collections.abc import Mapping

from tokshard.errors import UsageError


def rank_of(environment: Mapping[str, str]) -> int | None:
    """The rank that torchrun gave this process; None: it was started alone.

    Raises:
        UsageError: another launcher started it, or variables are missing.
    """
    if "RANK" in environment:
        if missing := [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in environment]:
            raise UsageError(f"RANK is set, {', '.join(missing)} not", hint="start the job with torchrun")
        return int(environment["RANK"])
    for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"):
        if (tasks := environment.get(name, "1")) not in ("", "0", "1"):
            raise UsageError(
                f"{name} is {tasks}, but RANK is not set: each of the {tasks} tasks would be a run of its own",
                hint=f"start one torchrun per node: srun --ntasks-per-node 1 torchrun ...; or unset {name} to train on "
                "one rank",
            )
    return None


def device_index(local_rank: int, num_devices: int) -> int:
    """The GPU of a rank. A launcher may show each task only its own GPU, which is then number 0.

    Raises:
        UsageError: there are fewer GPUs than ranks.
    """
    if local_rank < num_devices:
        return local_rank
    if num_devices == 1:
        return 0
    raise UsageError(
        f"LOCAL_RANK is {local_rank}, this process sees {num_devices} GPUs",
        hint="start as many ranks per node as it has GPUs, or set parallel.device=cpu",
    )
