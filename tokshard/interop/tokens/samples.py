"""Files of samples: MosaicML's MDS shards and litdata's chunks for its ``TokensLoader``, listed in an ``index.json``.

Both begin with the number of samples and the place of each, and the end of the last (uint32). A sample of MDS has its
columns, after the sizes of those whose size is not fixed (uint32); one of litdata is its ids. Columns that would have
to be unpickled are never read.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, Any

import numpy as np
import zstandard
from numpy.typing import NDArray

from tokshard.errors import BadSourceError, UsageError
from tokshard.format.schema import MAX_VOCABULARY
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec, damaged, stored_dtype
from tokshard.interop.tokens.lists import find_name, join
from tokshard.interop.tokens.located import batches_of
from tokshard.interop.tokens.rows import ROW_FIELDS, RowValues, documents_of_rows
from tokshard.interop.tokens.sample_index import Json, entry_of, index_name, read_index
from tokshard.numbers import DTYPES
from tokshard.store import Store

MDS_SUFFIXES = (".mds", ".mds.zstd", ".mds.gz", ".mds.bz2")
LITDATA_SUFFIX = ".bin"

_SHAPE_BYTES = (1, 2, 4, 8)
_MDS_CODES = {8: "u1", 9: "i1", 16: "u2", 17: "i2", 32: "u4", 33: "i4", 64: "u8", 65: "i8"}
_MDS_TEXTS = ("str", "json", "str_int", "str_float", "str_decimal")
_MDS_NUMBERS = ("int", *DTYPES, "float16", "float32", "float64")
_TORCH_CODES = {11: "uint8", 12: "int8", 13: "int16", 14: "int16", 15: "int32", 16: "int32", 17: "int64", 18: "int64"}
_TORCH_CODES[20] = "uint16"
_NUMPY_CODES = dict(enumerate(("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")))
_OPEN: Mapping[str, Callable[[IO[bytes]], Any]] = {
    "zstd": lambda file: zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True),
    "gz": lambda file: gzip.GzipFile(fileobj=file),
    "bz2": bz2.BZ2File,
}
_HASHES = tuple(sorted(name for name in hashlib.algorithms_guaranteed if not name.startswith("shake")))
"""The hashes of MDS that Python has. MDS also uses xxhash, which Python does not have."""
_PIECE = 1 << 20


@dataclass(frozen=True, slots=True)
class _Samples:
    """Consecutive samples of a file.

    Args:
        first: number of the first.
        offsets: int64 [samples + 1]: where each begins in `data`, and the end of the last.
        file_bytes: bytes of the file that they stand for.
    """

    store: Store
    name: str
    data: bytes
    first: int
    offsets: NDArray[np.int64]
    file_bytes: int

    def damaged(self, reason: str) -> BadSourceError:
        return damaged(self.store, self.name, reason)


def read_mds(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- read whole
    """The samples of an MDS shard. If its index has hashes, the first that this Python knows is compared.

    Raises:
        BadSourceError: the shard or its index is damaged.
        UsageError: no column holds ids.
    """
    entry = entry_of(store, name)
    raw = entry.get("raw_data")
    said = raw if isinstance(raw, dict) else {}
    column, encoding, sizes = _column(store, name, entry, spec)
    kept = {path: _kept_column(store, name, entry, path) for path in spec.kept}
    of_rows = _row_columns(store, name, entry, column)
    file = _SampleFile(store, name, name.rpartition(".")[2], said.get("bytes"), said.get("hashes"))
    for samples in file.samples(entry.get("samples")):
        starts, stops = _column_places(samples, sizes, column)
        places = zip(starts.tolist(), stops.tolist(), strict=True)
        documents = [_mds_ids(samples, low, high, encoding, spec) for low, high in places]
        if encoding == "bytes" and spec.dtype is None:
            _check_width(samples, documents)
        columns = {path: _kept_values(samples, sizes, *found) for path, found in kept.items()}
        batch = replace(join(documents, samples.file_bytes), columns=columns)
        values = {path: _row_values(samples, sizes, *found, spec) for path, found in of_rows.items()}
        yield documents_of_rows(batch, values, spec.delimiters) if values else batch


def read_litdata(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- read whole
    """The samples of a chunk of litdata, as its ``TokensLoader`` stores them.

    Raises:
        BadSourceError: the chunk or its index is damaged, or was written for another loader.
    """
    index = index_name(name)
    entry, config = entry_of(store, name), read_index(store, index).get("config")
    if not isinstance(config, dict) or config.get("item_loader", "TokensLoader") != "TokensLoader":
        raise damaged(store, index, "its samples are not those of TokensLoader; write them with it")
    kinds = config.get("data_format")
    kind, _, code = str(kinds[0] if isinstance(kinds, list) and len(kinds) == 1 else "").partition(":")
    codes = {"no_header_tensor": _TORCH_CODES, "no_header_numpy": _NUMPY_CODES}.get(kind, {})
    if not code.isdecimal() or int(code) not in codes or config.get("encryption"):
        raise damaged(store, index, f"its samples are {kinds}, expected arrays of integers that are not encrypted")
    dtype = stored_dtype(codes[int(code)])
    compression = str(config.get("compression")).partition(":")[0]  # "zstd:9" names the level, too
    file = _SampleFile(store, name, compression, entry.get("chunk_bytes"), None)
    for samples in file.samples(entry.get("chunk_size")):
        if (np.diff(samples.offsets) % dtype.itemsize).any():
            raise samples.damaged(f"a sample is not an array of {dtype.name}")
        tokens = np.frombuffer(samples.data, dtype)
        yield TokenBatch(tokens=tokens, ends=samples.offsets[1:] // dtype.itemsize, input_bytes=samples.file_bytes)


class _SampleFile:
    """A file that is read once, from start to end. Holds one batch in memory, and 4 bytes for each sample.

    Args:
        compression: a key of `_OPEN`, or anything else for none.
        num_bytes: of the file, decompressed, as its index says.
        hashes: name of a hash to its hexadecimal value, as the index says; or anything else.

    Raises:
        BadSourceError: the index is impossible, or the file has another size.
    """

    def __init__(self, store: Store, name: str, compression: str, num_bytes: Any, hashes: Any) -> None:
        self._store, self._name, self._size = store, name, store.stat(name).size
        self._unpack = _OPEN.get(compression)
        if not isinstance(num_bytes, int):
            raise damaged(store, index_name(name), f"it gives {name} {num_bytes!r} bytes")
        if self._unpack is None and self._size != num_bytes:
            raise damaged(store, name, f"it has {self._size:,} bytes, its index says {num_bytes:,}")
        self._num_bytes, self._num_read = num_bytes, 0
        known = [hash_ for hash_ in _HASHES if isinstance(hashes, dict) and hash_ in hashes]
        self._hash = hashlib.new(known[0], usedforsecurity=False) if known else None
        self._said = str(hashes[known[0]]) if known else ""

    def samples(self, num_samples: Any) -> Iterator[_Samples]:
        """All samples, in batches.

        Args:
            num_samples: as the index says.

        Raises:
            BadSourceError: the file is damaged, which may show after its last sample.
        """
        with ExitStack() as stack:
            file: Any = stack.enter_context(self._store.open(self._name))
            if self._unpack is not None:
                file = stack.enter_context(self._unpack(file))
            count = int.from_bytes(self._take(file, 4), "little")
            if count != num_samples or 4 * (count + 2) > self._num_bytes:
                raise self._damaged(f"it begins with {count:,} samples, its index says {num_samples!r}")
            offsets = np.frombuffer(self._take(file, 4 * (count + 1)), "<u4").astype(np.int64)
            self._check_offsets(offsets)
            self._take(file, int(offsets[0]) - self._num_read)
            for first, last in batches_of(offsets):
                data = self._take(file, int(offsets[last] - offsets[first]))
                share = self._size * last // count - self._size * first // count
                places = offsets[first : last + 1] - offsets[first]
                yield _Samples(self._store, self._name, data, first, places, share)
            self._check_end(file)

    def _take(self, file: Any, count: int) -> bytes:
        """The next bytes. Memory is not allocated before the bytes are there, because a number may be damaged."""
        pieces, wanted = [], count
        while wanted and (piece := self._read(file, min(wanted, _PIECE))):
            pieces.append(piece)
            wanted -= len(piece)
            self._num_read += len(piece)
            if self._hash is not None:
                self._hash.update(piece)
        if wanted:
            raise self._damaged(f"it ends after {self._num_read:,} bytes, its index says {self._num_bytes:,}")
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _read(self, file: Any, count: int) -> bytes:
        try:
            return bytes(file.read(count))
        except (zstandard.ZstdError, zlib.error, OSError, EOFError) as error:
            if self._unpack is None:
                raise
            raise self._damaged(f"it cannot be decompressed: {error}") from error

    def _check_offsets(self, offsets: NDArray[np.int64]) -> None:
        if (np.diff(offsets) < 0).any() or int(offsets[0]) < self._num_read or int(offsets[-1]) != self._num_bytes:
            raise self._damaged(f"its samples do not lie one after another up to its end, byte {self._num_bytes:,}")

    def _check_end(self, file: Any) -> None:
        if self._read(file, 1):
            raise self._damaged(f"it has more bytes when decompressed than its index says, {self._num_bytes:,}")
        if self._hash is not None and self._hash.hexdigest() != self._said.lower():
            raise self._damaged(f"its {self._hash.name} is {self._hash.hexdigest()}, its index says {self._said}")

    def _damaged(self, reason: str) -> BadSourceError:
        return damaged(self._store, self._name, reason)


def mds_columns(store: Store, name: str, spec: TokenSpec) -> list[str]:
    """The columns of an MDS shard next to the ids.

    Raises:
        BadSourceError, UsageError: as `read_mds`.
    """
    entry = entry_of(store, name)
    column = _column(store, name, entry, spec)[0]
    of_rows = _row_columns(store, name, entry, column)
    return [other for at, other in enumerate(entry["column_names"]) if at != column and other not in of_rows]


def _row_columns(store: Store, name: str, entry: Json, ids: int) -> dict[str, tuple[int, str]]:
    """The columns that mark padding and the starts of documents, each with its number and encoding.

    Args:
        ids: the number of the column of ids.

    Raises:
        UsageError: one holds no arrays.
    """
    names, encodings = entry["column_names"], list(map(str, entry["column_encodings"]))
    found = {path: (names.index(path), encodings[names.index(path)]) for path in ROW_FIELDS if path in names}
    for path, (number, encoding) in found.items():
        if number != ids and not encoding.startswith("ndarray"):
            raise UsageError(
                f"{store.where(name)}: column {path!r} is stored as {encoding}, expected ndarray: a value for each id",
                hint="write the shards again with arrays of integers there, or without that column",
            )
    return {path: at for path, at in found.items() if at[0] != ids}


def _row_values(
    samples: _Samples, sizes: Sequence[int | None], column: int, encoding: str, spec: TokenSpec
) -> RowValues:
    starts, stops = _column_places(samples, sizes, column)
    places = zip(starts.tolist(), stops.tolist(), strict=True)
    lists = [_mds_ids(samples, low, high, encoding, replace(spec, dtype=None)) for low, high in places]
    return RowValues(
        values=np.concatenate(lists),
        counts=np.fromiter(map(len, lists), np.int64, len(lists)),
        is_missing=np.zeros(len(lists), np.bool_),
    )


def _kept_column(store: Store, name: str, entry: Json, path: str) -> tuple[int, str]:
    """The number of a column to keep, and its encoding.

    Raises:
        UsageError: there is no such column, or its values are neither text nor numbers.
    """
    names, encodings = entry["column_names"], list(map(str, entry["column_encodings"]))
    if path not in names:
        raise UsageError(
            f"{store.where(name)} has no column {path!r}; it has {', '.join(names)}",
            hint="name an existing column with --keep-field or --id-field, or leave the option out",
        )
    at = names.index(path)
    if encodings[at] not in {*_MDS_TEXTS, *_MDS_NUMBERS}:
        raise UsageError(
            f"column {path!r} of {store.where(name)} is stored as {encodings[at]}, which cannot be kept",
            hint=f"leave it out; what can be kept is {', '.join([*_MDS_TEXTS, *_MDS_NUMBERS])}",
        )
    return at, encodings[at]


def _kept_values(samples: _Samples, sizes: Sequence[int | None], column: int, encoding: str) -> list[Any]:
    """The values of a column: numbers, or bytes of texts."""
    starts, stops = _column_places(samples, sizes, column)
    found = [samples.data[low:high] for low, high in zip(starts.tolist(), stops.tolist(), strict=True)]
    if encoding in _MDS_TEXTS:
        return found
    dtype = np.dtype("int64" if encoding == "int" else encoding).newbyteorder("<")
    if (stops - starts != dtype.itemsize).any():
        raise samples.damaged(f"a value of a column is not stored as {encoding}")
    values: list[Any] = np.frombuffer(b"".join(found), dtype).tolist()
    return values


def _column(store: Store, name: str, entry: Json, spec: TokenSpec) -> tuple[int, str, list[int | None]]:
    """Which column holds the ids, its encoding, and the size of each column; None if it is not fixed."""
    names, encodings, sizes = (entry.get(f"column_{what}") for what in ("names", "encodings", "sizes"))
    if not (isinstance(names, list) and isinstance(encodings, list) and isinstance(sizes, list)) or (
        len({len(names), len(encodings), len(sizes)}) != 1
        or not all(isinstance(column, str) for column in names)
        or not all(size is None or (isinstance(size, int) and 0 <= size < 1 << 32) for size in sizes)
    ):
        raise damaged(store, index_name(name), f"it does not describe the columns of {name}")
    wanted = find_name(store.where(name), names, spec.field)
    at = names.index(wanted)
    encoding = str(encodings[at])
    if encoding.partition(":")[0] not in {"ndarray", "bytes"}:
        raise UsageError(
            f"{store.where(name)}: column {wanted!r} is stored as {encoding}, expected ndarray or bytes",
            hint="give the column that holds the ids with --token-field",
        )
    if spec.dtype is not None and encoding != "bytes":
        raise UsageError(
            f"--dtype is {spec.dtype}, and column {wanted!r} of {store.where(name)} says itself how ids are stored: "
            f"{encoding}",
            hint="leave out --dtype, which is for columns of bytes",
        )
    return at, encoding, sizes


def _column_places(
    samples: _Samples, sizes: Sequence[int | None], column: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where a column begins and ends in each sample."""
    begins, ends = samples.offsets[:-1], samples.offsets[1:]
    num_sizes = sizes.count(None)
    if (ends - begins < 4 * num_sizes).any():
        raise samples.damaged("a sample is shorter than the sizes of its columns")
    numbers = np.frombuffer(samples.data, np.uint8)
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
        number = samples.first + int(np.argmax(at != ends))
        raise samples.damaged(f"sample {number:,} has columns of another size than it has itself")
    return start, stop


def _check_width(samples: _Samples, documents: Sequence[NDArray[Any]]) -> None:
    """Refuse bytes that are no ids as int64, the usual type, but are ids as narrower integers.

    Raises:
        UsageError: with the option that says so.
    """
    for number, ids in enumerate(documents):
        if not len(ids) or int(ids.max()) < MAX_VOCABULARY:
            continue
        place = f"{samples.store.where(samples.name)}: the bytes of sample {samples.first + number:,}"
        for narrow in ("int32", "uint16"):
            found = ids.view(stored_dtype(narrow))
            if 0 <= int(found.min()) <= int(found.max()) < MAX_VOCABULARY:
                raise UsageError(
                    f"{place} are no ids as int64: one is {int(ids.max()):,}; as {narrow} all are below "
                    f"{MAX_VOCABULARY:,}",
                    hint=f"say with --dtype {narrow} how they are stored",
                )


def _mds_ids(samples: _Samples, low: int, high: int, encoding: str, spec: TokenSpec) -> NDArray[Any]:
    """The ids in one column of one sample, which lie at ``[low, high)`` of the data."""
    kind, *said = encoding.split(":")
    dtype = np.dtype("<i8") if spec.dtype is None else stored_dtype(spec.dtype)
    shape: list[int] | None = None
    if kind == "ndarray":
        if said:
            dtype = stored_dtype(said[0])
        elif high > low and samples.data[low] in _MDS_CODES:
            dtype, low = np.dtype(f"<{_MDS_CODES[samples.data[low]]}"), low + 1
        else:
            raise samples.damaged("an array is not one of integers")
        if len(said) < 2 and high > low:
            num_dimensions, width = samples.data[low] >> 2, _SHAPE_BYTES[samples.data[low] & 3]
            stop = low + 1 + num_dimensions * width
            if stop > high:
                raise samples.damaged("the shape of an array is longer than it")
            shape, low = np.frombuffer(samples.data, f"<u{width}", num_dimensions, low + 1).tolist(), stop
    count, rest = divmod(high - low, dtype.itemsize)
    if rest and kind == "bytes":
        raise UsageError(
            f"{samples.store.where(samples.name)}: {high - low:,} bytes of a sample are not ids of {dtype.itemsize} "
            f"bytes each",
            hint="say with --dtype how they are stored, such as --dtype int32",
        )
    if rest or (shape is not None and math.prod(shape) != count):
        raise samples.damaged(f"{high - low:,} bytes are not an array {shape or ''} of {dtype.name}")
    return np.frombuffer(samples.data, dtype, count, low)
