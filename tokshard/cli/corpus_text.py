"""What a corpus holds, as text for people and as plain values for ``--json``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from tokshard.cli.document_text import view_json, view_text
from tokshard.cli.tables import bars, shorten, table
from tokshard.format import names
from tokshard.format.loss import kept_columns
from tokshard.format.manifest import (
    BuildConfig,
    ChatConfig,
    CopyConfig,
    DocumentLengths,
    Manifest,
    TemplateDrop,
    TokenizerInfo,
)
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
from tokshard.inspect.corpus.statistics import Lengths, TokenCounts
from tokshard.interop.tokens.loss import NO_LOSS
from tokshard.pipeline.encode.chat.omissions import OF_MESSAGES
from tokshard.wording import LABEL_WIDTH, aligned, bytes_text, counted, one_line, printable

_BRIEF = frozenset(
    {
        "documents",
        "tokens",
        "trained",
        "on disk",
        "tokenizer",
        "records",
        "specials",
        "padding",
        "template",
        "rejects",
        "generations",
    }
)
"""Of a summary, what the end of a build shows."""

_FEW_SHARDS = 8
_NUM_FREQUENT = 12
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
        f"{'corpus':<12}{one_line(report.directory)}\n"
        + summary_text(report.manifest, report.sources, num_spans=report.num_spans, width=width),
        distribution_text(report, width=width, encoding=encoding),
        shard_table(report.shards, num_rows=len(report.shards) if all_shards else _FEW_SHARDS),
        *map(view_text, report.documents),
    ]
    return "\n\n".join(parts)


def comparison_text(reports: Sequence[CorpusReport], *, width: int) -> str:
    """Several corpora next to each other: a line per fact, a column per corpus."""
    found = short_names([report.directory for report in reports])
    columns = [column_of(report, name) for report, name in zip(reports, found, strict=True)]
    labels = dict.fromkeys(label for column in columns for label in column)
    return table([[label, *(column.get(label, "-") for column in columns)] for label in labels], width=width)


def summary_text(
    manifest: Manifest, sources: Sequence[SourceInfo] = (), *, num_spans: int | None = None, width: int = 80
) -> str:
    """A corpus in a screenful, from its manifest and source table. Arguments as for `summary_lines`."""
    return aligned(summary_lines(manifest, sources, num_spans=num_spans, width=width), width=width)


def brief_text(manifests: Sequence[Manifest], *, width: int) -> str:
    """What a build made, in some eight lines: one corpus, or the two parts of a split in one table."""
    if len(manifests) == 1:
        lines = [line for line in summary_lines(manifests[0], width=width) if line[0] in _BRIEF]
        return aligned(
            [(label, _ids_text(manifests[0].tokenizer) if label == "tokenizer" else value) for label, value in lines],
            width=width,
        )
    rows = [
        ["", *(f"{manifest.build.split}" for manifest in manifests)],
        ["documents", *(f"{manifest.num_documents:,}" for manifest in manifests)],
        ["tokens", *(f"{manifest.num_tokens:,}" for manifest in manifests)],
        *([["trained", *map(_trained_text, manifests)]] if manifests[0].num_targets is not None else []),
        ["on disk", *(f"{_disk_text(manifest)}" for manifest in manifests)],
    ]
    first = manifests[0]
    _, left_out = split_left_out(first.records.left_out)
    parts = [f"{manifest.records.written:,} for {manifest.build.split}" for manifest in manifests]
    lines = [
        ("tokenizer", _ids_text(first.tokenizer)),
        ("records", f"{first.records.read:,} read = {' + '.join(parts)} + {_left_out_text(left_out)}"),
        *_unusual_lines(manifests),
    ]
    shown = table([[f"{label:<{LABEL_WIDTH - 2}}", *cells] for label, *cells in rows], width=None)
    return f"{shown}\n{aligned(lines, width=width)}"


def summary_lines(
    manifest: Manifest, sources: Sequence[SourceInfo] = (), *, num_spans: int | None = None, width: int = 80
) -> list[tuple[str, str]]:
    """The summary as labels and values; a line without a label continues the one before.

    Args:
        sources: the source table; without it single sources are not mentioned.
        num_spans: loss spans, if they are known.
        width: characters per line.
    """
    if not manifest.num_documents:
        return [("documents", "none: all that was appended went into the other split")]
    per_token = _bytes_per_token(manifest)
    of_text = "" if per_token is None else f", {per_token:.2f} bytes of text each"
    lines = [
        ("documents", f"{manifest.num_documents:,}, of {_lengths_range(manifest)}"),
        ("tokens", f"{manifest.num_tokens:,} as {manifest.dtype}{of_text}"),
        *([] if manifest.num_targets is None else [("trained", _trained_text(manifest, num_spans))]),
        ("on disk", _disk_text(manifest)),
        ("tokenizer", _tokenizer_text(manifest.tokenizer)),
        ("sources", _sources_text(manifest, sources)),
        ("settings", _settings_text(manifest.build)),
        ("records", _records_text(manifest)),
        *_left_out_lines(manifest, sources, width=width),
    ]
    lines += _unusual_lines([manifest])
    return [*lines, ("content", manifest.fingerprints.content), ("recipe", manifest.fingerprints.recipe)]


def _unusual_lines(manifests: Sequence[Manifest]) -> list[tuple[str, str]]:
    """Lines that only some corpora need. The corpora of a split list the same rejects and have the same generations."""
    lines = []
    special = [manifest.records.with_special_text for manifest in manifests]
    if None in special:
        lines.append(("specials", "not counted: the copy took only a part of a corpus"))
    elif count := sum(filter(None, special)):
        spell = "document spells" if count == 1 else "documents spell"
        lines.append(("specials", f"{count:,} {spell} a special token, which became ordinary ids"))
    if padding := manifests[0].records.padding_ids:
        lines.append(("padding", f"{counted(padding, 'id')} of padding left out, as attention_mask says"))
    if dropped := [one.records.template_drops for one in manifests if one.records.template_drops]:
        lines.append(("template", f"leaves out {_drops_text(dropped)}"))
    if rejects := _rejects(manifests[0]):
        size = bytes_text(sum(rejects.values()))
        verb = "lists" if len(rejects) == 1 else "list"
        lines.append(("rejects", f"{', '.join(rejects)} {verb} every bad record and input that was left out ({size})"))
    if manifests[0].generation is not None:
        lines.append(("generations", generations_text(manifests[0])))
    return lines


def _drops_text(dropped: Sequence[Mapping[str, TemplateDrop]]) -> str:
    """What a chat template leaves out of the conversations of some corpora."""
    parts = []
    for kind in sorted({kind for found in dropped for kind in found}):
        found = [one[kind] for one in dropped if kind in one]
        first = min(found, key=lambda one: (one.source, one.record))
        what = "message" if kind in OF_MESSAGES else "conversation"
        message = f", message {first.message}" if first.message >= 0 else ""
        number = counted(sum(one.count for one in found), what)
        parts.append(f"{kind} of {number} (first: {one_line(first.source)}, record {first.record:,}{message})")
    return ", ".join(parts)


def _trained_text(manifest: Manifest, num_spans: int | None = None) -> str:
    """How many tokens are targets, and their share; of a corpus with loss spans."""
    targets = manifest.num_targets or 0
    spans = "" if num_spans is None else f", in {counted(num_spans, 'loss span')}"
    return f"{targets:,} of the tokens ({targets / max(1, manifest.num_tokens):.1%}){spans}"


def _bytes_per_token(manifest: Manifest) -> float | None:
    """Of text; None for an import, which has only ids."""
    return manifest.text_bytes / manifest.num_tokens if manifest.text_bytes else None


def _disk_text(manifest: Manifest) -> str:
    return f"{bytes_text(manifest.num_bytes)} in {counted(manifest.num_shards, 'shard')}"


def _rejects(manifest: Manifest) -> dict[str, int]:
    """The lists of rejects of all generations, with their sizes."""
    found = {name: facts.num_bytes for name, facts in manifest.files.items()}
    return {name: size for name, size in found.items() if name.rpartition("/")[2] == names.REJECTS}


def distribution_text(report: CorpusReport, *, width: int, encoding: str) -> str:
    """Percentiles, vocabulary and the histogram of document lengths."""
    histogram = length_histogram(report.manifest.document_lengths, width=width, encoding=encoding)
    return f"{aligned(distribution_lines(report), width=width)}\n\n{histogram}"


def distribution_lines(report: CorpusReport) -> list[tuple[str, str]]:
    """Percentiles and vocabulary as labels and values."""
    lines = [("lengths", _percentiles_text(report.lengths))]
    if report.tokens is not None:
        frequent = [f"{token.text!r} {token.share:.1%}" for token in report.tokens.most_frequent(_NUM_FREQUENT)]
        lines += [("vocabulary", _vocabulary_text(report.tokens)), ("frequent", ", ".join(frequent))]
        if normalizers := report.tokens.vocabulary.normalizers:
            lines.append(("normalizer", f"{', '.join(normalizers)}: text is changed before it is encoded"))
    return lines


def length_histogram(lengths: DocumentLengths, *, width: int, encoding: str) -> str:
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


def _lengths_range(manifest: Manifest) -> str:
    lengths, mean = manifest.document_lengths, manifest.num_tokens / manifest.num_documents
    longest = counted(lengths.longest, "token")
    span = longest if lengths.shortest == lengths.longest else f"{lengths.shortest:,} to {longest}"
    return f"{span}, mean {mean:,.1f}"


def _tokenizer_text(tokenizer: TokenizerInfo) -> str:
    return _ids_text(tokenizer, f"{tokenizer.library} {tokenizer.library_version}, ")


def _ids_text(tokenizer: TokenizerInfo, library: str = "") -> str:
    bos = "no BOS" if tokenizer.bos is None else f"BOS {tokenizer.bos!r} = {tokenizer.bos_id}"
    eos = f"EOS {tokenizer.eos!r} = {tokenizer.eos_id}"
    return f"{tokenizer.name}: {tokenizer.vocab_size:,} ids, {library}{eos}, {bos}"


def _sources_text(manifest: Manifest, sources: Sequence[SourceInfo]) -> str:
    shown = ", ".join(manifest.arguments[:3]) + (", ..." if len(manifest.arguments) > 3 else "")
    if not sources:
        return shown
    size = bytes_text(sum(source.num_bytes for source in sources))
    return f"{counted(len(sources), 'file')}, {size}: {shown}"


def _read_as(build: BuildConfig) -> list[str]:
    chat = [] if build.chat is None else _rendered(build.chat)
    if build.copied is not None:
        return [*_taken(build.copied), *chat]
    if chat:
        return chat
    if build.reads != "tokens":
        special = [f"special tokens {build.special_tokens}"] if build.special_tokens is not None else []
        return [f"text from {build.text_field!r}", *special]
    parts = ["tokens of another tool" + (f" from {build.token_field!r}" if build.token_field else "")]
    if build.loss_field is not None:
        parts.append("masks left out" if build.loss_field == NO_LOSS else f"trained by {build.loss_field!r}")
    if build.token_dtype is not None:
        parts.append(f"stored as {build.token_dtype}")
    if build.source_eos is not None:
        parts.append(f"delimiter {build.source_eos} in the sources")
    return parts


def _rendered(chat: ChatConfig) -> list[str]:
    date = f", dated {chat.chat_date}" if chat.chat_date else ""
    strict = ["nothing left out by the template"] if chat.template_drops == "fail" else []
    return [f"conversations by the chat template {chat.template[:12]}{date}", f"loss on {chat.loss}", *strict]


def _taken(copied: CopyConfig) -> list[str]:
    parts = [f"documents of {counted(len(copied.corpora), 'corpus', 'corpora')}"]
    parts += [f"those with {condition}" for condition in copied.where]
    if copied.source is not None:
        parts.append(f"those of sources {copied.source}")
    if copied.drop_ids is not None:
        parts.append(f"without those on the list {copied.drop_ids[:12]}")
    if copied.hash_range is not None:
        parts.append("those with hashes in {:g}:{:g}".format(*copied.hash_range))
    if copied.shuffle is not None:
        parts.append(f"shuffled with seed {copied.shuffle}")
    return parts


def _settings_text(build: BuildConfig) -> str:
    parts = _read_as(build)
    if build.id_field is not None:
        parts.append(f"id from {build.id_field!r}")
    if build.keep_field:
        parts.append("kept " + ", ".join(f"{name} ({kind})" for name, kind in build.keep_field.items()))
    if build.format is not None:
        parts.append(f"every input read as {build.format}")
    parts.append(f"shards of at most {counted(build.shard_tokens, 'token')}")
    if build.copied is None:
        parts.append(f"documents of at most {build.max_document_bytes:,} bytes")
    if build.min_tokens is not None:
        parts.append(f"documents of at least {counted(build.min_tokens, 'token')}")
    if build.max_tokens is not None:
        parts.append(f"documents of at most {counted(build.max_tokens, 'token')}")
    if build.dedup != "none":
        parts.append(f"{build.dedup} duplicates left out")
    if build.validation_fraction is not None:
        parts.append(f"the {build.split} split, {build.validation_fraction:g} of the documents are for validation")
    if build.max_documents is not None:
        parts.append(f"limit {counted(build.max_documents, 'document')}")
    return ", ".join(parts)


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
    """What a comparison shows of a corpus: label to a short value, first the `name` that tells it from the others."""
    manifest, about = report.manifest, "" if report.lengths.is_exact else "~"
    percentiles = report.lengths.percentiles().items()
    column = {
        "corpus": shorten(one_line(name), _NAME_WIDTH),
        "documents": f"{manifest.num_documents:,}",
        "tokens": f"{manifest.num_tokens:,}",
        **({} if manifest.num_targets is None else {"trained": f"{manifest.num_targets / manifest.num_tokens:.1%}"}),
        **({"bytes per token": f"{per_token:.2f}"} if (per_token := _bytes_per_token(manifest)) else {}),
        "on disk": bytes_text(manifest.num_bytes),
        "shards": f"{manifest.num_shards:,}",
        "dtype": manifest.dtype,
        "ids": f"{manifest.tokenizer.vocab_size:,}",
        "tokenizer": manifest.tokenizer.canonical_sha256[:12],
        "EOS": repr(manifest.tokenizer.eos),
        "records left out": f"{sum(split_left_out(manifest.records.left_out)[1].values()):,}",
        "shortest": f"{manifest.document_lengths.shortest:,}",
        **{f"{percent} % are at most": f"{about}{length:,}" for percent, length in percentiles},
        "longest": f"{manifest.document_lengths.longest:,}",
        "content": manifest.fingerprints.content[:12],
    }
    if report.tokens is not None:
        column["ids in use"] = f"{report.tokens.used_share:.1%}"
        column |= {label: f"{share:.2%}" for label, share in _shares(report.tokens).items()}
    return column


def report_json(report: CorpusReport, *, all_shards: bool = False) -> dict[str, Any]:
    """A report as plain values; with every shard on request."""
    summary = summary_json(report.manifest, report.sources)
    summary["tokens_per_document"] |= {
        "percentiles": {str(percent): length for percent, length in report.lengths.percentiles().items()},
        "percentiles_are_exact": report.lengths.is_exact,
    }
    return {
        "corpus": report.directory,
        **summary,
        **({"shard_list": [_shard_json(shard) for shard in report.shards]} if all_shards else {}),
        "loss_spans": report.num_spans,
        "token_statistics": None if report.tokens is None else tokens_json(report.tokens),
        "samples": [view_json(view) for view in report.documents],
    }


def _shard_json(shard: ShardInfo) -> dict[str, Any]:
    return {
        "name": shard.name,
        "documents": shard.num_documents,
        "tokens": shard.num_tokens,
        "bytes": shard.num_bytes,
        "sha256": shard.sha256,
    }


def summary_json(manifest: Manifest, sources: Sequence[SourceInfo] = ()) -> dict[str, Any]:
    """A corpus as plain values, only from its manifest and source table."""
    lengths = manifest.document_lengths
    rejects = _rejects(manifest)
    return {
        "documents": manifest.num_documents,
        "tokens": manifest.num_tokens,
        "targets": manifest.num_targets,
        "tokens_per_document": {
            "mean": manifest.num_tokens / manifest.num_documents,
            "shortest": lengths.shortest,
            "longest": lengths.longest,
            "powers_of_two": lengths.counts,
        },
        "text_bytes": manifest.text_bytes,
        "text_bytes_per_token": _bytes_per_token(manifest),
        "dtype": manifest.dtype,
        "columns": kept_columns(manifest.columns),
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
        "rejects": {"file": ", ".join(rejects), "bytes": sum(rejects.values())} if rejects else None,
        "generation": 0 if manifest.generation is None else manifest.generation.number,
        "fingerprints": msgspec.to_builtins(manifest.fingerprints),
    }


def tokens_json(tokens: TokenCounts) -> dict[str, Any]:
    """Token statistics as plain values."""
    return {
        "counted": tokens.num_tokens,
        "is_full": tokens.is_full,
        "used": len(tokens.ids),
        "vocab_size": tokens.vocab_size,
        "unknown_share": tokens.unknown_share,
        "byte_share": tokens.byte_share,
        "normalizers": list(tokens.vocabulary.normalizers),
        "most_frequent": [asdict(token) for token in tokens.most_frequent(_NUM_FREQUENT)],
    }
