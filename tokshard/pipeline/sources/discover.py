"""From the arguments of a build to its inputs."""

from __future__ import annotations

import glob
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from stat import S_ISREG

import numpy as np

from tokshard.errors import BadSourceError, SourceError, UsageError
from tokshard.pipeline.sources import hub
from tokshard.pipeline.sources import saved_dataset as saved
from tokshard.pipeline.sources.inputs import (
    ARROW,
    ARROW_STREAM,
    CSV,
    INPUT_FORMATS,
    JSONL,
    PARQUET,
    PINNED,
    READ_ONCE,
    STDIN,
    TAR,
    TSV,
    TXT,
    InputTable,
    InputTableBuilder,
    RecordSource,
    location_of,
    read_once_note,
)

HIDDEN = "hidden"
"""Stands for a suffix where hidden files and directories are counted."""

_SUFFIXES: Mapping[str, str] = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".json": JSONL,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".ipc": ARROW,
    ".feather": ARROW,
    ".txt": TXT,
    ".csv": CSV,
    ".tsv": TSV,
    ".tar": TAR,
}

_COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}

_LONG_SUFFIXES: Mapping[str, str] = {".tgz": ".tar.gz", ".tbz2": ".tar.bz2", ".txz": ".tar.xz", ".tzst": ".tar.zst"}

_COMPRESSIBLE = frozenset({JSONL, TXT, CSV, TSV, TAR})

_ARROW_MAGIC = b"ARROW1"

_FEATHER_1_MAGIC = b"FEA1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The inputs of a build.

    Args:
        arguments: the label of each argument: its last part, or a hub id with its revision.
        ignored: suffix to count of files in directories whose format is not known; `HIDDEN` to that of hidden entries.
        notes: what the user should know, a line each.
    """

    inputs: InputTable
    arguments: tuple[str, ...]
    ignored: Mapping[str, int]
    notes: tuple[str, ...] = ()


def discover(
    arguments: Sequence[str | RecordSource], *, input_format: str | None, keep_unreadable: bool = False
) -> Discovery:
    """Find the inputs: arguments as given, and inside a directory or glob bytewise by relative path.

    Takes 10 us per file, and beside the result about 100 bytes for each file of the largest directory.

    Args:
        keep_unreadable: a file that cannot be looked at, such as a link to nothing, is an input that cannot be read.

    Raises:
        UsageError: an argument is missing, matches nothing, has an unknown format, or names a file twice.
    """
    builder = InputTableBuilder()
    labels: list[str] = []
    ignored: Counter[str] = Counter()
    places = array("q")  # a hash for each file
    for number, argument in enumerate(arguments):
        if isinstance(argument, RecordSource):
            builder.roots.append(argument.name)
            labels.append(argument.name)
            builder.append_records(number, argument)
            continue
        passed_over: Counter[str] = Counter()
        found = _expand(argument, passed_over)
        builder.roots.append(found.root)
        labels.append(found.label)
        before = len(builder)
        for path in found.paths:
            location = location_of(found.root, path)
            kind = _kind(location, input_format)
            if kind is None:
                if found.is_named:
                    raise _unknown_format(location)
                passed_over[os.path.splitext(location)[1] or "no suffix"] += 1
                continue
            try:
                description = _describe(location, kind, is_pinned=found.is_pinned)
            except BadSourceError:
                if not keep_unreadable:
                    raise
                description = (kind, 0, "")
            builder.append(number, path, *description)
            places.append(hash(location if found.is_pinned else _identity(location)))
        if len(builder) == before:
            raise UsageError(
                f"{argument} holds no input" + (f"; it has {_counts(passed_over)}" if passed_over else ""),
                hint=f"known suffixes are {', '.join([*_SUFFIXES, *(f'.jsonl{s}' for s in _COMPRESSIONS)])}; "
                "--input-format reads every file as one format",
            )
        ignored.update(passed_over)
    inputs = builder.finish()
    _check_places(inputs, places)
    notes = tuple(map(read_once_note, dict.fromkeys(inputs.read_once)))
    return Discovery(inputs=inputs, arguments=tuple(labels), ignored=dict(sorted(ignored.items())), notes=notes)


@dataclass(frozen=True, slots=True)
class _Expansion:
    """The files of one argument.

    Args:
        paths: relative to `root`, in order; one empty path where the argument is the file.
        is_named: the user named this very file.
        is_pinned: a revision says what the files hold, so their times say nothing.
    """

    root: str
    label: str
    paths: Iterable[str]
    is_named: bool = False
    is_pinned: bool = False


def _expand(argument: str, passed_over: Counter[str]) -> _Expansion:
    label = os.path.basename(os.path.normpath(argument)) or argument
    if argument == STDIN:
        return _Expansion(STDIN, "stdin", [""], is_named=True)
    if argument.startswith(hub.SCHEME):
        files = hub.fetch_dataset(argument)
        return _Expansion(files.root, files.label, files.paths, is_named=True, is_pinned=True)
    if "://" in argument:
        raise UsageError(
            f"{argument} is a URI; this version of tokshard reads local files and {hub.SCHEME} only",
            hint="copy or mount it first",
        )
    if os.path.isdir(argument):
        return _Expansion(argument, label, _walk(argument, passed_over))
    if os.path.exists(argument):
        return _Expansion(argument, label, [""], is_named=True)
    if not glob.has_magic(argument):
        raise UsageError(f"{argument} does not exist", hint="check the path; quote a glob so that the shell leaves it")
    root = _fixed_prefix(argument)
    matches = (path for path in glob.iglob(argument, recursive=True) if os.path.isfile(path))
    relatives = {os.path.relpath(path, root or ".") for path in matches}
    return _Expansion(root, label, (path.replace(os.sep, "/") for path in sorted(relatives, key=os.fsencode)))


def _walk(root: str, passed_over: Counter[str]) -> Iterator[str]:
    """Files below a directory, links followed, but not into a directory that holds the link.

    Hidden files and directories are left out, and counted in `passed_over`.

    A directory saved by `datasets` gives its data files only. Paths are relative, in bytewise order.
    """

    def below(directory: str, relative: str, above: frozenset[str]) -> Iterator[str]:
        try:
            listed = list(os.scandir(directory))
            visible = [entry for entry in listed if not entry.name.startswith(".")]
            # a directory stands where the paths below it do
            found = sorted(os.fsencode(entry.name) + (b"/" if entry.is_dir() else b"") for entry in visible)
        except OSError as error:
            raise SourceError(
                f"{directory} cannot be listed: {error.strerror}", hint="check the path and its permissions"
            ) from error
        if len(visible) < len(listed):
            passed_over[HIDDEN] += len(listed) - len(visible)
        for name in map(os.fsdecode, saved.only_data(directory, found)):
            if not name.endswith("/"):
                yield relative + name
            elif (real := os.path.realpath(os.path.join(directory, name))) not in above:
                yield from below(os.path.join(directory, name[:-1]), relative + name, above | {real})

    return below(root, "", frozenset({os.path.realpath(root)}))


def _check_places(inputs: InputTable, places: array[int]) -> None:
    """Refuse two inputs in one place.

    Args:
        places: a hash of the place of each.

    Raises:
        UsageError: with the names of the first two.
    """
    hashes = np.frombuffer(places, np.int64)
    order = np.argsort(hashes, kind="stable")
    again = np.flatnonzero(hashes[order[1:]] == hashes[order[:-1]])
    for second, first in sorted((int(order[place + 1]), int(order[place])) for place in again):
        names = inputs[first].location, inputs[second].location
        if _identity(names[0]) == _identity(names[1]):
            raise UsageError(
                f"{names[1]} is an input twice: {names[0]} is the same file",
                hint="name every input once, and leave out symbolic and hard links to other inputs",
            )


def _identity(location: str) -> str | tuple[int, int]:
    """What two names of one file have in common, whether links are symbolic or hard."""
    if location == STDIN:
        return STDIN
    try:
        stat = os.stat(location)
    except OSError:  # a link that leads nowhere
        return os.path.realpath(location)
    return (stat.st_dev, stat.st_ino) if stat.st_ino else os.path.realpath(location)


def _fixed_prefix(pattern: str) -> str:
    parts = pattern.split(os.sep)
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:fixed]) + (os.sep if fixed else "")


def _kind(location: str, input_format: str | None) -> tuple[str, str | None] | None:
    stem, suffix = os.path.splitext(location.lower())
    stem, suffix = os.path.splitext(stem + _LONG_SUFFIXES.get(suffix, suffix))
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    kind = input_format or _SUFFIXES.get(suffix)
    if kind is None or (compression and kind not in _COMPRESSIBLE):
        return None
    return kind, compression


def _describe(
    location: str, kind: tuple[str, str | None], *, is_pinned: bool
) -> tuple[tuple[str, str | None], int, str]:
    """Format and compression, bytes and version of a file."""
    form, compression = kind
    if location == STDIN:
        if form in (PARQUET, ARROW):
            raise UsageError(
                f"{form} cannot be read from standard input: its end says what it holds",
                hint="write it to a file first",
            )
        return kind, 0, READ_ONCE
    if any("\udc80" <= character <= "\udcff" for character in os.path.abspath(location)):
        raise UsageError(
            f"{os.fsencode(location)!r}: the path is not UTF-8, and the corpus records it", hint="rename the file"
        )
    try:
        stat = os.stat(location)
        if not S_ISREG(stat.st_mode):
            raise UsageError(f"{location} is not a regular file", hint="write it to a file first, or pipe it into -")
        if form == ARROW:
            form = _kind_of_arrow(location)
    except OSError as error:
        is_link = os.path.islink(location) and isinstance(error, FileNotFoundError)
        raise BadSourceError(
            f"{location} cannot be read: {error.strerror}" + (": it is a link to nothing" if is_link else ""),
            hint="check the path and its permissions, or leave such files out with --on-bad-source skip",
        ) from error
    return (form, compression), stat.st_size, PINNED if is_pinned else str(stat.st_mtime_ns)


def _kind_of_arrow(location: str) -> str:
    with open(location, "rb") as file:
        magic = file.read(len(_ARROW_MAGIC))
    if magic.startswith(_FEATHER_1_MAGIC):
        raise UsageError(
            f"{location} is Feather of version 1, which pyarrow cannot read in parts",
            hint="write it again with pyarrow.feather.write_feather, as version 2",
        )
    return ARROW if magic == _ARROW_MAGIC else ARROW_STREAM


def _unknown_format(location: str) -> UsageError:
    return UsageError(
        f"{location}: the name does not tell the format",
        hint=f"give --input-format, one of {', '.join(INPUT_FORMATS)}",
    )


def _counts(ignored: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {suffix}" for suffix, count in sorted(ignored.items()))
