"""The description of a format. Each format has one `Format`, in the module that reads it; `formats` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokshard.interop.tokens.loss import LossField
from tokshard.pipeline.options import TEXT
from tokshard.pipeline.sources.division import STREAM, Divisibility, Span
from tokshard.pipeline.sources.inputs import Input, Needs
from tokshard.pipeline.sources.records import Chunk, RecordSpec
from tokshard.store import Entry, Store

Read = Callable[[Input, Span, RecordSpec], Iterator[tuple[int | None, Chunk]]]
"""Yields the chunks of a span, each with its place in the decompressed stream. The place is None if segments are
measured by the contents of their chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of inputs: which files have it, which files they need, how one is divided, and the reader.

    Args:
        name: its name in the table of inputs.
        reads: the kind of its records.
        read: raises SourceError if the input is gone or damaged, and UsageError if it has no such field.
        divide: how an input can be divided; the second argument is the text mode. It may read the input, and leaves
            damage to `read`.
        suffixes: suffixes of its files, in lower case, without the suffix of a compression.
        is_compressible: whether its files may be compressed as a whole.
        is_streamed: whether it can be read from a pipe.
        needs: files that reading one requires, as in `needed_names`.
        helpers: patterns of names that are not inputs, because they only help to read others.
        omitted: suffix that an argument may lack.
        fits: whether a file with one of the suffixes has this format; default: whether the files that it needs exist.
        examine: returns the format of a file, which may be a variant of this one.
        arrange: returns the files of an argument to read, in order; the last argument says whether they are all files
            of a folder. It refuses folders that cannot be read as they are.
        columns: returns the names of the other columns of an input, besides those of ids and of the loss.
        loss: returns the mask or labels of an input, if it has any. Its second argument is the column that the user
            gave.
    """

    name: str
    read: Read
    reads: str = TEXT
    divide: Callable[[Input, str], Divisibility] = lambda *_: STREAM
    suffixes: tuple[str, ...] = ()
    is_compressible: bool = False
    is_streamed: bool = True
    needs: Needs = ()
    helpers: tuple[str, ...] = ()
    omitted: str = ""
    fits: Callable[[Store, str], bool] | None = None
    examine: Callable[[Store, Entry], Format] | None = None
    arrange: Callable[[Store, Sequence[Entry], bool], Sequence[Entry]] | None = None
    columns: Callable[[Input, RecordSpec], Sequence[str]] | None = None
    loss: Callable[[Input, str | None], LossField | None] | None = None
