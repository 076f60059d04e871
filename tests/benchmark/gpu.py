"""Training speed on one GPU: ``python -m tests.benchmark.gpu [--tiny] [--seconds 480] [--out DIR]``. No network.

Each row is a run of the trainer in a process of its own with a deadline: one that fails or compiles slowly costs its
row alone. A run is killed when it has made its steps, or it would save a checkpoint. The table is printed
row by row, and DIR/gpu.jsonl has the same; a row that did not run says why. ``--tiny`` rehearses it on the CPU.

No GPU has run it yet. Several GPUs are not measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpora import TINY_TOKENIZER, write_corpus

ROOT = Path(__file__).parents[2]
IDS = 32_000
BIG = {
    "model.preset": "1B",
    "model.num_layers": 22,
    "model.num_kv_heads": 4,
    "model.hidden_dim": 5_632,
    "model.vocab_size": IDS,
    "model.rope_theta": 10_000.0,
    "data.seq_len": 4_096,
    "data.global_batch_size": 8,
    "train.micro_batch_size": 2,
    "parallel.precision": "bf16",
}
COMPILED = {"compute.compile": "inductor"}
CHUNKED = COMPILED | {"compute.loss_chunk": 4_096, "train.micro_batch_size": 4}
ROWS: dict[str, dict[str, Any]] = {
    "1.1B eager": {},
    "1.1B compiled": COMPILED,
    "1.1B compiled, chunked loss": CHUNKED,
    "1.1B synthetic data": CHUNKED | {"data.synthetic": True},
    "7B full recomputation": CHUNKED
    | {
        "model.preset": "7B",
        "model.num_layers": 32,
        "model.num_kv_heads": 32,
        "model.hidden_dim": 11_008,
        "compute.recompute": "full",
        "data.global_batch_size": 2,
        "train.micro_batch_size": 1,
    },
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
    "model.vocab_size": 128,
    "data.seq_len": 64,
    "parallel.device": "cpu",
}
COLUMNS = ("tokens_per_second", "mfu", "mfu_of_product", "memory_gib", "wait_part", "first_step_seconds", "problem")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmark.gpu")
    parser.add_argument("--tiny", action="store_true", help="rehearse on the CPU")
    parser.add_argument("--seconds", type=float, default=480.0, help="for everything")
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--out", default="")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(given.out or scratch)
        out.mkdir(parents=True, exist_ok=True)
        for row in results(Path(scratch), tiny=given.tiny, seconds=given.seconds, rows=given.rows):
            sys.stdout.write(line(row) + "\n")
            sys.stdout.flush()
            with (out / "gpu.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
    return 0


def results(directory: Path, *, tiny: bool, seconds: float, rows: str = "") -> Iterator[dict[str, Any]]:
    """One row after another."""
    end = time.monotonic() + seconds
    machine = measured_machine(tiny=tiny)
    yield machine
    corpus = random_corpus(directory / "corpus", ids=4 if tiny else IDS, num_tokens=20_000 if tiny else 4_000_000)
    for number, (name, changes) in enumerate((name, of) for name, of in ROWS.items() if rows in name):
        left = end - time.monotonic()
        if left < 1:
            yield {"row": name, "problem": f"not run: the {seconds:.0f} s are over"}
            continue
        settings = (
            BIG
            | changes
            | (TINY | ({"compute.compile": "aot_eager"} if "compute.compile" in changes else {}) if tiny else {})
        )
        steps = (1, 3) if tiny else (5, 20)
        row = run(directory / f"row-{number}", corpus, settings, steps=steps, seconds=min(left, 60.0))
        if machine.get("product_tflops") and row.get("mfu"):
            row["mfu_of_product"] = row["mfu"] * 989 / machine["product_tflops"]
        yield {"row": name, **row}


def measured_machine(*, tiny: bool) -> dict[str, Any]:
    """The device, the versions, and the rate of a bf16 product."""
    import torch

    has_gpu = torch.cuda.is_available() and not tiny
    size, device = (8_192, "cuda") if has_gpu else (64, "cpu")
    matrix = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    times = []
    for _ in range(10):
        began = time.perf_counter()
        (matrix @ matrix)[0, 0].item()
        times.append(time.perf_counter() - began)
    name = torch.cuda.get_device_name() if has_gpu else "CPU"
    product = 2 * size**3 / min(times) / 1e12
    return {"row": f"{name}, torch {torch.__version__}, product of {size}", "product_tflops": product}


def random_corpus(path: Path, *, ids: int, num_tokens: int) -> str:
    """Documents of 750 tokens on average, of random ids. Speed does not depend on them."""
    rng = np.random.default_rng(0)
    lengths = rng.geometric(1 / 750, num_tokens // 750)
    fields = json.loads(TINY_TOKENIZER)
    fields["model"]["vocab"] |= {f"word{index}": index for index in range(4, ids)}
    documents = [[*rng.integers(1, ids, length).tolist(), 0] for length in lengths]
    return str(write_corpus(path, documents, tokenizer=json.dumps(fields).encode()))


def run(out: Path, corpus: str, settings: dict[str, Any], *, steps: tuple[int, int], seconds: float) -> dict[str, Any]:
    """Figures of the steps after the first of `steps`, up to the second."""
    out.mkdir()
    recipe = out / "recipe.toml"
    recipe.write_text(f'[data]\ncorpora = {{ all = "{corpus}" }}\n[train]\nout = "{out}/run"\nsteps = 1000000\n')
    changes = [f"{key}={json.dumps(value)}" for key, value in settings.items()]
    began, log = time.monotonic(), out / "run" / "metrics.jsonl"
    with (out / "said").open("w+") as said:
        child = subprocess.Popen(
            [sys.executable, "-m", "tokshard.trainer", str(recipe), *changes],
            cwd=ROOT,
            stdout=said,
            stderr=subprocess.STDOUT,
        )
        try:
            while child.poll() is None and time.monotonic() - began < seconds and len(lines_of(log)) < steps[1]:
                time.sleep(0.05)
            status = child.poll()
        finally:
            child.kill()
            child.wait()
        said.seek(0)
        last = [text.strip() for text in said if text.strip()][-2:]
    found = lines_of(log)[: steps[1]]
    if len(found) <= steps[0]:
        why = (
            f"ended with {status}: {' '.join(last)}"
            if status is not None
            else f"no {steps[0]} steps in {seconds:.0f} s"
        )
        return {"problem": f"not measured: {why}"}
    return figures(found, steps[0])


def lines_of(log: Path) -> list[dict[str, Any]]:
    """The complete lines of a file that is being written."""
    text = log.read_text() if log.exists() else ""
    return [json.loads(each) for each in text.splitlines(keepends=True) if each.endswith("\n")]


def figures(steps: list[dict[str, Any]], warm_up: int) -> dict[str, Any]:
    """Medians of the steps after `warm_up`."""
    measured = steps[warm_up:]
    took = [step["tokens"] / step["tokens_per_second"] for step in measured]
    return {
        "steps": len(measured),
        "tokens_per_second": statistics.median(step["tokens_per_second"] for step in measured),
        "mfu": statistics.median(step["mfu_full_rows"] for step in measured) if measured[0]["mfu"] else None,
        "memory_gib": max(step["memory_bytes"] for step in measured) / 2**30,
        "wait_part": sum(step["loader_wait_seconds"] for step in measured) / sum(took),
        "first_step_seconds": steps[0]["tokens"] / steps[0]["tokens_per_second"],
    }


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    shown = [
        f"{key} {row[key]:.4g}" if isinstance(row[key], float) else str(row[key]) for key in COLUMNS if row.get(key)
    ]
    product = [f"{row['product_tflops']:.4g} TFLOP/s"] if "product_tflops" in row else []
    return "  ".join([f"{row['row']:<32}", *product, *shown])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
