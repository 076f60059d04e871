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

from tests.corpora import write_corpus
from tests.refusals import Refusal, Said, check, refused
from tests.trainer.runs import Runs, as_toml, configuration, corpora, tokenizer
from tokshard.errors import PlanError, TrainerError, UsageError
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
        checkpoints.checkpoint.load(str(directory / name), *checkpoints.trained(seed=2, **sizes))


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


def use_float8_without_torchao(_: Path) -> None:
    with patch.dict(sys.modules, {"torchao.float8": None}), alone():
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


def of_model(what: str, problem: str, **changes: Any) -> Refusal:
    """Weights that the trainer's model cannot have."""
    problem = f"DIR/config.json has what the trainer cannot train: {problem}"
    hint = "models that the trainer can train are Llama and Qwen3 of transformers, dense, without quantization"
    return Refusal(what, given(import_weights, **changes), UsageError, problem, hint)


def of_shape(what: str, key: str, there: Any, here: Any, **changes: Any) -> Refusal:
    """Weights that another model of the trainer could have."""
    problem = f"DIR/config.json is of another model: model.{key} is {there!r} there, {here!r} here"
    hint = f"train these weights with model.{key}={json.dumps(there)}"
    return Refusal(f"weights of {what}", given(import_weights, **changes), UsageError, problem, hint)


LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3 |= {"original_max_position_embeddings": 64}
IS_YARN = 'rope_type is "yarn" (supported: "default" or "llama3")'
HAS_BIASES = "attention_bias is true (supported: false); mlp_bias is true (supported: false)"
NOT_COMPLETE = "damaged or not a complete checkpoint: COMPLETE: No such file or directory"
RESTORE = "restore it from a copy, or rename it to continue from the checkpoint before it, or to start a new run"
WRITABLE = "give a writable train.out"
A_CHECKPOINT = "give a checkpoint, such as OUT/checkpoints/step-00001000"
STEPS = "did you mean train.steps?"
NOT_DIVIDED = (
    "7 ranks do not divide a global batch of 9 samples",
    """use data.uneven = "pad", or a global_batch_size such as 7""",
)
COPIES = "parallel.replicas is 2, of 9 ranks", "give a divisor of the ranks"
NOWHERE = "DIR/nowhere does not exist", "give the directory that 'tokshard build --out' wrote"
SIZE, REPLICAS = "model.vocab_size=128", "parallel.replicas=2"
NO_RUN = "{} cannot be the directory of a run: *: '{}'"

REFUSALS = [
    Refusal(
        "a later batch size that streams do not divide",
        given(start, data__num_streams=2, data__batch_ramp=[[3, 5]]),
        PlanError,
        "a global batch of 5 samples is not a multiple of the 2 streams of the plan",
        "give a global_batch_size such as 4: a step has equally many samples of each stream",
    ),
    Refusal(
        "a profile of a rank that the job does not have",
        given(start, train__profile_steps=[2, 3], train__profile_ranks=[0, 1]),
        UsageError,
        "train.profile_ranks is [0, 1], the number of ranks is 1",
        "ranks count from 0",
    ),
    Refusal(
        "an evaluation on a corpus of another tokenizer",
        evaluate_another_tokenizer,
        UsageError,
        "evaluation.corpora: 'other' has another tokenizer than the corpora of [data]",
        "build it with the same tokenizer.json",
    ),
    Refusal(
        "new weights that leave out a corpus",
        set_weights_of_one_corpus,
        PlanError,
        "weights are for code; the plan has code, prose",
        "give one weight per corpus; 0 leaves a corpus out",
    ),
    *(
        Refusal(
            f"a run whose directory is {what}",
            given(run_in_a_file, at),
            TrainerError,
            NO_RUN.format(*2 * [f"DIR/{at}"]),
            WRITABLE,
        )
        for what, at in (("a file", "file"), ("in a file", "file/out"))
    ),
    Refusal(
        "a second job in one directory",
        run_beside_another_job,
        TrainerError,
        "DIR/out is in use by another job: process * on * holds DIR/out/run.lock",
        "wait until that job has ended, or give another train.out",
    ),
    Refusal(
        "metrics that cannot be written",
        write_metrics_into_a_directory,
        TrainerError,
        "DIR/out/metrics.jsonl cannot be written: [Errno 21] Is a directory: 'DIR/out/metrics.jsonl'",
        "make room or repair the directory",
    ),
    *(
        Refusal(
            f"a resumed run with another {what} to start from",
            given(begin_elsewhere, f"checkpoint__{key}"),
            UsageError,
            f"checkpoint.{key} is DIR/second/*-00000002, but DIR/second/*-00000003 was saved by a command without it",
            f"leave checkpoint.{key} out to continue that run, or give another train.out",
        )
        for what, key in (("checkpoint", "load"), ("model", "load_weights"))
    ),
    Refusal("a missing checkpoint", given(load, "no"), UsageError, "DIR/no is not a directory", A_CHECKPOINT),
    Refusal("a directory without a checkpoint", given(load, ""), TrainerError, f"DIR is {NOT_COMPLETE}", RESTORE),
    Refusal(
        "a checkpoint of another model",
        given(load, "step-00000001", dim=32),
        UsageError,
        "DIR/step-00000001 is of another model: model.embedding.weight is (20, 16) there, (20, 32) here",
        "give the [model] and optimizer.name of its state.json, or another train.out for a new run",
    ),
    Refusal(
        "a directory of checkpoints that cannot be listed",
        list_a_disk_that_is_not_mounted,
        TrainerError,
        "DIR/checkpoints cannot be listed: No such file or directory",
        "it has to be the directory of the checkpoints of a run: rename it, or allow reading it",
    ),
    *(
        Refusal(
            f"tasks of a launcher that sets {name} alone",
            lambda _, name=name: rank_of({name: "8"}),
            UsageError,
            f"{name} is 8, but RANK is not set: each of the 8 tasks would be a run of its own",
            f"start one torchrun per node: srun --ntasks-per-node 1 torchrun ...; or unset {name} to train on one rank",
        )
        for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
    ),
    Refusal(
        "a rank without the address of its job",
        lambda _: rank_of({"RANK": "0", "WORLD_SIZE": "2"}),
        UsageError,
        "RANK is set, MASTER_ADDR, MASTER_PORT not",
        "start the job with torchrun",
    ),
    Refusal(
        "more ranks than GPUs",
        lambda _: device_index(4, 4),
        UsageError,
        "LOCAL_RANK is 4, this process sees 4 GPUs",
        "start as many ranks per node as it has GPUs, or set parallel.device=cpu",
    ),
    Refusal(
        "a GPU on a machine without one",
        given(compute_on_a_gpu, is_there=False),
        UsageError,
        "parallel.device is cuda, this process sees none",
        "set parallel.device=cpu",
    ),
    Refusal(
        "fp32 on a GPU",
        given(compute_on_a_gpu, is_there=True, precision="fp32"),
        UsageError,
        "parallel.precision is fp32, which attention on CUDA cannot compute",
        "set parallel.precision=bf16",
    ),
    Refusal(
        "float8 without torchao",
        use_float8_without_torchao,
        UsageError,
        "compute.float8 is rowwise, and torchao is missing",
        "pip install 'tokshard[float8]'",
    ),
    of_model("a GPT-2", 'model_type is "gpt2" (supported: "llama" or "qwen3")', model_type="gpt2"),
    of_model("a Llama with biases", HAS_BIASES, attention_bias=True, mlp_bias=True),
    of_model("a Llama with sliding windows", "use_sliding_window is true (supported: false)", use_sliding_window=True),
    of_model("a Mistral", "sliding_window is 4096 (supported: null)", sliding_window=4096),
    of_model("a SmolLM3", "no_rope_layers is [1, 0] (supported: 1)", no_rope_layers=[1, 0]),
    of_model("quantized weights", "quantization_config is {} (supported: null)", quantization_config={}),
    of_model("a Llama with scaled rotations", IS_YARN, rope_parameters={"rope_type": "yarn"}),
    of_model(
        "a Llama with scaled rotations, as transformers 4 writes it",
        IS_YARN,
        rope_parameters=None,
        rope_scaling={"type": "yarn"},
    ),
    of_shape("heads of another size", "head_dim", 16, 8, head_dim=16),
    of_shape("a Qwen3, given to a Llama", "qk_norm", True, False, model_type="qwen3"),
    of_shape("a Llama 3.1, given to an older Llama", "rope_factor", 8.0, 1.0, rope_parameters=LLAMA_3),
    of_shape("other rotations", "rope_theta", 5_000.0, 10_000.0, rope_parameters=None, rope_theta=5_000.0),
    Refusal(
        "weights of another size",
        given(import_weights, hidden_size=64, rms_norm_eps=1e-6),
        UsageError,
        "DIR/config.json is of another model: "
        "model.dim is 64 there, 32 here; model.norm_eps is 1e-06 there, 1e-05 here",
        "train these weights with model.dim=64 model.norm_eps=1e-06",
    ),
    *(
        Refusal(
            f"weights with {ids} ids for a corpus with 64 and a model with 128",
            given(import_weights, vocab_size=ids),
            UsageError,
            f"DIR has {ids} ids, the corpora 64 and the model 128",
            f"build the corpora with the tokenizer of these weights, and give model.vocab_size={ids}",
        )
        for ids in (63, 129)
    ),
    *(
        Refusal(what, given(command, module, *overrides), 2, problem, hint)
        for what, problem, hint, module, *overrides in (
            ("an unknown key", "DIR/run.toml: no key train.stepz", STEPS, "__main__", "train.stepz=3"),
            ("an estimate for no ranks", "ranks is '0', expected a number", "write ranks=64", "estimate", "ranks=0"),
            ("an estimate for ranks that do not divide a batch", *NOT_DIVIDED, "estimate", "ranks=7", SIZE),
            ("an estimate for copies that do not divide the ranks", *COPIES, "estimate", "ranks=9", SIZE, REPLICAS),
            ("an estimate for corpora that do not exist", *NOWHERE, "estimate", "ranks=9"),
        )
    ),
    Refusal(
        "an export to a directory that is not empty",
        given(export, "step-00000001", "--out", "full"),
        2,
        "full is not empty: it has mine",
        "give a new --out, or remove it",
    ),
    Refusal(
        "an export of a directory without a checkpoint",
        given(export, "full", "--out", "out"),
        1,
        f"full is {NOT_COMPLETE}",
        RESTORE,
    ),
]


@refused(REFUSALS)
def test_refusals(refusal: Refusal, tmp_path: Path) -> None:
    check(refusal, tmp_path)
