"""The first step of a build: from sources and options to all that follows from them. Starts and writes nothing."""

from __future__ import annotations

import functools
import os
import secrets
from collections.abc import Sequence

import msgspec

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.enclosing import check_outside_corpora
from tokshard.format.manifest import BuildConfig
from tokshard.pipeline.append import next_generation
from tokshard.pipeline.copies import copied_request
from tokshard.pipeline.encode.tokenizer_file import TokenizerFile, read_tokenizer
from tokshard.pipeline.options import (
    DEFAULT_SHARD_TOKENS,
    RAY,
    SKIP,
    BuildOptions,
    check_used,
    checked_options,
    config_of,
)
from tokshard.pipeline.request import Build, Request, placed, versions_here
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.formats import notes_on_columns
from tokshard.pipeline.sources.hub import SCHEME
from tokshard.pipeline.sources.inputs import DOCUMENTS, STDIN, TOKENS, InputTable, RecordSource, read_once_name
from tokshard.pipeline.sources.listing import split_glob
from tokshard.pipeline.sources.records import check_field_name, parse_columns
from tokshard.pipeline.tasks.planning import default_task_bytes, round_task_bytes
from tokshard.pipeline.workspace.places import open_workspace
from tokshard.store import look_at, real_location


def resolve(sources: Sequence[str | RecordSource], options: BuildOptions) -> tuple[Build, bytes]:
    """Check what is asked for, find the inputs and read the tokenizer.

    Returns:
        The build, and the tokenizer.json that its corpus gets.

    Raises:
        UsageError: an argument is wrong.
        SourceError: an input cannot be listed.
        CorpusError: a corpus that is copied cannot be opened.
    """
    options = checked_options(options)
    if not sources:
        what = "corpus" if options.reads == DOCUMENTS else "source"
        raise UsageError(f"no {what} is given", hint="give files, directories or globs")
    workspace = open_workspace(options.out, attempt=secrets.token_hex(8))
    if options.reads == DOCUMENTS:
        request, tokenizer = copied_request([str(source) for source in sources], options)
    else:
        request, tokenizer = _request(sources, options)
    check_outside_corpora(options.out)
    if options.append:
        request = next_generation(workspace, request)
    build = placed(request, workspace)
    if options.reads == TOKENS:
        build = msgspec.structs.replace(build, notes=(*build.notes, *notes_on_columns(build.inputs, build.spec)))
    return build, tokenizer


def _request(sources: Sequence[str | RecordSource], options: BuildOptions) -> tuple[Request, bytes]:
    _check_apart(options.out, sources, options.tokenizer)
    found = discover(
        sources,
        input_format=options.input_format,
        reads=options.reads,
        keep_unreadable=options.on_bad_source == SKIP,
    )
    check_used(options, found.inputs.formats)
    _check_no_output(options.out, found.inputs)
    _check_read_once(options, found.inputs.read_once)
    read = read_tokenizer(options.tokenizer, eos=options.eos, bos=options.bos)
    check_field_name(options.text_field)
    try:
        columns = parse_columns(options.id_field, options.keep)
    except ValueError as error:
        raise UsageError(str(error), hint="give --keep FIELD or --keep FIELD:TYPE") from error
    labels = zip(sources, found.arguments, strict=True)
    request = Request(
        options=_pinned(options, read),
        # a data set of the hub is named with its commit
        sources=[
            label if isinstance(source, str) and source.startswith(SCHEME) else str(source) for source, label in labels
        ],
        directory=os.getcwd(),
        config=_config(options, columns, found.inputs.num_bytes),
        columns={name: kind for name, (_, kind) in columns.items()},
        tokenizer=read.info,
        normalizer=read.normalizer,
        inputs=found.inputs,
        arguments=list(found.arguments),
        ignored=dict(found.ignored),
        notes=(*found.notes, *read.notes),
        versions=versions_here(options.reads),
    )
    return request, read.content


def _pinned(options: BuildOptions, read: TokenizerFile) -> BuildOptions:
    """The options that continue the build: a tokenizer of the hub is named with its commit."""
    if options.tokenizer.startswith(SCHEME) or look_at(options.tokenizer) is None:
        return msgspec.structs.replace(options, tokenizer=SCHEME + read.info.name)
    return options


def _config(options: BuildOptions, columns: dict[str, tuple[str, str]], total_bytes: int) -> BuildConfig:
    """What the manifest says of the options."""
    return config_of(
        options,
        keep={path: kind for name, (path, kind) in columns.items() if not (name == "id" and path == options.id_field)},
        shard_tokens=options.shard_tokens or DEFAULT_SHARD_TOKENS,
        task_bytes=round_task_bytes(options.task_bytes) if options.task_bytes else default_task_bytes(total_bytes),
    )


def _check_read_once(options: BuildOptions, read_once: Sequence[str]) -> None:
    if not read_once:
        return
    name = read_once_name(read_once[0])
    if options.is_dedup:
        raise UsageError(
            f"--dedup exact reads its sources twice, and {name} can be read once only",
            hint="write it to a file first, or leave out --dedup",
        )
    if options.executor == RAY:
        raise UsageError(
            f"--executor ray reads its sources on other machines, and {name} can only be read by this process",
            hint="write it to a file that all nodes can read, or leave out --executor",
        )


def _check_apart(out: str, sources: Sequence[str | RecordSource], tokenizer: str) -> None:
    """Refuse an output directory in which the next run of the command would find inputs, or its tokenizer.

    Raises:
        UsageError: a directory or glob reaches it, or it is the tokenizer's directory.
    """
    target = f"{real_location(out)}/"
    for source in sources:
        if not isinstance(source, str) or source == STDIN or source.startswith(SCHEME):
            continue
        found = look_at(source)
        is_folder = found is not None and found.name.endswith("/")
        root = source if is_folder else split_glob(source)[0] or "." if found is None and "**" in source else None
        if root is not None and target.startswith(f"{real_location(root).rstrip('/')}/"):
            raise UsageError(
                f"--out {out} lies inside the source {source}: the next build would read its files",
                hint="give an --out outside of the sources",
            )
    found = None if tokenizer.startswith(SCHEME) else look_at(tokenizer)
    if found is not None:
        place = real_location(tokenizer)
        folder = place if found.name.endswith("/") else os.path.dirname(place)
        if f"{folder}/" in {target, *(f"{target}{split}/" for split in (names.TRAIN, names.VALIDATION))}:
            raise UsageError(
                f"--out {out} is the directory of the tokenizer {tokenizer}: the build would replace its files",
                hint="give another --out",
            )


def _check_no_output(out: str, inputs: InputTable) -> None:
    """Refuse inputs that lie in the output directory.

    Raises:
        UsageError: with the first of them.
    """
    target, real_folder = f"{real_location(out)}/", functools.cache(real_location)
    for one in inputs:
        if not one.is_read_once and f"{real_folder(os.path.dirname(one.location))}/".startswith(target):
            raise UsageError(
                f"the source {one.location} lies in --out {out}, where the build writes",
                hint="give an --out outside of the sources",
            )
