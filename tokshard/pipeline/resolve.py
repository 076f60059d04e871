"""The first step of a build: resolves sources and options. Starts and writes nothing."""

from __future__ import annotations

import contextlib
import functools
import os
import shlex
from collections.abc import Iterator, Sequence

import msgspec

from tokshard.errors import SourceError, TokshardError, UsageError
from tokshard.extras import extra_module, version_of
from tokshard.format import names
from tokshard.format.loss import LOSS, LOSS_COLUMNS
from tokshard.format.opening import check_outside_corpora, read_manifest
from tokshard.numbers import ceil_div
from tokshard.pipeline.append import next_generation
from tokshard.pipeline.copies import copied_request, selected_request
from tokshard.pipeline.encode.chat.texts import checked_chat, read_template
from tokshard.pipeline.encode.encoder import Encoder
from tokshard.pipeline.encode.engine import COMPARED_BYTES, check_same_ids
from tokshard.pipeline.encode.maker import Maker
from tokshard.pipeline.encode.tokenizer_file import parsed_tokens, parsing, read_tokenizer, with_parsed
from tokshard.pipeline.options import (
    DEFAULT_SHARD_TOKENS,
    DOCUMENTS,
    SKIP,
    TOKENS,
    VIEW,
    BuildOptions,
    check_used,
    checked_options,
)
from tokshard.pipeline.request import Build, Request, check_saves, config_of, placed, versions_here
from tokshard.pipeline.sources.discover import discover
from tokshard.pipeline.sources.division import Span
from tokshard.pipeline.sources.formats import loss_columns, notes_on_columns, read_span
from tokshard.pipeline.sources.hub import SCHEME
from tokshard.pipeline.sources.inputs import RECORDS, STDIN, InputTable, RecordSource, read_once_name
from tokshard.pipeline.sources.listing import split_glob
from tokshard.pipeline.sources.records import FILE, Records, check_field_name, parse_columns
from tokshard.pipeline.tasks.planning import default_task_bytes, round_task_bytes
from tokshard.pipeline.workspace.lease import cannot_write
from tokshard.pipeline.workspace.places import open_workspace
from tokshard.store import look_at, open_store, real_location, working_directory


def resolve(sources: Sequence[str | RecordSource], options: BuildOptions) -> tuple[Build, bytes]:
    """Check the options, find the inputs and read the tokenizer.

    Returns:
        The build, and the tokenizer.json that its corpus gets.

    Raises:
        UsageError: an argument is wrong.
        SourceError: an input cannot be listed.
        CorpusError: a corpus that is copied, or appended to, cannot be opened.
        BuildError: the directory to append to cannot be read.
    """
    options = checked_options(options)
    if not sources:
        what = "corpus" if options.reads in _OF_CORPORA else "source"
        raise UsageError(f"no {what} is given", hint="give files, directories or globs")
    workspace = open_workspace(options.out)
    if (of_corpora := _OF_CORPORA.get(options.reads)) is not None:
        request, tokenizer = of_corpora([str(source) for source in sources], options)
    else:
        request, tokenizer = _request(sources, options)
    check_saves(request)
    check_outside_corpora(options.out)
    build = placed(request, workspace)
    if options.append:
        try:
            build = next_generation(build)
        except OSError as error:  # errors of a corpus file are CorpusErrors, so this one is of the directory
            raise cannot_write(options.out, error) from error
    if options.reads == TOKENS:
        build = msgspec.structs.replace(build, notes=(*build.notes, *notes_on_columns(build.inputs, build.spec)))
    if options.engine is not None:
        special_tokens = parsed_tokens(build.config.special_tokens)
        check_same_ids(parsing(tokenizer, build.tokenizer, special_tokens), options.engine, _first_texts(build))
    return build, tokenizer


_COMPARED_INPUTS = 16


def _first_texts(build: Build) -> Iterator[tuple[str, Sequence[str]]]:
    """The texts at the beginning of some inputs, spread evenly over all, each with its place."""
    parse = Maker(build, lambda: b"").parse
    step = ceil_div(len(build.inputs), _COMPARED_INPUTS)
    for input_ in (build.inputs[index] for index in range(0, len(build.inputs), step)):
        num_bytes = 0
        with contextlib.suppress(SourceError, OSError):  # the reader will say so
            for chunk in read_span(input_, Span(), build.spec):
                records = parse(chunk)
                assert isinstance(records, Records), "a build reads texts"
                yield input_.location, records.texts
                num_bytes += sum(map(len, records.texts))
                if num_bytes >= COMPARED_BYTES:
                    break


_OF_CORPORA = {DOCUMENTS: copied_request, VIEW: selected_request}
"""Makes the request of a build that reads corpora."""


def _request(sources: Sequence[str | RecordSource], options: BuildOptions) -> tuple[Request, bytes]:
    target = f"{real_location(options.out)}/"
    local_tokenizer = None if options.tokenizer.startswith(SCHEME) else look_at(options.tokenizer)
    _check_sources(options.out, target, sources)
    if local_tokenizer is not None and not options.append:  # which adds a folder, and may take the corpus's own
        _check_tokenizer(options, target, is_folder=local_tokenizer.name.endswith("/"))
    found = discover(
        sources,
        input_format=options.format,
        reads=options.reads,
        keep_unreadable=options.on_bad_source == SKIP,
    )
    check_used(options, found.inputs.formats - {RECORDS})
    _check_inputs(options.out, target, found.inputs)
    read = read_tokenizer(options.tokenizer, eos=options.eos, bos=options.bos, needs_eos=options.chat is None)
    if options.chat is None and not read.has_plain_ids:
        Encoder(read.content, read.info.special_ids)
    template, chat, info, notes = None, None, read.info, list(read.notes)
    is_idle = options.text_unit != FILE and "txt" not in found.inputs.formats
    notes += ["--text-unit has no effect: no source is a text file"] * is_idle
    engine = options.engine
    if engine is not None:
        extra_module(engine, f"the engine {engine} is not installed", extra=engine)
        if once := found.inputs.read_once:
            raise UsageError(
                f"--engine {engine} first tries the beginning of the sources, and {read_once_name(once[0])} can be "
                "read only once",
                hint="write it to a file, or leave out --engine",
            )
        info = msgspec.structs.replace(info, library=engine, library_version=version_of(engine))
        engine = f"{engine} {info.library_version}"
    of_loss = dict[str, str]()
    if options.reads == TOKENS:
        of_loss, more = loss_columns(found.inputs, options.loss_field)
        notes += more
    if options.chat is not None:
        template = read_template(options.chat, read, options)
        chat, info, more = checked_chat(read, template, options)
        of_loss = dict(LOSS_COLUMNS) if options.loss == "weighted" else {LOSS: LOSS_COLUMNS[LOSS]}
        notes += more
    special_tokens = options.special_tokens
    if special_tokens is not None:
        info, special_tokens = with_parsed(info, special_tokens)
    check_field_name(options.text_field)
    try:
        columns = parse_columns(options.id_field, options.keep_field)
    except ValueError as error:
        raise UsageError(str(error), hint="give --keep-field FIELD or --keep-field FIELD:TYPE") from error
    if clash := sorted(of_loss.keys() & columns.keys()):
        raise UsageError(
            f"a kept field cannot be called {clash[0]!r} here: the loss spans of the corpus are in that column",
            hint="rename the field in the sources, or leave it out of --keep-field",
        )
    given, total_bytes = options.task_bytes, found.inputs.num_bytes
    task_bytes = default_task_bytes(total_bytes) if given is None else round_task_bytes(given)
    labels = zip(sources, found.arguments, strict=True)
    request = Request(
        # the command that continues the build names a tokenizer of the hub with its commit
        options=msgspec.structs.replace(
            options, tokenizer=options.tokenizer if local_tokenizer else SCHEME + read.info.name
        ),
        # a data set of the hub is named with its commit
        sources=[
            label if isinstance(source, str) and source.startswith(SCHEME) else str(source) for source, label in labels
        ],
        directory=working_directory(),
        config=config_of(
            options,
            keep_field={
                path: kind for name, (path, kind) in columns.items() if name != "id" or path != options.id_field
            },
            shard_tokens=options.shard_tokens or DEFAULT_SHARD_TOKENS,
            task_bytes=task_bytes,
            chat=chat,
            special_tokens=special_tokens,
            engine=engine,
        ),
        columns=of_loss | {name: kind for name, (_, kind) in columns.items()},
        tokenizer=info,
        normalizer=read.normalizer,
        inputs=found.inputs,
        arguments=list(found.arguments),
        ignored=dict(found.ignored),
        notes=(*found.notes, *notes),
        versions=versions_here(
            options.reads, *(["jinja2"] if chat is not None else []), *filter(None, [options.engine])
        ),
        chat=template,
    )
    return request, read.content


def _check_sources(out: str, target: str, sources: Sequence[str | RecordSource]) -> None:
    """Refuse an output directory in which the next run of the command would find inputs.

    Args:
        target: the real place of `out`, with a slash.

    Raises:
        UsageError: a directory or glob reaches it.
    """
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


def _check_tokenizer(options: BuildOptions, target: str, *, is_folder: bool) -> None:
    """Refuse an output directory whose tokenizer.json is the tokenizer.

    Raises:
        UsageError: it is the tokenizer's directory, or its split would be.
    """
    place = real_location(options.tokenizer)
    folder = place if is_folder else os.path.dirname(place)
    if f"{folder}/" in {target, *(f"{target}{split}/" for split in (names.TRAIN, names.VALIDATION))}:
        raise UsageError(
            f"--out {options.out} is the directory of the tokenizer {options.tokenizer}: the build would replace its "
            "files",
            hint="give another --out",
        )


def _check_inputs(out: str, target: str, inputs: InputTable) -> None:
    """Refuse inputs that lie in the output directory or in a corpus: a build would lose what its tables say.

    Raises:
        UsageError: with the first of them.
    """
    real_folder = functools.cache(real_location)
    folders = dict[str, None]()
    for one in inputs:
        if one.location.endswith((names.MANIFEST, *names.LAST_TABLES)):
            folders[os.path.dirname(one.location)] = None
        if not one.is_read_once and f"{real_folder(os.path.dirname(one.location))}/".startswith(target):
            raise UsageError(
                f"the source {one.location} lies in --out {out}, where the build writes",
                hint="give an --out outside of the sources",
            )
    for folder in folders:
        try:
            read_manifest(open_store(folder))
        except (OSError, TokshardError):  # another tool has a file of this name, too
            continue
        raise UsageError(
            f"{folder} is a corpus of tokshard, and not texts or tokens of another tool",
            hint=f"use 'tokshard copy {shlex.quote(folder)} --out DIR', which can also join several, or leave it out",
        )
