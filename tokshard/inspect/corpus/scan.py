"""``tokshard scan``: the documents that share n-grams of tokens with the items of benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID
from tokshard.format.opening import open_corpus
from tokshard.format.row_files import read_rows
from tokshard.format.whole_corpus import checked_batches
from tokshard.inspect import OnProgress, no_progress
from tokshard.inspect.corpus.ngrams import Grams, grams_of
from tokshard.inspect.corpus.workers import in_order

Encode = Callable[[str], NDArray[np.uint32]]
"""Ids of a text, without delimiters."""


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """A text of a benchmark, or several that belong together.

    Args:
        benchmark: its file.
        row: its row there, from 1.
        id: its field of this name; None if it has none.
        documents: in how many it was found.
    """

    benchmark: str
    row: int
    id: str | None
    documents: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """The items of some files, and their n-grams.

    Args:
        files: as they were given, with the number of items in each.
        items: of all files, in order.
    """

    files: Sequence[tuple[str, int]]
    items: Sequence[Item]
    grams: Grams

    @property
    def is_scanned(self) -> NDArray[np.bool_]:
        """Which items have an n-gram: bool [items]."""
        return self.grams.num_of_item > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedItems:
    """A document that shares n-grams with items.

    Args:
        document: its number in its corpus, from 0.
        id: its id, if the corpus keeps ids.
        items: int64 [items]: indices of items, ascending.
        num_grams: int64 [items]: distinct n-grams that it shares with each.
    """

    document: int
    id: str | None
    items: NDArray[np.int64]
    num_grams: NDArray[np.int64]


def read_benchmarks(
    files: Sequence[str],
    corpus: Corpus,
    encode: Encode,
    *,
    fields: Sequence[str],
    other_fields: Sequence[str] = (),
    n: int,
) -> Benchmarks:
    """Read and encode the items of benchmarks.

    Args:
        files: JSON lines, csv, tsv, parquet, or texts with an item in each line.
        corpus: its delimiters are in no n-gram.
        encode: encodes a text as the build did.
        fields: dotted paths of the texts of an item; all strings at any depth below one count, as in messages.
        other_fields: the same, for items that have none of `fields`.

    Raises:
        UsageError: a file cannot be read, an item has none of the fields, or no item has one of them.
    """
    items, sizes, texts = list[Item](), list[int](), list[tuple[int, NDArray[np.uint32]]]()
    missing = set(fields)
    for file in files:
        hint = "give JSON lines, csv or parquet, and the fields of its texts with --text-field"
        row = 0
        for row, found in enumerate(read_rows(file, of_line=fields[0], hint=hint), 1):
            of_field = {field: list(_texts_of(found, field)) for field in fields}
            missing -= {field for field in fields if of_field[field]}
            own = [text for some in of_field.values() for text in some]
            if not any(own):  # an empty text is too short, as others are
                own += (text for field in other_fields for text in _texts_of(found, field))
            if not own:
                known = ", ".join(map(str, found)) or "none"
                raise UsageError(
                    f"row {row} of {file} has no text in {' or '.join(fields)}", hint=f"--text-field; fields: {known}"
                )
            texts += ((len(items), encode(text)) for text in own)
            items.append(Item(benchmark=file, row=row, id=None if found.get(ID) is None else str(found[ID])))
        if not row:
            raise UsageError(f"{file} has no items", hint=hint)
        sizes.append(row)
    if missing and not other_fields:
        names = " or ".join(sorted(missing))
        raise UsageError(f"no item has a text in {names}", hint="correct or leave out --text-field")
    delimiters = [corpus.eos_id] if corpus.bos_id is None else [corpus.eos_id, corpus.bos_id]
    grams = grams_of(texts, n, delimiters=delimiters)
    return Benchmarks(files=list(zip(files, sizes, strict=True)), items=items, grams=grams)


def _texts_of(row: Mapping[str, Any], field: str) -> Iterator[str]:
    return _strings(row, [field] if field in row else field.split("."))


def _strings(value: Any, path: Sequence[str]) -> Iterator[str]:
    """The strings at a path and below it, through lists of any depth."""
    if isinstance(value, list):
        for item in value:
            yield from _strings(item, path)
    elif isinstance(value, Mapping):
        for item in value.values() if not path else [value.get(path[0])]:
            yield from _strings(item, path[1:])
    elif isinstance(value, str) and not path:
        yield value


def scan_corpus(
    location: str, grams: Grams, on_progress: OnProgress = no_progress, *, workers: int = 1
) -> Iterator[SharedItems]:
    """The documents of a corpus that share n-grams with items, in order, for any number of workers.

    Tokens are checked against their hashes before any document of their shard is yielded. Costs a CPU-second
    for about 70M tokens. Each process holds the n-grams, and the results of at most two shards.

    Args:
        on_progress: receives tokens.
        workers: processes.

    Raises:
        CorpusError: the corpus cannot be read, or is damaged.
    """
    with open_corpus(location) as corpus:
        done = 0
        work = functools.partial(_scan_shard, grams=grams)
        with in_order(corpus, range(len(corpus.shards)), work, workers=workers) as scans:
            for index, found in enumerate(scans):
                yield from found
                done += corpus.shards[index].num_tokens
                on_progress(done, corpus.num_tokens)


def _scan_shard(corpus: Corpus, index: int, *, grams: Grams) -> list[SharedItems]:
    found = []
    first = int(corpus.shards.first_documents[index])
    for shard, batch in checked_batches(corpus, index):
        offsets, tokens = shard.batch(batch)
        shared = list(grams.shared(tokens, offsets[1:]))
        ids = shard.columns(batch).get(ID) if shared else None
        for row, items, num_grams in shared:
            own = None if ids is None else ids[row].as_py()
            found.append(
                SharedItems(
                    document=first + row, id=None if own is None else str(own), items=items, num_grams=num_grams
                )
            )
        first += len(offsets) - 1
    return found


class ScannedCorpus(msgspec.Struct, kw_only=True):
    """A corpus, and how many of its documents share n-grams with an item."""

    corpus: str
    tokens: int
    documents: int = 0


class ScannedBenchmark(msgspec.Struct, frozen=True, kw_only=True):
    """A file of items: how many it has, are too short to be scanned, and were found, in how many documents."""

    benchmark: str
    items: int
    not_scanned: int
    found: int
    documents: int


class ScanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a scan of some corpora; of the items only those that were found, in their order."""

    ngram: int
    corpora: Sequence[ScannedCorpus]
    benchmarks: Sequence[ScannedBenchmark]
    items: Sequence[Item]


class Tally:
    """Counts the documents found in all corpora, by benchmark and item."""

    def __init__(self, ngram: int) -> None:
        self.ngram = ngram
        self._corpora: list[ScannedCorpus] = []

    def begin(self, location: str, corpus: Corpus, benchmarks: Benchmarks) -> None:
        """Count a corpus from here on. All of them have the same items."""
        if not self._corpora:
            sizes = [size for _, size in benchmarks.files]
            self._documents_of_item = np.zeros(sum(sizes), np.int64)
            self._is_scanned = np.zeros(sum(sizes), np.bool_)
            self._file_of_item = np.repeat(np.arange(len(sizes)), sizes)
            self._documents_of_file = np.zeros(len(sizes), np.int64)
        self._benchmarks = benchmarks
        self._is_scanned |= benchmarks.is_scanned
        self._corpora.append(ScannedCorpus(corpus=location, tokens=corpus.num_tokens))

    def add(self, found: SharedItems) -> None:
        """Count a document."""
        self._corpora[-1].documents += 1
        self._documents_of_item[found.items] += 1
        self._documents_of_file[np.unique(self._file_of_item[found.items])] += 1

    def report(self) -> ScanReport:
        """All counts."""
        return ScanReport(
            ngram=self.ngram,
            corpora=self._corpora,
            benchmarks=[self._of_file(number) for number in range(len(self._benchmarks.files))],
            items=[
                replace(item, documents=count)
                for item, count in zip(self._benchmarks.items, self._documents_of_item.tolist(), strict=True)
                if count
            ],
        )

    def _of_file(self, number: int) -> ScannedBenchmark:
        mine, (file, size) = self._file_of_item == number, self._benchmarks.files[number]
        return ScannedBenchmark(
            benchmark=file,
            items=size,
            not_scanned=int((mine & ~self._is_scanned).sum()),
            found=int((mine & (self._documents_of_item > 0)).sum()),
            documents=int(self._documents_of_file[number]),
        )
