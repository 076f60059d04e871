"""Checks that the generations of a corpus belong together; each is checked as a corpus of its own, too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

from tokshard.errors import CorpusError
from tokshard.format import names
from tokshard.format.content import Content, join_contents
from tokshard.format.corpus import Corpus
from tokshard.format.files import read_file
from tokshard.format.generations import check_generation, generation_numbers
from tokshard.format.manifest import Manifest, content_fingerprint, manifest_hash
from tokshard.format.opening import list_names, read_generations, read_manifest
from tokshard.inspect.verify.shard_check import Problem, problem_of
from tokshard.store import Store


def find_generations(store: Store, first: Manifest) -> tuple[dict[str, Manifest], list[Problem]]:
    """The manifests of a corpus, by folder and in order, and the problems of damaged ones and of gaps between them.

    Args:
        first: the manifest of generation 0, or of a generation that is checked alone.
    """
    manifests, problems = {"": first}, list[Problem]()
    try:
        listed = list_names(store) if first.generation is None else []
    except CorpusError:
        listed = []  # which is reported with the files of the folder
    if listed is None:
        listed = list(map(names.generation_folder, range(len(read_generations(store)))))
    is_building = names.WORK in {name.rstrip("/") for name in listed}
    before, folder_before = first, ""
    for folder in map(names.generation_folder, generation_numbers(listed)):
        file = names.in_folder(folder, names.MANIFEST)
        try:
            store.stat(file)
            manifest = manifests[folder] = read_manifest(store.below(folder))
            before_hash = manifest_hash(store.get(names.in_folder(folder_before, names.MANIFEST)))
            check_generation(before, before_hash, manifest, number=len(manifests) - 1, path=store.where(file))
        except (FileNotFoundError, NotADirectoryError):
            if not is_building:
                problems.append(Problem(file, "is missing, and no build has begun there"))
        except OSError as error:
            problems.append(Problem(file, f"cannot be read: {error.strerror or error}"))
        except CorpusError as error:
            problems.append(problem_of(store, file, error))
        else:
            before, folder_before = manifest, folder
    return manifests, problems


def check_contents(store: Store, manifests: Sequence[Manifest]) -> Iterator[Problem]:
    """The content fingerprint that each generation gives of all documents up to it."""
    corpus = Corpus(store, manifests, load_table=read_file)
    content, contents = Content(), corpus.shards.contents()
    for folder, manifest in zip(map(names.generation_folder, range(len(manifests))), manifests, strict=True):
        content = content.then(join_contents(islice(contents, manifest.num_shards)))
        found = content_fingerprint(content, manifest.tokenizer, manifest.columns)
        if manifest.generation is not None and found != manifest.generation.content:
            stated = f"gives the content fingerprint {manifest.generation.content} of the corpus up to it"
            yield Problem(names.in_folder(folder, names.MANIFEST), f"{stated}, its shards have {found}")
