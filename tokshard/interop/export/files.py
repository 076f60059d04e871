"""The interface of an export format, and how documents are dealt to its files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.interop.export.documents import Documents
from tokshard.store import Store

LABELS, MASK = "labels", "loss_mask"
"""Ids, with -100 where nothing is trained; and weights."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusFacts:
    """The facts of a corpus that a format may need.

    Args:
        name: of the corpus: the last part of its location.
        dtype: of its token ids.
        vocab_size: 1 + the largest id of its tokenizer.
        columns: Arrow fields of the kept columns that are exported.
        loss: the name of the column that says which tokens are trained: `LABELS`, or `MASK` if spans have weights; or
            None.
        metadata: the corpus and tokenizer of the tokens, for formats that can store it.
        file_bytes: the size at which the user wants files to close; None: the format's.
    """

    name: str
    dtype: np.dtype[Any]
    vocab_size: int
    columns: tuple[pa.Field, ...]
    metadata: dict[str, str]
    loss: str | None = None
    file_bytes: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenFile:
    """A file of an export that is complete.

    Args:
        name: in the directory of the export.
    """

    name: str
    num_documents: int
    num_tokens: int
    num_bytes: int


class OpenFile(Protocol):
    """One file, or files that belong together, to which documents are appended."""

    @property
    def name(self) -> str:
        """In the directory of the export."""

    def write(self, documents: Documents) -> None:
        """Append documents."""

    def close(self) -> int:
        """Write the rest, and rename the file to its name. Returns its bytes, with those of files beside it."""

    def discard(self) -> None:
        """Drop the file. Never fails."""


@dataclass(frozen=True)
class Format(ABC):
    """A format of another loader, for one corpus.

    Args:
        dtype: of its token ids.

    Attributes:
        summary: its files, for the help of the command.
        holds_masks: whether it can say which tokens are trained; `holds_weights`: and with which weight.
        file_bytes: the size at which a file closes if the user does not say; None: one file, whatever its size.
        max_file_bytes: the largest file that its readers can address.
        is_marked: whether its readers find nothing until `finish` has written its index.
    """

    dtype: str
    summary: ClassVar[str]
    holds_masks: ClassVar[bool] = False
    holds_weights: ClassVar[bool] = False
    file_bytes: ClassVar[int | None] = None
    max_file_bytes: ClassVar[int | None] = None
    is_marked: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def of(cls, facts: CorpusFacts) -> Format:
        """The format for one corpus.

        Raises:
            UsageError: it cannot hold the corpus.
        """

    @property
    def max_document_tokens(self) -> int:
        """The longest document that it can hold."""
        return (1 << 31) - 1

    def sizes(self, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
        """Bytes that documents of these lengths take in a file: int64 [documents]."""
        return lengths * np.dtype(self.dtype).itemsize

    @abstractmethod
    def open(self, store: Store, number: int) -> OpenFile:
        """Begin file `number`, from 0 on."""

    def finish(self, store: Store, files: list[WrittenFile]) -> None:  # noqa: B027 -- most have none
        """Write the index of all files, if the format has one; it makes the export complete."""

    @abstractmethod
    def reading(self, location: str) -> str:
        """How to give the export to its own loader."""


class FileSequence:
    """Deals documents to files of at most so many bytes; a longer document gets a file of its own.

    Args:
        file_bytes: None: one file.
    """

    def __init__(self, target: Format, store: Store, *, file_bytes: int | None) -> None:
        self._target, self._store, self._file_bytes = target, store, file_bytes
        self._file: OpenFile | None = None
        self._filled = self._file_documents = self._file_tokens = 0
        self._num_documents = 0
        self.files: list[WrittenFile] = []

    def write(self, documents: Documents) -> None:
        """Append documents.

        Raises:
            UsageError: one is longer than the format can hold.
        """
        self._check_lengths(documents)
        ends = np.cumsum(self._target.sizes(documents.lengths))
        start = 0
        while start < len(documents):
            before = int(ends[start - 1]) if start else 0
            stop = len(documents)
            if self._file_bytes is not None:
                stop = int(np.searchsorted(ends, before + self._file_bytes - self._filled, "right"))
            if stop <= start:
                if self._filled:
                    self._close_file()
                    continue
                stop = start + 1
            if self._file is None:
                self._file = self._target.open(self._store, len(self.files))
            part = documents.part(start, stop)
            self._file.write(part)
            self._file_documents += len(part)
            self._file_tokens += len(part.tokens)
            self._filled += int(ends[stop - 1]) - before
            start = stop
        self._num_documents += len(documents)

    def finish(self) -> list[WrittenFile]:
        """Close the last file, and write the index of all files."""
        if self._file is not None:
            self._close_file()
        self._target.finish(self._store, self.files)
        return self.files

    def discard(self) -> None:
        """Drop the open file, and remove those that were written."""
        if self._file is not None:
            self._file.discard()
        self._store.delete(*(file.name for file in self.files))

    def _close_file(self) -> None:
        assert self._file is not None
        num_bytes = self._file.close()
        self.files.append(
            WrittenFile(
                name=self._file.name,
                num_documents=self._file_documents,
                num_tokens=self._file_tokens,
                num_bytes=num_bytes,
            )
        )
        self._file, self._filled, self._file_documents, self._file_tokens = None, 0, 0, 0

    def _check_lengths(self, documents: Documents) -> None:
        longest = int(documents.lengths.max(initial=0))
        if longest > self._target.max_document_tokens:
            place = self._num_documents + int(documents.lengths.argmax())
            raise UsageError(
                f"document {place} of the export has {longest:,} tokens; "
                f"this format holds at most {self._target.max_document_tokens:,}",
                hint="choose another --format",
            )
