"""What a format says of itself. Each has one `Format`, in the module that reads it; `formats` lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tokshard.interop.tokens.loss import LossField
from tokshard.pipeline.sources.division import Divisibility, Span, Stream
from tokshard.pipeline.sources.inputs import TEXT, Input, Needs
from tokshard.pipeline.sources.records import Chunk, RecordSpec
from tokshard.store import Entry, Store

Read = Callable[[Input, Span, RecordSpec], Iterator[tuple[int | None, Chunk]]]
"""Yields the chunks of a span, each with its place in the decompressed stream, or None where segments of a stream are
measured by what their chunks hold."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of inputs: which files are of it, what goes with them, how one is divided, and what reads it.

    Args:
        name: how inputs record it.
        reads: what its records are.
        read: raises SourceError if the input is gone or damaged, and UsageError if it has no such field.
        divide: how an input can be divided; the second argument is the text mode. It may read the input, and leaves
            damage to `read`.
        suffixes: of its files, in lower case, without that of a compression.
        is_choice: users may name it, as the format of all inputs.
        is_compressible: its files may be compressed as a whole.
        is_streamed: it can be read from a pipe.
        needs: the files without which one cannot be read, as `needed_names` spells them.
        helpers: patterns of names that are no inputs, because they only help to read others.
        omitted: suffix that an argument may lack.
        fits: whether a file with one of the suffixes is of this format; default: if the files that it needs are there.
        examine: returns the format of a file, which may be a variant of this one.
        arrange: returns those of the files of an argument that are to be read, in their order; the last argument says
            whether they are all files of a folder. It refuses what cannot be read as it is.
        columns: returns the names of the columns of an input, but those that are read: of ids, and of what is trained.
        loss: returns what says in an input which tokens are trained, if anything does. Its second argument is the
            column that the user gave.
        options: of an import, for what the files do not say themselves.
    """

    name: str
    read: Read
    reads: str = TEXT
    divide: Callable[[Input, str], Divisibility] = lambda *_: Stream()
    suffixes: tuple[str, ...] = ()
    is_choice: bool = True
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
    options: tuple[str, ...] = ()
