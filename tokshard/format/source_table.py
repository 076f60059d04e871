"""``sources.arrow`` of a corpus, read and checked, and opening either table against its manifest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import pyarrow as pa

from tokshard.errors import RESTORE, DamagedCorpusError
from tokshard.format import names
from tokshard.format.files import LoadFile, map_file
from tokshard.format.manifest import Manifest
from tokshard.format.partial_file import PartialFile
from tokshard.format.tables import LISTS_OF_DOCUMENTS, SOURCE_TABLE_SCHEMA, SourceInfo, Table
from tokshard.store import Store, side_by_side

_WHOLE_BYTES = 128 << 20
"""A table in another store is read whole up to this size: the shard table of two trillion tokens."""


def read_sources(store: Store, manifest: Manifest, *, load: LoadFile = map_file) -> list[SourceInfo]:
    """The inputs of a corpus in order, with counts of records read, written and left out.

    Raises:
        DamagedCorpusError: the source table is missing or does not match the manifest.
    """
    table = open_table(store, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, manifest, load)
    sources = [
        SourceInfo(**{**row, "left_out": dict(row["left_out"])})
        for batch in table.batches()
        for row in batch.to_pylist()
    ]
    for index, source in enumerate(sources):
        if not 0 <= source.argument < len(manifest.arguments):
            raise DamagedCorpusError(
                f"{table.path}: source {index} comes from argument {source.argument}, "
                f"the manifest has {len(manifest.arguments)}",
                hint=RESTORE,
            )
    return sources


def all_sources(generations: Sequence[tuple[Store, Manifest]], *, load: LoadFile = map_file) -> list[SourceInfo]:
    """The inputs of all generations in order; their arguments are counted through, too.

    Raises:
        DamagedCorpusError: a source table is missing or does not match its manifest.
    """
    found: list[SourceInfo] = []
    num_arguments = 0
    of_each = side_by_side(generations[0][0], lambda each: read_sources(*each, load=load), generations)
    for (_, manifest), sources in zip(generations, of_each, strict=True):
        found += (replace(source, argument=num_arguments + source.argument) for source in sources)
        num_arguments += len(manifest.arguments)
    return found


def first_sources(generations: Sequence[tuple[Store, Manifest]], *, load: LoadFile = map_file) -> list[int]:
    """The index among `all_sources` of the first input of each generation.

    Raises:
        DamagedCorpusError: a source table is missing or does not match its manifest.
    """
    tables = open_tables(generations, names.SOURCE_TABLE, SOURCE_TABLE_SCHEMA, load)
    return list(accumulate((table.num_rows for table in tables[:-1]), initial=0))


def open_tables(
    generations: Sequence[tuple[Store, Manifest]], name: str, schema: pa.Schema, load: LoadFile
) -> list[Table]:
    """`open_table` of each generation."""

    def open_one(generation: tuple[Store, Manifest]) -> Table:
        store, manifest = generation
        return open_table(store, name, schema, manifest, load)

    return list(side_by_side(generations[0][0], open_one, generations))


def open_table(store: Store, name: str, schema: pa.Schema, manifest: Manifest, load: LoadFile) -> Table:
    """A table of a corpus, checked against its size in the manifest.

    If a large shard table is in another store, only the columns about whole shards are read.

    Raises:
        DamagedCorpusError: it has another size, is missing, or is not such a table.
    """
    path, facts = store.where(name), manifest.files[name]
    try:
        entry = store.stat(name)
    except FileNotFoundError:
        raise DamagedCorpusError(f"{path} is missing", hint=RESTORE) from None
    except OSError as error:
        raise DamagedCorpusError(f"{path} cannot be opened: {error}", hint=RESTORE) from error
    if entry.size != facts.num_bytes:
        raise DamagedCorpusError(f"{path} has {entry.size} bytes, expected {facts.num_bytes}", hint=RESTORE)
    partial = None
    if entry.size > _WHOLE_BYTES and load is map_file and store.local_path(name) is None:
        partial = PartialFile(store, name, entry, by_row=LISTS_OF_DOCUMENTS)
    return Table(store, name, schema, load=load, partial=partial)
