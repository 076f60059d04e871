"""Corpora of any size and document length, written through the format room; made once, kept in a folder."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa

from tests.corpora import EOS, TOKENIZER, tokenizer_info
from tokshard.format import names
from tokshard.format.content import join_contents
from tokshard.format.files import file_sha256
from tokshard.format.manifest import (
    BuildConfig,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Manifest,
    Records,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
    shard_schema,
)
from tokshard.format.opening import open_corpus
from tokshard.format.schema import FORMAT_VERSION, token_dtype
from tokshard.format.stride_hashes import stride_hash_bytes
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    WRITTEN_SHARD_SCHEMA,
    Table,
    contents,
    shard_rows,
    write_table,
)
from tokshard.format.writer import ShardWriter
from tokshard.store import open_store, written

SHARD_TOKENS = 32_000_000
_CALL_TOKENS = 4_000_000
_SIGMA = 0.8  # of the logarithm of a length: the longest of a million documents has about 30 times the mean


def corpus(
    folder: Path, *, num_tokens: int, document_tokens: int, number: int = 0, shard_tokens: int = SHARD_TOKENS
) -> Path:
    """The corpus of these sizes, which is written if the folder has none.

    Args:
        num_tokens: at least so many.
        document_tokens: mean; lengths are log-normal.
        number: tells corpora of the same sizes apart.
    """
    directory = folder / f"{document_tokens}-tokens-{num_tokens}-{number}"
    if shard_tokens != SHARD_TOKENS:
        directory = directory.with_name(f"{directory.name}-by-{shard_tokens}")
    if not (directory / names.MANIFEST).exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        _write(directory, num_tokens, document_tokens, seed=(num_tokens, document_tokens, number), most=shard_tokens)
    return directory


def repeated(folder: Path, one: Path, *, num_shards: int) -> Path:
    """The tables and the manifest of a corpus whose shards all have the bytes of the only shard of another corpus.

    They name shards that are not there: a server that gives each the bytes of that one serves a whole corpus.
    """
    directory = folder / f"{num_shards}-times-{one.name}"
    if not (directory / names.MANIFEST).exists():
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        with open_corpus(one) as corpus:
            (row,) = Table(corpus.store, names.SHARD_TABLE, SHARD_TABLE_SCHEMA).batches()
            hashes, manifest = corpus.stride_hashes(0), corpus.manifest
        row = pa.record_batch([*row.columns, pa.array([hashes])], WRITTEN_SHARD_SCHEMA)
        rows = row.take(pa.array([0] * num_shards))
        all_names = [names.shard_name(generation=0, first_input=i, segment=0, part=0) for i in range(num_shards)]
        rows = rows.set_column(0, "name", pa.array(all_names)).cast(WRITTEN_SHARD_SCHEMA)
        lengths = msgspec.structs.replace(
            manifest.document_lengths, counts=[num_shards * n for n in manifest.document_lengths.counts]
        )
        _finish(directory, rows, num_shards * manifest.num_tokens, num_shards * manifest.num_documents, lengths)
    return directory


def _write(directory: Path, num_tokens: int, document_tokens: int, *, seed: tuple[int, ...], most: int) -> None:
    tokenizer = tokenizer_info(TOKENIZER.read_bytes())
    dtype = token_dtype(tokenizer.vocab_size)
    rng = np.random.default_rng(seed)
    ids = rng.integers(EOS + 1, tokenizer.vocab_size, 3 * _CALL_TOKENS + 200 * document_tokens, np.dtype(dtype))
    written, num_documents, shortest, longest = 0, 0, 1 << 40, 0
    counts = np.zeros(64, np.int64)
    with ShardWriter(
        store=open_store(directory),
        name=lambda part: names.shard_name(generation=0, first_input=0, segment=0, part=part),
        schema=shard_schema(tokenizer, {}),
        shard_tokens=most,
    ) as writer:
        while written < num_tokens:
            lengths = _lengths(rng, min(_CALL_TOKENS, num_tokens - written), document_tokens)
            ends = np.cumsum(lengths)
            first = int(rng.integers(0, len(ids) - int(ends[-1])))
            tokens = ids[first : first + int(ends[-1])].copy()
            tokens[ends - 1] = EOS
            records = np.arange(num_documents, num_documents + len(lengths))
            writer.extend(tokens, ends, source=0, records=records, columns={})
            written, num_documents = written + len(tokens), num_documents + len(lengths)
            shortest, longest = min(shortest, int(lengths.min())), max(longest, int(lengths.max()))
            counts += np.bincount(np.log2(lengths).astype(np.int64), minlength=64)
        rows = writer.finish()
    lengths_of_all = DocumentLengths(shortest=shortest, longest=longest, counts=np.trim_zeros(counts, "b").tolist())
    _finish(directory, rows, written, num_documents, lengths_of_all)


def _lengths(rng: np.random.Generator, num_tokens: int, mean: int) -> np.ndarray:
    """Lengths of documents that together have about `num_tokens` tokens, delimiters included."""
    found = rng.lognormal(np.log(mean) - _SIGMA**2 / 2, _SIGMA, max(1, round(num_tokens / mean)))
    return np.clip(np.rint(found), 2, 100 * mean).astype(np.int64)


def _finish(
    directory: Path, rows: pa.RecordBatch, num_tokens: int, num_documents: int, lengths: DocumentLengths
) -> None:
    """The tables and the manifest, which make the corpus complete."""
    content = TOKENIZER.read_bytes()
    tokenizer = tokenizer_info(content)
    values = {
        "argument": 0,
        "path": "",
        "num_bytes": num_tokens,
        "records_read": num_documents,
        "documents": num_documents,
        "tokens": num_tokens,
        "text_bytes": 4 * num_tokens,
        "left_out": [],
    }
    sources = pa.record_batch(
        [pa.array([values[item.name]], type=item.type) for item in SOURCE_TABLE_SCHEMA], schema=SOURCE_TABLE_SCHEMA
    )
    with written(open_store(directory), names.SHARD_TABLE) as file:
        write_table(file, SHARD_TABLE_SCHEMA, [shard_rows(rows)], rows_per_batch=SHARDS_PER_BATCH)
    open_store(directory).put(names.STRIDE_HASHES, stride_hash_bytes(rows).to_pybytes())
    with written(open_store(directory), names.SOURCE_TABLE) as file:
        write_table(file, SOURCE_TABLE_SCHEMA, [sources], rows_per_batch=65_536)
    open_store(directory).put(names.TOKENIZER, content)
    build = BuildConfig(
        text_field="text",
        text_unit="file",
        id_field=None,
        keep_field={},
        format=None,
        shard_tokens=SHARD_TOKENS,
        task_bytes=64 << 20,
        max_document_bytes=16 << 20,
        max_documents=None,
    )
    dtype = token_dtype(tokenizer.vocab_size)
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        num_documents=num_documents,
        num_tokens=num_tokens,
        num_shards=rows.num_rows,
        num_bytes=sum(rows.column("num_bytes").to_pylist()),
        text_bytes=4 * num_tokens,
        dtype=dtype,
        columns={},
        fingerprints=Fingerprints(
            content=content_fingerprint(join_contents(contents(rows)), tokenizer, {}),
            recipe=recipe_fingerprint(build, tokenizer, [(0, "", num_tokens)]),
        ),
        tokenizer=tokenizer,
        arguments=["synthetic"],
        build=build,
        records=Records(read=num_documents, written=num_documents, left_out={}),
        document_lengths=lengths,
        files={
            name: FileFacts(
                num_bytes=(directory / name).stat().st_size, sha256=file_sha256(open_store(directory), name)
            )
            for name in (names.SHARD_TABLE, names.STRIDE_HASHES, names.SOURCE_TABLE, names.TOKENIZER)
        },
    )
    open_store(directory).put(names.MANIFEST, encode_manifest(manifest))
