"""The page of a plan: mixture and epochs over time, charts of the shuffle, the first samples token by token."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.decode import Decode
from tokshard.inspect.corpus.documents import TokenPiece, token_pieces
from tokshard.inspect.corpus.vocabulary import load_vocabulary
from tokshard.inspect.page.page import Facts, Section, chart, facts, heading, lines, render_page, token_section
from tokshard.inspect.plan.preview import PlanReport
from tokshard.inspect.plan.run import Run
from tokshard.numbers import ceil_div
from tokshard.runtime.order.windows import CorpusOrder
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.stop import used_up
from tokshard.wording import counted

_STEPS = 200
_WINDOWS = 8
_POINTS = 2_400
_SAMPLE_TOKENS = 400
_MAX_PICTURES = 8


def plan_page(run: Run, report: PlanReport, *, name: str, num_samples: int) -> str:
    """The page of a run and its preview. The picture of the shuffle costs half a second per window and corpus.

    Args:
        num_samples: number of samples to show token by token.

    Raises:
        UsageError: plotly is not installed.
        CorpusError: a corpus cannot be read.
    """
    plan, cursor = run.plan, run.cursor
    stop = max(1, report.num_samples)
    changes = [segment.start for segment in cursor.segments if segment.start <= stop]
    marks = np.array(sorted({*(stop * index // _STEPS for index in range(_STEPS + 1)), *changes}), np.int64)
    counts = np.array([plan.mixture(cursor).counts_before(mark) for mark in marks.tolist()], np.int64)
    corpus = next(iter(run.corpora.values()))
    decode, vocabulary = corpus.decode, load_vocabulary(corpus)
    is_read = [any(segment.weights[number] for segment in cursor.segments) for number in range(len(plan.names))]
    last = num_samples if run.stop.sample is None else min(num_samples, run.stop.sample)
    sections: list[Section] = [
        heading("Plan"),
        facts("Order and corpora", _facts(run, report)),
        *_charts_over_time(run, marks, counts),
        heading("Shuffle"),
        *(_shuffle_chart(plan, number) for number in np.flatnonzero(is_read)[:_MAX_PICTURES].tolist()),
        heading("Samples"),
        token_section(
            "The first samples",
            f"The first {_SAMPLE_TOKENS} tokens of each, document by document.",
            vocabulary.special_ids,
            ((f"sample {sample:,}", _parts(plan, decode, sample)) for sample in range(last)),
        ),
    ]
    return render_page(title=name, subtitle=f"plan {plan.fingerprint[:16]}", sections=sections)


def _facts(run: Run, report: PlanReport) -> Facts:
    plan, size = run.plan, run.global_batch_size
    later = "".join(f"; from step {step:,} on {counted(each, 'sample')}" for step, each in run.ramp)
    yield "fingerprint", plan.fingerprint
    yield "steps", f"{report.num_steps:,}, {report.num_tokens:,} tokens; --tokens shows more or fewer"
    yield "a step", f"{size:,} samples of {plan.seq_len:,} tokens, {size * plan.seq_len:,} tokens{later}"
    yield "block", f"{plan.shape.block_tokens:,} consecutive tokens, the unit of the global shuffle"
    yield "window", f"{plan.shape.window_blocks:,} blocks, whose documents are shuffled together"
    yield "seed", f"{plan.seed}"
    for corpus in report.corpora:
        steps = corpus.steps_per_window
        mixed = "one window holds all of it" if steps is None else f"a window lasts {steps:,.0f} steps"
        yield corpus.name, f"{corpus.weight_share:.2%} of the first samples, {corpus.epoch_tokens:,} tokens, {mixed}"
        yield "", corpus.directory
    for sample, name in used_up(plan, run.cursor):
        yield f"{name} is used up", f"before sample {sample:,}, which would exceed its max_epochs"


def _charts_over_time(run: Run, marks: NDArray[np.int64], counts: NDArray[np.int64]) -> Iterator[Section]:
    """Shares and epochs; `counts` are the samples of each corpus before some samples: int64 [marks, corpora]."""
    steps = [step - 1 + within / run.size_of(step) for step, within in map(run.step_with, marks.tolist())]
    shares = np.diff(counts, axis=0) / np.diff(marks)[:, None]
    epochs = counts * (run.plan.seq_len / np.array([corpus.padded_tokens for corpus in run.plan.corpora]))

    def over_steps(title: str, note: str, values: NDArray[Any], y: Any, **style: str) -> Section:
        traces = [
            lines(name=name, color=number, x=steps, y=values[:, number].tolist(), **style)
            for number, name in enumerate(run.plan.names)
        ]
        return chart(title, note, traces, {"title": "step", "rangemode": "tozero"}, y, hovermode="x unified")

    yield over_steps(
        "Mixture over time",
        "The share of samples from each corpus, by the weights of the plan and its schedule.",
        np.concatenate([shares, shares[-1:]]),
        {"title": "share of samples", "tickformat": ".0%", "range": [0, 1]},
        stackgroup="shares",
        shape="hv",
        hovertemplate="%{y:.2%}",
    )
    yield over_steps(
        "Epochs per corpus",
        "How often each corpus has been read.",
        epochs,
        {"title": "epochs", "rangemode": "tozero"},
        hovertemplate="%{y:.2f}",
    )


def _shuffle_chart(plan: StreamPlan, number: int) -> Section:
    corpus, name = plan.corpora[number], plan.names[number]
    per_epoch = max(1, corpus.part_tokens(0) // plan.seq_len)
    ordinals = _ordinals(corpus, per_epoch)
    counts, pieces = plan.readers[number].pieces_of(np.zeros_like(ordinals), ordinals)
    firsts, ordinals = (np.cumsum(counts) - counts)[counts > 0], ordinals[counts > 0]
    windows = f"the {_WINDOWS} windows shown" if corpus.part_windows(0) > _WINDOWS else "its first epoch"
    windows += f", of the first of {corpus.num_parts} streams" if corpus.is_dealt else ""
    dots = {
        "type": "scatter",
        "mode": "markers",
        "color": number,
        "x": (ordinals / per_epoch).tolist(),
        "y": (pieces.starts[firsts] / corpus.source.num_tokens).tolist(),
        "hovertemplate": "%{x:.1%} into the epoch<br>%{y:.1%} into the corpus<extra></extra>",
    }
    return chart(
        f"{name}: position in the corpus against position in the epoch",
        f"One dot for each of {len(ordinals):,} samples from {windows}, at the position of its first token in the "
        "corpus. A well shuffled corpus fills the chart evenly; visible lines mean that some of its order is left.",
        [dots],
        {"title": "position in the epoch", "tickformat": ".0%", "range": [0, 1]},
        {"title": "position in the corpus", "tickformat": ".0%", "range": [0, 1]},
        height=380,
    )


def _ordinals(corpus: CorpusOrder, per_epoch: int) -> NDArray[np.int64]:
    """Evenly spaced samples of the first epoch; for a large corpus, from a few of its windows only."""
    num_windows, seq_len, window_tokens = corpus.part_windows(0), corpus.shape.seq_len, corpus.window_tokens
    if num_windows <= _WINDOWS:
        return np.unique(np.linspace(0, per_epoch - 1, _POINTS).astype(np.int64))
    firsts = np.linspace(0, num_windows - 2, _WINDOWS).astype(np.int64) * window_tokens
    within = np.linspace(0, max(0, window_tokens - 2 * seq_len), _POINTS // _WINDOWS).astype(np.int64)
    return np.unique(ceil_div(firsts[:, None] + within, seq_len))


def _parts(plan: StreamPlan, decode: Decode, sample: int) -> Iterator[tuple[str, Iterable[TokenPiece]]]:
    tokens, place = plan.sample(sample)["input_ids"], 0
    for piece in plan.trace(sample):
        length = piece.stop - piece.start
        shown = tokens[place : min(place + length, _SAMPLE_TOKENS)]
        if not len(shown):
            return
        title = f"document {piece.document:,} of {piece.corpus}, tokens {piece.start:,} to {piece.stop - 1:,}"
        more = f", the first {len(shown):,} shown" if len(shown) < length else ""
        yield title + more, token_pieces(shown, decode)
        place += length
