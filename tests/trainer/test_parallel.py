"""Which rank and which GPU a process is, and how long it waits for others."""

from __future__ import annotations

from datetime import timedelta

import pytest
from torch import distributed
from torch.distributed import distributed_c10d

from tokshard.errors import UsageError
from tokshard.run_files.recipe import Parallel
from tokshard.trainer.launcher import device_index, rank_of
from tokshard.trainer.parallel import limit_waits, make_mesh, process_group

TORCHRUN = {"RANK": "3", "WORLD_SIZE": "8", "MASTER_ADDR": "node", "MASTER_PORT": "1"}


@pytest.mark.parametrize(
    ("environment", "rank"),
    [
        ({}, None),
        ({"SLURM_NTASKS": "1", "PMI_SIZE": "1"}, None),
        (TORCHRUN, 3),
        ({**TORCHRUN, "SLURM_NTASKS": "8"}, 3),
    ],
)
def test_a_process_is_alone_or_has_the_rank_that_torchrun_gave_it(environment: dict[str, str], rank: int) -> None:
    assert rank_of(environment) == rank


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"])
def test_tasks_of_another_launcher_do_not_each_train_a_model_of_their_own(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} is 8, but RANK is not set") as error:
        rank_of({name: "8"})
    assert "torchrun" in error.value.hint


def test_a_rank_without_the_address_of_its_job_is_refused() -> None:
    with pytest.raises(UsageError, match="RANK is set, MASTER_ADDR, MASTER_PORT not"):
        rank_of({"RANK": "0", "WORLD_SIZE": "2"})


def test_a_rank_has_its_own_gpu_or_the_only_one_that_its_launcher_shows() -> None:
    assert [device_index(rank, 4) for rank in range(4)] == [0, 1, 2, 3]
    assert device_index(3, 1) == 0
    with pytest.raises(UsageError, match="LOCAL_RANK is 4, this process sees 4 GPUs"):
        device_index(4, 4)


@pytest.mark.parametrize("is_public", [True, False])
def test_the_private_function_for_timeouts_is_called_only_where_torch_has_no_public_one(
    monkeypatch: pytest.MonkeyPatch, is_public: bool
) -> None:
    """The private one warns where there is another; the torch of the tests may have either."""
    called: list[tuple[str, timedelta]] = []
    monkeypatch.setattr(distributed_c10d, "_set_pg_timeout", lambda limit, _: called.append(("private", limit)))
    monkeypatch.delattr(distributed, "set_timeout", raising=False)
    if is_public:
        monkeypatch.setattr(
            distributed, "set_timeout", lambda limit, _: called.append(("public", limit)), raising=False
        )
    settings = Parallel(device="cpu", step_timeout_seconds=17)
    with process_group(settings) as device:
        limit_waits(make_mesh(settings, device), settings)
    assert set(called) == {("public" if is_public else "private", timedelta(seconds=17))}
