"""``--dry-run``: the size and time of a build, from a sample of its documents. Writes nothing to the output."""

from __future__ import annotations

import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import TokshardError, UsageError
from tokshard.forking import cpu_count
from tokshard.format.arrays import value_array
from tokshard.format.schema import COLUMN_TYPES, token_dtype
from tokshard.pipeline.adopt import plan
from tokshard.pipeline.encode.documents import ChunkResult, Column
from tokshard.pipeline.encode.maker import Maker
from tokshard.pipeline.executors.worker import restoring_environment
from tokshard.pipeline.judge import is_exceeded
from tokshard.pipeline.options import SKIP, TEXT, BuildOptions, parse_bad_record_limit
from tokshard.pipeline.request import Build
from tokshard.pipeline.resolve import resolve
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.inputs import read_once_name
from tokshard.pipeline.sources.records import Chunk, LineChunk
from tokshard.pipeline.tasks.duplicates import bytes_per_text
from tokshard.pipeline.tasks.planning import Planned, StreamTask
from tokshard.pipeline.tasks.running import InputReader
from tokshard.pipeline.workspace.receipts import TaskFailedError
from tokshard.store import is_uri

_SAMPLED_PLACES, _TEXT_BYTES_PER_PLACE = 32, 2 << 20
_COMPRESSED_PLACES, _TEXT_BYTES_PER_COMPRESSED_PLACE = 4, 16 << 20
"""Decompression reads ahead, so the first megabyte of text says little about the size of the whole."""
_WRITING_SECONDS = 4e-9
"""Cost of hashing and writing a token."""
_EVERY_CHUNK = 8
"""Of compressed lines every 8th chunk is encoded: a stream can only be read from its start, which may differ from its
middle, and reading costs far less than encoding."""
_COUNTED = ("input_bytes", "documents", "bad", "records", "tokens", "text_bytes", "kept_bytes", "seconds")
_Counts = NDArray[np.float64]
"""Counts of a sample, in the order of `_COUNTED`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """The estimated size and time of a build.

    Args:
        num_tasks, num_streams: units of work; streams are read from their start and count as one each.
        input_bytes: size of all inputs.
        sampled_documents, sampled_bad: records of the sample that would become documents, and bad ones.
        documents, tokens, text_bytes: counts of the corpus, with duplicates, which are not known; no bytes of text
            where no text is read.
        seconds: with `num_workers`, if as many cores are free as were for the sample.
        disk_bytes: space that the build takes while it runs.
        hash_bytes: the part of it that is removed at the end.
        free_bytes: room on the disk of the output directory; None if that is a URI.
        is_limited: ``max_documents`` ends the build before its inputs do.
        refused: why the build would fail, as far as the sample tells; None if it would not.
    """

    directory: str
    num_inputs: int
    input_bytes: int
    num_tasks: int
    num_streams: int
    sampled_documents: int
    sampled_bad: int
    documents: int
    tokens: int
    text_bytes: int
    cpu_seconds: float
    seconds: float
    num_workers: int
    disk_bytes: int
    hash_bytes: int
    free_bytes: int | None
    is_limited: bool
    refused: str | None


@restoring_environment()
def estimate_build(sources: Sequence[str], options: BuildOptions) -> Estimate:
    """Estimate a build. Costs seconds: about 64 MB of text are read and encoded.

    Inputs of one format and compression are taken to be alike. The sample is the same every time; the time is measured.

    Raises:
        TokshardError: as for the build itself.
    """
    build, tokenizer = resolve(sources, options)
    if build.inputs.read_once:
        name = read_once_name(build.inputs.read_once[0])
        raise UsageError(
            f"a sample of {name} would be lost to the build, because it can be read once only",
            hint="write it to a file first, or leave out --dry-run",
        )
    tasks = plan(build)
    sampled, total = np.zeros(len(_COUNTED)), np.zeros(len(_COUNTED))
    problems: list[str] = []
    for num_bytes, counted, stands_for in _by_kind(build, tokenizer, tasks, problems):
        sampled += counted
        total += stands_for * (num_bytes / stands_for[0] if stands_for[0] else 0.0)
    most, found = options.max_documents, float(total[1])
    is_limited = most is not None and most < found
    if most is not None and is_limited:
        total *= most / found
    _, documents, _, _, tokens, text_bytes, kept_bytes, seconds = total.tolist()
    hash_bytes = int(documents * bytes_per_text(len(tasks), int(documents))) if options.is_dedup else 0
    num_streams = sum(isinstance(task, StreamTask) for task in tasks)
    num_workers = build.options.workers or cpu_count()
    parallel = num_workers if num_streams else max(1, min(num_workers, len(tasks)))
    cpu_seconds = seconds + tokens * _WRITING_SECONDS
    token_bytes = np.dtype(token_dtype(build.tokenizer.vocab_size)).itemsize
    disk_bytes = int(token_bytes * tokens + 8 * documents + kept_bytes) + hash_bytes
    free_bytes = None if is_uri(options.out) else _free_bytes(Path(os.path.abspath(options.out)))
    most_bad = parse_bad_record_limit(options.max_bad_records) if options.on_bad_record == SKIP else 0
    first = f"; the first problem: {problems[0]}" if problems else ""
    refused = None if sampled[1] else f"no record of the sample becomes a document{first}"
    is_bad = most_bad is not None and is_exceeded(most_bad, *sampled[2:4].astype(int).tolist(), is_end=True)
    if is_bad and (most is None or found < most):
        allowed = options.max_bad_records or 0
        refused = f"the build allows {allowed} bad records: see --on-bad-record and --max-bad-records{first}"
    if free_bytes is not None and disk_bytes > free_bytes:
        refused = "the disk is too small for this build"
    return Estimate(
        directory=options.out,
        num_inputs=len(build.inputs),
        input_bytes=build.inputs.num_bytes,
        num_tasks=len(tasks),
        num_streams=num_streams,
        sampled_documents=int(sampled[1]),
        sampled_bad=int(sampled[2]),
        documents=round(documents),
        tokens=round(tokens),
        text_bytes=round(text_bytes),
        cpu_seconds=cpu_seconds,
        seconds=cpu_seconds / parallel,
        num_workers=parallel,
        disk_bytes=disk_bytes,
        hash_bytes=hash_bytes,
        free_bytes=free_bytes,
        is_limited=is_limited,
        refused=refused,
    )


def _by_kind(
    build: Build, tokenizer: bytes, tasks: Sequence[Planned], problems: list[str]
) -> Iterator[tuple[int, _Counts, _Counts]]:
    """For each format and compression: the bytes of its inputs, the counts of its samples, and what these stand for.

    Adds to `problems` what is wrong with records and inputs of the sample.
    """
    num_bytes: dict[tuple[str, str | None], int] = defaultdict(int)
    places: dict[tuple[str, str | None], list[tuple[int, Span]]] = defaultdict(list)
    for input_ in build.inputs:
        num_bytes[input_.format, input_.compression] += input_.num_bytes
    for task in tasks:
        for index in (task.key[0],) if isinstance(task, StreamTask) else task.inputs:
            input_ = build.inputs[index]
            span = Span() if isinstance(task, StreamTask) else task.span
            places[input_.format, input_.compression].append((index, span))
    maker = Maker(build, lambda: tokenizer)
    if build.config.reads == TEXT:
        maker.encode(["warm up: the first text builds caches"])
    for kind, found in places.items():
        most = _SAMPLED_PLACES if kind[1] is None else _COMPRESSED_PLACES
        share = min(len(found), max(1, most * len(found) // sum(map(len, places.values()))))
        wanted = _TEXT_BYTES_PER_PLACE if kind[1] is None else _TEXT_BYTES_PER_COMPRESSED_PLACE
        chosen = (found[number * len(found) // share] for number in range(share))
        samples = [_sample(build, maker, place, wanted, problems) for place in chosen]
        yield (
            num_bytes[kind],
            np.sum([one for one, _ in samples], axis=0),
            np.sum([two for _, two in samples], axis=0),
        )


def _sample(
    build: Build, maker: Maker, place: tuple[int, Span], wanted: int, problems: list[str]
) -> tuple[_Counts, _Counts]:
    """The counts of the start of a span, or of the readable part of a damaged one; and the counts they stand for."""
    counts, before = np.zeros(len(_COUNTED)), time.process_time()
    input_bytes = seen = used = encoded = 0
    index, span = place
    try:
        for number, chunk in enumerate(_chunks(build, index, span)):
            input_bytes += chunk.input_bytes
            size = len(chunk.data) if isinstance(chunk, LineChunk) else 0
            seen += size
            if size and build.inputs[index].compression and number % _EVERY_CHUNK:
                continue
            used += size
            made = maker.make(maker.parse(chunk))
            sizes = made.documents.text_bytes
            text_bytes = 0 if sizes is None else int(sizes.sum())
            encoded += text_bytes or made.documents.tokens.nbytes
            columns = made.documents.columns.items()
            kept = sum(_num_bytes(values, COLUMN_TYPES[build.columns[name]]) for name, values in columns)
            num_tokens = len(made.documents.tokens)
            problems += [f"{one.reason}: {one.detail}" for one in made.bad[:1]]
            counts += made.input_bytes, len(made.documents), len(made.bad), made.count, num_tokens, text_bytes, kept, 0
            if encoded >= wanted:
                break
    except TaskFailedError as error:  # the build itself will report it
        problems.append(error.failure.place + error.failure.problem)
    except TokshardError as error:
        problems.append(error.problem)
    counts[-1] = time.process_time() - before
    stands_for = counts * (seen / used if used else 1.0)
    stands_for[0] = input_bytes
    return counts, stands_for


def _num_bytes(values: Column, kind: pa.DataType) -> int:
    """Bytes of a kept column; a copy's column is already an array."""
    return int((values if isinstance(values, pa.Array) else value_array(list(values), kind)).nbytes)


def _chunks(build: Build, index: int, span: Span) -> Iterator[Chunk | ChunkResult]:
    reader = InputReader(build)
    if span == Span() and build.inputs[index].compression is not None:
        return (chunk for _, chunk in reader.numbered_chunks(index, 0))
    return reader.chunks(index, span)


def _free_bytes(path: Path) -> int:
    """Free bytes on the disk of a path, or of the nearest existing directory above it."""
    return shutil.disk_usage(next(place for place in (path, *path.parents) if os.path.exists(place))).free
