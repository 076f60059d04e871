"""Checks of one shard: its structure from its offsets, then its content in one pass over the file."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import RESTORE, CorpusError, DamagedCorpusError
from tokshard.format import names
from tokshard.format.content import TokenHash, hash_tokens
from tokshard.format.corpus import Corpus
from tokshard.format.schema import ORDINAL_STRIDE
from tokshard.format.shard import Shard
from tokshard.format.shard_table import Runs
from tokshard.format.stride_hashes import StrideHasher
from tokshard.format.tables import BatchPlace, ShardInfo
from tokshard.inspect.verify.safe_read import ByteCounter, SparseImage, UnreadableError, hash_chunks, opened
from tokshard.store import Store

_MESSAGE_BYTES = 65_536
_COLUMN_BYTES = 128
"""Upper limits for the description of a record batch, which precedes its first buffer: it takes some hundred bytes, and
at most 64 per column (for text)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One problem of a corpus.

    Args:
        file: name in the corpus directory.
        message: continues the name; has the value found and the one expected.
    """

    file: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceRuns:
    """Runs of documents from consecutive records of one source: int64 [runs] each, in the order of the documents.

    Args:
        source: index of the source.
        record: number of the first record.
        documents, tokens: length of the run.
    """

    source: NDArray[np.int64]
    record: NDArray[np.int64]
    documents: NDArray[np.int64]
    tokens: NDArray[np.int64]


@dataclass(slots=True, kw_only=True)
class ShardFindings:
    """The problems of a shard, and what its documents add up to, as far as they could be read.

    Args:
        lengths: int64 [documents]; None if the structure is damaged.
        runs: None if the runs are damaged.
    """

    problems: list[Problem] = field(default_factory=list)
    lengths: NDArray[np.int64] | None = None
    runs: SourceRuns | None = None


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
    info = corpus.shards[index]
    found = ShardFindings()
    structure = _Structure(corpus, index, found)
    try:
        with opened(corpus.store, info.name, info.num_bytes) as file:
            # a full check reads these bytes again and counts them then
            image = SparseImage(file, info.num_bytes, counter.read if is_quick else lambda _: None)
            structure.read(image, with_columns=not is_quick)
            if is_quick:
                counter.settle(info.num_bytes)
            else:
                tokens = _TokenCheck(corpus, structure, first_document=int(corpus.shards.first_documents[index]))
                digest = hash_chunks(file, info.num_bytes, counter, tokens.look)
                if digest != info.sha256:
                    found.problems.insert(0, hash_problem(info.name, digest, info.sha256))
                elif found.lengths is not None:
                    if tokens.content != info.tokens_hash:
                        message = f"gives {info.name} another hash of its tokens than the shard has"
                        found.problems.append(Problem(file=names.SHARD_TABLE, message=message))
                    if has_hashes:
                        found.problems += _stride_faults(corpus, index, tokens.strides.finish())
                found.problems += (Problem(file=info.name, message=message) for message in tokens.messages())
    except UnreadableError as error:
        # the content of a missing or truncated file adds no information
        return ShardFindings(problems=[Problem(file=info.name, message=str(error))])
    structure.check_table()
    return found


def _stride_faults(corpus: Corpus, index: int, found: NDArray[np.uint32]) -> Iterator[Problem]:
    """Where the stride hashes of a shard are not those of its tokens."""
    try:
        stored = corpus.stride_hashes(index)
    except CorpusError as error:
        yield problem_of(corpus.store, names.STRIDE_HASHES, error)
        return
    wrong = np.flatnonzero(stored != found)
    if len(wrong):
        first = int(wrong[0])
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        message = (
            f"gives stride {first} of {corpus.shards[index].name} the CRC-32 {stored[first]:08x}, "
            f"its tokens have {found[first]:08x}{more}"
        )
        yield Problem(file=names.STRIDE_HASHES, message=message)


class _Structure:
    """Where the documents of a shard are, according to its offsets."""

    def __init__(self, corpus: Corpus, index: int, found: ShardFindings) -> None:
        self._corpus = corpus
        self._index = index
        self._info: ShardInfo = corpus.shards[index]
        self._found = found
        self._strides: NDArray[np.int64] | None = None
        self._runs: Runs | None = None
        self.starts = np.zeros(1, np.int64)
        """int64 [documents + 1]: token positions in the shard where documents start, of the intact batches."""
        self.batches: list[tuple[BatchPlace, int]] = []
        """The intact batches, each with the index of its first document."""

    def read(self, image: SparseImage, *, with_columns: bool) -> None:
        """Read the offsets of every record batch and, if requested, the kept columns."""
        corpus = self._corpus
        try:
            places = corpus.shards.batch_places(self._index)
            self._strides, self._runs = corpus.shards.stride_documents(self._index), corpus.shards.runs(self._index)
        except CorpusError as error:
            self._found.problems.append(problem_of(corpus.store, names.SHARD_TABLE, error))
            return
        try:
            self._read_batches(image, places, with_columns=with_columns and bool(corpus.manifest.columns))
        except CorpusError as error:
            self._found.problems.append(problem_of(corpus.store, self._info.name, error))

    def _read_batches(self, image: SparseImage, places: list[BatchPlace], *, with_columns: bool) -> None:
        path = self._corpus.store.where(self._info.name)
        message_bytes = _MESSAGE_BYTES + _COLUMN_BYTES * len(self._corpus.manifest.columns)
        image.load_footer()
        image.load(0, message_bytes)
        shard = Shard(self._corpus.store, self._info, places, self._corpus.shard_schema, content=image.buffer)
        starts = np.zeros(self._info.num_documents + 1, np.int64)
        row = token = end = 0
        for index, place in enumerate(places):
            begin = end
            end = place.values_position + place.num_tokens * self._corpus.dtype.itemsize
            image.load(
                max(begin, place.offsets_position - message_bytes),
                place.offsets_position + 8 * (place.num_documents + 1),
            )
            if with_columns:
                after = places[index + 1].offsets_position if index + 1 < len(places) else self._info.num_bytes
                image.load(end, after)
            offsets, _ = shard.batch(index)
            if place.values_position % 8:
                raise DamagedCorpusError(f"{path}, batch {index}: tokens at byte {place.values_position}", hint=RESTORE)
            if with_columns:
                shard.columns(index)
            starts[row + 1 : row + len(offsets)] = offsets[1:] + token
            self.batches.append((place, row))
            row, token = row + len(offsets) - 1, token + int(offsets[-1])
            self.starts = starts[: row + 1]
            if index + 1 < len(places):
                image.unload(begin, places[index + 1].offsets_position - message_bytes)
        self._found.lengths = np.diff(starts)

    def check_table(self) -> None:
        """Check the documents and sources in the shard table."""
        found, info = self._found, self._info
        if found.lengths is None or self._strides is None or self._runs is None:
            return
        expected = np.searchsorted(self.starts, np.arange(0, info.num_tokens, ORDINAL_STRIDE), "right") - 1
        if not np.array_equal(self._strides, expected):
            wrong = int(np.argmax(self._strides != expected))
            found.problems.append(
                Problem(
                    file=names.SHARD_TABLE,
                    message=f"says that token {wrong * ORDINAL_STRIDE} of {info.name} is in its document "
                    f"{self._strides[wrong]}, expected {expected[wrong]}",
                )
            )
        documents = self._runs.document
        bounds = np.append(documents, info.num_documents)
        if documents[:1].tolist() != [0] or not bool(np.all(bounds[1:] > bounds[:-1])):
            message = f"has runs of {info.name} that do not ascend from document 0 to {info.num_documents}"
            found.problems.append(Problem(file=names.SHARD_TABLE, message=message))
            return
        found.runs = SourceRuns(
            source=self._runs.source,
            record=self._runs.record,
            documents=np.diff(bounds),
            tokens=self.starts[bounds[1:]] - self.starts[bounds[:-1]],
        )


class _TokenCheck:
    """Checks the ids of a shard chunk by chunk: delimiters in the right places, and no id outside the vocabulary."""

    def __init__(self, corpus: Corpus, structure: _Structure, *, first_document: int) -> None:
        self._corpus = corpus
        self._first_document = first_document
        self._starts = structure.starts
        self._batches = structure.batches
        self._item = corpus.dtype.itemsize
        self._can_exceed = corpus.vocab_size <= np.iinfo(corpus.dtype).max
        self._batch = 0
        self._first_token = 0  # position of the batch in the shard
        self.content = TokenHash()
        self.strides = StrideHasher()
        self._faults: dict[str, list[int]] = {}
        """Kind of fault to its first document in the corpus, the batch of that, and the number of faults."""

    def look(self, position: int, chunk: memoryview) -> None:
        """Check the next bytes of the file."""
        stop = position + len(chunk)
        while self._batch < len(self._batches):
            place, _ = self._batches[self._batch]
            begin, end = place.values_position, place.values_position + place.num_tokens * self._item
            low, high = max(position, begin), min(stop, end)
            if low < high:
                tokens: NDArray[Any] = np.frombuffer(
                    chunk, self._corpus.dtype, count=(high - low) // self._item, offset=low - position
                )
                self._check(tokens, self._first_token + (low - begin) // self._item)
            if end > stop:
                return
            self._first_token += place.num_tokens
            self._batch += 1

    def _check(self, tokens: NDArray[Any], first: int) -> None:
        eos_id, bos_id = self._corpus.eos_id, self._corpus.bos_id
        self.content = self.content.then(hash_tokens(tokens))
        self.strides.add(tokens)
        begin, end = np.searchsorted(self._starts, [first, first + len(tokens)])
        starts = self._starts[begin:end] - first
        begin, end = np.searchsorted(self._starts[1:], [first + 1, first + len(tokens) + 1])
        lasts = self._starts[1:][begin:end] - 1 - first
        if self._can_exceed and int(tokens.max()) >= self._corpus.vocab_size:
            beyond = np.flatnonzero(tokens >= self._corpus.vocab_size)
            size = self._corpus.vocab_size
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
        if not len(places):
            return
        if fault in self._faults:
            self._faults[fault][2] += len(places)
            return
        document = int(np.searchsorted(self._starts, int(places[0]), "right")) - 1
        self._faults[fault] = [self._first_document + document, self._batch, len(places)]

    def messages(self) -> Iterator[str]:
        """A message per kind of fault: the first place, and how many more there are."""
        for fault, (document, batch, count) in sorted(self._faults.items(), key=lambda item: item[1][0]):
            more = f", and {count - 1} more" if count > 1 else ""
            yield f"batch {batch}, document {document} of the corpus{fault}{more}"


def problem_of(store: Store, file: str, error: CorpusError) -> Problem:
    """An error as the problem of a file; removes the path from the message, because a problem has the file's name."""
    message = error.problem.removeprefix(store.where(file)).lstrip(" ,:")
    return Problem(file=file, message=message)


def hash_problem(file: str, found: str, expected: str) -> Problem:
    """The problem of a file whose bytes have changed."""
    return Problem(file=file, message=f"has SHA-256 {found}, expected {expected}")
