"""What ``tokshard inspect`` shows of a corpus: the same data for a terminal, for JSON and for a page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any

from tokshard.format.corpus import Corpus
from tokshard.format.loss import has_weights, num_spans
from tokshard.format.manifest import IN_OTHER_SPLIT, Manifest
from tokshard.format.opening import open_corpus
from tokshard.format.tables import ShardInfo, SourceInfo
from tokshard.format.view import View
from tokshard.format.whole_corpus import check_not_empty, open_shard
from tokshard.inspect import OnProgress, no_progress
from tokshard.inspect.corpus.documents import (
    EXCERPT_CHARACTERS,
    DocumentView,
    document_numbers,
    source_label,
    spread,
    view_document,
)
from tokshard.inspect.corpus.statistics import Lengths, TokenCounts, corpus_lengths, count_tokens

NUM_WORST_SOURCES = 10
"""Sources that a summary names because records of theirs were left out."""

_OTHER_SPLIT = frozenset(IN_OTHER_SPLIT.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """A corpus and some of its documents.

    Args:
        num_spans: loss spans; None in a corpus without them.
    """

    directory: str
    manifest: Manifest
    sources: Sequence[SourceInfo]
    documents: Sequence[DocumentView]
    lengths: Lengths
    shards: Sequence[ShardInfo]
    tokens: TokenCounts
    num_spans: int | None = None

    def facts(self, *, all_shards: bool) -> dict[str, Any]:
        """The fields of the JSON.

        Args:
            all_shards: list every shard.
        """
        worst = most_left_out(self.sources)[:NUM_WORST_SOURCES]
        return {
            "corpus": self.directory,
            "manifest": self.manifest,
            "num_sources": len(self.sources),
            "source_bytes": sum(source.num_bytes for source in self.sources),
            "most_left_out": [
                {
                    "source": source_label(self.manifest, source),
                    "records_read": source.records_read,
                    "left_out": dict(source.left_out),
                }
                for source in worst
            ],
            "percentiles": self.lengths.percentiles(),
            "percentiles_are_exact": self.lengths.is_exact,
            "num_spans": self.num_spans,
            "tokens": self.tokens.facts(),
            "documents": self.documents,
            **({"shards": list(self.shards)} if all_shards else {}),
        }


def generations_text(manifest: Manifest) -> str:
    """The generations that are shown; empty if nothing was appended to the corpus."""
    if manifest.generation is None:
        return ""
    number = manifest.generation.number
    is_combined = any("/" in name for name in manifest.files)
    return f"0 to {number}" if is_combined else f"{number}, without those before it"


def read_documents(
    location: str | os.PathLike[str], key: str, *, with_boundaries: bool = False
) -> Sequence[DocumentView]:
    """The whole documents that a user names, see `document_numbers`.

    Raises:
        TokshardError: the corpus cannot be read, or has no such document.
    """
    with open_corpus(location) as corpus:
        sources, decode = corpus.sources(), corpus.decode
        found = document_numbers(corpus, key, corpus_name=corpus.location, prefix="--document ")
        return [view_document(corpus, sources, decode, one, with_boundaries=with_boundaries) for one in found]


def read_report(
    location: str | os.PathLike[str],
    *,
    num_samples: int,
    characters: int = EXCERPT_CHARACTERS,
    is_full: bool = False,
    with_boundaries: bool = False,
    on_progress: OnProgress = no_progress,
) -> CorpusReport:
    """Read a corpus, and the start of some evenly spaced documents: the same ones every time.

    Args:
        characters: length of these starts, see `view_document`.
        is_full: read all lengths and count all tokens, for any size; otherwise a sample of tokens is counted.
        with_boundaries: split the documents into tokens.
        on_progress: receives counted tokens.

    Raises:
        TokshardError: the corpus cannot be read.
    """
    with open_corpus(location) as corpus:
        check_not_empty(corpus)
        return CorpusReport(
            directory=corpus.location,
            manifest=corpus.manifest,
            sources=corpus.sources(),
            documents=_excerpts(corpus, num_samples, characters, with_boundaries=with_boundaries),
            lengths=corpus_lengths(corpus, is_full=is_full),
            shards=corpus.shards,
            tokens=count_tokens(corpus, is_full=is_full, on_progress=on_progress),
            num_spans=_num_spans(corpus) if corpus.has_spans else None,
        )


def _num_spans(corpus: Corpus) -> int:
    if isinstance(corpus, View):  # its shard table has the sizes of the base
        return sum(map(_spans_in_shard, repeat(corpus), range(len(corpus.shards))))
    is_weighted = has_weights(corpus.manifest.columns)
    places = (place for shard in range(len(corpus.shards)) for place in corpus.shards.batch_places(shard))
    return sum(num_spans(place.loss_bytes, place.num_documents, is_weighted=is_weighted) for place in places)


def _spans_in_shard(corpus: Corpus, index: int) -> int:
    with open_shard(corpus, index) as shard:
        return sum(len(shard.targets(batch).borders) // 2 for batch in range(shard.num_batches))


def _excerpts(corpus: Corpus, count: int, characters: int, *, with_boundaries: bool) -> list[DocumentView]:
    if not count:
        return []  # without documents, a corpus can be looked at without its tokenizer
    sources, decode = corpus.sources(), corpus.decode
    return [
        view_document(corpus, sources, decode, index, excerpt=characters, with_boundaries=with_boundaries)
        for index in spread(count, corpus.num_documents)
    ]


def most_left_out(sources: Sequence[SourceInfo]) -> list[SourceInfo]:
    """The sources of which records were left out, in descending order; ties in input order."""
    counts = [(sum(split_left_out(source.left_out)[1].values()), source) for source in sources if source.left_out]
    return [source for count, source in sorted(counts, key=lambda pair: -pair[0]) if count]


def split_left_out(left_out: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Reasons with their counts: records in the other corpus of a split, and records in neither corpus."""
    elsewhere = {reason: count for reason, count in left_out.items() if reason in _OTHER_SPLIT}
    return elsewhere, {reason: count for reason, count in left_out.items() if reason not in _OTHER_SPLIT}
