"""Three gloo ranks read a bucket, and the store fails for good for one of them: what each rank gets.

    python -m tests.store.test_ranks_of_a_store DIRECTORY BUCKET PORT

This process imports torch once, and forks the ranks. Rank 1 reaches the store at another port: through a proxy.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.ranks import forked, free_port, worst_of
from tests.store.faulty_proxy import FaultyProxy, Request, status
from tests.store.test_remote_corpora import copy_to
from tests.trainer.runs import ROOT, configuration, corpora
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.bytes.cache import Cache

pytestmark = [pytest.mark.remote, pytest.mark.timeout(120)]

RANKS, FAILING, STEPS = 3, 1, 60
SIZES: dict[str, Any] = {"seq_len": 32, "block_tokens": 128, "window_blocks": 4, "seed": 7}
PATIENCE = 0.5
"""Seconds for which a failing request is tried again."""


def passed_on(proxy: FaultyProxy, request: Request, client: socket.socket) -> None:
    client.sendall(proxy.forward(request))


@pytest.fixture
def found(s3: str, s3_port: int, s3_proxy: FaultyProxy, tmp_path: Path) -> list[dict[str, Any]]:
    """What each rank got: from a plain loader, then in the trainer."""
    for name, path in corpora(tmp_path / "corpora").items():
        copy_to(f"{s3}/{name}", Path(path))
    # requests for tokens: some are answered, and then none until the end of the test
    s3_proxy.fail(*[passed_on] * 20, matches="shard-", for_ever=status(503))
    command = [sys.executable, "-m", "tests.store.test_ranks_of_a_store", str(tmp_path), s3, str(s3_port)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert s3_proxy.requests, "rank 1 went through the proxy"
    return [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(RANKS)]


def test_a_store_that_fails_for_one_rank_ends_the_trainer_on_all_and_a_plain_loader_on_that_rank_alone(
    found: list[dict[str, Any]], tmp_path: Path
) -> None:
    (error,) = {rank["trainer"] for rank in found}
    assert re.match(r"StoreError: rank 1: s3://.*/shard-\S+ .*503", error), error
    local = {name: str(tmp_path / "corpora" / name) for name in ("code", "prose")}
    for number, rank in enumerate(found):
        rows, place = rank["rows"], {"dp_rank": number, "dp_world_size": RANKS}
        with NumpyLoader(StreamPlan(local, **SIZES), global_batch_size=RANKS, **place) as loader:
            expected = [batch["input_ids"].tolist() for batch in itertools.islice(loader, STEPS)]
        assert [[row] for row in rows] == expected[: len(rows)]
        if number == FAILING:
            assert 0 < len(rows) < STEPS
            assert re.match(r"StoreError: s3://.*/shard-\S+ .*503", rank["plain"]), rank["plain"]
        else:
            assert (len(rows), rank["plain"]) == (STEPS, "none")


def run_rank(rank: int, directory: Path, bucket: str, group_port: int) -> None:
    from tokshard.errors import TokshardError
    from tokshard.run_files.recipe import Parallel, resolve
    from tokshard.runtime import StreamingLoader
    from tokshard.store.requests import RemoteOptions
    from tokshard.trainer.loop import train
    from tokshard.trainer.parallel import process_group

    place = {"RANK": rank, "WORLD_SIZE": RANKS, "MASTER_PORT": group_port, "MASTER_ADDR": "127.0.0.1"}
    os.environ |= {name: str(value) for name, value in place.items()}
    uris = {name: f"{bucket}/{name}" for name in ("code", "prose")}
    found: dict[str, Any] = {"rows": [], "plain": "none", "trainer": "none"}
    fields = configuration(uris, directory / "out", train__steps=1_000, checkpoint__every=0)
    fields["data"] |= {"memory_bytes": "0MiB", "block_tokens": 128, "window_blocks": 4}
    options = partial(RemoteOptions, patience=PATIENCE)
    with process_group(Parallel(device="cpu")), patch("tokshard.store.remote.RemoteOptions", options):
        plan = StreamPlan(uris, cache=Cache(memory_bytes=0), **SIZES)  # so that every batch asks the store
        loader = StreamingLoader(plan, global_batch_size=RANKS)
        try:
            for batch in itertools.islice(loader, STEPS):
                found["rows"] += batch["input_ids"].tolist()
        except TokshardError as error:
            found["plain"] = f"{type(error).__name__}: {error}"
        loader.close()
        try:
            train(resolve(fields))
        except TokshardError as error:
            found["trainer"] = f"{type(error).__name__}: {error}"
    (directory / f"rank-{rank}.json").write_text(json.dumps(found))


def main() -> None:
    # once for all ranks
    import torch._dynamo  # noqa: F401

    import tokshard.trainer.loop  # noqa: F401

    warnings.simplefilter("ignore")
    directory, bucket, healthy = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    port = free_port()

    def run(rank: int) -> None:
        if rank != FAILING:
            os.environ["AWS_ENDPOINT_URL"] = f"http://127.0.0.1:{healthy}"
        run_rank(rank, directory, bucket, port)

    sys.exit(worst_of([forked(partial(run, rank), seconds=90) for rank in range(RANKS)]))


if __name__ == "__main__":
    main()
