"""The page of corpora: counts, document lengths, token frequencies, some documents, and all shards."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.tables import ShardInfo
from tokshard.inspect.corpus.documents import DocumentView
from tokshard.inspect.corpus.report import CorpusReport
from tokshard.inspect.corpus.statistics import Lengths, TokenCounts, TokenStatistics
from tokshard.inspect.page.page import Section, cards, chart, lines, render_page, token_part, token_section
from tokshard.wording import bytes_text, counted

MAX_SHARDS = 20_000
"""Limit for the table of shards; a page with more rows is slow to open."""

EXCERPT_CHARACTERS = 1_600
"""How much of each document a page shows."""

_FREQUENT = 100
_RANKS = 300

Facts = Sequence[tuple[str, str]]
"""Labels and values; a value without a label continues the one before."""


def corpora_page(corpora: Sequence[tuple[CorpusReport, Facts]]) -> str:
    """The page of some corpora, whose tokens were counted, each with facts for people.

    Raises:
        UsageError: plotly is not installed.
    """
    reports = [report for report, _ in corpora]
    sections: list[Section] = _side_by_side(reports) if len(reports) > 1 else []
    for report, facts in corpora:
        sections += _corpus_sections(report, facts)
    names = list(map(_name, reports))
    return render_page(
        title=", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        subtitle=f"{counted(len(names), 'corpus', 'corpora')}, "
        + counted(sum(report.manifest.num_tokens for report in reports), "token"),
        sections=sections,
    )


def _name(report: CorpusReport) -> str:
    return Path(report.directory).name or report.directory


def _side_by_side(reports: Sequence[CorpusReport]) -> list[Section]:
    rows, traces = [], []
    for report in reports:
        manifest, percentiles = report.manifest, report.lengths.percentiles()
        per_token = round(manifest.text_bytes / manifest.num_tokens, 2)
        left_out = sum(manifest.records.left_out.values())
        numbers = [manifest.num_documents, manifest.num_tokens, per_token, percentiles[50], percentiles[99], left_out]
        rows.append([_name(report), *numbers, report.counted_tokens.used_share])
        starts, documents, _ = _half_powers(report.lengths)
        x, y = starts[: len(documents)], (documents / documents.sum()).tolist()
        traces.append(lines(shape="hv", name=_name(report), x=x, y=y, hovertemplate="%{y:.2%}"))
    titles = ("documents", "tokens", "bytes per token", "median length", "99 % are at most", "records left out")
    return [
        {"kind": "heading", "title": "Side by side"},
        {
            "kind": "table",
            "title": "Corpora",
            "columns": [
                {"name": "corpus"},
                *({"name": title, "number": True} for title in titles),
                {"name": "vocabulary in use", "percent": True, "number": True},
            ],
            "rows": rows,
        },
        chart(
            "Document lengths",
            "The share of each corpus's documents, in bins of half a power of two.",
            traces,
            {"title": "tokens per document", "type": "log", "dtick": 1},
            {"tickformat": ".0%", "rangemode": "tozero"},
            hovermode="x unified",
        ),
    ]


def _corpus_sections(report: CorpusReport, facts: Facts) -> list[Section]:
    tokens = report.counted_tokens
    return [
        {"kind": "heading", "title": _name(report)},
        _cards(report, tokens),
        {"kind": "facts", "title": "Contents and settings", "rows": [["directory", report.directory], *_joined(facts)]},
        _length_chart(report.lengths),
        _rank_chart(tokens.counts),
        _frequent_table(tokens),
        token_section(
            "Documents, token by token",
            "Hold the pointer over a token to see its id.",
            tokens.vocabulary.special_ids,
            map(_document, report.documents),
        ),
        _shard_table(report.shards),
    ]


def _joined(facts: Facts) -> list[list[str]]:
    rows: list[list[str]] = []
    for label, value in facts:
        if label:
            rows.append([label, value])
        else:
            rows[-1][1] += f"; {value}"
    return rows


def _cards(report: CorpusReport, tokens: TokenStatistics) -> Section:
    manifest, percentiles, counts = report.manifest, report.lengths.percentiles(), tokens.counts
    about = "" if report.lengths.is_exact else "about "
    sample = "" if counts.is_full else f", in a sample of {counts.num_tokens:,} tokens"
    items = [
        ("documents", f"{manifest.num_documents:,}", f"{sum(manifest.records.left_out.values()):,} records left out"),
        ("tokens", f"{manifest.num_tokens:,}", f"{manifest.dtype}, {bytes_text(manifest.num_bytes)} on disk"),
        ("bytes of text per token", f"{manifest.text_bytes / manifest.num_tokens:.2f}", "UTF-8"),
        ("median document", f"{about}{percentiles[50]:,}", f"tokens; 99 % are at most {about}{percentiles[99]:,}"),
        (
            "vocabulary in use",
            f"{tokens.used_share:.1%}",
            f"{counts.num_used:,} of {counts.vocab_size:,} ids{sample}",
        ),
    ]
    if tokens.unknown_share is not None:
        items.append(("unknown tokens", f"{tokens.unknown_share:.3%}", "text outside the vocabulary"))
    if tokens.byte_share is not None:
        items.append(("byte tokens", f"{tokens.byte_share:.2%}", "parts of characters"))
    return cards(items)


def _length_chart(lengths: Lengths) -> Section:
    """Two bars per half power of two: the shares of documents and of tokens."""
    starts, documents, tokens = _half_powers(lengths)
    # among short lengths, some half powers contain no whole number
    bins = [index for index in range(len(documents)) if starts[index] < starts[index + 1]]
    labels = [
        f"{starts[index]:,}" + (f"-{starts[index + 1] - 1:,}" if starts[index + 1] - starts[index] > 1 else "")
        for index in bins
    ]
    traces = [
        {
            "type": "bar",
            "name": name,
            "x": labels,
            "y": [float(values[index] / values.sum()) for index in bins],
            "hovertemplate": "%{y:.2%}",
        }
        for name, values in (("documents", documents), ("tokens", tokens))
    ]
    return chart(
        "Document lengths",
        "Tokens per document, delimiters included. A few long documents can hold most of the tokens."
        + ("" if lengths.is_exact else " Estimated from powers of two; --full reads every length."),
        traces,
        {"title": "tokens per document", "type": "category", "nticks": 12},
        {"tickformat": ".0%"},
        hovermode="x unified",
    )


def _half_powers(lengths: Lengths) -> tuple[list[int], NDArray[Any], NDArray[Any]]:
    """The first length of each half power of two, and of the one after the last; the documents and tokens in each."""
    bins = np.floor(2 * np.log2(lengths.lengths)).astype(np.int64)
    first, last = int(bins[0]), int(bins[-1])
    documents = np.bincount(bins - first, weights=lengths.counts, minlength=last - first + 1)
    tokens = np.bincount(bins - first, weights=lengths.counts * lengths.lengths, minlength=last - first + 1)
    return [int(np.ceil(2 ** (half / 2))) for half in range(first, last + 2)], documents, tokens


def _rank_chart(counts: TokenCounts) -> Section:
    ordered = -np.sort(-counts.counts)
    ranks = np.unique(np.geomspace(1, len(ordered), _RANKS).astype(np.int64))
    return chart(
        "Token frequencies by rank",
        "Counted over all tokens."
        if counts.is_full
        else f"Counted over a sample of {counts.num_tokens:,} tokens; --full counts all.",
        [
            lines(
                x=ranks.tolist(),
                y=(ordered[ranks - 1] / counts.num_tokens).tolist(),
                hovertemplate="rank %{x:,}: %{y:.3%}<extra></extra>",
            )
        ],
        {"title": "rank", "type": "log", "dtick": 1},
        {"title": "share of tokens", "type": "log", "tickformat": ".0e", "dtick": 1},
    )


def _frequent_table(tokens: TokenStatistics) -> Section:
    frequent = tokens.most_frequent(_FREQUENT)
    return {
        "kind": "table",
        "title": f"The {len(frequent)} most frequent tokens",
        "search": "Search tokens",
        "columns": [
            {"name": "id", "number": True},
            {"name": "token", "code": True, "token": True},
            {"name": "count", "number": True},
            {"name": "share", "bar": True, "percent": True},
        ],
        "rows": [[token.id, token.text, token.count, token.share] for token in frequent],
    }


def _document(view: DocumentView) -> tuple[str, Iterable[Section]]:
    shown = f", the first {sum(len(piece.ids) for piece in view.pieces):,} shown" if view.is_excerpt else ""
    title = f"document {view.document:,}: {counted(view.num_tokens, 'token')}{shown}"
    return f"{title}, record {view.record_number:,} of {view.source}", [token_part("", view.pieces)]


def _shard_table(shards: Sequence[ShardInfo]) -> Section:
    return {
        "kind": "table",
        "title": counted(len(shards), "shard"),
        "note": f"Only the first {MAX_SHARDS:,} are listed." if len(shards) > MAX_SHARDS else "",
        "search": "Search shards by name or hash",
        "columns": [
            {"name": "shard", "code": True},
            {"name": "documents", "number": True},
            {"name": "tokens", "number": True},
            {"name": "bytes", "number": True},
            {"name": "SHA-256", "code": True},
        ],
        "rows": [
            [shard.name, shard.num_documents, shard.num_tokens, shard.num_bytes, shard.sha256]
            for shard in shards[: min(len(shards), MAX_SHARDS)]
        ],
    }
