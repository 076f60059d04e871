"""How fast a plan is read on this machine: one run, a few tables, one line of JSON.

    python -m benchmark.runtime [--quick] [--only speed cold start state memory] [--repetitions 3]

README.md in this folder says what each row means. Nothing is asserted of time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmark.processes import ROOT, ProcessFailedError, adopt_orphans, run
from benchmark.report import commit, machine, markdown, spread_of, versions
from benchmark.shards import corpus

if TYPE_CHECKING:
    from benchmark.reading import Reading

# what reads is imported by the functions that use it: a worker imports this module again, and torch takes a second

PACKAGES = ("tokshard", "torch", "numpy", "pyarrow")
GROUPS = ("speed", "cold", "start", "state", "memory")
LENGTHS = (10, 40, 120, 750, 4_500)
COUNTS = (1, 3, 50)
COLD_MODES = ("in process", "thread")

RUN_TOKENS = 1 << 26  # a window's worth: whatever is made once for a window is paid once in a run
LIMIT_SECONDS = 0.3
SYNTHETIC_TOKENS = 10**14
PEERS = ("streaming", "grain", "litdata")


@dataclass(slots=True)
class Bench:
    """Corpora and sizes.

    Args:
        run_tokens: read in one measurement.
    """

    folder: Path
    lengths: Sequence[int]
    counts: Sequence[int]
    run_tokens: int
    repetitions: int
    num_changes: int
    notes: list[str] = field(default_factory=list)

    def corpora(self, length: int, count: int) -> list[Path]:
        """So many corpora: one of 2.5 runs, two more of 1.25 runs, or many that are one run together."""
        sizes = [5 * self.run_tokens // 2, *[5 * self.run_tokens // 4] * (count - 1)]
        if count > 3:
            sizes = [self.run_tokens // count] * count
        return [
            corpus(self.folder, num_tokens=size, document_tokens=length, number=number)
            for number, size in enumerate(sizes)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """One case in one repetition, and the limit: tokens per second that one core copies."""

    reading: Reading
    limit: float

    @property
    def of_limit(self) -> float:
        return self.reading.steps.tokens_per_second / self.limit


Case = tuple[int, int, str, str]
"""(tokens of a document, corpora, how they are read, page cache)"""


def measure_speed(bench: Bench, groups: set[str]) -> dict[Case, list[Speed]]:
    """Every case once, and then all again; the limit before each set of corpora."""
    from benchmark import page_cache
    from benchmark.reading import MODES, read, shards
    from tokshard.inspect.plan.bench import memory_speed

    found: dict[Case, list[Speed]] = {}
    for repetition in range(bench.repetitions):
        for length in bench.lengths:
            for count in bench.counts:
                corpora = bench.corpora(length, count)
                cases = [(mode, False) for mode in MODES if "speed" in groups]
                cases += [(mode, True) for mode in COLD_MODES if "cold" in groups and count == 1]
                page_cache.warm(shards(corpora))
                limit = memory_speed(LIMIT_SECONDS) if cases else 0.0
                for mode, is_cold in cases:
                    reading = read(corpora, mode, num_tokens=bench.run_tokens, is_cold=is_cold)
                    key = (length, count, mode, "cold" if is_cold else "warm")
                    found.setdefault(key, []).append(Speed(reading=reading, limit=limit))
                    speed = reading.steps.tokens_per_second / 1e6
                    _log(f"{repetition + 1}/{bench.repetitions}  {', '.join(map(str, key))}: {speed:.0f} M tokens/s")
    cached = [each.reading.cached for speeds in found.values() for each in speeds if each.reading.cached is not None]
    if cached and max(cached) > 0.01:
        bench.notes.append(
            f"up to {max(cached):.0%} of the shards stayed in the page cache when they were dropped: 'cold' is not cold"
        )
    return found


def speed_rows(found: dict[Case, list[Speed]]) -> Iterator[list[str]]:
    yield [
        "document",
        "corpora",
        "read",
        "page cache",
        "M tokens/s",
        "spread",
        "of limit",
        "median step",
        "longest step",
        "longest / median",
        "CPU-s per G tokens",
    ]
    for (length, count, mode, cache), speeds in found.items():
        per_second = [each.reading.steps.tokens_per_second / 1e6 for each in speeds]
        middle = statistics.median(per_second)
        yield [
            f"{length:,}",
            str(count),
            mode,
            cache,
            f"{middle:.0f}",
            f"{(max(per_second) - min(per_second)) / middle:.0%}",
            f"{statistics.median(each.of_limit for each in speeds):.2f}",
            f"{_median(speeds, lambda each: each.reading.steps.median_seconds) * 1e3:.2f} ms",
            f"{_median(speeds, lambda each: each.reading.steps.longest_seconds) * 1e3:.1f} ms",
            f"{_median(speeds, lambda each: each.reading.pause):.0f}x",
            f"{_median(speeds, lambda each: each.reading.cpu_seconds_per_billion):.2f}",
        ]


def speed_json(found: dict[Case, list[Speed]]) -> Iterator[dict[str, Any]]:
    for (length, count, mode, cache), speeds in found.items():
        readings = [each.reading for each in speeds]
        yield {
            "document_tokens": length,
            "corpora": count,
            "read": mode,
            "page_cache": cache,
            "tokens_per_second": spread_of([each.steps.tokens_per_second for each in readings]),
            "of_limit": spread_of([each.of_limit for each in speeds]),
            "median_step_seconds": spread_of([each.steps.median_seconds for each in readings]),
            "longest_step_seconds": spread_of([each.steps.longest_seconds for each in readings]),
            "longest_to_median": spread_of([each.pause for each in readings]),
            "cpu_seconds_per_billion_tokens": spread_of([each.cpu_seconds_per_billion for each in readings]),
        }


def limit_json(found: dict[Case, list[Speed]]) -> dict[str, Any]:
    """The limits of all repetitions; empty if none was measured."""
    limits = list({each.limit for speeds in found.values() for each in speeds})
    return {"tokens_per_second": spread_of(limits)} if limits else {}


def measure_start(bench: Bench) -> list[dict[str, Any]]:
    """From the names of corpora to the first batch, in a fresh process after imports."""
    synthetic = ["--synthetic", str(SYNTHETIC_TOKENS)]
    cases = {
        f"{count} x {length:,} tokens a document, thread": [*map(str, bench.corpora(length, count))]
        for length in bench.lengths
        for count in bench.counts
    }
    for length in (40, 1_000):
        sizes = [*synthetic, "--document-tokens", str(length)]
        cases[f"10^14 synthetic tokens, {length:,} a document, thread"] = sizes
        cases[f"the same, {length:,} a document, from sample 10^10"] = [*sizes, "--sample", str(10**10)]
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(bench.repetitions):
        for name, options in cases.items():
            seconds[name].append(_step("first", *options)["seconds"])
            _log(f"first batch, {name}: {seconds[name][-1]:.3f} s")
    return [{"start": name, "seconds": spread_of(values)} for name, values in seconds.items()]


def start_rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["start to first batch", "median", "least", "most"]
    for entry in found:
        yield [entry["start"], *(f"{value * 1e3:.0f} ms" for value in entry["seconds"].values())]


def measure_state(bench: Bench) -> list[dict[str, Any]]:
    """Saving and loading the state after many changes of the weights."""
    found = []
    for count in (1, 3, 500):
        # the median and longest of one process are over its own repeats
        said = _step("state", "--corpora", str(count), "--changes", str(bench.num_changes))
        found.append({"corpora": count, "changes": bench.num_changes, **said})
        _log(f"state of {count} corpora: {said['save_seconds'] * 1e3:.2f} ms, {said['load_seconds'] * 1e3:.2f} ms")
    return found


def state_rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["state of", "after changes", "save", "longest", "load", "longest", "bytes", "a change"]
    for entry in found:
        times = ("save_seconds", "longest_save_seconds", "load_seconds", "longest_load_seconds")
        yield [
            f"{entry['corpora']} corpora",
            f"{entry['changes']:,}",
            *(f"{entry[name] * 1e3:.2f} ms" for name in times),
            f"{entry['state_bytes']:,}",
            f"{entry['change_seconds'] * 1e3:.2f} ms",
        ]


def measure_memory(bench: Bench) -> list[dict[str, Any]]:
    """The most that a process held, with the corpora of several lengths; bytes per piece from the difference."""
    found: list[dict[str, Any]] = []
    count = max((each for each in bench.counts if each <= 3), default=bench.counts[0])
    for length in sorted(bench.lengths, reverse=True):
        corpora = [*map(str, bench.corpora(length, count))]
        said = _step("memory", *corpora, "--hop-tokens", str(4 * bench.run_tokens))  # a window of each corpus
        window_tokens = min(RUN_TOKENS, 5 * bench.run_tokens // 4)
        pieces = count * window_tokens / length
        found.append({"document_tokens": length, "corpora": count, "window_pieces": round(pieces), **said})
        _log(f"memory, {count} x {length} tokens: {said['own_bytes'] / 1e6:.0f} MB")
    for entry in found[1:]:
        more = entry["window_pieces"] - found[0]["window_pieces"]
        entry["bytes_per_piece"] = (entry["own_bytes"] - found[0]["own_bytes"]) / more
    return found


def memory_rows(found: list[dict[str, Any]]) -> Iterator[list[str]]:
    yield ["memory", "pieces of the windows", "own", "shards mapped", "peak RSS", "bytes a piece"]
    for entry in found:
        yield [
            f"{entry['corpora']} x {entry['document_tokens']:,} tokens a document",
            f"{entry['window_pieces']:,}",
            *(f"{entry[name] / 1e6:.0f} MB" for name in ("own_bytes", "mapped_bytes", "peak_bytes")),
            f"{entry['bytes_per_piece']:.0f}" if "bytes_per_piece" in entry else "",
        ]


def main() -> None:
    bench, arguments = _arguments()
    groups = set(arguments.only or GROUPS)
    here = machine()  # before this run adds to the load
    adopt_orphans()
    _log(f"corpora are made in {bench.folder}, and stay there")
    start = measure_start(bench) if "start" in groups else []
    state = measure_state(bench) if "state" in groups else []
    memory = measure_memory(bench) if "memory" in groups else []
    speed = measure_speed(bench, groups) if groups & {"speed", "cold"} else {}
    limits = limit_json(speed)
    line = {
        "benchmark": "runtime",
        "commit": commit(ROOT),
        "versions": versions(PACKAGES),
        "machine": here,
        "repetitions": bench.repetitions,
        "run_tokens": bench.run_tokens,
        "limits": limits,
        "speed": list(speed_json(speed)),
        "start": start,
        "state": state,
        "memory": memory,
        "peers": dict.fromkeys(PEERS, "not measured"),
        "notes": bench.notes,
    }
    _say(f"with  {', '.join(f'{name} {version}' for name, version in versions(PACKAGES).items() if version)}")
    _say(f"on    {here['cores']} x {here['cpu']}, {here['memory_gb']} GB; load {here['load']} before", "")
    if limits:
        told = f"{limits['tokens_per_second']['median'] / 1e6:,.0f} M tokens/s"
        _say(f"Limit of one core: {told}. Samples of 4,096 tokens, 8 in a batch.", "")
    tables = [speed_rows(speed), start_rows(start), state_rows(state), memory_rows(memory)]
    for rows, num_left in zip(tables, (4, 1, 1, 1), strict=True):
        if len(table := list(rows)) > 1:
            _say(markdown(table, num_left=num_left), "")
    _say(*(f"note  {note}" for note in bench.notes), json.dumps(line))


def _arguments() -> tuple[Bench, argparse.Namespace]:
    parser = argparse.ArgumentParser(prog="python -m benchmark.runtime", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer cases, a quarter of the tokens, one repetition")
    parser.add_argument("--repetitions", type=int, help="default: 3")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="measure these alone")
    parser.add_argument("--lengths", nargs="+", type=int, metavar="TOKENS", help="mean lengths of documents")
    parser.add_argument("--corpora", nargs="+", type=int, metavar="N", help="how many corpora are read together")
    parser.add_argument("--tokens", type=int, metavar="N", help="of one measurement; default: a window's worth")
    parser.add_argument("--changes", type=int, metavar="N", help="of the weights, before the state is saved")
    default = Path(tempfile.gettempdir()) / "tokshard-benchmark-corpora"
    parser.add_argument(
        "--folder", type=Path, default=default, help="where corpora are made once; default: %(default)s"
    )
    arguments = parser.parse_args()
    quick = arguments.quick
    bench = Bench(
        folder=arguments.folder,
        lengths=arguments.lengths or ((40, 750) if quick else LENGTHS),
        counts=arguments.corpora or ((1, 3) if quick else COUNTS),
        run_tokens=arguments.tokens or (RUN_TOKENS // 4 if quick else RUN_TOKENS),
        repetitions=arguments.repetitions or (1 if quick else 3),
        num_changes=arguments.changes or (200 if quick else 5_000),
    )
    if min(*bench.lengths, *bench.counts, bench.run_tokens, bench.repetitions, bench.num_changes) < 1:
        parser.error("every number is at least 1")
    return bench, arguments


def _step(*arguments: str) -> dict[str, Any]:
    said = json.loads(run(["-m", "benchmark.runtime_steps", *arguments]).stdout)
    assert isinstance(said, dict)
    return said


def _median(speeds: Sequence[Speed], value: Callable[[Speed], float]) -> float:
    return statistics.median(map(value, speeds))


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    try:
        main()
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from error
