"""Files of documents that another tool has tokenized: how each is recognised and divided, and which reader reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from tokshard.errors import BadSourceError, TokshardError, UsageError
from tokshard.format.names import MANIFEST, SHARD_TABLE
from tokshard.format.opening import read_manifest
from tokshard.interop.tokens import ends, flat, megatron, sample_index, samples
from tokshard.interop.tokens.batches import TokenBatch, TokenSpec, damaged
from tokshard.pipeline.sources.companions import has_companions
from tokshard.pipeline.sources.division import ByteRange, Divisibility, Indivisible, Lines, Span
from tokshard.pipeline.sources.inputs import DATATROVE, FLAT, LITDATA, MDS, MEGATRON, NPY, Input
from tokshard.pipeline.sources.opening import store_of
from tokshard.pipeline.sources.records import RecordSpec
from tokshard.store import Entry, Store, look_at

Read = Callable[[Store, str, int, int | None, TokenSpec], Iterator[TokenBatch]]
"""Yields the documents whose first byte lies in a range of a file; without an end, to the end of the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFormat:
    """A format whose files are read by ranges of bytes.

    Args:
        suffixes: of the files of ids.
        divisibility: of one file; `Lines` if it can be divided at any byte.
    """

    suffixes: tuple[str, ...]
    read: Read
    divisibility: Divisibility


FORMATS: Mapping[str, TokenFormat] = {
    MEGATRON: TokenFormat(suffixes=(megatron.SUFFIX,), read=megatron.read, divisibility=Lines()),
    LITDATA: TokenFormat(suffixes=(samples.LITDATA_SUFFIX,), read=samples.read_litdata, divisibility=Indivisible()),
    DATATROVE: TokenFormat(suffixes=(ends.DS_SUFFIX,), read=ends.read_ds, divisibility=Lines()),
    MDS: TokenFormat(suffixes=samples.MDS_SUFFIXES, read=samples.read_mds, divisibility=Indivisible()),
    NPY: TokenFormat(suffixes=(ends.NPY_SUFFIX,), read=ends.read_npy, divisibility=Lines()),
    FLAT: TokenFormat(suffixes=(ends.NPY_SUFFIX,), read=flat.read, divisibility=Lines()),
}
"""In the order in which they are tried."""


def format_of(store: Store, name: str) -> str | None:
    """The format of a file by its name and by what lies next to it; None if it is no file of ids."""
    for form, known in FORMATS.items():
        if name.endswith(known.suffixes) and has_companions(store, name, form):
            return form
    return None


def in_listed_order(store: Store, entries: Iterable[Entry]) -> Iterator[Entry]:
    """Files in their order, but those that an ``index.json`` lists in the order of that: ``chunk-0-10`` is not third.

    Raises:
        BadSourceError: an index is damaged, or lists a file that is not there; a file of ids or its index is missing.
        UsageError: a folder is a corpus of tokshard.
    """
    found = foreign_files(store, entries)
    names = {entry.name for entry in found}
    _check_pairs(store, names)
    places = {entry.name: place for place, entry in enumerate(found)}
    ordered = list(found)
    needing = _folders_that_need_an_index(names)
    for entry in found:
        folder, slash, base = entry.name.rpartition("/")
        if base != sample_index.INDEX:
            continue
        try:
            index = sample_index.read_index(store, entry.name)
        except BadSourceError:
            if folder in needing:
                raise
            continue  # it belongs to something else, as one does that lists nothing that is there
        listed, missing = [], []
        for either in sample_index.listed_names(index):
            there = [places[folder + slash + name] for name in either if folder + slash + name in places]
            listed += there
            missing += [] if there else [either[0] if either else "a file"]
        if missing and (listed or folder in needing):
            raise damaged(store, entry.name, f"it lists {missing[0]}, which is not there")
        for place, file in zip(sorted(listed), listed, strict=True):
            ordered[place] = found[file]
    return iter(ordered)


def foreign_files(store: Store, entries: Iterable[Entry]) -> list[Entry]:
    """Files without those that hold what another one holds: MDS can keep a shard both compressed and not.

    Raises:
        UsageError: they are those of a corpus of tokshard.
    """
    found = list(entries)
    names = {entry.name for entry in found}
    _check_no_corpus(store, names)
    plain, *packed = samples.MDS_SUFFIXES
    return [
        entry
        for entry in found
        if not any(
            entry.name.endswith(suffix) and entry.name.removesuffix(suffix) + plain in names for suffix in packed
        )
    ]


def _folders_that_need_an_index(names: set[str]) -> set[str]:
    """The folders with files that cannot be read without an ``index.json``."""
    alone = (
        name
        for name in names
        if name.endswith(samples.MDS_SUFFIXES)
        or (name.endswith(samples.LITDATA_SUFFIX) and megatron.index_name(name) not in names)
    )
    return {name.rpartition("/")[0] for name in alone}


def _check_no_corpus(store: Store, names: set[str]) -> None:
    """Refuse a corpus of tokshard, of which an import would lose sources, records and kept columns.

    Raises:
        UsageError: with its folder.
    """
    parts = (name.rpartition("/") for name in names)
    for place in sorted({folder for folder, _, base in parts if base in {MANIFEST, SHARD_TABLE}}):
        folder = store.below(place) if place else store
        try:
            read_manifest(folder)
        except (OSError, TokshardError):  # another tool has a file of this name, too
            continue
        raise UsageError(
            f"{folder.location} is a corpus of tokshard, and not tokens of another tool",
            hint=f"use 'tokshard copy {folder.location} --out DIR', which can also join several, or leave it out",
        )


def _check_pairs(store: Store, names: set[str]) -> None:
    """Refuse a directory that lacks one of two files that belong together: its documents would be missing.

    Raises:
        BadSourceError: with the one that is there.
    """
    for ids, index in ((megatron.SUFFIX, megatron.INDEX_SUFFIX), (ends.DS_SUFFIX, ends.DS_INDEX_SUFFIX)):
        found = {suffix: {n.removesuffix(suffix) for n in names if n.endswith(suffix)} for suffix in (ids, index)}
        if not found[index]:
            continue  # files of another format may end in the same
        for stem in sorted(found[ids] ^ found[index]):
            there, missing = (ids, index) if stem in found[ids] else (index, ids)
            if there == ids and any(has_companions(store, stem + ids, form) for form in (MEGATRON, LITDATA, DATATROVE)):
                continue
            raise BadSourceError(
                f"{store.where(stem + there)} has no {stem.rpartition('/')[2]}{missing} next to it",
                hint="fetch the missing file, or give the files to read instead of their directory",
            )


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
