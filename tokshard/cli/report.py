"""``tokshard report``: an HTML page about corpora, the plan of a mix, or a training run."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

import click

from tokshard.cli.corpus_text import column_of, distribution_lines, summary_lines
from tokshard.cli.inspect import corpus_report, is_mix
from tokshard.cli.options import debug_option, json_line, json_option
from tokshard.cli.output_file import is_stdout, output_file, refuse_inputs
from tokshard.cli.sizes import COUNT, POSITIVE_COUNT
from tokshard.errors import UsageError
from tokshard.inspect.corpus.places import corpora_at
from tokshard.inspect.page.corpora import EXCERPT_CHARACTERS, corpora_page
from tokshard.inspect.page.plan import plan_page
from tokshard.inspect.page.run import metrics_of, run_page
from tokshard.inspect.plan.preview import report_plan
from tokshard.inspect.plan.run import open_run
from tokshard.wording import bytes_text, one_line

_WIDTH = 400
"""Names are hardly shortened for a page: the browser wraps its lines."""


@click.command()
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@click.option("--out", required=True, metavar="FILE", help="Write the page here.")
@click.option("--open", "is_opened", is_flag=True, help="Open the page in the browser.")
@click.option(
    "--sample",
    type=COUNT,
    default=4,
    show_default=True,
    metavar="K",
    help="Show K documents of each corpus, or K samples of a mix, token by token.",
)
@click.option("--full", is_flag=True, help="Of corpora: count all tokens and read all document lengths, for any size.")
@click.option(
    "--tokens", type=POSITIVE_COUNT, metavar="N", help="Number of tokens to train on a mix; see 'tokshard plan'."
)
@json_option
@debug_option
def report(
    *,
    targets: tuple[str, ...],
    out: str,
    is_opened: bool,
    sample: int,
    full: bool,
    tokens: int | None,
    as_json: bool,
) -> None:
    """Write one HTML page about all TARGETs. It works offline. Needs the extra 'report'.

    TARGETs are corpora; or one mix.toml; or one training run, by its directory or its metrics.jsonl. The page of a run
    has its losses, mix, speed, waits and evaluations, and the 'tokshard trace' command for each step that stands out.

    \b
    tokshard report shards/code shards/prose --out corpora.html
    tokshard report mix.toml --out plan.html
    tokshard report run --out run.html --open
    """  # noqa: D301 - click's mark for lines that are kept
    metrics = [metrics_of(target) for target in targets]
    inputs = [target if path is None else path for target, path in zip(targets, metrics, strict=True)]
    with output_file(out, option="--out", inputs=inputs) as write:
        size = write(_page(inputs, out, num_samples=sample, is_full=full, num_tokens=tokens).encode())
    text = json_line({"out": out, "bytes": size}) if as_json else f"wrote {one_line(out)}, {bytes_text(size)}"
    click.echo(text, err=is_stdout(out))
    if is_opened and not webbrowser.open(Path(os.path.abspath(out)).as_uri()):
        click.echo("note: no browser was found; open the page yourself", err=True)


def _page(targets: list[str], out: str, *, num_samples: int, is_full: bool, num_tokens: int | None) -> str:
    alone = [target for target in targets if is_mix(target)]
    if alone and len(targets) > 1:
        raise UsageError("a page shows corpora, or one mix, or one run", hint="make a page of each")
    run = metrics_of(alone[0]) if alone else None
    if num_tokens is not None and (run is not None or not alone):
        raise UsageError("--tokens is for the page of a plan", hint="give a mix.toml, or leave --tokens out")
    if is_full and alone:
        raise UsageError("--full is for the page of corpora", hint="give corpora, or leave --full out")
    if run is not None:
        return run_page(run)
    if alone:
        mix = open_run(alone[0], {})
        refuse_inputs(out, "--out", [corpus.location for corpus in mix.corpora.values()])
        preview = report_plan(mix, num_tokens=num_tokens)
        return plan_page(mix, preview, name=os.path.basename(alone[0]), num_samples=num_samples)
    options = {"num_samples": num_samples, "is_full": is_full, "with_boundaries": True}
    reports = [corpus_report(target, characters=EXCERPT_CHARACTERS, **options) for target in corpora_at(targets)]
    facts = [
        [line[:2] for line in summary_lines(one.manifest, one.sources, num_spans=one.num_spans, width=_WIDTH)]
        + distribution_lines(one)
        for one in reports
    ]
    return corpora_page(reports, facts, [column_of(one, one.directory) for one in reports])
