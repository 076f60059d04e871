"""File names inside a corpus directory."""

from __future__ import annotations

import re

MANIFEST = "manifest.json"
SHARD_TABLE = "shards.arrow"
SOURCE_TABLE = "sources.arrow"
TOKENIZER = "tokenizer.json"
REPORT = "build-report.json"
REJECTS = "rejects.jsonl"
WORK = ".tokshard-build"
"""Folder of an unfinished build: configuration, lock, receipts, files being written."""

TRAIN, VALIDATION = "train", "validation"
"""The two corpora of a build with a validation split: folders of its directory."""

_SHARD = re.compile(r"shard-[0-9]{2,}-[0-9]{7,}-[0-9]{6,}-[0-9]{4,}\.arrow")

REQUIRED_FILES = frozenset({SHARD_TABLE, SOURCE_TABLE, TOKENIZER})
"""Files that every manifest lists with their hash; it may list `REJECTS` too, and nothing else."""

SIDE_FILES = frozenset({MANIFEST, SHARD_TABLE, SOURCE_TABLE, TOKENIZER, REPORT, REJECTS})
"""Every file of a corpus that is not a shard."""


def shard_name(*, generation: int, first_input: int, segment: int, part: int) -> str:
    """The name of a shard: a pure function of where its first document comes from.

    Args:
        generation: 0; kept for corpora that grow.
        first_input: index of the first input of the task that writes the shard.
        segment: which piece of that input the task covers.
        part: count of shards that the task closed before.
    """
    return f"shard-{generation:02d}-{first_input:07d}-{segment:06d}-{part:04d}.arrow"


def is_shard_name(name: str) -> bool:
    """Whether a file name has the form of a shard; such a name cannot leave its directory."""
    return _SHARD.fullmatch(name) is not None
