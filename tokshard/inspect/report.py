"""What ``tokshard inspect`` shows of a corpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokshard.format.manifest import Manifest
from tokshard.format.reader import open_corpus
from tokshard.format.tables import SourceInfo
from tokshard.inspect.decode import load_decoder
from tokshard.inspect.documents import DocumentView, spread, view_document, view_json, view_text
from tokshard.inspect.histogram import length_histogram
from tokshard.inspect.summary import summary_json, summary_text
from tokshard.inspect.terminal import one_line


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """A corpus and some of its documents, read from disk."""

    directory: str
    manifest: Manifest
    sources: Sequence[SourceInfo]
    documents: Sequence[DocumentView]


def read_document(location: str | os.PathLike[str], index: int) -> DocumentView:
    """One whole document of a corpus, decoded.

    Raises:
        TokshardError: the corpus cannot be read, or has no such document.
    """
    with open_corpus(location) as corpus:
        return view_document(corpus, corpus.sources(), load_decoder(corpus), index, as_excerpt=False)


def read_report(location: str | os.PathLike[str], *, num_samples: int) -> CorpusReport:
    """A corpus, and the start of some documents: the same distance apart, so the same ones every time.

    Raises:
        TokshardError: the corpus cannot be read.
    """
    with open_corpus(location) as corpus:
        sources = corpus.sources()
        indices = spread(num_samples, corpus.num_documents)
        decode = load_decoder(corpus) if indices else None
        return CorpusReport(
            directory=str(corpus.directory),
            manifest=corpus.manifest,
            sources=sources,
            documents=[view_document(corpus, sources, decode, index, as_excerpt=True) for index in indices if decode],
        )


def report_text(report: CorpusReport, *, width: int, encoding: str) -> str:
    """A report as text.

    Args:
        width: characters in a line of the summary.
        encoding: of the output, see `length_histogram`.
    """
    parts = [
        f"{'corpus':<12}{one_line(report.directory)}\n" + summary_text(report.manifest, report.sources, width=width),
        length_histogram(report.manifest.document_lengths, width=width, encoding=encoding),
        *map(view_text, report.documents),
    ]
    return "\n\n".join(parts)


def report_json(report: CorpusReport) -> dict[str, Any]:
    """A report as plain values."""
    return {
        "corpus": report.directory,
        **summary_json(report.manifest, report.sources),
        "samples": [view_json(view) for view in report.documents],
    }
