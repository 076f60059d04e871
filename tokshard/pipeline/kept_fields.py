"""Kept fields that no record has. With JSON lines, a misspelt name only shows when all of them are read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

import msgspec

from tokshard.errors import SourceError, UsageError
from tokshard.pipeline.request import Build
from tokshard.pipeline.sources.decompress import open_bytes
from tokshard.pipeline.sources.division import CHUNK_BYTES
from tokshard.pipeline.sources.inputs import JSONL, STDIN, Input
from tokshard.pipeline.workspace.receipts import Receipt
from tokshard.store import look_at


def check_kept_fields(build: Build, receipts: Iterable[Receipt]) -> None:
    """Refuse a build in which a kept field was found in no record of any input.

    Args:
        receipts: of all tasks.

    Raises:
        UsageError: with the field, and with those of the first record.
    """
    columns = build.spec.columns
    missing = set(columns)
    num_records = 0
    for receipt in receipts:
        missing -= set(receipt.fields)
        num_records += receipt.records_read
    if not missing or not num_records:
        return
    name = next(name for name in columns if name in missing)
    path = columns[name][0]
    found = first_fields(build.inputs)
    raise UsageError(
        f"none of {num_records:,} records has the field {path!r}"
        + (f"; the first has {', '.join(found)}" if found else ""),
        hint=f"correct or leave out {'--id-field' if name == 'id' != path else '--keep'} {path}, "
        f"and {build.start_over}",
    )


def first_fields(inputs: Sequence[Input]) -> list[str]:
    """Names of the fields of the first line of the first JSON lines; empty if that cannot be read."""
    source = next((source for source in inputs if source.format == JSONL and source.location != STDIN), None)
    if source is None or look_at(source.location) is None:
        return []
    with contextlib.suppress(SourceError, OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        with open_bytes(source) as stream:
            line = stream.read(CHUNK_BYTES).partition(b"\n")[0]
        return [
            name if name.isprintable() else repr(name)
            for name in msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        ]
    return []
