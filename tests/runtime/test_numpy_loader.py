"""The loader without torch: the same batches and states, as numpy arrays."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.corpora import write_corpus
from tests.runtime.loaders import two_corpora
from tokshard.errors import PlanError
from tokshard.runtime import NumpyLoader, StreamPlan
from tokshard.runtime.loader import NumpyBatch

PREFETCH = "tokshard-prefetch"


@pytest.fixture(scope="module")
def streaming_loader() -> Any:
    pytest.importorskip("torch")
    from tokshard.runtime import StreamingLoader

    return StreamingLoader


def first(loader: Any, count: int) -> list[Any]:
    return [batch for _, batch in zip(range(count), loader, strict=False)]


def as_lists(batches: list[Any]) -> list[dict[str, Any]]:
    return [{key: (str(value.dtype)[-5:], value.tolist()) for key, value in batch.items()} for batch in batches]


@pytest.mark.parametrize("options", [{}, {"dp_rank": 1, "dp_world_size": 3, "uneven": "pad"}])
def test_batches_are_those_of_the_streaming_loader(options: dict[str, Any], streaming_loader: Any) -> None:
    plan = two_corpora()
    arrays = NumpyLoader(plan, global_batch_size=4, **options)
    tensors = streaming_loader(plan, global_batch_size=4, **options)
    with arrays, tensors:
        assert as_lists(first(arrays, 5)) == as_lists(first(tensors, 5))
        assert arrays.stats()["bytes_read"] == tensors.stats()["bytes_read"]


def test_a_batch_holds_numpy_arrays() -> None:
    with NumpyLoader(two_corpora(), global_batch_size=4) as loader:
        batch: NumpyBatch = next(iter(loader))
    assert {key: (type(value), value.dtype, value.shape) for key, value in batch.items()} == {
        "input_ids": (np.ndarray, np.int64, (4, 6)),
        "labels": (np.ndarray, np.int64, (4, 6)),
        "position_ids": (np.ndarray, np.int64, (4, 6)),
        "corpus_index": (np.ndarray, np.int64, (4,)),
        "sample_index": (np.ndarray, np.int64, (4,)),
        "cu_seqlens": (np.ndarray, np.int32, (64,)),
        "max_seqlen": (np.ndarray, np.int64, ()),
    }


def test_a_state_of_either_loader_continues_the_other(streaming_loader: Any) -> None:
    plan = two_corpora()
    with NumpyLoader(plan, global_batch_size=4) as arrays, streaming_loader(plan, global_batch_size=4) as tensors:
        first(arrays, 3)
        tensors.load_state_dict(arrays.state_dict())
        first(tensors, 2)
        arrays.load_state_dict(tensors.state_dict())
        assert next(iter(arrays))["sample_index"].tolist() == [20, 21, 22, 23]


def test_leaving_the_block_closes_the_loader() -> None:
    with NumpyLoader(two_corpora(), global_batch_size=4) as loader:
        first(loader, 1)
        assert loader.stats()["queue"] >= 0
        assert PREFETCH in {thread.name for thread in threading.enumerate()}
    assert PREFETCH not in {thread.name for thread in threading.enumerate()}


def test_a_loader_says_what_it_reads_and_where_it_is() -> None:
    plan = two_corpora()
    with NumpyLoader(plan, global_batch_size=4, dp_rank=1, dp_world_size=2) as loader:
        first(loader, 3)
        shown = repr(loader)
    assert shown == f"<NumpyLoader of {plan!r} at sample 12: global batches of 4, rank 1 of 2>"


@pytest.mark.parametrize("variable", ["WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"])
def test_without_a_rank_a_job_of_several_processes_is_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "2")
    with pytest.raises(PlanError, match=f"{variable} is 2: the job has several processes") as caught:
        NumpyLoader(two_corpora(), global_batch_size=2)
    assert "give dp_rank and dp_world_size" in caught.value.hint
    NumpyLoader(two_corpora(), global_batch_size=2, dp_rank=0, dp_world_size=2)


def test_it_reads_resumes_and_uses_workers_where_torch_cannot_be_imported() -> None:
    program = """
        import sys

        sys.modules["torch"] = None  # an import of it fails
        from tests.runtime.sources import ListSource
        from tokshard.runtime import NumpyLoader, StreamPlan, expand

        if __name__ == "__main__":
            plan = StreamPlan(
                {"a": ListSource([5, 9, 1, 30, 12] * 4)}, seq_len=6, block_tokens=12, allow_small_blocks=True,
                window_blocks=3, epochs=2,
            )
            with NumpyLoader(plan, global_batch_size=4) as loader:
                samples = []
                for batch in loader:
                    samples += batch["sample_index"].tolist()
                    if len(samples) == 8:
                        state = loader.state_dict()
            with NumpyLoader(plan, global_batch_size=4, prefetch_factor=0) as loader:
                loader.load_state_dict(state)
                for batch in loader:
                    assert batch["sample_index"].tolist() == samples[loader.cursor.sample - 4:][:4] or (
                        loader.cursor.sample == plan.num_samples
                    )
            with NumpyLoader(plan, global_batch_size=4, compact=True) as loader:
                assert expand(next(iter(loader)))["sample_index"].tolist() == samples[:4]
            print(sum(sample >= 0 for sample in samples), plan.num_samples)
            try:
                from tokshard.runtime import StreamingLoader
            except ModuleNotFoundError as error:
                print(error.name, "pip install 'tokshard[torch]'" in str(error))
    """
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["76", "76", "torch", "True"]


def test_the_batch_size_of_a_plans_file_is_that_of_its_loaders_unless_they_are_given_another(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    from tokshard.runtime import StreamDataset, StreamingLoader

    corpus = write_corpus(tmp_path / "corpus", [[1, 2, 3, 0]] * 40)
    mix = tmp_path / "mix.toml"
    for size in ("global_batch_size = 3\n", ""):
        mix.write_text(f'{size}seq_len = 4\ncorpora = {{ a = "{corpus}" }}\n')
        plan = StreamPlan.load(mix)
        assert len(next(iter(NumpyLoader(plan, global_batch_size=2)))["input_ids"]) == 2
        if size:
            assert len(next(iter(NumpyLoader(plan)))["input_ids"]) == 3
            assert len(next(iter(StreamingLoader(plan)))["input_ids"]) == 3
            assert StreamDataset(plan)[next(iter(StreamDataset(plan).sampler))]["input_ids"].shape == (3, 4)
        else:
            with pytest.raises(PlanError, match="global_batch_size is not given"):
                StreamingLoader(plan)
