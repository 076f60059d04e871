"""The identity of a plan: what must be equal for a cursor to mean the same samples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property

from tokshard.runtime.order.parts import PlannedCorpus
from tokshard.runtime.order.seeds import ORDER_VERSION
from tokshard.runtime.order.windows import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusIdentity:
    """What must be equal for a corpus of a plan to read the same samples.

    Args:
        fingerprint: of its content.
        ordinal: how many corpora before it have the same content.
        start_epoch: the epoch that counts as its first.
        take: the part of it that is read.
    """

    fingerprint: str
    ordinal: int
    start_epoch: int
    take: float


@dataclass(frozen=True, kw_only=True)
class PlanIdentity:
    """What must be equal for a cursor to mean the same samples. Neither names, paths nor weights are in it.

    Args:
        fields: order_version, seed, seq_len, block_tokens, window_blocks, and num_streams if there are several.
        corpora: in plan order.
    """

    fields: Mapping[str, int]
    corpora: tuple[CorpusIdentity, ...]

    @property
    def num_streams(self) -> int:
        """Streams of the plan."""
        return self.fields.get("num_streams", 1)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the identity: 64 hexadecimal digits."""
        corpora = [asdict(corpus) for corpus in self.corpora]
        content = json.dumps([dict(self.fields), corpora], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(b"tokshard plan 1\n" + content.encode()).hexdigest()


def identity_of(shape: Shape, seed: int, num_streams: int, corpora: Sequence[PlannedCorpus]) -> PlanIdentity:
    """The identity of a plan."""
    fields = {
        "order_version": ORDER_VERSION,
        "seed": seed,
        "seq_len": shape.seq_len,
        "block_tokens": shape.block_tokens,
        "window_blocks": shape.window_blocks,
    }
    if num_streams > 1:
        fields["num_streams"] = num_streams
    identities = tuple(
        CorpusIdentity(
            fingerprint=corpus.source.fingerprint,
            ordinal=corpus.copy_index,
            start_epoch=corpus.start_epoch,
            take=corpus.take,
        )
        for corpus in corpora
    )
    return PlanIdentity(fields=fields, corpora=identities)
