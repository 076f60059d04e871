"""Checks that the generations of a corpus belong together; each is checked as a corpus of its own, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.content import TokenHash, join_hashes
from tokshard.format.corpus import Corpus
from tokshard.format.files import read_file
from tokshard.format.generations import check_generation, generation_numbers
from tokshard.format.manifest import Manifest, content_fingerprint, manifest_hash
from tokshard.format.opening import list_names, read_generations, read_manifest
from tokshard.inspect.verify.shard_check import Problem, problem_of
from tokshard.store import Store


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundGenerations:
    """The generations of a corpus.

    Args:
        manifests: by folder, in order; those that can be read.
        problems: of the others, and of those that continue something else.
    """

    manifests: dict[str, Manifest]
    problems: list[Problem]


def find_generations(store: Store, first: Manifest) -> FoundGenerations:
    """The generations of a corpus.

    Args:
        first: the manifest of generation 0, or of a generation that is looked at alone.
    """
    found = FoundGenerations(manifests={"": first}, problems=[])
    if first.generation is not None:
        return found
    try:
        listed = list_names(store)
    except CorpusError:
        return found  # which is reported with the files of the folder
    if listed is None:
        listed = list(map(names.generation_folder, range(len(read_generations(store)))))
    is_building = names.WORK in {name.rstrip("/") for name in listed}
    before, folder_before = first, ""
    for number in generation_numbers(listed):
        folder = names.generation_folder(number)
        file = f"{folder}/{names.MANIFEST}"
        try:
            store.stat(file)
        except (FileNotFoundError, NotADirectoryError):
            if not is_building:
                found.problems.append(Problem(file=file, message="is missing, and no build has begun there"))
            continue
        except OSError as error:
            found.problems.append(Problem(file=file, message=f"cannot be read: {error.strerror or error}"))
            continue
        try:
            manifest = read_manifest(store.below(folder))
            found.manifests[folder] = manifest
            before_hash = manifest_hash(store.get(names.in_folder(folder_before, names.MANIFEST)))
            expected = len(found.manifests) - 1
            check_generation(before, before_hash, manifest, number=expected, path=store.where(file))
        except CorpusError as error:
            found.problems.append(problem_of(store, file, error))
        else:
            before, folder_before = manifest, folder
    return found


def check_contents(store: Store, manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """The content fingerprint that each generation gives of all documents up to it."""
    if len(manifests) < 2:
        return
    corpus = Corpus(store, manifests, load_table=read_file)
    tokens, num_documents = TokenHash(), 0
    shards = iter(corpus.shards)
    for number, manifest in enumerate(manifests):
        tokens = tokens.then(join_hashes(info.tokens_hash for info in islice(shards, manifest.num_shards)))
        num_documents += manifest.num_documents
        content = content_fingerprint(tokens, num_documents=num_documents, eos_id=corpus.eos_id, bos_id=corpus.bos_id)
        if manifest.generation is not None and content != manifest.generation.content:
            yield Problem(
                file=f"{names.generation_folder(number)}/{names.MANIFEST}",
                message=f"gives the content fingerprint {manifest.generation.content} of the corpus up to it, its "
                f"shards have {content}",
            )
