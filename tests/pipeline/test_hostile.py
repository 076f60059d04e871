"""Inputs that are made to hurt: each ends in a clear outcome, in bounded memory and time, as a process of its own."""

from __future__ import annotations

import bz2
import contextlib
import functools
import gzip
import lzma
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import psutil
import pyarrow as pa
import pytest

from tests.pipeline.inputs import TOKENIZER, parquet_bytes, zstd
from tokshard import open_corpus

MIB = 1 << 20
BASE_BYTES = 256 * MIB
"""What a build in one process may hold whatever it reads: libraries, tokenizer, chunks, a batch of tokens."""


class Outcome(NamedTuple):
    exit_code: int
    problem: str
    peak_bytes: int
    out: Path


SKIP = ("--on-bad-record", "skip")
Run = Callable[..., Outcome]


@pytest.fixture
def build(tmp_path) -> Run:
    """``tokshard build`` as a process with one worker, and the most memory that it held at once."""

    def run(path: Path, *options: str) -> Outcome:
        command = [sys.executable, "-m", "tokshard", "build", str(path), "--tokenizer", str(TOKENIZER)]
        fixed = ["--out", str(tmp_path / "out"), "--workers", "1", "--quiet"]
        with subprocess.Popen(
            [*command, *fixed, *options], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        ) as process:
            watched, peak = psutil.Process(process.pid), 0
            with contextlib.suppress(psutil.Error):  # it has ended
                while process.poll() is None:
                    peak = max(peak, watched.memory_info().rss)
                    time.sleep(0.02)
            _, err = process.communicate(timeout=240)
        return Outcome(process.returncode, err.decode(), peak, tmp_path / "out")

    return run


@functools.cache
def letters() -> bytes:
    """A member of a gzip that unpacks to 64 MiB of one letter, in the memory of one MiB of it."""
    compressor = zlib.compressobj(9, wbits=31)
    return b"".join(compressor.compress(b"a" * MIB) for _ in range(64)) + compressor.flush()


def bomb(num_mib: int, before: bytes = b"", after: bytes = b"") -> bytes:
    """A gzip of so many MiB of letters; of members, because one of 1 GiB takes longer to make than to be read."""
    return gzip.compress(before) + letters() * (num_mib // 64) + gzip.compress(after)


def streams(compress: Callable[[bytes], bytes], before: bytes, after: bytes) -> bytes:
    """Streams of 384 MiB of letters."""
    return compress(before) + compress(b"a" * (64 * MIB)) * 6 + compress(after)


class Hostile(NamedTuple):
    """A file that is made to hurt.

    Args:
        name: of the file, which says its format.
        content: makes it.
        written: how many documents it makes.
        left_out: why others are none, and how many.
        limit_mib: the largest document. Eight times as much may be held, for JSON that escapes all.
        more_mib: how much memory it may cost besides `BASE_BYTES`.
        is_slow: it takes seconds.
    """

    name: str
    content: Callable[[], bytes]
    written: int
    left_out: dict[str, int]
    limit_mib: int = 16
    more_mib: int = 0
    is_slow: bool = True


TOO_LONG = {"over max-document-bytes": 1}
LINES = {
    "a.jsonl.gz": (b'{"text": "good"}\n{"text": "', b'"}\n{"text": "good"}\n'),
    "a.csv.gz": (b"text\ngood\n", b"\ngood\n"),
    "a.txt.gz": (b"good\n", b"\ngood\n"),
}
NOTHING = gzip.compress(b"") * 200_000 + gzip.compress(b'{"text": "good"}\n')
HOSTILE = {
    "200,000 members of nothing": Hostile("a.jsonl.gz", lambda: NOTHING, 1, {}, is_slow=False),
    "a line that a bomb unpacks to": Hostile(
        "a.jsonl.gz", lambda: bomb(384, *LINES["a.jsonl.gz"]), 2, TOO_LONG, 1, is_slow=False
    ),
    "a line that a frame unpacks to": Hostile(
        "a.jsonl.zst", lambda: zstd((b"a" * (384 * MIB)).join(LINES["a.jsonl.gz"])), 2, TOO_LONG, 1, is_slow=False
    ),
    **{
        f"a line that streams of {kind} unpack to": Hostile(
            *(f"a.jsonl.{kind}", lambda compress=compress: streams(compress, *LINES["a.jsonl.gz"]), 2, TOO_LONG, 1)
        )
        for kind, compress in (("bz2", bz2.compress), ("xz", lzma.compress))
    },
    **{
        f"a line of 1 GiB in {name}": Hostile(
            name, lambda around=around: bomb(1_024, *around), 2, TOO_LONG, more_mib=4 * (8 * 16 + 1)
        )
        for name, around in LINES.items()
    },
    "200,000 bad lines": Hostile(
        "a.jsonl", lambda: b"{\n" * 200_000 + b'{"text": "last"}\n', 1, {"malformed": 200_000}, more_mib=64
    ),
    # a batch holds it, as whoever wrote it made it
    "a row of 64 MiB": Hostile(
        *("a.parquet", lambda: parquet_bytes(pa.table({"text": ["good", "a" * (64 * MIB), "good"]})), 2, TOO_LONG),
        more_mib=6 * 64,
    ),
}


@pytest.mark.parametrize(
    "what", [pytest.param(what, marks=pytest.mark.soak if found.is_slow else ()) for what, found in HOSTILE.items()]
)
def test_what_is_made_to_hurt_is_counted_in_bounded_memory(what, build, tmp_path):
    found = HOSTILE[what]
    path = tmp_path / found.name
    path.write_bytes(found.content())
    assert path.stat().st_size < 8 * MIB
    outcome = build(path, "--text-unit", "line", *SKIP, "--max-document-bytes", f"{found.limit_mib}MiB")
    assert outcome.exit_code == 0, outcome.problem
    records = open_corpus(outcome.out).manifest.records
    assert (records.written, records.left_out) == (found.written, found.left_out)
    assert outcome.peak_bytes < BASE_BYTES + found.more_mib * MIB
