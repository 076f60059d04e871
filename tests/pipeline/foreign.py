"""Files as other tools write them, byte by byte from the descriptions of their formats."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np

Documents = Sequence[Sequence[int]]

MEGATRON_CODES = {"u1": 1, "i1": 2, "i2": 3, "i4": 4, "i8": 5, "u2": 8}


def flat(documents: Documents, dtype: str) -> bytes:
    """The ids of all documents, one after another."""
    return np.array([token for document in documents for token in document], f"<{dtype}").tobytes()


def megatron(prefix: Path, documents: Documents, dtype: str = "u2", *, sentences: Sequence[int] | None = None) -> Path:
    """``PREFIX.bin`` and ``PREFIX.idx``.

    Args:
        documents: or sequences, of which `sentences` says how many each document has.
    """
    lengths = [len(document) for document in documents]
    width = np.dtype(dtype).itemsize
    places = [width * start for start in accumulate(lengths, initial=0)][:-1]
    bounds = list(accumulate(sentences or [1] * len(documents), initial=0))
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(bounds))
    index = struct.pack(f"<{len(lengths)}i", *lengths) + struct.pack(f"<{len(places)}q", *places)
    prefix.with_name(prefix.name + ".bin").write_bytes(flat(documents, dtype))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + index + struct.pack(f"<{len(bounds)}q", *bounds))
    return prefix
