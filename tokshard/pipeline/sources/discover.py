"""From arguments to inputs: each argument is listed once, and the formats choose their files."""

from __future__ import annotations

import fnmatch
import itertools
import os
from array import array
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tokshard.errors import BadSourceError, UsageError
from tokshard.pipeline.options import FORMATS, TEXT
from tokshard.pipeline.sources.formats import formats_of
from tokshard.pipeline.sources.inputs import PINNED, InputRow, InputTable, RecordSource, input_table, read_once_note
from tokshard.pipeline.sources.listing import Listing, is_glob, listing_of
from tokshard.pipeline.sources.opening import needed_names, with_needed
from tokshard.pipeline.sources.protocol import Format
from tokshard.store import (
    Entry,
    NotRegularFileError,
    Store,
    absolute_location,
    is_uri,
    look_at,
    real_location,
    without_secrets,
)

COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The inputs of a build.

    Args:
        arguments: the label of each argument: its last part, with as many folders as tell it from the others; or a hub
            id with its revision.
        ignored: suffix to count of files in directories whose format is not known; `HIDDEN` to the count of hidden
            entries.
        notes: notes for the user, a line each.
    """

    inputs: InputTable
    arguments: tuple[str, ...]
    ignored: Mapping[str, int]
    notes: tuple[str, ...] = ()


def discover(
    arguments: Sequence[str | RecordSource],
    *,
    input_format: str | None,
    reads: str = TEXT,
    keep_unreadable: bool = False,
) -> Discovery:
    """Find the inputs: arguments as given, and inside a directory or glob bytewise by relative path.

    Takes about 15 us per local file and, besides the result, about 100 bytes for each file of the largest directory.

    Args:
        input_format: read every file as this format.
        reads: what the build reads; it selects the formats.
        keep_unreadable: list a file without readable facts, such as a broken link, as an unreadable input.

    Raises:
        UsageError: an argument is missing, matches nothing, has an unknown format, or names a file twice.
        SourceError: a file or folder cannot be read.
    """
    formats = formats_of(reads)
    omitted = [form.omitted for form in formats if form.omitted]
    roots: list[str] = []
    labels: list[str] = []
    folders: list[list[str]] = []
    iterables: list[Any] = []
    ignored: Counter[str] = Counter()
    identities = array("q")  # a hash for each file

    def inputs_of(number: int, argument: str | RecordSource) -> Iterator[InputRow]:
        passed_over: Counter[str] = Counter()
        listing = listing_of(argument, omitted=omitted, ignored=passed_over)
        labels.append(listing.label)
        is_path = not (listing.is_read_once or listing.is_pinned)
        place = absolute_location(str(argument)) if is_path else ""
        above = os.path.dirname(without_secrets(place) if is_uri(place) else place)
        folders.append(above.split("/"))
        roots.append(listing.root)
        if isinstance(argument, RecordSource):
            if any(other is argument.records for other in iterables):
                raise UsageError(
                    f"{argument} is given twice, and it can be read once only", hint="give every source once"
                )
            iterables.append(argument.records)
        if not is_uri(listing.root):
            _check_utf_8(os.path.abspath(listing.root), listing.root)
        before = len(identities)
        for entry, guess, compression in _chosen(listing, formats, input_format, passed_over):
            try:
                facts, form = _examined(listing, entry, guess)
            except BadSourceError:
                if not keep_unreadable:
                    raise
                facts, form = Entry(entry.name, identity=listing.location(entry)), guess
            identities.append(hash(listing.location(entry) if listing.is_pinned else facts.identity))
            version = PINNED if listing.is_pinned and facts.version else facts.version
            path = "" if listing.is_file else entry.name
            yield number, path, facts.size, version, (form.name, compression, form.needs)
        if len(identities) == before:
            shown = ", ".join(f"{count} x {suffix}" for suffix, count in sorted(passed_over.items()))
            known = [suffix for form in formats for suffix in form.suffixes]
            known += [f"{known[0]}{suffix}" for suffix in COMPRESSIONS if formats[0].is_compressible]
            has_none = "matches no file" if is_glob(str(argument)) and not shown else "holds no input"
            raise UsageError(
                f"{argument} {has_none}" + (f"; it has {shown}" if shown else ""),
                hint=f"known suffixes are {', '.join(dict.fromkeys(known))}; --format reads every file as one format"
                + _about_indexes(formats),
            )
        ignored.update(passed_over)

    found = itertools.chain.from_iterable(map(inputs_of, itertools.count(), arguments))
    inputs = input_table(found, roots)
    _check_distinct(inputs, identities)
    notes = tuple(map(read_once_note, dict.fromkeys(inputs.read_once)))
    told_apart = _told_apart(labels, folders)
    return Discovery(inputs=inputs, arguments=told_apart, ignored=dict(sorted(ignored.items())), notes=notes)


def _told_apart(labels: Sequence[str], folders: Sequence[list[str]]) -> tuple[str, ...]:
    """Labels of which equal ones begin with the last of the folders above them."""
    found = list(labels)
    while any(folders):
        counts = Counter(found)
        equal = [index for index, label in enumerate(found) if counts[label] > 1 and folders[index]]
        if not equal:
            break
        for index in equal:
            found[index] = "/".join(filter(None, [folders[index].pop(), found[index]]))
    return tuple(found)


def _chosen(
    listing: Listing, formats: Sequence[Format], input_format: str | None, passed_over: Counter[str]
) -> Iterator[tuple[Entry, Format, str | None]]:
    """The files of a listing that are inputs, with format and compression. Others are counted by suffix.

    Raises:
        UsageError: the user named a file of no known format.
    """
    entries, reads = listing.entries, formats[0].reads
    if not listing.is_named:
        for arrange in [form.arrange for form in reversed(formats) if form.arrange is not None]:
            entries = arrange(listing.store, list(entries), listing.is_folder)
    helpers = [pattern for form in formats for pattern in form.helpers]
    for entry in entries:
        is_helper = any(fnmatch.fnmatchcase(f"/{entry.name}", pattern) for pattern in helpers)
        if is_helper and not listing.is_file:
            continue
        kind = None
        if reads == TEXT or not listing.is_read_once:
            kind = _kind_of(listing.store, entry.name, formats, listing.form or input_format)
        if kind is not None:
            yield entry, *kind
            continue
        location = listing.location(entry)
        if not listing.is_named:
            suffix = os.path.splitext(location)[1].encode(errors="backslashreplace").decode()  # it may not be UTF-8
            passed_over[suffix or "no suffix"] += 1
        elif is_helper:
            raise UsageError(
                f"{location} holds no ids: it helps to read another file",
                hint="give that file, or the directory of both",
            )
        elif listing.is_read_once and reads != TEXT:
            raise UsageError(f"{reads} cannot be read from {location}", hint="write them to a file first")
        else:
            raise UsageError(
                f"{location}: the name does not tell the format",
                hint=f"give --format, one of {', '.join(FORMATS[reads])}; unpack an archive first"
                + _about_indexes(formats),
            )


def _about_indexes(formats: Sequence[Format]) -> str:
    return (
        "; some are read only with their index beside them, such as .idx or index.json"
        if any(form.needs for form in formats)
        else ""
    )


def _kind_of(
    store: Store, name: str, formats: Sequence[Format], input_format: str | None
) -> tuple[Format, str | None] | None:
    name_in_lower_case = name.lower()
    stem, suffix = os.path.splitext(name_in_lower_case)
    compression = COMPRESSIONS.get(suffix)
    for form in formats:
        if input_format is not None:
            if form.name == input_format:
                return form, compression if form.is_compressible else None
        elif form.is_compressible and compression and stem.endswith(form.suffixes):
            return form, compression
        elif name_in_lower_case.endswith(form.suffixes) and _fits(form, store, name):
            return form, None
    return None


def _fits(form: Format, store: Store, name: str) -> bool:
    """Whether a file with a suffix of a format has that format."""
    if form.fits is not None:
        return form.fits(store, name)
    try:
        return not form.needs or all(store.stat(needed) for needed in needed_names(name, form.needs))
    except OSError:
        return False


def _examined(listing: Listing, entry: Entry, form: Format) -> tuple[Entry, Format]:
    """The facts of a file, and its format, which may be a variant of the format in its name.

    Raises:
        UsageError: a build cannot read it.
        BadSourceError: it cannot be read now.
    """
    if listing.is_read_once and not form.is_streamed:
        raise UsageError(
            f"{form.name} cannot be read from standard input: its metadata is at its end",
            hint="write it to a file first",
        )
    store = listing.store
    if not entry.name.isascii():
        _check_utf_8(entry.name, store.where(entry.name))
    try:
        facts = entry if entry.version else store.stat(entry.name)
        if form.examine is not None and not listing.is_read_once:
            form = form.examine(store, facts)
        return with_needed(store, facts, form.needs, form.name), form
    except NotRegularFileError as error:
        raise UsageError(
            f"{store.where(entry.name)} is not a regular file", hint="write it to a file first, or pipe it into -"
        ) from error
    except OSError as error:
        is_broken_link = entry.is_link and isinstance(error, FileNotFoundError)
        raise BadSourceError(
            f"{store.where(entry.name)} cannot be read: {error.strerror or error}"
            + (": it is a link to nothing" if is_broken_link else ""),
            hint="check the path and its permissions, or leave such files out with --on-bad-source skip",
        ) from error


def _check_utf_8(name: str, where: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise UsageError(
            f"{os.fsencode(where)!r}: the path is not UTF-8, and the corpus records it", hint="rename the file"
        ) from None


def _check_distinct(inputs: InputTable, identities: array[int]) -> None:
    """Refuse two inputs that are one file.

    Args:
        identities: a hash of the identity of each.

    Raises:
        UsageError: with the names of the first two.
    """
    hashes = np.frombuffer(identities, np.int64)
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    for second, first in sorted((int(order[place + 1]), int(order[place])) for place in again):
        names = inputs[first].location, inputs[second].location
        if _identity(names[0]) == _identity(names[1]):
            raise UsageError(
                f"{names[1]} is an input twice: {names[0]} is the same file",
                hint="name every input once, and leave out symbolic and hard links to other inputs",
            )


def _identity(location: str) -> object:
    """The identity of a file: equal for all its names, with symbolic and hard links."""
    found = look_at(location)
    return found.identity if found and found.version else real_location(location)
