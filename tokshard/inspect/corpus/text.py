"""All text about corpora: summaries, tables, documents, matches and differences, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tokshard.format import names
from tokshard.format.manifest import BuildConfig, DocumentLengths, Manifest, TokenizerInfo
from tokshard.format.tables import ShardInfo, SourceInfo
from tokshard.inspect.corpus.difference import Difference
from tokshard.inspect.corpus.documents import DocumentView, Match, TokenPiece, source_label
from tokshard.inspect.corpus.report import NUM_WORST_SOURCES, CorpusReport, most_left_out, split_left_out
from tokshard.inspect.corpus.statistics import Lengths
from tokshard.inspect.terminal import bars, shorten, table
from tokshard.wording import aligned, bytes_text, counted, one_line, printable

_BOUNDARY = "\u2502"
_FEW_SHARDS = 8
_NAME_WIDTH = 24
_MIN_BAR_WIDTH = 8
_MAX_HISTOGRAM_WIDTH = 100
"""Longer bars are not easier to read."""


def report_text(report: CorpusReport, *, width: int, encoding: str, all_shards: bool = False) -> str:
    """A report.

    Args:
        width: characters per line.
        encoding: of the output, see `length_histogram`.
        all_shards: show every shard; otherwise a long table only shows its start and its end.
    """
    parts = [
        f"{'corpus':<12}{one_line(report.directory)}\n" + summary_text(report.manifest, report.sources, width=width),
        distribution_text(report, width=width, encoding=encoding),
        shard_table(report.shards, num_rows=len(report.shards) if all_shards else _FEW_SHARDS),
        *map(view_text, report.documents),
    ]
    return "\n\n".join(parts)


def comparison_text(reports: Sequence[CorpusReport], *, width: int) -> str:
    """Several corpora next to each other: a line per fact, a column per corpus."""
    columns = [_column_of(report) for report in reports]
    labels = dict.fromkeys(label for column in columns for label in column)
    return table([[label, *(column.get(label, "-") for column in columns)] for label in labels], width=width)


def summary_text(manifest: Manifest, sources: Sequence[SourceInfo] = (), *, width: int = 80) -> str:
    """A corpus in a screenful, from its manifest and source table. Arguments as for `summary_lines`."""
    return aligned(summary_lines(manifest, sources, width=width), width=width)


def summary_lines(manifest: Manifest, sources: Sequence[SourceInfo] = (), *, width: int = 80) -> list[tuple[str, str]]:
    """The summary as labels and values; a line without a label continues the one before.

    Args:
        sources: the source table; without it single sources are not mentioned.
        width: characters per line.
    """
    records = manifest.records
    per_token = manifest.text_bytes / manifest.num_tokens
    lines = [
        ("documents", f"{manifest.num_documents:,}, of {_lengths_range(manifest)}"),
        ("tokens", f"{manifest.num_tokens:,} as {manifest.dtype}, {per_token:.2f} bytes of text each"),
        ("on disk", f"{bytes_text(manifest.num_bytes)} in {counted(manifest.num_shards, 'shard')}"),
        ("tokenizer", _tokenizer_text(manifest.tokenizer)),
        ("sources", _sources_text(manifest, sources)),
        ("settings", _settings_text(manifest.build)),
        ("records", _records_text(manifest)),
        *_left_out_lines(manifest, sources, width=width),
    ]
    if records.with_special_text:
        spell = "document spells" if records.with_special_text == 1 else "documents spell"
        lines.append(("specials", f"{records.with_special_text:,} {spell} a special token, which became ordinary ids"))
    if names.REJECTS in manifest.files:
        size = bytes_text(manifest.files[names.REJECTS].num_bytes)
        lines.append(("rejects", f"{names.REJECTS} lists every bad record and input that was left out ({size})"))
    return [*lines, ("content", manifest.fingerprints.content), ("recipe", manifest.fingerprints.recipe)]


def distribution_text(report: CorpusReport, *, width: int, encoding: str) -> str:
    """Percentiles, vocabulary and the histogram of document lengths."""
    lines = [("lengths", _percentiles_text(report.lengths))]
    if report.tokens is not None:
        frequent = [f"{entry['text']!r} {entry['share']:.1%}" for entry in report.tokens["most_frequent"]]
        lines += [("vocabulary", _vocabulary_text(report.tokens)), ("frequent", ", ".join(frequent))]
        if report.tokens["normalizers"]:
            normalizers = ", ".join(report.tokens["normalizers"])
            lines.append(("normalizer", f"{normalizers}: text is changed before it is encoded"))
    histogram = length_histogram(report.manifest.document_lengths, width=width, encoding=encoding)
    return f"{aligned(lines, width=width)}\n\n{histogram}"


def length_histogram(lengths: DocumentLengths, *, width: int, encoding: str) -> str:
    """Documents by length in tokens, a line per power of two from the shortest to the longest.

    Args:
        width: characters per line; of a wide terminal at most `_MAX_HISTOGRAM_WIDTH` are used.
        encoding: of the output; one without block characters gets ``#``.
    """
    used = [index for index, count in enumerate(lengths.counts) if count]
    if not used:
        return "no documents"
    buckets = range(used[0], used[-1] + 1)
    labels = [_bucket_text(index) for index in buckets]
    counts = [lengths.counts[index] for index in buckets]
    label_width = max(len("tokens"), *map(len, labels))
    count_width = max(len("documents"), *(len(f"{count:,}") for count in counts))
    rest = label_width + count_width + len("  100.0%  ") + 2
    bar_width = max(_MIN_BAR_WIDTH, min(width, _MAX_HISTOGRAM_WIDTH) - rest)
    lines = [f"{'tokens':>{label_width}}  {'documents':>{count_width}}"]
    for label, count, bar in zip(labels, counts, bars(counts, bar_width, encoding), strict=True):
        lines.append(f"{label:>{label_width}}  {count:>{count_width},}  {count / sum(counts):6.1%}  {bar}".rstrip())
    return "\n".join(lines)


def shard_table(shards: Sequence[ShardInfo], *, num_rows: int) -> str:
    """A line per shard; if there are more than `num_rows`, only the first and the last ones."""
    num_left_out = max(0, len(shards) - num_rows)
    head = len(shards) if not num_left_out else -(-num_rows // 2)
    shown = [*shards[:head], *shards[head + num_left_out : len(shards)]]
    rows = [
        (shard.name, f"{shard.num_documents:,}", f"{shard.num_tokens:,}", bytes_text(shard.num_bytes))
        for shard in shown
    ]
    lines = table([("shard", "documents", "tokens", "on disk"), *rows], width=None).splitlines()
    if num_left_out:
        lines.insert(1 + head, f"... {num_left_out:,} more; --shards shows all")
    return "\n".join(lines)


def view_text(view: DocumentView) -> str:
    """A document, its control characters escaped; if it was split into tokens, with a bar after each."""
    place = f"record {view.record_number:,} of {one_line(view.source)}"
    lines = [f"document {view.document:,}: {counted(view.num_tokens, 'token')}, {place}"]
    lines += [f"{one_line(name)}: {one_line(str(value))}" for name, value in view.metadata.items()]
    more = " ..." if view.is_excerpt else ""
    lines.append(printable(bounded_text(view.pieces) + more if view.pieces else view.text))
    return "\n".join(lines)


def bounded_text(pieces: Iterable[TokenPiece]) -> str:
    """The text of pieces, with a bar after each."""
    return "".join(piece.text + _BOUNDARY for piece in pieces)


def match_text(match: Match) -> str:
    """Two lines: where the match is, and its context, with the match in angle quotes."""
    more = "" if match.count == 1 else f", {match.count:,} places"
    return (
        f"document {match.document:,}: record {match.record_number:,} of {one_line(match.source)}{more}\n"
        f"    {one_line(match.before)}\u00bb{one_line(match.text)}\u00ab{one_line(match.after)}"
    )


def difference_text(difference: Difference, labels: tuple[str, str]) -> str:
    """The verdict, and three lines for each field that differs."""
    lines = [f"{'equal' if difference.is_equal else 'different'}: {difference.verdict}", *difference.notes]
    width = max(len(one_line(label)) for label in labels)
    for field, values in difference.fields.items():
        lines.append(one_line(field))
        lines += [
            f"  {one_line(label):<{width}}  {'(none)' if value is None else one_line(str(value))}"
            for label, value in zip(labels, values, strict=True)
        ]
    return "\n".join(lines)


def _lengths_range(manifest: Manifest) -> str:
    lengths, mean = manifest.document_lengths, manifest.num_tokens / manifest.num_documents
    longest = counted(lengths.longest, "token")
    span = longest if lengths.shortest == lengths.longest else f"{lengths.shortest:,} to {longest}"
    return f"{span}, mean {mean:,.1f}"


def _tokenizer_text(tokenizer: TokenizerInfo) -> str:
    bos = "no BOS" if tokenizer.bos is None else f"BOS {tokenizer.bos!r} = {tokenizer.bos_id}"
    return (
        f"{tokenizer.name}: {tokenizer.vocab_size:,} ids, {tokenizer.library} {tokenizer.library_version}, "
        f"EOS {tokenizer.eos!r} = {tokenizer.eos_id}, {bos}"
    )


def _sources_text(manifest: Manifest, sources: Sequence[SourceInfo]) -> str:
    shown = ", ".join(manifest.arguments[:3]) + (", ..." if len(manifest.arguments) > 3 else "")
    if not sources:
        return shown
    size = bytes_text(sum(source.num_bytes for source in sources))
    return f"{counted(len(sources), 'file')}, {size}: {shown}"


def _settings_text(build: BuildConfig) -> str:
    parts = [f"text from {build.text_field!r}"]
    if build.id_field is not None:
        parts.append(f"id from {build.id_field!r}")
    if build.keep:
        parts.append("kept " + ", ".join(f"{name} ({kind})" for name, kind in build.keep.items()))
    if build.input_format is not None:
        parts.append(f"every input read as {build.input_format}")
    parts.append(f"shards of at most {counted(build.shard_tokens, 'token')}")
    parts.append(f"documents of at most {build.max_document_bytes:,} bytes")
    if build.min_tokens is not None:
        parts.append(f"documents of at least {counted(build.min_tokens, 'token')}")
    if build.max_tokens is not None:
        parts.append(f"documents of at most {counted(build.max_tokens, 'token')}")
    if build.dedup != "none":
        parts.append(f"{build.dedup} duplicates left out")
    if build.validation_fraction is not None:
        parts.append(f"the {build.split} split, {build.validation_fraction:g} of the documents are for validation")
    if build.limit is not None:
        parts.append(f"limit {counted(build.limit, 'document')}")
    return ", ".join(parts)


def _records_text(manifest: Manifest) -> str:
    records = manifest.records
    elsewhere, left_out = split_left_out(records.left_out)
    return (
        f"{records.read:,} read = {records.written:,} written"
        + "".join(f" + {count:,} {reason}" for reason, count in elsewhere.items())
        + f" + {sum(left_out.values()):,} left out"
        + (f" ({_reasons_text(left_out)})" if any(left_out.values()) else "")
    )


def _left_out_lines(manifest: Manifest, sources: Sequence[SourceInfo], *, width: int) -> list[tuple[str, str]]:
    worst = most_left_out(sources)
    lines = []
    for source in worst[:NUM_WORST_SOURCES]:
        label = shorten(printable(source_label(manifest, source)), max(20, width // 2))
        _, left_out = split_left_out(source.left_out)
        count, reasons = sum(left_out.values()), _reasons_text(left_out)
        lines.append(("", f"{label}: {count:,} of {source.records_read:,} left out ({reasons})"))
    if len(worst) > NUM_WORST_SOURCES:
        lines.append(("", f"and records of {counted(len(worst) - NUM_WORST_SOURCES, 'more file')}"))
    return lines


def _reasons_text(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items(), key=lambda item: -item[1]))


def _percentiles_text(lengths: Lengths) -> str:
    shown = ", ".join(f"{percent} % {length:,}" for percent, length in lengths.percentiles().items())
    return f"at most, in tokens: {shown}" + ("" if lengths.is_exact else " (about; --full reads every length)")


def _vocabulary_text(tokens: dict[str, Any]) -> str:
    parts = [f"{tokens['used']:,} of {tokens['vocab_size']:,} ids in use ({tokens['used'] / tokens['vocab_size']:.1%})"]
    parts += [f"{tokens[key]:.2%} {label}" for key, label in _SHARES.items() if tokens[key] is not None]
    where = "" if tokens["is_full"] else f"; in a sample of {tokens['counted']:,} tokens, --full counts all"
    return ", ".join(parts) + where


_SHARES = {"unknown_share": "unknown tokens", "byte_share": "byte tokens"}


def _bucket_text(index: int) -> str:
    first, last = 1 << index, (2 << index) - 1
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def _column_of(report: CorpusReport) -> dict[str, str]:
    """What `comparison_text` shows of a corpus: label to a short value."""
    manifest, about = report.manifest, "" if report.lengths.is_exact else "~"
    percentiles = report.lengths.percentiles().items()
    column = {
        "corpus": shorten(one_line(report.directory), _NAME_WIDTH),
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        "bytes per token": f"{manifest.text_bytes / manifest.num_tokens:.2f}",
        "on disk": bytes_text(manifest.num_bytes),
        "shards": f"{manifest.num_shards:,}",
        "dtype": manifest.dtype,
        "ids": f"{manifest.tokenizer.vocab_size:,}",
        "tokenizer": manifest.tokenizer.canonical_sha256[:12],
        "EOS": repr(manifest.tokenizer.eos),
        "records left out": f"{sum(manifest.records.left_out.values()):,}",
        "shortest": f"{manifest.document_lengths.shortest:,}",
        **{f"{percent} % are at most": f"{about}{length:,}" for percent, length in percentiles},
        "longest": f"{manifest.document_lengths.longest:,}",
        "content": manifest.fingerprints.content[:12],
    }
    if report.tokens is not None:
        column["ids in use"] = f"{report.tokens['used'] / report.tokens['vocab_size']:.1%}"
        column |= {
            label: f"{report.tokens[key]:.2%}" for key, label in _SHARES.items() if report.tokens[key] is not None
        }
    return column
