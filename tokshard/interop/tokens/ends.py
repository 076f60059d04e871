"""Flat files of ids with an array of bounds next to them: datatrove's ``.ds``, and numpy arrays with offsets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tokshard.interop.tokens.batches import NumberFile, TokenBatch, TokenSpec, companion_size, damaged
from tokshard.interop.tokens.located import check_bounds, read_located
from tokshard.interop.tokens.loss import mask_file
from tokshard.store import Store

DS_SUFFIX, DS_INDEX_SUFFIX, LOSS_SUFFIX = ".ds", ".ds.index", ".loss"
NPY_SUFFIX, OFFSETS_SUFFIX = ".npy", ".offsets.npy"

NPY_MAGIC = b"\x93NUMPY"
_MAX_HEADER = 16_384
_HEADER = re.compile(
    rb"\{'descr': '([<|][iu][1248])', 'fortran_order': (?:True|False), 'shape': \((\d{1,18}),\), ?\}\s*"
)


def ds_index_name(name: str) -> str:
    """The index of a file of datatrove."""
    return name + ".index"


def offsets_name(name: str) -> str:
    """The offsets of a numpy array of ids."""
    return name.removesuffix(NPY_SUFFIX) + OFFSETS_SUFFIX


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsIndex:
    """Documents by where they end, counted in ids.

    Args:
        ids: the file of ids.
        ends: for each document, where it ends; after a leading 0 if `has_zero`.
    """

    ids: NumberFile
    ends: NumberFile
    has_zero: bool

    @property
    def num_documents(self) -> int:
        """As `DocumentIndex.num_documents`."""
        return self.ends.count - self.has_zero

    def bounds(self, start: int, stop: int) -> NDArray[np.int64]:
        """As `DocumentIndex.bounds`."""
        shift = int(self.has_zero)
        low = start - 1 + shift
        found = self.ends.read(max(0, low), stop + shift)
        most = min(self.ids.count + 1, np.iinfo(found.dtype).max)  # larger ones are wrong anyway
        bounds = np.minimum(found, most).astype(np.int64)
        if low < 0:
            bounds = np.concatenate([np.zeros(1, np.int64), bounds])
        places = self.ids.start + bounds * self.ids.dtype.itemsize
        return check_bounds(self.ends.store, self.ends.name, places, self.ids.stop, start)


def read_ds(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:
    """The documents of a file of datatrove (and nanotron): ids of 2 or 4 bytes, and the uint64 end of every document.

    Raises:
        BadSourceError: the files do not belong together.
    """
    index = ds_index_name(name)
    size, num_bytes = companion_size(store, index, "the index"), store.stat(name).size
    if size % 8:
        raise damaged(store, index, f"it has {size:,} bytes, expected a multiple of 8")
    ends = NumberFile(store=store, name=index, dtype=np.dtype("<u8"), count=size // 8)
    num_ids = int(ends.read(ends.count - 1, ends.count)[0]) if ends.count else 0
    width = next((width for width in (2, 4) if width * num_ids == num_bytes), None)
    if width is None:
        raise damaged(
            store,
            index,
            f"its last document ends at id {num_ids:,}; {num_bytes:,} bytes are not ids of 2 or 4 bytes each",
        )
    ids = NumberFile(store=store, name=name, dtype=np.dtype(f"<u{width}"), count=num_ids)
    found = EndsIndex(ids=ids, ends=ends, has_zero=False)
    mask = mask_file(store, name + LOSS_SUFFIX, num_ids=num_ids) if spec.has_loss else None
    return read_located(ids, index=found, start=start, stop=stop, mask=mask)


def read_npy(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:  # noqa: ARG001 -- the header says it all
    """The documents of a numpy array of ids, by the array of offsets next to it: a 0, and where each document ends.

    Raises:
        BadSourceError: the files do not belong together.
    """
    companion_size(store, offsets_name(name), "the offsets")
    ids, ends = npy_array(store, name), npy_array(store, offsets_name(name))
    whole = ends.read(0, 1).tolist() + ends.read(ends.count - 1, ends.count).tolist() if ends.count else []
    if whole != [0, ids.count]:
        raise damaged(
            store, ends.name, f"it holds offsets {whole}, expected them to begin with 0 and end with {ids.count:,}"
        )
    index = EndsIndex(ids=ids, ends=ends, has_zero=True)
    return read_located(ids, index=index, start=start, stop=stop)


def npy_array(store: Store, name: str) -> NumberFile:
    """The array in a ``.npy`` file. Reads only the header.

    Raises:
        BadSourceError: it is not an array of integers of one dimension, or the file has another size.
    """
    size = store.stat(name).size
    (head,) = store.read(name, [(0, min(size, _MAX_HEADER))])
    text = 10 if head[6:7] == b"\1" else 12  # the length of the header has two bytes in version 1, later four
    start = text + int.from_bytes(head[8:text], "little")
    found = _HEADER.fullmatch(head[text:start]) if head.startswith(NPY_MAGIC) else None
    if found is None:
        raise damaged(store, name, "it has no header of a numpy array of integers with one dimension")
    dtype, count = np.dtype(found[1].decode()), int(found[2])
    array = NumberFile(store=store, name=name, dtype=dtype, start=start, count=count)
    if array.stop != size:
        raise damaged(store, name, f"it has {size:,} bytes, expected {count:,} numbers as {dtype.name}")
    return array


def is_npy(store: Store, name: str) -> bool:
    """Whether a file begins as numpy's arrays do."""
    size = store.stat(name).size
    return store.read(name, [(0, min(size, len(NPY_MAGIC)))])[0] == NPY_MAGIC
