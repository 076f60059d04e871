"""The corpus that a copy makes, from the receipts of its tasks: tables, and last of all the manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
import pyarrow as pa

from tokshard import __version__
from tokshard.errors import RESTORE, DamagedCorpusError, UsageError
from tokshard.format import names
from tokshard.format.arrays import table_batch
from tokshard.format.corpus import Corpus
from tokshard.format.manifest import (
    BuildConfig,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    content_fingerprint,
    recipe_fingerprint,
)
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    SourceInfo,
    write_table,
)
from tokshard.pipeline.assemble import AssembledCorpus, check_shards, publish, side_file
from tokshard.pipeline.corpus_tables import SOURCES_PER_BATCH, table_rows
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.totals import Totals
from tokshard.pipeline.workspace.output_directory import claim
from tokshard.pipeline.workspace.places import Output, Workspace
from tokshard.pipeline.workspace.receipts import receipts_of

NOT_COPIED = "not copied"
"""Reason for a record that became a document of the corpora, and not of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a copy takes over from its corpora.

    Args:
        sources, arguments: of all of them together.
        roots: where each argument was, so that an append refuses what is there already; empty if a report is gone.
        columns: kept columns of the copy.
    """

    first: Corpus
    sources: Sequence[SourceInfo]
    arguments: Sequence[str]
    roots: Sequence[str]
    columns: Mapping[str, str]
    build: BuildConfig
    with_special_text: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The receipts of a copy, by their keys.

    Args:
        shards: of the tasks that wrote shards, in order.
        counted: of the other tasks that read the corpora: these count the documents, which later tasks do not.
        counting: the workspace of those.
    """

    shards: Sequence[Key]
    counted: Sequence[Key]
    counting: Workspace


def commit_copy(workspace: Workspace, output: Output, origin: Origin, made: Written) -> Manifest:
    """Write the tables and the tokenizer, and the manifest, which makes the corpus complete.

    Raises:
        UsageError: no document was taken, or a file is in the way that no build wrote.
        BuildError: a shard is gone.
    """
    out = output.store
    claim(workspace, output)
    totals = Totals(0, len(origin.sources), ())
    for receipt, _ in receipts_of(made.counting, made.counted):
        totals.add(receipt)
    files: dict[str, FileFacts] = {}
    with side_file(out, names.STRIDE_HASHES, files) as hashes, side_file(out, names.SHARD_TABLE, files) as file:
        rows = table_rows(workspace, made.shards, totals, hashes)
        write_table(file, SHARD_TABLE_SCHEMA, rows, rows_per_batch=SHARDS_PER_BATCH)
    if not totals.documents:
        out.delete(names.SHARD_TABLE, names.STRIDE_HASHES)
        workspace.remove()
        raise UsageError("no document meets the conditions", hint="give others, or leave them out")
    sources = [_copied(source, *totals.written_of(index)) for index, source in enumerate(origin.sources)]
    with side_file(out, names.SOURCE_TABLE, files) as file:
        write_table(file, SOURCE_TABLE_SCHEMA, _source_rows(sources), rows_per_batch=SOURCES_PER_BATCH)
    with side_file(out, names.TOKENIZER, files) as file:
        file.write(_tokenizer(origin.first))
    made_of_it = _manifest(origin, sources, totals, files)
    corpus = AssembledCorpus(output=output, manifest=made_of_it, shards=totals.shard_sizes)
    check_shards(corpus)
    publish(corpus, {"tokshard": __version__, "roots": list(origin.roots)})
    return corpus.manifest


def _copied(source: SourceInfo, documents: int, tokens: int) -> SourceInfo:
    """What the source table of the copy says of a source: what was not copied is left out."""
    if documents == source.documents:
        return source
    left_out = {**source.left_out, NOT_COPIED: source.left_out.get(NOT_COPIED, 0) + source.documents - documents}
    text_bytes = source.text_bytes * tokens // max(1, source.tokens)  # no table has those of each document
    return replace(
        source, documents=documents, tokens=tokens, text_bytes=text_bytes, left_out=dict(sorted(left_out.items()))
    )


def _source_rows(sources: Sequence[SourceInfo]) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(sources), SOURCES_PER_BATCH):
        part = sources[start : start + SOURCES_PER_BATCH]
        columns = {field.name: [getattr(source, field.name) for source in part] for field in SOURCE_TABLE_SCHEMA}
        yield table_batch(columns, SOURCE_TABLE_SCHEMA)


def _tokenizer(corpus: Corpus) -> bytes:
    try:
        return corpus.store.get(names.TOKENIZER)
    except FileNotFoundError:
        raise DamagedCorpusError(f"{corpus.store.where(names.TOKENIZER)} is missing", hint=RESTORE) from None


def _manifest(
    origin: Origin, sources: Sequence[SourceInfo], totals: Totals, files: Mapping[str, FileFacts]
) -> Manifest:
    first = origin.first.manifest
    left_out: Counter[str] = Counter()
    for source in sources:
        left_out.update(source.left_out)
    return msgspec.structs.replace(
        first,
        num_documents=totals.documents,
        num_tokens=totals.tokens,
        num_shards=len(totals.shard_sizes),
        num_bytes=sum(totals.shard_sizes.values()),
        text_bytes=sum(source.text_bytes for source in sources),
        columns=dict(origin.columns),
        fingerprints=Fingerprints(
            content=content_fingerprint(
                totals.content,
                num_documents=totals.documents,
                eos_id=first.tokenizer.eos_id,
                bos_id=first.tokenizer.bos_id,
            ),
            recipe=recipe_fingerprint(
                origin.build, first.tokenizer, ((one.argument, one.path, one.num_bytes) for one in sources)
            ),
        ),
        arguments=list(origin.arguments),
        build=origin.build,
        records=Records(
            read=sum(source.records_read for source in sources),
            written=totals.documents,
            left_out=dict(sorted(left_out.items())),
            with_special_text=origin.with_special_text,
        ),
        document_lengths=DocumentLengths(
            shortest=totals.shortest, longest=totals.longest, counts=totals.lengths.tolist()
        ),
        files=dict(files),
        generation=None,
    )
