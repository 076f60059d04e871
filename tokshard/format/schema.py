"""The Arrow schema of a shard, and the constants that fix its bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from tokshard.errors import DamagedCorpusError, UnsupportedFormatError
from tokshard.format.loss import LOSS, LOSS_COLUMNS, WEIGHTS

FORMAT_VERSION = 1
"""Bump when a reader of the version before would misread the bytes."""

MAX_BATCH_TOKENS = 16 << 20
"""Most tokens in one record batch; a larger document gets its own batch. Part of FORMAT_VERSION."""

MAX_BATCH_CHARACTERS = 64 << 20
"""Most characters of kept text in one record batch; a document with more gets its own batch. Part of FORMAT_VERSION."""

ORDINAL_STRIDE = 65_536
"""The shard table names the document at every token position that is a multiple of this. Part of FORMAT_VERSION."""

HASH_STRIDE = 8_192
"""Tokens of a shard that are hashed together in ``stride-hashes.bin``. Part of FORMAT_VERSION."""

HASH_GROUP = 1_024
"""Stride hashes of a shard that the shard table vouches for together. Part of FORMAT_VERSION."""

MAX_VOCABULARY = 1 << 24
"""The limit on the size of a vocabulary: tens of times the largest in use. Readers of a corpus take memory for it."""

ARROW_ERRORS = (pa.ArrowException, OSError, ValueError, KeyError, IndexError, NotImplementedError, OverflowError)
"""The exceptions of pyarrow for damaged bytes."""


def numbers_type(kind: pa.DataType) -> pa.DataType:
    """``large_list<item: kind not null>``, the type of the column `TOKENS` and of every other list."""
    return pa.large_list(pa.field("item", kind, nullable=False))


TOKENS = "tokens"
SUPPORTED_COLUMN_TYPES: Mapping[str, pa.DataType] = {
    "string": pa.string(),
    "int64": pa.int64(),
    "float64": pa.float64(),
    "bool": pa.bool_(),
}
"""Types that a kept column may have, by the name used in ``--keep-field FIELD:TYPE`` and in the manifest."""

COLUMN_TYPES: Mapping[str, pa.DataType] = {
    **SUPPORTED_COLUMN_TYPES,
    LOSS_COLUMNS[LOSS]: numbers_type(pa.uint32()),
    LOSS_COLUMNS[WEIGHTS]: numbers_type(pa.float32()),
}
"""Types that a column may have, by the name used in the manifest."""


def token_dtype(vocab_size: int) -> str:
    """The narrowest supported dtype for ids in ``[0, vocab_size)``.

    Raises:
        ValueError: no supported dtype holds the ids.
    """
    if not 1 <= vocab_size <= 1 << 32:
        raise ValueError(f"vocab_size must be in [1, 2**32], got {vocab_size}")
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def token_type(schema: pa.Schema) -> np.dtype[Any]:
    """The dtype of the tokens of a shard."""
    return np.dtype(str(schema.field(TOKENS).type.value_type))


def column_kinds(schema: pa.Schema) -> dict[str, str]:
    """The columns of a shard besides `TOKENS`, name to one of `COLUMN_TYPES`."""
    names = {kind: name for name, kind in COLUMN_TYPES.items()}
    return {field.name: names[field.type] for field in schema if field.name != TOKENS}


def check_shard_schema(found: pa.Schema, expected: pa.Schema, *, file: str) -> None:
    """Refuse a shard that is not of this corpus.

    Raises:
        UnsupportedFormatError: the shard says it has a newer format.
        DamagedCorpusError: columns or metadata differ from the corpus.
    """
    metadata = found.metadata or {}
    version = metadata.get(b"tokshard.format_version", b"")[:20].decode("ascii", "replace")
    if version.isdigit() and int(version) > FORMAT_VERSION:
        raise UnsupportedFormatError(
            f"{file} has shard format {version}; this tokshard reads up to {FORMAT_VERSION}",
            hint="install a newer tokshard",
        )
    if found.equals(expected, check_metadata=True):
        return
    for key in sorted(set(metadata) | set(expected.metadata)):
        if metadata.get(key) != expected.metadata.get(key):
            raise DamagedCorpusError(
                f"{file} is not a shard of this corpus: {key.decode('utf-8', 'replace')} is "
                f"{metadata.get(key)!r}, expected {expected.metadata.get(key)!r}"
            )
    raise DamagedCorpusError(
        f"{file} is not a shard of this corpus: it has {describe_schema(found)}, expected {describe_schema(expected)}"
    )


def describe_schema(schema: pa.Schema) -> str:
    """Columns and metadata of a schema in one line, even if a name is not UTF-8."""
    try:
        columns = ", ".join(f"{field.name}: {field.type}" + ("" if field.nullable else " not null") for field in schema)
    except UnicodeDecodeError as error:
        return f"a column whose name is not UTF-8 ({error.object[:100]!r})"
    return f"columns [{columns}] with metadata {schema.metadata}"
