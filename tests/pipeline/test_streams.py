"""Bytes of inputs: compression is whole, or refused."""

from __future__ import annotations

import builtins
import bz2
import gzip
import io
import itertools
import json
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.pipeline.inputs import frames, zstd
from tests.pipeline.places import build
from tokshard.errors import BadRecordError, SourceError
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.discover import discover

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(40))


def source_of(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    (source,) = discover([str(path)], input_format=None).inputs
    return source


def read_all(data: bytes, path: Path, *, read_bytes: int = 1_000) -> bytes:
    with open_bytes(source_of(path, data)) as stream:
        parts = list(iter(lambda: stream.read(read_bytes), b""))
        assert stream.file_position(None) <= len(data)
    assert max(map(len, parts), default=0) <= read_bytes
    return b"".join(parts)


SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"aside"


def usual(suffix: str, compress: Callable[[bytes], bytes]) -> dict[tuple[str, str], bytes]:
    """What every compression has: frames, members or streams, one after another."""
    several = frames(LINES, lambda data: compress(data) + compress(b""), 2)
    return {
        (suffix, "one frame"): compress(LINES),
        (suffix, "several frames"): frames(LINES, compress, 5),
        (suffix, "empty frames between"): compress(b"") + several,
    }


WIDE = zstd(LINES, window_log=28)
ZSTD = {
    "a checksum": zstd(LINES, checksum=True),
    "a skippable frame between": zstd(LINES[:100]) + SKIPPABLE + zstd(LINES[100:]),
    "a skippable frame last": zstd(LINES) + SKIPPABLE,
    "a window of 128 MiB": zstd(LINES, window_log=27),
    "a window of 2 GiB": zstd(LINES, window_log=31),
    "several wide frames": frames(LINES, lambda data: zstd(data, window_log=28), 3),
    "a wide frame after a narrow one": zstd(LINES[:300]) + zstd(LINES[300:], window_log=28),
    "a wide frame after an empty one": zstd(b"") + WIDE,
    "a wide frame between skippable ones": SKIPPABLE + WIDE + SKIPPABLE,
    "a narrow frame after a wide one": zstd(LINES[:300], window_log=28) + zstd(LINES[300:]),
}
COMPRESSED = {
    **usual("gz", gzip.compress),
    **usual("zst", zstd),
    **usual("bz2", bz2.compress),
    **usual("xz", lzma.compress),
    **{("zst", name): data for name, data in ZSTD.items()},
    ("gz", "a stored member with a name"): b"\x1f\x8b\x08\x08\0\0\0\0\0\xffname\0" + gzip.compress(LINES, 0)[10:],
    ("xz", "a checksum of another kind"): lzma.compress(LINES, check=lzma.CHECK_SHA256),
    ("xz", "padding between"): lzma.compress(LINES[:300]) + b"\0" * 8 + lzma.compress(LINES[300:]),
}
each_compressed = pytest.mark.parametrize(("suffix", "name"), COMPRESSED)


@each_compressed
@pytest.mark.parametrize("read_bytes", [1, 77, 1 << 20])
def test_decompression_gives_all_members_and_frames(suffix, name, read_bytes, tmp_path):
    data = COMPRESSED[suffix, name]
    assert read_all(data, tmp_path / f"a.jsonl.{suffix}", read_bytes=read_bytes) == LINES


ALONE = ("one", "a checksum", "a window", "a stored")
SINGLE = [(suffix, name) for suffix, name in COMPRESSED if name.startswith(ALONE)]


@pytest.mark.slow
@pytest.mark.parametrize(("suffix", "name"), SINGLE)
def test_a_cut_anywhere_inside_of_the_first_or_second_frame_is_refused(suffix, name, tmp_path):
    data = COMPRESSED[suffix, name]
    path = tmp_path / f"a.jsonl.{suffix}"
    # every place in short files, and every seventh in long ones with both ends whole
    cuts = [cut for cut in range(len(data)) if len(data) < 100 or cut % 7 == 0 or not 20 < cut < len(data) - 20]
    for before, cut in itertools.product((b"", data), cuts):
        if before + data[:cut] != data:  # a cut between two frames cannot be seen
            with pytest.raises(SourceError, match="damaged") as caught:
                read_all(before + data[:cut], path)
            assert str(path) in caught.value.problem
            assert caught.value.hint


@each_compressed
@pytest.mark.parametrize(
    "garbage",
    [b"x", b"\0", bytes(601), b"garbage after the end", b"\x1f\x8b", b"\x28\xb5\x2f", b"\0" + SKIPPABLE[1:]],
)
def test_bytes_after_the_last_frame_are_refused_but_for_zeros_after_gzip(suffix, name, garbage, tmp_path):
    data, path = COMPRESSED[suffix, name] + garbage, tmp_path / f"a.jsonl.{suffix}"
    if suffix == "gz" and not garbage.strip(b"\0"):
        assert read_all(data, path) == LINES
        return
    with pytest.raises(SourceError, match="damaged"):
        read_all(data, path)


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2", "xz"])
def test_a_flipped_bit_anywhere_under_a_checksum_is_refused_or_harmless(suffix, tmp_path):
    data = COMPRESSED[suffix, "a checksum" if suffix == "zst" else "one frame"]
    refused = 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        try:
            assert read_all(bytes(flipped), tmp_path / f"a.jsonl.{suffix}") == LINES, position  # a time stamp
        except SourceError:
            refused += 1
    assert refused > 0.9 * len(data)


def test_zeros_behind_an_xz_stream_come_in_fours(tmp_path):
    data, path = COMPRESSED["xz", "one frame"], tmp_path / "a.jsonl.xz"
    assert read_all(data + bytes(1 << 18), path) == LINES
    with pytest.raises(SourceError, match="6 zeros after an xz stream, expected a multiple of 4"):
        read_all(data + bytes(6), path)


def test_an_xz_stream_that_asks_for_more_than_a_gibibyte_is_refused(tmp_path):
    data = COMPRESSED["xz", "one frame"]
    header = bytearray(data[12:24])  # of the first block
    header[4] = 38  # a dictionary of 2 GiB
    header[8:] = zlib.crc32(header[:8]).to_bytes(4, "little")
    with pytest.raises(SourceError, match="Memory usage limit exceeded"):
        read_all(data[:12] + header + data[24:], tmp_path / "a.jsonl.xz")


def test_chunks_are_read_whole_where_the_system_gives_less(tmp_path, monkeypatch):
    class Reluctant(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:7])

    source = source_of(tmp_path / "a.jsonl", LINES)
    monkeypatch.setattr(builtins, "open", lambda path, mode: io.BufferedReader(Reluctant(path)))
    with open_bytes(source) as stream:
        assert [stream.read(size) for size in (100, 1 << 20, 1)] == [LINES[:100], LINES[100:], b""]


# bytes are decompressed ahead of the records that are read

MANY = [json.dumps({"text": f"text {number}"}) for number in range(200_000)]


@pytest.mark.parametrize(
    ("line", "error", "says"), [(3, BadRecordError, "line 3: malformed"), (0, SourceError, "damaged")]
)
def test_a_bad_record_before_damage_is_found_first(place, line, error, says):
    """All of the file is decompressed at once: it has 4 MB."""
    lines = [*MANY[: line - 1], "{", *MANY[line:]] if line else MANY
    content = zstandard.compress("\n".join(lines).encode())
    (place / "a.jsonl.zst").write_bytes(content[: len(content) * 3 // 4])
    with pytest.raises(error, match=says):
        build(place, place / "a.jsonl.zst")
