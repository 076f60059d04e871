"""From the arguments of a build to its inputs: files in a fixed order, each with a format."""

from __future__ import annotations

import glob
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from stat import S_ISREG

from tokshard.errors import BadSourceError, SourceError, UsageError

JSONL, PARQUET, ARROW, ARROW_STREAM, TXT, CSV = "jsonl", "parquet", "arrow", "arrow-stream", "txt", "csv"
INPUT_FORMATS = (JSONL, PARQUET, ARROW, TXT, CSV)
"""Values of ``--input-format``. Whether an Arrow file is a stream is read off its first bytes."""

_SUFFIXES: Mapping[str, str] = {
    ".jsonl": JSONL,
    ".ndjson": JSONL,
    ".parquet": PARQUET,
    ".arrow": ARROW,
    ".ipc": ARROW,
    ".txt": TXT,
    ".csv": CSV,
}
_COMPRESSIONS: Mapping[str, str] = {".gz": "gzip", ".zst": "zstd"}
_COMPRESSIBLE = frozenset({JSONL, TXT, CSV})
_ARROW_MAGIC = b"ARROW1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """One file to read.

    Args:
        index: its place in the order of the build.
        argument: index of the argument it came from.
        path: relative to that argument, with ``/``; empty where the argument is the file.
        location: where it is.
        num_bytes, mtime_ns: what it was when the build began.
        format: one of the formats above.
        compression: None, ``gzip`` or ``zstd``.
    """

    index: int
    argument: int
    path: str
    location: str
    num_bytes: int
    mtime_ns: int
    format: str
    compression: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Discovery:
    """The inputs of a build.

    Args:
        arguments: the label of each argument: its last part.
        ignored: suffix to count of files in directories whose format is not known.
    """

    inputs: tuple[Input, ...]
    arguments: tuple[str, ...]
    ignored: Mapping[str, int]


def discover(arguments: Sequence[str], *, input_format: str | None) -> Discovery:
    """Find the inputs: arguments as given, and inside a directory or glob bytewise by relative path.

    Raises:
        UsageError: an argument is missing, matches nothing, has an unknown format, or names a file twice.
    """
    inputs: list[Input] = []
    ignored: Counter[str] = Counter()
    seen: dict[str, str] = {}
    for number, argument in enumerate(arguments):
        found = 0
        passed_over: Counter[str] = Counter()
        for relative, location, is_named in _expand(argument):
            kind = _kind(location, input_format)
            if kind is None:
                if is_named:
                    raise _unknown_format(location)
                passed_over[os.path.splitext(location)[1] or "no suffix"] += 1
                continue
            real = os.path.realpath(location)
            if real in seen:
                raise UsageError(
                    f"{location} is an input twice: {seen[real]} is the same file",
                    hint="name every input once, and leave out links to other inputs",
                )
            seen[real] = location
            inputs.append(_describe(len(inputs), number, relative, location, kind))
            found += 1
        if not found:
            raise UsageError(
                f"{argument} holds no input" + (f"; it has {_counts(passed_over)}" if passed_over else ""),
                hint=f"known suffixes are {', '.join([*_SUFFIXES, *(f'.jsonl{s}' for s in _COMPRESSIONS)])}; "
                "--input-format reads every file as one format",
            )
        ignored.update(passed_over)
    labels = tuple(os.path.basename(os.path.normpath(argument)) or argument for argument in arguments)
    return Discovery(inputs=tuple(inputs), arguments=labels, ignored=dict(sorted(ignored.items())))


def display_path(argument: str, path: str) -> str:
    """How an input is called in messages and tables: the label of its argument and the path below it."""
    return f"{argument}/{path}" if path else argument


def check_unchanged(source: Input) -> None:
    """Refuse an input that is not what it was when the build began.

    Raises:
        SourceError: it is gone, or its size or modification time differs.
    """
    try:
        stat = os.stat(source.location)
    except OSError as error:
        raise vanished(source, error) from error
    for what, found, expected in (
        ("bytes", stat.st_size, source.num_bytes),
        ("modification time (ns)", stat.st_mtime_ns, source.mtime_ns),
    ):
        if found != expected:
            raise SourceError(
                f"{source.location} changed during the build: {what} {found}, at the start {expected}",
                hint="put the file back, or start over with --force",
            )


def vanished(source: Input, error: OSError) -> BadSourceError:
    """The error for an input that cannot be opened."""
    return BadSourceError(
        f"{source.location} cannot be read: {error.strerror or error}",
        hint="put the file back and run the same command again; finished tasks are kept",
    )


def _expand(argument: str) -> Iterator[tuple[str, str, bool]]:
    """(relative path, location, whether the user named this very file) for one argument."""
    if "://" in argument:
        raise UsageError(
            f"{argument} is a URI; this version of tokshard reads local files only", hint="copy or mount it first"
        )
    if os.path.isdir(argument):
        relatives: Iterable[str] = _walk(argument)
        root = argument
    elif os.path.exists(argument):
        yield "", argument, True
        return
    elif glob.has_magic(argument):
        root = _fixed_prefix(argument)
        matches = (path for path in glob.glob(argument, recursive=True) if os.path.isfile(path))
        relatives = (os.path.relpath(path, root or ".") for path in matches)
    else:
        raise UsageError(f"{argument} does not exist", hint="check the path; quote a glob so that the shell leaves it")
    for relative in sorted(set(relatives), key=os.fsencode):
        yield relative.replace(os.sep, "/"), os.path.join(root, relative), False


def _walk(root: str) -> Iterator[str]:
    """Files below a directory, hidden ones left out, links followed, but not into a directory that holds the link."""

    def below(directory: str, relative: str, above: frozenset[str]) -> Iterator[str]:
        try:
            entries = [entry for entry in os.scandir(directory) if not entry.name.startswith(".")]
        except OSError as error:
            raise SourceError(
                f"{directory} cannot be listed: {error.strerror}", hint="check the path and its permissions"
            ) from error
        for entry in entries:
            path = os.path.join(relative, entry.name)
            if not entry.is_dir():
                yield path
            elif (real := os.path.realpath(entry.path)) not in above:
                yield from below(entry.path, path, above | {real})

    return below(root, "", frozenset({os.path.realpath(root)}))


def _fixed_prefix(pattern: str) -> str:
    parts = pattern.split(os.sep)
    fixed = next(index for index, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:fixed]) + (os.sep if fixed else "")


def _kind(location: str, input_format: str | None) -> tuple[str, str | None] | None:
    stem, suffix = os.path.splitext(location.lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression:
        suffix = os.path.splitext(stem)[1]
    kind = input_format or _SUFFIXES.get(suffix)
    if kind is None or (compression and kind not in _COMPRESSIBLE):
        return None
    return kind, compression


def _describe(index: int, argument: int, relative: str, location: str, kind: tuple[str, str | None]) -> Input:
    form, compression = kind
    if any("\udc80" <= character <= "\udcff" for character in os.path.abspath(location)):
        raise UsageError(
            f"{os.fsencode(location)!r}: the path is not UTF-8, and the corpus records it", hint="rename the file"
        )
    try:
        stat = os.stat(location)
        if not S_ISREG(stat.st_mode):
            raise UsageError(f"{location} is not a regular file", hint="write it to a file first")
        if form == ARROW:
            with open(location, "rb") as file:
                form = ARROW if file.read(len(_ARROW_MAGIC)) == _ARROW_MAGIC else ARROW_STREAM
    except OSError as error:
        raise SourceError(
            f"{location} cannot be read: {error.strerror}", hint="check the path and its permissions"
        ) from error
    return Input(
        index=index,
        argument=argument,
        path=relative,
        location=location,
        num_bytes=stat.st_size,
        mtime_ns=stat.st_mtime_ns,
        format=form,
        compression=compression,
    )


def _unknown_format(location: str) -> UsageError:
    return UsageError(
        f"{location}: the name does not tell the format",
        hint=f"give --input-format, one of {', '.join(INPUT_FORMATS)}",
    )


def _counts(ignored: Mapping[str, int]) -> str:
    return ", ".join(f"{count} x {suffix}" for suffix, count in sorted(ignored.items()))
