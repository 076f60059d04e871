"""Files of samples: MosaicML's MDS shards and litdata's chunks for its ``TokensLoader``, listed in an ``index.json``.

Both begin with the number of samples and the place of each, and the end of the last (uint32). A sample of MDS has its
columns, after the sizes of those whose size is not fixed (uint32); one of litdata is its ids. Columns that would have
to be unpickled are never read.
"""

from __future__ import annotations

import bz2
import gzip
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tokshard.errors import BadSourceError, UsageError
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec, companion_size, damaged, stored_dtype
from tokshard.interop.tokens.lists import USUAL_FIELDS, join
from tokshard.interop.tokens.located import batches_of
from tokshard.store import Store

INDEX = "index.json"
MDS_SUFFIXES = (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2")
LITDATA_SUFFIX = ".bin"

_MAX_INDEX_BYTES = 1 << 28
_SHAPE_BYTES = (1, 2, 4, 8)
_MDS_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
_TORCH_CODES = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"}
_TORCH_CODES[20] = "uint16"
_NUMPY_CODES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_OPEN: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": bz2.BZ2File,
}
_PIECE = 1 << 20

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Samples:
    """The content of a file of samples."""

    store: Store
    name: str
    data: bytes

    def damaged(self, reason: str) -> BadSourceError:
        return damaged(self.store, self.name, reason)


def index_name(name: str) -> str:
    """The index of a file of samples."""
    folder = name.rpartition("/")[0]
    return f"{folder}/{INDEX}" if folder else INDEX


def read_index(store: Store, name: str) -> Json:
    """The ``index.json`` of a folder.

    Raises:
        BadSourceError: it is missing, or is not one of these formats.
    """
    if companion_size(store, name, "the index") > _MAX_INDEX_BYTES:
        raise damaged(store, name, f"it has more than {_MAX_INDEX_BYTES:,} bytes")
    try:
        parsed = json.loads(store.get(name))
        listed = parsed["shards"] if "shards" in parsed else parsed["chunks"]
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise TypeError("the list of files is not a list of objects")
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise damaged(store, name, f"it does not list shards or chunks: {error!r}") from error
    return dict(parsed)


def listed_names(index: Json) -> list[tuple[str, ...]]:
    """The names that each file of an index may have, in order: of MDS, the one that is compressed and the other."""
    if "shards" in index:
        places = [[entry.get("raw_data"), entry.get("zip_data")] for entry in index["shards"]]
        return [tuple(str(place.get("basename")) for place in both if isinstance(place, dict)) for both in places]
    return [(str(entry.get("filename")),) for entry in index["chunks"]]


def read_mds(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- read whole
    """The samples of an MDS shard.

    Raises:
        BadSourceError: the shard or its index is damaged.
        UsageError: no column holds ids.
    """
    entry = _entry(store, name)
    compression = name.rpartition(".")[2]
    raw = entry.get("raw_data")
    num_bytes = raw.get("bytes") if isinstance(raw, dict) else None
    data, read_bytes = _content(store, name, compression, num_bytes)
    offsets = _offsets(store, name, data, entry.get("samples"))
    file = _Samples(store, name, data)
    column, encoding, sizes = _column(store, name, entry, spec)
    starts, stops = _column_places(file, offsets, sizes, column)
    documents = [
        _mds_ids(file, low, high, encoding, spec) for low, high in zip(starts.tolist(), stops.tolist(), strict=True)
    ]
    bounds = np.concatenate([np.zeros(1, np.int64), np.cumsum([ids.nbytes for ids in documents], dtype=np.int64)])
    for first, last in batches_of(bounds):
        share = read_bytes * last // len(documents) - read_bytes * first // len(documents)
        yield join(documents[first:last], share)


def read_litdata(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- read whole
    """The samples of a chunk of litdata, as its ``TokensLoader`` stores them.

    Raises:
        BadSourceError: the chunk or its index is damaged, or was written for another loader.
    """
    index = index_name(name)
    entry, config = _entry(store, name), read_index(store, index).get("config")
    if not isinstance(config, dict) or config.get("item_loader", "TokensLoader") != "TokensLoader":
        raise damaged(store, index, "its samples are not those of TokensLoader; write them with it")
    kinds = config.get("data_format")
    kind, _, code = str(kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else "").partition(":")
    codes = {"no_header_tensor": _TORCH_CODES, "no_header_numpy": _NUMPY_CODES}.get(kind, {})
    if not code.isdecimal() or int(code) not in codes or config.get("encryption"):
        raise damaged(store, index, f"its samples are {kinds}, expected arrays of integers that are not encrypted")
    data, read_bytes = _content(store, name, str(config.get("compression")), entry.get("chunk_bytes"))
    offsets = _offsets(store, name, data, entry.get("chunk_size"))
    dtype = stored_dtype(codes[int(code)])
    if (np.diff(offsets) % dtype.itemsize).any():
        raise damaged(store, name, f"a sample is no array of {dtype.name}")
    for first, last in batches_of(offsets):
        low, high = int(offsets[first]), int(offsets[last])
        share = read_bytes * last // (len(offsets) - 1) - read_bytes * first // (len(offsets) - 1)
        tokens = np.frombuffer(data, dtype, (high - low) // dtype.itemsize, low)
        yield TokenBatch(tokens=tokens, ends=(offsets[first + 1 : last + 1] - low) // dtype.itemsize, input_bytes=share)


def _entry(store: Store, name: str) -> Json:
    index = read_index(store, index_name(name))
    base = name.rpartition("/")[2]
    for number, names in enumerate(listed_names(index)):
        if base in names:
            return dict((index["shards"] if "shards" in index else index["chunks"])[number])
    raise damaged(store, index_name(name), f"it does not list {base}")


def _content(store: Store, name: str, compression: str, num_bytes: Any) -> tuple[bytes, int]:
    """The bytes of a file, decompressed, and how many were read.

    Raises:
        BadSourceError: it has another size than the index says.
    """
    size = store.stat(name).size
    if not isinstance(num_bytes, int) or num_bytes < 0:
        raise damaged(store, index_name(name), f"it gives {name} {num_bytes!r} bytes")
    if compression not in _OPEN:
        if size != num_bytes:
            raise damaged(store, name, f"it has {size:,} bytes, its index says {num_bytes:,}")
        return store.get(name), size
    pieces, found = [], 0
    try:
        with store.open(name) as file, _OPEN[compression](file) as unpacked:
            while found <= num_bytes and (piece := unpacked.read(_PIECE)):
                pieces.append(piece)
                found += len(piece)
    except (zstandard.ZstdError, OSError, EOFError) as error:
        raise damaged(store, name, f"it cannot be decompressed: {error}") from error
    if found != num_bytes:
        raise damaged(store, name, f"it has {found:,} bytes or more when decompressed, its index says {num_bytes:,}")
    return b"".join(pieces), size


def _offsets(store: Store, name: str, data: bytes, num_samples: Any) -> NDArray[np.int64]:
    """Where each sample begins, and the end of the last: int64 [samples + 1], checked."""
    count = int.from_bytes(data[:4], "little") if len(data) >= 4 else -1
    if count != num_samples or 4 * (count + 2) > len(data):
        raise damaged(store, name, f"it begins with {count:,} samples, its index says {num_samples!r}")
    offsets = np.frombuffer(data, "<u4", count + 1, 4).astype(np.int64)
    if (np.diff(offsets) < 0).any() or int(offsets[0]) < 4 * (count + 2) or int(offsets[-1]) != len(data):
        raise damaged(store, name, f"its samples do not lie one after another up to its end, byte {len(data):,}")
    return offsets


def _column(store: Store, name: str, entry: Json, spec: TokenSpec) -> tuple[int, str, list[int | None]]:
    """Which column holds the ids, its encoding, and the size of each column; None if it is not fixed."""
    names, encodings, sizes = (entry.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)) or (
        len({len(names), len(encodings), len(sizes)}) != 1
        or not all(size is None or (isinstance(size, int) and 0 <= size < 1 << 32) for size in sizes)
    ):
        raise damaged(store, index_name(name), f"it does not describe the columns of {name}")
    wanted = spec.field or next((usual for usual in USUAL_FIELDS if usual in names), None)
    if wanted not in names or str(encodings[names.index(wanted)]).partition(":")[0] not in {"ndarray", "bytes"}:
        found = ", ".join(f"{column} ({encoding})" for column, encoding in zip(names, encodings, strict=True))
        raise UsageError(
            f"{store.where(name)} has no column {wanted or 'of token ids'!r} of arrays; it has {found}",
            hint="give the column that holds the ids with --token-field",
        )
    at = names.index(wanted)
    return at, str(encodings[at]), sizes


def _column_places(
    file: _Samples, offsets: NDArray[np.int64], sizes: Sequence[int | None], column: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a column begins and ends in each sample."""
    begins, ends = offsets[:-1], offsets[1:]
    num_sizes = sizes.count(None)
    if (ends - begins < 4 * num_sizes).any():
        raise file.damaged("a sample is shorter than the sizes of its columns")
    numbers = np.frombuffer(file.data, np.uint8)
    heads = numbers[(begins[:, None] + np.arange(4 * num_sizes))].reshape(len(begins), -1).copy().view("<u4")
    at, place = begins + 4 * num_sizes, 0
    start = stop = at
    for number, size in enumerate(sizes):
        following = at + (heads[:, place].astype(np.int64) if size is None else size)
        place += size is None
        if number == column:
            start, stop = at, following
        at = following
    if (at != ends).any():
        raise file.damaged(f"sample {int(np.argmax(at != ends)):,} has columns of another size than it has itself")
    return start, stop


def _mds_ids(file: _Samples, low: int, high: int, encoding: str, spec: TokenSpec) -> NDArray[Any]:
    """The ids in one column of one sample, ``[low, high)`` of the data."""
    kind, *said = encoding.split(":")
    dtype = np.dtype("<i8") if spec.dtype is None else stored_dtype(spec.dtype)
    shape: list[int] | None = None
    if kind == "ndarray":
        if said:
            dtype = stored_dtype(said[0])
        elif high > low and file.data[low] in _MDS_CODES:
            dtype, low = np.dtype(f"<{_MDS_CODES[file.data[low]]}"), low + 1
        else:
            raise file.damaged("an array is not one of integers")
        if len(said) < 2 and high > low:
            num_dimensions, width = file.data[low] >> 2, _SHAPE_BYTES[file.data[low] & 3]
            stop = low + 1 + num_dimensions * width
            if stop > high:
                raise file.damaged("the shape of an array is longer than it")
            shape, low = np.frombuffer(file.data, f"<u{width}", num_dimensions, low + 1).tolist(), stop
    count, rest = divmod(high - low, dtype.itemsize)
    if rest or (shape is not None and math.prod(shape) != count):
        raise file.damaged(f"{high - low:,} bytes are no array {shape or ''} of {dtype.name}")
    return np.frombuffer(file.data, dtype, count, low)
