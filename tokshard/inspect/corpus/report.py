"""What ``tokshard inspect`` shows of a corpus."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokshard.format.corpus import Corpus
from tokshard.format.decode import load_decoder
from tokshard.format.manifest import Manifest
from tokshard.format.opening import open_corpus
from tokshard.format.tables import ShardInfo, SourceInfo
from tokshard.inspect.corpus.documents import DocumentView, spread, view_document, view_json, view_text
from tokshard.inspect.corpus.histogram import length_histogram
from tokshard.inspect.corpus.lengths import ALWAYS_READ, Lengths, OnProgress, estimated_lengths, read_lengths
from tokshard.inspect.corpus.summary import summary_json, summary_text
from tokshard.inspect.corpus.token_counts import count_tokens, token_summary
from tokshard.inspect.corpus.vocabulary import load_vocabulary
from tokshard.inspect.terminal import aligned, one_line
from tokshard.wording import bytes_text

_FREQUENT = 12
_FEW_SHARDS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusReport:
    """A corpus and some of its documents, read from disk.

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


def corpus_lengths(corpus: Corpus, *, is_full: bool, on_progress: OnProgress = lambda _done, _total: None) -> Lengths:
    """Exact lengths, or those of the manifest if there are more than `ALWAYS_READ` and nobody asked for all.

    Raises:
        DamagedCorpusError: a shard is missing or not what the manifest says.
    """
    if is_full or corpus.num_documents <= ALWAYS_READ:
        return read_lengths(corpus, on_progress)
    return estimated_lengths(corpus.manifest.document_lengths)


def read_report(
    location: str | os.PathLike[str],
    *,
    num_samples: int,
    is_full: bool = False,
    with_tokens: bool = False,
    with_boundaries: bool = False,
    on_progress: OnProgress = lambda _done, _total: None,
) -> CorpusReport:
    """A corpus, and the start of some documents: the same distance apart, so the same ones every time.

    Args:
        is_full: read all lengths and count all tokens, however many there are.
        with_tokens: count tokens; a sample of them unless `is_full`.
        with_boundaries: say where the tokens of the documents end.
        on_progress: is told the tokens that were counted.

    Raises:
        TokshardError: the corpus cannot be read.
    """
    with open_corpus(location) as corpus:
        sources = corpus.sources()
        indices = spread(num_samples, corpus.num_documents)
        tokens = None
        if with_tokens:
            counts = count_tokens(corpus, is_full=is_full, on_progress=on_progress)
            tokens = token_summary(counts, load_vocabulary(corpus), num_frequent=_FREQUENT)
        decode = load_decoder(corpus) if indices else None
        return CorpusReport(
            directory=str(corpus.directory),
            manifest=corpus.manifest,
            sources=sources,
            documents=[
                view_document(corpus, sources, decode, index, as_excerpt=True, with_boundaries=with_boundaries)
                for index in indices
                if decode
            ],
            lengths=corpus_lengths(corpus, is_full=is_full),
            shards=corpus.shards,
            tokens=tokens,
        )


def report_text(report: CorpusReport, *, width: int, encoding: str, all_shards: bool = False) -> str:
    """A report as text.

    Args:
        width: characters in a line of the summary.
        encoding: of the output, see `length_histogram`.
        all_shards: a line for every shard, where a long table else shows its start and its end.
    """
    parts = [
        f"{'corpus':<12}{one_line(report.directory)}\n" + summary_text(report.manifest, report.sources, width=width),
        distribution_text(report, width=width, encoding=encoding),
        shard_table(report.shards, num_rows=len(report.shards) if all_shards else _FEW_SHARDS),
        *map(view_text, report.documents),
    ]
    return "\n\n".join(parts)


def distribution_text(report: CorpusReport, *, width: int, encoding: str) -> str:
    """Percentiles and tokens in lines of ``label   value``, and the histogram of document lengths."""
    lines = [("lengths", _lengths_text(report.lengths))]
    if report.tokens is not None:
        lines += [("vocabulary", _vocabulary_text(report.tokens)), ("frequent", _frequent_text(report.tokens))]
        if report.tokens["normalizers"]:
            names = ", ".join(report.tokens["normalizers"])
            lines.append(("normalizer", f"{names}: text is changed before it is encoded"))
    histogram = length_histogram(report.manifest.document_lengths, width=width, encoding=encoding)
    return f"{aligned(lines, width=width)}\n\n{histogram}"


def shard_table(shards: Sequence[ShardInfo], *, num_rows: int) -> str:
    """A line per shard; of more than `num_rows` the first and the last."""
    head = shards[: -(-num_rows // 2)] if len(shards) > num_rows else shards[: len(shards)]
    tail = shards[len(shards) - num_rows // 2 :] if len(shards) > num_rows else []
    rows = [(shard.name, f"{shard.num_documents:,}", f"{shard.num_tokens:,}", bytes_text(shard.num_bytes))
            for shard in [*head, *tail]]  # fmt: skip
    titles = ("shard", "documents", "tokens", "on disk")
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]
    lines = [
        "  ".join(
            [f"{row[0]:<{widths[0]}}", *(f"{cell:>{size}}" for cell, size in zip(row[1:], widths[1:], strict=True))]
        )
        for row in [titles, *rows]
    ]
    if tail:
        left_out = len(shards) - len(rows)
        lines.insert(1 + len(head), f"... {left_out:,} more; --shards shows all")
    return "\n".join(lines)


def column_of(report: CorpusReport) -> dict[str, str]:
    """What is compared of corpora side by side: label to a short value."""
    manifest, about = report.manifest, "" if report.lengths.is_exact else "~"
    left_out = sum(manifest.records.left_out.values())
    column = {
        "corpus": report.directory,
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        "bytes per token": f"{manifest.text_bytes / manifest.num_tokens:.2f}",
        "on disk": bytes_text(manifest.num_bytes),
        "shards": f"{manifest.num_shards:,}",
        "dtype": manifest.dtype,
        "ids": f"{manifest.tokenizer.vocab_size:,}",
        "tokenizer": manifest.tokenizer.canonical_sha256[:12],
        "EOS": repr(manifest.tokenizer.eos),
        "records left out": f"{left_out:,}",
        "shortest": f"{manifest.document_lengths.shortest:,}",
        **{
            f"{percent} % are at most": f"{about}{length:,}" for percent, length in report.lengths.percentiles().items()
        },
        "longest": f"{manifest.document_lengths.longest:,}",
        "content": manifest.fingerprints.content[:12],
    }
    if report.tokens is not None:
        column["ids in use"] = f"{report.tokens['used'] / report.tokens['vocab_size']:.1%}"
        for key, label in (("unknown_share", "unknown tokens"), ("byte_share", "byte tokens")):
            if report.tokens[key] is not None:
                column[label] = f"{report.tokens[key]:.2%}"
    return column


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


def _lengths_text(lengths: Lengths) -> str:
    shown = ", ".join(f"{percent} % {length:,}" for percent, length in lengths.percentiles().items())
    return f"at most, in tokens: {shown}" + ("" if lengths.is_exact else " (about; --full reads every length)")


def _vocabulary_text(tokens: dict[str, Any]) -> str:
    parts = [f"{tokens['used']:,} of {tokens['vocab_size']:,} ids in use ({tokens['used'] / tokens['vocab_size']:.1%})"]
    if tokens["unknown_share"] is not None:
        parts.append(f"{tokens['unknown_share']:.2%} unknown tokens")
    if tokens["byte_share"] is not None:
        parts.append(f"{tokens['byte_share']:.2%} byte tokens")
    where = "" if tokens["is_full"] else f"; in a sample of {tokens['counted']:,} tokens, --full counts all"
    return ", ".join(parts) + where


def _frequent_text(tokens: dict[str, Any]) -> str:
    return ", ".join(f"{entry['text']!r} {entry['share']:.1%}" for entry in tokens["most_frequent"])
