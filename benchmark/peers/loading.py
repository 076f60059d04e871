"""How fast each loader gives the same shuffled tokens in rows of 4,096, and what a resume on other sizes costs."""

import functools
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmark.peers.frame import Case, Found, Frame, Row, Section, log, side_by_side
from benchmark.peers.ledger import account, bounds, write_corpus

SEQ_LEN, ROWS, WORKERS = 4_096, 8, 2
VOCAB_SIZE = 16_384
DOCUMENT_TOKENS = 750

PEERS = {
    "tokshard_loading": "tokshard",
    "streaming_loading": "MosaicML streaming",
    "litdata_loading": "litdata",
    "megatron_loading": "Megatron-core GPTDataset",
    "grain_loading": "Grain ElasticIterator",
    "lance_loading": "LanceDB StreamingDataset",
    "guideloom_loading": "GuideLoom StreamDataset",
    "datasets_loading": "datasets, StatefulDataLoader",
    "memmap": "memory-mapped random crop",
}

LEDGER_SEQ_LEN, LEDGER_ROWS, LEDGER_WORLD, LEDGER_WORKERS = 128, 8, 2, 1


def run(frame: Frame) -> list[Section]:
    return [_speeds(frame), _ledgers(frame)]


def _speeds(frame: Frame) -> Section:
    num_tokens = (1 << 25) if frame.quick else (1 << 28)
    folder = frame.work / "loading"
    tokens = random_tokens(folder, num_tokens)
    given = {"tokens": tokens, "seq_len": SEQ_LEN, "rows": ROWS, "vocab_size": VOCAB_SIZE}
    given |= {"tokenizer": frame.tokenizer, "file_bytes": (8 if frame.quick else 64) << 20}
    given |= {"tokens_to_read": num_tokens * 3 // 4, "seconds": 1 if frame.quick else 10}
    made = _made(frame, folder, given)
    cases = []
    for label, peer, settings in _speed_cases():
        place = {"data": folder / peer, "cache": folder / f"cache-{peer}"}
        cases.append(Case(label=label, peer=peer, case="read", settings=given | place | settings))
    rows = [_merged(row, made[case.peer]) for row, case in zip(frame.turns(_able(cases, made)), cases, strict=True)]
    shutil.rmtree(folder)
    return Section(
        title="Loading",
        paragraphs=[
            (
                f"{num_tokens:,} tokens in documents of {DOCUMENT_TOKENS} on average, shuffled, in rows of"
                f" {SEQ_LEN:,}, {ROWS} rows a batch; the files are in the page cache. A loop takes batches and does"
                " nothing else. tokshard and Megatron-core cut rows from shuffled documents or blocks while they"
                " read; the others read rows that were cut before, but for litdata and GuideLoom, which cut them from"
                " their chunks and shards, and LanceDB's `pack_sequences`."
            ),
            (
                "A full batch of tokshard has input_ids, labels and position_ids as int64, and the bounds of"
                " documents. Megatron's has tokens, labels, position_ids and a loss mask; the random crop has"
                " inputs and targets as int64. The others give the ids as they are stored, and a compact batch of"
                " tokshard has the ids as they are stored with masks and bounds. In process means `num_workers=0`;"
                " tokshard makes batches ahead in a thread, unless the row says so, and has no workers of its own;"
                f" Grain and LanceDB have threads, too. Workers: {WORKERS} of the peer's own DataLoader."
            ),
            (
                "First batch: from opening the data to the first batch, imports not counted. To resume: the same"
                " with a saved state, in the same process. Memory: the largest process, its imports counted."
                " State: as JSON."
            ),
        ],
        columns={
            "tokens_per_second": "tokens/s",
            "first_batch_seconds": "first batch, s",
            "resume_seconds": "to resume, s",
            "state_bytes": "state, bytes",
            "peak_bytes": "memory, bytes",
            "cpu_seconds": "CPU-s of the run",
        },
        rows=rows,
        notes=[
            "The gather limit copies the stored bytes of the rows in a random order into one array, with numpy.",
            (
                "A process that Grain or LanceDB starts as a worker imports its packages anew, which is"
                " most of the time to their first batch; the workers of the others are forks."
            ),
            (
                "GuideLoom is measured without torch, of which the index of Python packages has no build for Python"
                " 3.13 without CUDA, so without its own loader. The program reads its StreamDataset by memory map in"
                " the order of that loader, with that loader's state, and stacks rows with numpy. GuideLoom compiles"
                " the order in each process, which is nearly all of the time to its first batch; a resume in the same"
                " process finds it compiled."
            ),
        ],
        plot="tokens_per_second",
    )


def _speed_cases() -> Iterator[tuple[str, str, dict[str, Any]]]:
    yield "gather limit, numpy", "memmap", {"mode": "gather", "workers": 0}
    for mode in ("full", "compact", "numpy"):
        name = {"full": "full", "compact": "compact", "numpy": "NumpyLoader"}[mode]
        yield f"tokshard {name}, no thread", "tokshard_loading", {"mode": mode, "workers": 0, "prefetch": 0}
        yield f"tokshard {name}", "tokshard_loading", {"mode": mode, "workers": 0}
    for peer, name in PEERS.items():
        if peer in ("tokshard_loading", "memmap"):
            continue
        yield name, peer, {"workers": 0}
        yield f"{name}, {WORKERS} workers", peer, {"workers": WORKERS}
    yield "LanceDB pack_sequences", "lance_loading", {"mode": "packs", "workers": 0}
    yield PEERS["memmap"], "memmap", {"workers": 0}


def random_tokens(folder: Path, num_tokens: int) -> Path:
    """``tokens.npy`` with its offsets: uint16, every document ends in the delimiter 0."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(17)
    ids = rng.integers(1, VOCAB_SIZE, num_tokens, np.uint16)
    offsets = bounds(num_tokens, DOCUMENT_TOKENS)
    ids[offsets[1:] - 1] = 0
    np.save(folder / "tokens.npy", ids)
    np.save(folder / "tokens.offsets.npy", offsets)
    return folder / "tokens.npy"


def _made(frame: Frame, folder: Path, given: dict[str, Any]) -> dict[str, Found]:
    """What making the form of each peer said."""
    works = [functools.partial(frame.call, peer, "make", given | {"data": folder / peer}) for peer in PEERS]
    found = dict(zip(PEERS, side_by_side(works), strict=True))
    for peer, said in found.items():
        log(f"{peer}: made, {said.get('failed') or said.get('cannot') or said['stored_bytes']}")
    return found


def _able(cases: list[Case], made: dict[str, Found]) -> list[Case]:
    """The cases; one whose data could not be made asks for nothing that takes long."""
    return [case if "stored_bytes" in made[case.peer] else _hopeless(case) for case in cases]


def _hopeless(case: Case) -> Case:
    return Case(label=case.label, peer=case.peer, case="make", settings={})


def _merged(row: Row, made: Found) -> Row:
    """The row with the reason why its data could not be made."""
    if "stored_bytes" in made:
        return row
    return Row(label=row.label, runs=[made])


WITHOUT_WORKERS = ("tokshard_loading", "guideloom_loading", "memmap")
CHANGES = {
    "whole": ("an epoch without a stop", {}),
    "same": ("the same sizes", {}),
    "workers": (f"{LEDGER_WORKERS} to 2 workers", {"workers": 2}),
    "world": (f"{LEDGER_WORLD} to 4 ranks", {"world": 4}),
    "rows": (f"batch {LEDGER_ROWS} to 16", {"rows": 16}),
}
"""What a resume changes."""


def _ledgers(frame: Frame) -> Section:
    num_tokens = (1 << 17) if frame.quick else (1 << 19)
    folder = frame.work / "ledger"
    tokens = write_corpus(folder, num_tokens=num_tokens, document_tokens=300)
    given = {"tokens": tokens, "tokenizer": folder / "tokenizer", "seq_len": LEDGER_SEQ_LEN, "rows": LEDGER_ROWS}
    given |= {"file_bytes": 1 << 16, "vocab_size": num_tokens + 2, "world": LEDGER_WORLD, "workers": LEDGER_WORKERS}
    given |= {"limit": frame.limit * 0.8, "steps": 0}
    works = []
    for peer in PEERS:
        place = {"data": folder / peer, "cache": folder / f"cache-{peer}"}
        workers = {"workers": 0} if peer in WITHOUT_WORKERS else {}
        works.append(functools.partial(_ledger, frame, peer, given | place | workers))
    rows = [Row(label=name, runs=[found]) for name, found in zip(PEERS.values(), side_by_side(works), strict=True)]
    shutil.rmtree(folder)
    return Section(
        title="What a resume loses and repeats",
        paragraphs=[
            (
                f"Counted by a ledger: each of {num_tokens:,} tokens has an id of its own, so a row of ids names"
                f" the places that it came from. A job of {LEDGER_WORLD} ranks with {LEDGER_WORKERS} worker each"
                f" and batches of {LEDGER_ROWS} rows of {LEDGER_SEQ_LEN} tokens is stopped after a third of the"
                " epoch. Its states are loaded by a job of other sizes, which reads to the end of the epoch. Each"
                " rank is a process. A cell has the tokens that neither job read, and the readings beyond the"
                " first of a token, delimiters not counted."
            ),
            (
                "The first column is an epoch without a stop. It loses the tokens at the end that fill no row or no"
                " batch, and those that a loader drops or repeats to give all ranks the same number."
            ),
        ],
        columns={name: head for name, (head, _) in CHANGES.items()},
        rows=rows,
        notes=[
            (
                "The random crop saves no state. It starts over with its seed and reads the same rows again. It draws"
                " with replacement, so it loses and repeats tokens even without a stop. It has no workers."
            ),
            (
                "Megatron-core has the data set but no sampler. The program has one of 10 lines, which works as the"
                " one in Megatron-LM: its state is the number of samples read."
            ),
            (
                "GuideLoom's loader needs torch and is not run. The program deals rows to ranks as that loader does;"
                " its state is the number of rows read. Its workers are not tried."
            ),
        ],
    )


def _ledger(frame: Frame, peer: str, given: dict[str, Any]) -> Found:
    """The cells of a peer: what was lost and repeated with each change of sizes, or what the peer said."""
    corpus = np.load(given["tokens"])
    out = frame.work / "ledger" / f"read-{peer}"
    steps = len(corpus) // LEDGER_SEQ_LEN // LEDGER_ROWS // 3
    jobs: dict[str, dict[str, Any]] = {"first": {"steps": steps}}
    for name, (_, change) in CHANGES.items():
        jobs[name] = dict(change)
        if name != "whole":
            jobs[name] |= {"states": "first", "done": steps * LEDGER_ROWS // change.get("rows", LEDGER_ROWS)}
    found: Found = {}
    if peer in WITHOUT_WORKERS:
        del jobs["workers"]
        found["workers"] = "no workers"
    said = frame.call(peer, "ledger", given | {"out": out, "jobs": jobs}, limit=frame.limit * (1 + len(jobs)))
    if "refused" not in said:
        return said
    found["versions"] = said["versions"]
    for name in jobs:
        if name == "first":
            continue
        if said["refused"][name]:
            found[name] = f"refuses: {said['refused'][name]:.160}"
            continue
        parts = [out / name] if name == "whole" else [out / "first", out / name]
        readings = [np.load(path) for part in parts for path in sorted(part.glob("read-*.npy"))]
        entry = account(corpus, readings)
        found[name] = f"{entry.lost:,} lost, {entry.repeated:,} repeated" if entry.lost or entry.repeated else "none"
        log(f"{peer}, {name}: {found[name]}")
    return found
