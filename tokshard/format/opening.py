"""Opening a corpus, which is cheap at any size. If the location is not a corpus, the error says what is there."""

from __future__ import annotations

import errno
import itertools
import os
import shlex
from collections.abc import Iterable, Iterator

from tokshard.errors import (
    CorpusError,
    DamagedCorpusError,
    MissingCorpusError,
    StoreError,
    TokshardError,
    UnfinishedCorpusError,
    UsageError,
)
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.generations import check_generation, generation_numbers
from tokshard.format.loss import LOSS_COLUMNS, WEIGHTS, has_spans, kept_columns
from tokshard.format.manifest import Base, Manifest, decode_manifest, manifest_hash
from tokshard.format.schema import COLUMN_TYPES, TOKENS, token_dtype
from tokshard.format.view import View
from tokshard.store import Store, is_uri, joined_location, locate, open_store, present, real_location, side_by_side

_MOST_LISTED = 10_000
"""Shards in another store that are listed when a corpus is opened: ten requests, one after the other."""

_CHECK_PATH = "check the path and its permissions"


def open_corpus(location: str | os.PathLike[str], *, generation: int | None = None) -> Corpus:
    """Open a corpus: read its manifests and tables, list its files once, open no shard.

    Web servers do not list their files, and listing 10,000 shards or more in a bucket would take longer than everything
    else. In these cases a missing shard is noticed when it is first read.

    Costs about 0.3 s and 100 MB for 200,000 shards. Generations in another store are requested concurrently: 51 of
    them take 0.4 s if an answer takes 20 ms.

    Args:
        generation: open the documents up to this generation; default: the newest.

    Raises:
        CorpusError: the corpus is missing, unfinished, damaged, or of a newer format.
        UsageError: it has no such generation.
    """
    store = open_store(location)
    manifests = read_generations(store, generation)
    if manifests[0].base is not None:
        return View(store, manifests[0], open_base(store, manifests[0]))
    corpus = Corpus(store, manifests)
    is_local = store.local_path(names.MANIFEST) is not None
    listed = list_names(store) if is_local or len(corpus.shards) < _MOST_LISTED else None
    if listed is None:
        return corpus
    if generation is None:
        _check_no_gap(corpus, listed)
    missing = missing_shards(corpus, listed)
    if missing:
        raise DamagedCorpusError(
            f"{store.where(missing[0])} is missing"
            + (f", and {len(missing) - 1} more" if len(missing) > 1 else "")
            + f"; the manifest names {len(corpus.shards)} shards"
        )
    return corpus


def open_base(store: Store, manifest: Manifest) -> Corpus:
    """Open the base of a view, where the view was made or beside the view.

    Raises:
        CorpusError: it is not there, or is another one.
        StoreError: its old store does not answer, and it is not beside the view.
    """
    base = manifest.base
    assert base is not None, "it is a view"
    recorded = base_location(store, base)
    problem, refusal = f"{recorded} is gone", None
    for place in itertools.chain([recorded], _beside(store)):
        try:
            if read_manifest(open_store(place)).base is not None:  # a view, perhaps this one
                continue
            corpus = _up_to(place, base.generation)
        except (CorpusError, UsageError) as error:
            problem = error.problem if place == recorded else problem
            continue
        except StoreError as error:  # access denied, or an old server that is gone: the base may have moved
            refusal = error if place == recorded else refusal
            continue
        lacks = manifest.columns.items() - corpus.manifest.columns.items()  # a corpus that was built again
        is_other = corpus.fingerprint != base.content
        if not is_other and not lacks:
            return corpus
        found = f"the content {corpus.fingerprint[:12]}" if is_other else f"no column {': '.join(min(lacks))}"
        problem = f"{place} has {found}" if place == recorded else problem
    if refusal is not None:
        raise refusal
    raise CorpusError(
        f"{store.location} is a view of the corpus with the content {base.content[:12]}, which was at {recorded}: "
        f"{problem}",
        hint="put that corpus back, or beside the view",
    )


def _up_to(location: str, generation: int) -> Corpus:
    """A corpus up to a generation, or all of it if it has fewer: a copy has the same documents in one."""
    try:
        return open_corpus(location, generation=generation)
    except UsageError:
        return open_corpus(location)


def _beside(store: Store) -> Iterator[str]:
    """The places beside a view. Their folder is listed only if the first of them is needed."""
    above, _ = locate(store.location)
    yield from map(above.where, sorted(present(above)))


def base_location(store: Store, base: Base) -> str:
    """The location of a view's base when the view was made."""
    if is_uri(base.path) or base.path.startswith("/"):  # a view in a bucket may have its base on this machine
        return base.path
    return joined_location(store.location, base.path)  # also of a view that was uploaded with its base


def missing_shards(corpus: Corpus, listed: Iterable[str]) -> list[str]:
    """The shards that the tables name and the store lacks, in order.

    Args:
        listed: the names in the folder of the corpus; this function lists the folders of its generations.

    Raises:
        CorpusError: the store cannot be listed.
    """
    found = set(listed)
    folders = [names.generation_folder(number) for number in range(1, corpus.num_generations)]
    of_folders = side_by_side(corpus.store, lambda folder: list_names(corpus.store.below(folder)) or (), folders)
    for folder, inside in zip(folders, of_folders, strict=True):
        found.update(names.in_folder(folder, name) for name in inside)
    return [name for name in corpus.shards.names() if name not in found]


def _check_no_gap(corpus: Corpus, listed: Iterable[str]) -> None:
    """Refuse a corpus that has a generation after one that is missing."""
    next_one = corpus.num_generations
    for number in generation_numbers(listed):
        folder = names.generation_folder(number)
        if number > next_one and names.MANIFEST in present(corpus.store, folder):
            raise DamagedCorpusError(f"{corpus.store.where(folder)} is complete, and generation {next_one} is missing")


def read_generations(store: Store, generation: int | None = None) -> list[Manifest]:
    """The manifests of the generations of a corpus, in order: of all complete ones, or up to one of them.

    A folder without a manifest belongs to an append that is under way or was stopped; it is ignored.

    Raises:
        CorpusError: a manifest is missing, damaged, or of a newer format, or continues something else.
        UsageError: the corpus has no such generation.
    """
    first, before_hash = _read_manifest(store)
    manifests = [first]
    # an append is a corpus of its own, and holds no generations
    for below, content in _later_manifests(store, generation) if first.generation is None else ():
        manifest = _decoded(below, content)
        path = below.where(names.MANIFEST)
        check_generation(manifests[-1], before_hash, manifest, number=len(manifests), path=path)
        manifests.append(manifest)
        before_hash = manifest_hash(content)
    newest = len(manifests) - 1
    if generation is not None and not 0 <= generation <= newest:
        known = f"it has generations 0 to {newest}" if newest else "it has generation 0 only"
        raise UsageError(f"{store.location} has no generation {generation}: {known}", hint="give one of these")
    return manifests


def _later_manifests(store: Store, newest: int | None) -> Iterator[tuple[Store, bytes]]:
    """The folders of generations from 1 on, each with the bytes of its manifest, up to the first that has none.

    A web server does not list folders, so manifests are requested until one is missing. Each turn requests twice as
    many, concurrently: 6 turns for 50 generations.
    """

    def ask(number: int) -> tuple[Store, bytes | OSError]:
        below = store.below(names.generation_folder(number))
        try:
            return below, below.get(names.MANIFEST)
        except OSError as error:
            return below, error

    start, stop = 1, 2
    while newest is None or start <= newest:
        numbers = range(start, stop if newest is None else newest + 1)
        for below, found in side_by_side(store, ask, numbers):
            if isinstance(found, FileNotFoundError | NotADirectoryError):
                return
            if isinstance(found, OSError):
                raise _unreadable(below, found) from found
            yield below, found
        start, stop = numbers.stop, 2 * numbers.stop


def list_names(store: Store) -> list[str] | None:
    """The names in the folder of a corpus, in arbitrary order; names of folders end in a slash.

    Returns:
        None for the folder of a web server, which cannot be listed.

    Raises:
        CorpusError: the folder cannot be listed.
    """
    try:
        return list(store.names())
    except OSError as error:
        if error.errno == errno.ENOTSUP:
            return None
        raise _unlisted(store, error) from error


def read_manifest(store: Store) -> Manifest:
    """The manifest of a corpus, checked on its own.

    Raises:
        CorpusError: the manifest is missing, damaged, or of a newer format.
    """
    return _read_manifest(store)[0]


def _read_manifest(store: Store) -> tuple[Manifest, str]:
    """A manifest and its hash."""
    try:
        content = store.get(names.MANIFEST)
    except (FileNotFoundError, NotADirectoryError):
        raise _no_manifest(store) from None
    except OSError as error:
        raise _unreadable(store, error) from error
    return _decoded(store, content), manifest_hash(content)


def _unreadable(store: Store, error: OSError) -> CorpusError:
    path = store.where(names.MANIFEST)
    return CorpusError(f"{path} cannot be read: {error.strerror or error}", hint=_CHECK_PATH)


def _decoded(store: Store, content: bytes) -> Manifest:
    path = store.where(names.MANIFEST)
    manifest = decode_manifest(content, file=path)
    _check_manifest(manifest, path)
    return manifest


def _check_manifest(manifest: Manifest, path: str) -> None:
    if manifest.dtype != token_dtype(manifest.tokenizer.vocab_size):
        raise DamagedCorpusError(
            f"{path}: dtype is {manifest.dtype}, a vocabulary of {manifest.tokenizer.vocab_size} ids has "
            f"{token_dtype(manifest.tokenizer.vocab_size)}"
        )
    unknown = set(manifest.columns.values()) - set(COLUMN_TYPES)
    of_loss = {name: kind for name, kind in LOSS_COLUMNS.items() if manifest.columns.get(name) == kind}
    in_order = [*of_loss.items(), *kept_columns(manifest.columns).items()]
    if unknown or TOKENS in manifest.columns or [*manifest.columns.items()] != in_order or set(of_loss) == {WEIGHTS}:
        raise DamagedCorpusError(
            f"{path}: columns are {manifest.columns}, expected none called {TOKENS!r} and types of "
            f"{', '.join(COLUMN_TYPES)}, the columns of loss spans first and under their names"
        )
    if has_spans(manifest.columns) != (manifest.num_targets is not None):
        raise DamagedCorpusError(
            f"{path}: num_targets is {manifest.num_targets}, columns are {manifest.columns}; a corpus has both "
            "or neither of num_targets and loss spans"
        )
    for delimiter in (manifest.tokenizer.eos_id, manifest.tokenizer.bos_id):
        if delimiter is not None and delimiter >= manifest.tokenizer.vocab_size:
            raise DamagedCorpusError(
                f"{path}: delimiter {delimiter} is outside the vocabulary of {manifest.tokenizer.vocab_size} ids"
            )
    required = names.REQUIRED_FILES if manifest.base is None else names.FILES_OF_VIEW
    if not required <= set(manifest.files) <= required | names.OPTIONAL_FILES:
        raise DamagedCorpusError(
            f"{path} lists the files {sorted(manifest.files)}, expected {sorted(required)} "
            f"and perhaps {' and '.join(sorted(names.OPTIONAL_FILES))}"
        )


def is_unfinished(store: Store) -> bool:
    """Whether a folder belongs to an unfinished build: the folder of the build, or of a split."""
    if names.WORK in present(store):
        return True
    above, name = locate(store.location)
    return name in {names.TRAIN, names.VALIDATION} and names.WORK in present(above)


def _no_manifest(store: Store) -> CorpusError:
    hint = "give the directory that 'tokshard build --out' wrote"
    location = store.location
    if (problem := _problem_of_folder(store, hint)) is not None:
        return problem
    if is_unfinished(store):
        place = location if names.WORK in present(store) else locate(location)[0].location
        return UnfinishedCorpusError(
            f"{location} holds an unfinished build: it has no {names.MANIFEST}",
            hint=f"run its command again, which 'tokshard status {shlex.quote(place)}' shows; finished tasks are kept",
        )
    splits = (names.TRAIN, names.VALIDATION)
    if all(names.MANIFEST in present(store, split) for split in splits):
        return MissingCorpusError(
            f"{location} is not a corpus, but holds two: a build with a validation split wrote them",
            hint=f"give {store.where(splits[0])} or {store.where(splits[1])}",
        )
    if names.MIX in present(store):
        return MissingCorpusError(
            f"{location} is not a corpus: it has no {names.MANIFEST}, but a {names.MIX}",
            hint=f"give one of the corpora that {store.where(names.MIX)} names",
        )
    kind = MissingCorpusError if names.LAST_TABLES.isdisjoint(present(store)) else UnfinishedCorpusError
    return kind(f"{location} is not a corpus: it has no {names.MANIFEST}", hint=hint)


def _problem_of_folder(store: Store, hint: str) -> CorpusError | None:
    """Why no corpus can be at the location of a store; None if it is a folder."""
    try:
        if not store.names() and store.local_path("") is None:
            return MissingCorpusError(f"{store.location} does not exist: its bucket has nothing there", hint=hint)
    except FileNotFoundError:
        return MissingCorpusError(f"{store.location} does not exist", hint=hint)
    except NotADirectoryError:
        more = "; a mix is for StreamPlan.load and 'tokshard plan'" * store.location.endswith(".toml")
        return MissingCorpusError(f"{store.location} is a file", hint=hint + more)
    except OSError as error:
        if error.errno == errno.ENOTSUP:  # a web server
            return MissingCorpusError(f"{store.location} is not a corpus: it has no {names.MANIFEST}", hint=hint)
        return _unlisted(store, error)
    return None


def _unlisted(store: Store, error: OSError) -> CorpusError:
    return CorpusError(f"{store.location} cannot be listed: {error.strerror or error}", hint=_CHECK_PATH)


def check_outside_corpora(out: str, *, key: str = "--out") -> None:
    """Refuse a place in a folder of a corpus, at any depth.

    Checks all folders above it for a manifest, up to the root of the file system or of the bucket. In a bucket the
    requests run concurrently and take as long as one.

    Args:
        key: the setting that names the place. Only --out may be a corpus itself: each command checks that on its own.

    Raises:
        UsageError: one of them holds a corpus.
    """
    place = real_location(out)
    root = "/".join(place.split("/")[:3]) if is_uri(place) else "/"
    store, parts = open_store(root), [*filter(None, place.removeprefix(root).split("/"))]
    manifests = ["/".join([*parts[:depth], names.MANIFEST]) for depth in range(len(parts) + (key != "--out"))]

    def is_corpus(manifest: str) -> bool:
        try:
            store.stat(manifest)
            read_manifest(store.below(os.path.dirname(manifest)))
        except (OSError, TokshardError):  # there is none, or it may not be read
            return False
        return True

    for manifest, is_there in zip(manifests, side_by_side(store, is_corpus, manifests), strict=True):
        if is_there:
            raise UsageError(
                f"{key} {out} lies inside the corpus {store.where(os.path.dirname(manifest))}",
                hint="give a place outside of it"
                + "; what is added to a corpus goes into it by 'tokshard build --append'" * (key == "--out"),
            )
