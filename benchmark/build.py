"""Where the time of a build goes, on this machine: one run, one table, one line of JSON.

    python -m benchmark.build [--megabytes 220] [--tokenizer PATH | --vocab 65536] [--only build encode]

README.md in this folder says what each row means. Nothing is asserted of time. This process stays small, because
what it measures inherits its peak memory: all work is done in children.
"""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmark.figures import GROUPS, TEXTS, Bench, Key, Measured, Text, figures, has_datasets, run_step
from benchmark.processes import ROOT, ProcessFailedError, adopt_orphans, run
from benchmark.ratios import Ratio, ratios, start_up_share
from benchmark.report import aligned, commit, machine, spread_of, versions

PACKAGES = ("tokshard", "tokenizers", "pyarrow", "numpy", "msgspec", "zstandard", "datasets")
DATASETS_MISSING = "not installed: pip install 'tokshard[hf]'"
RECIPE = ROOT / "recipes" / "tokenizer"

MEGABYTES = 220
SHORT_SHARE = 60 / 220
FAST = 30
"""MB/s of encoding from which `MEGABYTES` take about five minutes."""

MIB = 1 << 20
MIN_TASK_BYTES = 16 * MIB  # what `tokshard build` takes by default at these sizes; an input up to it is one task


def megabytes_for(mb_per_second: float, repeats: int) -> float:
    """The size of the code with which a run takes about five minutes.

    A repetition takes 25 s of starting processes, and per MB 9.4 times what encoding takes and 0.25 s (measured).
    """
    if mb_per_second >= FAST:
        return MEGABYTES
    return max(4.0, (300 / repeats - 25) // (9.4 / mb_per_second + 0.25))


def write_texts(bench: Bench, megabytes: float, short_megabytes: float) -> dict[str, Any]:
    """Write the texts, and return where they are from."""
    sizes = ["--megabytes", str(megabytes), "--short-megabytes", str(short_megabytes)]
    said = json.loads(run(["-m", "benchmark.texts", str(bench.scratch), *sizes]).stdout)
    for name, found in said["texts"].items():
        # a text that would be one task is cut smaller, so that two workers have work; the same for one worker
        compressed = found["compressed_bytes"]
        task_bytes = None if compressed > MIN_TASK_BYTES else max(1, compressed // 4 // MIB) * MIB
        bench.texts[name] = Text(path=bench.scratch / f"{name}.jsonl.zst", task_bytes=task_bytes, **found)
    bench.texts["tiny"] = _write_tiny(bench.scratch / "tiny")
    assert isinstance(said, dict)
    return said


def _write_tiny(directory: Path) -> Text:
    """Two inputs of one word each, made big enough for a task by a field that is not read: two workers start."""
    directory.mkdir()
    for name in ("a.jsonl", "b.jsonl"):
        (directory / name).write_text(json.dumps({"ignored": "x" * MIB, "text": "tiny"}) + "\n", encoding="utf-8")
    return Text(path=directory, documents=2, text_bytes=8, compressed_bytes=2 * MIB, largest_bytes=4, task_bytes=MIB)


def train(bench: Bench, vocab: int, python: str | None) -> None:
    text = bench.texts["code"] if bench.texts["code"].text_bytes < 80e6 else bench.texts["quarter"]
    _log(f"training {vocab:,} tokens on {text.text_bytes / 1e6:.0f} MB of the code")
    bench.tokenizer = bench.scratch / "tokenizer"
    try:
        run_step("train", str(text.path), str(bench.tokenizer), "--vocab", str(vocab), python=python)
    except ProcessFailedError as error:
        if "ImportError" not in str(error):
            raise
        raise SystemExit(
            f"{error}\n--vocab trains with tokenizers 0.2x, which is not installed here: give --trainer PYTHON of an"
            " environment that has it (make test leaves .venv-lowest/bin/python), or --tokenizer PATH"
        ) from error


def measure(bench: Bench, groups: set[str], repeats: int) -> dict[Key, list[Measured]]:
    """All figures, one after another, and then all again."""
    runs: dict[Key, list[Measured]] = {}
    for repeat in range(repeats):
        for key, measure_once in figures(bench, groups):
            once = measure_once()
            runs.setdefault(key, []).append(once)
            _log(f"{repeat + 1}/{repeats}  {', '.join(key)}: {once.wall_seconds:.2f} s")
    return runs


def describe(bench: Bench, said: dict[str, Any], wanted_megabytes: float) -> Iterator[str]:
    """The texts, in words."""
    for name in TEXTS:
        text = bench.texts[name]
        task = "tasks of the default size" if text.task_bytes is None else f"tasks of {text.task_bytes // MIB} MiB"
        yield (
            f"{name:<6}{text.text_bytes / 1e6:.1f} MB in {text.documents:,} documents, on average"
            f" {text.tokens / text.documents:.0f} tokens, {text.text_bytes / text.tokens:.2f} bytes a token;"
            f" {text.compressed_bytes / 1e6:.1f} MB as zstd JSON lines, {task}"
        )
    taken = ", ".join(f"{num_bytes / 1e6:.1f} MB {origin}" for origin, num_bytes in said["taken_bytes"].items())
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in sorted(said["left_out_files"].items()))
    yield f"from  {taken}; files left out: {left_out or 'none'}"
    if bench.texts["code"].text_bytes < wanted_megabytes * 1e6:
        yield f"note  {wanted_megabytes:.0f} MB were wanted, and this machine has no more source code: none is repeated"


def figure_rows(runs: dict[Key, list[Measured]], texts: dict[str, Text]) -> Iterator[list[str]]:
    yield [
        "figure",
        "text",
        "procs",
        "wall s",
        "CPU s",
        "spread",
        "MB/s",
        "MB/CPU-s",
        "CPU-s/GB",
        "peak MB",
        "worker MB",
    ]
    for (figure, name), repeated in runs.items():
        megabytes = texts[name].text_bytes / 1e6
        cpu_seconds = [once.cpu_seconds for once in repeated]
        cpu, wall = statistics.median(cpu_seconds), statistics.median(once.wall_seconds for once in repeated)
        speeds = [f"{megabytes / wall:.1f}", f"{megabytes / cpu:.1f}", f"{cpu / megabytes * 1e3:.2f}"]
        yield [
            figure,
            name,
            str(repeated[0].processes or ""),
            f"{wall:.2f}",
            f"{cpu:.2f}",
            f"{(max(cpu_seconds) - min(cpu_seconds)) / cpu:.0%}",
            *(speeds if name != "tiny" else ["", "", ""]),
            _megabytes_of(repeated, "peak_bytes"),
            _megabytes_of(repeated, "worker_bytes"),
        ]


def ratio_rows(found: list[Ratio]) -> Iterator[list[str]]:
    """Below the figures, in the same columns."""
    if found:
        yield [""] * 11
        yield ["side by side, in one repetition", "text", "", "median", "least", "most", *[""] * 5]
    for ratio in found:
        three = (f"{value:.2f}" for value in spread_of(ratio.values).values())
        yield [ratio.label, ratio.text, "", *three, *[""] * 5]


def _megabytes_of(repeated: list[Measured], name: str) -> str:
    found = [value for once in repeated if (value := getattr(once, name)) is not None]
    return f"{statistics.median(found) / 1e6:.0f}" if found else ""


def figure_json(runs: dict[Key, list[Measured]], texts: dict[str, Text]) -> Iterator[dict[str, Any]]:
    """Median and spread of every quantity of every figure."""
    for (figure, name), repeated in runs.items():
        megabytes = texts[name].text_bytes / 1e6
        cpu = [once.cpu_seconds for once in repeated]
        wall = [once.wall_seconds for once in repeated]
        quantities = {"cpu_seconds": cpu, "wall_seconds": wall}
        if name != "tiny":
            quantities["mb_per_second"] = [megabytes / seconds for seconds in wall]
            quantities["mb_per_cpu_second"] = [megabytes / seconds for seconds in cpu]
            quantities["cpu_seconds_per_gb"] = [seconds / megabytes * 1e3 for seconds in cpu]
        for quantity, attribute in (("peak_mb", "peak_bytes"), ("worker_mb", "worker_bytes")):
            found = [value / 1e6 for once in repeated if (value := getattr(once, attribute)) is not None]
            quantities |= {quantity: found} if found else {}
        entry: dict[str, Any] = {"figure": figure, "text": name, "processes": repeated[0].processes}
        yield entry | {quantity: spread_of(values) for quantity, values in quantities.items()}


def text_json(text: Text) -> dict[str, Any]:
    return {
        "documents": text.documents,
        "text_bytes": text.text_bytes,
        "compressed_bytes": text.compressed_bytes,
        "largest_bytes": text.largest_bytes,
        "task_bytes": text.task_bytes,
        "tokens": text.tokens or None,
        "shard_bytes": text.shard_bytes or None,
    }


def main() -> None:
    arguments = _arguments()
    groups = set(arguments.only or GROUPS)
    here = machine()  # before this run adds to the load
    adopt_orphans()
    megabytes = arguments.megabytes
    if megabytes is None:
        speed = run_step("calibrate", str(RECIPE / "tokenizer.json"))["mb_per_second"]
        megabytes = megabytes_for(speed, arguments.repeats)
        _log(f"encoding runs at about {speed:.0f} MB/s: {megabytes:.0f} MB of code")
    with tempfile.TemporaryDirectory(prefix="tokshard-benchmark-", dir=arguments.scratch) as scratch:
        bench = Bench(Path(scratch), arguments.tokenizer.resolve())
        said = write_texts(bench, megabytes, arguments.short_megabytes or megabytes * SHORT_SHARE)
        if arguments.vocab:
            train(bench, arguments.vocab, arguments.trainer)
        bench.build("tiny", 2)
        for name in ("tiny", *TEXTS):
            bench.build(name, 1)  # unmeasured: it fills caches, and says what a build makes of the text
        runs = measure(bench, groups, arguments.repeats)
    found = list(ratios(runs, bench.texts))
    tokenizer = {
        "name": "trained on the code" if arguments.vocab else bench.tokenizer.name,
        "vocab_size": bench.vocab_size,
    }
    line: dict[str, Any] = {
        "benchmark": "build",
        "commit": commit(ROOT),
        "versions": versions(PACKAGES),
        "machine": here,
        "tokenizer": tokenizer,
        "repeats": arguments.repeats,
        "texts": {name: text_json(text) for name, text in bench.texts.items()},
        "taken_bytes": said["taken_bytes"],
        "left_out_files": said["left_out_files"],
        "figures": list(figure_json(runs, bench.texts)),
        "side_by_side": [{"figure": ratio.label, "text": ratio.text, **spread_of(ratio.values)} for ratio in found],
    }
    notes = []
    if "datasets" in groups and not has_datasets():
        line["datasets"] = DATASETS_MISSING
        notes.append(f"note  datasets.map + save_to_disk: {DATASETS_MISSING}")
    if (share := start_up_share(runs)) > 0.25:
        notes.append(f"note  up to {share:.0%} of a build is start-up: too little text for what is left without it")
    _say(*describe(bench, said, megabytes))
    _say(f"ids   tokenizer {tokenizer['name']}, {bench.vocab_size:,} ids")
    _say(f"with  {', '.join(f'{name} {version}' for name, version in line['versions'].items() if version)}")
    _say(f"on    {here['cores']} x {here['cpu']}, {here['memory_gb']} GB; load {here['load']} before")
    _say("", aligned([*figure_rows(runs, bench.texts), *ratio_rows(found)], num_left=2), "", *notes)
    text = json.dumps(line)
    _say(text)
    if arguments.json:
        arguments.json.write_text(text + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmark.build", description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, help="size of the code; default: 220, less with a slow encoder")
    parser.add_argument("--short-megabytes", type=float, help="size of the short documents; default: 60 of 220")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tokenizer", type=Path, default=RECIPE, help="as for tokshard build; default: the recipe's")
    parser.add_argument("--vocab", type=int, metavar="N", help="train a tokenizer of N tokens on the code instead")
    parser.add_argument("--trainer", metavar="PYTHON", help="interpreter with tokenizers 0.2x, for --vocab")
    parser.add_argument("--only", nargs="+", choices=GROUPS, help="measure these alone")
    parser.add_argument("--scratch", type=Path, help="folder for texts and shards; default: the temporary one")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the line of JSON there too")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error("--repeats takes 1 or more")
    return arguments


def _say(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")


def _log(line: str) -> None:
    sys.stderr.write(f"{line}\n")


if __name__ == "__main__":
    try:
        main()
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from error
