"""Keys: all randomness of an order, as hashes of fixed-width fields.

A key depends on nothing but the fields that are named here, so it can be computed anywhere, in any order, and two
purposes, epochs or windows never share one by accident, as they would if numbers were added to a seed.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np
from numpy.typing import NDArray

ORDER_VERSION = 1
"""Names the rules of the order. Bump when any sample of any plan would change."""

MAX_EPOCHS = 1 << 64
"""Epochs that a key can tell apart."""

Purpose = Literal["deal", "blocks", "pieces", "samples", "phases", "transform"]

_WORDS_PER_HASH = 8
_HASH_BYTES = 64


def derive_key(
    seed: int,
    purpose: Purpose,
    *,
    corpus: bytes = b"",
    stream: int = 0,
    epoch: int = 0,
    window: int = 0,
    words: int = 2,
) -> NDArray[np.uint64]:
    """A key of `words` 64-bit words.

    The hashed bytes are, little-endian: order version (4 bytes), purpose (ASCII, padded with zeros to 16), seed (8),
    content fingerprint of the corpus (32), stream that owns a part of it (8), epoch (8), window (8), index of the hash
    (4). Each hash is 64 bytes of blake2b, eight words.

    Args:
        seed: in ``[0, 2**64)``.
        corpus: 32 bytes; empty for keys that do not depend on a corpus.

    Returns:
        uint64 [words].

    References:
        Saarinen and Aumasson, RFC 7693 (blake2b).
    """
    head = b"".join(
        (
            ORDER_VERSION.to_bytes(4, "little"),
            purpose.encode().ljust(16, b"\0"),
            seed.to_bytes(8, "little"),
            corpus.ljust(32, b"\0"),
            stream.to_bytes(8, "little"),
            epoch.to_bytes(8, "little"),
            window.to_bytes(8, "little"),
        )
    )
    hashes = (
        hashlib.blake2b(head + index.to_bytes(4, "little"), digest_size=_HASH_BYTES).digest()
        for index in range(-(-words // _WORDS_PER_HASH))
    )
    return np.frombuffer(b"".join(hashes), "<u8").astype(np.uint64)[:words]
