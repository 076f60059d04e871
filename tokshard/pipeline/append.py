"""The generations of a corpus for ``--append``, and the settings that the next one must share with them."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping, Sequence

import msgspec

from tokshard.errors import ConfigurationChangedError, DamagedCorpusError, UsageError
from tokshard.format import names
from tokshard.format.content import join_contents
from tokshard.format.corpus import Corpus
from tokshard.format.files import file_sha256
from tokshard.format.loss import kept_columns
from tokshard.format.manifest import Generation, Manifest, content_fingerprint
from tokshard.format.opening import open_corpus, read_generations, read_manifest
from tokshard.format.tables import SourceInfo, read_sources
from tokshard.pipeline.adopt import BuildReport, finished_corpora, previous_of, read_report
from tokshard.pipeline.options import TEXT, kept_settings
from tokshard.pipeline.request import Build, changes, load_request, settings_of
from tokshard.pipeline.sources.corpora import share_documents
from tokshard.pipeline.sources.inputs import PINNED, location_of, read_once_name
from tokshard.pipeline.tasks.duplicates import EarlierTexts
from tokshard.pipeline.workspace.ownership import complete_outputs
from tokshard.pipeline.workspace.places import Output, Workspace
from tokshard.store import is_uri, look_at, real_location, side_by_side


def next_generation(build: Build) -> Build:
    """The generation that an append builds: the next one, or one that exists or was begun with the same settings.

    It takes the sizes of shards and tasks from the corpus.

    Args:
        build: planned like a build of a separate corpus.

    Raises:
        UsageError: there is no complete corpus to append to, or one of the sources is in it already.
        ConfigurationChangedError: it was built with another tokenizer, other columns or other rules.
        CorpusError: it is damaged.
    """
    corpora = _corpora(build.workspace)
    before = [_manifests(output) for output in corpora]
    number = min(map(len, before))
    manifests = before[0][:number]
    _check_same(manifests[-1], build)
    left = load_request(build.workspace)
    if number > 1 and (left is None or left.generation < number):
        repeated = _in_place(corpora, number - 1, manifests[-1], build)
        with contextlib.suppress(ConfigurationChangedError):  # made from other sources, or with other settings
            if finished_corpora(repeated) is not None:
                return repeated
    appended = _in_place(corpora, number, manifests[-1], build)
    if build.options.is_dedup:
        _check_hashes(manifests, build)
        return appended
    notes = [
        f"generation {generation} of {build.workspace.out} has no build report: it may hold the same sources"
        for generation in _check_new(corpora[0], manifests, appended)
    ]
    notes += [
        f"nothing tells whether {read_once_name(root)} was appended before; --dedup exact leaves out texts that are "
        "there already"
        for root in appended.inputs.read_once
    ]
    return msgspec.structs.replace(appended, notes=(*appended.notes, *notes))


def newest_generation(outputs: Sequence[Output]) -> int:
    """The newest generation that all corpora of a build have."""
    return min(len(read_generations(output.corpus)) for output in outputs) - 1


def in_its_corpus(output: Output, manifest: Manifest, previous: str) -> Manifest:
    """The manifest of a generation with its place in the corpus.

    Args:
        previous: ``manifest_sha256`` of the generation before.
    """
    with open_corpus(output.corpus.location, generation=output.generation - 1) as before:
        own = Corpus(output.store, [manifest])
        whole = join_contents([*before.shards.contents(), *own.shards.contents()])
        content = content_fingerprint(whole, manifest.tokenizer, manifest.columns)
    generation = Generation(number=output.generation, previous=previous, content=content)
    return msgspec.structs.replace(manifest, generation=generation)


def earlier_texts(outputs: Sequence[Output]) -> list[EarlierTexts]:
    """The texts of all generations before the one that a build writes. Reads all hashes, 16 bytes for each text.

    Raises:
        DamagedCorpusError: hashes are missing or damaged.
    """
    first = outputs[0]
    if not first.generation:
        return []
    found = []
    for number, manifest in enumerate(read_generations(first.corpus, first.generation - 1)):
        facts = manifest.files[names.HASHES]
        name = names.in_folder(names.generation_folder(number), names.HASHES)
        sha256 = ""
        with contextlib.suppress(OSError):
            sha256 = file_sha256(first.corpus, name)
        if sha256 != facts.sha256:
            raise DamagedCorpusError(f"{first.corpus.where(name)} is missing or damaged")
        place = names.in_folder(first.split, name)
        found.append(EarlierTexts(name=place, num_bytes=facts.num_bytes, sha256=facts.sha256))
    return found


def _check_hashes(manifests: Sequence[Manifest], build: Build) -> None:
    out, reads = build.workspace.out, build.config.reads
    for number, manifest in enumerate(manifests):
        if names.HASHES not in manifest.files:
            with_limit = " with --max-documents" if manifest.build.max_documents is not None else ""
            without = f"was built{with_limit}" if manifest.build.dedup == "exact" else "was built without --dedup exact"
            raise UsageError(
                f"--dedup exact needs the hashes of all texts of {out}, and generation {number} {without}: it has none",
                hint="leave out --dedup, or build the corpus again with --dedup exact and without --max-documents",
            )
        if (manifest.build.reads == TEXT) != (reads == TEXT):
            raise UsageError(
                f"generation {number} of {out} has hashes of {_hashed(manifest.build.reads)}, and this append would "
                f"compare hashes of {_hashed(reads)}",
                hint="leave out --dedup",
            )


def _hashed(reads: str) -> str:
    return "texts" if reads == TEXT else "tokens"


def _corpora(workspace: Workspace) -> tuple[Output, ...]:
    """The complete corpora to which an append adds. Refuses a part of a split: the other would not grow with it."""
    outputs = complete_outputs(workspace)
    if not outputs and load_request(workspace) is not None:
        raise UsageError(
            f"--append adds to a complete corpus, and {workspace.out} holds an unfinished build",
            hint="run the command of that build again until it is done ('tokshard status' shows it), then append",
        )
    if not outputs:
        raise UsageError(
            f"--append adds to a corpus, and {workspace.out} holds none",
            hint="build it first, without --append, or give the --out of a corpus",
        )
    split = read_manifest(outputs[0].store).build.split
    if split and not outputs[0].split:
        raise UsageError(
            f"{workspace.out} is only the {split} part of a corpus with a validation split, and both grow together",
            hint="give the --out of that build, which holds train and validation, and its --validation-fraction",
        )
    return outputs


def _manifests(output: Output) -> tuple[Manifest, ...]:
    """The manifests of a corpus. Refuses one that lacks a shard."""
    with open_corpus(output.corpus.location) as corpus:
        return corpus.manifests


def _in_place(corpora: Sequence[Output], generation: int, last: Manifest, build: Build) -> Build:
    """A build as one generation of a corpus."""
    config = msgspec.structs.replace(
        build.config, shard_tokens=last.build.shard_tokens, task_bytes=last.build.task_bytes
    )
    previous = previous_of(corpora, generation)
    return msgspec.structs.replace(build, config=config, generation=generation, previous=previous)


def _check_same(last: Manifest, build: Build) -> None:
    """Refuse settings that would make other documents than the corpus has."""
    before, now = (
        settings_of(config, tokenizer)
        | {"keep_field": kept_columns(columns), "sha256": tokenizer.canonical_sha256}
        | {"loss_spans": columns.keys() - kept_columns(columns).keys()}
        for config, tokenizer, columns in (
            (last.build, last.tokenizer, last.columns),
            (build.config, build.tokenizer, build.columns),
        )
    )
    given = [name for name in ("shard_tokens", "task_bytes") if getattr(build.options, name) is not None]
    found = list(changes(before, now, [*kept_settings(), *_KEPT, *given]))
    if found:
        raise ConfigurationChangedError(
            f"{build.workspace.out} was built with other settings, which an append keeps: {'; '.join(found)}",
            hint="give those settings, or another --out",
        )


_KEPT = ("sha256", "template", "loss_spans")
"""Facts that are the same for all generations of a corpus, besides options."""


def _check_new(corpus: Output, manifests: Sequence[Manifest], build: Build) -> list[int]:
    """Refuse sources that an earlier generation has read. A file that grew would repeat its first texts.

    A file that was moved is known by its name, size and time, if there is none at its old place. Another name, or a
    generation of more sources than a report lists, hides it.

    Returns:
        The generations without a record of where their sources were.
    """
    if build.config.copied is not None:
        _check_not_copied(corpus, build)
        return []
    real_place = _real_places()
    inputs = build.inputs.absolute()
    files = {real_place(one.location): (one.num_bytes, one.version) for one in inputs if one.index not in inputs.once}
    versions = {(os.path.basename(location), version): location for location, (_, version) in files.items()}
    # a file may have several names: inodes of old files are looked up only if a new file has several
    linked = {inode: location for location in files if (inode := _inode_of(location, min_links=2)) is not None}

    def read(number: int) -> tuple[BuildReport, Sequence[SourceInfo]]:
        store = corpus.corpus.below(names.generation_folder(number)) if number else corpus.corpus
        return read_report(store), read_sources(store, manifests[number])

    unknown = []
    for number, (report, sources) in enumerate(side_by_side(corpus.corpus, read, range(len(manifests)))):
        if len(report.roots) != len(manifests[number].arguments):
            unknown.append(number)
            continue
        before = {(one.argument, one.path): one.version for one in report.sources}
        for source in sources:
            location = old = real_place(location_of(report.roots[source.argument], source.path))
            if location not in files:
                location = linked.get(_inode_of(location) or (0, 0), "") if linked else ""
            moved = "" if location else _moved(versions, old, before.get((source.argument, source.path)))
            location = location or moved
            if not location:
                continue
            problem = f"{location} is in {corpus.corpus.location} already, in generation {number}"
            hint = "give only new sources, or --dedup exact to leave out the texts that are there"
            if moved:
                raise UsageError(
                    f"{problem}: it has the name, size and time of {old}, which is gone",
                    hint=f"{hint}; if it holds other texts, 'touch' it",
                )
            num_bytes, _ = files[location]
            if source.num_bytes == num_bytes:
                raise UsageError(problem, hint=hint)
            raise UsageError(
                f"{problem}, of {source.num_bytes:,} bytes then and {num_bytes:,} now",
                hint="put added records into a new file, and other texts under another name; or "
                "give --dedup exact to leave out the texts that are there",
            )
    return unknown


def _moved(versions: Mapping[tuple[str, str], str], old: str, version: str | None) -> str:
    """Where a file is now that is gone from its place, by its name and version; empty if nothing tells."""
    place = versions.get((os.path.basename(old), version), "") if version and version != PINNED else ""
    return place if place and look_at(old) is None else ""


def _inode_of(location: str, *, min_links: int = 1) -> tuple[int, int] | None:
    """Device and inode of a file on this machine; None if it is gone, or has fewer names."""
    if is_uri(location):
        return None
    try:
        found = os.stat(location)
    except (OSError, ValueError):
        return None
    return (found.st_dev, found.st_ino) if found.st_nlink >= min_links else None


def _check_not_copied(corpus: Output, build: Build) -> None:
    location = corpus.corpus.location
    with open_corpus(location, generation=build.generation - 1) as before:
        for copied, generation in build.corpora:
            with open_corpus(copied, generation=generation) as wanted:
                if share_documents(before, wanted):
                    raise UsageError(
                        f"{copied}, a corpus that is copied, is in {location} already, or documents of it are",
                        hint="give other corpora",
                    )


def _real_places() -> Callable[[str], str]:
    """A function that gives the real path of a file, through any links. A folder is resolved once."""
    real_folder = functools.cache(real_location)

    def real_place(location: str) -> str:
        if is_uri(location) or os.path.islink(location):
            return real_location(location)
        folder, name = os.path.split(location)
        return os.path.join(real_folder(folder), name)

    return real_place
