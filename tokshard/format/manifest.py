"""``manifest.json``, the description of a corpus. Pure (no time, host or speed), written last, with a checksum."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from itertools import zip_longest
from typing import Annotated, Any

import msgspec
import numpy as np
import pyarrow as pa

from tokshard.errors import DamagedCorpusError, UnsupportedFormatError
from tokshard.forking import decodable
from tokshard.format import names
from tokshard.format.content import Content
from tokshard.format.loss import LOSS_COLUMNS, has_spans
from tokshard.format.schema import (
    COLUMN_TYPES,
    FORMAT_VERSION,
    MAX_VOCABULARY,
    TOKENS,
    numbers_type,
    token_dtype,
)

_HASH_KEY = "manifest_sha256"

DAMAGED_INPUT = "damaged input"
"""Reason in `left_out` for an input that was left out whole. It counts as one record."""

IN_OTHER_SPLIT = {names.TRAIN: "in the validation split", names.VALIDATION: "in the train split"}
"""Split to its reason in `left_out` for documents of the other split."""

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Total = Annotated[int, msgspec.Meta(ge=1, le=(1 << 63) - 1)]
TokenId = Annotated[int, msgspec.Meta(ge=0, le=(1 << 32) - 1)]
Sha256 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The tokenizer that made a corpus.

    Args:
        name: the last part of the path that was given, or the id on the hub with its commit.
        sha256: of the bytes of ``tokenizer.json`` next to the manifest.
        canonical_sha256: of the JSON with sorted keys and no white space: equal for files that differ in layout only.
        vocab_size: 1 + the largest id in model and added tokens.
        library: the package that encoded, and its version.
        special_ids: token to id, for every token that text must never produce.
        eos: the delimiter that ends every document, and its id; `bos` likewise for the start, if there is one.
    """

    name: str
    sha256: Sha256
    canonical_sha256: Sha256
    vocab_size: Annotated[int, msgspec.Meta(ge=1, le=MAX_VOCABULARY)]
    library: str
    library_version: str
    special_ids: dict[str, TokenId]
    eos: str
    eos_id: TokenId
    bos: str | None
    bos_id: TokenId | None


class CopyConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How a corpus was made from others, without their texts.

    Args:
        corpora: content fingerprints of the others, in order.
        recipes: their recipe fingerprints.
        holds: content fingerprints of all else that they contain: generations, and corpora that they are copies of.
        holds_some: content fingerprints of corpora that they contain in part.
        shuffle: seed of the random order, or None: the order of the others.
    """

    corpora: list[Sha256]
    recipes: list[Sha256]
    holds: list[Sha256] = []
    holds_some: list[Sha256] = []
    shuffle: int | None = None


class SelectConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the documents of a view were selected from a corpus.

    Args:
        where: conditions on columns that documents have to meet, such as ``lang=en``.
        source: pattern of the sources whose documents are taken.
        hash_range: documents whose hash lies in this half-open range of [0, 1) are taken.
        keep_ids, drop_ids: SHA-256 of the list of the documents that are taken, or left out.
        join: SHA-256 of each file whose columns are joined.
        by: the columns whose values divide the documents into cells.
    """

    where: list[str] = []
    source: str | None = None
    hash_range: tuple[float, float] | None = None
    keep_ids: Sha256 | None = None
    drop_ids: Sha256 | None = None
    join: list[Sha256] = []
    by: list[str] = []


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """How conversations became documents.

    Args:
        template: SHA-256 of the chat template and of the tokens that it reads as variables.
        jinja2: the version that rendered it.
        loss: the tokens that became targets: ``assistant``, ``last``, ``all`` or ``weighted``.
        chat_date: the date that ``strftime_now`` formatted, or None.
        overlong: documents over ``max_tokens`` were left out, ``skip``; or cut, ``head``.
        template_drops: ``count``, or ``fail``: a conversation was a bad record if the template left out a part of it.
    """

    template: Sha256
    jinja2: str
    loss: str = "assistant"
    chat_date: str | None = None
    overlong: str = "skip"
    template_drops: str = "count"


class BuildConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Everything about a build that changes its bytes, apart from sources and tokenizer.

    The JSON leaves out a field that has its default, so the fingerprint of a build does not change when a later
    tokshard has more options.

    Args:
        text_field: dotted path of the text in a record.
        id_field: field stored as column ``id``, if any.
        keep_field: fields stored as columns of their name, field to type.
        format: the format that all inputs were read as, or None where the file names decided.
        text_unit: the unit of plain text that is a document: ``file``, ``line`` or ``paragraph``.
        shard_tokens: a shard closes before the document that would exceed this many tokens.
        task_bytes: size of the unit of build work, in bytes of input.
        max_document_bytes: a longer text is a bad record; UTF-8 bytes.
        max_documents: documents written at most, or None; with a validation split, in both corpora.
        dedup: ``none``, or ``exact``: of equal texts only the first became a document.
        min_tokens, max_tokens: shorter and longer documents were left out; delimiters count.
        validation_fraction: share of the documents that went into the validation corpus, or None.
        reads: ``text``; ``tokens``: the sources held documents that another tool had tokenized; ``documents``: the
            sources were corpora, and the fields that say how texts are read are empty; or ``view``: it is a view.
        token_field, token_dtype: of such sources: the column of the ids, and how they were stored; None where the files
            say it.
        loss_field: of such sources: the column that says which tokens are targets; ``none`` where masks were left out;
            None for a usual name.
        source_eos: of such sources: an id that ended documents there instead of EOS, or None.
        split: which of the two corpora this is, ``train`` or ``validation``; None if the build wrote one.
        copied: how the documents were taken from other corpora.
        selected: which documents of a corpus a view has.
        chat: how conversations became documents; None where texts did.
        special_tokens: ``parse=TOKEN,...``: spellings in texts that became these special tokens; None: none did.
        engine: the package that encoded instead of `tokenizers`, and its version, such as ``fastokens 0.3.5``.
    """

    text_field: str
    id_field: str | None
    keep_field: dict[str, str]
    format: str | None
    text_unit: str
    shard_tokens: int
    task_bytes: int
    max_document_bytes: int
    max_documents: int | None
    dedup: str = "none"
    min_tokens: int | None = None
    max_tokens: int | None = None
    validation_fraction: float | None = None
    split: str | None = None
    reads: str = "text"
    token_field: str | None = None
    token_dtype: str | None = None
    loss_field: str | None = None
    source_eos: int | None = None
    copied: CopyConfig | None = None
    selected: SelectConfig | None = None
    chat: ChatConfig | None = None
    special_tokens: str | None = None
    engine: str | None = None


class TemplateDrop(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parts of the conversations of a corpus that a chat template left out.

    Args:
        count: of messages, or of conversations where it belongs to no message.
        source, record, message: the first: the file, its record from 1, and the message in it from 0, or -1.
    """

    count: Count
    source: str
    record: Total
    message: Annotated[int, msgspec.Meta(ge=-1)]


class Records(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """``read = written + sum of left_out``, over all sources.

    Args:
        with_special_text: documents written whose text spells a special token; they hold ordinary ids for it. Left out
            of the JSON where it is 0. None: unknown, because a copy reads no texts.
        padding_ids: ids of padding in the records read, which no document holds. Left out of the JSON where it is 0.
        template_drops: ``text``, ``reasoning``, ``calls``, ``tools`` and ``documents`` that a chat template left out of
            the documents written. Copies do not know it.
    """

    read: Count
    written: Count
    left_out: dict[str, Count]
    with_special_text: Count | None = 0
    padding_ids: Count = 0
    template_drops: dict[str, TemplateDrop] = {}


class DocumentLengths(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Document lengths in tokens, delimiters included.

    Args:
        counts: ``counts[k]`` documents have a length in ``[2**k, 2**(k+1))``.
    """

    shortest: Count
    longest: Count
    counts: list[Count]


NO_LENGTHS = DocumentLengths(shortest=0, longest=0, counts=[])
"""The lengths of no documents."""


def joined_lengths(parts: Iterable[DocumentLengths]) -> DocumentLengths:
    """The lengths of the documents of several groups."""
    found = [each for each in parts if each.longest]  # a group without documents has a shortest of 0
    return DocumentLengths(
        shortest=min((each.shortest for each in found), default=0),
        longest=max((each.longest for each in found), default=0),
        counts=[*map(sum, zip_longest(*(each.counts for each in found), fillvalue=0))],
    )


class FileFacts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Size and SHA-256 of a file next to the manifest."""

    num_bytes: Count
    sha256: Sha256


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Two hashes that identify a corpus.

    Args:
        content: the hash of tokens and delimiters: equal when the documents are.
        recipe: the hash of configuration, tokenizer and the names and sizes of the sources.
    """

    content: Sha256
    recipe: Sha256


class Generation(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The place of one append in its corpus.

    Args:
        number: 1 for the first append; generation 0 is the first build.
        previous: ``manifest_sha256`` of the generation before.
        content: content fingerprint of the documents of all generations up to this one.
    """

    number: Total
    previous: Sha256
    content: Sha256


class Base(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The base of a view.

    Args:
        path: its location when the view was made, from the folder of the view on, or a URI.
        content: its content fingerprint.
        generation: its newest generation at that time.
        cell: of a cell: the values of its columns, name to value; None for a missing value.
        carries: where columns of the table pass multiples of 2**32, see `view.Ascending`, name to rows.
    """

    path: str
    content: Sha256
    generation: Count = 0
    cell: dict[str, str | None] = {}
    carries: dict[str, Annotated[list[Count], msgspec.Meta(min_length=1)]] = {}


@decodable
class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The description of a corpus. Its presence means that the corpus is complete.

    Args:
        num_targets: tokens that lie in loss spans, of a corpus that has these; left out of the JSON otherwise.
        generation: the place of an appended corpus in the corpus that grew; left out of the JSON otherwise.
        base: the base of a view; left out of the JSON of a corpus with shards.
    """

    format_version: int
    num_documents: Count
    num_tokens: Count
    num_shards: Count
    num_bytes: Count
    text_bytes: Count
    dtype: str
    columns: dict[str, str]
    fingerprints: Fingerprints
    tokenizer: TokenizerInfo
    arguments: list[str]
    build: BuildConfig
    records: Records
    document_lengths: DocumentLengths
    files: dict[str, FileFacts]
    num_targets: Count | None = None
    generation: Generation | None = None
    base: Base | None = None


def shard_schema(tokenizer: TokenizerInfo, columns: Mapping[str, str]) -> pa.Schema:
    """The schema of every shard of a corpus: `TOKENS` first, then the other columns in order.

    Every shard repeats facts of the corpus in its metadata, so that a single file identifies itself.
    """
    dtype = token_dtype(tokenizer.vocab_size)
    fields = [pa.field(TOKENS, numbers_type(pa.from_numpy_dtype(np.dtype(dtype))), nullable=False)]
    for name, kind in columns.items():
        fields.append(pa.field(name, COLUMN_TYPES[kind], nullable=kind not in LOSS_COLUMNS.values()))
    metadata = {
        "tokshard.format_version": str(FORMAT_VERSION),
        "tokshard.tokenizer_sha256": tokenizer.canonical_sha256,
        "tokshard.eos_id": str(tokenizer.eos_id),
        "tokshard.bos_id": "" if tokenizer.bos_id is None else str(tokenizer.bos_id),
        "tokshard.dtype": dtype,
    }
    return pa.schema(fields, metadata=metadata)


_RESTORE = "restore the file from a copy, or remove the directory and build again"
"""The directory has to be removed by hand: a build only removes files that a manifest names."""


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of ``manifest.json``: indented JSON whose last line holds the SHA-256 of all lines before it."""
    body = json.dumps(msgspec.to_builtins(manifest), indent=2, ensure_ascii=False)
    head = body.removesuffix("\n}") + ",\n"
    digest = hashlib.sha256(head.encode()).hexdigest()
    return f'{head}"{_HASH_KEY}": "{digest}"}}\n'.encode()


def manifest_hash(content: bytes) -> str:
    """The SHA-256 of a manifest without its last line, which repeats it."""
    return hashlib.sha256(content[: _start_of_last_line(content)]).hexdigest()


def _start_of_last_line(content: bytes) -> int:
    return content.removesuffix(b"\n").rfind(b"\n") + 1


def decode_manifest(content: bytes, *, file: str) -> Manifest:
    """The manifest in the bytes of a file.

    Raises:
        DamagedCorpusError: the checksum or the structure is wrong.
        UnsupportedFormatError: a newer tokshard wrote it.
    """
    digest, last = manifest_hash(content), content[_start_of_last_line(content) :]
    if last != f'"{_HASH_KEY}": "{digest}"}}\n'.encode():
        raise DamagedCorpusError(
            f"{file} is damaged or was edited: the SHA-256 of its content is {digest}, and its last line is "
            f"{last[:100].decode(errors='replace')!r}",
            hint=_RESTORE,
        )
    try:
        fields = msgspec.json.decode(content)  # refuses lone surrogates, which no file could hold again
        fields.pop(_HASH_KEY)
        version = fields["format_version"]
        if not isinstance(version, int) or isinstance(version, bool) or version < 1:
            raise ValueError(f"format_version is {version!r}, expected a positive integer")
        if version > FORMAT_VERSION:
            raise UnsupportedFormatError(
                f"{file} has format version {version}; this tokshard reads up to {FORMAT_VERSION}",
                hint="install a newer tokshard",
            )
        manifest = msgspec.convert(fields, Manifest)
        _check_totals(manifest)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, msgspec.MsgspecError) as error:
        raise DamagedCorpusError(f"{file} does not hold a manifest: {error!r}", hint=_RESTORE) from error
    return manifest


def _check_totals(manifest: Manifest) -> None:
    """Refuse an empty manifest, unless an append put all documents into the other split. A view has no shards."""
    lengths, shards = manifest.document_lengths, [manifest.num_shards, manifest.num_bytes]
    if manifest.base is not None and any(shards):
        raise ValueError(f"a view has {manifest.num_shards} shards of {manifest.num_bytes} bytes, expected none")
    totals = [manifest.num_documents, manifest.num_tokens, lengths.shortest, lengths.longest]
    totals += [] if manifest.base is not None else shards
    may_be_empty = manifest.generation is not None and manifest.build.split is not None
    if not all(totals) and (any(totals) or not may_be_empty):
        raise ValueError(
            f"{manifest.num_documents} documents of {manifest.num_tokens} tokens in {manifest.num_shards} "
            f"shards of {manifest.num_bytes} bytes, expected at least 1 of each"
        )


def canonical_json(value: Any) -> bytes:
    """JSON with sorted keys and no white space: equal values have equal bytes. A vocabulary of 131,072 takes 0.2 s."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode("utf-8", "surrogatepass")  # "\ud83d" is JSON, and some vocabularies have it


def content_fingerprint(content: Content, tokenizer: TokenizerInfo, columns: Mapping[str, str]) -> str:
    """A hash of the content: equal for two corpora that hold the same documents with the same loss spans.

    Shards, record batches, kept columns, sources and the place of the corpus do not matter.

    Args:
        content: the content of the whole corpus.
        tokenizer: gives the delimiters.
        columns: the columns of the corpus.

    Returns:
        The hexadecimal SHA-256 of a version line, the canonical JSON of counts and delimiters, and the hashes.
    """
    counts = {
        "num_documents": content.num_documents,
        "num_tokens": content.tokens.num_tokens,
        "eos_id": tokenizer.eos_id,
        "bos_id": tokenizer.bos_id,
    }
    hashed = content.tokens.to_bytes()
    if has_spans(columns):
        counts["num_targets"] = content.num_targets
        hashed += content.loss.to_bytes()
    return hashlib.sha256(b"tokshard content 1\n" + canonical_json(counts) + hashed).hexdigest()


def recipe_fingerprint(config: BuildConfig, tokenizer: TokenizerInfo, sources: Iterable[tuple[int, str, int]]) -> str:
    """Hexadecimal SHA-256 of configuration, tokenizer, and (argument, relative path, bytes) of every source."""
    digest = hashlib.sha256(b"tokshard recipe 1\n")
    digest.update(canonical_json(msgspec.to_builtins(config)))
    digest.update(canonical_json([tokenizer.canonical_sha256, tokenizer.eos_id, tokenizer.bos_id]))
    for source in sources:
        digest.update(canonical_json(list(source)))
    return digest.hexdigest()
