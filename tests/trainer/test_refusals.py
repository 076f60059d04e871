"""What the trainer and its commands refuse. What recipes refuse is in tests/run_files/test_refusals.py."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from tests.corpora import write_corpus
from tests.refusals import Call, Refusal, Said, check, refused, said_in
from tests.trainer.runs import Runs, as_toml, configuration, corpora, tokenizer
from tokshard.trainer.launcher import device_index, rank_of


def given(call: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[Path], Any]:
    return lambda directory: call(directory, *arguments, **options)


def of_torch(name: str) -> Any:
    """A module of the trainer or of its tests, which imports torch."""
    return importlib.import_module(name)


def alone() -> contextlib.AbstractContextManager[Any]:
    return of_torch("tests.trainer.checkpoints").alone()


def runs_in(directory: Path) -> Runs:
    return Runs(corpora(directory / "corpora"), directory)


def start(directory: Path, **changes: Any) -> None:
    """Nothing is written but the file that locks the directory of a run."""
    try:
        runs_in(directory).end_of(**changes)
    finally:
        assert {path.name for path in (directory / "out").glob("*")} <= {"run.lock"}


def evaluate_another_tokenizer(directory: Path) -> None:
    other = write_corpus(directory / "other", [[1, 2, 0]], tokenizer=tokenizer().replace(b"word63", b"other"))
    start(directory, evaluation__corpora={"other": str(other)})


def set_weights_of_one_corpus(directory: Path) -> None:
    runs_in(directory).end_of(train__log_every=1, on_record=lambda _: {"code": 1.0})


def run_in_a_file(directory: Path, name: str) -> None:
    (directory / "file").write_text("content")
    try:
        runs_in(directory).end_of(train__out=str(directory / name))
    finally:
        assert (directory / "file").read_text() == "content"


def run_beside_another_job(directory: Path) -> None:
    with alone(), of_torch("tokshard.trainer.run_directory").run_directory(str(directory / "out")):
        start(directory)


def write_metrics_into_a_directory(directory: Path) -> None:
    (directory / "out" / "metrics.jsonl").mkdir(parents=True)
    runs_in(directory).end_of()


def begin_elsewhere(directory: Path, key: str) -> None:
    """The third command of a run names another start than the first."""
    run = runs_in(directory)
    run(train__stop_after=1)
    begun = {key: str(directory / "out" / "checkpoints" / "step-00000001")}
    for last in (2, 3):  # the same command goes on, as that of a job that is queued again
        steps = [of["step"] for of in run("second", train__stop_after=last, **begun)]
        assert steps == list(range(2 if key == "checkpoint__load" else 1, last + 1))
    run("second", **{key: str(directory / "second" / "checkpoints" / "step-00000002")})


def load(directory: Path, name: str, **sizes: int) -> None:
    """A checkpoint into a model of some sizes."""
    checkpoints = of_torch("tests.trainer.checkpoints")
    with alone():
        checkpoints.save(directory, 1)
        path = name if "://" in name else str(directory / name)
        checkpoints.checkpoint.load(path, *checkpoints.trained(seed=2, **sizes))


def list_a_disk_that_is_not_mounted(directory: Path) -> None:
    (directory / "checkpoints").symlink_to(directory / "a disk that is not mounted")
    with alone():
        of_torch("tests.trainer.checkpoints").latest(directory / "checkpoints")


def compute_on_a_gpu(_: Path, *, is_there: bool, **settings: str) -> None:
    parallel, checkpoints = of_torch("tokshard.trainer.parallel"), of_torch("tests.trainer.checkpoints")
    made = checkpoints.Parallel(device="cuda", **settings)
    with patch("torch.cuda.is_available", lambda: is_there):
        if is_there:  # as far as it is looked at
            parallel.sharded_model(None, SimpleNamespace(device_type="cuda"), made, None)
        with parallel.process_group(made):
            pass


def attend_to_all(_: Path) -> None:
    torch, attention = of_torch("torch"), of_torch("tokshard.trainer.attention")
    bounds, heads = torch.tensor([0, 4], dtype=torch.int32), torch.randn(4, 2, 8)
    attention.varlen_attn(heads, heads, heads, bounds, bounds, 4, 4)


def use_float8_without_torchao(_: Path) -> None:
    with pytest.MonkeyPatch.context() as without, alone():
        without.setitem(sys.modules, "torchao.float8", None)
        of_torch("tests.trainer.test_compute").made(float8="rowwise")


def import_weights(directory: Path, **changes: Any) -> None:
    """Of Hugging Face: config.json differs in some fields from that of the model, into which they are to be loaded."""
    hugging_face, model = of_torch("tokshard.trainer.hugging_face"), of_torch("tokshard.trainer.model")
    shape = model.Shape(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=48, vocab_size=128)
    hugging_face.write_config(str(directory), shape, seq_len=8, dtype="fp32", special={})
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | changes))
    with alone(), of_torch("torch").device("meta"):
        hugging_face.load_weights(str(directory), model.Transformer(shape), num_ids=64)


def said(module: str, *words: object) -> Said:
    """How a command of the trainer ends."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        return Said(of_torch(f"tokshard.trainer.{module}").main([str(word) for word in words]), errors.getvalue())


def command(directory: Path, module: str, *overrides: str) -> Said:
    """A command that reads a recipe, whose corpora do not exist."""
    recipe = directory / "run.toml"
    recipe.write_text(as_toml(configuration({"code": "nowhere"}, directory, data__weights={}, data__uneven="refuse")))
    return said(module, recipe, *overrides)


def export(directory: Path, *words: str) -> Said:
    """A checkpoint, where a directory `full` is not empty; nothing appears."""
    with alone():
        of_torch("tests.trainer.checkpoints").save(directory, 1)
    (directory / "full").mkdir()
    (directory / "full" / "mine").touch()
    try:
        return said("hugging_face", *words)
    finally:
        assert sorted(os.listdir(directory)) == ["full", "step-00000001"]


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 64}
SIZE = "model.vocab_size=128"

CALLS: dict[str, Call] = {
    "a later batch size that streams do not divide": given(start, data__num_streams=2, data__batch_ramp=[[3, 5]]),
    "blocks that are small for a sample": given(start, data__block_tokens=32),
    "a profile of a rank that the job does not have": given(
        start, train__profile_steps=[2, 3], train__profile_ranks=[0, 1]
    ),
    "an evaluation on a corpus of another tokenizer": evaluate_another_tokenizer,
    "new weights that leave out a corpus": set_weights_of_one_corpus,
    "a run whose directory is a file": given(run_in_a_file, "file"),
    "a run whose directory is in a file": given(run_in_a_file, "file/out"),
    "a run whose directory is a corpus": lambda directory: start(directory, train__out=str(directory / "corpora/code")),
    "a second job in one directory": run_beside_another_job,
    "metrics that cannot be written": write_metrics_into_a_directory,
    "a resumed run with another checkpoint to start from": given(begin_elsewhere, "checkpoint__load"),
    "a resumed run with another model to start from": given(begin_elsewhere, "checkpoint__load_weights"),
    "a missing checkpoint": given(load, "no"),
    "a checkpoint in a bucket": given(load, "s3://bucket/checkpoint"),
    "a directory of checkpoints": given(load, ""),
    "a checkpoint of another model": given(load, "step-00000001", dim=32),
    "a checkpoint of a model with more tensors": given(load, "step-00000001", tied_embeddings=True),
    "a directory of checkpoints that cannot be listed": list_a_disk_that_is_not_mounted,
    **{
        f"tasks of a launcher that sets {name} alone": lambda _, name=name: rank_of({name: "8"})  # type: ignore[misc]
        for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    },
    "a rank without the address of its job": lambda _: rank_of({"RANK": "0", "WORLD_SIZE": "2"}),
    "a rank that is not a number": lambda _: rank_of(
        {"RANK": "x", "WORLD_SIZE": "2", "MASTER_ADDR": "node", "MASTER_PORT": "1"}
    ),
    "more ranks than GPUs": lambda _: device_index(4, 4),
    "a GPU on a machine without one": given(compute_on_a_gpu, is_there=False),
    "attention that is not causal, on the CPU": attend_to_all,
    "fp32 on a GPU": given(compute_on_a_gpu, is_there=True, precision="fp32"),
    "float8 without torchao": use_float8_without_torchao,
    "a GPT-2": given(import_weights, model_type="gpt2"),
    "a Llama with biases": given(import_weights, attention_bias=True, mlp_bias=True),
    "a Llama with sliding windows": given(import_weights, use_sliding_window=True),
    "a Mistral": given(import_weights, sliding_window=4096),
    "a SmolLM3": given(import_weights, no_rope_layers=[1, 0]),
    "quantized weights": given(import_weights, quantization_config={}),
    "a Llama with scaled rotations": given(import_weights, rope_parameters={"rope_type": "yarn"}),
    "a Llama with scaled rotations, as transformers 4 writes it": given(
        import_weights, rope_parameters=None, rope_scaling={"type": "yarn"}
    ),
    "weights of heads of another size": given(import_weights, head_dim=16),
    "weights of a Qwen3, given to a Llama": given(import_weights, model_type="qwen3"),
    "weights of a Llama 3.1, given to an older Llama": given(import_weights, rope_parameters=LLAMA_3),
    "weights of other rotations": given(import_weights, rope_parameters=None, rope_theta=5_000.0),
    "weights of another size": given(import_weights, hidden_size=64, rms_norm_eps=1e-6),
    **{
        f"weights with {ids} ids for a corpus with 64 and a model with 128": given(import_weights, vocab_size=ids)
        for ids in (63, 129)
    },
    "an unknown key": given(command, "__main__", "train.stepz=3"),
    "an estimate for no ranks": given(command, "estimate", "ranks=0"),
    "an estimate for a number of ranks of 5,000 digits": given(command, "estimate", "ranks=" + 5_000 * "7"),
    "an estimate for ranks that do not divide a batch": given(command, "estimate", "ranks=7", SIZE),
    "an estimate for copies that do not divide the ranks": given(
        command, "estimate", "ranks=9", SIZE, "parallel.replicas=2"
    ),
    "an estimate for corpora that do not exist": given(command, "estimate", "ranks=9"),
    "an export to a directory that is not empty": given(export, "step-00000001", "--out", "full"),
    "an export of a directory without a checkpoint": given(export, "full", "--out", "out"),
}
REFUSALS = said_in(Path(__file__).with_name("refusals.txt"), CALLS)


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
