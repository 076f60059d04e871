"""What ``tokshard inspect`` reads of a corpus, as data; `text` turns it into text for a terminal."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from tokshard.format import names
from tokshard.format.corpus import Corpus
from tokshard.format.decode import load_decoder
from tokshard.format.manifest import IN_OTHER_SPLIT, Manifest
from tokshard.format.opening import open_corpus
from tokshard.format.tables import ShardInfo, SourceInfo
from tokshard.inspect.corpus.documents import DocumentView, source_label, spread, view_document, view_json
from tokshard.inspect.corpus.statistics import Lengths, corpus_lengths, count_tokens, token_summary
from tokshard.inspect.corpus.vocabulary import load_vocabulary
from tokshard.inspect.progress import OnProgress, no_progress

NUM_WORST_SOURCES = 10
"""Sources that a summary names because records of theirs were left out."""

_NUM_FREQUENT = 12
_OTHER_SPLIT = frozenset(IN_OTHER_SPLIT.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """A corpus and some of its documents.

    Args:
        tokens: see `token_summary`; None if tokens were not counted.
    """

    directory: str
    manifest: Manifest
    sources: Sequence[SourceInfo]
    documents: Sequence[DocumentView]
    lengths: Lengths
    shards: Sequence[ShardInfo]
    tokens: dict[str, Any] | None


def read_document(location: str | os.PathLike[str], index: int, *, with_boundaries: bool = False) -> DocumentView:
    """One whole document of a corpus, decoded.

    Raises:
        TokshardError: the corpus cannot be read, or has no such document.
    """
    with open_corpus(location) as corpus:
        sources, decode = corpus.sources(), load_decoder(corpus)
        return view_document(corpus, sources, decode, index, as_excerpt=False, with_boundaries=with_boundaries)


def read_report(
    location: str | os.PathLike[str],
    *,
    num_samples: int,
    is_full: bool = False,
    with_tokens: bool = False,
    with_boundaries: bool = False,
    on_progress: OnProgress = no_progress,
) -> CorpusReport:
    """Read a corpus, and the start of some evenly spaced documents: the same ones every time.

    Args:
        is_full: read all lengths and count all tokens, however many there are.
        with_tokens: count tokens; a sample of them unless `is_full`.
        with_boundaries: split the documents into tokens.
        on_progress: receives counted tokens.

    Raises:
        TokshardError: the corpus cannot be read.
    """
    with open_corpus(location) as corpus:
        tokens = None
        if with_tokens:
            counts = count_tokens(corpus, is_full=is_full, on_progress=on_progress)
            tokens = token_summary(counts, load_vocabulary(corpus), num_frequent=_NUM_FREQUENT)
        return CorpusReport(
            directory=str(corpus.directory),
            manifest=corpus.manifest,
            sources=corpus.sources(),
            documents=_excerpts(corpus, num_samples, with_boundaries=with_boundaries) if num_samples else [],
            lengths=corpus_lengths(corpus, is_full=is_full),
            shards=corpus.shards,
            tokens=tokens,
        )


def _excerpts(corpus: Corpus, count: int, *, with_boundaries: bool) -> list[DocumentView]:
    sources, decode = corpus.sources(), load_decoder(corpus)
    return [
        view_document(corpus, sources, decode, index, as_excerpt=True, with_boundaries=with_boundaries)
        for index in spread(count, corpus.num_documents)
    ]


def report_json(report: CorpusReport) -> dict[str, Any]:
    """A report as plain values."""
    summary = summary_json(report.manifest, report.sources)
    summary["tokens_per_document"] |= {
        "percentiles": {str(percent): length for percent, length in report.lengths.percentiles().items()},
        "percentiles_are_exact": report.lengths.is_exact,
    }
    return {
        "corpus": report.directory,
        **summary,
        "token_statistics": report.tokens,
        "samples": [view_json(view) for view in report.documents],
    }


def summary_json(manifest: Manifest, sources: Sequence[SourceInfo] = ()) -> dict[str, Any]:
    """A corpus as plain values, from its manifest and source table alone."""
    lengths = manifest.document_lengths
    rejects = manifest.files.get(names.REJECTS)
    return {
        "documents": manifest.num_documents,
        "tokens": manifest.num_tokens,
        "tokens_per_document": {
            "mean": manifest.num_tokens / manifest.num_documents,
            "shortest": lengths.shortest,
            "longest": lengths.longest,
            "powers_of_two": lengths.counts,
        },
        "text_bytes": manifest.text_bytes,
        "text_bytes_per_token": manifest.text_bytes / manifest.num_tokens,
        "dtype": manifest.dtype,
        "columns": manifest.columns,
        "shards": manifest.num_shards,
        "bytes": manifest.num_bytes,
        "tokenizer": msgspec.to_builtins(manifest.tokenizer),
        "build": msgspec.to_builtins(manifest.build),
        "sources": {
            "arguments": manifest.arguments,
            "count": len(sources),
            "bytes": sum(source.num_bytes for source in sources),
            "most_left_out": [
                {
                    "source": source_label(manifest, source),
                    "records_read": source.records_read,
                    "left_out": dict(source.left_out),
                }
                for source in most_left_out(sources)[:NUM_WORST_SOURCES]
            ],
        },
        "records": msgspec.to_builtins(manifest.records),
        "rejects": None if rejects is None else {"file": names.REJECTS, "bytes": rejects.num_bytes},
        "fingerprints": msgspec.to_builtins(manifest.fingerprints),
    }


def most_left_out(sources: Sequence[SourceInfo]) -> list[SourceInfo]:
    """The sources of which records were left out, in descending order; ties in input order."""
    counts = [(sum(split_left_out(source.left_out)[1].values()), source) for source in sources if source.left_out]
    return [source for count, source in sorted(counts, key=lambda pair: -pair[0]) if count]


def split_left_out(left_out: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Reasons with their counts: records that went to the other corpus of a split, and those that are in neither."""
    elsewhere = {reason: count for reason, count in left_out.items() if reason in _OTHER_SPLIT}
    return elsewhere, {reason: count for reason, count in left_out.items() if reason not in _OTHER_SPLIT}
