"""How fast a plan is read from a store that is 20 ms away and gives 200 MB per second: tables, one line of JSON.

    python -m benchmark.remote [--milliseconds 20] [--megabytes-per-second 200] [--only start speed]

README.md in this folder says what each row means. Nothing is asserted of time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.processes import ROOT
from benchmark.range_server import range_server
from benchmark.report import commit, machine, markdown, spread_of, versions
from benchmark.shards import corpus, repeated

PACKAGES = ("tokshard", "numpy", "pyarrow", "obstore")
GROUPS = ("start", "speed", "waits", "nodes", "disk", "local")
SEQ_LEN, TOKEN_BYTES = 4_096, 2
WINDOW_TOKENS = 1 << 26  # of the default window
STEP_MILLISECONDS = 20.0
NODES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What is read.

    Args:
        window_tokens: as many as are read of one window; fewer in a quick run, of a corpus that is one window.
        rows: of a step.
        num_shards: of the corpus whose shards are one file.
        shard_tokens: of each of them.
    """

    window_tokens: int
    rows: int
    num_shards: int
    shard_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One way to read one corpus.

    Args:
        corpus: directory of the corpus.
        shard: the bytes of every shard that the directory lacks.
        is_local: read the directory, not the server.
        has_disk: keep on a disk of this machine what was read, in a directory that is new for each reading.
        options: for `remote_steps`.
        stretch: the one that is reported; those before it are not.
    """

    group: str
    name: str
    corpus: Path
    options: Sequence[str]
    shard: Path | None = None
    is_local: bool = False
    has_disk: bool = False
    stretch: int = -1


def cases_of(folder: Path, sizes: Sizes, groups: set[str], bytes_per_second: float) -> Iterator[Case]:
    """What is measured, in order; corpora are made where they are missing."""
    window = sizes.window_tokens
    read = corpus(folder, num_tokens=6 * window, document_tokens=750)
    if "start" in groups:
        yield from _starts(folder, sizes, read)
    rows = str(sizes.rows)
    whole = ("--rows", rows, "--stretches", str(window), str(4 * window))
    if "speed" in groups:
        yield Case(group="speed", name="as fast as it goes", corpus=read, options=whole)
    if "waits" in groups:
        yield from _waits(window, read, bytes_per_second)
    if "nodes" in groups:
        stretches = (str(window // NODES), str(3 * window // NODES))
        options = ("--rows", "8", "--world-size", str(NODES), "--stretches", *stretches)
        for name, streams in (("no streams", 1), ("a stream for each", NODES)):
            named = f"one of {NODES} ranks, {name}"
            yield Case(group="nodes", name=named, corpus=read, options=(*options, "--streams", str(streams)))
    if "disk" in groups:
        # less memory than an epoch needs, so that the second one comes from the disk
        options = ("--rows", rows, "--stretches", *[str(6 * window)] * 2, "--memory-bytes", str(6 * window))
        for name, stretch in (("first epoch, into a disk cache", 0), ("second epoch, from it", 1)):
            yield Case(group="disk", name=name, corpus=read, options=options, has_disk=True, stretch=stretch)
    if "local" in groups:
        yield Case(group="local", name="the same corpus on this machine", corpus=read, options=whole, is_local=True)


def _starts(folder: Path, sizes: Sizes, read: Path) -> Iterator[Case]:
    one = corpus(folder, num_tokens=31 * sizes.shard_tokens // 32, document_tokens=750, shard_tokens=sizes.shard_tokens)
    many = repeated(folder, one, num_shards=sizes.num_shards)
    (shard,) = one.glob("shard-*")
    total = sizes.num_shards * sizes.shard_tokens * 31 // 32
    one_batch = ("--rows", "8", "--stretches", str(8 * SEQ_LEN))
    for name, sample in (("its start", 0), ("its middle", total // SEQ_LEN // 2)):
        options = (*one_batch, "--sample", str(sample))
        yield Case(group="start", name=f"{total:.0e} tokens, {name}", corpus=many, options=options, shard=shard)
    yield Case(group="start", name=f"{6 * sizes.window_tokens:.0e} tokens, its start", corpus=read, options=one_batch)


def _waits(window: int, read: Path, bytes_per_second: float) -> Iterator[Case]:
    half = max(1, round(bytes_per_second / TOKEN_BYTES / 2 * STEP_MILLISECONDS / 1e3 / SEQ_LEN))
    for name, each, tokens in (("8 rows", 8, window // 2), ("half of the bandwidth", half, 2 * window)):
        options = ("--rows", str(each), "--sample", str(window * 6 // 10 // SEQ_LEN), "--stretches", str(tokens))
        paced = (*options, "--step-milliseconds", str(STEP_MILLISECONDS))
        yield Case(group="waits", name=f"steps of {STEP_MILLISECONDS:g} ms, {name}", corpus=read, options=paced)


def measure(case: Case, server: tuple[float, float]) -> dict[str, Any]:
    """One reading, in a fresh process."""
    if case.is_local:
        return _read(str(case.corpus), case)
    milliseconds, megabytes_per_second = server
    with range_server(
        case.corpus, milliseconds=milliseconds, megabytes_per_second=megabytes_per_second, shard=case.shard
    ) as url:
        if not case.has_disk:
            return _read(url, case, "--counts", url)
        with tempfile.TemporaryDirectory(prefix="tokshard-cache-") as folder:
            return _read(url, case, "--counts", url, "--cache-dir", folder)


def _read(location: str, case: Case, *options: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmark.remote_steps", location, *options, *case.options]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{case.name} ended with {done.returncode}")
    said = json.loads(done.stdout)
    stretch = said["stretches"][case.stretch]
    counts, tokens = stretch["counts"], stretch["tokens"]
    return {
        "open_seconds": said["open_seconds"],
        "first_batch_seconds": said["first_batch_seconds"],
        "start_requests": _sum(said, "requests", "open_counts", "first_batch_counts"),
        "start_bytes": _sum(said, "bytes", "open_counts", "first_batch_counts"),
        "open_bytes": _sum(said, "bytes", "open_counts"),
        "tokens_per_second": tokens / stretch["seconds"],
        "bytes_per_token": (counts.get("shard_bytes", 0) + counts.get("other_bytes", 0)) / tokens,
        "requests_per_million_tokens": (counts.get("shard_requests", 0) + counts.get("other_requests", 0))
        / tokens
        * 1e6,
        "most_requests_at_once": counts.get("most_at_once", 0),
        "longest_wait_seconds": stretch["longest_wait_seconds"],
        "waits_per_step": stretch["waits"] / stretch["steps"],
        "cpu_seconds_per_billion_tokens": stretch["cpu_seconds"] / tokens * 1e9,
        "own_bytes": said["own_bytes"] - said["before_bytes"],
    }


def _sum(said: dict[str, Any], what: str, *parts: str) -> int:
    return sum(said[part].get(f"{kind}_{what}", 0) for part in parts for kind in ("shard", "other"))


Found = dict[Case, list[dict[str, Any]]]


def start_rows(found: Found) -> Iterator[list[str]]:
    yield ["start", "open", "first batch", "requests", "MB to open", "MB", "own MB"]
    for case, readings in found.items():
        if case.group == "start":
            middle = _medians(readings)
            yield [
                case.name,
                f"{middle['open_seconds']:.2f} s",
                f"{middle['first_batch_seconds']:.2f} s",
                f"{middle['start_requests']:,.0f}",
                f"{middle['open_bytes'] / 1e6:.1f}",
                f"{middle['start_bytes'] / 1e6:.1f}",
                f"{middle['own_bytes'] / 1e6:.0f}",
            ]


def reading_rows(found: Found, bytes_per_second: float) -> Iterator[list[str]]:
    yield [
        "read",
        "M tokens/s",
        "spread",
        "of the bandwidth",
        "requests a M tokens",
        "bytes a token",
        "longest wait",
        "steps that wait",
        "CPU-s per G tokens",
        "own MB",
    ]
    for case, readings in found.items():
        if case.group == "start":
            continue
        middle, speeds = _medians(readings), [each["tokens_per_second"] for each in readings]
        has_limit = bytes_per_second > 0 and not case.is_local
        yield [
            case.name,
            f"{middle['tokens_per_second'] / 1e6:.1f}",
            f"{(max(speeds) - min(speeds)) / middle['tokens_per_second']:.0%}",
            f"{TOKEN_BYTES * middle['tokens_per_second'] / bytes_per_second:.2f}" if has_limit else "",
            f"{middle['requests_per_million_tokens']:,.1f}",
            f"{middle['bytes_per_token']:.2f}",
            f"{middle['longest_wait_seconds'] * 1e3:.1f} ms",
            f"{middle['waits_per_step']:.1%}",
            f"{middle['cpu_seconds_per_billion_tokens']:.1f}",
            f"{middle['own_bytes'] / 1e6:.0f}",
        ]


def _medians(readings: Sequence[dict[str, Any]]) -> dict[str, float]:
    return {name: statistics.median(each[name] for each in readings) for name in readings[0]}


def main() -> None:
    arguments, sizes = _arguments()
    here = machine()
    server = (arguments.milliseconds, arguments.megabytes_per_second)
    bytes_per_second = 1e6 * arguments.megabytes_per_second
    _log(f"corpora are made in {arguments.folder}, and stay there")
    cases = list(cases_of(arguments.folder, sizes, set(arguments.only or GROUPS), bytes_per_second))
    found: Found = {case: [] for case in cases}
    for repetition in range(arguments.repetitions):
        for case in cases:
            found[case].append(measure(case, server))
            said = found[case][-1]
            _log(
                f"{repetition + 1}/{arguments.repetitions}  {case.name}: first batch {said['first_batch_seconds']:.2f} "
                f"s, {said['tokens_per_second'] / 1e6:.1f} M tokens/s"
            )
    line = {
        "benchmark": "remote",
        "commit": commit(ROOT),
        "versions": versions(PACKAGES),
        "machine": here,
        "repetitions": arguments.repetitions,
        "milliseconds": arguments.milliseconds,
        "megabytes_per_second": arguments.megabytes_per_second,
        "cases": [
            {
                "group": case.group,
                "case": case.name,
                **{name: spread_of([each[name] for each in readings]) for name in readings[0]},
            }
            for case, readings in found.items()
        ],
    }
    _say(f"A server {arguments.milliseconds:g} ms away, {arguments.megabytes_per_second:g} MB/s in all.", "")
    for rows in (start_rows(found), reading_rows(found, bytes_per_second)):
        if len(table := list(rows)) > 1:
            _say(markdown(table, num_left=1), "")
    _say(json.dumps(line))


def _arguments() -> tuple[argparse.Namespace, Sizes]:
    parser = argparse.ArgumentParser(prog="python -m benchmark.remote", description=__doc__.splitlines()[0])
    parser.add_argument("--milliseconds", type=float, default=20.0, help="before the first byte of an answer")
    parser.add_argument("--megabytes-per-second", type=float, default=200.0, help="of all connections; 0: no limit")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="measure these alone")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--rows", type=int, default=64, help="of a step, where it is not given by the case")
    parser.add_argument("--window-tokens", type=int, default=WINDOW_TOKENS, help="default: %(default)s")
    parser.add_argument("--shards", type=int, default=3_847, help="of a trillion tokens, default: %(default)s")
    parser.add_argument("--shard-tokens", type=int, default=1 << 28, help="of each of them")
    default = Path(tempfile.gettempdir()) / "tokshard-benchmark-corpora"
    parser.add_argument(
        "--folder", type=Path, default=default, help="where corpora are made once; default: %(default)s"
    )
    arguments = parser.parse_args()
    sizes = Sizes(
        window_tokens=arguments.window_tokens,
        rows=arguments.rows,
        num_shards=arguments.shards,
        shard_tokens=arguments.shard_tokens,
    )
    if min(sizes.window_tokens, sizes.rows, sizes.num_shards, sizes.shard_tokens, arguments.repetitions) < 1:
        parser.error("every number is at least 1")
    return arguments, sizes


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    main()
