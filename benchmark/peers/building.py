"""From text to tokens on disk: each builder, its own best way, and the floor below all of them."""

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from benchmark.peers.frame import NUM_FILES, Case, Found, Frame, Row, Section, side_by_side

BUILDERS = {
    "tokshard": "tokshard build",
    "datatrove": "datatrove, DocumentTokenizer",
    "megatron": "Megatron, loop of preprocess_data",
    "litdata": "litdata, optimize",
    "streaming": "MosaicML, MDSWriter",
    "datasets": "datasets, map + save_to_disk",
}
PROCESSES = 2
NO_NEWER = ("datatrove", "streaming")
"""Builders that cannot use `tokenizers` 1.x."""

HOW = f"""\
Source code of this machine in {NUM_FILES} JSON Lines files becomes documents of token ids on disk, each with an end
token. A row is a program from start to end, start-up included; *start-up* is the same with a text of four words. Every
builder has {PROCESSES} processes, unless the label says otherwise, and reads the files as its own documentation
advises. Rows with `tokenizers` 1.x in the label use that version, which most peers do not support officially; datatrove
imports what it lacks, and the transformers of MosaicML streaming refuses it. The other rows use the newest version that
the peer allows.

*CPU s* is the user and system time of all processes, and *peak MB* the memory of the largest one. *Bytes a token*
counts all files of the output. After a build, the peer's own reader counts the tokens on disk. tokshard also hashes
every byte and waits until the disk has it. The floor is `encode_batch` alone, over texts in memory, in {PROCESSES}
processes of one thread, each on a core of its own."""
COLUMNS = {
    "mb_per_second": "MB/s",
    "mtokens_per_second": "M tokens/s",
    "wall": "s",
    "startup": "start-up s",
    "cpu": "CPU s",
    "peak_mb": "peak MB",
    "bytes_per_token": "bytes a token",
    "differs": "differs",
}


def run(frame: Frame) -> Section:
    """Each case once with a tiny text, so that its packages are compiled; again for its start-up; and then in turns."""
    texts, tiny = frame.texts(), _tiny(frame.work / "tiny")
    megabytes = frame.text_facts["text_bytes"] / 1e6
    counted: dict[str, Found] = {}
    startup: dict[str, float | None] = {}

    def finish(case: Case, found: Found) -> Found:
        if case.case == "build":
            out = str(case.settings["out"])
            if case.label not in counted:
                counted[case.label] = frame.call(case.peer, "count", case.settings)
            counts = counted[case.label]
            _remove(out)
            if "tokens" not in counts:
                return found | {"failed": counts.get("failed", "It can't read what it wrote.")}
            found |= {key: counts[key] for key in ("documents", "tokens", "output_bytes")}
            found["bytes_per_token"] = found["output_bytes"] / found["tokens"]
        wall = found.get("work_seconds", found["wall_seconds"])
        return found | {
            "wall": wall,
            "cpu": found.get("work_cpu_seconds", found["cpu_seconds"]),
            "startup": startup.get(case.label),
            "mb_per_second": megabytes / wall,
            "mtokens_per_second": found["tokens"] / wall / 1e6,
            "peak_mb": found["peak_bytes"] / 1e6,
        }

    cases = list(_cases(frame, texts))
    builds = [case for case in cases if case.case == "build"]

    def build_tiny(case: Case) -> Found:
        out = frame.work / f"tiny-{builds.index(case)}"
        found = frame.call(case.peer, case.case, {**case.settings, "texts": tiny, "out": out})
        _remove(str(out))
        return found

    compiled = side_by_side([partial(build_tiny, case) for case in builds])
    if not frame.quick:
        able = [case for case, found in zip(builds, compiled, strict=True) if "wall_seconds" in found]
        startup = {case.label: build_tiny(case).get("wall_seconds") for case in able}
    rows = frame.turns(cases, finish)
    documents = frame.text_facts["documents"]
    ours = _compare(rows, documents)
    facts = f"The text has {megabytes:.1f} MB in {documents:,} documents, which are {ours:,} tokens."
    return Section(
        title="Building", paragraphs=[*HOW.split("\n\n"), facts], columns=COLUMNS, rows=rows, plot="mb_per_second"
    )


def _compare(rows: list[Row], documents: int) -> int:
    """Say in each row what differs from the tokens of the first one, which are returned."""
    ours: int = next((run["tokens"] for run in rows[0].runs if "tokens" in run), 0)
    for found in (found for row in rows for found in row.runs if "tokens" in found):
        expected = ours - (documents if "work_seconds" in found else 0)  # the floor has no end tokens
        if (found["tokens"], found["documents"]) != (expected, documents):
            found["differs"] = f"{found['documents']:,} documents, {found['tokens'] - expected:+,} tokens"
    return ours


def _cases(frame: Frame, texts: Path) -> Iterator[Case]:
    def case(peer: str, label: str, name: str = "build", **options: object) -> Case:
        out = frame.work / f"built-{peer}"
        settings = {"texts": texts, "tokenizer": frame.tokenizer, "out": out, "processes": PROCESSES} | options
        return Case(label=label, peer=peer, case=name, settings=settings)

    for peer, label in BUILDERS.items():
        if peer == "tokshard":
            yield case(peer, f"{label}, 1 process", processes=1)
            yield case(peer, f"{label}, {PROCESSES} processes")
        else:
            yield case(peer, label)
            if peer not in NO_NEWER:
                yield case(peer, f"{label}, tokenizers 1.x", encoder="1.x")
    yield case("tokenizers", "floor: encode_batch", "floor")
    yield case("tokenizers", "floor: encode_batch, tokenizers 1.x", "floor", encoder="1.x")


def _tiny(folder: Path) -> Path:
    folder.mkdir()
    for index in range(NUM_FILES):
        (folder / f"part-{index}.jsonl").write_text(json.dumps({"id": str(index), "text": "tiny"}) + "\n")
    return folder


def _remove(out: str) -> None:
    for folder in (out, f"{out}-cache"):
        shutil.rmtree(folder, ignore_errors=True)
