"""From receipts to a corpus: the tables, the rejects file, the report, and last of all the manifest."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import pyarrow as pa

from tokshard.errors import BuildError, UsageError
from tokshard.format import names
from tokshard.format.arrays import number_array, table_batch
from tokshard.format.content import TokenHash
from tokshard.format.files import HashingFile
from tokshard.format.manifest import (
    DAMAGED_INPUT,
    IN_OTHER_SPLIT,
    BuildConfig,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    TokenizerInfo,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
)
from tokshard.format.schema import FORMAT_VERSION, token_dtype
from tokshard.format.stride_hashes import stride_hash_bytes
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    shard_rows,
    write_table,
)
from tokshard.pipeline.sources.inputs import Input, display_path
from tokshard.pipeline.tasks.duplicates import write_text_hashes
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.tasks.rejects import read_rejects
from tokshard.pipeline.tasks.sorted_rows import Run
from tokshard.pipeline.totals import Totals
from tokshard.pipeline.workspace.places import ASSEMBLED, Output, Workspace
from tokshard.pipeline.workspace.receipts import receipts_of
from tokshard.pipeline.workspace.settings import load_names, save_names
from tokshard.store import Store, present, written

_SOURCES_PER_BATCH = 65_536


@dataclass(frozen=True, slots=True, kw_only=True)
class AssembledCorpus:
    """A corpus without its manifest.

    Args:
        shards: names and sizes of its shards, as their receipts say.
    """

    output: Output
    manifest: Manifest
    shards: Mapping[str, int]


def assemble(
    workspace: Workspace,
    keys: Sequence[Key],
    *,
    number: int,
    output: Output,
    config: BuildConfig,
    columns: Mapping[str, str],
    tokenizer: TokenizerInfo,
    tokenizer_content: bytes,
    inputs: Sequence[Input],
    arguments: Sequence[str],
    bad_inputs: Mapping[int, str],
    texts: Sequence[Run] = (),
) -> AssembledCorpus:
    """Turn the receipts of a finished build into a corpus; the manifest is written by `publish`.

    Args:
        keys: of the receipts that belong to the corpus, in order.
        number, output: which of the build's corpora.
        bad_inputs: index of each input that was left out whole, and what is wrong with it.
        texts: the hashes to keep of all texts of the build.

    Raises:
        BuildError: a receipt or rejects file is damaged, or no document was written.
        UsageError: a file is in the way that no build wrote.
        OSError: the output directory takes no more.
    """
    out = output.store
    _claim(workspace, output)
    totals = Totals(number, len(inputs), bad_inputs)
    files: dict[str, FileFacts] = {}
    with _side_file(out, names.STRIDE_HASHES, files) as hashes, _side_file(out, names.SHARD_TABLE, files) as file:
        rows = _shard_rows(workspace, keys, totals, hashes)
        write_table(file, SHARD_TABLE_SCHEMA, rows, rows_per_batch=SHARDS_PER_BATCH)
    if not totals.documents:
        out.delete(names.SHARD_TABLE, names.STRIDE_HASHES)
        raise _nothing_written(totals, output)
    with _side_file(out, names.SOURCE_TABLE, files) as file:
        write_table(file, SOURCE_TABLE_SCHEMA, _source_rows(inputs, totals), rows_per_batch=_SOURCES_PER_BATCH)
    with _side_file(out, names.TOKENIZER, files) as file:
        file.write(tokenizer_content)
    damaged = (
        {"source": index, "record": None, "reason": DAMAGED_INPUT, "detail": problem}
        for index, problem in sorted(bad_inputs.items())
    )
    rejects = heapq.merge(_rejects(workspace, totals), damaged, key=itemgetter("source"))
    _write_rejects(out, rejects, files, inputs, arguments)
    _write_text_hashes(workspace, out, texts, files)
    manifest = _manifest(
        totals,
        inputs,
        config=config,
        columns=columns,
        tokenizer=tokenizer,
        arguments=arguments,
        files=files,
    )
    return AssembledCorpus(output=output, manifest=manifest, shards=totals.shard_sizes)


@contextlib.contextmanager
def _side_file(out: Store, name: str, files: dict[str, FileFacts]) -> Iterator[HashingFile]:
    """A file next to the shards; what the manifest says of it is added to `files` when it is written."""
    with written(out, name) as file:
        hashing = HashingFile(file)
        yield hashing
    files[name] = FileFacts(num_bytes=hashing.tell(), sha256=hashing.digest().hex())


def publish(corpus: AssembledCorpus, report: Mapping[str, Any]) -> None:
    """Remove shards that belong to no receipt, then write the report and the manifest: the corpus is complete."""
    out = corpus.output.store
    found = filter(names.is_shard_name, present(out))
    # of a task past the limit, or of an attempt that left no receipt
    out.delete(*(set(found) - corpus.shards.keys()))
    content = json.dumps(report, indent=2, ensure_ascii=False).encode() + b"\n"
    out.put(names.REPORT, content)  # the names before it are durable then, too
    out.put(names.MANIFEST, encode_manifest(corpus.manifest))


def _claim(workspace: Workspace, output: Output) -> None:
    """Write down which files of an output are the build's, before the first is written: `--force` removes no others.

    Raises:
        BuildError: there is such a file, and the build did not write it.
    """
    known = load_names(workspace, ASSEMBLED)
    files = set(map(output.name_of, names.SIDE_FILES))
    if files <= known:
        return
    for name in sorted(names.SIDE_FILES & present(output.store)):
        if output.name_of(name) not in known:
            raise in_the_way(output.store.where(name))
    save_names(workspace, ASSEMBLED, known | files)


def in_the_way(path: str) -> UsageError:
    """The error for a file that a build would write over, though no build wrote it."""
    return UsageError(
        f"{path} was not written by a build, and the build would replace it",
        hint="move it away and run the same command again, or give another --out",
    )


def check_shards(corpus: AssembledCorpus) -> None:
    """Look that every shard of an assembled corpus is there, as long as its receipt says.

    Raises:
        BuildError: one is gone or has another size.
    """
    output = corpus.output
    found = shard_sizes(output.store)
    for name, num_bytes in corpus.shards.items():
        if found.get(name) != num_bytes:
            what = "is gone" if name not in found else f"has {found[name]:,} bytes, and had {num_bytes:,}"
            raise BuildError(
                f"{output.store.where(name)} {what} since its task was done",
                hint="run the same command again: the task that wrote it runs again",
            )


def shard_sizes(store: Store) -> dict[str, int]:
    """The shards of a corpus, with their sizes."""
    return {entry.name: entry.size for entry in store.list() if names.is_shard_name(entry.name)}


def _shard_rows(
    workspace: Workspace, keys: Sequence[Key], totals: Totals, hashes: HashingFile
) -> Iterator[pa.RecordBatch]:
    """The rows of the shard table, task by task; meanwhile the stride hashes of their shards go into a file."""
    columns = ("name", "num_bytes", "tokens_hash", "num_tokens")
    for receipt, shards in receipts_of(workspace, keys):
        written_shards = shards[totals.number]
        rows = shard_rows(written_shards)
        if rows.num_rows:
            hashes.write(stride_hash_bytes(written_shards))
        totals.add(receipt)
        for name, num_bytes, content, tokens in zip(
            *(rows.column(column).to_pylist() for column in columns), strict=True
        ):
            totals.shard_sizes[name] = num_bytes
            totals.content = totals.content.then(TokenHash.from_bytes(content, tokens))
        before = totals.records_before.get(receipt.key)
        yield rows if before is None else _with_record_base(rows, before)


def _with_record_base(rows: pa.RecordBatch, before: Mapping[int, int]) -> pa.RecordBatch:
    """Record numbers counted from the start of the source rather than of the task."""
    sources, records = rows.column("run_source"), rows.column("run_record")
    values = records.values.to_numpy().copy()
    of_value = sources.values.to_numpy()
    for source, base in before.items():
        values[of_value == source] += base
    kind = rows.schema.field("run_record").type
    moved = pa.LargeListArray.from_arrays(records.offsets, number_array(values), type=kind)
    return rows.set_column(rows.schema.get_field_index("run_record"), rows.schema.field("run_record"), moved)


def _source_rows(inputs: Sequence[Input], totals: Totals) -> Iterator[pa.RecordBatch]:
    for start in range(0, len(inputs), _SOURCES_PER_BATCH):
        stop = min(start + _SOURCES_PER_BATCH, len(inputs))
        part = [totals.source(inputs[index]) for index in range(start, stop)]
        columns = {field.name: [getattr(source, field.name) for source in part] for field in SOURCE_TABLE_SCHEMA}
        yield table_batch(columns, SOURCE_TABLE_SCHEMA)


def _write_text_hashes(workspace: Workspace, out: Store, texts: Sequence[Run], files: dict[str, FileFacts]) -> None:
    """The hashes of the texts of the build; no file if none are kept."""
    if not texts:
        out.delete(names.HASHES)
        return
    with _side_file(out, names.HASHES, files) as file:
        write_text_hashes(workspace.store, texts, file)


def _write_rejects(
    out: Store,
    rejects: Iterator[dict[str, Any]],
    files: dict[str, FileFacts],
    inputs: Sequence[Input],
    arguments: Sequence[str],
) -> None:
    """One line per bad record or damaged input that was left out, in input order; no file if there were none.

    Source, record counted from 1 (null for an input), reason, detail.
    """
    first = next(rejects, None)
    if first is None:
        out.delete(names.REJECTS)
        return
    with _side_file(out, names.REJECTS, files) as file:
        for reject in itertools.chain([first], rejects):
            source = inputs[reject["source"]]
            reject["source"] = display_path(arguments[source.argument], source.path)
            file.write(json.dumps(reject, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n")


def _rejects(workspace: Workspace, totals: Totals) -> Iterator[dict[str, Any]]:
    """What the tasks listed, with records counted from the start of their input."""
    for key in totals.with_rejects:
        before = totals.records_before.get(key, {})
        for reject in read_rejects(workspace, key):
            reject["record"] += before.get(reject["source"], 0) + 1
            yield reject


def _manifest(
    totals: Totals,
    inputs: Sequence[Input],
    *,
    config: BuildConfig,
    columns: Mapping[str, str],
    tokenizer: TokenizerInfo,
    arguments: Sequence[str],
    files: Mapping[str, FileFacts],
) -> Manifest:
    dtype = token_dtype(tokenizer.vocab_size)
    return Manifest(
        format_version=FORMAT_VERSION,
        num_documents=totals.documents,
        num_tokens=totals.tokens,
        num_shards=len(totals.shard_sizes),
        num_bytes=sum(totals.shard_sizes.values()),
        text_bytes=totals.text_bytes,
        dtype=dtype,
        columns=dict(columns),
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
        arguments=list(arguments),
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


def _nothing_written(totals: Totals, output: Output) -> BuildError:
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in totals.left_out.items())
    found = f"{totals.records_read:,} records read" + (f", {reasons}" if reasons else "")
    if output.split and IN_OTHER_SPLIT[output.split] in totals.left_out:
        return BuildError(
            f"the {output.split} split got no document: {found}",
            hint="append more sources at once: start over with --append --force"
            if output.generation
            else "change --validation-fraction or leave it out, and start over with --force",
        )
    return BuildError(
        f"the build wrote no document: {found}",
        hint="check the sources and --text-field, and start over with --force",
    )
