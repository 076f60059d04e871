"""What the output directory holds before a build: nothing, a build that was stopped, corpora, or something else."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tokshard.build.assembly import times_sha256
from tokshard.build.hub import revisions
from tokshard.build.workspace import (
    Output,
    Settings,
    Workspace,
    check_same_settings,
    load_settings,
    lock,
    pack_states,
)
from tokshard.errors import BuildError, ConfigurationChangedError, UsageError
from tokshard.format import names
from tokshard.format.manifest import Manifest, recipe_fingerprint
from tokshard.format.reader import open_corpus
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


def check_directory(out: Path) -> None:
    """Refuse a directory that holds something else than a build.

    Raises:
        UsageError: it is a file, or has other files and no build.
    """
    if not out.exists():
        return
    if not out.is_dir():
        raise UsageError(f"--out {out} is a file", hint="give a directory")
    foreign = [path.name for path in out.iterdir() if not _is_ours(path.name)]
    is_build = (out / names.MANIFEST).exists() or (out / names.WORK).exists() or _is_split(out)
    if foreign and not is_build:
        raise UsageError(
            f"--out {out} is not empty and holds no build: {', '.join(sorted(foreign)[:3])}",
            hint="give a new or empty directory",
        )


def _is_ours(name: str) -> bool:
    return name in names.SIDE_FILES or names.is_shard_name(name)


def _is_split(out: Path) -> bool:
    """Whether a directory holds a corpus of a build with a validation split."""
    return any((out / name / names.MANIFEST).exists() for name in (names.TRAIN, names.VALIDATION))


def has_begun(workspace: Workspace) -> bool:
    """Whether a build left a shard or a receipt."""
    shards = (path for path in _corpus_files(workspace) if names.is_shard_name(path.name))
    receipts = [path for path in (workspace.receipts, workspace.hashing.receipts) if path.exists()]
    return any(any(path.iterdir()) for path in receipts) or any(shards)


def _corpus_files(workspace: Workspace) -> Iterator[Path]:
    """Files of the corpora that this or another build wrote here."""
    for directory in (workspace.out, workspace.out / names.TRAIN, workspace.out / names.VALIDATION):
        if directory.is_dir() and (directory == workspace.out or _is_corpus(directory)):
            yield from (path for path in directory.iterdir() if path.name != names.WORK and _is_ours(path.name))


def _is_corpus(directory: Path) -> bool:
    """Whether a folder holds files of a corpus and nothing else."""
    return all(_is_ours(path.name) for path in directory.iterdir())


def remove_build(workspace: Workspace) -> None:
    """Remove every file of a corpus or build, the lock excepted, and nothing else.

    Killed at any moment, it leaves no manifest of a corpus and no receipt of a shard that is gone.
    """
    found = list(_corpus_files(workspace))
    manifests = [path for path in found if path.name == names.MANIFEST]
    for path in manifests:
        path.unlink()
    workspace.clear()
    for path in found:
        if path not in manifests:
            path.unlink()
    for name in (names.TRAIN, names.VALIDATION):
        with contextlib.suppress(OSError):  # it has other files, or is none
            (workspace.out / name).rmdir()


def finished_corpora(
    workspace: Workspace, outputs: Sequence[Output], settings: Settings
) -> tuple[BuiltCorpus, ...] | None:
    """The corpora that are asked for, if the directory holds them.

    Raises:
        ConfigurationChangedError: it holds other corpora, or the sources have changed since.
    """
    for is_split in (True, False):
        for output in workspace.outputs(is_split=is_split):
            if output not in outputs and (output.directory / names.MANIFEST).exists():
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
    times = _times_at_build(output.directory, settings)
    config = msgspec.structs.replace(settings.config, split=output.name or None)
    before = Settings(
        config=manifest.build,
        tokenizer=manifest.tokenizer,
        on_bad_record="fail",
        on_bad_source="fail",
        # places and times are in no manifest; a source that moved is the same if its size and time are
        sources=pack_states(
            settings.sources.roots,
            (
                (old.argument, old.path, old.num_bytes, times.get((old.argument, old.path), now.mtime_ns))
                for old, now in zip(sources, settings.sources, strict=False)
            ),
        ),
        revisions=revisions(manifest.arguments),
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


def _times_at_build(out: Path, settings: Settings) -> dict[tuple[int, str], int]:
    """Modification time of each source when it was read, from the build report; empty if that is gone.

    Raises:
        ConfigurationChangedError: there are too many sources for a list, and some have another time now.
    """
    try:
        report = json.loads((out / names.REPORT).read_bytes())
        times = {(source["argument"], source["path"]): source["mtime_ns"] for source in report["sources"]}
        expected = report.get("source_times_sha256")
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    if expected is not None and expected != times_sha256(settings.sources):
        raise ConfigurationChangedError(
            f"{out} was built from {len(settings.sources):,} sources, some of which were modified since",
            hint="give another --out, or --force to start over",
        )
    return times
