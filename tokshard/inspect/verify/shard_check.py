"""Checks of one shard: its structure from its offsets, then its content in one pass over the file."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format import names
from tokshard.format.content import Content, TokenHash, hash_tokens
from tokshard.format.corpus import Corpus
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.format.shard import Shard
from tokshard.format.shard_table import Runs
from tokshard.format.stride_hashes import StrideHasher, group_hashes
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.inspect.verify.safe_read import ByteCounter, SparseImage, UnreadableError, hash_chunks, opened
from tokshard.store import Store

_MESSAGE_BYTES = 65_536
_COLUMN_BYTES = 128
"""Upper limits for the description of a record batch, which precedes its first buffer: it takes some hundred bytes, and
at most 64 per column (for text)."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem of a corpus.

    Args:
        file: name in the corpus directory.
        message: continues the name; has the value found and the one expected.
        hint: the next step.
    """

    file: str
    message: str
    hint: str = RESTORE


@dataclass(slots=True, kw_only=True)
class ShardFindings:
    """The problems of a shard, and the totals of its documents, as far as they can be read.

    Args:
        lengths: int64 [documents]; None if the structure is damaged.
        runs: int64 [runs, 4], documents from consecutive records of one source, in the order of the documents: source,
            first record, number of documents and of tokens; None if the runs are damaged.
    """

    problems: list[Problem] = field(default_factory=list)
    lengths: NDArray[np.int64] | None = None
    runs: NDArray[np.int64] | None = None


def check_shard(
    corpus: Corpus, index: int, counter: ByteCounter, *, is_quick: bool, has_hashes: bool = True
) -> ShardFindings:
    """Check one shard against the shard table. Threads may share the corpus.

    Reads each byte of the file once, offsets twice. Memory is 24 bytes per document and two megabytes, plus the kept
    columns of one record batch.

    Args:
        is_quick: only check the structure (sizes, schema, record batches, offsets, runs), which reads 8 bytes per
            document.
        has_hashes: whether ``stride-hashes.bin`` can be compared with the tokens.
    """
    info, found, places, runs = corpus.shards[index], ShardFindings(), list[BatchPlace](), None
    try:
        places, strides = corpus.shards.batch_places(index), corpus.shards.stride_documents(index)
        runs = corpus.shards.runs(index)
    except CorpusError as error:
        found.problems.append(problem_of(corpus.store, names.SHARD_TABLE, error))
    try:
        with opened(corpus.store, info.name, info.num_bytes) as file:
            # a full check reads these bytes again and counts them then
            on_read = (lambda num_bytes: counter.add(read=num_bytes)) if is_quick else (lambda _: None)
            image, starts, loss = SparseImage(file, info.num_bytes, on_read), [np.zeros(1, np.int64)], Content()
            if runs is not None:
                try:
                    for offsets, targets in _offsets(corpus, info, places, image, with_columns=not is_quick):
                        starts.append(offsets[1:] + starts[-1][-1])
                        loss = loss.then(targets)
                    bounds = np.concatenate(starts)
                    found.lengths = bounds[1:] - bounds[:-1]
                except CorpusError as error:
                    found.problems.append(problem_of(corpus.store, info.name, error))
            bounds, intact = np.concatenate(starts), places[: len(starts) - 1]
            if is_quick:
                counter.add(done=info.num_bytes)
            else:
                tokens = _TokenCheck(corpus, index, bounds, intact)
                digest = hash_chunks(file, info.num_bytes, counter, tokens.look)
                if digest != info.sha256:
                    found.problems.insert(0, hash_problem(info.name, digest, info.sha256))
                elif found.lengths is not None:
                    found.problems += tokens.hash_faults(has_strides=has_hashes)
                    loss = loss if corpus.has_spans else _without_spans(found.lengths)
                    found.problems += _loss_faults(info.name, loss, corpus.shards.content(index))
                found.problems += (Problem(info.name, message) for message in tokens.messages())
    except UnreadableError as error:
        # the content of a missing or truncated file adds no information
        return ShardFindings(problems=[Problem(info.name, *error.args)])
    if runs is not None and found.lengths is not None:
        found.runs = _runs(runs, bounds)
        faults = _table_faults(info, bounds, strides, has_runs=found.runs is not None)
        found.problems += (Problem(names.SHARD_TABLE, fault) for fault in faults)
    return found


def _offsets(
    corpus: Corpus, info: ShardInfo, places: list[BatchPlace], image: SparseImage, *, with_columns: bool
) -> Iterator[tuple[NDArray[np.int64], Content]]:
    """The offsets of each batch. Reads the other columns, too, if requested.

    Yields:
        int64 [documents + 1], and the content of the batch without its tokens, if the columns are read.

    Raises:
        CorpusError: the next one is damaged.
    """
    with_columns &= bool(corpus.manifest.columns)
    message_bytes, end = _MESSAGE_BYTES + _COLUMN_BYTES * len(corpus.manifest.columns), 0
    image.load_footer()
    image.load(0, message_bytes)
    shard = Shard(corpus.store, info, places, corpus.shard_schema, content=image.buffer)
    for index, place in enumerate(places):
        begin, end = end, place.values_position + place.num_tokens * corpus.dtype.itemsize
        after = places[index + 1].offsets_position if index + 1 < len(places) else info.num_bytes
        image.load(
            max(begin, place.offsets_position - message_bytes), place.offsets_position + 8 * (place.num_documents + 1)
        )
        if with_columns:
            image.load(end, after)
        offsets, _ = shard.batch(index)
        if place.values_position % 8:
            where = f"{shard.path}, batch {index}"
            raise DamagedCorpusError(f"{where}: tokens at byte {place.values_position}", hint=RESTORE)
        content = Content()
        if with_columns:
            shard.columns(index)
            targets = shard.targets(index)
            loss = targets.hashed(place.num_tokens) if corpus.has_spans else TokenHash(place.num_tokens)
            content = Content(num_documents=place.num_documents, num_targets=targets.count, loss=loss)
        yield offsets, content
        if index + 1 < len(places):
            image.unload(begin, after - message_bytes)


def _without_spans(lengths: NDArray[np.int64]) -> Content:
    """What documents without loss spans hold, but for their tokens."""
    num_tokens = int(lengths.sum())
    return Content(num_documents=len(lengths), num_targets=num_tokens - len(lengths), loss=TokenHash(num_tokens))


def _loss_faults(name: str, found: Content, stated: Content) -> Iterator[Problem]:
    """Where the shard table is wrong about the loss spans of a shard."""
    if found != replace(stated, tokens=TokenHash()):
        problem = f"gives {name} {stated.num_targets} targets and a hash of its loss spans"
        yield Problem(names.SHARD_TABLE, f"{problem}, the shard has {found.num_targets} and perhaps another hash")


def _table_faults(
    info: ShardInfo, starts: NDArray[np.int64], strides: NDArray[np.int64], *, has_runs: bool
) -> Iterator[str]:
    """Where the shard table is wrong about the documents of a shard."""
    expected = np.searchsorted(starts, np.arange(0, info.num_tokens, ORDINAL_STRIDE), "right") - 1
    if not np.array_equal(strides, expected):
        wrong = int(np.argmax(strides != expected))
        place = f"token {wrong * ORDINAL_STRIDE} of {info.name} is in its document {strides[wrong]}"
        yield f"says that {place}, expected {expected[wrong]}"
    if not has_runs:
        yield f"has runs of {info.name} that do not ascend from document 0 to {info.num_documents}"


def _runs(runs: Runs, starts: NDArray[np.int64]) -> NDArray[np.int64] | None:
    """Runs as in `ShardFindings`."""
    bounds = np.append(runs.document, len(starts) - 1)
    if bounds[0] != 0 or len(bounds) < 2 or not bool(np.all(bounds[1:] > bounds[:-1])):
        return None
    return np.stack([runs.source, runs.record, np.diff(bounds), np.diff(starts[bounds])], axis=1)


class _TokenCheck:
    """Checks the ids of a shard chunk by chunk: delimiters in the right places, and no id outside the vocabulary."""

    def __init__(self, corpus: Corpus, index: int, starts: NDArray[np.int64], batches: Sequence[BatchPlace]) -> None:
        self._corpus, self._index, self._starts, self._batches = corpus, index, starts, batches
        self._batch = self._first_token = 0  # the position of the batch in the shard
        self._content, self._strides = TokenHash(), StrideHasher()
        self._faults: dict[str, list[int]] = {}
        """Kind of fault to its first document in the corpus, the batch of that, and the number of faults."""

    def look(self, position: int, chunk: memoryview) -> None:
        """Check the next bytes of the file."""
        stop, dtype = position + len(chunk), self._corpus.dtype
        while self._batch < len(self._batches):
            place = self._batches[self._batch]
            begin, end = place.values_position, place.values_position + place.num_tokens * dtype.itemsize
            low, high = max(position, begin), min(stop, end)
            if low < high:
                tokens = np.frombuffer(chunk[low - position : high - position], dtype)
                self._check(tokens, self._first_token + (low - begin) // dtype.itemsize)
            if end > stop:
                return
            self._first_token += place.num_tokens
            self._batch += 1

    def _check(self, tokens: NDArray[Any], first: int) -> None:
        eos_id, bos_id, size = self._corpus.eos_id, self._corpus.bos_id, self._corpus.vocab_size
        self._content = self._content.then(hash_tokens(tokens))
        self._strides.add(tokens)
        begin, end = np.searchsorted(self._starts, [first, first + len(tokens)])
        starts = self._starts[begin:end] - first
        begin, end = np.searchsorted(self._starts[1:], [first + 1, first + len(tokens) + 1])
        lasts = self._starts[1:][begin:end] - 1 - first
        if int(tokens.max()) >= size:
            beyond = np.flatnonzero(tokens >= size)
            self._note(f": id {tokens[beyond[0]]} is outside the vocabulary of {size} ids", first + beyond)
        self._note(f" does not end with EOS ({eos_id})", first + lasts[tokens[lasts] != eos_id])
        if bos_id is not None:
            self._note(f" does not start with BOS ({bos_id})", first + starts[tokens[starts] != bos_id])
        delimiters = lasts if bos_id != eos_id else np.union1d(starts, lasts)
        is_eos = tokens == eos_id
        if np.count_nonzero(is_eos) != np.count_nonzero(is_eos[delimiters]):
            is_eos[delimiters] = False
            self._note(f" has EOS ({eos_id}) inside", first + np.flatnonzero(is_eos))

    def _note(self, fault: str, places: NDArray[np.int64]) -> None:
        if fault in self._faults:
            self._faults[fault][2] += len(places)
        elif len(places):
            document = int(np.searchsorted(self._starts, int(places[0]), "right")) - 1
            document += int(self._corpus.shards.first_documents[self._index])
            self._faults[fault] = [document, self._batch, len(places)]

    def hash_faults(self, *, has_strides: bool) -> Iterator[Problem]:
        """Where stored hashes differ from the hashes of the tokens."""
        corpus, info = self._corpus, self._corpus.shards[self._index]
        if self._content != corpus.shards.content(self._index).tokens:
            yield Problem(names.SHARD_TABLE, f"gives {info.name} another hash of its tokens than the shard has")
        found = self._strides.finish()
        for wrong in np.flatnonzero(corpus.shards.group_hashes(self._index) != group_hashes(found))[:1].tolist():
            yield Problem(names.SHARD_TABLE, f"has another hash of group {wrong} of {info.name} than its tokens")
        try:
            stored = corpus.stride_hashes(self._index, is_checked=False) if has_strides else found
        except CorpusError as error:
            yield problem_of(corpus.store, names.STRIDE_HASHES, error)
            return
        for wrong in np.flatnonzero(stored != found)[:1].tolist():
            more = _and_more(int(np.count_nonzero(stored != found)))
            crc = f"the CRC-32 {stored[wrong]:08x}, its tokens have {found[wrong]:08x}{more}"
            yield Problem(names.STRIDE_HASHES, f"gives stride {wrong} of {info.name} {crc}")

    def messages(self) -> Iterator[str]:
        """A message per kind of fault: the first place, and how many more there are."""
        for fault, (document, batch, count) in sorted(self._faults.items(), key=lambda item: item[1][0]):
            yield f"batch {batch}, document {document} of the corpus{fault}{_and_more(count)}"


def _and_more(count: int) -> str:
    return f", and {count - 1} more" if count > 1 else ""


def problem_of(store: Store, file: str, error: CorpusError) -> Problem:
    """An error as the problem of a file; removes the path from the message, because a problem has the file's name."""
    return Problem(file, error.problem.removeprefix(store.where(file)).lstrip(" ,:"), error.hint)


def hash_problem(file: str, found: str, expected: str) -> Problem:
    """The problem of a file whose bytes have changed."""
    return Problem(file, f"has SHA-256 {found}, expected {expected}")
