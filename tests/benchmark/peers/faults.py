"""What bad input and a kill leave behind, counted with each builder's own reader."""

import io
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.benchmark.peers.building import BUILDERS, PROCESSES
from tests.benchmark.peers.frame import NUM_FILES, Found, Frame, Row, Section, log

EACH = 40
"""Documents in each file; the bad line comes after a quarter of those of the second file."""

READERS = ("tokshard", "datatrove", "dolma", "megatron", "datasets")
"""Builders that read JSON Lines themselves; the others are given texts by code of their user."""

FAULTS: dict[str, tuple[str, bytes]] = {
    "malformed": ("malformed line", b'{"id": "bad", "text": "no end\n'),
    "null": ("null text", b'{"id": "bad", "text": null}\n'),
    "byte": ("bad byte", b'{"id": "bad", "text": "one \xff byte"}\n'),
    "truncated": ("truncated .zst", b""),
}
HOW = f"""\
{NUM_FILES} files have {EACH} documents each, {NUM_FILES * EACH} in all. Then the second file has one more line, which
is not JSON, whose text is null, or which has a byte that is not UTF-8; or it is a .zst of which the last two fifths are
missing. A cell has the exit status, how many documents the builder's own reader finds afterwards, and the first thing
that the builder said of it. *Silent*: it said nothing.

*Kill* is SIGKILL to all processes, after the start-up and half of the time that the work takes, with the text of
*Building*. *Left* is what a reader finds then; *again* is what the same command makes of it, which should be every
document once."""
COLUMNS = {key: head for key, (head, _) in FAULTS.items()} | {"left": "kill: left", "again": "kill: again"}
WARNING = re.compile(r"warn|error|corrupt|[1-9]\d* left out|skipping|bad record", re.IGNORECASE)


def run(frame: Frame) -> Section:
    """Every builder with its defaults, and tokshard also when told to skip bad records."""
    rows = [_row(frame, peer, label, []) for peer, label in BUILDERS.items()]
    rows.insert(1, _row(frame, "tokshard", "tokshard build --on-bad-record skip", ["--on-bad-record", "skip"]))
    return Section(title="Bad input and kills", paragraphs=HOW.split("\n\n"), columns=COLUMNS, rows=rows)


def _row(frame: Frame, peer: str, label: str, options: list[str]) -> Row:
    log(label)

    def build(texts: Path, **limits: Any) -> Found:
        return frame.call(peer, "build", settings(texts), **limits)

    def count(texts: Path) -> Found:
        return frame.call(peer, "count", settings(texts))

    def settings(texts: Path) -> dict[str, Any]:
        out = frame.work / f"out-{texts.name}"
        return {"texts": texts, "tokenizer": frame.tokenizer, "out": out, "processes": PROCESSES, "options": options}

    plain = _corpus(frame.work / "good", None)
    good = build(plain)
    if "failed" in good or "cannot" in good:
        return Row(label=label, runs=[good])
    cells: Found = {"versions": good["versions"]}
    for fault in FAULTS:
        if peer not in READERS:
            cells[fault] = "its user reads the text"
            continue
        texts = _corpus(frame.work / fault, fault)
        found = build(texts)
        # what a worker says may be in a file alone
        logs = (path.read_text(errors="replace") for path in frame.work.glob("out-*/**/*.log"))
        cells[fault] = found.get("cannot") or _cell(found | {"logs": "\n".join(logs)}, count(texts), good)
        _clean(frame.work)
    if not options:
        cells |= _killed(frame, build, count, float(good["wall_seconds"]))
    _clean(frame.work)
    return Row(label=label, runs=[cells])


def _killed(
    frame: Frame, build: Callable[..., Found], count: Callable[[Path], Found], start_seconds: float
) -> dict[str, str]:
    texts, documents = frame.texts(), frame.text_facts["documents"]
    undisturbed = build(texts)
    if "failed" in undisturbed:
        return {"left": undisturbed["failed"]}
    tokens = count(texts)["tokens"]
    _clean(frame.work)
    wall = undisturbed["wall_seconds"]
    for moment in ((min(start_seconds, wall) + wall) / 2, 0.6 * wall, 0.4 * wall):
        killed = build(texts, limit=moment, killed=True).get("killed")
        left = count(texts)
        if killed and left.get("tokens") != tokens:
            break
        _clean(frame.work)  # it was done by then: once more, and earlier
    else:
        return {"left": "it was done before each kill"}
    again = build(texts)
    found = count(texts)
    whole = found.get("documents") == documents and found.get("tokens") == tokens
    return {
        "left": f"{left.get('documents', 0):,} of {documents:,}",
        "again": f"exit {again['exit_code']}, " + ("all, once" if whole else _numbers(found, documents, tokens)),
    }


def _numbers(found: Found, documents: int, tokens: int) -> str:
    return f"{found.get('documents', 0):,} of {documents:,} documents, {found.get('tokens', 0):,} of {tokens:,} tokens"


def _cell(found: Found, counted: Found, good: Found) -> str:
    """One sentence; `good` is what the builder says when nothing is wrong."""
    known = set(_lines(good))
    said = [line for line in _lines(found) if line not in known and WARNING.search(line)]
    words = f'"{_short(found.get("failed") or said[0])}"' if said or "failed" in found else "silent"
    return f"exit {found['exit_code']}, {counted.get('documents', 0)} of {NUM_FILES * EACH}, {words}"


def _lines(found: Found) -> list[str]:
    text = found.get("stderr", "") + found.get("stdout", "") + found.get("logs", "")
    return [re.sub(r"\S*/\S*", "PATH", line) for line in text.splitlines() if not line.startswith('{"versions"')]


def _short(line: str) -> str:
    line = re.sub(r"\x1b\[[\d;]*m", "", line).rpartition(" | ")[2].replace("|", "/").strip()
    return line if len(line) <= 90 else line[:87] + "..."


def _corpus(folder: Path, fault: str | None) -> Path:
    if folder.exists():
        return folder
    folder.mkdir()
    for part in range(NUM_FILES):
        lines = [_line(f"{part}-{number}") for number in range(EACH)]
        path = folder / f"part-{part}.jsonl"
        if part == 1 and fault:
            lines.insert(EACH // 4, FAULTS[fault][1])
        if fault == "truncated":
            import zstandard

            whole = zstandard.ZstdCompressor().compress(b"".join(lines))
            if part == 1:
                file = io.BytesIO()
                with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as stream:
                    for line in lines:
                        stream.write(line)
                        stream.flush(zstandard.FLUSH_BLOCK)
                whole = file.getvalue()[: len(file.getvalue()) * 3 // 5]
            path.with_suffix(".jsonl.zst").write_bytes(whole)
        else:
            path.write_bytes(b"".join(lines))
    return folder


def _line(name: str) -> bytes:
    text = f"document {name}: " + " ".join(f"word{index}" for index in range(60))
    return json.dumps({"id": name, "text": text}).encode() + b"\n"


def _clean(work: Path) -> None:
    for folder in work.glob("out-*"):
        shutil.rmtree(folder, ignore_errors=True)
