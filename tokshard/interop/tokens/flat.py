"""Flat files of ids, in which only a delimiter ends documents, such as the memory maps of OLMo and dolma.

They have no header, but one of numpy is accepted.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import SourceError, UsageError
from tokshard.interop.tokens.batches import BATCH_BYTES, NumberFile, TokenBatch, TokenSpec, damaged, stored_dtype
from tokshard.interop.tokens.ends import is_npy, npy_array
from tokshard.interop.tokens.loss import mask_file, mask_weights
from tokshard.numbers import ceil_div
from tokshard.store import Store

IDS, MASK = "token_ids", "labels_mask"
"""In the names of OLMo-core's files of ids, and of the masks beside them."""

_NUM_LOOKED_AT = 4_096
"""Ids at the start of a file that show a wrong width."""


def read(store: Store, name: str, start: int, stop: int | None, spec: TokenSpec) -> Iterator[TokenBatch]:
    """The documents whose first byte lies in ``[start, stop)`` of a file; with `stop` None, to the end.

    A batch ends after a delimiter, or at the end of the file.

    Raises:
        BadSourceError: the file is not an array of ids.
        SourceError: the delimiter does not occur in the file, or a document is too large.
    """
    ids = _ids(store, name, spec)
    width = ids.dtype.itemsize
    first = _first_at(ids, max(0, ceil_div(start - ids.start, width)), spec)
    last = ids.count if stop is None else max(0, ceil_div(stop - ids.start, width))
    mask = mask_file(store, mask_name(name), num_ids=ids.count) if spec.has_loss else None
    return _documents(ids, first, last, spec, mask) if first < last else iter(())


def _ids(store: Store, name: str, spec: TokenSpec) -> NumberFile:
    if is_npy(store, name):
        array = npy_array(store, name)
        if spec.dtype not in (None, array.dtype.name):
            raise UsageError(
                f"--dtype is {spec.dtype}, and the header of {store.where(name)} says {array.dtype.name}",
                hint="leave out --dtype, which is for files without a header",
            )
        return array
    size, dtype = store.stat(name).size, stored_dtype(spec.dtype or spec.narrowest)
    if size % dtype.itemsize:
        raise damaged(store, name, f"it has {size:,} bytes, and an id takes {dtype.itemsize} (--dtype)")
    ids = NumberFile(store=store, name=name, dtype=dtype, count=size // dtype.itemsize)
    if spec.dtype is None:
        _check_width(ids)
    return ids


def _check_width(ids: NumberFile) -> None:
    """Refuse ids that are stored wider than they are read: all lie in the vocabulary, and every second one is 0.

    Raises:
        UsageError: the first ids are like that.
    """
    count = min(ids.count, _NUM_LOOKED_AT) // 8 * 8
    first = ids.read(0, count).reshape(-1, 8)
    if count < _NUM_LOOKED_AT // 8 or not first.any():
        return
    for wider in (8, 4, 2):  # of these ids at a time, only the first is not 0
        if wider * ids.dtype.itemsize <= 8 and not first.reshape(-1, wider)[:, 1:].any():
            name = f"uint{8 * wider * ids.dtype.itemsize}"
            raise UsageError(
                f"{ids.store.where(ids.name)} looks like ids stored as {name}: as {ids.dtype.name}, which holds the "
                f"vocabulary, {wider - 1} of every {wider} are 0",
                hint=f"give --dtype {name}, or --dtype {ids.dtype.name} if that is right",
            )


def _first_at(ids: NumberFile, place: int, spec: TokenSpec) -> int:
    """The first id at `place` or after it with which a document begins; the number of ids if there is none."""
    if place == 0:
        return 0
    for at, piece in _pieces(ids, place - 1):
        found = _ends(piece, spec)
        if len(found):
            return at + int(found[0])
    return ids.count


def mask_name(name: str) -> str:
    """The name of the loss mask of a file of ids, by OLMo-core's names."""
    folder, slash, base = name.rpartition("/")
    return folder + slash + base.replace(IDS, MASK)


def _documents(
    ids: NumberFile, first: int, last: int, spec: TokenSpec, mask: NumberFile | None
) -> Iterator[TokenBatch]:
    """Documents from `first` on, up to the one that begins at `last` or after it."""
    held: list[NDArray[Any]] = []
    start = first
    for at, piece in _pieces(ids, first):
        ends = _ends(piece, spec)
        # the document that begins in [first, last) last ends at the first delimiter from last - 1 on
        beyond = np.searchsorted(ends, last - at)
        is_last = beyond < len(ends)
        cut = int(ends[beyond]) if is_last else int(ends[-1]) if len(ends) else 0
        if cut:
            yield _batch([*held, piece[:cut]], start, mask)
            held, start = [], at + cut
        if is_last:
            return
        if cut < len(piece):
            held.append(piece[cut:])
        if sum(part.nbytes for part in held) > spec.max_document_bytes:
            raise SourceError(
                f"{ids.store.where(ids.name)} has no delimiter in {spec.max_document_bytes:,} bytes; looked for id "
                f"{' and '.join(map(str, spec.delimiters))} stored as {ids.dtype.name}",
                hint="say how the file was made with --source-eos and --dtype, or allow longer documents with "
                "--max-document-bytes",
            )
    if held and start == 0:
        raise SourceError(
            f"{ids.store.where(ids.name)} has {ids.count:,} ids and no delimiter among them; looked for id "
            f"{' and '.join(map(str, spec.delimiters))} stored as {ids.dtype.name}, and the last id is "
            f"{held[-1][-1]:,}",
            hint="give the id that ends documents with --source-eos; a file that is one document needs its offsets, "
            f"0 and {ids.count}, as NAME.offsets.npy beside NAME.npy",
        )
    if held:
        yield _batch(held, start, mask)


def _batch(parts: list[NDArray[Any]], start: int, mask: NumberFile | None) -> TokenBatch:
    tokens = parts[0] if len(parts) == 1 else np.concatenate(parts)
    return TokenBatch(
        tokens=tokens,
        ends=np.array([len(tokens)], np.int64),
        input_bytes=tokens.nbytes,
        is_stream=True,
        loss=None if mask is None else mask_weights(mask, start, start + len(tokens)),
    )


def _pieces(ids: NumberFile, start: int) -> Iterator[tuple[int, NDArray[Any]]]:
    """The ids from `start` on, in pieces, each with the place of its first."""
    step = max(1, BATCH_BYTES // ids.dtype.itemsize)
    for at in range(start, ids.count, step):
        yield at, ids.read(at, min(at + step, ids.count))


def _ends(tokens: NDArray[Any], spec: TokenSpec) -> NDArray[np.int64]:
    """Where the delimiters end."""
    is_delimiter = tokens == spec.delimiters[0]
    for other in spec.delimiters[1:]:
        is_delimiter |= tokens == other
    return np.flatnonzero(is_delimiter) + 1
