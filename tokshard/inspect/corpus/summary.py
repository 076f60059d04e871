"""What a corpus is, in a screenful: from its manifest and source table alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from tokshard.format import names
from tokshard.format.manifest import IN_OTHER_SPLIT, BuildConfig, DocumentLengths, Manifest, TokenizerInfo
from tokshard.format.tables import SourceInfo
from tokshard.inspect.terminal import aligned, printable, shorten
from tokshard.wording import bytes_text, counted

_WORST_SOURCES = 10
_OTHER_SPLIT = frozenset(IN_OTHER_SPLIT.values())


def source_label(manifest: Manifest, source: SourceInfo) -> str:
    """How a source is called: the label of its argument, and the path below it."""
    argument = manifest.arguments[source.argument]
    return f"{argument}/{source.path}" if source.path else argument


def source_name(manifest: Manifest, sources: Sequence[SourceInfo], index: int) -> str:
    """`source_label` of the source that a document comes from; the shard table may name one that does not exist."""
    return source_label(manifest, sources[index]) if 0 <= index < len(sources) else "unknown"


def summary_text(manifest: Manifest, sources: Sequence[SourceInfo] = (), *, width: int = 80) -> str:
    """The summary in lines of ``label   value``. Arguments as in `summary_lines`."""
    return aligned(summary_lines(manifest, sources, width=width), width=width)


def summary_lines(manifest: Manifest, sources: Sequence[SourceInfo] = (), *, width: int = 80) -> list[tuple[str, str]]:
    """The summary as labels and values; a line without a label goes on with the one before.

    Args:
        sources: the source table; without it nothing is said of single sources.
        width: characters in a line.
    """
    lengths, records = manifest.document_lengths, manifest.records
    mean = manifest.num_tokens / manifest.num_documents
    num_left_out = sum(_without_other_split(records.left_out).values())
    lines = [
        (
            "documents",
            f"{manifest.num_documents:,}, of {_span_text(lengths)}, mean {mean:,.1f}",
        ),
        ("tokens", f"{manifest.num_tokens:,} as {manifest.dtype}, {_text_per_token(manifest):.2f} bytes of text each"),
        ("on disk", f"{bytes_text(manifest.num_bytes)} in {counted(manifest.num_shards, 'shard')}"),
        ("tokenizer", _tokenizer_text(manifest.tokenizer)),
        ("sources", _sources_text(manifest, sources)),
        ("settings", _settings_text(manifest.build)),
        (
            "records",
            f"{records.read:,} read = {records.written:,} written"
            + "".join(f" + {n:,} {reason}" for reason, n in records.left_out.items() if reason in _OTHER_SPLIT)
            + f" + {num_left_out:,} left out"
            + (f" ({_reasons_text(_without_other_split(records.left_out))})" if num_left_out else ""),
        ),
    ]
    lines += _left_out_lines(manifest, sources, width=width)
    if records.with_special_text:
        spell = (
            "1 document spells" if records.with_special_text == 1 else f"{records.with_special_text:,} documents spell"
        )
        lines.append(("specials", f"{spell} a special token, which became ordinary ids"))
    if names.REJECTS in manifest.files:
        size = bytes_text(manifest.files[names.REJECTS].num_bytes)
        lines.append(("rejects", f"{names.REJECTS} lists every bad record and input that was left out ({size})"))
    lines += [("content", manifest.fingerprints.content), ("recipe", manifest.fingerprints.recipe)]
    return lines


def summary_json(manifest: Manifest, sources: Sequence[SourceInfo] = ()) -> dict[str, Any]:
    """The summary as plain values. Argument as in `summary_text`."""
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
        "text_bytes_per_token": _text_per_token(manifest),
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
                for source in _most_left_out(sources)[:_WORST_SOURCES]
            ],
        },
        "records": msgspec.to_builtins(manifest.records),
        "rejects": None if rejects is None else {"file": names.REJECTS, "bytes": rejects.num_bytes},
        "fingerprints": msgspec.to_builtins(manifest.fingerprints),
    }


def _span_text(lengths: DocumentLengths) -> str:
    longest = counted(lengths.longest, "token")
    return longest if lengths.shortest == lengths.longest else f"{lengths.shortest:,} to {longest}"


def _text_per_token(manifest: Manifest) -> float:
    return manifest.text_bytes / manifest.num_tokens


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


def _left_out_lines(manifest: Manifest, sources: Sequence[SourceInfo], *, width: int) -> list[tuple[str, str]]:
    worst = _most_left_out(sources)
    lines = []
    for source in worst[:_WORST_SOURCES]:
        label = shorten(printable(source_label(manifest, source)), max(20, width // 2))
        left_out = _without_other_split(source.left_out)
        count, reasons = sum(left_out.values()), _reasons_text(left_out)
        lines.append(("", f"{label}: {count:,} of {source.records_read:,} left out ({reasons})"))
    if len(worst) > _WORST_SOURCES:
        lines.append(("", f"and records of {counted(len(worst) - _WORST_SOURCES, 'more file')}"))
    return lines


def _most_left_out(sources: Sequence[SourceInfo]) -> list[SourceInfo]:
    """The sources with records left out, most first; equal ones in input order."""
    counts = [(sum(_without_other_split(source.left_out).values()), source) for source in sources if source.left_out]
    return [source for count, source in sorted(counts, key=lambda pair: -pair[0]) if count]


def _without_other_split(left_out: Mapping[str, int]) -> dict[str, int]:
    """What is in neither corpus of a build with a validation split."""
    return {reason: count for reason, count in left_out.items() if reason not in _OTHER_SPLIT}


def _reasons_text(left_out: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {reason}" for reason, count in sorted(left_out.items(), key=lambda item: -item[1]))
