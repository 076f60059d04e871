"""What ``--append`` adds to: the generations of a corpus that are there, and what they ask of the next one."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence

import msgspec

from tokshard.errors import RESTORE, ConfigurationChangedError, DamagedCorpusError, UsageError
from tokshard.format import names
from tokshard.format.content import join_hashes
from tokshard.format.corpus import Corpus
from tokshard.format.files import file_sha256
from tokshard.format.manifest import Generation, Manifest, content_fingerprint, manifest_hash
from tokshard.format.opening import open_corpus, read_generations, read_manifest
from tokshard.format.source_table import read_sources
from tokshard.format.tables import SourceInfo
from tokshard.pipeline.adopt import finished_corpora, roots_at_build
from tokshard.pipeline.request import Request, changes, load_request, placed, settings_of
from tokshard.pipeline.sources.inputs import location_of
from tokshard.pipeline.tasks.duplicates import EarlierTexts
from tokshard.pipeline.workspace.ownership import complete_outputs
from tokshard.pipeline.workspace.places import Output, Workspace
from tokshard.store import Store, is_uri, real_location, side_by_side


def next_generation(workspace: Workspace, request: Request) -> Request:
    """The request of an append: of the next generation, or of one that is there or was begun with the same settings.

    The sizes of shards and tasks are those of the corpus.

    Args:
        request: as if it were a build of its own.

    Raises:
        UsageError: there is no complete corpus to append to, or one of the sources is in it already.
        ConfigurationChangedError: it was built with another tokenizer, other columns or other rules.
        CorpusError: it is damaged.
    """
    corpora = _corpora(workspace)
    before = [_manifests(output) for output in corpora]
    number = min(map(len, before))
    last = before[0][number - 1]
    _check_same(last, request, out=workspace.out)
    left = load_request(workspace)
    if number > 1 and (left is None or left.generation < number):
        repeated = _in_place(corpora, number - 1, last, request)
        if _is_there(workspace, repeated):
            return repeated
    appended = _in_place(corpora, number, last, request)
    if request.options.is_dedup:
        _check_hashes(before[0][:number], request, out=workspace.out)
        return appended
    unknown = _check_new(corpora[0], before[0][:number], request)
    notes = [
        f"generation {generation} of {workspace.out} has no build report: it may hold the same sources"
        for generation in unknown
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
        content = content_fingerprint(
            join_hashes(info.tokens_hash for corpus in (before, own) for info in corpus.shards),
            num_documents=before.num_documents + own.num_documents,
            eos_id=own.eos_id,
            bos_id=own.bos_id,
        )
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
        if not _is_whole(first.corpus, name, facts.sha256):
            raise DamagedCorpusError(f"{first.corpus.where(name)} is missing or damaged", hint=RESTORE)
        place = names.in_folder(first.split, name)
        found.append(EarlierTexts(name=place, num_bytes=facts.num_bytes, sha256=facts.sha256))
    return found


def _is_whole(store: Store, name: str, sha256: str) -> bool:
    try:
        return file_sha256(store, name) == sha256
    except OSError:
        return False


def _check_hashes(manifests: Sequence[Manifest], request: Request, *, out: str) -> None:
    for number, manifest in enumerate(manifests):
        if names.HASHES not in manifest.files:
            with_limit = " with --limit" if manifest.build.limit is not None else ""
            without = f"was built{with_limit}" if manifest.build.dedup == "exact" else "was built without --dedup exact"
            raise UsageError(
                f"--dedup exact needs the hashes of all texts of {out}, and generation {number} {without}: it has none",
                hint="leave out --dedup, or build the corpus again with --dedup exact and without --limit",
            )
        if (manifest.build.reads == "text") != (request.config.reads == "text"):
            raise UsageError(
                f"generation {number} of {out} has hashes of {_hashed(manifest.build.reads)}, and this append would "
                f"compare those of {_hashed(request.config.reads)}",
                hint="leave out --dedup",
            )


def _hashed(reads: str) -> str:
    return "texts" if reads == "text" else "tokens"


def _corpora(workspace: Workspace) -> tuple[Output, ...]:
    outputs = complete_outputs(workspace)
    if outputs:
        _check_whole(outputs[0])
        return outputs
    if load_request(workspace) is not None:
        raise UsageError(
            f"--append adds to a complete corpus, and {workspace.out} holds an unfinished build",
            hint="run the command of that build again until it is done ('tokshard status' shows it), and append then",
        )
    raise UsageError(
        f"--append adds to a corpus, and {workspace.out} holds none",
        hint="build it first, without --append, or give the --out of a corpus",
    )


def _check_whole(output: Output) -> None:
    """Refuse one part of a split: the other part would not grow with it."""
    split = read_manifest(output.store).build.split
    if split and not output.split:
        raise UsageError(
            f"{output.location} is only the {split} part of a corpus with a validation split, and both grow together",
            hint="give the --out of that build, which holds train and validation, and its --validation-fraction",
        )


def _manifests(output: Output) -> tuple[Manifest, ...]:
    """The manifests of a corpus of which no shard is missing."""
    with open_corpus(output.corpus.location) as corpus:
        return corpus.manifests


def _in_place(corpora: Sequence[Output], generation: int, last: Manifest, request: Request) -> Request:
    """A request for one generation of a corpus."""
    name = names.in_folder(names.generation_folder(generation - 1), names.MANIFEST)
    config = msgspec.structs.replace(
        request.config, shard_tokens=last.build.shard_tokens, task_bytes=last.build.task_bytes
    )
    previous = [manifest_hash(output.corpus.get(name)) for output in corpora]
    return msgspec.structs.replace(request, config=config, generation=generation, previous=previous)


def _is_there(workspace: Workspace, request: Request) -> bool:
    """Whether a generation is complete and was built from the same sources with the same settings."""
    try:
        return finished_corpora(placed(request, workspace)) is not None
    except ConfigurationChangedError:
        return False


def _check_same(last: Manifest, request: Request, *, out: str) -> None:
    """Refuse what would make documents of another kind than those of the corpus."""
    before, now = (
        settings_of(config, tokenizer) | {"keep": columns, "sha256": tokenizer.canonical_sha256}
        for config, tokenizer, columns in (
            (last.build, last.tokenizer, last.columns),
            (request.config, request.tokenizer, request.columns),
        )
    )
    given = [name for name in ("shard_tokens", "task_bytes") if getattr(request.options, name) is not None]
    found = list(changes(before, now, [*_KEPT, *given]))
    if found:
        raise ConfigurationChangedError(
            f"{out} was built with other settings, which an append keeps: {'; '.join(found)}",
            hint="give those settings, or another --out",
        )


_KEPT = ("min_tokens", "max_tokens", "validation_fraction", "keep", "sha256", "eos", "bos")
"""Settings that are the same for all generations of a corpus."""


def _check_new(corpus: Output, manifests: Sequence[Manifest], request: Request) -> list[int]:
    """Refuse what an earlier generation has read. A file that grew would repeat its first texts.

    Returns:
        The generations of which nothing says where their sources were.
    """
    if request.config.copied is not None:
        _check_not_copied(corpus, manifests, request.config.copied.corpora)
        return []
    real_place = _real_places()
    inputs = request.inputs.absolute()
    numbers = (number for number in range(len(inputs)) if not inputs.is_read_once(number))
    sizes = {real_place(inputs[number].location): inputs[number].num_bytes for number in numbers}

    def read(number: int) -> tuple[Sequence[str], Sequence[SourceInfo]]:
        store = corpus.corpus.below(names.generation_folder(number)) if number else corpus.corpus
        return roots_at_build(store), read_sources(store, manifests[number])

    unknown = []
    for number, (roots, sources) in enumerate(side_by_side(corpus.corpus, read, range(len(manifests)))):
        if len(roots) != len(manifests[number].arguments):
            unknown.append(number)
            continue
        for source in sources:
            location = real_place(location_of(roots[source.argument], source.path))
            if location in sizes:
                raise _is_there_already(corpus.corpus.location, number, location, source.num_bytes, sizes[location])
    return unknown


def _check_not_copied(corpus: Output, manifests: Sequence[Manifest], wanted: Sequence[str]) -> None:
    for number, manifest in enumerate(manifests):
        copied = () if manifest.build.copied is None else manifest.build.copied.corpora
        if {manifest.fingerprints.content, *copied}.intersection(wanted):
            raise UsageError(
                f"a corpus that is copied is in {corpus.corpus.location} already, in generation {number}",
                hint="give other corpora",
            )


def _real_places() -> Callable[[str], str]:
    """A function that says where a file really lies, whatever links lead there. A folder is resolved once."""
    real_folder = functools.cache(real_location)

    def real_place(location: str) -> str:
        if is_uri(location) or os.path.islink(location):
            return real_location(location)
        folder, name = os.path.split(location)
        return os.path.join(real_folder(folder), name)

    return real_place


def _is_there_already(corpus: str, generation: int, source: str, before: int, now: int) -> UsageError:
    problem = f"{source} is in {corpus} already, in generation {generation}"
    if before == now:
        return UsageError(problem, hint="give new sources only, or --dedup exact to leave out the texts that are there")
    return UsageError(
        f"{problem}, of {before:,} bytes then and {now:,} now",
        hint="give what was added as a file of its own, and a file with other texts under another name; or give "
        "--dedup exact to leave out the texts that are there",
    )
