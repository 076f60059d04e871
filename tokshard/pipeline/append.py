"""What ``--append`` adds to: the generations of a corpus that are there, and what they ask of the next one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
from tokshard.pipeline.options import DEFAULT_SHARD_TOKENS, BuildOptions, change_text
from tokshard.pipeline.sources.inputs import location_of
from tokshard.pipeline.tasks.duplicates import EarlierTexts
from tokshard.pipeline.workspace.output_directory import finished_corpora, roots_at_build
from tokshard.pipeline.workspace.places import Output, Workspace
from tokshard.pipeline.workspace.settings import Settings, load_settings
from tokshard.store import Store, present, side_by_side

_SAME_CONFIG = ("id_field", "keep", "min_tokens", "max_tokens", "validation_fraction")
"""What every generation has in common. How sources are read may differ, because that says what they are."""


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where an append goes, and what follows from that: fields of `Settings` and `BuildConfig`."""

    generation: int
    previous: list[str]
    shard_tokens: int
    task_bytes: int

    def settings(self, settings: Settings) -> Settings:
        """Settings as if the build were one of its own, changed to those of the append."""
        config = msgspec.structs.replace(settings.config, shard_tokens=self.shard_tokens, task_bytes=self.task_bytes)
        return msgspec.structs.replace(settings, config=config, generation=self.generation, previous=self.previous)

    @classmethod
    def of(cls, settings: Settings) -> Place:
        """That of a build with these settings."""
        return cls(
            generation=settings.generation,
            previous=settings.previous,
            shard_tokens=settings.config.shard_tokens,
            task_bytes=settings.config.task_bytes,
        )


def find_place(workspace: Workspace, settings: Settings, options: BuildOptions) -> Place:
    """Where an append goes: the next generation, or one that is there or was begun with the same settings.

    The sizes of shards and tasks are those of the corpus.

    Args:
        settings: as if it were a build of its own.

    Raises:
        UsageError: there is no complete corpus to append to, or one of the sources is in it already.
        ConfigurationChangedError: it was built with another tokenizer, other columns or other rules.
        CorpusError: it is damaged.
    """
    corpora = _corpora(workspace)
    before = [_manifests(output) for output in corpora]
    number = min(map(len, before))
    last = before[0][number - 1]
    _check_same(last, settings, options, out=workspace.out)
    left = load_settings(workspace)
    if number > 1 and (left is None or left.generation < number):
        repeated = _place(corpora, number - 1, last)
        if _is_there(workspace, repeated.settings(settings)):
            return repeated
    if settings.config.dedup == "exact":
        _check_hashes(before[0][:number], out=workspace.out)
    else:
        _check_new(corpora[0], before[0][:number], settings)
    return _place(corpora, number, last)


def newest_generation(outputs: Sequence[Output]) -> int:
    """The newest generation that all corpora of a build have."""
    return min(len(read_generations(output.corpus)) for output in outputs) - 1


def generation_outputs(workspace: Workspace, settings: Settings) -> tuple[Output, ...]:
    """What a build with these settings writes."""
    is_split = settings.config.validation_fraction is not None
    return workspace.outputs(is_split=is_split, generation=settings.generation)


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


def earlier_texts(outputs: Sequence[Output], *, is_checked: bool) -> list[EarlierTexts]:
    """The texts of all generations before that which a build writes.

    Args:
        is_checked: read all hashes, 16 bytes for each text, to see that they are whole.

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
        if is_checked and not _is_whole(first.corpus, name, facts.sha256):
            raise DamagedCorpusError(f"{first.corpus.where(name)} is missing or damaged", hint=RESTORE)
        place = names.in_folder(first.split, name)
        found.append(EarlierTexts(name=place, num_bytes=facts.num_bytes, sha256=facts.sha256))
    return found


def _is_whole(store: Store, name: str, sha256: str) -> bool:
    try:
        return file_sha256(store, name) == sha256
    except OSError:
        return False


def _check_hashes(manifests: Sequence[Manifest], *, out: str) -> None:
    for number, manifest in enumerate(manifests):
        if names.HASHES not in manifest.files:
            with_limit = " with --limit" if manifest.build.limit is not None else ""
            without = f"was built{with_limit}" if manifest.build.dedup == "exact" else "was built without --dedup exact"
            raise UsageError(
                f"--dedup exact needs the hashes of all texts of {out}, and generation {number} {without}: it has none",
                hint="leave out --dedup, or build the corpus again with --dedup exact and without --limit",
            )


def _corpora(workspace: Workspace) -> tuple[Output, ...]:
    for is_split in (False, True):
        outputs = workspace.outputs(is_split=is_split)
        if all(names.MANIFEST in present(output.store) for output in outputs):
            _check_whole(outputs[0])
            return outputs
    if load_settings(workspace) is not None:
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


def _place(corpora: Sequence[Output], generation: int, last: Manifest) -> Place:
    name = names.in_folder(names.generation_folder(generation - 1), names.MANIFEST)
    return Place(
        generation=generation,
        previous=[manifest_hash(output.corpus.get(name)) for output in corpora],
        shard_tokens=last.build.shard_tokens,
        task_bytes=last.build.task_bytes,
    )


def _is_there(workspace: Workspace, settings: Settings) -> bool:
    """Whether a generation is complete and was built from the same sources with the same settings."""
    try:
        return finished_corpora(workspace, generation_outputs(workspace, settings), settings) is not None
    except ConfigurationChangedError:
        return False


def _check_same(last: Manifest, settings: Settings, options: BuildOptions, *, out: str) -> None:
    """Refuse what would make documents of another kind than those of the corpus."""
    differences = [*_differences(last.build, settings.config, _SAME_CONFIG)]
    if last.tokenizer.canonical_sha256 != settings.tokenizer.canonical_sha256:
        differences.append("the content of the tokenizer has changed")
    differences += _differences(last.tokenizer, settings.tokenizer, ("eos", "bos"))
    if options.shard_tokens != DEFAULT_SHARD_TOKENS:
        differences += _differences(last.build, settings.config, ("shard_tokens",))
    if options.task_bytes is not None:
        differences += _differences(last.build, settings.config, ("task_bytes",))
    if differences:
        raise ConfigurationChangedError(
            f"{out} was built with other settings, which an append keeps: {'; '.join(differences)}",
            hint="give those settings, or another --out",
        )


def _differences(before: msgspec.Struct, now: msgspec.Struct, fields: Sequence[str]) -> Iterator[str]:
    for name in fields:
        old, new = getattr(before, name), getattr(now, name)
        if old != new and (change := change_text(name, old, new)) is not None:
            yield change


def _check_new(corpus: Output, manifests: Sequence[Manifest], settings: Settings) -> None:
    """Refuse sources in places that an earlier generation has read. A file that grew would repeat its first texts."""
    inputs = settings.sources
    numbers = (number for number in range(len(inputs)) if not inputs.is_read_once(number))
    sizes = {inputs[number].location: inputs[number].num_bytes for number in numbers}

    def read(number: int) -> tuple[Sequence[str], Sequence[SourceInfo]]:
        store = corpus.corpus.below(names.generation_folder(number)) if number else corpus.corpus
        return roots_at_build(store), read_sources(store, manifests[number])

    for number, (roots, sources) in enumerate(side_by_side(corpus.corpus, read, range(len(manifests)))):
        if len(roots) != len(manifests[number].arguments):
            continue  # without its report, nothing says where its sources were
        for source in sources:
            location = location_of(roots[source.argument], source.path)
            if location in sizes:
                raise _is_there_already(corpus.corpus.location, number, location, source.num_bytes, sizes[location])


def _is_there_already(corpus: str, generation: int, source: str, before: int, now: int) -> UsageError:
    problem = f"{source} is in {corpus} already, in generation {generation}"
    if before == now:
        return UsageError(problem, hint="give new sources only, or --dedup exact to leave out the texts that are there")
    return UsageError(
        f"{problem}, of {before:,} bytes then and {now:,} now",
        hint="give what was added as a file of its own, and a file with other texts under another name; or give "
        "--dedup exact to leave out the texts that are there",
    )
