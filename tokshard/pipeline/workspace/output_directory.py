"""What the output directory holds before a build: nothing, an unfinished build, corpora, or something else."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.format.generations import generation_numbers
from tokshard.format.manifest import Manifest, recipe_fingerprint
from tokshard.format.opening import open_corpus
from tokshard.pipeline.sources.inputs import InputTable, InputTableBuilder
from tokshard.pipeline.workspace.lease import lock
from tokshard.pipeline.workspace.places import ASSEMBLED, LOCK, REMOVING, SETTINGS, Output, Workspace
from tokshard.pipeline.workspace.settings import (
    Settings,
    check_same_settings,
    load_names,
    load_settings,
    save_names,
)
from tokshard.store import Store, files_below, obstacle, present
from tokshard.wording import counted, one_line

_UNFINISHED_SETTINGS = re.compile(r"(.*/)?(inputs\.arrow|\.(settings\.json|inputs\.arrow)\.[^/]+\.partial)")


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuiltCorpus:
    """A corpus that a build wrote."""

    directory: str
    manifest: Manifest

    def __str__(self) -> str:
        found = self.manifest
        sizes = f"{counted(found.num_documents, 'document')}, {counted(found.num_tokens, 'token')}"
        return f"{one_line(self.directory)}: {sizes} in {counted(found.num_shards, 'shard')}"

    def __repr__(self) -> str:
        return f"<BuiltCorpus {self}>"


def check_own(workspace: Workspace) -> None:
    """Refuse a work folder that no build made. A build's own has settings, or only a lock and empty folders.

    Raises:
        UsageError: it is a link or a file, or has files and no settings.
        BuildError: its settings are damaged.
    """
    store = workspace.store
    root = store.where(names.WORK)
    hint = "move it away, or give another --out"
    in_the_place = obstacle(store, names.WORK)
    if in_the_place is not None:
        raise UsageError(f"{root} is {in_the_place}, and a build needs a folder of its own there", hint=hint)
    if load_settings(workspace) is not None:
        return
    for name in files_below(store, names.WORK):
        if name != LOCK and _UNFINISHED_SETTINGS.fullmatch(name) is None:
            raise UsageError(
                f"{root} was not made by a build: it holds {name.removeprefix(f'{names.WORK}/')} and no "
                f"{SETTINGS.removeprefix(f'{names.WORK}/')}",
                hint=hint,
            )


def check_directory(workspace: Workspace, outputs: Sequence[Output]) -> None:
    """Refuse a directory in which a build would write over something that no build wrote, or remove it.

    A file is a build's own if a manifest names it, or the settings of an unfinished build do; nothing else is removed,
    not by ``--force`` either.

    Raises:
        UsageError: the directory has other files and no build, or one of the build's files is someone else's.
    """
    store = workspace.store
    if obstacle(store, "") is not None:
        raise UsageError(f"--out {store.location} is a file", hint="give a directory")
    found = present(store)
    if not found:
        return
    ours = _own_files(workspace)
    begun = {output.name for output in _begun_outputs(workspace)}
    known = begun | {name.removesuffix(names.MANIFEST).rstrip("/") for name in ours if _is_manifest(name)}
    if not known:
        _check_empty(store, "build")
    for output in outputs:
        for folder in _folders(output):
            in_the_place = obstacle(store, folder)
            if in_the_place is not None:
                raise UsageError(
                    f"{store.where(folder)} is {in_the_place}, and a build with a validation split or an append needs "
                    "a folder of its own there",
                    hint="move it away, or give another --out",
                )
        if output.name and output.name not in known:
            what = "generation of a corpus" if output.generation else "corpus of a build with a validation split"
            _check_empty(output.store, what)
        for name in sorted(names.SIDE_FILES & present(output.store)):
            if output.name_of(name) not in ours:
                raise _in_the_way(output.store.where(name))


def claim(workspace: Workspace, output: Output) -> None:
    """Write down which files of an output are the build's, before the first is written: `--force` removes no others.

    Raises:
        UsageError: there is such a file, and the build did not write it.
    """
    known = load_names(workspace, ASSEMBLED)
    files = set(map(output.name_of, names.SIDE_FILES))
    if files <= known:
        return
    for name in sorted(names.SIDE_FILES & present(output.store)):
        if output.name_of(name) not in known:
            raise _in_the_way(output.store.where(name))
    save_names(workspace, ASSEMBLED, known | files)


def _in_the_way(path: str) -> UsageError:
    """The error for a file that a build would write over, though no build wrote it."""
    return UsageError(
        f"{path} was not written by a build, and the build would replace it",
        hint="move it away and run the same command again, or give another --out",
    )


def _check_empty(store: Store, expected: str) -> None:
    everything = present(store)
    found = sorted(everything - {names.WORK})
    if not found:
        return
    damaged = f"; {store.where(names.MANIFEST)} is damaged: remove the directory if it can go"
    raise UsageError(
        f"--out {store.location} is not empty and holds no {expected}: {', '.join(found[:3])}",
        hint="give a new or empty directory" + (damaged if names.MANIFEST in everything else ""),
    )


def has_begun(workspace: Workspace) -> bool:
    """Whether an unfinished build left a shard or a receipt."""
    stages = (workspace, workspace.hashing, workspace.dealing)
    return any(present(workspace.store, stage.receipts) for stage in stages) or any(
        any(_shards(output)) for output in _begun_outputs(workspace)
    )


def remove_build(workspace: Workspace, outputs: Sequence[Output]) -> None:
    """Remove the files of corpora and of an unfinished build, the lock and its settings excepted, and nothing else.

    Of outputs of an append, the generations before stay; otherwise all generations go.

    Killed at any moment, it leaves no manifest of a corpus and no receipt of a shard that is gone, and a list by which
    the next run removes the rest.
    """
    folders = {output.name for output in outputs if output.generation}
    found = sorted(name for name in _own_files(workspace) if not folders or name.rpartition("/")[0] in folders)
    save_names(workspace, REMOVING, found)
    workspace.store.delete(*filter(_is_manifest, found))
    workspace.clear()
    workspace.store.delete(*found)


def is_removing(workspace: Workspace) -> bool:
    """Whether a run that started over was stopped before all was removed."""
    return REMOVING.removeprefix(f"{names.WORK}/") in present(workspace.store, names.WORK)


def _is_manifest(name: str) -> bool:
    return name.rpartition("/")[2] == names.MANIFEST


def _own_files(workspace: Workspace) -> set[str]:
    """The files in the output directory that manifests and the settings of an unfinished build name.

    A folder ``train`` or ``validation`` counts only if its manifest says that it is this part of a split.
    """
    found = load_names(workspace, REMOVING) | load_names(workspace, ASSEMBLED)
    for output in _all_outputs(workspace):
        manifest = _manifest_of(workspace, output)
        if manifest is not None:
            listed = {names.MANIFEST, names.REPORT, *manifest.files} & names.SIDE_FILES
            found.update(map(output.name_of, listed))
            found.update(map(output.name_of, _shards(output)))
    for output in _begun_outputs(workspace):
        found.update(map(output.name_of, _shards(output)))
    folders = {name.rpartition("/")[0] for name in found}
    linked = {folder for folder in folders if _is_linked(workspace, folder)}
    return {name for name in found if name.rpartition("/")[0] not in linked}


def _all_outputs(workspace: Workspace) -> Iterator[Output]:
    """Every place in the directory where a generation of a corpus can lie."""
    for is_split in (False, True):
        for output in workspace.outputs(is_split=is_split):
            yield output
            if _is_linked(workspace, output.name):
                continue
            for generation in generation_numbers(present(output.corpus)):
                yield from (
                    later
                    for later in workspace.outputs(is_split=is_split, generation=generation)
                    if later.split == output.split
                )


def _folders(output: Output) -> list[str]:
    """The folder of an output, and those above it, from the top."""
    return list(accumulate(filter(None, output.name.split("/")), names.in_folder))


def _is_linked(workspace: Workspace, folder: str) -> bool:
    """Whether something else is in the place of a folder, or of one above it."""
    parts = filter(None, folder.split("/"))
    return any(obstacle(workspace.store, part) is not None for part in accumulate(parts, names.in_folder))


def _begun_outputs(workspace: Workspace) -> tuple[Output, ...]:
    """Where an unfinished build writes; empty if there is no such build."""
    settings = load_settings(workspace)
    if settings is None:
        return ()
    is_split = settings.config.validation_fraction is not None
    outputs = workspace.outputs(is_split=is_split, generation=settings.generation)
    return tuple(output for output in outputs if not _is_linked(workspace, output.name))


def _manifest_of(workspace: Workspace, output: Output) -> Manifest | None:
    """The manifest of a corpus that a build wrote as this output, if it can be decoded."""
    if _is_linked(workspace, output.name):
        return None
    try:
        fields = json.loads(output.store.get(names.MANIFEST))
        fields.pop("manifest_sha256")
        manifest = msgspec.convert(fields, Manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    number = 0 if manifest.generation is None else manifest.generation.number
    is_this = number == output.generation and (not output.split or manifest.build.split == output.split)
    return manifest if is_this or not output.name else None


def _shards(output: Output) -> Iterator[str]:
    return filter(names.is_shard_name, present(output.store))


def finished_corpora(
    workspace: Workspace, outputs: Sequence[Output], settings: Settings
) -> tuple[BuiltCorpus, ...] | None:
    """The corpora that are asked for, if they are all complete; else None.

    Raises:
        ConfigurationChangedError: it holds other corpora, or the sources have changed since.
    """
    for is_split in (True, False):
        for output in workspace.outputs(is_split=is_split, generation=settings.generation):
            if output not in outputs and _manifest_of(workspace, output) is not None:
                raise ConfigurationChangedError(
                    f"{workspace.out} belongs to another build: {output.location} is a corpus "
                    f"{'of a validation split' if is_split else 'without a validation split'}",
                    hint="give the settings of that build, another --out, or --force to start over",
                )
    complete = [output for output in outputs if names.MANIFEST in present(output.store)]
    if len(complete) < len(outputs):
        if complete and load_settings(workspace) is None:
            missing = next(output for output in outputs if output not in complete)
            raise ConfigurationChangedError(
                f"{workspace.out} belongs to another build: it has {complete[0].location}, but not {missing.location}",
                hint="put that back, give another --out, or --force to start over",
            )
        return None  # a build that was stopped, perhaps between the two
    corpora = tuple(
        BuiltCorpus(directory=output.location, manifest=_checked_manifest(workspace.out, output, settings))
        for output in outputs
    )
    left = load_settings(workspace)
    is_of_append = left is not None and left.generation > settings.generation
    # of a build that was stopped between its manifest and its last step
    if names.WORK in present(workspace.store) and not is_of_append:
        with contextlib.suppress(BuildError), lock(workspace):  # or of one that starts over
            workspace.remove()
    return corpora


def _checked_manifest(out: str, output: Output, settings: Settings) -> Manifest:
    with open_corpus(output.location, generation=0) as corpus:
        manifest, sources = corpus.manifest, corpus.sources()
    config = msgspec.structs.replace(settings.config, split=output.split or None)
    before = Settings(
        config=manifest.build,
        tokenizer=manifest.tokenizer,
        on_bad_record="fail",
        on_bad_source="fail",
        sources=_inputs_at_build(output, sources, settings),
        arguments=manifest.arguments,
        generation=settings.generation,
        previous=settings.previous,
    )
    now = msgspec.structs.replace(settings, config=config)
    check_same_settings(before, now, out=out, is_complete=True)
    fingerprint = recipe_fingerprint(
        config,
        settings.tokenizer,
        ((source.argument, source.path, source.num_bytes) for source in settings.sources),
    )
    if fingerprint != manifest.fingerprints.recipe:
        raise ConfigurationChangedError(
            f"{out} was built from other sources: {len(sources)} then, {len(settings.sources)} now",
            hint="give another --out, or --force to start over",
        )
    return manifest


def roots_at_build(store: Store) -> list[str]:
    """Where each argument of the build of a corpus was, by its report; empty if that is gone."""
    try:
        return [str(root) for root in json.loads(store.get(names.REPORT))["roots"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _inputs_at_build(output: Output, sources: Iterable[Any], settings: Settings) -> InputTable:
    """The inputs that a corpus was made from.

    Places and versions are in no manifest; an input that moved is the same if its size and version are.
    """
    roots, versions = _places_at_build(output, settings)
    same = sorted(roots) == sorted(settings.sources.roots)
    builder = InputTableBuilder(roots if same else settings.sources.roots)
    for old, now in zip(sources, settings.sources, strict=False):
        version = versions.get((old.argument, old.path), now.version)
        builder.append(old.argument, old.path, ("", None), old.num_bytes, version)
    return builder.finish()


def _places_at_build(output: Output, settings: Settings) -> tuple[list[str], dict[tuple[int, str], str]]:
    """From the build report: where each argument was, and the version of each source; empty if it is gone.

    Raises:
        ConfigurationChangedError: there are too many sources for a list, and some have another time now.
    """
    try:
        report = json.loads(output.store.get(names.REPORT))
        roots = [str(root) for root in report["roots"]]
        times = {(source["argument"], source["path"]): source["version"] for source in report["sources"]}
        expected = report.get("source_times_sha256")
    except (OSError, ValueError, KeyError, TypeError):
        return [], {}
    if expected is not None and expected != settings.sources.versions_sha256:
        raise ConfigurationChangedError(
            f"{output.store.location} was built from {len(settings.sources):,} sources, "
            "some of which were modified since",
            hint="give another --out, or --force to start over",
        )
    return roots, times
