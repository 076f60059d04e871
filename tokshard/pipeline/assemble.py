"""From receipts to a corpus: the tables, the rejects file, the report, and last of all the manifest."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from tokshard.errors import BuildError
from tokshard.format import names
from tokshard.format.files import HashingFile
from tokshard.format.manifest import (
    IN_OTHER_SPLIT,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.schema import FORMAT_VERSION, token_dtype
from tokshard.format.tables import SHARD_TABLE_SCHEMA, SHARDS_PER_BATCH, SOURCE_TABLE_SCHEMA, write_table
from tokshard.pipeline.corpus_tables import SOURCES_PER_BATCH, rejects, source_rows, table_rows
from tokshard.pipeline.resolve import ResolvedBuild
from tokshard.pipeline.sources.discover import Discovery
from tokshard.pipeline.sources.inputs import TOKENS, display_path
from tokshard.pipeline.stage import Outcome
from tokshard.pipeline.tasks.duplicates import write_text_hashes
from tokshard.pipeline.totals import Totals
from tokshard.pipeline.workspace.output_directory import claim
from tokshard.pipeline.workspace.places import Output
from tokshard.store import Store, present, written


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledCorpus:
    """A corpus without its manifest.

    Args:
        shards: names and sizes of its shards, as their receipts say.
    """

    output: Output
    manifest: Manifest
    shards: Mapping[str, int]


def assemble(resolved: ResolvedBuild, outcome: Outcome, number: int) -> AssembledCorpus:
    """Turn the receipts of a finished build into a corpus; the manifest is written by `publish`.

    Args:
        number: which of the build's corpora.

    Raises:
        BuildError: a receipt or rejects file is damaged, or no document was written.
        UsageError: a file is in the way that no build wrote.
        OSError: the output directory takes no more.
    """
    workspace, inputs = resolved.context.workspace, resolved.found.inputs
    output = resolved.context.outputs[number]
    out = output.store
    claim(workspace, output)
    totals = Totals(number, len(inputs), outcome.bad_inputs)
    files: dict[str, FileFacts] = {}
    with side_file(out, names.STRIDE_HASHES, files) as hashes, side_file(out, names.SHARD_TABLE, files) as file:
        rows = table_rows(workspace, (receipt.key for receipt in outcome.receipts), totals, hashes)
        write_table(file, SHARD_TABLE_SCHEMA, rows, rows_per_batch=SHARDS_PER_BATCH)
    if not totals.documents and not _may_be_empty(totals, output):
        out.delete(names.SHARD_TABLE, names.STRIDE_HASHES)
        raise _nothing_written(totals, output, resolved.options.reads)
    with side_file(out, names.SOURCE_TABLE, files) as file:
        write_table(file, SOURCE_TABLE_SCHEMA, source_rows(inputs, totals), rows_per_batch=SOURCES_PER_BATCH)
    with side_file(out, names.TOKENIZER, files) as file:
        file.write(resolved.read.content)
    _write_rejects(out, rejects(workspace, totals, outcome.bad_inputs), files, resolved.found)
    # with a limit, some texts became no document; of a split, the first corpus keeps those of both
    if outcome.texts and resolved.options.limit is None and not number:
        with side_file(out, names.HASHES, files) as file:
            write_text_hashes(workspace.store, outcome.texts, file)
    else:
        out.delete(names.HASHES)
    return AssembledCorpus(
        output=output, manifest=_manifest(resolved, output, totals, files), shards=totals.shard_sizes
    )


@contextlib.contextmanager
def side_file(out: Store, name: str, files: dict[str, FileFacts]) -> Iterator[HashingFile]:
    """A file next to the shards; what the manifest says of it is added to `files` when it is written."""
    with written(out, name) as file:
        hashing = HashingFile(file)
        yield hashing
    files[name] = FileFacts(num_bytes=hashing.tell(), sha256=hashing.digest().hex())


def check_shards(corpus: AssembledCorpus) -> None:
    """Look that every shard of an assembled corpus is there, as long as its receipt says.

    Raises:
        BuildError: one is gone or has another size.
    """
    output = corpus.output
    found = output.shard_sizes()
    for name, num_bytes in corpus.shards.items():
        if found.get(name) != num_bytes:
            what = "is gone" if name not in found else f"has {found[name]:,} bytes, and had {num_bytes:,}"
            raise BuildError(
                f"{output.store.where(name)} {what} since its task was done",
                hint="run the same command again: the task that wrote it runs again",
            )


def publish(corpus: AssembledCorpus, report: Mapping[str, Any] | None = None) -> None:
    """Remove shards that belong to no receipt, then write the report and the manifest: the corpus is complete.

    Args:
        report: None if there is none.
    """
    out = corpus.output.store
    found = filter(names.is_shard_name, present(out))
    # of a task past the limit, or of an attempt that left no receipt
    out.delete(*(set(found) - corpus.shards.keys()))
    if report is not None:
        content = json.dumps(report, indent=2, ensure_ascii=False).encode() + b"\n"
        out.put(names.REPORT, content)  # the names before it are durable then, too
    out.put(names.MANIFEST, encode_manifest(corpus.manifest))


def _write_rejects(
    out: Store,
    left_out: Iterator[dict[str, Any]],
    files: dict[str, FileFacts],
    found: Discovery,
) -> None:
    """A line of JSON for each record or input that was left out, which names its source; no file if there was none."""
    first = next(left_out, None)
    if first is None:
        out.delete(names.REJECTS)
        return
    with side_file(out, names.REJECTS, files) as file:
        for reject in itertools.chain([first], left_out):
            source = found.inputs[reject["source"]]
            reject["source"] = display_path(found.arguments[source.argument], source.path)
            file.write(json.dumps(reject, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _manifest(resolved: ResolvedBuild, output: Output, totals: Totals, files: Mapping[str, FileFacts]) -> Manifest:
    tokenizer, inputs = resolved.read.info, resolved.found.inputs
    config = msgspec.structs.replace(resolved.settings.config, split=output.split or None)
    return Manifest(
        format_version=FORMAT_VERSION,
        num_documents=totals.documents,
        num_tokens=totals.tokens,
        num_shards=len(totals.shard_sizes),
        num_bytes=sum(totals.shard_sizes.values()),
        text_bytes=totals.text_bytes,
        dtype=token_dtype(tokenizer.vocab_size),
        columns=dict(resolved.context.columns),
        fingerprints=Fingerprints(
            content=content_fingerprint(
                totals.content,
                num_documents=totals.documents,
                eos_id=tokenizer.eos_id,
                bos_id=tokenizer.bos_id,
            ),
            recipe=recipe_fingerprint(
                config, tokenizer, ((source.argument, source.path, source.num_bytes) for source in inputs)
            ),
        ),
        tokenizer=tokenizer,
        arguments=list(resolved.found.arguments),
        build=config,
        records=Records(
            read=totals.records_read,
            written=totals.documents,
            left_out=totals.left_out,
            with_special_text=totals.with_special_text,
        ),
        document_lengths=DocumentLengths(
            shortest=totals.shortest, longest=totals.longest, counts=totals.lengths.tolist()
        ),
        files=dict(files),
    )


def _may_be_empty(totals: Totals, output: Output) -> bool:
    """Whether a corpus of a validation split grows by nothing because all new documents are of the other one."""
    return bool(output.generation) and bool(output.split) and IN_OTHER_SPLIT[output.split] in totals.left_out


def _nothing_written(totals: Totals, output: Output, reads: str) -> BuildError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in totals.left_out.items())
    found = f"{totals.records_read:,} records read" + (f", {reasons}" if reasons else "")
    if output.split and IN_OTHER_SPLIT[output.split] in totals.left_out:
        return BuildError(
            f"the {output.split} split got no document: {found}",
            hint="change --validation-fraction or leave it out, and start over with --force",
        )
    if output.generation:
        return BuildError(
            f"the append wrote no document: {found}",
            hint="check the sources, or append them together with others: start over with --append --force",
        )
    return BuildError(
        f"the build wrote no document: {found}",
        hint=f"check the sources and {'--format' if reads == TOKENS else '--text-field'}, and start over with --force",
    )
