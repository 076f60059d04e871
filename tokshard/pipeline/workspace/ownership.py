"""What an output directory holds before a build: nothing, an unfinished build, corpora, or something else.

A build begins only in an empty folder, or where a build left its work folder or a manifest. From then on the files with
the names of a corpus are the build's; it replaces and removes those, and nothing else.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from itertools import accumulate

import msgspec

from tokshard.errors import UsageError
from tokshard.format import names
from tokshard.format.generations import generation_numbers
from tokshard.format.manifest import Manifest
from tokshard.pipeline.workspace.places import LOCK, REQUEST, Output, Workspace
from tokshard.store import Store, files_below, obstacle, present

_UNFINISHED_REQUEST = re.compile(r"(.*/)?(inputs\.arrow|\.(build\.json|inputs\.arrow)\.[^/]+\.partial)")


def check_own(workspace: Workspace) -> None:
    """Refuse a work folder that no build made: one without a request that holds more than a lock.

    Raises:
        UsageError: it is a link or a file, or has other files and no request.
    """
    store = workspace.store
    root = store.where(names.WORK)
    hint = "move it away, or give another --out"
    in_the_place = obstacle(store, names.WORK)
    if in_the_place is not None:
        raise UsageError(f"{root} is {in_the_place}, and a build needs a folder of its own there", hint=hint)
    if _has_begun(store):
        return
    for name in files_below(store, names.WORK):
        if name != LOCK and _UNFINISHED_REQUEST.fullmatch(name) is None:
            raise UsageError(
                f"{root} was not made by a build: it holds {name.removeprefix(f'{names.WORK}/')} and no "
                f"{REQUEST.removeprefix(f'{names.WORK}/')}",
                hint=hint,
            )


def check_directory(workspace: Workspace, outputs: Sequence[Output]) -> None:
    """Refuse a directory in which a build would write over something that no build wrote, or remove it.

    Raises:
        UsageError: a folder that the build needs has other files, and no build wrote there.
    """
    store = workspace.store
    if obstacle(store, "") is not None:
        raise UsageError(f"--out {store.location} is a file", hint="give a directory")
    has_begun = _has_begun(store)
    if not has_begun and not any(manifest_of(output) for output in _all_outputs(workspace)):
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
        if output.folder and manifest_of(output) is None and not (has_begun and _is_ours(output)):
            what = "generation of a corpus" if output.generation else "corpus of a build with a validation split"
            _check_empty(output.store, what)


def _has_begun(store: Store) -> bool:
    return REQUEST.removeprefix(f"{names.WORK}/") in present(store, names.WORK)


def _is_ours(output: Output) -> bool:
    """Whether a folder of an unfinished build holds nothing but files with the names of a corpus."""
    found = present(output.store)
    return all(name in names.SIDE_FILES or names.is_shard_name(name) or names.generation_number(name) for name in found)


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


def remove_corpora(outputs: Sequence[Output], workspace: Workspace) -> None:
    """Remove the corpora in a directory, or the generation that an append writes: files with the names of one.

    The manifests go first, the newest generation before the others: killed at any moment, it leaves whole corpora
    or none.
    """
    wanted = outputs if outputs[0].generation else list(_all_outputs(workspace))
    own = {output.corpus.location for output in outputs}
    ours = [output for output in wanted if manifest_of(output) is not None or output.corpus.location in own]
    store = workspace.store
    for output in reversed(ours):
        store.delete(names.in_folder(output.folder, names.MANIFEST))
    for output in ours:
        found = [name for name in present(output.store) if name in names.SIDE_FILES or names.is_shard_name(name)]
        found.sort(key=names.is_shard_name)  # shards last: where there are some, other settings are refused
        store.delete(*(names.in_folder(output.folder, name) for name in found))


def _all_outputs(workspace: Workspace) -> Iterator[Output]:
    """Every place in the directory where a generation of a corpus can lie."""
    for is_split in (False, True):
        for output in workspace.outputs(is_split=is_split):
            if not _is_linked(workspace, output.folder):
                yield output
                for generation in sorted(generation_numbers(present(output.corpus))):
                    later = workspace.outputs(is_split=is_split, generation=generation)
                    yield from (one for one in later if one.split == output.split)


def _folders(output: Output) -> list[str]:
    """The folder of an output, and those above it, from the top."""
    return list(accumulate(filter(None, output.folder.split("/")), names.in_folder))


def _is_linked(workspace: Workspace, folder: str) -> bool:
    """Whether something else is in the place of a folder, or of one above it."""
    parts = filter(None, folder.split("/"))
    return any(obstacle(workspace.store, part) is not None for part in accumulate(parts, names.in_folder))


def manifest_of(output: Output) -> Manifest | None:
    """The manifest of a corpus that a build wrote as this output, if it can be decoded."""
    try:
        fields = json.loads(output.store.get(names.MANIFEST))
        fields.pop("manifest_sha256")
        manifest = msgspec.convert(fields, Manifest)
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return None
    number = 0 if manifest.generation is None else manifest.generation.number
    is_this = number == output.generation and (not output.split or manifest.build.split == output.split)
    return manifest if is_this or not output.folder else None


def complete_outputs(workspace: Workspace) -> tuple[Output, ...]:
    """The corpora in a directory that are complete: one, or the two of a split; none if there are none."""
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            return outputs
    return ()
