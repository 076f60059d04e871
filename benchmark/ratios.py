"""Figures side by side. Each value pairs two of the same repetition, so that a busy minute is in both."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from benchmark.figures import (
    BATCH,
    BUILD_1,
    BUILD_2,
    CALL,
    HASH,
    NAIVE_1,
    NAIVE_2,
    PINNED,
    SHARDS_1,
    SHARDS_2,
    START_1,
    START_2,
    TEXTS,
    Key,
    Measured,
    Text,
)

Runs = Mapping[Key, Sequence[Measured]]


class Ratio(NamedTuple):
    """One comparison, with a value for each repetition."""

    label: str
    text: str
    values: list[float]


def ratios(runs: Runs, texts: Mapping[str, Text]) -> Iterator[Ratio]:
    """What can be compared of the figures that were measured."""
    for text in TEXTS:
        gigabytes = texts[text].text_bytes / 1e9
        for compare in (_encoding, _workers, _naive):
            for label, values in compare(runs, text):
                yield Ratio(label, text, values)
        for label, values in _besides_encoding(runs, text):
            yield Ratio(label, text, [seconds / gigabytes for seconds in values])
    for label, values in _memory(runs):
        yield Ratio(label, "code", values)


def start_up_share(runs: Runs) -> float:
    """The part of the cheapest build of a text that is start-up; 0 if that was not measured."""
    builds = [_cpu(runs, key) for key in ((BUILD_1, "code"), (BUILD_2, "code")) if key in runs]
    starts = [_cpu(runs, key) for key in ((START_1, "tiny"), (START_2, "tiny")) if key in runs]
    return max((sum(start) / sum(build) for start, build in zip(starts, builds, strict=False)), default=0.0)


def _encoding(runs: Runs, text: str) -> Iterator[tuple[str, list[float]]]:
    """Text per CPU-second of a build against that of encoding alone: 1 is the best there can be."""
    build, start = (BUILD_1, text), (START_1, "tiny")
    for figure in (BATCH, PINNED, CALL):
        encoding = (figure, text)
        if build in runs and encoding in runs:
            yield f"MB/CPU-s: build / {figure}", _divide(_cpu(runs, encoding), _cpu(runs, build))
            if start in runs:
                rest = _minus(_cpu(runs, build), _cpu(runs, start))
                yield f"MB/CPU-s: build without start-up / {figure}", _divide(_cpu(runs, encoding), rest)


def _besides_encoding(runs: Runs, text: str) -> Iterator[tuple[str, list[float]]]:
    """CPU-seconds of a build with one worker that are neither encoding nor hashing."""
    parts = [(BUILD_1, text), (CALL, text), (HASH, text)]
    if all(key in runs for key in parts):
        besides = _minus(*(_cpu(runs, key) for key in parts))
        yield "CPU-s/GB besides encoding and hashing", besides
        if (START_1, "tiny") in runs:
            yield "CPU-s/GB besides encoding, hashing and start-up", _minus(besides, _cpu(runs, (START_1, "tiny")))


def _workers(runs: Runs, text: str) -> Iterator[tuple[str, list[float]]]:
    one, two = (BUILD_1, text), (BUILD_2, text)
    starts = (START_1, "tiny"), (START_2, "tiny")
    if one not in runs or two not in runs or runs[two][0].processes != 2:
        return
    yield "CPU-s/GB: 2 workers / 1", _divide(_cpu(runs, two), _cpu(runs, one))
    if all(start in runs for start in starts):
        rest_1, rest_2 = (
            _minus(_cpu(runs, build), _cpu(runs, start)) for build, start in zip((one, two), starts, strict=True)
        )
        yield "CPU-s/GB: 2 workers / 1, without start-up", _divide(rest_2, rest_1)
    yield "MB/s: 2 workers / 1", _divide(_wall(runs, one), _wall(runs, two))


def _naive(runs: Runs, text: str) -> Iterator[tuple[str, list[float]]]:
    for build, naive, label in ((BUILD_1, NAIVE_1, "1 process"), (BUILD_2, NAIVE_2, "2 processes")):
        ours, theirs = (build, text), (naive, text)
        if ours in runs and theirs in runs:
            yield f"MB/CPU-s: tokshard / datasets, {label}", _divide(_cpu(runs, theirs), _cpu(runs, ours))
            yield f"MB/s: tokshard / datasets, {label}", _divide(_wall(runs, theirs), _wall(runs, ours))


def _memory(runs: Runs) -> Iterator[tuple[str, list[float]]]:
    """1 is flat."""
    for build, shards, label in ((BUILD_1, SHARDS_1, "1 worker"), (BUILD_2, SHARDS_2, "2 workers")):
        whole, quarter, small = (build, "code"), (build, "quarter"), (shards, "code")
        if whole in runs and quarter in runs:
            yield f"worker memory: all / a quarter of it, {label}", _divide(_peak(runs, whole), _peak(runs, quarter))
        if whole in runs and small in runs:
            yield f"worker memory: 256M / 8M-token shards, {label}", _divide(_peak(runs, whole), _peak(runs, small))


def _cpu(runs: Runs, key: Key) -> list[float]:
    return [once.cpu_seconds for once in runs[key]]


def _wall(runs: Runs, key: Key) -> list[float]:
    return [once.wall_seconds for once in runs[key]]


def _peak(runs: Runs, key: Key) -> list[float]:
    return [float(once.worker_bytes or 0) for once in runs[key]]


def _divide(above: list[float], below: list[float]) -> list[float]:
    return [a / b for a, b in zip(above, below, strict=True)]


def _minus(*parts: list[float]) -> list[float]:
    return [first - sum(others) for first, *others in zip(*parts, strict=True)]
