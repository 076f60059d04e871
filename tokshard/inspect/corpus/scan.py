"""``tokshard scan``: the documents that share n-grams of tokens with items of benchmarks, or that are on a list."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import wait
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID, read_document_list, rows_not_found
from tokshard.format.opening import open_corpus
from tokshard.format.row_files import read_rows
from tokshard.format.whole_corpus import checked_batches
from tokshard.inspect.corpus.ngrams import Grams, grams_of
from tokshard.inspect.progress import OnProgress, no_progress

Encode = Callable[[str], NDArray[np.uint32]]
"""Ids of a text, without delimiters."""

_START_METHOD = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
_TASKS_PER_WORKER = 2
_SHOWN_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A text of a benchmark, or several that belong together.

    Args:
        benchmark: index of its file.
        row: its row there, from 1.
        id: its field of this name; None if it has none.
    """

    benchmark: int
    row: int
    id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Benchmarks:
    """The items of some files, and their n-grams.

    Args:
        files: as they were given.
        items: of all files, in order.
    """

    files: tuple[str, ...]
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
    files: Sequence[str], corpus: Corpus, encode: Encode, *, fields: Sequence[str], n: int
) -> Benchmarks:
    """Read and encode the items of benchmarks.

    Args:
        files: JSON lines, csv, tsv, parquet, or texts with an item in each line.
        corpus: whose delimiters n-grams may not have.
        encode: encodes a text as the build did.
        fields: dotted paths of the texts of an item: each a string, or a list of strings.

    Raises:
        UsageError: a file cannot be read, or an item has none of the fields.
    """
    items, texts = list[Item](), list[tuple[int, NDArray[np.uint32]]]()
    for benchmark, file in enumerate(files):
        hint = "give JSON lines, csv or parquet, and the fields of its texts with --text-field"
        row = 0
        for row, found in enumerate(read_rows(file, of_line=fields[0], hint=hint), 1):
            own = [text for field in fields for text in _texts_of(found, field)]
            if not own:
                known = ", ".join(map(str, found)) or "none"
                raise UsageError(
                    f"row {row} of {file} has no text in {' or '.join(fields)}", hint=f"--text-field; fields: {known}"
                )
            texts += ((len(items), encode(text)) for text in own)
            items.append(Item(benchmark=benchmark, row=row, id=None if found.get(ID) is None else str(found[ID])))
        if not row:
            raise UsageError(f"{file} has no items", hint=hint)
    delimiters = [corpus.eos_id] if corpus.bos_id is None else [corpus.eos_id, corpus.bos_id]
    return Benchmarks(files=tuple(files), items=items, grams=grams_of(texts, n, delimiters=delimiters))


def _texts_of(row: Mapping[str, Any], field: str) -> list[str]:
    found: Any = row
    for name in [field] if field in row else field.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    values = found if isinstance(found, list) else [found]
    return [value for value in values if isinstance(value, str)]


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
        with _scans(location, corpus, grams, workers) as scans:
            for index, found in enumerate(scans):
                yield from found
                done += corpus.shards[index].num_tokens
                on_progress(done, corpus.num_tokens)


@contextlib.contextmanager
def _scans(location: str, corpus: Corpus, grams: Grams, workers: int) -> Iterator[Iterator[list[SharedItems]]]:
    """The n-grams that each shard shares with items, in order."""
    workers = min(workers, len(corpus.shards))
    if workers <= 1:
        yield (_scan_shard(corpus, index, grams) for index in range(len(corpus.shards)))
        return
    pool = ProcessPoolExecutor(
        workers, multiprocessing.get_context(_START_METHOD), _begin, (location, corpus.num_generations - 1, grams)
    )
    try:
        yield _in_order(pool, len(corpus.shards), workers * _TASKS_PER_WORKER)
    finally:
        pool.shutdown(cancel_futures=True)


def _in_order(pool: ProcessPoolExecutor, num_shards: int, most: int) -> Iterator[list[SharedItems]]:
    ahead: deque[Future[list[SharedItems]]] = deque()
    for index in range(num_shards):
        ahead.append(pool.submit(_scan, index))
        if len(ahead) == most:
            yield ahead.popleft().result()
    while ahead:
        yield ahead.popleft().result()


_here: list[tuple[Corpus, Grams]] = []
"""Of a worker: what it scans."""


def _begin(location: str, generation: int, grams: Grams) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process that started this one ends it
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here.append((open_corpus(location, generation=generation), grams))


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def _scan(index: int) -> list[SharedItems]:
    corpus, grams = _here[0]
    return _scan_shard(corpus, index, grams)


def _scan_shard(corpus: Corpus, index: int, grams: Grams) -> list[SharedItems]:
    found = []
    first = int(corpus.shards.first_documents[index])
    for shard, batch in checked_batches(corpus, index):
        offsets, tokens = shard.batch(batch)
        documents, items, num_grams = grams.shared(tokens, offsets[1:])
        starts = np.flatnonzero(np.diff(documents, prepend=-1))
        ids = shard.columns(batch).get(ID) if len(starts) else None
        for start, stop in pairwise([*starts.tolist(), len(documents)]):
            row = int(documents[start])
            own = None if ids is None else ids[row].as_py()
            found.append(
                SharedItems(
                    document=first + row,
                    id=None if own is None else str(own),
                    items=items[start:stop],
                    num_grams=num_grams[start:stop],
                )
            )
        first += len(offsets) - 1
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedDocuments:
    """The documents of a corpus that are on a list.

    Args:
        documents: int64 [n], ascending: their numbers.
        num_missing: rows of the list that name no document.
        missing: the first of them.
    """

    documents: NDArray[np.int64]
    num_missing: int
    missing: Sequence[str]


def find_listed(corpus: Corpus, file: str, on_progress: OnProgress = no_progress) -> ListedDocuments:
    """Find the documents on a list, by number or id. Reads no token; reads all ids if the list has ids.

    Args:
        on_progress: receives documents.

    Raises:
        UsageError: the file is not a list.
        CorpusError: the corpus cannot be read.
    """
    listed = read_document_list(file, [corpus])
    documents, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for index in range(len(corpus.shards)):
        first, stop = map(int, corpus.shards.first_documents[index : index + 2])
        shard = corpus.shard(index) if len(listed.ids) else None
        for batch in range(1 if shard is None else shard.num_batches):
            count = stop - first if shard is None else len(shard.batch(batch)[0]) - 1
            numbers = np.arange(first, first + count)
            is_listed, of_rows = listed.find(0, numbers, None if shard is None else shard.columns(batch).get(ID))
            documents.append(numbers[is_listed])
            rows.append(of_rows)
            first += count
        corpus.close()
        on_progress(stop, corpus.num_documents)
    num_missing, missing = rows_not_found(file, listed, np.concatenate(rows), most=_SHOWN_ROWS)
    return ListedDocuments(documents=np.concatenate(documents), num_missing=num_missing, missing=missing)
