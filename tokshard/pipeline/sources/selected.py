"""Decides which documents of a corpus a view has. Reads columns and bounds, and tokens only if their hashes count."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.forking import cached_property
from tokshard.format.conditions import Condition, are_met, check_type, columns_there, parse_conditions
from tokshard.format.corpus import Corpus
from tokshard.format.document_list import ID, read_document_list
from tokshard.format.loss import kept_columns
from tokshard.format.manifest import SelectConfig
from tokshard.format.opening import open_corpus
from tokshard.format.shard import Shard
from tokshard.format.whole_corpus import open_shard
from tokshard.pipeline.encode.documents import ChunkResult, Documents
from tokshard.pipeline.options import BuildOptions
from tokshard.pipeline.sources.corpora import reading, source_labels
from tokshard.pipeline.sources.joined import Joined, unchanged

NOT_SELECTED = "not selected"
"""Reason for a document of the base that does not meet the conditions of a view."""

DROPPED, NOT_KEPT = "in drop-ids", "not in keep-ids"
"""Reasons for a document that a list names, or does not."""

NO_ROW = "no row in: "
"""Prefix of a joined file, in the changes of documents that it does not name."""

_HASH_BYTES = 8


class Selection:
    """Reads the documents that a view has. The corpus is opened at the first read.

    Args:
        location, generation: the corpus, which may be a view, and its newest generation.
        selected: the conditions of the view.
        options: where the files are that it is made with.
    """

    def __init__(self, location: str, generation: int, selected: SelectConfig, options: BuildOptions) -> None:
        self._location, self._generation, self._selected, self._options = location, generation, selected, options

    @cached_property
    def _corpus(self) -> Corpus:
        return open_corpus(self._location, generation=self._generation)

    @cached_property
    def _rules(self) -> Rules:
        return Rules(self._corpus, self._selected, self._options)

    def read(self, index: int) -> Iterator[ChunkResult]:
        """The documents of one shard in order, a record batch at a time, without their tokens.

        Raises:
            DamagedCorpusError: the shard is missing, or differs from the manifest.
            BuildError: a list, or a file that is joined, has changed.
        """
        corpus, rules = self._corpus, self._rules
        with reading(corpus, index), open_shard(corpus, index) as shard:
            yield from self._documents(corpus, rules, index, shard)

    def _documents(self, corpus: Corpus, rules: Rules, index: int, shard: Shard) -> Iterator[ChunkResult]:
        stored, number = corpus.stored(index)
        first_document, first_token = (
            int(firsts[number]) for firsts in (stored.shards.first_documents, stored.shards.first_tokens)
        )
        runs, info = corpus.shards.runs(index), corpus.shards[index]
        # the sources of a generation are counted from 0
        base = corpus.provenance(int(corpus.shards.first_documents[index])).source - int(runs.source[0])
        done = 0
        for batch in range(shard.num_batches):
            rows, starts, stops = shard.bounds(batch)
            if not len(rows):
                continue
            places = np.arange(done, done + len(rows))
            done += len(rows)
            sources = runs.source[np.searchsorted(runs.document, places, "right") - 1] + base
            own = places + int(corpus.shards.first_documents[index])
            columns = shard.columns(batch) if rules.needs_columns else {}
            joined, changes = rules.joined(own, columns.get(ID))
            columns |= joined
            left_out, listed = rules.left_out(own, sources, columns, partial(shard.batch, batch))
            is_kept = np.ones(len(rows), np.bool_)
            for positions in left_out.values():
                is_kept[positions] = False
            lengths = stops - starts
            documents = Documents(
                tokens=np.empty(0, corpus.dtype),
                ends=np.cumsum(lengths),
                positions=np.arange(len(rows)),
                columns={name: columns[name] for name in self._selected.by},
                sources=sources,
                numbers=rows + first_document,
                starts=starts + first_token,
                num_targets=_num_targets(shard, batch, lengths) if corpus.has_spans else None,
            )
            yield ChunkResult(
                count=len(rows),
                input_bytes=info.num_bytes * int(lengths.sum()) // info.num_tokens,
                documents=documents.select(is_kept),
                left_out=left_out,
                changes=changes,
                sources=sources,
                listed=listed,
            )


def _num_targets(shard: Shard, batch: int, lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """The targets of each document of a record batch."""
    borders = shard.targets(batch).borders
    ends = np.cumsum(lengths)
    of_span = ends.searchsorted(borders[::2], "right")
    return np.bincount(of_span, borders[1::2] - borders[::2], len(lengths)).astype(np.int64)


class Rules:
    """The conditions of a view.

    Args:
        options: where the files are that it is made with.

    Attributes:
        needs_columns: whether columns of the corpus have to be read.

    Raises:
        UsageError: a condition names a missing column, or its value has the wrong type; a list or a file cannot be read
            or does not belong to the corpus.
        BuildError: a list or a file is not the one that the view began with.
    """

    def __init__(self, corpus: Corpus, selected: SelectConfig, options: BuildOptions) -> None:
        kept = kept_columns(corpus.manifest.columns)
        self._selected = selected
        files = zip(options.join, selected.join, strict=True)
        self._joins = [Joined(file, corpus, expected) for file, expected in files]
        columns = [kept, *(join.columns for join in self._joins)]
        self._where, self._of_joins = _named_columns(selected, options.join, columns)
        self._of_source = _sources_that_fit(corpus, selected.source)
        self._drop, self._keep = (
            None if file is None or expected is None else read_document_list(unchanged(file, expected), corpus)
            for file, expected in ((options.drop_ids, selected.drop_ids), (options.keep_ids, selected.keep_ids))
        )
        needs_ids = self._drop is not None or self._keep is not None or any(join.by_id for join in self._joins)
        self.needs_columns = bool(kept) and (needs_ids or bool(selected.where or selected.by))

    def joined(
        self, numbers: NDArray[np.int64], ids: pa.Array | None
    ) -> tuple[Mapping[str, pa.Array], Mapping[str, NDArray[np.int64]]]:
        """The joined columns of some documents; and for each file, by a name, the documents that it does not name."""
        found, unnamed = dict[str, pa.Array](), dict[str, NDArray[np.int64]]()
        for join, names in zip(self._joins, self._of_joins, strict=True):
            is_there, values = join.values(numbers, ids, names)
            found |= values
            unnamed[NO_ROW + join.file] = np.flatnonzero(~is_there)
        return found, unnamed

    def left_out(
        self,
        numbers: NDArray[np.int64],
        sources: NDArray[np.int64],
        columns: Mapping[str, pa.Array],
        read: Callable[[], tuple[NDArray[np.int64], NDArray[Any]]],
    ) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64] | None]:
        """Reason to the positions of the documents of a record batch that are left out; the rows of the list of drops.

        A document is left out for one reason.

        Args:
            numbers: int64 [documents]: the number of each in the corpus.
            read: gives the offsets and tokens of the record batch.
        """
        ids, left_out, listed = columns.get(ID), dict[str, NDArray[np.int64]](), None
        is_kept = np.ones(len(numbers), np.bool_)
        if self._drop is not None:
            is_dropped, listed = self._drop.find(numbers, ids)
            left_out[DROPPED], is_kept = np.flatnonzero(is_dropped), ~is_dropped
        if self._keep is not None:
            is_listed, _ = self._keep.find(numbers, ids)
            left_out[NOT_KEPT], is_kept = np.flatnonzero(is_kept & ~is_listed), is_kept & is_listed
        is_met = are_met(self._where, columns, len(numbers))
        if self._of_source is not None:
            is_met &= self._of_source[sources]
        if self._selected.hash_range is not None:
            low, high = self._selected.hash_range
            hashes = _document_hashes(*read())
            is_met &= (hashes >= low) & (hashes < high)
        left_out[NOT_SELECTED] = np.flatnonzero(is_kept & ~is_met)
        return {reason: found for reason, found in left_out.items() if len(found)}, listed


def _named_columns(
    selected: SelectConfig, files: Sequence[str], columns: Sequence[Mapping[str, str]]
) -> tuple[list[Condition], list[list[str]]]:
    """The conditions of a view, and the columns of each joined file that these or its cells name.

    Args:
        columns: of the corpus, and then of each file: name to type.

    Raises:
        UsageError: a column that is named is missing, in two places, or of no type that can be compared; or none of a
            file is named.
    """
    known = {name: kind for of_one in reversed(columns) for name, kind in of_one.items()}
    where = parse_conditions(selected.where, known)
    for name in selected.by:
        if name not in known:
            raise UsageError(f"no column {name!r} to divide by", hint=columns_there(known))
        check_type(name, known[name])
    named = list(dict.fromkeys([*(name for name, *_ in where), *selected.by]))
    of_files = [[name for name in named if name in of_one] for of_one in columns[1:]]
    for file, of_one, names in zip(files, columns[1:], of_files, strict=True):
        if not names:
            raise UsageError(
                f"no condition names a column of {file}",
                hint=f"give --where or --by with one of its columns ({', '.join(of_one) or 'none'}), or leave it out",
            )
        for name in names:
            if sum(name in each for each in columns) > 1:
                raise UsageError(
                    f"{file} has the column {name!r}, as the corpus or another file has", hint="rename one of them"
                )
    return where, of_files


def _sources_that_fit(corpus: Corpus, pattern: str | None) -> NDArray[np.bool_] | None:
    if pattern is None:
        return None
    labels = source_labels(corpus, corpus.sources())
    found = np.array([fnmatchcase(label, pattern) for label in labels])
    if not found.any():
        raise UsageError(f"no source is called {pattern}", hint=f"a source is called {labels[0]}; use * and ?")
    return found


def _document_hashes(offsets: NDArray[np.int64], tokens: NDArray[Any]) -> NDArray[np.float64]:
    """The hash of each document, from the little-endian uint32 of its tokens: float64 [documents] in [0, 1)."""
    content = np.ascontiguousarray(tokens, "<u4").data.cast("B") if len(tokens) else b""
    bounds = (4 * offsets).tolist()
    digests = b"".join(
        hashlib.blake2b(content[start:stop], digest_size=_HASH_BYTES).digest() for start, stop in pairwise(bounds)
    )
    return (np.frombuffer(digests, "<u8") >> 11) / float(1 << 53)
