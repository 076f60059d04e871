"""Determines what an output directory holds before a build: nothing, an unfinished build, corpora, or other files.

A build begins only in an empty folder, or in one with the work folder or the manifest of a build. From then on it owns
all files with the names of a corpus. It replaces and removes only these.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Sequence
from itertools import accumulate

import msgspec

from tokshard.errors import UNDECODABLE, UsageError
from tokshard.format import names
from tokshard.format.generations import generation_numbers
from tokshard.format.manifest import Manifest
from tokshard.pipeline.workspace.places import LOCK, REQUEST, Output, Workspace, has_request
from tokshard.store import Store, files_below, obstacle, present

_UNFINISHED_REQUEST = re.compile(r"(.*/)?(inputs\.arrow|\.(build\.json|inputs\.arrow)\.[^/]+\.partial)")


def check_directory(workspace: Workspace, outputs: Sequence[Output]) -> None:
    """Refuse a directory in which a build would overwrite or remove files that no build wrote.

    Raises:
        UsageError: a folder that the build needs is something else, or has other files.
    """
    try:
        _check(workspace, outputs)
    except UsageError:
        if not has_request(workspace.store):
            raise
        _check(workspace, outputs)  # another job may have begun the build meanwhile


def _check(workspace: Workspace, outputs: Sequence[Output]) -> None:
    store = workspace.store
    for folder in dict.fromkeys(["", names.WORK, *(folder for output in outputs for folder in _folders(output))]):
        in_the_place = obstacle(store, folder)
        if in_the_place is not None:
            raise UsageError(
                f"{store.where(folder)} is {in_the_place}, and a build needs a folder of its own there",
                hint="move it away, or give another --out",
            )
    if not present(store):
        return
    has_begun = has_request(store)
    if not has_begun:
        _check_own(store)
        if not any(manifest_of(output) for output in _places(workspace)):
            _check_empty(store, present(store) - {names.WORK}, "build")
    for output in outputs:
        if output.folder and manifest_of(output) is None:
            what = "generation of a corpus" if output.generation else "corpus of a build with a validation split"
            _check_empty(output.store, _foreign(output) if has_begun else present(output.store), what)


def _check_own(store: Store) -> None:
    """Refuse a work folder that no build made: one with files but no request."""
    for name in files_below(store, names.WORK):
        if name != LOCK and _UNFINISHED_REQUEST.fullmatch(name) is None:
            raise UsageError(
                f"{store.where(names.WORK)} was not made by a build: it holds {name.removeprefix(f'{names.WORK}/')} "
                f"and no {REQUEST.removeprefix(f'{names.WORK}/')}",
                hint="move it away, or give another --out",
            )


def _foreign(output: Output) -> set[str]:
    """Entries of a folder without the name of a file of a corpus."""
    return {
        name
        for name in present(output.store)
        if name not in names.SIDE_FILES and not names.is_shard_name(name) and not names.generation_number(name)
    }


def _check_empty(store: Store, found: Collection[str], expected: str) -> None:
    if found:
        is_damaged = expected == "build" and names.MANIFEST in found  # one of another kind may be sound
        damaged = f"; {store.where(names.MANIFEST)} is damaged: remove the directory if it can go"
        raise UsageError(
            f"--out {store.location} is not empty and holds no {expected}: {', '.join(sorted(found)[:3])}",
            hint="give a new or empty directory" + (damaged if is_damaged else ""),
        )


def remove_corpora(workspace: Workspace, outputs: Sequence[Output], *, are_complete: bool, has_begun: bool) -> None:
    """Remove the corpora in the directory of a build, or the generation that an append writes.

    Only files with the names of a corpus are removed. Manifests go first, newest generation first: killed at any
    moment, it leaves complete corpora or none.

    Args:
        outputs: outputs of the build.
        are_complete: whether to remove complete corpora.
        has_begun: whether to remove other outputs that an interrupted start-over left.
    """
    store, ours = workspace.store, []
    for output in outputs if outputs[0].generation else _places(workspace):
        is_corpus = not output.folder or manifest_of(output) is not None
        is_foreign = names.MANIFEST in present(output.store) or bool(_foreign(output))
        is_left = has_begun and not is_corpus and not is_foreign and output not in outputs
        if is_left or (are_complete and is_corpus):
            ours.append(output)
    for output in reversed(ours):
        store.delete(names.in_folder(output.folder, names.MANIFEST))
    for output in ours:
        here = present(output.store)
        found = [*files_of_cells(output.store)] if names.MIX in here else []
        found += (name for name in here if name in names.SIDE_FILES or names.is_shard_name(name))
        found.sort(key=names.is_shard_name)  # shards last: where there are some, other settings are refused
        store.delete(*(names.in_folder(output.folder, name) for name in found))


def files_of_cells(out: Store) -> Iterator[str]:
    """The files of cells that a view has or left in their folders, and nothing else that is there.

    The table of a cell is its first file, so it is the last of them here, to be removed last.
    """
    for folder in (name[:-1] for name in out.names() if "=" in name and name.endswith("/")):
        found = set(files_below(out, folder))
        for table in (name for name in found if os.path.basename(name) == names.KEPT):
            place = os.path.dirname(table)
            yield from found & {f"{place}/{name}" for name in (names.FILES_OF_VIEW - {names.KEPT}) | {names.MANIFEST}}
            yield table


def _places(workspace: Workspace) -> Iterator[Output]:
    """Every place in the directory where a generation of a corpus can be, without links."""
    for is_split in (False, True):
        for output in workspace.outputs(is_split=is_split):
            if any(obstacle(workspace.store, folder) is not None for folder in _folders(output)):
                continue
            yield output
            for generation in generation_numbers(present(output.corpus)):
                later = workspace.outputs(is_split=is_split, generation=generation)
                yield from (one for one in later if one.split == output.split)


def _folders(output: Output) -> list[str]:
    """The folder of an output and its parents, from the top."""
    return list(accumulate(filter(None, output.folder.split("/")), names.in_folder))


def manifest_of(output: Output) -> Manifest | None:
    """The manifest of the corpus that a build wrote as this output, if it can be decoded."""
    try:
        fields = json.loads(output.store.get(names.MANIFEST))
        fields.pop("manifest_sha256")
        manifest = msgspec.convert(fields, Manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, *UNDECODABLE):
        return None
    number = 0 if manifest.generation is None else manifest.generation.number
    is_this = number == output.generation and (not output.split or manifest.build.split == output.split)
    return manifest if is_this or not output.folder else None


def complete_outputs(workspace: Workspace) -> tuple[Output, ...]:
    """The complete corpora in a directory: none, one, or the two of a split."""
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            return outputs
    return ()
