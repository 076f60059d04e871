"""File names inside a corpus directory."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SHARD_TABLE = "shards.arrow"
SOURCE_TABLE = "sources.arrow"
TOKENIZER = "tokenizer.json"
REPORT = "build-report.json"
REJECTS = "rejects.jsonl"
STRIDE_HASHES = "stride-hashes.bin"
"""Hashes of the tokens of all shards, by stride."""
HASHES = "hashes.bin"
"""Sorted hashes of the texts of a build with ``--dedup exact``, for the appends that follow."""
KEPT = "kept.arrow"
"""Of a view: the table of its documents."""
MIX = "mix.toml"
"""Of a view with cells: a mix of all of them."""
WORK = ".tokshard-build"
"""Folder of an unfinished build: configuration, lock, receipts, files being written."""

TRAIN, VALIDATION = "train", "validation"
"""The two corpora of a build with a validation split: folders of its directory."""

_GENERATION = re.compile(r"generation-([0-9]{2,})")

SHARD_NAME = re.compile(r"shard-[0-9]{2,}-[0-9]{7,}-[0-9]{6,}-[0-9]{4,}\.arrow")

REQUIRED_FILES = frozenset({SHARD_TABLE, STRIDE_HASHES, SOURCE_TABLE, TOKENIZER})
"""Files that every manifest lists with their hash."""

FILES_OF_VIEW = frozenset({KEPT, SOURCE_TABLE, TOKENIZER})
"""The same for a view."""

LAST_TABLES = frozenset({SHARD_TABLE, KEPT})
"""Builds write one of them just before the manifest, so a folder with it was a corpus."""

OPTIONAL_FILES = frozenset({REJECTS, HASHES})
"""Files that a manifest may list, too, and no others."""

SIDE_FILES = frozenset({MANIFEST, REPORT, MIX, *REQUIRED_FILES, *OPTIONAL_FILES, *FILES_OF_VIEW})
"""Every file of a corpus that is not a shard."""


def shard_name(*, generation: int, first_input: int, segment: int, part: int) -> str:
    """The name of a shard: a pure function of the origin of its first document.

    Args:
        generation: 0, or the generation of the append that writes it.
        first_input: index of the first input of the task that writes the shard.
        segment: which piece of that input the task covers.
        part: count of shards that the task closed before.
    """
    return f"shard-{generation:02d}-{first_input:07d}-{segment:06d}-{part:04d}.arrow"


def generation_folder(number: int) -> str:
    """The folder of a generation in its corpus; empty for generation 0, whose files lie next to these folders."""
    return f"generation-{number:02d}" if number else ""


def generation_number(folder: str) -> int:
    """The generation whose folder has this name in a corpus; 0 if it is not such a folder."""
    found = _GENERATION.fullmatch(folder)
    number = 0 if found is None else int(found[1])
    return number if generation_folder(number) == folder else 0


def in_folder(folder: str, name: str) -> str:
    """The name of a file of a folder, which may be empty: the corpus itself."""
    return f"{folder}/{name}" if folder else name


def is_shard_name(name: str) -> bool:
    """Whether a file name has the form of a shard; such a name cannot leave its directory."""
    return SHARD_NAME.fullmatch(name) is not None
