"""Growth: what it costs to come to the first shuffled rows of more and more documents."""

from __future__ import annotations

import functools
import shutil
from pathlib import Path
from typing import Any

from benchmark.peers.frame import Found, Frame, Row, Section, log, side_by_side

DOCUMENT_TOKENS = 100
MANY = 10**10
NEEDS = {
    "megatron": (
        "It numbers documents in int32, so it ends at 2^31. By its formulas 10^10 would need an .idx of 200 GB"
        " (20 bytes a document), and 160 GB of memory while the document index is made (two int64)."
    ),
    "datasets": (
        "By its formula 10^10 rows need an index of 80 GB on disk (8 bytes a row), and 80 GB of memory for the"
        " permutation (int64)."
    ),
    "streaming": (
        "By its formula the ids of 10^10 samples need 80 GB on each node (int64), and several times as much while they"
        " are shuffled."
    ),
}
"""Why there is no row of so many."""
NAMES = {
    "tokshard": "tokshard",
    "megatron": "megatron-core, GPTDataset",
    "datasets": "datasets, `shuffle`",
    "streaming": "MosaicML streaming, `shuffle=True`",
    "guideloom": "GuideLoom, FeistelShuffler",
}


def run(frame: Frame) -> Section:
    """Each peer with as many documents as memory and ten minutes allow."""
    most = 10**7 if frame.quick else 10**8
    rows = []
    for peer, name in NAMES.items():
        counts = (10**6, most) if peer in NEEDS else (10**6, 10**8, MANY)
        made = side_by_side([functools.partial(_made, frame, peer, count) for count in counts])
        for count, found in zip(counts, made, strict=True):
            rows.append(Row(label=f"{name}: {count:,} documents", runs=_runs(frame, peer, count, found)))
            log(f"growth: {rows[-1].label}: {rows[-1].reason or round(rows[-1].runs[-1]['start_seconds'], 2)}")
        if peer in NEEDS:
            rows.append(Row(label=f"{name}: {MANY:,} documents", runs=[{"cannot": NEEDS[peer]}]))
    return Section(
        title="Growth: start-up with more and more documents",
        paragraphs=[
            (
                "From opening the data to the first eight shuffled rows, in one process, without imports, and with"
                " nothing left from an earlier start. *Memory* is the growth of the peak without pages of mapped files,"
                " *written* what a start leaves on disk for the next one, *state* what a checkpoint keeps."
                f" Documents have {DOCUMENT_TOKENS} tokens. tokshard's shards are links to one file, so 10^10 documents"
                " fit on a disk; manifest, tables and hashes are those of a corpus of that size. MosaicML streaming's"
                " shards are links, too; megatron-core's `.bin` and the shards of GuideLoom are holes; the rows of"
                " datasets have one byte. What grows is the same as with text."
            )
        ],
        columns={
            "start_seconds": "start, s",
            "start_cpu_seconds": "start, CPU s",
            "memory_mb": "memory, MB",
            "written_mb": "written, MB",
            "state_bytes": "state, bytes",
        },
        rows=rows,
        notes=[
            "All states are small. To use one, a peer needs its index again, from disk or made anew.",
            "megatron-core and datasets find the index that an earlier start wrote, and start faster then.",
            (
                "GuideLoom's stream has tokens and no documents: it has as many tokens, in shards as large as"
                " tokshard's. Most of its start is the compiler of its order, in each process; the rest is a look at"
                " each shard."
            ),
            "datasets can also shuffle a buffer of rows, which costs nothing at the start, and mixes only near rows.",
        ],
    )


def _settings(frame: Frame, peer: str, count: int) -> dict[str, Any]:
    folder = frame.work / "growth" / f"{peer}-{count}"
    return {"documents": count, "document_tokens": DOCUMENT_TOKENS, "folder": folder}


def _made(frame: Frame, peer: str, count: int) -> Found:
    """What making a corpus said."""
    settings = _settings(frame, peer, count)
    settings["folder"].mkdir(parents=True)
    return frame.call(f"{peer}_growth", "make", settings)


def _runs(frame: Frame, peer: str, count: int, made: Found) -> list[Found]:
    """The starts on a corpus, which is removed."""
    settings = _settings(frame, peer, count)
    place = settings["folder"]
    try:
        if "place" not in made:
            return [made]
        starts = []
        for repeat in range(1 if frame.quick else frame.repeats):
            folder = _new(place / f"start-{repeat}")
            given = settings | {"place": made["place"], "folder": folder}
            starts.append(frame.call(f"{peer}_growth", "start", given))
            shutil.rmtree(folder)
            if "start_seconds" not in starts[-1]:
                break
        return starts
    finally:
        shutil.rmtree(place)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder
