"""What the output directory holds before a build: nothing, a build that was stopped, corpora, or something else."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.format.manifest import Manifest, recipe_fingerprint
from tokshard.format.opening import open_corpus
from tokshard.format.storage import sync_directory
from tokshard.pipeline.commit import in_the_way
from tokshard.pipeline.sources.inputs import InputTable, InputTableBuilder
from tokshard.pipeline.workspace.workspace import (
    Output,
    Settings,
    Workspace,
    check_same_settings,
    load_paths,
    load_settings,
    lock,
    save_paths,
)
from tokshard.wording import counted, one_line


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class BuiltCorpus:
    """A corpus that a build wrote."""

    directory: Path
    manifest: Manifest

    def __str__(self) -> str:
        found = self.manifest
        sizes = f"{counted(found.num_documents, 'document')}, {counted(found.num_tokens, 'token')}"
        return f"{one_line(str(self.directory))}: {sizes} in {counted(found.num_shards, 'shard')}"

    def __repr__(self) -> str:
        return f"<BuiltCorpus {self}>"


def check_directory(workspace: Workspace, outputs: Sequence[Output]) -> None:
    """Refuse a directory in which a build would write over something that no build wrote, or remove it.

    A file is a build's own if a manifest names it, or the settings of an unfinished build do; nothing else is removed,
    not by ``--force`` either.

    Raises:
        UsageError: the directory has other files and no build, or one of the build's files is someone else's.
    """
    out = workspace.out
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file", hint="give a directory")
    ours = _own_files(workspace)
    begun = _begun_outputs(workspace)
    manifests = {path.parent for path in ours if path.name == names.MANIFEST}
    if not begun and not manifests:
        _check_empty(out, "build")
    for output in outputs:
        directory = output.directory
        if output.name and (directory.is_symlink() or (directory.exists() and not directory.is_dir())):
            raise UsageError(
                f"{directory} is a {'link' if directory.is_symlink() else 'file'}, and a build with a validation "
                "split needs a folder of its own there",
                hint="move it away, or give another --out",
            )
        if output.name and directory.exists() and directory not in {*manifests, *(known.directory for known in begun)}:
            _check_empty(directory, "corpus of a build with a validation split")
        for name in sorted(names.SIDE_FILES):
            if os.path.lexists(directory / name) and directory / name not in ours:
                raise in_the_way(directory / name)


def _check_empty(directory: Path, expected: str) -> None:
    found = sorted(path.name for path in directory.iterdir() if path.name != names.WORK)
    if not found:
        return
    damaged = directory / names.MANIFEST
    raise UsageError(
        f"--out {directory} is not empty and holds no {expected}: {', '.join(found[:3])}",
        hint="give a new or empty directory"
        + (f"; {damaged} is damaged: remove the directory if it can go" if damaged.exists() else ""),
    )


def has_begun(workspace: Workspace) -> bool:
    """Whether an unfinished build left a shard or a receipt."""
    receipts = [path for path in (workspace.receipts, workspace.hashing.receipts) if path.exists()]
    return any(any(path.iterdir()) for path in receipts) or any(
        any(_shards(output.directory)) for output in _begun_outputs(workspace)
    )


def remove_build(workspace: Workspace) -> None:
    """Remove the files of corpora and of an unfinished build, the lock and its settings excepted, and nothing else.

    Killed at any moment, it leaves no manifest of a corpus and no receipt of a shard that is gone, and a list by which
    the next run removes the rest.
    """
    found = sorted(_own_files(workspace))
    save_paths(workspace.removing, found, below=workspace.out)
    for path in found:
        if path.name == names.MANIFEST:
            path.unlink(missing_ok=True)
            sync_directory(path.parent)
    workspace.clear()
    for path in found:
        path.unlink(missing_ok=True)
    for name in (names.TRAIN, names.VALIDATION):
        if not (workspace.out / name).is_symlink():
            with contextlib.suppress(OSError):  # it has other files, or does not exist
                (workspace.out / name).rmdir()


def _own_files(workspace: Workspace) -> set[Path]:
    """The files in the output directory that manifests and the settings of an unfinished build name.

    A folder ``train`` or ``validation`` counts only if its manifest says that it is this part of a split.
    """
    out = workspace.out
    found = load_paths(workspace.removing, below=out) | load_paths(workspace.assembled, below=out)
    for output in (*workspace.outputs(is_split=False), *workspace.outputs(is_split=True)):
        manifest = _manifest_of(output)
        if manifest is not None:
            listed = {names.MANIFEST, names.REPORT, *manifest.files} & names.SIDE_FILES
            found |= {output.directory / name for name in listed}
            found.update(_shards(output.directory))
    for output in _begun_outputs(workspace):
        found.update(_shards(output.directory))
    return {path for path in found if not path.parent.is_symlink() or path.parent == out}


def _begun_outputs(workspace: Workspace) -> tuple[Output, ...]:
    """Where an unfinished build writes; nothing without one."""
    settings = load_settings(workspace)
    if settings is None:
        return ()
    outputs = workspace.outputs(is_split=settings.config.validation_fraction is not None)
    return tuple(output for output in outputs if not output.name or not output.directory.is_symlink())


def _manifest_of(output: Output) -> Manifest | None:
    """The manifest of a corpus that a build wrote as this output, if it can be decoded at all."""
    if output.name and output.directory.is_symlink():
        return None
    try:
        fields = json.loads((output.directory / names.MANIFEST).read_bytes())
        fields.pop("manifest_sha256")
        manifest = msgspec.convert(fields, Manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    return manifest if not output.name or manifest.build.split == output.name else None


def _shards(directory: Path) -> Iterator[Path]:
    with contextlib.suppress(FileNotFoundError):
        yield from (path for path in directory.iterdir() if names.is_shard_name(path.name))


def finished_corpora(
    workspace: Workspace, outputs: Sequence[Output], settings: Settings
) -> tuple[BuiltCorpus, ...] | None:
    """The corpora that are asked for, if the directory holds them.

    Raises:
        ConfigurationChangedError: it holds other corpora, or the sources have changed since.
    """
    for is_split in (True, False):
        for output in workspace.outputs(is_split=is_split):
            if output not in outputs and _manifest_of(output) is not None:
                raise ConfigurationChangedError(
                    f"{workspace.out} belongs to another build: {output.directory} is a corpus "
                    f"{'of a validation split' if is_split else 'without a validation split'}",
                    hint="give the settings of that build, another --out, or --force to start over",
                )
    present = [output for output in outputs if (output.directory / names.MANIFEST).exists()]
    if len(present) < len(outputs):
        if present and load_settings(workspace) is None:
            missing = next(output for output in outputs if output not in present)
            raise ConfigurationChangedError(
                f"{workspace.out} belongs to another build: it has {present[0].directory}, but not {missing.directory}",
                hint="put that back, give another --out, or --force to start over",
            )
        return None  # a build that was stopped, perhaps between the two
    corpora = tuple(
        BuiltCorpus(directory=output.directory, manifest=_checked_manifest(workspace.out, output, settings))
        for output in outputs
    )
    if workspace.root.exists():  # of a build that was stopped between its manifest and its last step
        with contextlib.suppress(BuildError), lock(workspace):  # or of one that starts over
            workspace.remove()
    return corpora


def _checked_manifest(out: Path, output: Output, settings: Settings) -> Manifest:
    with open_corpus(output.directory) as corpus:
        manifest, sources = corpus.manifest, corpus.sources()
    config = msgspec.structs.replace(settings.config, split=output.name or None)
    before = Settings(
        config=manifest.build,
        tokenizer=manifest.tokenizer,
        on_bad_record="fail",
        on_bad_source="fail",
        sources=_inputs_at_build(output.directory, sources, settings),
        arguments=manifest.arguments,
    )
    check_same_settings(before, msgspec.structs.replace(settings, config=config), out=out)
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


def _inputs_at_build(out: Path, sources: Iterable[Any], settings: Settings) -> InputTable:
    """The inputs that a corpus was made of.

    Places and versions are in no manifest; an input that moved is the same if its size and version are.
    """
    roots, versions = _places_at_build(out, settings)
    same = sorted(roots) == sorted(settings.sources.roots)
    builder = InputTableBuilder(roots if same else settings.sources.roots)
    for old, now in zip(sources, settings.sources, strict=False):
        version = versions.get((old.argument, old.path), now.version)
        builder.append(old.argument, old.path, ("", None), old.num_bytes, version)
    return builder.finish()


def _places_at_build(out: Path, settings: Settings) -> tuple[list[str], dict[tuple[int, str], str]]:
    """From the build report: where each argument was, and the version of each source; empty if it is gone.

    Raises:
        ConfigurationChangedError: there are too many sources for a list, and some have another time now.
    """
    try:
        report = json.loads((out / names.REPORT).read_bytes())
        roots = [str(root) for root in report["roots"]]
        times = {(source["argument"], source["path"]): source["version"] for source in report["sources"]}
        expected = report.get("source_times_sha256")
    except (OSError, ValueError, KeyError, TypeError):
        return [], {}
    if expected is not None and expected != settings.sources.versions_sha256:
        raise ConfigurationChangedError(
            f"{out} was built from {len(settings.sources):,} sources, some of which were modified since",
            hint="give another --out, or --force to start over",
        )
    return roots, times
