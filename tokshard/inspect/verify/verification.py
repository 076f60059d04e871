"""Checks that a corpus has exactly the bytes that were written, and that its content follows the format."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError, MissingCorpusError, UnfinishedCorpusError
from tokshard.forking import cpu_count
from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.files import read_file
from tokshard.format.generations import generation_numbers
from tokshard.format.manifest import Manifest
from tokshard.format.opening import is_unfinished, list_names, open_base, open_corpus, read_manifest
from tokshard.format.view import View
from tokshard.inspect import OnProgress, no_progress
from tokshard.inspect.verify.generation_check import check_contents, find_generations
from tokshard.inspect.verify.manifest_check import Tally, check_sources, check_split, check_tokenizer, check_totals
from tokshard.inspect.verify.safe_read import ByteCounter, UnreadableError, hash_chunks, opened
from tokshard.inspect.verify.shard_check import Problem, ShardFindings, check_shard, hash_problem, problem_of
from tokshard.inspect.verify.view_check import check_shards, order_faults
from tokshard.store import NotRegularFileError, Store, open_store, present

MAX_WORKERS = 8
"""Default limit for threads: this many cores hash as fast as most disks read."""

_CheckShard = Callable[..., ShardFindings]
"""`check_shard` for one verification."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """The result of a verification. Counts come from the manifests; 0 if the manifest of the corpus cannot be read.

    Args:
        num_generations: 1, and 1 more for each append.
        checked_bytes: bytes that were hashed or, in a quick check, read.
    """

    directory: str
    problems: tuple[Problem, ...]
    num_documents: int = 0
    num_tokens: int = 0
    num_shards: int = 0
    num_generations: int = 0
    checked_bytes: int = 0

    @property
    def is_ok(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


def verify_corpus(
    location: str | os.PathLike[str],
    on_progress: OnProgress = no_progress,
    *,
    is_quick: bool = False,
    workers: int | None = None,
) -> VerifyReport:
    """Check every file of a corpus: hashes, structure, the rules of the format, and all numbers that are stored twice.

    A corpus in an object store is streamed: no copy is made on this machine. On a web server, which does not list its
    files, foreign ones stay unnoticed.

    All damage is reported, and whatever can still be checked is checked. If the shard table is damaged, shards are not
    checked, because only that table describes them. No file is mapped into memory, so a file that is truncated during
    the check is reported like any other problem.

    Costs one read, hash and scan of all bytes, 1.2 GB per CPU-second (1.0 for documents of 50 tokens). Memory: the two
    tables and, per thread, 24 bytes for each document of one shard; see `check_shard`.

    Args:
        on_progress: receives bytes; called from the threads, one at a time.
        is_quick: check sizes, schemas, record batches, offsets and numbers, but hash no shard and read no token.
        workers: threads; default: the CPUs that this process may use, at most `MAX_WORKERS`.

    Raises:
        CorpusError: the location does not exist, or does not hold a finished corpus, which is not damage.
        StoreError: the store does not answer.
    """
    store = open_store(location)
    manifest = _manifest_or_problem(store)
    if isinstance(manifest, Problem):
        return VerifyReport(directory=store.location, problems=(manifest,))
    by_folder, problems = find_generations(store, manifest)
    manifests = list(by_folder.values())
    to_check = sum(each.num_bytes + sum(facts.num_bytes for facts in each.files.values()) for each in manifests)
    counter = ByteCounter(to_check, on_progress)
    check = partial(check_shard, counter=counter, is_quick=is_quick)
    for folder, each in by_folder.items():
        problems += (
            replace(problem, file=names.in_folder(folder, problem.file))
            for problem in _problems(store.below(folder) if folder else store, each, check, counter, workers)
        )
    if not problems and len(manifests) > 1:
        try:
            problems += check_contents(store, manifests)
        except CorpusError as error:  # a table has changed since it was checked
            tables = [names.in_folder(folder, names.SHARD_TABLE) for folder in by_folder]
            changed = next((table for table in tables if error.problem.startswith(store.where(table))), tables[0])
            problems.append(problem_of(store, changed, error))
    return VerifyReport(
        directory=store.location,
        num_documents=sum(each.num_documents for each in manifests),
        num_tokens=sum(each.num_tokens for each in manifests),
        num_shards=sum(each.num_shards for each in manifests),
        num_generations=len(manifests),
        problems=tuple(problems),
        checked_bytes=counter.checked_bytes,
    )


def _manifest_or_problem(store: Store) -> Manifest | Problem:
    """The manifest of a corpus, or why it cannot be read.

    Raises:
        CorpusError: there is no finished corpus.
    """
    try:
        store.stat(names.MANIFEST)
    except (NotRegularFileError, IsADirectoryError):  # a pipe or a device could be read forever
        return Problem(names.MANIFEST, "is not a regular file")
    except OSError:
        pass  # reading it says more
    try:
        return read_manifest(store)
    except MissingCorpusError:
        raise
    except CorpusError as error:
        try:
            was_finished = not is_unfinished(store) and not names.LAST_TABLES.isdisjoint(present(store))
        except OSError:
            raise error from None  # the path itself cannot be read, and the error says why
        problem = problem_of(store, names.MANIFEST, error)
        if not isinstance(error, UnfinishedCorpusError):
            return problem
        if not was_finished:
            raise
        return replace(problem, hint=RESTORE)  # not that it was never finished


def base_of(location: str | os.PathLike[str]) -> str | None:
    """Where the corpus of a view is; None for any other corpus, or if it cannot be found."""
    with contextlib.suppress(CorpusError), open_corpus(location) as corpus:
        return corpus.base.location if isinstance(corpus, View) else None
    return None


def check_hashes(corpora: Sequence[Corpus], on_progress: OnProgress = no_progress) -> None:
    """Hash every shard of some corpora, without other checks; 1 to 2 GB per second.

    Args:
        on_progress: receives bytes.

    Raises:
        DamagedCorpusError: a shard does not match its manifest.
    """
    counter = ByteCounter(sum(corpus.manifest.num_bytes for corpus in corpora), on_progress)
    for corpus in corpora:
        for shard in corpus.shards:
            for problem in _check_file(corpus.shard_store, shard.name, shard.num_bytes, shard.sha256, counter):
                raise DamagedCorpusError(
                    f"{corpus.shard_store.where(problem.file)} {problem.message}",
                    hint=f"'tokshard verify {shlex.quote(corpus.location)}' lists everything that is damaged",
                )


def _problems(
    store: Store, manifest: Manifest, check: _CheckShard, counter: ByteCounter, workers: int | None
) -> Iterator[Problem]:
    """The problems of one generation: its files, its shards, and every number that follows from them."""
    damaged, corpus = set(), None
    for name, facts in sorted(manifest.files.items()):
        for problem in _check_file(store, name, facts.num_bytes, facts.sha256, counter):
            damaged.add(name)
            yield problem
    if names.TOKENIZER not in damaged:
        yield from check_tokenizer(store, manifest)
    table = names.SHARD_TABLE if manifest.base is None else names.KEPT
    if names.SHARD_TABLE in damaged:
        message = f"describes the {manifest.num_shards:,} shards: they were not checked without it"
        yield Problem(names.SHARD_TABLE, message)
    elif table not in damaged:
        try:
            if manifest.base is None:
                corpus = Corpus(store, [manifest], load_table=read_file)
            else:
                corpus = View(store, manifest, open_base(store, manifest), load_table=read_file)
        except CorpusError as error:
            yield problem_of(store, table, error)
        else:
            faults = list(order_faults(corpus)) if isinstance(corpus, View) else []
            found = check_shards(corpus) if isinstance(corpus, View) else _in_order(corpus, check, counter, workers)
            has_sources = names.SOURCE_TABLE not in damaged
            yield from faults or _problems_of_shards(corpus, found, has_sources=has_sources)
    yield from check_split(store, manifest)
    yield from _check_folder(store, manifest, corpus)


def _problems_of_shards(corpus: Corpus, found: Iterator[ShardFindings], *, has_sources: bool) -> Iterator[Problem]:
    copied = corpus.manifest.build.copied
    is_shuffled = isinstance(corpus, View) or (copied is not None and copied.shuffle is not None)
    tally = Tally(is_shuffled=is_shuffled)
    for findings in found:
        yield from findings.problems
        yield from tally.add(findings)
    yield from check_totals(corpus, tally)
    if has_sources:
        try:
            sources = corpus.sources()
        except CorpusError as error:
            yield problem_of(corpus.store, names.SOURCE_TABLE, error)
        else:
            yield from check_sources(corpus.manifest, sources, tally)


def _in_order(corpus: Corpus, check: _CheckShard, counter: ByteCounter, workers: int | None) -> Iterator[ShardFindings]:
    """The findings of all shards in order. Threads do the work, because hashing releases the interpreter's lock."""
    try:  # with flipped bytes it still says which strides differ
        num_bytes = corpus.store.stat(names.STRIDE_HASHES).size
    except OSError:
        num_bytes = None
    has_hashes = num_bytes == corpus.manifest.files[names.STRIDE_HASHES].num_bytes
    num_threads, waiting = workers or min(MAX_WORKERS, cpu_count()), deque[Future[ShardFindings]]()
    with ThreadPoolExecutor(num_threads) as pool:
        try:
            for index in range(len(corpus.shards)):
                waiting.append(pool.submit(check, corpus, index, has_hashes=has_hashes))
                if len(waiting) > 2 * num_threads:  # findings that wait cost memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BaseException:
            counter.is_stopped = True
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _check_file(store: Store, name: str, num_bytes: int, sha256: str, counter: ByteCounter) -> Iterator[Problem]:
    try:
        with opened(store, name, num_bytes) as file:
            found = hash_chunks(file, num_bytes, counter)
    except UnreadableError as error:
        yield Problem(name, *error.args)
    else:
        if found != sha256:
            yield hash_problem(name, found, sha256)


def _check_folder(store: Store, manifest: Manifest, corpus: Corpus | None) -> Iterator[Problem]:
    known = {names.MANIFEST, names.REPORT, names.WORK, *manifest.files}
    try:
        listed = {name.rstrip("/") for name in list_names(store) or ()}
    except CorpusError as error:
        yield problem_of(store, ".", error)
        return
    # files in the folders of generations are checked with them
    known |= (folders := set(map(names.generation_folder, generation_numbers(listed))))
    if manifest.generation is not None and folders:
        message = f"is the manifest of generation {manifest.generation.number}, not of the whole corpus"
        yield Problem(names.MANIFEST, message)
    if manifest.base is not None:  # cells have folders of their own
        known |= {names.MIX, *(name for name in listed if "=" in name)}
    else:
        known |= set(filter(names.is_shard_name, listed) if corpus is None else corpus.shards.names())
    for name in sorted(listed - known):
        if names.is_shard_name(name):
            yield Problem(name, "is a shard that the manifest does not name")
        else:  # no build removes what is not its own
            yield Problem(name, "is not part of this corpus", "move foreign files to another place")
