"""The identity of a plan: what must be equal for a cursor to mean the same samples."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokshard.runtime.order.permutation import ORDER_VERSION
from tokshard.runtime.order.windows import CorpusOrder, Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIdentity:
    """What must be equal for a corpus of a plan to read the same samples.

    Args:
        fingerprint: of its content.
        start_epoch: the epoch that counts as its first.
        take: the part of it that is read.
    """

    fingerprint: str
    start_epoch: int
    take: float


@dataclass(frozen=True, kw_only=True)
class PlanIdentity:
    """What must be equal for a cursor to mean the same samples. Neither names, paths nor weights are in it.

    Args:
        fields: order_version, seed, seq_len, block_tokens, window_blocks and num_streams.
        corpora: in plan order.
    """

    fields: Mapping[str, int]
    corpora: tuple[CorpusIdentity, ...]

    @property
    def num_streams(self) -> int:
        """Streams of the plan."""
        return self.fields["num_streams"]

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the identity: 64 hexadecimal digits. Numbers are eight bytes each, and so is `take`."""
        content = struct.pack(f"<{len(self.fields)}Q", *self.fields.values())
        for corpus in self.corpora:
            content += struct.pack("<32sQd", bytes.fromhex(corpus.fingerprint), corpus.start_epoch, corpus.take)
        return hashlib.sha256(b"tokshard plan 1\n" + content).hexdigest()


def identity_of(shape: Shape, seed: int, num_streams: int, corpora: Sequence[CorpusOrder]) -> PlanIdentity:
    """The identity of a plan."""
    fields = {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "seq_len": shape.seq_len,
        "block_tokens": shape.block_tokens,
        "window_blocks": shape.window_blocks,
        "num_streams": num_streams,
    }
    identities = tuple(
        CorpusIdentity(
            fingerprint=corpus.source.fingerprint,
            start_epoch=corpus.start_epoch,
            take=corpus.take,
        )
        for corpus in corpora
    )
    return PlanIdentity(fields=fields, corpora=identities)
