"""Training on one GPU, checked and measured: ``python -m benchmark.gpu [--tiny] [--seconds 590] [--out DIR]``.

No network. One process after another, each with a deadline: what fails, hangs or compiles slowly costs its own row. The
table is printed row by row, and DIR/gpu.jsonl has the same; what did not run says why. Checks are in gpu_checks.py. A
training run is killed when it has made its steps, or it would save a checkpoint. ``--tiny`` rehearses all of it on the
CPU. Several GPUs are not measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.gpu_children import ChildFailedError, answer, last_lines, lines_of, run
from benchmark.gpu_corpus import make_corpus

NOMINAL_TFLOPS = 989
"""Dense bf16 of an H100 or H200 SXM, by their data sheets."""

BIG = {
    "model.preset": "1B",
    "model.num_layers": 22,
    "model.num_kv_heads": 4,
    "model.hidden_dim": 5_632,
    "model.vocab_size": 32_000,
    "model.rope_theta": 10_000.0,
    "data.seq_len": 4_096,
    "data.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "parallel.precision": "bf16",
    "compute.loss_chunk": 0,
}
COMPILED = {"compute.compile": "inductor"}
CHUNKED = COMPILED | {"compute.loss_chunk": 4_096, "train.micro_batch_size": 4}
LLAMA_7B = CHUNKED | {
    "model.preset": "7B",
    "model.num_layers": 32,
    "model.num_kv_heads": 32,
    "model.hidden_dim": 11_008,
    "data.global_batch_size": 4,
    "train.micro_batch_size": 1,
}
ROWS: dict[str, dict[str, Any]] = {
    "1.1B compiled, chunked loss": CHUNKED,
    "7B selective recomputation": LLAMA_7B | {"compute.recompute": "selective"},
    "7B full recomputation": LLAMA_7B | {"compute.recompute": "full"},
    "1.1B compiled": COMPILED,
    "1.1B eager": {},
    "1.1B selective recomputation": CHUNKED | {"compute.recompute": "selective", "train.micro_batch_size": 8},
    "1.1B full recomputation": CHUNKED | {"compute.recompute": "full", "train.micro_batch_size": 8},
    "1.1B float8 tensorwise": CHUNKED | {"compute.float8": "tensorwise"},
    "1.1B float8 rowwise": CHUNKED | {"compute.float8": "rowwise"},
}
TINY = {
    "model.preset": "10M",
    "model.dim": 32,
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.num_kv_heads": 1,
    "model.hidden_dim": 32,
    "model.vocab_size": 16_384,  # of the tokenizer
    "data.seq_len": 64,
    "parallel.device": "cpu",
}
CHECKS = {
    "varlen attention": 30,
    "losses as on the CPU": 120,
    "no sync in 5 steps": 40,
    "2,000 pinned batches": 40,
    "compact batches": 30,
    "checkpoints between devices": 30,
    "non-finite step is skipped": 30,
    "process group of one rank": 30,
    "asynchronous save": 30,
    "SIGTERM and resume": 50,
    "flex attention": 50,
    "stopped and continued": 40,
    "trace and memory snapshot": 40,
    "out of memory": 60,
}
"""Name to the seconds that a check may take."""

ORDER = [*list(CHECKS)[:7], *list(ROWS)[:4], *list(CHECKS)[7:], *list(ROWS)[4:]]
"""What counts most comes first: time may run out."""

ROW_SECONDS = {"7B selective recomputation": 120, "7B full recomputation": 120}  # of the others: 70
COLUMNS = ("tokens_per_second", "mfu_of_989", "mfu_of_product", "memory_gib", "estimated_gib", "estimate_problem")
COLUMNS += ("wait_part", "first_step_seconds", "result", "why", "problem")


@dataclass(frozen=True, slots=True)
class Budget:
    """The time for everything.

    Args:
        end: as `time.monotonic` counts.
        factor: of the limits of single rows.
    """

    seconds: float
    end: float
    factor: float = 1.0

    def limit(self, seconds: float) -> float:
        """The seconds that a row may take, of those that are left."""
        return min(seconds * self.factor, self.end - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.limit(1.0) < 1.0


def main(arguments: list[str]) -> int:
    """Exit codes: 0; 1: a check failed; 2: there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmark.gpu")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--seconds", type=float, default=590.0, help="for everything")
    parser.add_argument("--rows", default="", help="only checks and rows whose name has a match of this expression")
    parser.add_argument("--out", default="")
    given = parser.parse_args(arguments)
    try:
        re.compile(given.rows)
    except re.error as error:
        parser.error(f"--rows {given.rows} is not a regular expression: {error}")
    status = 0
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(given.out or scratch)
        out.mkdir(parents=True, exist_ok=True)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(scratch) / "inductor")  # rows share kernels
        for row in results(Path(scratch), tiny=given.tiny, seconds=given.seconds, rows=given.rows):
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
            with (out / "gpu.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            status = 2 if row.get("row") == "no GPU" else max(status, int(row.get("result") == "FAIL"))
    return status


def results(directory: Path, *, tiny: bool, seconds: float, rows: str = "") -> Iterator[dict[str, Any]]:
    """One row after another: the machine, the corpus, then `ORDER`."""
    budget = Budget(seconds, time.monotonic() + seconds, factor=10.0 if tiny else 1.0)  # CPUs may be slow and busy
    device = "cpu" if tiny else "cuda"
    machine = measured_machine(device, budget)
    yield machine
    if machine["row"] == "no GPU":
        return
    corpus = {"row": "corpus", "problem": over(budget)}
    if not budget.is_over:
        corpus = make_corpus(directory / "corpus", num_bytes=300_000 if tiny else 12_000_000, seconds=budget.limit(40))
    yield corpus
    for number, name in enumerate(each for each in ORDER if re.search(rows, each)):
        place = directory / f"row-{number}"
        if budget.is_over:
            yield {
                "row": name,
                **({"result": "not run", "why": over(budget)} if name in CHECKS else {"problem": over(budget)}),
            }
        elif name in CHECKS:
            yield {"row": name, **check(name, device, corpus["path"], place, budget)}
        else:
            yield {"row": name, **train(name, corpus["path"], place, budget, machine.get("product_tflops"), tiny=tiny)}


def over(budget: Budget) -> str:
    """Why something was not begun."""
    return f"not run: the {budget.seconds:.0f} s are over"


def measured_machine(device: str, budget: Budget) -> dict[str, Any]:
    """The card, the versions, and the rates of a product and of copies."""
    try:
        found = answer(["-m", "benchmark.gpu_machine", device], seconds=budget.limit(60))
    except ChildFailedError as error:
        return {"row": "machine", "problem": f"not measured: {error}"}
    if "problem" in found:
        return {"row": "no GPU", "problem": f"{found['problem']}; --tiny rehearses on the CPU"}
    return {"row": "machine", **found}


def check(name: str, device: str, corpus: str, directory: Path, budget: Budget) -> dict[str, Any]:
    """A check of gpu_checks.py. One that does not answer failed, unless it had less time than planned."""
    directory.mkdir()
    limit, began = budget.limit(CHECKS[name]), time.monotonic()
    try:
        found = answer(["-m", "benchmark.gpu_checks", name, device, corpus, str(directory)], seconds=limit)
    except ChildFailedError as error:
        was_cut = "no answer" in str(error) and limit < CHECKS[name] * budget.factor
        found = {"result": "not run" if was_cut else "FAIL", "why": str(error)}
    return {**found, "seconds": time.monotonic() - began}


def train(
    name: str, corpus: str, out: Path, budget: Budget, product_tflops: float | None, *, tiny: bool
) -> dict[str, Any]:
    """A run of the trainer; MFU is of the measured product if there is one."""
    settings = BIG | ROWS[name]
    if tiny:
        compiled = {"compute.compile": "aot_eager"} if "compute.compile" in settings else {}
        settings |= TINY | compiled
    out.mkdir()
    recipe = out / "recipe.toml"
    recipe.write_text(f'[data]\ncorpora = {{ all = "{corpus}" }}\n[train]\nout = "{out}/run"\nsteps = 1000000\n')
    settings["train.peak_tflops"] = product_tflops or NOMINAL_TFLOPS
    command = [str(recipe), *(f"{key}={json.dumps(value)}" for key, value in settings.items())]
    warm_up, last = (1, 3) if tiny else (5, 20)
    limit, log, began = budget.limit(ROW_SECONDS.get(name, 70)), out / "run" / "metrics.jsonl", time.monotonic()
    status, said = run(["-m", "benchmark.gpu_train", *command], seconds=limit, until=lambda: len(lines_of(log)) >= last)
    steps = lines_of(log)[:last]
    if len(steps) > warm_up:
        row = figures(steps, warm_up, product_tflops)
    else:
        why = (
            f"ended with {status}: {last_lines(said)}" if status is not None else f"{len(steps)} steps in {limit:.0f} s"
        )
        row = {"problem": f"not measured: {why}"}
    row["seconds"] = time.monotonic() - began
    if name.startswith("7B"):
        row |= estimated(command, budget)
    return row


def estimated(command: list[str], budget: Budget) -> dict[str, Any]:
    """The peak memory that the trainer's estimate predicts."""
    if budget.is_over:
        return {"estimate_problem": over(budget)}
    try:
        found = answer(["-m", "tokshard.trainer.estimate", *command, "--json"], seconds=budget.limit(60))
    except ChildFailedError as error:
        return {"estimate_problem": str(error)}
    return {"estimated_gib": sum(found["peak_bytes"].values()) / 2**30}


def figures(steps: list[dict[str, Any]], warm_up: int, product_tflops: float | None) -> dict[str, Any]:
    """Medians of the steps after `warm_up`. MFU counts full rows.

    Args:
        product_tflops: what the recipe gave as the peak; None: it gave `NOMINAL_TFLOPS`.
    """
    measured = steps[warm_up:]
    took = [step["tokens"] / step["tokens_per_second"] for step in measured]
    mfu = statistics.median(step["mfu_full_rows"] for step in measured)
    return {
        "steps": len(measured),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in measured),
        "mfu_of_989": mfu * (product_tflops or NOMINAL_TFLOPS) / NOMINAL_TFLOPS,
        "mfu_of_product": mfu if product_tflops else None,
        "memory_gib": max(step["memory_bytes"] for step in measured) / 2**30,
        "wait_part": sum(step["loader_wait_seconds"] for step in measured) / sum(took),
        "first_step_seconds": steps[0]["tokens"] / steps[0]["tokens_per_second"],
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    hidden = {"row", "path"}
    # of machine, corpus and checks everything; of training runs the figures that are compared
    keys = COLUMNS if row["row"] in ROWS else [key for key in row if key not in hidden]
    shown = [text_of(key, row[key]) for key in keys if row.get(key) is not None]
    return "  ".join([f"{row['row']:<32}", *shown])


def text_of(key: str, value: Any) -> str:
    """A figure with its name, or a sentence."""
    if key in ("result", "why", "problem", "estimate_problem"):
        return str(value)
    return f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
