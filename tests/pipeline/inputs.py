"""Inputs of every format, builds of them, and what the corpora hold, as text."""

from __future__ import annotations

import bz2
import csv
import functools
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from pyarrow import feather, ipc

from tests.contract import small
from tokshard import Corpus, build_corpus, open_corpus

TOKENIZER = Path(__file__).parents[2] / "recipes" / "tokenizer"
EOS = "<|endoftext|>"

Record = Mapping[str, Any]


def jsonl(records: Sequence[Record]) -> bytes:
    return b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in records)


def zstd(data: bytes, *, window_log: int | None = None, checksum: bool = False) -> bytes:
    """One frame; with `window_log` one that asks for a window of ``2**window_log`` bytes."""
    if window_log is None:
        return zstandard.ZstdCompressor(write_checksum=checksum).compress(data)
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, compression_level=1)
    stream = zstandard.ZstdCompressor(compression_params=parameters).compressobj()  # its frames do not say their size
    return stream.compress(data) + stream.flush()


def frames(data: bytes, compress: Callable[[bytes], bytes], count: int) -> bytes:
    """`data` as `count` frames or members, cut anywhere."""
    cuts = [len(data) * number // count for number in range(count + 1)]
    return b"".join(compress(data[start:stop]) for start, stop in itertools.pairwise(cuts))


def csv_bytes(records: Sequence[Record], line_end: str = "\n", delimiter: str = ",") -> bytes:
    file = io.StringIO(newline="")
    # without quotes, a lone carriage return in a text would end its row
    writer = csv.DictWriter(
        file, fieldnames=list(records[0]), lineterminator=line_end, quoting=csv.QUOTE_ALL, delimiter=delimiter
    )
    writer.writeheader()
    writer.writerows(records)
    return file.getvalue().encode()


def table(records: Sequence[Record]) -> pa.Table:
    return pa.Table.from_pylist(list(records))


def parquet_bytes(found: pa.Table, rows_per_group: int | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(found, sink, row_group_size=rows_per_group)
    return sink.getvalue().to_pybytes()


def arrow_bytes(found: pa.Table, rows_per_batch: int | None = None, kind: Callable[..., Any] = ipc.new_file) -> bytes:
    sink = pa.BufferOutputStream()
    with kind(sink, found.schema) as writer:
        writer.write_table(found, max_chunksize=rows_per_batch)
    return sink.getvalue().to_pybytes()


def arrow_stream_bytes(found: pa.Table, rows_per_batch: int | None = None) -> bytes:
    return arrow_bytes(found, rows_per_batch, ipc.new_stream)


def feather_bytes(found: pa.Table, rows_per_batch: int | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(found, sink, compression="lz4", chunksize=rows_per_batch)
    return sink.getvalue().to_pybytes()


TABLES: dict[str, Callable[..., bytes]] = {
    "a.parquet": parquet_bytes,
    "a.arrow": arrow_bytes,
    "stream.arrow": arrow_stream_bytes,
}
"""File name to what makes it of a table, with so many rows in a group or batch, if that is said."""

xz = functools.partial(lzma.compress, preset=1)  # a fifth of the time

COMPRESSIONS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".zst": zstd,
    ".bz2": bz2.compress,
    ".xz": xz,
}
"""Suffix to what makes a file of that name."""

Encode = Callable[[Sequence[Record], int], bytes]
"""Records to the bytes of a file, cut into groups, batches, frames or members of so many records, where it can be."""

FORMATS: dict[str, Encode] = {
    "plain.jsonl": lambda records, size: jsonl(records),
    "members.jsonl.gz": lambda records, size: frames(jsonl(records), gzip.compress, -(-len(records) // size)),
    "frames.jsonl.zst": lambda records, size: frames(jsonl(records), zstd, -(-len(records) // size)),
    "streams.jsonl.bz2": lambda records, size: frames(jsonl(records), bz2.compress, -(-len(records) // size)),
    "streams.jsonl.xz": lambda records, size: frames(jsonl(records), xz, -(-len(records) // size)),
    "lines.json": lambda records, size: jsonl(records),
    "table.parquet": lambda records, size: parquet_bytes(table(records), size),
    "file.arrow": lambda records, size: arrow_bytes(table(records), size),
    "stream.arrow": lambda records, size: arrow_stream_bytes(table(records), size),
    "file.feather": lambda records, size: feather_bytes(table(records), size),
    "plain.csv": lambda records, size: csv_bytes(records),
    "members.csv.gz": lambda records, size: frames(csv_bytes(records, "\r\n"), gzip.compress, 2),
    "plain.tsv": lambda records, size: csv_bytes(records, delimiter="\t"),
}
"""File name to encoder, for every format that holds many records."""


def patch_chunk_bytes(monkeypatch: pytest.MonkeyPatch, chunk_bytes: int) -> None:
    """Make chunks so small that little data fills many; spawned workers keep the real size."""
    small.shrink(monkeypatch.setattr, chunk_bytes=chunk_bytes)


def build(sources: Sequence[Path | str] | Path | str, out: Path, **options: Any) -> Corpus:
    """Build in this process with the tokenizer of bytes, and open the result."""
    arguments = [sources] if isinstance(sources, Path | str) else list(sources)
    settings: dict[str, Any] = {"workers": 1, **options}
    if "tokenizer" not in settings:
        settings["tokenizer"] = write_byte_tokenizer(
            out.parent / ".tokenizer"
        )  # hidden, so that it is not read as a source
    return open_corpus(build_corpus(arguments, out=out, **settings).directory)


def write_byte_tokenizer(directory: Path) -> Path:
    """A tokenizer with an id per byte, so small that a build with it takes milliseconds: EOS is 0, byte b is b + 1."""
    spelled = letters_of_bytes()
    directory.mkdir(parents=True, exist_ok=True)
    content = {
        "version": "1.0",
        "added_tokens": [special_token(0, EOS)],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {EOS: 0, **{spelled[b]: b + 1 for b in range(256)}}, "merges": []},
    }
    (directory / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    (directory / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}), encoding="utf-8")
    return directory


def letters_of_bytes() -> dict[int, str]:
    """How tokenizers of bytes spell each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def special_token(index: int, content: str, **changes: Any) -> dict[str, Any]:
    """An entry of ``added_tokens``."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": index, "content": content, **flags, **changes}


def texts_of(corpus: Corpus) -> list[str]:
    """The documents of a corpus made with the tokenizer of bytes; each ends in its EOS and holds no other."""
    return [bytes(token - 1 for token in document[:-1].tolist()).decode() for document in _checked(corpus)]


def _checked(corpus: Corpus) -> Iterator[Any]:
    for document in corpus.documents():
        assert document.tolist().index(corpus.eos_id) == len(document) - 1
        yield document
