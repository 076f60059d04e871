"""Small corpora, written through the public functions of the format room."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import ipc

from tokshard.format import names
from tokshard.format.content import Content, TokenHash, hash_tokens, join_contents
from tokshard.format.files import file_sha256
from tokshard.format.loss import LOSS, WEIGHTS, has_spans, kept_columns
from tokshard.format.manifest import (
    BuildConfig,
    DocumentLengths,
    FileFacts,
    Fingerprints,
    Generation,
    Manifest,
    Records,
    TokenizerInfo,
    canonical_json,
    content_fingerprint,
    encode_manifest,
    recipe_fingerprint,
    shard_schema,
)
from tokshard.format.opening import open_corpus
from tokshard.format.schema import FORMAT_VERSION, token_dtype
from tokshard.format.stride_hashes import StrideHasher, group_hashes, stride_hash_bytes
from tokshard.format.tables import (
    SHARD_TABLE_SCHEMA,
    SHARDS_PER_BATCH,
    SOURCE_TABLE_SCHEMA,
    contents,
    shard_rows,
    write_table,
)
from tokshard.format.writer import ShardWriter
from tokshard.store import open_store, written

TOKENIZER = Path(__file__).parents[1] / "recipes" / "tokenizer" / "tokenizer.json"
EOS = 0
"""Id of the delimiter of `TOKENIZER`."""

TINY_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [
            {
                "id": 0,
                "content": "<eos>",
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {"<eos>": 0, "one": 1, "two": 2, "three": 3}, "unk_token": "one"},
    },
    indent=1,
).encode()
"""A ``tokenizer.json`` of four words, for tests that copy or break it often."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """An input as a build would have read it.

    Args:
        documents: token ids of each document, delimiter included.
        records: record number of each document, counted from 0; default: no record was left out.
        metadata: kept column to one value per document.
        left_out: reason to count of the records that became no document.
    """

    documents: Sequence[Sequence[int]]
    path: str = ""
    records: Sequence[int] | None = None
    metadata: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    left_out: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_records(self) -> int:
        return len(self.documents) + sum(self.left_out.values())


def documents_of(lengths: Sequence[int], *, eos_id: int = EOS, vocab_size: int = 4) -> list[list[int]]:
    """Documents of these lengths, delimiter included, with ids that differ from place to place."""
    ids = [index for index in range(vocab_size) if index != eos_id]
    return [
        [ids[(7 * row + 3 * column) % len(ids)] for column in range(n - 1)] + [eos_id] for row, n in enumerate(lengths)
    ]


def loss_metadata(target_weights: Sequence[Sequence[float]]) -> dict[str, list[list[Any]]]:
    """Kept columns: the loss spans of documents whose tokens have these weights, and the weights of the spans."""
    spans: list[list[int]] = []
    weights: list[list[float]] = []
    for of_tokens in target_weights:
        stops = [at for at in range(1, len(of_tokens) + 1) if of_tokens[at - 1 : at] != of_tokens[at : at + 1]]
        found = [pair for pair in pairwise([0, *stops]) if of_tokens[pair[0]]]
        spans.append([bound for pair in found for bound in pair])
        weights.append([of_tokens[start] for start, _ in found])
    return {LOSS: spans, WEIGHTS: weights}


def write_corpus(
    directory: Path,
    documents: Sequence[Sequence[int]] = (),
    *,
    sources: Sequence[Source] = (),
    columns: Mapping[str, str] | None = None,
    shard_tokens: int = 1 << 28,
    tokenizer: bytes | None = None,
    eos: str | None = None,
    bos: str | None = None,
    rejects: bytes = b"",
    documents_per_call: int = 1 << 30,
    generation: int = 0,
) -> Path:
    """Write a complete corpus: `documents` as one source, or `sources`.

    Args:
        tokenizer: bytes of the ``tokenizer.json``; default: the quickstart's.
        eos: default: the first added token.
        documents_per_call: how many documents a call of `ShardWriter.extend` gets.
    """
    sources = sources or [Source(documents=documents)]
    content = TOKENIZER.read_bytes() if tokenizer is None else tokenizer
    info = tokenizer_info(content, eos=eos, bos=bos)
    columns = dict(columns or {})
    dtype = token_dtype(info.vocab_size)
    with ShardWriter(
        store=open_store(directory),
        name=lambda part: names.shard_name(generation=generation, first_input=0, segment=0, part=part),
        schema=shard_schema(info, columns),
        shard_tokens=shard_tokens,
    ) as writer:
        for index, source in enumerate(sources):
            _extend(writer, index, source, np.dtype(dtype), documents_per_call)
        rows = writer.finish()
    with written(open_store(directory), names.SHARD_TABLE) as file:
        write_table(file, SHARD_TABLE_SCHEMA, [shard_rows(rows)], rows_per_batch=SHARDS_PER_BATCH)
    open_store(directory).put(names.STRIDE_HASHES, stride_hash_bytes(rows).to_pybytes())
    with written(open_store(directory), names.SOURCE_TABLE) as file:
        write_table(file, SOURCE_TABLE_SCHEMA, [_source_rows(sources)], rows_per_batch=65_536)
    open_store(directory).put(names.TOKENIZER, content)
    files = [names.SHARD_TABLE, names.STRIDE_HASHES, names.SOURCE_TABLE, names.TOKENIZER]
    if rejects:
        open_store(directory).put(names.REJECTS, rejects)
        files.append(names.REJECTS)
    manifest = _manifest(directory, sources, rows, info, columns, shard_tokens, files)
    open_store(directory).put(names.MANIFEST, encode_manifest(manifest))
    return directory


def append_generation(
    directory: Path, documents: Sequence[Sequence[int]] = (), *, tokenizer: bytes = TINY_TOKENIZER, **options: Any
) -> Path:
    """Append documents to a corpus of this module; returns the folder of the generation."""
    with open_corpus(directory) as before:
        number = before.num_generations
    store = open_store(directory)
    folder = directory / names.generation_folder(number)
    write_corpus(folder, documents, tokenizer=tokenizer, generation=number, **options)
    with open_corpus(folder) as corpus:
        manifest, parts = corpus.manifest, [*before.shards.contents(), *corpus.shards.contents()]
    content = content_fingerprint(join_contents(parts), manifest.tokenizer, manifest.columns)
    previous = json.loads(store.get(names.in_folder(names.generation_folder(number - 1), names.MANIFEST)))
    generation = Generation(number=number, previous=previous["manifest_sha256"], content=content)
    open_store(folder).put(names.MANIFEST, encode_manifest(msgspec.structs.replace(manifest, generation=generation)))
    return folder


def rewrite_manifest(directory: Path, change: Any) -> None:
    """Apply `change` to the JSON of a manifest and give it the checksum that it then needs."""
    path = directory / names.MANIFEST
    fields = json.loads(path.read_bytes())
    del fields["manifest_sha256"]
    change(fields)
    head = json.dumps(fields, indent=2).removesuffix("\n}") + ",\n"
    path.write_text(f'{head}"manifest_sha256": "{hashlib.sha256(head.encode()).hexdigest()}"}}\n', encoding="utf-8")


def sign_files(directory: Path) -> None:
    """Make the manifest vouch for the files next to it as they are now."""

    def change(fields: dict[str, Any]) -> None:
        for name in fields["files"]:
            path = directory / name
            fields["files"][name] = {
                "num_bytes": path.stat().st_size,
                "sha256": file_sha256(open_store(directory), name),
            }

    rewrite_manifest(directory, change)


def sign_shards(directory: Path) -> None:
    """Make tables, stride hashes and manifest vouch for the shards as they are now."""
    shards = sorted(directory.glob("shard-*"))
    hashes = [bytes.fromhex(file_sha256(open_store(directory), path.name)) for path in shards]
    found_hashes: list[bytes] = []
    of_shards: list[Content] = []
    tokens = [_tokens(path) for path in shards]

    def change_rows(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for found, stored in zip(tokens, rows["tokens_hash"], strict=True):
            found_hashes.append(stored if found is None else hash_tokens(found).to_bytes())
        fields = ("num_documents", "num_tokens", "num_targets", "loss_hash")
        for tokens_hash, row in zip(found_hashes, zip(*(rows[name] for name in fields), strict=True), strict=True):
            num_documents, num_tokens, num_targets, loss = row
            of_shards.append(
                Content(
                    num_documents=num_documents,
                    tokens=TokenHash.from_bytes(tokens_hash, num_tokens),
                    num_targets=num_targets,
                    loss=TokenHash.from_bytes(loss, num_tokens),
                )
            )
        if all(found is not None for found in tokens):
            rows["group_hashes"] = [group_hashes(_stride_hashes(found)) for found in tokens]
        return {**rows, "sha256": hashes, "tokens_hash": found_hashes}

    if all(found is not None for found in tokens):
        (directory / names.STRIDE_HASHES).write_bytes(
            np.concatenate([_stride_hashes(found) for found in tokens]).tobytes()
        )
    change_table(directory, names.SHARD_TABLE, change_rows)

    def change(fields: dict[str, Any]) -> None:
        tokenizer = msgspec.convert(fields["tokenizer"], TokenizerInfo)
        content = replace(join_contents(of_shards), num_documents=fields["num_documents"])
        fields["fingerprints"]["content"] = content_fingerprint(content, tokenizer, fields["columns"])

    rewrite_manifest(directory, change)


def _stride_hashes(tokens: NDArray[Any]) -> NDArray[np.uint32]:
    hasher = StrideHasher()
    hasher.add(tokens)
    return hasher.finish()


def _tokens(shard: Path) -> NDArray[Any] | None:
    """The ids that a shard holds, whatever its offsets say; None if Arrow cannot read it."""
    try:
        reader = ipc.open_file(shard.read_bytes())
        batches = [reader.get_batch(index) for index in range(reader.num_record_batches)]
        return np.concatenate([batch.column("tokens").values.to_numpy() for batch in batches])
    except (pa.ArrowException, OSError, ValueError):
        return None


def change_table(directory: Path, name: str, change: Callable[[dict[str, list[Any]]], dict[str, list[Any]]]) -> None:
    """Replace the columns of a table next to the manifest, which vouches for the new one."""
    path = directory / name
    table = ipc.open_file(path.read_bytes()).read_all()
    table.validate(full=True)  # Arrow crashes on the values of a table that was damaged
    columns = change(table.to_pydict())
    arrays = [pa.array(columns[field.name], type=field.type) for field in table.schema]
    with ipc.new_file(str(path), table.schema) as writer:
        writer.write_batch(pa.record_batch(arrays, schema=table.schema))
    sign_files(directory)


@functools.cache
def tokenizer_info(content: bytes, *, eos: str | None = None, bos: str | None = None) -> TokenizerInfo:
    """What a manifest says of a ``tokenizer.json``."""
    parsed = json.loads(content)
    ids = {**parsed["model"]["vocab"], **{entry["content"]: entry["id"] for entry in parsed["added_tokens"]}}
    eos = eos or parsed["added_tokens"][0]["content"]
    return TokenizerInfo(
        name="tokenizer",
        sha256=hashlib.sha256(content).hexdigest(),
        canonical_sha256=hashlib.sha256(canonical_json(parsed)).hexdigest(),
        vocab_size=1 + max(ids.values()),
        library="tokenizers",
        library_version="1.0.0rc3",
        special_ids={token: ids[token] for token in (eos, bos) if token},
        eos=eos,
        eos_id=ids[eos],
        bos=bos,
        bos_id=ids[bos] if bos else None,
    )


def _extend(writer: ShardWriter, index: int, source: Source, dtype: np.dtype[Any], documents_per_call: int) -> None:
    records = np.arange(len(source.documents)) if source.records is None else np.array(source.records, np.int64)
    for start in range(0, len(source.documents), documents_per_call):
        part = slice(start, start + documents_per_call)
        documents = source.documents[part]
        writer.extend(
            np.concatenate([np.array(document, dtype) for document in documents]),
            np.cumsum([len(document) for document in documents]),
            source=index,
            records=records[part],
            columns={name: values[part] for name, values in source.metadata.items()},
        )


def _source_rows(sources: Sequence[Source]) -> pa.RecordBatch:
    columns = {
        "argument": list(range(len(sources))),
        "path": [source.path for source in sources],
        "num_bytes": [1_000] * len(sources),
        "records_read": [source.num_records for source in sources],
        "documents": [len(source.documents) for source in sources],
        "tokens": [sum(map(len, source.documents)) for source in sources],
        "text_bytes": [_text_bytes(source) for source in sources],
        "left_out": [sorted(source.left_out.items()) for source in sources],
    }
    arrays = [pa.array(columns[name], type=SOURCE_TABLE_SCHEMA.field(name).type) for name in columns]
    return pa.record_batch(arrays, schema=SOURCE_TABLE_SCHEMA)


def _manifest(
    directory: Path,
    sources: Sequence[Source],
    rows: pa.RecordBatch,
    tokenizer: TokenizerInfo,
    columns: dict[str, str],
    shard_tokens: int,
    files: Sequence[str],
) -> Manifest:
    lengths = [len(document) for source in sources for document in source.documents]
    dtype = token_dtype(tokenizer.vocab_size)
    build = BuildConfig(
        text_field="text",
        id_field=None,
        keep_field=kept_columns(columns),
        format=None,
        text_unit="file",
        shard_tokens=shard_tokens,
        task_bytes=64 << 20,
        max_document_bytes=16 << 20,
        max_documents=None,
    )
    left_out: dict[str, int] = {}
    for source in sources:
        for reason, count in source.left_out.items():
            left_out[reason] = left_out.get(reason, 0) + count
    return Manifest(
        format_version=FORMAT_VERSION,
        num_documents=len(lengths),
        num_tokens=sum(lengths),
        num_shards=rows.num_rows,
        num_bytes=sum(rows.column("num_bytes").to_pylist()),
        text_bytes=sum(map(_text_bytes, sources)),
        dtype=dtype,
        columns=columns,
        fingerprints=Fingerprints(
            content=content_fingerprint(join_contents(contents(rows)), tokenizer, columns),
            recipe=recipe_fingerprint(
                build, tokenizer, [(index, source.path, 1_000) for index, source in enumerate(sources)]
            ),
        ),
        tokenizer=tokenizer,
        arguments=[f"source-{index}.jsonl" for index in range(len(sources))],
        build=build,
        records=Records(
            read=sum(source.num_records for source in sources),
            written=len(lengths),
            left_out=dict(sorted(left_out.items())),
        ),
        document_lengths=DocumentLengths(
            shortest=min(lengths),
            longest=max(lengths),
            counts=np.bincount([length.bit_length() - 1 for length in lengths]).tolist(),
        ),
        num_targets=sum(rows.column("num_targets").to_pylist()) if has_spans(columns) else None,
        files={
            name: FileFacts(
                num_bytes=(directory / name).stat().st_size, sha256=file_sha256(open_store(directory), name)
            )
            for name in files
        },
    )


def _text_bytes(source: Source) -> int:
    return 4 * sum(map(len, source.documents))
