"""The page of a plan: the mixture over time, epochs, what the shuffle does, the first samples token by token."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.decode import Decode, load_decoder
from tokshard.format.reader import open_corpus
from tokshard.inspect.html import Section, render_page
from tokshard.inspect.pieces import token_pieces
from tokshard.inspect.vocabulary import load_vocabulary
from tokshard.runtime.mix import Mix
from tokshard.runtime.plan import StreamPlan
from tokshard.runtime.windows import CorpusStream

_STEPS = 200
_WINDOWS = 8
_POINTS = 2_400
_SAMPLE_TOKENS = 400
_MAX_PICTURES = 8


def plan_page(mix: Mix, *, name: str, num_samples: int) -> str:
    """The page. The shuffle picture makes the tables of `_WINDOWS` windows of each corpus, half a second each.

    Raises:
        UsageError: plotly is not installed, or the mix makes no plan.
        CorpusError: a corpus cannot be read.
    """
    plan = mix.plan()
    horizon = _horizon(plan)
    changes = [segment.start for segment in plan.cursor().segments if segment.start <= horizon]
    marks = np.unique(np.concatenate([np.linspace(0, horizon, _STEPS + 1).astype(np.int64), changes]))
    counts = np.array([plan.mixture(plan.cursor()).counts_before(mark) for mark in marks.tolist()], np.int64)
    with open_corpus(next(iter(mix.corpora.values()))) as corpus:
        decode, vocabulary = load_decoder(corpus), load_vocabulary(corpus)
    sections: list[Section] = [
        {"kind": "heading", "title": "Plan"},
        _cards(plan, mix),
        {"kind": "facts", "title": "What it is", "rows": _facts(plan, mix)},
        _mixture_chart(plan, mix, marks, counts),
        _epochs_chart(plan, mix, marks, counts),
        {"kind": "heading", "title": "Shuffle"},
        *(
            _shuffle_chart(plan, number)
            for number in range(min(len(plan.names), _MAX_PICTURES))
            if any(segment.weights[number] for segment in plan.cursor().segments)
        ),
        {"kind": "heading", "title": "Samples"},
        _samples(plan, decode, sorted(vocabulary.special_ids), num_samples),
    ]
    return render_page(title=name, subtitle=f"plan {plan.fingerprint[:16]}", sections=sections)


def _horizon(plan: StreamPlan) -> int:
    """So many samples that every corpus with weight was read once and the schedule is over, or that the plan allows."""
    if plan.num_samples is not None:
        return plan.num_samples
    limits = plan.limits(plan.cursor())
    if limits and plan.on_max_epochs == "stop":
        return max(2, limits[0].sample)
    mixture, cursor = plan.mixture(plan.cursor()), plan.cursor()
    ends = [cursor.segments[-1].start * 5 // 4]
    for number, stream in enumerate(plan.streams):
        last = -(-stream.num_tokens // plan.seq_len) - 1
        found = mixture.sample_of(number, last)
        if found is not None:
            ends.append(found + 1)
    return max(2, *ends)


def _cards(plan: StreamPlan, mix: Mix) -> Section:
    step_tokens = mix.global_batch_size * mix.seq_len
    total = sum(stream.num_tokens for stream in plan.streams)
    items = [
        ("corpora", f"{len(plan.names)}", f"{total:,} tokens"),
        ("sample", f"{mix.seq_len:,}", "tokens"),
        ("step", f"{mix.global_batch_size:,}", f"samples, {step_tokens:,} tokens"),
        ("block", f"{plan.shape.block_tokens:,}", "tokens stay together until they are cut at documents"),
        ("window", f"{plan.shape.window_blocks:,}", "blocks are shuffled together"),
        ("seed", f"{plan.seed}", ""),
    ]
    return {"kind": "cards", "items": [{"label": label, "value": value, "more": more} for label, value, more in items]}


def _facts(plan: StreamPlan, mix: Mix) -> list[list[str]]:
    places = plan.places_per_step(mix.global_batch_size)
    windows = plan.steps_per_window(mix.global_batch_size)
    total = sum(plan.cursor().segments[0].weights)
    rows = [["fingerprint", plan.fingerprint]]
    for number, (name, stream) in enumerate(zip(plan.names, plan.streams, strict=True)):
        weight = plan.cursor().segments[0].weights[number]
        steps = windows[name]
        mixed = "all of it is shuffled together" if math.isinf(steps) else f"a window lasts {steps:,.0f} steps"
        share = f"{weight / total:.2%} of the samples at first, {stream.num_tokens:,} tokens"
        rows.append([name, f"{share}, {mixed}, a step draws from {places[name]:,.0f} places"])
        rows.append(["", mix.corpora[name]])
    rows += [
        [f"{name} is used up", f"before sample {sample:,}, which would read more of it than max_epochs"]
        for sample, name in plan.limits(plan.cursor())
    ]
    return rows


def _mixture_chart(plan: StreamPlan, mix: Mix, marks: NDArray[np.int64], counts: NDArray[np.int64]) -> Section:
    shares = np.diff(counts, axis=0) / np.diff(marks)[:, None]
    shares = np.concatenate([shares, shares[-1:]])
    return {
        "kind": "chart",
        "title": "Mixture over time",
        "note": "Share of the samples that come from each corpus, under the weights of the plan and its schedule.",
        "hovermode": "x unified",
        "traces": [
            {
                "type": "scatter",
                "mode": "lines",
                "stackgroup": "shares",
                "name": name,
                "color": number,
                "shape": "hv",
                "x": (marks / mix.global_batch_size).tolist(),
                "y": shares[:, number].tolist(),
                "hovertemplate": "%{y:.2%}",
            }
            for number, name in enumerate(plan.names)
        ],
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {"tickformat": ".0%", "range": [0, 1]},
    }


def _epochs_chart(plan: StreamPlan, mix: Mix, marks: NDArray[np.int64], counts: NDArray[np.int64]) -> Section:
    return {
        "kind": "chart",
        "title": "Epochs per corpus",
        "note": "How often each corpus has been read.",
        "hovermode": "x unified",
        "traces": [
            {
                "type": "scatter",
                "mode": "lines",
                "name": name,
                "color": number,
                "x": (marks / mix.global_batch_size).tolist(),
                "y": (counts[:, number] * mix.seq_len / stream.num_tokens).tolist(),
                "hovertemplate": "%{y:.2f}",
            }
            for number, (name, stream) in enumerate(zip(plan.names, plan.streams, strict=True))
        ],
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {"title": {"text": "epochs"}, "rangemode": "tozero"},
    }


def _shuffle_chart(plan: StreamPlan, number: int) -> Section:
    stream, name = plan.streams[number], plan.names[number]
    per_epoch = max(1, stream.num_tokens // plan.seq_len)
    ordinals = _ordinals(stream, plan.seq_len, per_epoch)
    counts, pieces = stream.pieces_of(ordinals)
    firsts = np.cumsum(counts) - counts
    windows = f"the {_WINDOWS} windows shown" if stream.num_windows > _WINDOWS else "its first epoch"
    return {
        "kind": "chart",
        "title": f"{name}: position in the corpus against position in training",
        "note": f"A dot per sample, for {len(ordinals):,} samples from {windows}: where in the corpus its first token "
        "lies. A shuffled corpus fills the picture evenly; lines would be order that is left.",
        "height": 380,
        "traces": [
            {
                "type": "scatter",
                "mode": "markers",
                "color": number,
                "x": (ordinals / per_epoch).tolist(),
                "y": (pieces.starts[firsts] / stream.source.num_tokens).tolist(),
                "hovertemplate": "read after %{x:.1%} of the epoch<br>lies at %{y:.1%} of the corpus<extra></extra>",
            }
        ],
        "xaxis": {"title": {"text": "part of the epoch read before"}, "tickformat": ".0%", "range": [0, 1]},
        "yaxis": {"title": {"text": "place in the corpus"}, "tickformat": ".0%", "range": [0, 1]},
    }


def _ordinals(stream: CorpusStream, seq_len: int, per_epoch: int) -> NDArray[np.int64]:
    """Samples of the first epoch, the same distance apart; of a large corpus those of a few windows."""
    if stream.num_windows <= _WINDOWS:
        return np.unique(np.linspace(0, per_epoch - 1, _POINTS).astype(np.int64))
    parts = []
    for index in np.linspace(0, stream.num_windows - 1, _WINDOWS).astype(np.int64).tolist():
        window = stream.window(0, index)
        first, last = -(-window.start // seq_len), min(per_epoch, window.stop // seq_len) - 1
        parts.append(np.linspace(first, max(first, last), _POINTS // _WINDOWS).astype(np.int64))
    return np.unique(np.concatenate(parts))


def _samples(plan: StreamPlan, decode: Decode, specials: list[int], num_samples: int) -> Section:
    items: list[dict[str, Any]] = []
    most = num_samples if plan.num_samples is None else min(num_samples, plan.num_samples)
    for sample in range(most):
        tokens = plan.sample(sample)["input_ids"]
        parts, place = [], 0
        for piece in plan.trace(sample):
            if place >= _SAMPLE_TOKENS:
                break
            length = piece.stop - piece.start
            shown = tokens[place : min(place + length, _SAMPLE_TOKENS)]
            parts.append(
                {
                    "title": f"document {piece.document:,} of {piece.corpus}, tokens {piece.start:,} to "
                    f"{piece.stop - 1:,}" + (f", the first {len(shown)} shown" if len(shown) < length else ""),
                    "pieces": [[text, *ids] for ids, text in token_pieces(shown, decode)],
                }
            )
            place += length
        items.append({"title": f"sample {sample:,}", "parts": parts})
    return {
        "kind": "tokens",
        "title": "The first samples",
        "note": f"The first {_SAMPLE_TOKENS} tokens of each, document by document.",
        "specials": specials,
        "items": items,
    }
