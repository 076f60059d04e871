"""The page of corpora: counts, document lengths, token frequencies, some documents, and all shards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.format.corpus import Corpus
from tokshard.format.decode import load_decoder
from tokshard.inspect.corpus.documents import origin_of, spread, token_pieces
from tokshard.inspect.corpus.statistics import Lengths, TokenCounts, token_summary
from tokshard.inspect.corpus.text import summary_lines
from tokshard.inspect.corpus.vocabulary import Vocabulary
from tokshard.inspect.page.page import Section, cards, chart, lines, render_page
from tokshard.wording import bytes_text, counted

MAX_SHARDS = 20_000
"""Limit for the table of shards; a page with more rows is slow to open."""

SAMPLE_TOKENS = 400
_FREQUENT = 100
_RANKS = 300


def corpora_page(corpora: Sequence[tuple[Corpus, Lengths, TokenCounts, Vocabulary]], *, num_samples: int) -> str:
    """The page.

    Args:
        num_samples: number of documents of each corpus to show token by token.

    Raises:
        UsageError: plotly is not installed.
        CorpusError: a corpus cannot be read.
    """
    sections: list[Section] = _side_by_side(corpora) if len(corpora) > 1 else []
    for corpus, lengths, counts, vocabulary in corpora:
        sections += _corpus_sections(corpus, lengths, counts, vocabulary, num_samples=num_samples)
    names = [corpus.directory.name or str(corpus.directory) for corpus, *_ in corpora]
    tokens = sum(corpus.num_tokens for corpus, *_ in corpora)
    return render_page(
        title=", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else ""),
        subtitle=f"{counted(len(names), 'corpus', 'corpora')}, {counted(tokens, 'token')}",
        sections=sections,
    )


def _side_by_side(corpora: Sequence[tuple[Corpus, Lengths, TokenCounts, Vocabulary]]) -> list[Section]:
    rows, traces = [], []
    for corpus, lengths, counts, _ in corpora:
        name, manifest, percentiles = corpus.directory.name, corpus.manifest, lengths.percentiles()
        per_token = round(manifest.text_bytes / manifest.num_tokens, 2)
        left_out = sum(manifest.records.left_out.values())
        numbers = [manifest.num_documents, manifest.num_tokens, per_token, percentiles[50], percentiles[99], left_out]
        rows.append([name, *numbers, counts.num_used / counts.vocab_size])
        starts, documents, _tokens = _half_powers(lengths)
        x, y = starts[: len(documents)], (documents / documents.sum()).tolist()
        traces.append(lines(shape="hv", name=name, x=x, y=y, hovertemplate="%{y:.2%}"))
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
            "Share of the documents of each corpus, by half powers of two of their tokens.",
            traces,
            {"title": "tokens of the document", "type": "log", "dtick": 1},
            {"tickformat": ".0%", "rangemode": "tozero"},
            hovermode="x unified",
        ),
    ]


def _corpus_sections(
    corpus: Corpus, lengths: Lengths, counts: TokenCounts, vocabulary: Vocabulary, *, num_samples: int
) -> list[Section]:
    summary = token_summary(counts, vocabulary, num_frequent=_FREQUENT)
    return [
        {"kind": "heading", "title": corpus.directory.name or str(corpus.directory)},
        _cards(corpus, lengths, summary),
        {
            "kind": "facts",
            "title": "What it is and how it was built",
            "rows": [["directory", str(corpus.directory)], *map(list, _facts(corpus))],
        },
        _length_chart(lengths),
        _rank_chart(counts),
        _frequent_table(summary),
        _samples(corpus, vocabulary, num_samples),
        _shard_table(corpus),
    ]


def _facts(corpus: Corpus) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    for label, value in summary_lines(corpus.manifest, corpus.sources(), width=400):
        if label or not lines:
            lines.append((label, value))
        else:
            lines[-1] = (lines[-1][0], f"{lines[-1][1]}; {value}")
    return lines


def _cards(corpus: Corpus, lengths: Lengths, summary: dict[str, Any]) -> Section:
    manifest, percentiles = corpus.manifest, lengths.percentiles()
    about = "" if lengths.is_exact else "about "
    left_out = sum(manifest.records.left_out.values())
    items = [
        ("documents", f"{manifest.num_documents:,}", f"{left_out:,} records left out"),
        ("tokens", f"{manifest.num_tokens:,}", f"{manifest.dtype}, {bytes_text(manifest.num_bytes)} on disk"),
        ("bytes of text per token", f"{manifest.text_bytes / manifest.num_tokens:.2f}", "UTF-8"),
        ("median document", f"{about}{percentiles[50]:,}", f"tokens; 99 % are at most {about}{percentiles[99]:,}"),
        (
            "vocabulary in use",
            f"{summary['used'] / summary['vocab_size']:.1%}",
            f"{summary['used']:,} of {summary['vocab_size']:,} ids"
            + ("" if summary["is_full"] else f", in {summary['counted']:,} tokens"),
        ),
    ]
    if summary["unknown_share"] is not None:
        items.append(("unknown tokens", f"{summary['unknown_share']:.3%}", "text outside of the vocabulary"))
    if summary["byte_share"] is not None:
        items.append(("byte tokens", f"{summary['byte_share']:.2%}", "parts of characters"))
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
        "Tokens of a document, delimiters included. Long documents are few and hold many of the tokens."
        + ("" if lengths.is_exact else " Taken from powers of two: --full reads every length."),
        traces,
        {"title": "tokens of the document", "type": "category", "nticks": 12},
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
        f"From {counts.num_tokens:,} tokens"
        + (", all of them." if counts.is_full else ", a sample: --full counts all."),
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


def _frequent_table(summary: dict[str, Any]) -> Section:
    return {
        "kind": "table",
        "title": f"The {len(summary['most_frequent'])} most frequent tokens",
        "search": "Search tokens",
        "columns": [
            {"name": "id", "number": True},
            {"name": "token", "code": True, "token": True},
            {"name": "count", "number": True},
            {"name": "share", "bar": True, "percent": True},
        ],
        "rows": [[entry["id"], entry["text"], entry["count"], entry["share"]] for entry in summary["most_frequent"]],
    }


def _samples(corpus: Corpus, vocabulary: Vocabulary, num_samples: int) -> Section:
    decode, sources = load_decoder(corpus), corpus.sources()
    items = []
    for index in spread(num_samples, corpus.num_documents):
        tokens, origin = corpus.document(index), origin_of(corpus, sources, index)
        pieces = [[piece.text, *piece.ids] for piece in token_pieces(tokens[:SAMPLE_TOKENS], decode)]
        shown = f", the first {SAMPLE_TOKENS} shown" if len(tokens) > SAMPLE_TOKENS else ""
        record = f"record {origin.record_number:,} of {origin.source}"
        items.append(
            {
                "title": f"document {index:,}: {counted(len(tokens), 'token')}{shown}, {record}",
                "parts": [{"pieces": pieces}],
            }
        )
    return {
        "kind": "tokens",
        "title": "Documents with token boundaries",
        "note": "Hold the pointer over a token for its id.",
        "specials": sorted(vocabulary.special_ids),
        "items": items,
    }


def _shard_table(corpus: Corpus) -> Section:
    count = len(corpus.shards)
    shards = corpus.shards[: min(count, MAX_SHARDS)]
    return {
        "kind": "table",
        "title": f"{count:,} {'shard' if count == 1 else 'shards'}",
        "note": f"The first {MAX_SHARDS:,} of them." if count > MAX_SHARDS else "",
        "search": "Search shards by name or hash",
        "columns": [
            {"name": "shard", "code": True},
            {"name": "documents", "number": True},
            {"name": "tokens", "number": True},
            {"name": "bytes", "number": True},
            {"name": "SHA-256", "code": True},
        ],
        "rows": [
            [shard.name, shard.num_documents, shard.num_tokens, shard.num_bytes, shard.sha256] for shard in shards
        ],
    }
