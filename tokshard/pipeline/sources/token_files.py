"""Files of documents that another tool has tokenized: how each is recognised and divided, and which reader reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from tokshard.interop.tokens import megatron
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec
from tokshard.pipeline.sources.companions import has_companions
from tokshard.pipeline.sources.division import ByteRange, Divisibility, Lines, Span
from tokshard.pipeline.sources.inputs import MEGATRON, Input
from tokshard.pipeline.sources.opening import store_of
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.store import Store, look_at

Read = Callable[[Store, str, int, int | None, TokenSpec], Iterator[TokenBatch]]
"""Yields the documents whose first byte lies in a range of a file; without an end, to the end of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFormat:
    """A format whose files are read by ranges of bytes.

    Args:
        suffix: of the files of ids.
        divisibility: of one file; `Lines` if it can be divided at any byte.
    """

    suffix: str
    read: Read
    divisibility: Divisibility


FORMATS: Mapping[str, TokenFormat] = {
    MEGATRON: TokenFormat(suffix=megatron.SUFFIX, read=megatron.read, divisibility=Lines()),
}


def format_of(store: Store, name: str) -> str | None:
    """The format of a file by its name and by what lies next to it; None if it is no file of ids."""
    for form, known in FORMATS.items():
        if name.endswith(known.suffix) and has_companions(store, name, form):
            return form
    return None


def prefix_file(argument: str) -> str | None:
    """The file that an argument without a file stands for, if there is one.

    Megatron-LM calls its two files by what their names have in common.
    """
    named = argument + megatron.SUFFIX
    return named if look_at(named) is not None else None


def token_chunks(input_: Input, span: Span, spec: RecordSpec) -> Iterator[TokenBatch]:
    """The documents in a part of a file of ids.

    Raises:
        SourceError: it is gone or damaged.
    """
    assert spec.tokens is not None
    store, name = store_of(input_.location)
    start, stop = (span.start, span.stop) if isinstance(span, ByteRange) else (0, None)
    return FORMATS[input_.format].read(store, name, start, stop, spec.tokens)
