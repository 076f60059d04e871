"""The batches that a reader yields, and the errors of damaged files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import BadSourceError, UsageError
from tokshard.numbers import DTYPES
from tokshard.store import Store

BATCH_BYTES = 1 << 20
"""A reader yields as many whole documents as fit, or one that is larger: a batch that stays in the processor's cache
is processed three times as fast as one of 16 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSpec:
    """Facts about the files that the user gives, because the files do not.

    Args:
        field: the column of the ids; None for the first of the usual names.
        dtype: how ids are stored; None for the usual one of the format.
        delimiters: ids that end a document: EOS, and another id that the files use for it.
        narrowest: dtype that holds the vocabulary.
        max_document_bytes: the most bytes of ids of a document.
        kept: other columns to read, if files have columns.
        loss_field: the column that says which tokens are trained, or `loss.NO_LOSS`; None for the usual one.
        has_loss: whether the corpus has loss spans.
        has_weights: whether they have weights.
    """

    field: str | None
    dtype: str | None
    delimiters: tuple[int, ...]
    narrowest: str
    max_document_bytes: int
    kept: tuple[str, ...] = ()
    loss_field: str | None = None
    has_loss: bool = False
    has_weights: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBatch:
    """Consecutive documents of a file, as their ids were stored.

    Args:
        tokens: integers [tokens], of any width and sign: one document after another. Not checked.
        ends: int64 [documents], ascending: where each document ends in `tokens`; equal ends are empty documents.
        input_bytes: bytes of the file that the batch covers.
        is_stream: only delimiters end documents, so `ends` is the end of the batch.
        columns: name of a kept column to its values, one for each document.
        problems: index of a document to the reason and detail why its values cannot be kept.
        loss: float32 [tokens], the weight of each token in the loss; None if the corpus has no loss spans.
        cuts: int64 [cuts], ascending: where another document begins inside one of these, in `tokens`; None: nowhere.
        padding: int64 [documents]: ids of padding that are left out; None: none.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    input_bytes: int
    is_stream: bool = False
    columns: Mapping[str, Sequence[Any]] = field(default_factory=lambda: MappingProxyType({}))
    problems: Mapping[int, tuple[str, str]] = field(default_factory=lambda: MappingProxyType({}))
    loss: NDArray[np.float32] | None = None
    cuts: NDArray[np.int64] | None = None
    padding: NDArray[np.int64] | None = None


def stored_dtype(name: str) -> np.dtype[Any]:
    """The dtype of ids in a file, by its name.

    Raises:
        UsageError: ids are never stored with this dtype.
    """
    if name not in DTYPES:
        raise UsageError(f"ids stored as {name!r} cannot be read", hint=f"give one of {', '.join(DTYPES)} with --dtype")
    return np.dtype(name).newbyteorder("<")


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFile:
    """An array of numbers in a file, which is known to be so long.

    Args:
        start: byte at which they begin.
    """

    store: Store
    name: str
    dtype: np.dtype[Any]
    start: int = 0
    count: int

    @property
    def stop(self) -> int:
        """Byte at which they end."""
        return self.start + self.count * self.dtype.itemsize

    def read(self, low: int, high: int) -> NDArray[Any]:
        """The numbers ``[low, high)``.

        Raises:
            OSError: the file cannot be read.
        """
        if low == high:
            return np.empty(0, self.dtype)
        size = self.dtype.itemsize
        (data,) = self.store.read(self.name, [(self.start + low * size, (high - low) * size)])
        return np.frombuffer(data, self.dtype)


def damaged(store: Store, name: str, reason: str) -> BadSourceError:
    """The error for a file that violates its format."""
    return BadSourceError(
        f"{store.where(name)} is damaged: {reason}",
        hint="fetch the file again and start over with --force, or leave it out with --on-bad-source skip",
    )


def companion_size(store: Store, name: str, what: str) -> int:
    """The size of a file that another one needs.

    Raises:
        BadSourceError: it is missing.
    """
    try:
        return store.stat(name).size
    except OSError as error:
        raise BadSourceError(
            f"{store.where(name)}, {what}, cannot be read: {error.strerror or error}",
            hint="put it next to the file of ids",
        ) from error
