"""Which rows a rank reads under torch.distributed, and the state of all ranks in one checkpoint.

Ranks that are killed and come back as another number of ranks: tests/trainer/kills.py (`make soak`).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.ranks import forked
from tests.runtime.loaders import expected_rows, rows_of, take, two_corpora
from tokshard.errors import PlanError
from tokshard.runtime import StreamingLoader

BATCH = 12


@contextmanager
def rank_of_four(rank: int) -> Iterator[None]:
    """This process as one rank of four, which exchanges nothing with the others."""
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def samples_of(mesh: Any) -> list[int]:
    with StreamingLoader(two_corpora(), global_batch_size=BATCH, dp_mesh=mesh) as loader:
        found: list[int] = next(iter(loader))["sample_index"].tolist()
        return found


def test_a_device_mesh_gives_its_data_parallel_coordinates_in_row_major_order() -> None:
    found = []
    for rank in range(4):
        with rank_of_four(rank):
            hsdp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
            tensor = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            pipeline = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
            three = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "cp", "dp_shard"))
            lightning = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
            other = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "rows"))
            flat = hsdp["dp_replicate", "dp_shard"]._flatten("dp")
            of_data = (None, hsdp, three["dp_replicate", "dp_shard"], flat, tensor["dp"], other["data"], pipeline["dp"])
            found.append(list(map(samples_of, of_data)))
            # a mesh that would give each of several ranks other rows, which must read the same
            refused = [(tensor, "tp"), (pipeline, "pp"), (three, "cp"), (tensor["tp"], "tp"), (other, "rows")]
            for mesh, dimension in (*refused, (lightning, "tensor_parallel")):
                with pytest.raises(PlanError, match=f"that differ only in {dimension} must read the same rows"):
                    samples_of(mesh)
    quarters = [list(range(3 * part, 3 * part + 3)) for part in range(4)]
    first, second = list(range(6)), list(range(6, 12))
    assert [list(ranks) for ranks in zip(*found, strict=True)] == [
        *[quarters] * 4,
        *[[first, first, second, second]] * 2,
        [first, second, first, second],
    ]


def train(folder: Path, name: str, rank: int, ranks: int, *, steps: int, is_killed: bool = False) -> None:
    """Go on from the last checkpoint, write down what is read, and save; or die while the others wait in the save."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store {name}", rank=rank, world_size=ranks)
    loader = StreamingLoader(two_corpora(), global_batch_size=BATCH, uneven="pad")
    state = {"loader": loader, "steps": torch.zeros(1)}
    saved = max(folder.glob("*/.metadata"), default=None)  # written last
    if saved:
        dcp.load(state, checkpoint_id=saved.parent)
    (folder / f"{name} {rank}").write_text(json.dumps(rows_of(take(loader, steps))))
    state["steps"] += steps
    if is_killed and rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dcp.save(state, checkpoint_id=folder / name)
    loader.close()
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning", "ignore:.*fork.*:DeprecationWarning")
def test_ranks_go_on_from_the_last_whole_checkpoint_of_another_number_of_ranks_which_holds_the_state_once(
    tmp_path: Path,
) -> None:
    def run(name: str, ranks: int, **options: Any) -> list[int]:
        pids = [forked(partial(train, tmp_path, name, rank, ranks, **options), seconds=60) for rank in range(ranks)]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in reversed(pids)]
        return codes[::-1]

    def read(name: str, ranks: int) -> list[Any]:
        rows = [row for rank in range(ranks) for row in json.loads((tmp_path / f"{name} {rank}").read_text())]
        return sorted((row for row in rows if row["sample_index"] >= 0), key=lambda row: row["sample_index"])

    assert run("1", 3, steps=3) == [0] * 3
    metadata = dcp.FileSystemReader(tmp_path / "1").read_metadata()
    assert [index.fqn for index in metadata.storage_data].count("loader.cursor") == 1
    content = b"".join(path.read_bytes() for path in (tmp_path / "1").iterdir() if path.name != ".metadata")
    assert content.count(b"tokshard_cursor") == 1
    failed, killed = run("2", 2, steps=4, is_killed=True)
    assert (failed != 0, killed) == (True, -signal.SIGKILL)
    assert run("3", 4, steps=2) == [0] * 4
    assert [*read("1", 3), *read("3", 4)] == expected_rows(two_corpora(), range(5 * BATCH))
    # and a plain process of any size goes on
    with StreamingLoader(two_corpora(), global_batch_size=5) as loader:
        dcp.load({"loader": loader}, checkpoint_id=tmp_path / "3", no_dist=True)
        assert rows_of(take(loader, 1)) == expected_rows(two_corpora(), range(5 * BATCH, 5 * BATCH + 5))
