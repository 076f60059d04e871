"""``tokshard bench``: measure how fast a plan is read."""

from __future__ import annotations

import json
import shutil

import click

from tokshard.cli.bench_text import speed_json, speed_text
from tokshard.cli.options import debug_option, json_option
from tokshard.cli.plans import plan_options
from tokshard.cli.progress import stage_progress
from tokshard.cli.sizes import POSITIVE_COUNT, FloatRange
from tokshard.inspect.corpus.places import trained_on
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
    type=FloatRange(min=0, min_open=True, max=3600),
    default=3.0,
    show_default=True,
    metavar="N",
    help="Time to measure each form of batches.",
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
    gpu_tokens: int | None,
    as_json: bool,
) -> None:
    """Measure how fast this machine reads a mix, and how many GPUs it can feed.

    Give a corpus directory, a folder of them, or a file that names corpora with weights: a mix.toml or a recipe of the
    trainer. Options override the file.

    The loader is measured with full batches, with compact batches, and as a rank that has one row of each step. Each
    result is shown as a share of an upper limit: the speed at which one core copies documents of 1,000 tokens from
    random places of memory to int64, or the speed of the buckets and web servers that the mix reads, if that is
    lower.

    \b
    tokshard bench shards/code
    tokshard bench mix.toml --gpu-tokens 12k
    """  # noqa: D301 - click's mark for lines that are kept
    corpora = trained_on(corpus) or None
    options = {"corpora": corpora, "seq_len": seq_len, "seed": seed, "global_batch_size": global_batch_size}
    mix = load_mix(corpus, options, defaults=DEFAULTS)
    with stage_progress("bench") as on_stage:
        report = measure_speed(mix, seconds=seconds, on_stage=on_stage)
    gpu_reason = GPU_REASON if gpu_tokens is None else ""
    gpu_tokens = gpu_tokens or GPU_TOKENS
    if as_json:
        click.echo(json.dumps(speed_json(report, gpu_tokens=gpu_tokens)))
    else:
        width = shutil.get_terminal_size().columns
        click.echo(speed_text(report, gpu_tokens=gpu_tokens, gpu_reason=gpu_reason, width=width))
