"""What the receipts of a build add up to, for one of its corpora."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from tokshard.format.content import TokenHash
from tokshard.format.manifest import DAMAGED_INPUT
from tokshard.format.tables import SourceInfo
from tokshard.pipeline.sources.inputs import Input
from tokshard.pipeline.tasks.planning import Key
from tokshard.pipeline.workspace.receipts import Receipt

_COUNTED = ("records_read", "documents", "tokens", "text_bytes")


class Totals:
    """Sums over receipts in order, and how many records of each source came before the task at hand.

    Args:
        number: which corpus of the build.
        num_sources: inputs of the build.
        bad_inputs: indices of those that were left out whole.
    """

    def __init__(self, number: int, num_sources: int, bad_inputs: Iterable[int]) -> None:
        # 32 bytes a source: there may be a million
        self._counts = np.zeros((num_sources, len(_COUNTED)), np.int64)
        self._left_out: dict[int, dict[str, int]] = {}
        for index in bad_inputs:
            self._counts[index, 0] = 1
            self._left_out[index] = {DAMAGED_INPUT: 1}
        self.documents = 0
        self.tokens = 0
        self.shard_sizes: dict[str, int] = {}
        self.content = TokenHash()
        self.lengths = np.zeros(0, np.int64)
        self.shortest = 0
        self.longest = 0
        self.with_special_text = 0
        self.records_before: dict[Key, dict[int, int]] = {}
        self.with_rejects: list[Key] = []
        self.number = number

    def add(self, receipt: Receipt) -> None:
        """Take the next receipt."""
        before: dict[int, int] = {}
        part = receipt.outputs[self.number]
        for counts in part.sources:
            row = self._counts[counts.index]
            if row[0]:
                before[counts.index] = int(row[0])
            row += [getattr(counts, name) for name in _COUNTED]
            self.tokens += counts.tokens
            self.with_special_text += counts.with_special_text
            if counts.left_out:
                left_out = self._left_out.setdefault(counts.index, {})
                for reason, count in counts.left_out.items():
                    left_out[reason] = left_out.get(reason, 0) + count
        if before:
            self.records_before[receipt.key] = before
        if receipt.num_rejects:
            self.with_rejects.append(receipt.key)
        self.documents += part.documents
        lengths = np.zeros(max(len(self.lengths), len(part.length_counts)), np.int64)
        lengths[: len(self.lengths)] += self.lengths
        lengths[: len(part.length_counts)] += np.array(part.length_counts, np.int64)
        self.lengths = lengths
        if part.documents:
            self.shortest = min(self.shortest or part.shortest, part.shortest)
            self.longest = max(self.longest, part.longest)

    def written_of(self, index: int) -> tuple[int, int]:
        """The documents and tokens that came of one source."""
        _, documents, tokens, _ = self._counts[index].tolist()
        return documents, tokens

    def source(self, source: Input) -> SourceInfo:
        """What was read of one input, written and left out."""
        counts = dict(zip(_COUNTED, self._counts[source.index].tolist(), strict=True))
        return SourceInfo(
            argument=source.argument,
            path=source.path,
            num_bytes=source.num_bytes,
            left_out=dict(sorted(self._left_out.get(source.index, {}).items())),
            **counts,
        )

    @property
    def left_out(self) -> dict[str, int]:
        """Reason to count, over all sources."""
        result: dict[str, int] = {}
        for counts in self._left_out.values():
            for reason, count in counts.items():
                result[reason] = result.get(reason, 0) + count
        return dict(sorted(result.items()))

    @property
    def records_read(self) -> int:
        """Records over all sources."""
        return int(self._counts[:, 0].sum())

    @property
    def text_bytes(self) -> int:
        """UTF-8 bytes of all documents."""
        return int(self._counts[:, 3].sum())
