"""Changes of a corpus whose checksums are made true again, so that only what it says is wrong: for tables of damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tests.corpora import change_table, rewrite_manifest, sign_files, sign_shards
from tests.damage import Edit
from tokshard.format import names
from tokshard.format.opening import open_corpus


def manifest_says(keys: str, value: Any) -> Edit:
    """A value of the manifest, at keys that are separated by blanks, is another one."""

    def change(fields: dict[str, Any]) -> None:
        *above, last = keys.split()
        for key in above:
            fields = fields[key]
        fields[last] = value

    return Edit(lambda file: rewrite_manifest(file.parent, change))


def table_says(column: str, value: Any, *, row: int = 0) -> Edit:
    """A value of a table is another one."""
    return table_becomes(lambda rows: rows[column].__setitem__(row, value))


def table_becomes(change: Callable[[dict[str, list[Any]]], Any]) -> Edit:
    """The columns of a table are changed in place."""

    def changed(rows: dict[str, list[Any]]) -> dict[str, list[Any]]:
        change(rows)
        return rows

    return Edit(lambda file: change_table(file.parent, file.name, changed))


def tokens_are(tokens: Mapping[int, int]) -> Edit:
    """A shard has other ids at some positions."""
    return Edit(lambda file: set_tokens(file, tokens))


def set_tokens(shard: Path, tokens: Mapping[int, int]) -> None:
    """Overwrite ids of a shard of one batch of uint16, and make all hashes true again."""
    with open_corpus(shard.parent) as corpus:
        (place,) = corpus.shards.batch_places([*corpus.shards.names()].index(shard.name))
    content = bytearray(shard.read_bytes())
    for position, token in tokens.items():
        start = place.values_position + 2 * position
        content[start : start + 2] = np.uint16(token).tobytes()
    shard.write_bytes(content)
    sign_shards(shard.parent)


def signed(make: Callable[[Path], Any]) -> Edit:
    """A file becomes another one, and the manifest vouches for it."""

    def make_and_sign(file: Path) -> None:
        make(file)
        sign_files(file.parent)

    return Edit(make_and_sign)


def sizes_are_true(corpus: Path) -> None:
    """Make table and manifest agree with the sizes of the shards, so that the next check is reached."""
    sizes = [path.stat().st_size for path in sorted(corpus.glob("shard-*"))]
    change_table(corpus, names.SHARD_TABLE, lambda rows: {**rows, "num_bytes": sizes})
    rewrite_manifest(corpus, lambda fields: fields.update(num_bytes=sum(sizes)))
