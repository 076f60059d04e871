"""What bad input and a kill leave behind, counted with each builder's own reader."""

import functools
import io
import json
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmark.peers.building import BUILDERS, PROCESSES
from benchmark.peers.frame import NUM_FILES, Found, Frame, Row, Section, log, side_by_side

EACH = 40
"""Documents in each file; the bad line comes after a quarter of those of the second file."""

READERS = ("tokshard", "datatrove", "megatron", "datasets")
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Builder:
    """A builder with options of its own, and a place for what it writes."""

    frame: Frame
    peer: str
    options: Sequence[str]
    place: Path

    def build(self, texts: Path, out: str, **limits: Any) -> Found:
        """Write a folder of this name."""
        return self.frame.call(self.peer, "build", self._settings(texts=texts, out=self.place / out), **limits)

    def count(self, *outs: str) -> list[Found]:
        """What the builder's own reader finds in each of these folders: in one process, unless one of them ends it."""
        found = self.frame.call(self.peer, "count", self._settings(outs=[self.place / out for out in outs]))
        if "each" in found:
            return list(found["each"])
        return [self.frame.call(self.peer, "count", self._settings(out=self.place / out)) for out in outs]

    def _settings(self, **settings: Any) -> dict[str, Any]:
        return settings | {"tokenizer": self.frame.tokenizer, "processes": PROCESSES, "options": self.options}


def run(frame: Frame) -> Section:
    """Every builder with its defaults, and tokshard also when told to skip bad records."""
    kinds = [(peer, label, []) for peer, label in BUILDERS.items()]
    kinds.insert(1, ("tokshard", "tokshard build --on-bad-record skip", ["--on-bad-record", "skip"]))
    builders: dict[str, Builder] = {}
    for index, (peer, label, options) in enumerate(kinds):
        builders[label] = Builder(frame=frame, peer=peer, options=options, place=frame.work / f"out-{index}")
        builders[label].place.mkdir()
    plain, faulty = _corpus(frame.work / "good", None), {fault: _corpus(frame.work / fault, fault) for fault in FAULTS}
    undamaged = [functools.partial(builder.build, plain, "good") for builder in builders.values()]
    good = dict(zip(builders, side_by_side(undamaged), strict=True))
    able = {label: builder for label, builder in builders.items() if not {"failed", "cannot"} & good[label].keys()}
    works = [functools.partial(_faulty, builder, faulty, good[label]) for label, builder in able.items()]
    cells = dict(zip(able, side_by_side(works), strict=True))
    for label, builder in able.items():
        log(label)
        if not builder.options:
            cells[label] |= _killed(builder, good[label]["wall_seconds"])
        shutil.rmtree(builder.place, ignore_errors=True)
    # a row without cells has what the builder said of good text
    rows = [Row(label=label, runs=[found | cells.get(label, {})]) for label, found in good.items()]
    return Section(title="Bad input and kills", paragraphs=HOW.split("\n\n"), columns=COLUMNS, rows=rows)


def _faulty(builder: Builder, texts: Mapping[str, Path], good: Found) -> dict[str, str]:
    """The cells of bad input."""
    if builder.peer not in READERS:
        return dict.fromkeys(texts, "its user reads the text")
    built: dict[str, Found] = {}
    for fault, folder in texts.items():
        found = builder.build(folder, fault)
        # what a worker says may be in a file alone
        logs = (path.read_text(errors="replace") for path in (builder.place / fault).glob("**/*.log"))
        built[fault] = found | {"logs": "\n".join(logs)}
    able = [fault for fault, found in built.items() if "cannot" not in found]
    counted = dict(zip(able, builder.count(*able), strict=True))
    return {
        fault: _cell(found, counted[fault], good) if fault in counted else found["cannot"]
        for fault, found in built.items()
    }


def _killed(builder: Builder, start_seconds: float) -> dict[str, str]:
    """The cells of a kill."""
    texts, documents = builder.frame.texts(), builder.frame.text_facts["documents"]
    undisturbed = builder.build(texts, "whole")
    if "failed" in undisturbed:
        return {"left": undisturbed["failed"]}
    wall = undisturbed["wall_seconds"]
    for index, moment in enumerate(((min(start_seconds, wall) + wall) / 2, 0.6 * wall, 0.4 * wall)):
        out, kept = f"killed-{index}", f"left-{index}"
        if not builder.build(texts, out, limit=moment, killed=True).get("killed"):
            continue  # it was done by then: once more, and earlier
        if (builder.place / out).exists():
            shutil.copytree(builder.place / out, builder.place / kept, symlinks=True)
        again = builder.build(texts, out)
        whole, left, found = builder.count("whole", kept, out)
        if left.get("tokens") == whole["tokens"]:
            continue
        is_whole = found.get("documents") == documents and found.get("tokens") == whole["tokens"]
        said = "all, once" if is_whole else _numbers(found, documents, whole["tokens"])
        return {
            "left": f"{left.get('documents', 0):,} of {documents:,}",
            "again": f"exit {again['exit_code']}, {said}",
        }
    return {"left": "it was done before each kill"}


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
