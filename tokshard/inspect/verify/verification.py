"""Is every byte of a corpus what it was when it was written, and does its content keep the rules of the format?"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError, UnfinishedCorpusError
from tokshard.format import names
from tokshard.format.content import join_hashes
from tokshard.format.corpus import Corpus
from tokshard.format.files import read_file
from tokshard.format.manifest import (
    IN_OTHER_SPLIT,
    Manifest,
    TokenizerInfo,
    canonical_json,
    content_fingerprint,
    recipe_fingerprint,
)
from tokshard.format.opening import is_unfinished, list_names, read_manifest
from tokshard.format.tables import SourceInfo
from tokshard.inspect.corpus.vocabulary import token_ids
from tokshard.inspect.verify.careful_files import ByteCounter, OnProgress, UnreadableError, hash_chunks, opened
from tokshard.inspect.verify.shard_check import (
    Problem,
    ShardFindings,
    SourceRuns,
    check_shard,
    hash_problem,
    problem_of,
)
from tokshard.store import open_store

MAX_WORKERS = 8
"""Threads, unless more are asked for: that many cores hash as fast as most disks read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyReport:
    """What a verification found. The counts are those of the manifest, 0 if that cannot be read.

    Args:
        checked_bytes: bytes of files that were hashed; of a quick check also those that were read.
    """

    directory: str
    num_documents: int
    num_tokens: int
    num_shards: int
    checked_bytes: int
    problems: tuple[Problem, ...]

    @property
    def is_ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.problems


def verify_corpus(
    location: str | os.PathLike[str],
    on_progress: OnProgress | None = None,
    *,
    is_quick: bool = False,
    workers: int | None = None,
) -> VerifyReport:
    """Check every file of a corpus: hashes, structure, the rules of the format, and all numbers that are stored twice.

    Whatever is damaged is reported, and what can be checked in spite of it is checked. If the shard table is damaged,
    the shards are not: nothing else says what they should be. Nothing is mapped into memory, so that a file that is cut
    meanwhile is a problem like any other.

    Costs one read, hash and scan of all bytes, 1.2 GB per CPU-second (1.0 with documents of 50 tokens), and memory of
    the two tables and of 24 bytes per document of one shard for each worker; see `check_shard`.

    Args:
        on_progress: is called from the threads, one at a time.
        is_quick: leave the content of the shards alone: their sizes, schemas, record batches, offsets and numbers are
            checked, no hash and no token.
        workers: threads; default: the CPUs that this process may use, `MAX_WORKERS` at most.

    Raises:
        CorpusError: the directory does not exist, or holds no corpus or an unfinished one: that is not damage.
        UsageError: the location is a URI.
    """
    directory = Path(open_store(location).location)
    try:
        _require_file(directory / names.MANIFEST)
        manifest = read_manifest(open_store(directory))
    except CorpusError as error:
        if not directory.is_dir() or (isinstance(error, UnfinishedCorpusError) and not _has_lost_manifest(directory)):
            raise
        problem = problem_of(directory, names.MANIFEST, error)
        return VerifyReport(
            directory=str(directory), num_documents=0, num_tokens=0, num_shards=0, checked_bytes=0, problems=(problem,)
        )
    to_check = manifest.num_bytes + sum(facts.num_bytes for facts in manifest.files.values())
    run = _Run(counter=ByteCounter(to_check, on_progress), is_quick=is_quick, num_threads=workers or _default_workers())
    return VerifyReport(
        directory=str(directory),
        num_documents=manifest.num_documents,
        num_tokens=manifest.num_tokens,
        num_shards=manifest.num_shards,
        problems=tuple(_problems(directory, manifest, run)),
        checked_bytes=run.counter.checked_bytes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    counter: ByteCounter
    is_quick: bool
    num_threads: int


def _default_workers() -> int:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(MAX_WORKERS, usable)


def _has_lost_manifest(directory: Path) -> bool:
    """Whether a directory without a manifest was a corpus: a build writes the shard table just before the manifest."""
    return not is_unfinished(open_store(directory)) and (directory / names.SHARD_TABLE).exists()


def _require_file(path: Path) -> None:
    """Refuse a pipe or a device, which would be read for ever. A missing file is reported elsewhere."""
    if path.exists() and not path.is_file():
        raise DamagedCorpusError(f"{path} is no regular file", hint=RESTORE)


def _problems(directory: Path, manifest: Manifest, run: _Run) -> Iterator[Problem]:
    beside = list(_check_files_beside(directory, manifest, run.counter))
    yield from beside
    damaged = {problem.file for problem in beside}
    corpus = None
    if names.SHARD_TABLE in damaged:
        message = f"describes the {manifest.num_shards:,} shards: they were not checked without it"
        yield Problem(file=names.SHARD_TABLE, message=message)
    else:
        try:
            corpus = Corpus(open_store(directory), manifest, load_table=read_file)
        except CorpusError as error:
            yield problem_of(directory, names.SHARD_TABLE, error)
    if corpus is not None:
        yield from _check_content(corpus, names.SOURCE_TABLE not in damaged, run)
    records = manifest.records
    if records.with_special_text > records.written:
        message = f"says that {records.with_special_text} documents spell a special token, of {records.written}"
        yield Problem(file=names.MANIFEST, message=message)
    yield from _check_split(directory, manifest)
    yield from _check_directory(directory, manifest, corpus)


def _check_files_beside(directory: Path, manifest: Manifest, counter: ByteCounter) -> Iterator[Problem]:
    """What the manifest says of the files that are no shards."""
    is_tokenizer_whole = True
    for name, facts in sorted(manifest.files.items()):
        problem = _check_file(directory / name, facts.num_bytes, facts.sha256, counter)
        if problem is not None:
            is_tokenizer_whole = is_tokenizer_whole and name != names.TOKENIZER
            yield problem
    if is_tokenizer_whole:
        yield from _check_tokenizer(directory, manifest)


def _check_content(corpus: Corpus, has_sources: bool, run: _Run) -> Iterator[Problem]:
    """Shards, and every number that follows from them."""
    tally = _Tally()
    for findings in _in_order(corpus, run):
        yield from findings.problems
        yield from tally.add(findings)
    yield from _check_names(corpus)
    if tally.is_complete:
        yield from _check_lengths(corpus.manifest, tally)
    if has_sources:
        try:
            sources = corpus.sources()
        except CorpusError as error:
            yield problem_of(corpus.directory, names.SOURCE_TABLE, error)
        else:
            yield from _check_sources(corpus.manifest, sources, tally)


def _in_order(corpus: Corpus, run: _Run) -> Iterator[ShardFindings]:
    """The findings of all shards in their order, made by threads: hashing does not hold the interpreter's lock."""
    check = partial(check_shard, corpus, counter=run.counter, is_quick=run.is_quick)
    waiting: deque[Future[ShardFindings]] = deque()
    with ThreadPoolExecutor(run.num_threads) as pool:
        try:
            for index in range(len(corpus.shards)):
                waiting.append(pool.submit(check, index))
                if len(waiting) > 2 * run.num_threads:  # findings that wait for their turn cost memory
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            run.counter.stop()
            pool.shutdown(wait=False, cancel_futures=True)


def _check_file(path: Path, num_bytes: int, sha256: str, counter: ByteCounter) -> Problem | None:
    try:
        with opened(path, num_bytes) as descriptor:
            found = hash_chunks(descriptor, num_bytes, counter)
    except UnreadableError as error:
        return Problem(file=path.name, message=str(error))
    return None if found == sha256 else hash_problem(path.name, found, sha256)


def _check_tokenizer(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    tokenizer, beside = manifest.tokenizer, manifest.files[names.TOKENIZER]
    if tokenizer.sha256 != beside.sha256:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives the tokenizer SHA-256 {tokenizer.sha256}, and {names.TOKENIZER} {beside.sha256}",
        )
    try:
        parsed = json.loads((directory / names.TOKENIZER).read_bytes())
        canonical = canonical_json(parsed)
    except (OSError, ValueError, RecursionError) as error:
        yield Problem(file=names.TOKENIZER, message=f"is not JSON: {error}")
        return
    found = hashlib.sha256(canonical).hexdigest()
    if found != tokenizer.canonical_sha256:
        yield Problem(
            file=names.TOKENIZER, message=f"has canonical SHA-256 {found}, expected {tokenizer.canonical_sha256}"
        )
    try:
        ids = token_ids(parsed)
    except (ValueError, TypeError, AttributeError, LookupError) as error:
        yield Problem(file=names.TOKENIZER, message=f"has no vocabulary: {error!r}")
        return
    for message in _vocabulary_faults(tokenizer, ids):
        yield Problem(file=names.MANIFEST, message=message)


def _vocabulary_faults(tokenizer: TokenizerInfo, ids: Mapping[str, int]) -> Iterator[str]:
    """What a manifest says of the tokens of a tokenizer that has these."""
    if tokenizer.vocab_size != 1 + max(ids.values()):
        yield f"gives the vocabulary {tokenizer.vocab_size} ids, {names.TOKENIZER} has {1 + max(ids.values())}"
    for what, token, token_id in (
        ("EOS", tokenizer.eos, tokenizer.eos_id),
        ("BOS", tokenizer.bos, tokenizer.bos_id),
        *(("special token", token, token_id) for token, token_id in tokenizer.special_ids.items()),
    ):
        found = None if token is None else ids.get(token)
        if found != token_id:
            yield f"gives {what} {token!r} the id {token_id}, in {names.TOKENIZER} it has {found}"
        elif token is not None and token not in tokenizer.special_ids:
            yield f"has {what} {token!r} not among its special tokens"


class _Tally:
    """What the documents of all shards add up to."""

    def __init__(self) -> None:
        self.is_complete = True
        self.shortest = np.iinfo(np.int64).max
        self.longest = 0
        self.length_counts = np.zeros(64, np.int64)
        self.documents_of_source: Counter[int] = Counter()
        self.tokens_of_source: Counter[int] = Counter()
        self.next_record: dict[int, int] = {}

    def add(self, findings: ShardFindings) -> Iterator[Problem]:
        """The next shard; what is wrong with its records after those of the shards before."""
        if findings.problems:
            self.is_complete = False
        if findings.lengths is not None:
            self._add_lengths(findings.lengths)
        if findings.runs is not None:
            yield from self._add_runs(findings.runs)

    def _add_lengths(self, lengths: NDArray[np.int64]) -> None:
        self.shortest = min(self.shortest, int(lengths.min()))
        self.longest = max(self.longest, int(lengths.max()))
        # frexp gives m * 2**e with m in [0.5, 1): e - 1 is the floor of log2
        self.length_counts += np.bincount(np.frexp(lengths)[1] - 1, minlength=64)

    def _add_runs(self, runs: SourceRuns) -> Iterator[Problem]:
        columns = (runs.source.tolist(), runs.record.tolist(), runs.documents.tolist(), runs.tokens.tolist())
        for source, record, documents, tokens in zip(*columns, strict=True):
            expected = self.next_record.get(source, 0)
            if record < expected:
                self.is_complete = False
                yield Problem(
                    file=names.SHARD_TABLE,
                    message=f"has runs that go back to record {record + 1} of source {source}, "
                    f"expected {expected + 1} or later",
                )
            self.next_record[source] = record + documents
            self.documents_of_source[source] += documents
            self.tokens_of_source[source] += tokens


def _check_names(corpus: Corpus) -> Iterator[Problem]:
    """Names and fingerprint of the shard table."""
    manifest = corpus.manifest
    twice = [name for name, count in Counter(corpus.shards.names()).items() if count > 1]
    if twice:
        yield Problem(file=names.SHARD_TABLE, message=f"names {twice[0]} more than once")
    found = content_fingerprint(
        join_hashes(info.tokens_hash for info in corpus.shards),
        num_documents=manifest.num_documents,
        eos_id=corpus.eos_id,
        bos_id=corpus.bos_id,
    )
    if found != corpus.fingerprint:
        yield Problem(
            file=names.SHARD_TABLE,
            message=f"has shards with the content fingerprint {found}, the manifest says {corpus.fingerprint}",
        )


def _check_lengths(manifest: Manifest, tally: _Tally) -> Iterator[Problem]:
    counts = tally.length_counts.tolist()
    stored = manifest.document_lengths
    while counts and not counts[-1]:
        counts.pop()
    found = (tally.shortest, tally.longest, counts)
    expected = (stored.shortest, stored.longest, stored.counts)
    if found != expected:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives document lengths (shortest, longest, counts) {expected}, the shards hold {found}",
        )


def _check_sources(manifest: Manifest, sources: list[SourceInfo], tally: _Tally) -> Iterator[Problem]:
    left_out: Counter[str] = Counter()
    for index, source in enumerate(sources):
        left_out.update(source.left_out)
        facts = f"source {index} ({source.path or manifest.arguments[source.argument]})"
        settled = source.documents + sum(source.left_out.values())
        if source.records_read != settled:
            message = f"says of {facts}: {source.records_read} records read, but {settled} written and left out"
            yield Problem(file=names.SOURCE_TABLE, message=message)
        found = (tally.documents_of_source[index], tally.tokens_of_source[index])
        if tally.is_complete and found != (source.documents, source.tokens):
            yield Problem(
                file=names.SOURCE_TABLE,
                message=f"says of {facts} that {source.documents} documents and {source.tokens} tokens were written, "
                f"the shard table {found[0]} and {found[1]}",
            )
        if tally.next_record.get(index, 0) > source.records_read:
            yield Problem(
                file=names.SHARD_TABLE,
                message=f"has record {tally.next_record[index]} of {facts}, which has {source.records_read}",
            )
    unknown = sorted(source for source in tally.next_record if not 0 <= source < len(sources))
    if unknown:
        yield Problem(file=names.SHARD_TABLE, message=f"names the source {unknown[0]}; there are {len(sources)}")
    sums: dict[str, tuple[Any, Any]] = {
        "read": (manifest.records.read, sum(source.records_read for source in sources)),
        "written": (manifest.records.written, sum(source.documents for source in sources)),
        "left out": (manifest.records.left_out, dict(sorted(left_out.items()))),
        "bytes of text": (manifest.text_bytes, sum(source.text_bytes for source in sources)),
        "documents": (manifest.records.written, manifest.num_documents),
    }
    for what, (stored, found_sum) in sums.items():
        if stored != found_sum:
            yield Problem(file=names.MANIFEST, message=f"says {stored} {what}, its sources add up to {found_sum}")
    found_recipe = recipe_fingerprint(
        manifest.build, manifest.tokenizer, ((source.argument, source.path, source.num_bytes) for source in sources)
    )
    if found_recipe != manifest.fingerprints.recipe:
        yield Problem(
            file=names.MANIFEST,
            message=f"gives the recipe fingerprint {manifest.fingerprints.recipe}, "
            f"its settings, tokenizer and sources have {found_recipe}",
        )


def _check_split(directory: Path, manifest: Manifest) -> Iterator[Problem]:
    """The two corpora of a validation split against each other, where both lie in one directory."""
    split = manifest.build.split
    if split not in IN_OTHER_SPLIT:
        return
    other_name = names.VALIDATION if split == names.TRAIN else names.TRAIN
    try:
        other = read_manifest(open_store(directory.parent / other_name))
    except CorpusError:
        return  # it went elsewhere, or is damaged, which its own verification says
    if msgspec.structs.replace(other.build, split=split) != manifest.build or other.arguments != manifest.arguments:
        return  # of another build
    elsewhere = manifest.records.left_out.get(IN_OTHER_SPLIT[split], 0)
    if (other.records.read, other.records.written) != (manifest.records.read, elsewhere):
        yield Problem(
            file=names.MANIFEST,
            message=f"says {manifest.records.read} records read and {elsewhere} {IN_OTHER_SPLIT[split]}, "
            f"{other_name} has {other.records.read} and {other.records.written}",
        )


def _check_directory(directory: Path, manifest: Manifest, corpus: Corpus | None) -> Iterator[Problem]:
    known = {names.MANIFEST, names.REPORT, names.WORK, *manifest.files}
    shards = None if corpus is None else set(corpus.shards.names())
    try:
        present = [name.rstrip("/") for name in list_names(open_store(directory))]
    except CorpusError as error:
        yield problem_of(directory, ".", error)
        return
    for name in sorted(set(present) - known):
        if names.is_shard_name(name):
            if shards is not None and name not in shards:
                yield Problem(file=name, message="is a shard that the manifest does not name")
        else:
            yield Problem(file=name, message="is no file of this corpus")
