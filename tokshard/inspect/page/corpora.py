"""The page of corpora: facts, document lengths, token frequencies, some documents, and all shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tokshard.inspect.corpus.documents import COLUMN_CHARACTERS, DocumentView
from tokshard.inspect.corpus.places import short_names
from tokshard.inspect.corpus.report import CorpusReport
from tokshard.inspect.corpus.statistics import Lengths, TokenCounts
from tokshard.inspect.page.page import Facts, Section, chart, facts, heading, lines, render_page, table, token_section
from tokshard.wording import counted, shorten

MAX_SHARDS = 20_000
"""Limit for the table of shards; a page with more rows is slow to open."""

EXCERPT_CHARACTERS = 1_600
"""How much of each document a page shows."""

_FREQUENT = 100
_RANKS = 300


def corpora_page(
    reports: Sequence[CorpusReport], of_each: Sequence[Facts], side_by_side: Sequence[Mapping[str, str]]
) -> str:
    """The page of some corpora, whose tokens were counted.

    Args:
        of_each: facts for people about each of them.
        side_by_side: label to a short value, for each of them.

    Raises:
        UsageError: plotly is not installed.
    """
    names = short_names([report.directory for report in reports])
    sections: list[Section] = []
    if len(reports) > 1:
        columns: list[Section] = [{"name": "corpus"}, *({"name": name, "number": True} for name in names)]
        labels = dict.fromkeys(label for values in side_by_side for label in list(values)[1:])
        rows = [[label, *(values.get(label, "-") for values in side_by_side)] for label in labels]
        sections += [heading("Side by side"), table("Corpora", columns, rows)]
        of_all = [(name, one.lengths, one.lengths.counts) for name, one in zip(names, reports, strict=True)]
        sections.append(_length_chart("The share of each corpus's documents.", of_all))
    for name, report, known in zip(names, reports, of_each, strict=True):
        lengths, note = report.lengths, "A few long documents can hold most of the tokens."
        note += "" if lengths.is_exact else " Estimated from powers of two; --full reads every length."
        counts = ("documents", lengths, lengths.counts), ("tokens", lengths, lengths.counts * lengths.lengths)
        sections += [
            heading(name),
            facts("Contents and settings", [("directory", report.directory), *known]),
            _length_chart(note, counts),
            *_token_sections(report),
            _shard_table(report),
        ]
    num_tokens = sum(report.manifest.num_tokens for report in reports)
    return render_page(
        title=", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        subtitle=f"{counted(len(names), 'corpus', 'corpora')}, {counted(num_tokens, 'token')}",
        sections=sections,
    )


def _length_chart(note: str, series: Iterable[tuple[str, Lengths, NDArray[np.int64]]]) -> Section:
    """A line for each series: its share by name, per half power of two of the lengths."""
    traces = []
    for name, lengths, counts in series:
        bins = np.floor(2 * np.log2(lengths.lengths)).astype(np.int64)
        shares = np.bincount(bins - bins[0], weights=counts) / counts.sum()
        starts = np.ceil(2 ** (np.arange(bins[0], bins[-1] + 2) / 2)).astype(np.int64).tolist()
        traces.append(
            lines(shape="hv", name=name, x=starts, y=[*shares.tolist(), shares[-1]], hovertemplate="%{y:.2%}")
        )
    return chart(
        "Document lengths",
        f"{note} In bins of half a power of two, delimiters included.",
        traces,
        {"title": "tokens per document, on a log scale", "type": "log", "dtick": 1},
        {"title": "share", "tickformat": ".0%", "rangemode": "tozero"},
        hovermode="x unified",
    )


def _token_sections(report: CorpusReport) -> list[Section]:
    tokens = report.tokens
    frequent = [(token.id, token.text, token.count, token.share) for token in tokens.most_frequent(_FREQUENT)]
    columns: list[Section] = [
        {"name": "id", "number": True},
        {"name": "token", "code": True, "token": True},
        {"name": "count", "number": True},
        {"name": "share", "bar": True, "percent": True},
    ]
    return [
        _rank_chart(tokens),
        table(f"The {len(frequent)} most frequent tokens", columns, frequent, search="Search tokens"),
        token_section(
            "Documents, token by token",
            "Hold the pointer over a token to see its id."
            + (" Targets are underlined." if report.num_spans is not None else ""),
            tokens.vocabulary.special_ids,
            [(_title(view), [("", view.pieces)]) for view in report.documents],
        ),
    ]


def _rank_chart(counts: TokenCounts) -> Section:
    ordered = -np.sort(-counts.counts)
    ranks = np.unique(np.geomspace(1, len(ordered), _RANKS).astype(np.int64))
    shares = (ordered[ranks - 1] / counts.num_tokens).tolist()
    all_of = "all tokens." if counts.is_full else f"a sample of {counts.num_tokens:,} tokens; --full counts all."
    return chart(
        "Token frequencies by rank",
        f"Counted over {all_of}",
        [lines(x=ranks.tolist(), y=shares, hovertemplate="rank %{x:,}: %{y:.3%}<extra></extra>")],
        {"title": "rank, on a log scale", "type": "log", "dtick": 1},
        {"title": "share of tokens, on a log scale", "type": "log", "tickformat": ".0e", "dtick": 1},
    )


def _title(view: DocumentView) -> str:
    num_shown = sum(len(piece.ids) for piece in view.pieces)
    shown = f", the first {num_shown:,} shown" if view.is_excerpt and num_shown < view.num_tokens else ""
    title = f"document {view.document:,}: {counted(view.num_tokens, 'token')}{shown}"
    if view.loss_spans is not None:
        title += f", {sum(stop - start for start, stop in view.loss_spans):,} of them targets"
    known = {name: str(value) for name, value in view.metadata.items() if value is not None}
    kept = "".join(f", {name} {shorten(text, COLUMN_CHARACTERS)}" for name, text in known.items())
    return f"{title}, record {view.record_number:,} of {view.source}{kept}"


def _shard_table(report: CorpusReport) -> Section:
    count = len(report.shards)
    return table(
        counted(count, "shard"),
        [
            {"name": "shard", "code": True},
            *({"name": name, "number": True} for name in ("documents", "tokens", "bytes")),
            {"name": "SHA-256", "code": True},
        ],
        [
            (shard.name, shard.num_documents, shard.num_tokens, shard.num_bytes, shard.sha256)
            for shard in report.shards[: min(count, MAX_SHARDS)]
        ],
        search="Search shards by name or hash",
        note=f"Only the first {MAX_SHARDS:,} are listed." if count > MAX_SHARDS else "",
    )
