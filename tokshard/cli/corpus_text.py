"""A report of a corpus as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from tokshard.cli.document_text import view_text
from tokshard.cli.tables import bars, table
from tokshard.format import names
from tokshard.format.manifest import DocumentLengths, Manifest, TemplateDrop, TokenizerInfo
from tokshard.format.tables import ShardInfo, SourceInfo
from tokshard.inspect.corpus.documents import source_label
from tokshard.inspect.corpus.places import short_names
from tokshard.inspect.corpus.report import (
    NUM_WORST_SOURCES,
    CorpusReport,
    generations_text,
    most_left_out,
    split_left_out,
)
from tokshard.inspect.corpus.statistics import NUM_FREQUENT, Lengths, TokenCounts
from tokshard.numbers import ceil_div
from tokshard.pipeline.options import settings_text
from tokshard.wording import LABEL_WIDTH, aligned, bytes_text, counted, one_line, printable, shorten


class Line(NamedTuple):
    """A label and its value; without a label it continues the line before. The end of a build shows brief ones."""

    label: str
    value: str
    is_brief: bool = True


_FEW_SHARDS = 8
_NAME_WIDTH = 24
_MIN_BAR_WIDTH = 8
_MAX_HISTOGRAM_WIDTH = 100
"""Longer bars are not easier to read."""


def report_text(report: CorpusReport, *, width: int, encoding: str | None, all_shards: bool = False) -> str:
    """A report.

    Args:
        width: characters per line.
        encoding: of the output, see `length_histogram`.
        all_shards: show every shard; otherwise a long table only shows its start and its end.
    """
    parts = [
        f"{'corpus':<12}{one_line(report.directory)}\n"
        + summary_text(report.manifest, report.sources, num_spans=report.num_spans, width=width),
        aligned(distribution_lines(report), width=width),
        length_histogram(report.manifest.document_lengths, width=width, encoding=encoding),
        shard_table(report.shards, num_rows=len(report.shards) if all_shards else _FEW_SHARDS),
        *map(view_text, report.documents),
    ]
    return "\n\n".join(parts)


def comparison_text(reports: Sequence[CorpusReport], *, width: int) -> str:
    """Several corpora next to each other: a line per fact, a column per corpus."""
    found = short_names([report.directory for report in reports])
    columns = [column_of(report, name) for report, name in zip(reports, found, strict=True)]
    labels = dict.fromkeys(label for column in columns for label in column)
    rows = [[label, *(column.get(label, "-") for column in columns)] for label in labels]
    is_all = all(one.lengths.is_exact and one.tokens.is_full for one in reports)
    return table(rows, width=width) + ("" if is_all else "\n~ from a sample; --full reads everything")


def summary_text(
    manifest: Manifest, sources: Sequence[SourceInfo] = (), *, num_spans: int | None = None, width: int
) -> str:
    """A corpus in a screenful, from its manifest and source table. Arguments as for `summary_lines`."""
    lines = summary_lines(manifest, sources, num_spans=num_spans, width=width)
    return aligned((line[:2] for line in lines), width=width)


def brief_text(manifests: Sequence[Manifest], *, width: int) -> str:
    """The result of a build in some eight lines: one corpus, or the two parts of a split in one table."""
    if len(manifests) == 1:
        return aligned((line[:2] for line in summary_lines(manifests[0], width=width) if line.is_brief), width=width)
    rows = [
        ["", *(f"{manifest.build.split}" for manifest in manifests)],
        ["documents", *(f"{manifest.num_documents:,}" for manifest in manifests)],
        ["tokens", *(f"{manifest.num_tokens:,}" for manifest in manifests)],
        *([["targets", *map(_targets_text, manifests)]] if manifests[0].num_targets is not None else []),
        ["on disk", *(f"{_disk_text(manifest)}" for manifest in manifests)],
    ]
    first = manifests[0]
    _, left_out = split_left_out(first.records.left_out)
    parts = [f"{manifest.records.written:,} for {manifest.build.split}" for manifest in manifests]
    lines = [
        Line("tokenizer", _tokenizer_text(first.tokenizer)),
        Line("records", f"{first.records.read:,} read = {' + '.join(parts)} + {_left_out_text(left_out)}"),
        *(line for line in _unusual_lines(manifests) if line.is_brief),
    ]
    shown = table([[f"{label:<{LABEL_WIDTH - 2}}", *cells] for label, *cells in rows], width=None)
    return f"{shown}\n{aligned((line[:2] for line in lines), width=width)}"


def summary_lines(
    manifest: Manifest, sources: Sequence[SourceInfo] = (), *, num_spans: int | None = None, width: int
) -> list[Line]:
    """The summary, line by line.

    Args:
        sources: the source table; without it single sources are not mentioned.
        num_spans: loss spans, if they are known.
        width: characters per line.
    """
    if not manifest.num_documents:
        return [Line("documents", "none: all that was appended went into the other split")]
    per_token = _bytes_per_token(manifest)
    of_text = "" if per_token is None else f", {per_token:.2f} bytes of text each"
    library = f"{manifest.tokenizer.library} {manifest.tokenizer.library_version}"
    return [
        Line("documents", f"{manifest.num_documents:,}, of {_lengths_range(manifest)}"),
        Line("tokens", f"{manifest.num_tokens:,} as {manifest.dtype}{of_text}"),
        *([] if manifest.num_targets is None else [Line("targets", _targets_text(manifest, num_spans))]),
        Line("on disk", _disk_text(manifest)) if manifest.base is None else Line("view of", manifest.base.path),
        Line("tokenizer", _tokenizer_text(manifest.tokenizer)),
        Line("library", library, is_brief=False),
        Line("sources", _sources_text(manifest, sources), is_brief=False),
        Line("settings", settings_text(manifest.build), is_brief=False),
        Line("records", _records_text(manifest)),
        *_left_out_lines(manifest, sources, width=width),
        *_unusual_lines([manifest]),
        Line("content", manifest.fingerprints.content, is_brief=False),
        Line("recipe", manifest.fingerprints.recipe, is_brief=False),
    ]


def _unusual_lines(manifests: Sequence[Manifest]) -> list[Line]:
    """Lines that only some corpora need. The corpora of a split list the same rejects and have the same generations."""
    lines = []
    special = [manifest.records.with_special_text for manifest in manifests]
    if None in special:
        lines.append(Line("specials", "not counted: the corpus is a copy", is_brief=False))
    elif count := sum(filter(None, special)):
        spell = "document spells" if count == 1 else "documents spell"
        lines.append(Line("specials", f"{count:,} {spell} a special token, which became ordinary ids"))
    if padding := manifests[0].records.padding_ids:
        lines.append(Line("padding", f"{counted(padding, 'id')} of padding left out, as attention_mask says"))
    if dropped := [one.records.template_drops for one in manifests if one.records.template_drops]:
        lines.append(Line("template", f"leaves out {_drops_text(dropped)}"))
    if rejects := _rejects(manifests[0]):
        size = bytes_text(sum(rejects.values()))
        lines.append(Line("rejects", f"listed in {', '.join(rejects)} ({size})"))
    if manifests[0].generation is not None:
        lines.append(Line("generations", generations_text(manifests[0])))
    return lines


def _drops_text(dropped: Sequence[Mapping[str, TemplateDrop]]) -> str:
    """The parts of conversations that a chat template left out of some corpora."""
    parts = []
    for kind in sorted({kind for found in dropped for kind in found}):
        found = [one[kind] for one in dropped if kind in one]
        first = min(found, key=lambda one: (one.source, one.record))
        what, message = ("message", f", message {first.message}") if first.message >= 0 else ("conversation", "")
        number = counted(sum(one.count for one in found), what)
        parts.append(f"{kind} of {number} (first: {one_line(first.source)}, record {first.record:,}{message})")
    return ", ".join(parts)


def _targets_text(manifest: Manifest, num_spans: int | None = None) -> str:
    """How many tokens are trained on, and their share; of a corpus with loss spans."""
    targets = manifest.num_targets or 0
    spans = "" if num_spans is None else f", in {counted(num_spans, 'loss span')}"
    return f"{targets:,} ({targets / max(1, manifest.num_tokens):.1%} of the tokens){spans}"


def _bytes_per_token(manifest: Manifest) -> float | None:
    """Of text; None for an import, which has only ids."""
    return manifest.text_bytes / manifest.num_tokens if manifest.text_bytes else None


def _disk_text(manifest: Manifest) -> str:
    return f"{bytes_text(manifest.num_bytes)} in {counted(manifest.num_shards, 'shard')}"


def _rejects(manifest: Manifest) -> dict[str, int]:
    """The lists of rejects of all generations, with their sizes."""
    found = {name: facts.num_bytes for name, facts in manifest.files.items()}
    return {name: size for name, size in found.items() if name.rpartition("/")[2] == names.REJECTS}


def distribution_lines(report: CorpusReport) -> list[tuple[str, str]]:
    """Percentiles and vocabulary as labels and values."""
    return [
        ("lengths", _percentiles_text(report.lengths)),
        ("vocabulary", _vocabulary_text(report.tokens)),
        *token_lines(report),
    ]


def token_lines(report: CorpusReport) -> list[tuple[str, str]]:
    """The frequent tokens, and the normalizers of the tokenizer."""
    frequent = [f"{token.text!r} {token.share:.1%}" for token in report.tokens.most_frequent(NUM_FREQUENT)]
    lines = [("frequent", ", ".join(frequent))]
    if normalizers := report.tokens.vocabulary.normalizers:
        lines.append(("normalizer", f"{', '.join(normalizers)}: text is changed before it is encoded"))
    return lines


def length_histogram(lengths: DocumentLengths, *, width: int, encoding: str | None) -> str:
    """Documents by length in tokens, a line per power of two from the shortest to the longest.

    Args:
        width: characters per line; of a wide terminal at most `_MAX_HISTOGRAM_WIDTH` are used.
        encoding: of the output; one without block characters gets ``#``.
    """
    used = [index for index, count in enumerate(lengths.counts) if count]
    if not used:
        return "no documents"
    counts = lengths.counts[used[0] : used[-1] + 1]
    labels = ["tokens", *(_bucket_text(index) for index in range(used[0], used[-1] + 1))]
    numbers = ["documents", *(f"{count:,}" for count in counts)]
    shares = ["", *(f"{count / sum(counts):6.1%}" for count in counts)]
    rest = max(map(len, labels)) + max(map(len, numbers)) + len("  100.0%  ") + 2
    drawn = bars(counts, max(_MIN_BAR_WIDTH, min(width, _MAX_HISTOGRAM_WIDTH) - rest), encoding)
    return table(list(zip(labels, numbers, shares, ["", *drawn], strict=True)), width=None, left=(3,))


def shard_table(shards: Sequence[ShardInfo], *, num_rows: int) -> str:
    """A line per shard; if there are more than `num_rows`, only the first and the last ones."""
    num_left_out = max(0, len(shards) - num_rows)
    head = len(shards) if not num_left_out else ceil_div(num_rows, 2)
    shown = [*shards[:head], *shards[head + num_left_out : len(shards)]]
    rows = [
        (shard.name, f"{shard.num_documents:,}", f"{shard.num_tokens:,}", bytes_text(shard.num_bytes))
        for shard in shown
    ]
    lines = table([("shard", "documents", "tokens", "on disk"), *rows], width=None).splitlines()
    if num_left_out:
        lines.insert(1 + head, f"... {num_left_out:,} more; --shards shows all")
    return "\n".join(lines)


def _lengths_range(manifest: Manifest) -> str:
    lengths, mean = manifest.document_lengths, manifest.num_tokens / manifest.num_documents
    longest = counted(lengths.longest, "token")
    if lengths.shortest == lengths.longest:
        return f"{longest} each" if manifest.num_documents > 1 else longest
    return f"{lengths.shortest:,} to {longest}, mean {mean:,.1f}"


def _tokenizer_text(tokenizer: TokenizerInfo) -> str:
    bos = "no BOS" if tokenizer.bos is None else f"BOS {tokenizer.bos!r} = {tokenizer.bos_id}"
    eos = f"EOS {tokenizer.eos!r} = {tokenizer.eos_id}"
    return f"{tokenizer.name}: {tokenizer.vocab_size:,} ids, {eos}, {bos}"


def _sources_text(manifest: Manifest, sources: Sequence[SourceInfo]) -> str:
    shown = ", ".join(manifest.arguments[:3]) + (", ..." if len(manifest.arguments) > 3 else "")
    if not sources:
        return shown
    size = bytes_text(sum(source.num_bytes for source in sources))
    return f"{counted(len(sources), 'file')}, {size}: {shown}"


def _records_text(manifest: Manifest) -> str:
    records = manifest.records
    elsewhere, left_out = split_left_out(records.left_out)
    return (
        f"{records.read:,} read = {records.written:,} written"
        + "".join(f" + {count:,} {reason}" for reason, count in elsewhere.items())
        + f" + {_left_out_text(left_out)}"
    )


def _left_out_text(left_out: Mapping[str, int]) -> str:
    reasons = f" ({_reasons_text(left_out)})" if any(left_out.values()) else ""
    return f"{sum(left_out.values()):,} left out{reasons}"


def _left_out_lines(manifest: Manifest, sources: Sequence[SourceInfo], *, width: int) -> list[Line]:
    worst = most_left_out(sources)
    lines = list[Line]()
    for source in worst[:NUM_WORST_SOURCES]:
        label = shorten(printable(source_label(manifest, source)), max(20, width // 2))
        _, left_out = split_left_out(source.left_out)
        count, reasons = sum(left_out.values()), _reasons_text(left_out)
        lines.append(Line("", f"{label}: {count:,} of {source.records_read:,} left out ({reasons})"))
    if len(worst) > NUM_WORST_SOURCES:
        more = counted(len(worst) - NUM_WORST_SOURCES, "more file")
        lines.append(Line("", f"and records of {more}"))
    return lines


def _reasons_text(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items(), key=lambda item: -item[1]))


def _percentiles_text(lengths: Lengths) -> str:
    shown = ", ".join(f"{percent}% {length:,}" for percent, length in lengths.percentiles().items())
    return f"at most, in tokens: {shown}" + ("" if lengths.is_exact else " (about; --full reads every length)")


def _vocabulary_text(tokens: TokenCounts) -> str:
    parts = [f"{len(tokens.ids):,} of {tokens.vocab_size:,} ids in use ({tokens.used_share:.1%})"]
    parts += [f"{share:.2%} {label}" for label, share in _shares(tokens).items()]
    where = "" if tokens.is_full else f"; in a sample of {tokens.num_tokens:,} tokens, --full counts all"
    return ", ".join(parts) + where


def _shares(tokens: TokenCounts) -> dict[str, float]:
    shares = {"unknown tokens": tokens.unknown_share, "byte tokens": tokens.byte_share}
    return {label: share for label, share in shares.items() if share is not None}


def _bucket_text(index: int) -> str:
    first, last = 1 << index, (2 << index) - 1
    return f"{first:,}" if first == last else f"{first:,}-{last:,}"


def column_of(report: CorpusReport, name: str) -> dict[str, str]:
    """The column of a corpus in a comparison: label to a short value, first the `name` that is its alone."""
    manifest, about = report.manifest, "" if report.lengths.is_exact else "~"
    percentiles = report.lengths.percentiles().items()
    column = {
        "corpus": shorten(one_line(name), _NAME_WIDTH),
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        **({} if manifest.num_targets is None else {"targets": f"{manifest.num_targets / manifest.num_tokens:.1%}"}),
        **({"bytes per token": f"{per_token:.2f}"} if (per_token := _bytes_per_token(manifest)) else {}),
        "on disk": bytes_text(manifest.num_bytes),
        "shards": f"{manifest.num_shards:,}",
        "dtype": manifest.dtype,
        "ids": f"{manifest.tokenizer.vocab_size:,}",
        "tokenizer": manifest.tokenizer.canonical_sha256[:12],
        "EOS": repr(manifest.tokenizer.eos),
        "records left out": f"{sum(split_left_out(manifest.records.left_out)[1].values()):,}",
        "shortest": f"{manifest.document_lengths.shortest:,}",
        **{f"{percent}% are at most": f"{about}{length:,}" for percent, length in percentiles},
        "longest": f"{manifest.document_lengths.longest:,}",
        "content": manifest.fingerprints.content[:12],
    }
    sampled = "" if report.tokens.is_full else "~"
    column["ids in use"] = f"{sampled}{report.tokens.used_share:.1%}"
    return column | {label: f"{sampled}{share:.2%}" for label, share in _shares(report.tokens).items()}
