"""``tokshard bench``: measure how fast a plan is read."""

from __future__ import annotations

import json
import shutil

import click

from tokshard.cli.bench_text import speed_json, speed_text
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.plans import plan_options
from tokshard.cli.progress import stage_progress
from tokshard.cli.sizes import POSITIVE_COUNT, WholeNumbers
from tokshard.inspect.plan.bench import measure_speed
from tokshard.run_files.plan_file import load_mix

DEFAULTS = {"seq_len": 4_096, "global_batch_size": 8}
"""Good enough for a measurement; for training these must be given."""

GPU_TOKENS = 4_550
GPU_REASON = "IBM's figure for training 7B parameters on an A100; --gpu-tokens gives yours"


@click.command()
@click.argument("corpus", metavar="CORPUS|MIX.TOML")
@plan_options(DEFAULTS)
@click.option(
    "--seconds",
    type=click.FloatRange(min=0, min_open=True, max=3600),
    default=3.0,
    show_default=True,
    metavar="N",
    help="Time to measure each loader mode.",
)
@click.option(
    "--workers",
    type=WholeNumbers(),
    default="0,1,2",
    show_default=True,
    metavar="N,...",
    help="Numbers of worker processes to measure; 0 is the prefetch thread. Reading in process is always measured.",
)
@click.option(
    "--gpu-tokens",
    type=POSITIVE_COUNT,
    metavar="N",
    help=f"Tokens per second that one GPU consumes.  [default: {GPU_TOKENS:,}, for 7B parameters on an A100]",
)
@json_option
@debug_option
def bench(
    *,
    corpus: str,
    seq_len: int | None,
    seed: int | None,
    global_batch_size: int | None,
    seconds: float,
    workers: tuple[int, ...],
    gpu_tokens: int | None,
    as_json: bool,
) -> None:
    """Measure how fast this machine reads a mix, and how many GPUs it can feed.

    Give a corpus directory, or a file that names corpora with weights: a mix.toml or a recipe of the trainer. Options
    override the file.

    Each result is shown as a share of two upper limits, which are measured for one core: copying the memory-mapped
    shards to int64 one after another (contiguous), and in documents of 1,000 tokens from random places (gather). Of
    corpora in buckets and on web servers, also what the store gives: bytes and requests per second, and latency.

    \b
    tokshard bench shards/code
    tokshard bench mix.toml --workers 0,4 --gpu-tokens 12k
    """  # noqa: D301 - click reads the escape
    options = {"seq_len": seq_len, "seed": seed, "global_batch_size": global_batch_size}
    mix = load_mix(corpus, options, defaults=DEFAULTS)
    with stage_progress("bench") as on_stage:
        report = measure_speed(mix, seconds=seconds, workers=workers, on_mode=on_stage)
    gpu_reason = GPU_REASON if gpu_tokens is None else ""
    gpu_tokens = gpu_tokens or GPU_TOKENS
    if as_json:
        click.echo(json.dumps(speed_json(report, gpu_tokens=gpu_tokens)))
    else:
        width = shutil.get_terminal_size().columns
        click.echo(speed_text(report, gpu_tokens=gpu_tokens, gpu_reason=gpu_reason, width=width))
