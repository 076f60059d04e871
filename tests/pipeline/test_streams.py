"""Bytes of inputs: lines on a fixed grid of chunks, and compression that is whole or refused."""

from __future__ import annotations

import builtins
import bz2
import contextlib
import gzip
import io
import itertools
import lzma
import tempfile
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.examples import some
from tests.pipeline.inputs import frames, patch_chunk_bytes, zstd
from tokshard.errors import SourceError
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.sources.lines import line_chunks, lines_of

LINES = b"".join(b'{"text": "line %d"}\n' % number for number in range(40))


# lines

pieces_of_data = st.sampled_from([b"\n", b"\n\n\n", b"\r\n", b"\r", b"a", b"bc", b"\x00", b"\xff", b"long line" * 4])
any_bytes = st.lists(st.one_of(pieces_of_data, st.binary(max_size=12)), max_size=30).map(b"".join)


@contextlib.contextmanager
def chunks_of(chunk_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch_chunk_bytes(patch, chunk_bytes)
        yield


def lines_of_range(
    data: bytes, start: int, stop: int | None, max_line_bytes: int
) -> tuple[list[tuple[int, bytes | int]], int]:
    """(place of the chunk, line) for each line of a range, an oversized one as its size; and the input bytes."""
    lines: list[tuple[int, bytes | int]] = []
    input_bytes = 0
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        source = Input(
            index=0,
            argument=0,
            path="",
            location=file.name,
            num_bytes=len(data),
            version="",
            format="jsonl",
            compression=None,
        )
        for place, chunk in lines_of(source, Span(start, stop), max_line_bytes):
            lines += [(place, line) for line in _split_at_newlines(chunk.data)]
            if chunk.oversized_bytes:
                lines.append((place, chunk.oversized_bytes))
            input_bytes += chunk.input_bytes
    return lines, input_bytes


def _split_at_newlines(data: bytes) -> list[bytes]:
    lines = [line + b"\n" for line in data.split(b"\n")]
    last = lines.pop()[:-1]
    return [*lines, last] if last else lines


def expected_lines(data: bytes, chunk_bytes: int, max_line_bytes: int) -> list[tuple[int, bytes | int]]:
    """(place of the chunk that holds the first byte, line) for each line, an oversized one as its size."""
    result: list[tuple[int, bytes | int]] = []
    start = 0
    for line in _split_at_newlines(data):
        place = start // chunk_bytes * chunk_bytes
        result.append((place, line if len(line) <= max_line_bytes else len(line)))
        start += len(line)
    return result


@pytest.mark.slow
@given(data=any_bytes, chunk_bytes=st.integers(1, 20), slack=st.integers(0, 30))
def test_every_line_is_in_the_chunk_of_its_first_byte_and_an_oversized_one_is_counted_once(data, chunk_bytes, slack):
    with chunks_of(chunk_bytes):
        found, _ = lines_of_range(data, 0, None, chunk_bytes + slack)
    assert found == expected_lines(data, chunk_bytes, chunk_bytes + slack)


@given(data=any_bytes, chunk_bytes=st.integers(1, 20), slack=st.integers(0, 30), cuts=st.sets(st.integers(1, 12)))
def test_ranges_hold_every_line_once_in_the_range_of_its_first_byte(data, chunk_bytes, slack, cuts):
    bounds = [0, *(cut * chunk_bytes for cut in sorted(cuts) if cut * chunk_bytes < len(data)), None]
    expected = expected_lines(data, chunk_bytes, chunk_bytes + slack)
    with chunks_of(chunk_bytes):
        for start, stop in itertools.pairwise(bounds):
            found, _ = lines_of_range(data, start, stop, chunk_bytes + slack)
            end = len(data) if stop is None else stop
            assert found == [(place, line) for place, line in expected if start <= place < end]


@given(data=any_bytes, chunk_bytes=st.integers(1, 20))
def test_chunks_of_a_whole_stream_account_for_every_byte_read(data, chunk_bytes):
    with chunks_of(chunk_bytes):
        lines, input_bytes = lines_of_range(data, 0, None, 1 << 20)
    assert input_bytes == (len(data) if lines else 0)


def test_a_line_over_the_limit_is_never_held_in_memory():
    line_bytes, position = 64 << 20, 0

    def read(size: int) -> bytes:
        nonlocal position
        data = b"x" * min(size, line_bytes - position)
        position += len(data)
        return data

    tracemalloc.start()
    try:
        (place, chunk), *rest = line_chunks(read, 2 << 20)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (place, chunk.data, chunk.oversized_bytes, rest) == (0, b"", line_bytes, [])
    assert peak_bytes < 12 << 20


# compression


def read_all(data: bytes, path: Path, *, read_bytes: int = 1_000) -> bytes:
    path.write_bytes(data)
    (source,) = discover([str(path)], input_format=None).inputs
    with open_bytes(source) as stream:
        parts = []
        while part := stream.read(read_bytes):
            parts.append(part)
        assert stream.file_position(None) <= len(data)
    return b"".join(parts)


SKIPPABLE = b"\x50\x2a\x4d\x18" + (5).to_bytes(4, "little") + b"aside"
GZIP = {
    "one member": gzip.compress(LINES),
    "several members": frames(LINES, gzip.compress, 5),
    "empty members between": gzip.compress(b"")
    + frames(LINES, lambda data: gzip.compress(data) + gzip.compress(b""), 2),
    "a stored member with a name": b"\x1f\x8b\x08\x08\0\0\0\0\0\xffname\0" + gzip.compress(LINES, 0)[10:],
}
ZSTD = {
    "one frame": zstd(LINES),
    "a checksum": zstd(LINES, checksum=True),
    "several frames": frames(LINES, zstd, 5),
    "empty frames between": zstd(b"") + frames(LINES, lambda data: zstd(data) + zstd(b""), 2),
    "a skippable frame first": SKIPPABLE + zstd(LINES),
    "a skippable frame between": zstd(LINES[:100]) + SKIPPABLE + zstd(LINES[100:]),
    "a skippable frame last": zstd(LINES) + SKIPPABLE,
    "a window of 128 MiB": zstd(LINES, window_log=27),
    "a window of 256 MiB": zstd(LINES, window_log=28),
    "a window of 2 GiB": zstd(LINES, window_log=31),
    "several wide frames": frames(LINES, lambda data: zstd(data, window_log=28), 3),
    "a wide frame after a narrow one": zstd(LINES[:300]) + zstd(LINES[300:], window_log=28),
    "a wide frame after an empty one": zstd(b"") + zstd(LINES, window_log=28),
    "a wide frame after a skippable one": SKIPPABLE + zstd(LINES, window_log=29),
    "a narrow frame after a wide one": zstd(LINES[:300], window_log=28) + zstd(LINES[300:]),
    "a skippable frame after a wide one": zstd(LINES, window_log=28) + SKIPPABLE,
}
BZ2 = {
    "one stream": bz2.compress(LINES),
    "several streams": frames(LINES, bz2.compress, 5),
    "empty streams between": bz2.compress(b"") + frames(LINES, lambda data: bz2.compress(data) + bz2.compress(b""), 2),
}
XZ = {
    "one stream": lzma.compress(LINES),
    "a checksum of another kind": lzma.compress(LINES, check=lzma.CHECK_SHA256),
    "several streams": frames(LINES, lzma.compress, 5),
    "padding between": lzma.compress(LINES[:300]) + b"\0" * 8 + lzma.compress(LINES[300:]),
}
COMPRESSED = {
    (suffix, name): data
    for suffix, known in (("gz", GZIP), ("zst", ZSTD), ("bz2", BZ2), ("xz", XZ))
    for name, data in known.items()
}
each_compressed = pytest.mark.parametrize(("suffix", "name"), COMPRESSED)


@each_compressed
@pytest.mark.parametrize("read_bytes", [1, 77, 1 << 20])
def test_decompression_gives_all_members_and_frames(suffix, name, read_bytes, tmp_path):
    data = COMPRESSED[suffix, name]
    assert read_all(data, tmp_path / f"a.jsonl.{suffix}", read_bytes=read_bytes) == LINES


@pytest.mark.slow
@each_compressed
def test_a_cut_anywhere_inside_a_frame_is_refused(suffix, name, tmp_path):
    data = COMPRESSED[suffix, name]
    path = tmp_path / f"a.jsonl.{suffix}"
    ends_of_frames = set(_frame_ends(data, suffix))
    # every place in short files, and every seventh in long ones with both ends whole
    cuts = [cut for cut in range(len(data)) if len(data) < 100 or cut % 7 == 0 or not 20 < cut < len(data) - 20]
    for cut in cuts:
        if cut and cut in ends_of_frames:
            assert LINES.startswith(read_all(data[:cut], path)), cut
        else:
            with pytest.raises(SourceError, match="damaged") as caught:
                read_all(data[:cut], path)
            assert str(path) in caught.value.problem
            assert caught.value.hint


def _frame_ends(data: bytes, suffix: str) -> Iterator[int]:
    """Where frames and members end: a file cut there cannot be told from a whole one."""
    rest = data
    while rest:
        if suffix == "gz":
            member = zlib.decompressobj(31)
            member.decompress(rest)
            rest = member.unused_data
        elif suffix in ("bz2", "xz"):
            stream: Any = bz2.BZ2Decompressor() if suffix == "bz2" else lzma.LZMADecompressor()
            stream.decompress(rest)
            rest = stream.unused_data
            while rest.startswith(b"\0"):  # padding of an xz file comes in fours
                yield len(data) - len(rest)
                rest = rest[4:]
        elif rest.startswith(SKIPPABLE):
            rest = rest[len(SKIPPABLE) :]
        else:
            frame = zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()
            frame.decompress(rest)
            rest = frame.unused_data
        yield len(data) - len(rest)


@each_compressed
@pytest.mark.parametrize("garbage", [b"x", b"\0", b"\0" * 601, b"garbage after the end", b"\x1f\x8b", b"\x28\xb5\x2f"])
def test_bytes_after_the_last_frame_are_refused_but_for_zeros_after_gzip(suffix, name, garbage, tmp_path):
    if suffix == "gz" and not garbage.strip(b"\0"):
        whole = read_all(COMPRESSED[suffix, name], tmp_path / "whole.jsonl.gz")
        assert read_all(COMPRESSED[suffix, name] + garbage, tmp_path / "a.jsonl.gz") == whole
        return
    with pytest.raises(SourceError, match="damaged"):
        read_all(COMPRESSED[suffix, name] + garbage, tmp_path / f"a.jsonl.{suffix}")


@pytest.mark.parametrize(
    ("suffix", "data"),
    [
        ("gz", GZIP["one member"]),
        ("zst", ZSTD["a checksum"]),
        ("bz2", BZ2["one stream"]),
        ("xz", XZ["one stream"]),
    ],
    ids=["gz", "zst", "bz2", "xz"],
)
def test_a_flipped_bit_anywhere_under_a_checksum_is_refused_or_harmless(suffix, data, tmp_path):
    path = tmp_path / f"a.jsonl.{suffix}"
    refused = 0
    for position in range(len(data)):
        flipped = bytearray(data)
        flipped[position] ^= 1 << position % 8
        try:
            assert read_all(bytes(flipped), path) == LINES, position  # time stamps and the like
        except SourceError:
            refused += 1
    assert refused > 0.9 * len(data)


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2", "xz"])
@pytest.mark.parametrize("data", [b"", b"\n", LINES], ids=["empty", "newline", "plain text"])
def test_a_file_that_is_not_compressed_is_refused(suffix, data, tmp_path):
    path = tmp_path / f"a.jsonl.{suffix}"
    with pytest.raises(SourceError, match="damaged") as caught:
        read_all(data, path)
    assert str(path) in caught.value.problem


def test_the_other_compression_under_a_name_is_refused(tmp_path):
    with pytest.raises(SourceError, match="damaged"):
        read_all(GZIP["one member"], tmp_path / "a.jsonl.zst")
    with pytest.raises(SourceError, match="damaged"):
        read_all(ZSTD["one frame"], tmp_path / "a.jsonl.gz")


def test_zeros_behind_an_xz_stream_come_in_fours(tmp_path):
    path = tmp_path / "a.jsonl.xz"
    assert read_all(XZ["one stream"] + b"\0" * (1 << 18), path) == LINES
    with pytest.raises(SourceError, match="6 zeros after an xz stream, expected a multiple of 4"):
        read_all(XZ["one stream"] + b"\0" * 6, path)


def test_an_xz_stream_that_asks_for_more_than_a_gibibyte_is_refused(tmp_path):
    data = XZ["one stream"]
    header = bytearray(data[12:24])  # of the first block
    header[4] = 38  # a dictionary of 2 GiB
    header[8:] = zlib.crc32(header[:8]).to_bytes(4, "little")
    with pytest.raises(SourceError, match="Memory usage limit exceeded"):
        read_all(data[:12] + header + data[24:], tmp_path / "a.jsonl.xz")


BOMB_BYTES = 64 << 20  # eight times as many in a frame whose window alone holds that


@pytest.mark.slow
@some("kind", ["zst", "gz", "bz2", "xz", "wide zst"])
def test_a_decompression_bomb_is_given_out_in_pieces_and_never_held(kind, tmp_path):
    path = tmp_path / f"a.jsonl.{kind.split()[-1]}"
    num_bytes = BOMB_BYTES * (8 if kind == "wide zst" else 1)
    piece, count = bytes(1 << 20), num_bytes >> 20
    compressor: Any = {
        "gz": lambda: zlib.compressobj(9, wbits=31),
        "zst": lambda: zstandard.ZstdCompressor().compressobj(),
        "wide zst": lambda: zstandard.ZstdCompressor(
            compression_params=zstandard.ZstdCompressionParameters(window_log=28, compression_level=1)
        ).compressobj(),
        "bz2": bz2.BZ2Compressor,
        "xz": lambda: lzma.LZMACompressor(preset=0),
    }[kind]()
    path.write_bytes(b"".join([*(compressor.compress(piece) for _ in range(count)), compressor.flush()]))
    assert path.stat().st_size < num_bytes / 100
    (source,) = discover([str(path)], input_format=None).inputs
    before = psutil.Process().memory_info().rss
    peak, total = before, 0
    with open_bytes(source) as stream:
        while part := stream.read(1 << 20):
            assert len(part) <= 1 << 20
            total += len(part)
            peak = max(peak, psutil.Process().memory_info().rss)
    assert total == num_bytes
    # a wide frame may fill the window that it asks for, here 256 MiB
    assert peak - before < (320 << 20 if kind == "wide zst" else 48 << 20)


def test_a_file_that_is_gone_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    (source,) = discover([str(path)], input_format=None).inputs
    path.unlink()
    with pytest.raises(SourceError, match=r"a\.jsonl cannot be read: No such file") as caught, open_bytes(source):
        pass
    assert "same command" in caught.value.hint


def test_chunks_are_read_whole_where_the_system_gives_less(tmp_path, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_bytes(LINES)
    (source,) = discover([str(path)], input_format=None).inputs

    class Reluctant(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            return super().readinto(memoryview(buffer)[:7])

    monkeypatch.setattr(builtins, "open", lambda path, mode: io.BufferedReader(Reluctant(path)))
    with open_bytes(source) as stream:
        assert stream.read(100) == LINES[:100]
        assert stream.read(1 << 20) == LINES[100:]
        assert stream.read(1) == b""
