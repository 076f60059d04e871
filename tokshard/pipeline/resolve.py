"""The first step of a build: from sources and options to all that follows from them. Starts and writes nothing."""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokshard.errors import TokshardError, UsageError
from tokshard.format import names
from tokshard.format.manifest import BuildConfig
from tokshard.format.opening import read_manifest
from tokshard.format.schema import token_dtype
from tokshard.interop.tokens.batches import TokenSpec
from tokshard.pipeline.append import Place, find_place, generation_outputs
from tokshard.pipeline.encode.documents import DocumentRules
from tokshard.pipeline.encode.tokenizer_file import TokenizerFile, read_tokenizer
from tokshard.pipeline.options import RAY, BuildOptions, check_used, checked_options, command_words
from tokshard.pipeline.sources.discover import Discovery, discover
from tokshard.pipeline.sources.division import Divisibility, Indivisible
from tokshard.pipeline.sources.formats import divisibility_of, notes_on_columns
from tokshard.pipeline.sources.hub import SCHEME
from tokshard.pipeline.sources.inputs import STDIN, TOKENS, RecordSource, location_of, read_once_name
from tokshard.pipeline.sources.listing import is_glob, matches, split_glob
from tokshard.pipeline.sources.opening import vanished
from tokshard.pipeline.sources.records import RecordSpec, check_field_name, parse_columns
from tokshard.pipeline.tasks.context import WorkerContext
from tokshard.pipeline.tasks.planning import (
    StreamTask,
    Task,
    default_task_bytes,
    plan_tasks,
    round_task_bytes,
)
from tokshard.pipeline.workspace.places import Workspace, open_workspace
from tokshard.pipeline.workspace.settings import Command, Settings
from tokshard.store import locate, look_at, real_location

Columns = dict[str, tuple[str, str]]
"""Name of each kept column to the path of its field and its type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedBuild:
    """A build whose options are checked, whose inputs are found and whose tokenizer is read.

    Args:
        started: by the monotonic clock.
    """

    arguments: Sequence[str | RecordSource]
    options: BuildOptions
    settings: Settings
    context: WorkerContext
    read: TokenizerFile
    found: Discovery
    num_workers: int
    started: float

    @property
    def total_bytes(self) -> int:
        """Size of all inputs."""
        return self.found.inputs.num_bytes

    def plan(self) -> list[Task | StreamTask]:
        """The tasks. Only inputs that are too big for one need to be looked into."""
        inputs, task_bytes = self.found.inputs, self.context.task_bytes

        def divisibility(index: int) -> Divisibility:
            try:
                return divisibility_of(inputs[index], self.options.text_mode)
            except OSError as error:
                raise vanished(inputs[index], error) from error

        splits = (
            divisibility(index) if size > task_bytes or inputs.is_read_once(index) else Indivisible()
            for index, size in enumerate(inputs.sizes)
        )
        return list(plan_tasks(inputs.sizes, splits, task_bytes))


def resolve(arguments: Sequence[str | RecordSource], options: BuildOptions) -> ResolvedBuild:
    """Check what is asked for, find the inputs and read the tokenizer. Starts nothing and writes nothing.

    Raises:
        UsageError: an argument is wrong.
        SourceError: an input cannot be looked at.
    """
    started = time.monotonic()
    options = checked_options(options)
    if not arguments:
        raise UsageError("no source is given", hint="give files, directories or globs")
    workspace = open_workspace(options.out, attempt=secrets.token_hex(8))
    _check_apart(options.out, arguments, options.tokenizer)
    found = discover(
        arguments,
        input_format=options.input_format,
        reads=options.reads,
        keep_unreadable=options.on_bad_source == "skip",
    )
    check_used(options, found.inputs.formats)
    _check_no_output(options.out, found)
    check_outside_corpora(options.out)
    if options.dedup == "exact" and found.inputs.read_once:
        raise UsageError(
            f"--dedup exact reads its sources twice, and {read_once_name(found.inputs.read_once[0])} can be read once "
            "only",
            hint="write it to a file first, or leave out --dedup",
        )
    if options.executor == RAY and found.inputs.read_once:
        raise UsageError(
            f"--executor ray reads its sources on other machines, and {read_once_name(found.inputs.read_once[0])} can "
            "only be read by this process",
            hint="write it to a file that all nodes can read, or leave out --executor",
        )
    read = read_tokenizer(options.tokenizer, eos=options.eos, bos=options.bos)
    check_field_name(options.text_field)
    resolved = derive(arguments, options, workspace, found=found, read=read, started=started)
    if options.reads == TOKENS:
        notes = (*found.notes, *notes_on_columns(found.inputs, resolved.context.spec))
        resolved = replace(resolved, found=replace(found, notes=notes))
    return resolved


def derive(
    arguments: Sequence[str | RecordSource],
    options: BuildOptions,
    workspace: Workspace,
    *,
    found: Discovery,
    read: TokenizerFile,
    started: float,
    place: Place | None = None,
) -> ResolvedBuild:
    """What follows from checked options, inputs and a tokenizer. Looks at no source.

    Args:
        place: of an append; default: it is looked for.

    Raises:
        UsageError: kept fields are named in a way that means nothing.
    """
    try:
        columns = parse_columns(options.id_field, options.keep)
    except ValueError as error:
        raise UsageError(str(error), hint="give --keep FIELD or --keep FIELD:TYPE") from error
    settings = Settings(
        config=_config(options, columns, found.inputs.num_bytes),
        tokenizer=read.info,
        on_bad_record=options.on_bad_record,
        on_bad_source=options.on_bad_source,
        sources=found.inputs.absolute(),
        arguments=list(found.arguments),
    )
    if options.append:
        place = place or find_place(workspace, settings, options)
        settings = place.settings(settings)
    return ResolvedBuild(
        arguments=arguments,
        options=options,
        settings=settings,
        context=_context(options, columns, settings, workspace, found),
        read=read,
        found=found,
        num_workers=options.workers or cpu_count(),
        started=started,
    )


def _config(options: BuildOptions, columns: Columns, total_bytes: int) -> BuildConfig:
    """What the manifest says of the options."""
    return BuildConfig(
        text_field=options.text_field,
        id_field=options.id_field,
        keep={path: kind for name, (path, kind) in columns.items() if not (name == "id" and path == options.id_field)},
        input_format=options.input_format,
        text_mode=options.text_mode,
        shard_tokens=options.shard_tokens,
        task_bytes=round_task_bytes(options.task_bytes) if options.task_bytes else default_task_bytes(total_bytes),
        max_document_bytes=options.max_document_bytes,
        limit=options.limit,
        dedup=options.dedup,
        min_tokens=options.min_tokens,
        max_tokens=options.max_tokens,
        validation_fraction=options.validation_fraction,
        reads=options.reads,
        token_field=options.token_field,
        token_dtype=options.token_dtype,
        delimiter=options.delimiter,
    )


def _context(
    options: BuildOptions, columns: Columns, settings: Settings, workspace: Workspace, found: Discovery
) -> WorkerContext:
    """What the tasks need."""
    return WorkerContext(
        workspace=workspace,
        inputs=found.inputs,
        spec=RecordSpec(
            text_field=options.text_field,
            columns=columns,
            max_document_bytes=options.max_document_bytes,
            text_mode=options.text_mode,
            tokens=_token_spec(options, settings) if options.reads == TOKENS else None,
        ),
        columns={name: kind for name, (_, kind) in columns.items()},
        tokenizer=settings.tokenizer,
        task_bytes=settings.config.task_bytes,
        shard_tokens=settings.config.shard_tokens,
        is_skipping=options.on_bad_record == "skip",
        is_leaving_out=options.on_bad_source == "skip" and options.limit is None,
        outputs=generation_outputs(workspace, settings),
        rules=DocumentRules(
            min_tokens=options.min_tokens,
            max_tokens=options.max_tokens,
            validation_fraction=options.validation_fraction,
        ),
    )


def _token_spec(options: BuildOptions, settings: Settings) -> TokenSpec:
    eos = settings.tokenizer.eos_id
    return TokenSpec(
        field=options.token_field,
        dtype=options.token_dtype,
        delimiters=(eos,) if options.delimiter is None else (eos, options.delimiter),
        narrowest=token_dtype(settings.tokenizer.vocab_size),
        max_document_bytes=options.max_document_bytes,
    )


def continuing_command(resolved: ResolvedBuild, tasks: Sequence[Task | StreamTask]) -> Command:
    """The command that continues the build, in which what is on the hub is named with its commit."""
    arguments = [
        label if isinstance(argument, str) and argument.startswith(SCHEME) else str(argument)
        for argument, label in zip(resolved.arguments, resolved.found.arguments, strict=True)
    ]
    options = resolved.options
    if options.tokenizer.startswith(SCHEME) or look_at(options.tokenizer) is None:
        # it is on the hub, and its name has the commit
        options = replace(options, tokenizer=SCHEME + resolved.read.info.name)
    return Command(
        words=command_words(arguments, options),
        directory=os.getcwd(),
        num_tasks=len(tasks),
        num_streams=sum(isinstance(task, StreamTask) for task in tasks),
        total_bytes=resolved.total_bytes,
    )


def check_outside_corpora(out: str) -> None:
    """Refuse a folder of a corpus: it would be damaged by what does not belong to it, or lose a generation.

    Raises:
        UsageError: the folder above holds a corpus.
    """
    store, name = locate(real_location(out))
    if not name:
        return
    try:
        read_manifest(store)
    except (OSError, TokshardError):  # there is no corpus, or it may not be read
        return
    is_generation = names.generation_number(name)
    raise UsageError(
        f"--out {out} lies inside the corpus {store.location}",
        hint=(f"give --out {store.location} with --append to add to it, or " if is_generation else "give ")
        + "a directory outside of it",
    )


def _check_apart(out: str, arguments: Sequence[str | RecordSource], tokenizer: str) -> None:
    """Refuse an output directory in which the next run of the command would find inputs, or its tokenizer.

    Raises:
        UsageError: a directory or glob reaches it, or it is the tokenizer's directory.
    """
    target = real_location(out)
    for argument in arguments:
        if not isinstance(argument, str) or argument == STDIN or argument.startswith(SCHEME):
            continue
        found = look_at(argument)
        if found is None:
            is_reached = is_glob(argument) and _matches_output(argument, target)
        else:
            is_reached = found.name.endswith("/") and _is_inside(target, real_location(argument))
        if is_reached:
            raise UsageError(
                f"--out {out} lies inside the source {argument}: the next build would read its files",
                hint="give an --out outside of the sources",
            )
    found = None if tokenizer.startswith(SCHEME) else look_at(tokenizer)
    if found is not None:
        place = real_location(tokenizer)
        folder = place if found.name.endswith("/") else os.path.dirname(place)
        if folder in {target, *(location_of(target, split) for split in (names.TRAIN, names.VALIDATION))}:
            raise UsageError(
                f"--out {out} is the directory of the tokenizer {tokenizer}: the build would replace its files",
                hint="give another --out",
            )


def _is_inside(location: str, folder: str) -> bool:
    return location == folder or location.startswith(folder.rstrip("/") + "/")


def _matches_output(pattern: str, out: str) -> bool:
    """Whether a glob matches a file that a build writes into a directory, now or later."""
    root, parts = split_glob(pattern)
    place = real_location(root or ".")
    if not _is_inside(out, place):
        return False
    inside = out.removeprefix(place).strip("/")
    files = [*sorted(names.SIDE_FILES), names.shard_name(generation=0, first_input=0, segment=0, part=0)]
    folders = (inside, f"{inside}/{names.TRAIN}", f"{inside}/{names.VALIDATION}")
    return any(matches(parts, f"{folder}/{name}".strip("/").split("/")) for folder in folders for name in files)


def _check_no_output(out: str, found: Discovery) -> None:
    """Refuse inputs that lie in the output directory, whatever link leads there.

    Raises:
        UsageError: with the first of them.
    """
    inputs, links = found.inputs, frozenset(found.links)
    if look_at(out) is None:
        return
    target = real_location(out)
    folders: dict[str, str] = {}  # a link is resolved once, not for each of a million files
    for index in range(len(inputs)):
        if inputs.is_read_once(index):
            continue
        location = inputs[index].location
        folder, name = os.path.split(location)
        if folder not in folders:
            folders[folder] = real_location(folder)
        place = real_location(location) if index in links else location_of(folders[folder], name)
        if place.startswith(f"{target}/"):
            raise UsageError(
                f"the source {location} lies in --out {out}, where the build writes",
                hint="give an --out outside of the sources",
            )


def cpu_count() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
