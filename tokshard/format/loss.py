"""Loss spans: the targets of documents, as columns of a shard. Pure.

The column `LOSS` has start, stop, start, stop, ... for each document, counted from its first token. Token ``t`` of a
document is a *target* if it lies in a span: a model is trained to predict it from the tokens before it. So nothing is
shifted on disk, and token 0, which nothing comes before, is never a target. `WEIGHTS` has one number for each span.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.content import TokenHash, hash_tokens

LOSS = "loss"
WEIGHTS = "loss_weights"
LOSS_COLUMNS: Mapping[str, str] = {LOSS: "spans", WEIGHTS: "weights"}
"""The columns of loss spans, name to type. They come before the kept columns."""

_TOKENS_AT_ONCE = 1 << 18
_OFFSET_BYTES = 8
_NUMBER_BYTES = 4


def has_spans(columns: Mapping[str, str]) -> bool:
    """Whether the columns of a corpus say which tokens are targets; if not, all but each document's first are."""
    return columns.get(LOSS) == LOSS_COLUMNS[LOSS]


def has_weights(columns: Mapping[str, str]) -> bool:
    """Whether the columns of a corpus give each span a weight."""
    return columns.get(WEIGHTS) == LOSS_COLUMNS[WEIGHTS]


def kept_columns(columns: Mapping[str, str]) -> dict[str, str]:
    """The kept columns of a corpus, name to type: all but the columns of loss spans."""
    return {name: kind for name, kind in columns.items() if kind not in LOSS_COLUMNS.values()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Targets:
    """The targets of the documents of one record batch, or of one document.

    Args:
        borders: int64 [2 spans]: start, stop, start, stop, ..., counted from the first token of the batch.
        weights: float32 [spans], positive; None: every target weighs 1.
    """

    borders: NDArray[np.int64]
    weights: NDArray[np.float32] | None = None

    @property
    def count(self) -> int:
        """The number of targets."""
        return int((self.borders[1::2] - self.borders[::2]).sum())

    def of_tokens(self, start: int, stop: int) -> NDArray[np.float32]:
        """The weight of each of the tokens ``[start, stop)``, 0 if it is not a target: float32 [tokens]."""
        first, last = np.searchsorted(self.borders, start, "right"), np.searchsorted(self.borders, stop)
        spans = np.arange(first, last + 1)  # an odd number of borders before a token: it lies in span number // 2
        is_inside = spans % 2 == 1
        values = np.zeros(len(spans), np.float32)
        values[is_inside] = 1 if self.weights is None else self.weights[spans[is_inside] // 2]
        return np.repeat(values, np.diff(self.borders[first:last], prepend=start, append=stop))

    def hashed(self, num_tokens: int) -> TokenHash:
        """The hash of the weights of the tokens from 0 on, each as the 32 bits of its float."""
        found = TokenHash()
        for start in range(0, num_tokens, _TOKENS_AT_ONCE):
            weights = self.of_tokens(start, min(start + _TOKENS_AT_ONCE, num_tokens))
            found = found.then(hash_tokens(weights.view(np.uint32)))
        return found


def spans_of(
    weights: NDArray[np.float32], ends: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.uint32], NDArray[np.float32]]:
    """The spans of some documents, from the weight of each token.

    Args:
        weights: float32 [tokens], 0 where a token is not a target, as at the first of each document.
        ends: int64 [documents]: where each document ends in the tokens.

    Returns:
        int64 [documents + 1], the number of spans before each document; uint32 [2 spans], the values of the column
        `LOSS`; float32 [spans], the values of the column `WEIGHTS`.
    """
    changes = np.flatnonzero(np.diff(weights, prepend=np.float32(0), append=np.float32(0)))
    is_start = np.append(weights, np.float32(0))[changes] > 0
    starts, stops = changes[is_start], changes[1:][is_start[:-1]]
    of_span = np.searchsorted(ends, starts, "right")
    firsts = np.concatenate([np.zeros(1, np.int64), ends])[of_span]
    values = np.stack([starts - firsts, stops - firsts], axis=1).reshape(-1).astype(np.uint32)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(of_span, minlength=len(ends)))])
    return offsets, values, weights[starts]


def all_but_first(offsets: NDArray[np.int64]) -> NDArray[np.int64]:
    """The borders, as in `Targets`, of documents in which every token but the first is a target.

    Args:
        offsets: int64 [documents + 1]: where each document starts, and where the last one ends.
    """
    borders = np.stack([offsets[:-1] + 1, offsets[1:]], axis=1)
    return borders[borders[:, 0] < borders[:, 1]].reshape(-1)


def batch_targets(
    spans: tuple[NDArray[np.int64], NDArray[np.uint32]],
    weights: tuple[NDArray[np.int64], NDArray[np.float32]] | None = None,
    *,
    offsets: NDArray[np.int64],
) -> Targets:
    """The targets of one record batch, checked.

    Args:
        spans: offsets int64 [documents + 1] and values of the column `LOSS`.
        weights: offsets and values of the column `WEIGHTS`, if the corpus has it.
        offsets: where the tokens of each document start in the batch: int64 [documents + 1], from 0.

    Raises:
        ValueError: the columns do not hold spans of these documents.
    """
    ends, values = spans
    counts = _counts(ends, len(values), LOSS)
    if len(counts) != len(offsets) - 1:
        raise ValueError(f"{LOSS} has {len(counts)} documents, expected {len(offsets) - 1}")
    if bool((counts % 2).any()):
        raise ValueError(f"{LOSS} of document {int(np.argmax(counts % 2))} has an odd number of values")
    document = np.repeat(np.arange(len(counts)), counts)
    borders = values.astype(np.int64) + offsets[document]
    starts, stops, of_span = borders[::2], borders[1::2], document[::2]
    is_wrong = (values[::2] == 0) | (starts >= stops) | (stops > offsets[of_span + 1])
    before = np.where(of_span[1:] == of_span[:-1], stops[:-1], -1)
    is_wrong[1:] |= starts[1:] < before if weights is not None else starts[1:] <= before
    if bool(is_wrong.any()):
        wrong = int(np.argmax(is_wrong))
        start, stop, number = int(values[2 * wrong]), int(values[2 * wrong + 1]), int(of_span[wrong])
        length = int(offsets[number + 1] - offsets[number])
        raise ValueError(
            f"{LOSS} of document {number} has the span {start} to {stop}, expected ascending spans that do not touch, "
            f"within 1 to {length}"
        )
    if weights is None:
        return Targets(borders=borders)
    found = _counts(weights[0], len(weights[1]), WEIGHTS)
    if not np.array_equal(found, counts // 2):
        raise ValueError(f"{WEIGHTS} has not one number for each span")
    if not bool((np.isfinite(weights[1]) & (weights[1] > 0)).all()):
        raise ValueError(f"{WEIGHTS} has a number that is not above 0 and finite")
    return Targets(borders=borders, weights=weights[1])


def _counts(ends: NDArray[np.int64], length: int, column: str) -> NDArray[np.int64]:
    counts = np.diff(ends)
    if int(ends[0]) != 0 or int(ends[-1]) != length or int(counts.min(initial=0)) < 0:
        raise ValueError(f"offsets of {column} must ascend from 0 to {length}")
    return counts


def num_spans(section_bytes: int, num_documents: int, *, is_weighted: bool) -> int:
    """The number of spans of a record batch, from the size of its section, see `stored_hash`."""
    num_lists = 1 + is_weighted
    values = section_bytes - num_lists * _OFFSET_BYTES * (num_documents + 1)
    return values // (_NUMBER_BYTES * (2 + is_weighted))


def stored_hash(offsets: NDArray[np.int64], section: bytes | memoryview) -> int:
    """The CRC-32 by which a reader checks the spans of one record batch. It covers the offsets of the tokens, too.

    Args:
        offsets: where the tokens of each document start in the batch: int64 [documents + 1], from 0.
        section: the bytes of the file from the offsets of `LOSS` to the end of the last value of loss spans.
    """
    return zlib.crc32(section, zlib.crc32(np.ascontiguousarray(offsets, "<i8").data))


def read_section(content: bytes | memoryview, offsets: NDArray[np.int64], *, is_weighted: bool) -> Targets:
    """The targets of one record batch from the bytes of a file, checked as `batch_targets` does.

    Args:
        content: as in `stored_hash`.
        offsets: where the tokens of each document start in the batch: int64 [documents + 1], from 0.
        is_weighted: whether the corpus has `WEIGHTS`.

    Raises:
        ValueError: the bytes do not hold spans of these documents.
    """
    rows = len(offsets) - 1
    spans, rest = _list_at(content, rows, np.dtype("<u4"))
    weights, rest = _list_at(rest, rows, np.dtype("<f4")) if is_weighted else (None, rest)
    if len(rest):
        raise ValueError(f"{LOSS} has {len(rest)} bytes more than its offsets say")
    return batch_targets(spans, weights, offsets=offsets)


def _list_at(
    content: bytes | memoryview, rows: int, dtype: np.dtype[Any]
) -> tuple[tuple[NDArray[np.int64], NDArray[Any]], memoryview]:
    """Offsets and values of a column of lists, and what follows them."""
    held, start = memoryview(content), _OFFSET_BYTES * (rows + 1)
    if len(held) < start:
        raise ValueError(f"{LOSS} has {len(held)} bytes for the offsets of {rows} documents")
    ends = np.frombuffer(held, "<i8", count=rows + 1)
    stop = start + _NUMBER_BYTES * int(ends[-1])
    if not start <= stop <= len(held):
        raise ValueError(f"{LOSS} has {len(held)} bytes, its offsets ask for {stop}")
    values = np.frombuffer(held[start:stop], dtype)
    return (ends, values), held[stop:]
