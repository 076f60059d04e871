"""The page of a training run: losses, mix, speed, waits and evaluations by step, and which steps stand out."""

from __future__ import annotations

import math
import os
import shlex
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UNDECODABLE, UsageError
from tokshard.forking import decodable
from tokshard.inspect.page.page import Facts, Section, chart, facts, heading, lines, render_page, table
from tokshard.numbers import ceil_div
from tokshard.run_files.checkpoint_directory import checkpoints_by_step
from tokshard.wording import counted

METRICS = "metrics.jsonl"
POINTS = 2_000
"""Largest number of points of a line; each then stands for several steps."""

BEFORE = 64
"""A loss or norm is compared with so many steps before it."""

NUM_SPREADS = 8.0
"""A step stands out if it exceeds the median of the steps before it by so many times their spread."""

MAX_ROWS = 1_000
_MAX_LINES = 40
"""Corpora whose lines can be told apart: a mix may have a thousand cells."""
_CHUNK = 8_192
_SCALE = 64
_SPREAD = 1.4826
"""The standard deviation of a normal distribution, by the median of the distances from its median."""


class _Read(msgspec.Struct):
    tokens: float
    weight: float | None = None


class _Evaluated(msgspec.Struct, frozen=True):
    loss: float | None
    targets: int = 0


@decodable
class _Line(msgspec.Struct):
    """The fields read from a line of ``metrics.jsonl``."""

    step: Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
    loss: float | None = None
    loss_by_corpus: dict[str, float | None] = {}
    grad_norm: float | None = None
    lr: float | None = None
    tokens: float | None = None
    tokens_per_second: float | None = None
    loader_wait_seconds: float | None = None
    corpora: dict[str, _Read] = {}
    samples: tuple[int, int] | None = None
    skipped: str = ""
    evaluation: dict[str, _Evaluated] = {}


@dataclass(frozen=True, slots=True, kw_only=True)
class _History:
    """A run by steps.

    Args:
        steps: int64 [steps], ascending.
        values: float64 [steps] of each figure, NaN where a step has none; of a corpus as ``loss_by_corpus/code``.
        evaluations: step to the losses of each corpus.
        skipped: step to the reason and the samples that it would have read.
    """

    steps: NDArray[np.int64]
    values: Mapping[str, NDArray[np.float64]]
    evaluations: Mapping[int, Mapping[str, _Evaluated]]
    skipped: Mapping[int, tuple[str, tuple[int, int] | None]]

    def largest(self) -> set[str]:
        """The corpora that have lines of their own: those that were read most."""
        read = {name: np.nan_to_num(of).max() for name, of in self.by_corpus("read").items()}
        names = dict.fromkeys([*read, *self.by_corpus("loss_by_corpus")])
        return set(sorted(names, key=lambda name: -read.get(name, 0.0))[:_MAX_LINES])

    def by_corpus(self, kind: str) -> dict[str, NDArray[np.float64]]:
        """The figures of one kind by corpus."""
        return {name.partition("/")[2]: of for name, of in self.values.items() if name.startswith(f"{kind}/")}


def metrics_of(location: str) -> str | None:
    """The path of the metrics of a run, given as its directory or as this path; None: it is something else."""
    path = os.path.join(location, METRICS)
    if location.endswith(".jsonl") and os.path.isfile(location):
        return location
    return path if os.path.isfile(path) else None


def run_page(path: str) -> str:
    """The page of a run.

    Args:
        path: of its metrics.jsonl. The checkpoints next to it make the commands of `tokshard trace` exact.

    Raises:
        UsageError: plotly is not installed, or a line is not one of metrics.
        TrainerError: the checkpoints beside it cannot be listed.
    """
    with np.errstate(all="ignore"):  # figures may be huge or 0: those that are not finite are not drawn
        return _page_of(path)


def _page_of(path: str) -> str:
    directory = os.path.dirname(path) or "."
    history = _read(path)
    checkpoints = checkpoints_by_step(os.path.join(directory, "checkpoints"))
    peaks = {name: _peaks(history.values[name]) for name in ("loss", "grad_norm")}
    sections: list[Section] = [
        heading("Run"),
        facts("Training", _facts(history, directory, checkpoints)),
        heading("Loss"),
        _loss_chart(history, np.flatnonzero(peaks["loss"])),
        *_evaluation_sections(history),
        heading("Data and speed"),
        *_charts_of_data(history),
        heading("Steps that stand out"),
        _table(history, peaks, checkpoints),
    ]
    name = os.path.basename(os.path.abspath(directory))
    return render_page(title=name, subtitle=f"training run, {counted(len(history.steps), 'step')}", sections=sections)


def _read(path: str) -> _History:
    steps = array("q")
    columns: dict[str, array[float]] = {}
    evaluations, skipped = dict[int, Mapping[str, _Evaluated]](), dict[int, tuple[str, tuple[int, int] | None]]()
    with open(path, "rb") as file:
        for number, text in enumerate(file, 1):
            try:
                line = msgspec.json.decode(text, type=_Line)
            except UNDECODABLE as error:
                if not text.endswith(b"\n"):
                    break  # the run writes it at this moment, or died then
                raise UsageError(
                    f"{path}: line {number:,} is not one of a training run: {error}",
                    hint="give the metrics.jsonl of tokshard's trainer, or remove that line",
                ) from error
            if line.evaluation:
                evaluations[line.step] = line.evaluation
                continue
            if line.skipped:
                skipped[line.step] = line.skipped, line.samples
            for name, value in _figures(line):
                column = columns.setdefault(name, array("d"))
                column.extend([math.nan] * (len(steps) - len(column)))
                column.append(math.nan if value is None else value)
            steps.append(line.step)
    if not steps:
        raise UsageError(f"{path} has no step yet", hint="wait until the run has done one")
    for column in columns.values():
        column.extend([math.nan] * (len(steps) - len(column)))
    values = {name: np.array(column) for name, column in columns.items()}
    return _History(steps=np.array(steps), values=values, evaluations=evaluations, skipped=skipped)


def _figures(line: _Line) -> Iterator[tuple[str, float | None]]:
    for name in ("loss", "grad_norm", "lr", "tokens", "tokens_per_second", "loader_wait_seconds"):
        yield name, getattr(line, name)
    for corpus, loss in line.loss_by_corpus.items():
        yield f"loss_by_corpus/{corpus}", loss
    for corpus, read in line.corpora.items():
        yield f"read/{corpus}", read.tokens
        yield f"weight/{corpus}", read.weight


def _peaks(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Which values are far above the values before them: bool [steps]; never the first steps of a run."""
    found = np.zeros(len(values), np.bool_)
    known = np.flatnonzero(np.isfinite(values))
    kept = values[known]
    for start in range(BEFORE, len(kept), _CHUNK):  # in bounded memory
        stop = min(start + _CHUNK, len(kept))
        windows = np.lib.stride_tricks.sliding_window_view(kept[start - BEFORE : stop - 1], BEFORE)
        medians = np.median(windows, axis=1)
        spreads = _SPREAD * np.median(np.abs(windows - medians[:, None]), axis=1)
        # a loss that hardly moves would make peaks of nothing
        found[known[start:stop]] = kept[start:stop] - medians > np.maximum(NUM_SPREADS * spreads, 0.01 * abs(medians))
    return found


def _facts(history: _History, directory: str, checkpoints: Mapping[int, str]) -> Facts:
    values, first, last = history.values, int(history.steps[0]), int(history.steps[-1])
    speed = values["tokens_per_second"]
    seconds = np.where(speed > 0, values["tokens"] / speed, np.nan)
    yield "directory", directory
    yield "steps", f"{first:,} to {last:,}"
    yield "tokens", f"{np.nansum(values['tokens']):,.0f}"
    if len(known := np.flatnonzero(np.isfinite(values["loss"]))):
        lowest = np.nanmin(values["loss"])
        yield (
            "loss",
            f"{values['loss'][known[-1]]:.4f} in step {history.steps[known[-1]]:,}, {lowest:.4f} in the lowest",
        )
    for step, losses in list(history.evaluations.items())[-1:]:
        shown = ", ".join(
            f"{name} {('not finite' if of.targets else 'no targets') if of.loss is None else f'{of.loss:.4f}'}"
            for name, of in losses.items()
        )
        yield "evaluation", f"after step {step:,}: {shown}"
    if np.isfinite(speed).any():
        share = float(np.nansum(values["loader_wait_seconds"]) / np.nansum(seconds))
        waited = f"; {share:.1%} of the time waited for data" if math.isfinite(share) else ""
        yield "speed", f"{np.nanmedian(speed):,.0f} tokens/s in the median step{waited}"
    if history.skipped:
        yield "skipped", counted(len(history.skipped), "step")
    if checkpoints:
        yield "newest checkpoint", list(checkpoints.values())[-1]


def _bins(history: _History) -> NDArray[np.int64]:
    """The places of the first steps of at most `POINTS` groups of steps."""
    return np.unique(
        np.linspace(0, len(history.steps), min(POINTS, len(history.steps)), endpoint=False).astype(np.int64)
    )


def _means(values: NDArray[np.float64], starts: NDArray[np.int64]) -> list[float | None]:
    """The mean of the known values of each group; None if it has none."""
    known = np.isfinite(values)
    scaled = np.where(known, np.ldexp(values, -_SCALE), 0)  # so that no sum is infinite
    sums, counts = np.add.reduceat(scaled, starts), np.add.reduceat(known.astype(np.int64), starts)
    return [math.ldexp(of / n, _SCALE) if n else None for of, n in zip(sums.tolist(), counts.tolist(), strict=True)]


def _over_steps(history: _History, title: str, note: str, traces: Sequence[Mapping[str, Any]], y: Any) -> Section:
    num_steps = ceil_div(len(history.steps), POINTS)
    more = "" if num_steps == 1 else f" A point is the mean of about {num_steps:,} steps."
    return chart(title, (note + more).strip(), traces, {"title": "step"}, y, hovermode="x unified")


def _loss_chart(history: _History, peaks: NDArray[np.int64]) -> Section:
    starts = _bins(history)
    found, largest = history.by_corpus("loss_by_corpus"), history.largest()
    all_of = {"all": history.values["loss"]} | {name: of for name, of in found.items() if name in largest}
    x = history.steps[starts].tolist()
    style = {"hovertemplate": "%{y:.4f}"}
    traces = [lines(name=name, x=x, y=_means(values, starts), **style) for name, values in all_of.items()]
    if len(peaks):
        marked = {"x": history.steps[peaks].tolist(), "y": history.values["loss"][peaks].tolist()}
        traces.append({"type": "scatter", "mode": "markers", "name": "stands out", "size": 8, **marked, **style})
    note = "Mean over the targets of a step, of all and of each corpus." + _of_how_many(found)
    return _over_steps(history, "Loss in training", note, traces, {"title": "nats, on a log scale", "type": "log"})


def _of_how_many(corpora: Mapping[str, Any]) -> str:
    return f" Of {len(corpora):,} corpora the {_MAX_LINES} that were read most." if len(corpora) > _MAX_LINES else ""


def _evaluation_sections(history: _History) -> Iterator[Section]:
    names = dict.fromkeys(name for losses in history.evaluations.values() for name in losses)
    if not names:
        return
    traces = []
    for name in names:
        found = {step: losses[name].loss for step, losses in history.evaluations.items() if name in losses}
        style = {"mode": "lines+markers", "size": 6, "hovertemplate": "%{y:.4f}"}
        traces.append({"type": "scatter", "name": name, "x": list(found), "y": list(found.values()), **style})
    yield chart(
        "Evaluations",
        "Mean loss over the targets of each corpus of [evaluation].",
        traces,
        {"title": "step"},
        {"title": "nats"},
        hovermode="x unified",
    )


def _charts_of_data(history: _History) -> Iterator[Section]:
    starts = _bins(history)
    x = history.steps[starts].tolist()
    if read := history.by_corpus("read"):
        ends = np.append(starts[1:], len(history.steps)) - 1
        totals = np.stack([_filled(values)[ends] for values in read.values()])
        before = np.zeros((len(totals), 1)) if history.steps[0] == 1 else totals[:, :1]
        tokens = np.diff(totals, axis=1, prepend=before)
        with np.errstate(invalid="ignore"):
            weights = np.stack([history.values[f"weight/{name}"][starts] for name in read])
            planned, shares = weights / np.nansum(weights, 0), tokens / tokens.sum(0)
        style, largest = {"x": x, "shape": "hv", "hovertemplate": "%{y:.2%}"}, history.largest()
        traces = [
            lines(name=f"{name}{kind}", y=_known(of), color=number, dash=dash, **style)
            for kind, dash, each in (("", "solid", shares), (", planned", "dash", planned))
            for number, (name, of) in enumerate(zip(read, each, strict=True))
            if np.isfinite(of).any() and name in largest
        ]
        note = "The share of each corpus in the tokens that were read; dashed: the share that its weight asks for."
        note += _of_how_many(read)
        axis = {"title": "share of tokens", "tickformat": ".0%", "range": [0, 1]}
        yield _over_steps(history, "Mix", note, traces, axis)
    for name, title, note, form, unit in (
        ("tokens_per_second", "Speed", "Of all ranks together.", ",.0f", "tokens/s"),
        ("loader_wait_seconds", "Wait for data", "Of the slowest rank in each step.", ".3f", "seconds"),
        ("grad_norm", "Gradient norm", "Before clipping.", ".3f", "norm"),
        ("lr", "Learning rate", "", ".2e", "learning rate"),
    ):
        trace = lines(x=x, y=_means(history.values[name], starts), hovertemplate=f"%{{y:{form}}}<extra></extra>")
        yield _over_steps(history, title, note, [trace], {"title": unit, "rangemode": "tozero"})


def _filled(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Totals; a step without one repeats the total before it."""
    return np.asarray(np.fmax.accumulate(np.where(np.arange(len(values)) == 0, np.nan_to_num(values), values)))


def _known(values: NDArray[np.float64]) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _table(history: _History, peaks: Mapping[str, NDArray[np.bool_]], checkpoints: Mapping[int, str]) -> Section:
    """The steps that stand out, each with the command that lists its documents."""
    loss, norm = history.values["loss"], history.values["grad_norm"]
    skipped = np.isin(history.steps, list(history.skipped))
    places = np.flatnonzero(peaks["loss"] | peaks["grad_norm"] | skipped)
    rows = []
    for place in places[:MAX_ROWS].tolist():
        step = int(history.steps[place])
        reason, samples = history.skipped.get(step, ("", None))
        why = f"skipped: {reason}" if reason else " and ".join(name for name in peaks if peaks[name][place])
        figures = ("" if math.isnan(of[place]) else f"{of[place]:.4f}" for of in (loss, norm))
        was_read = samples is None or reason != "train.skip"
        asked = f"--step {step}" if was_read or samples is None else f"--sample {samples[0]}:{samples[1]}"
        rows.append((step, why.replace("grad_norm", "gradient norm"), *figures, _command(step, asked, checkpoints)))
    note = (
        f"A step whose loss or gradient norm is more than {NUM_SPREADS:.0f} spreads above the median of the {BEFORE} "
        "steps before it, or that was skipped. The command shows the documents that it read."
    )
    if len(places) > MAX_ROWS:
        note += f" Only the first {MAX_ROWS:,} of {len(places):,} are listed."
    columns: list[Section] = [
        {"name": "step", "number": True},
        {"name": "what"},
        {"name": "loss", "number": True},
        {"name": "gradient norm", "number": True},
        {"name": "show its documents", "code": True},
    ]
    return table(counted(len(places), "step"), columns, rows, search="Search steps", note=note)


def _command(step: int, asked: str, checkpoints: Mapping[int, str]) -> str:
    """The command that traces a step, with the first checkpoint that records it, or else the newest."""
    after = [path for saved, path in checkpoints.items() if saved >= step]
    plan = [*after, *list(checkpoints.values())[-1:]][0] if checkpoints else "RECIPE.toml"
    return f"tokshard trace {shlex.quote(os.path.normpath(plan)) if checkpoints else plan} {asked}"
