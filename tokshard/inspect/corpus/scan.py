"""``tokshard scan``: the documents that share n-grams of tokens with the items of benchmarks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID
from tokshard.format.opening import open_corpus
from tokshard.format.row_files import read_rows
from tokshard.format.whole_corpus import checked_batches
from tokshard.inspect.corpus.ngrams import Grams, grams_of
from tokshard.inspect.corpus.workers import in_order
from tokshard.inspect.progress import OnProgress, no_progress

Encode = Callable[[str], NDArray[np.uint32]]
"""Ids of a text, without delimiters."""


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
        UsageError: a file cannot be read, or an item has none of the fields.
    """
    items, texts = list[Item](), list[tuple[int, NDArray[np.uint32]]]()
    for benchmark, file in enumerate(files):
        hint = "give JSON lines, csv or parquet, and the fields of its texts with --text-field"
        row = 0
        for row, found in enumerate(read_rows(file, of_line=fields[0], hint=hint), 1):
            own = [text for field in fields for text in _texts_of(found, field)]
            own = own or [text for field in other_fields for text in _texts_of(found, field)]
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


def _texts_of(row: Mapping[str, Any], field: str) -> Iterator[str]:
    return _strings(row, [field] if field in row else field.split("."))


def _strings(value: Any, path: Sequence[str]) -> Iterator[str]:
    """The strings at a path and below it, through lists of any depth."""
    if isinstance(value, list):
        for item in value:
            yield from _strings(item, path)
    elif isinstance(value, Mapping):
        for item in value.values() if not path else filter(None, [value.get(path[0])]):
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
