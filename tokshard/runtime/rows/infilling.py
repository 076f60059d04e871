"""Fill-in-the-middle: documents cut in three and put in another order, so that a model learns to fill gaps."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokshard.errors import PlanError
from tokshard.runtime.options import integer, real
from tokshard.runtime.rows.narrow import IGNORED
from tokshard.runtime.rows.transforms import Sample, SampleRandom

_NUM_SENTINELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTheMiddle:
    """A transform that turns ``a b c`` into prefix-suffix-middle or suffix-prefix-middle order, piece by piece.

    A piece is cut at two random places into prefix, middle and suffix. In PSM order it becomes ``<pre> a <suf> c <mid>
    b``, in SPM order ``<pre> <suf> c <mid> a b`` (the variant that keeps prefix and middle together). The sample keeps
    its length: the three sentinels take the place of the last three tokens of the middle, so a piece needs more than
    six. A delimiter at the end of the piece stays there. A piece that the sample cuts has no label for its last token,
    because the next token of the document does not follow the middle. In a plan with loss spans a piece changes only if
    all labels between its tokens, without that delimiter, have the same weight, or none is a target: weights keep their
    places, and would otherwise get to other tokens.

    Args:
        prefix_id, suffix_id, middle_id: ids of the sentinels in the tokenizer.
        rate: share of the pieces that are changed.
        spm_rate: share of the changed pieces that get SPM order.

    Raises:
        PlanError: an id is negative or given twice, or a rate is not from 0 to 1.

    References:
        Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255 (section 3).
    """

    prefix_id: int
    suffix_id: int
    middle_id: int
    rate: float = 0.5
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        ids = {integer(name, getattr(self, name)) for name in ("prefix_id", "suffix_id", "middle_id")}
        rates = [real(name, getattr(self, name)) for name in ("rate", "spm_rate")]
        if min(ids) < 0 or len(ids) < _NUM_SENTINELS or not all(0 <= rate <= 1 for rate in rates):
            raise PlanError(
                f"{self!r}: the three ids must differ and be at least 0, and rates are from 0 to 1",
                hint="give the ids of the tokenizer's sentinels",
            )

    def __call__(self, sample: Sample, random: SampleRandom) -> Sample:
        """Change some of the pieces. Four numbers are drawn per piece, changed or not."""
        largest = max(self.prefix_id, self.suffix_id, self.middle_id)
        if largest > np.iinfo(sample.tokens.dtype).max:
            raise PlanError(
                f"{self!r}: id {largest} does not fit {sample.tokens.dtype}, the dtype of the corpus",
                hint="give ids of the tokenizer that the corpus was built with",
            )
        weights = sample.loss_weights
        tokens, next_tokens = sample.tokens.copy(), sample.next_tokens.copy()
        draws = random.uniform(4 * len(sample.piece_lengths)).reshape(-1, 4)
        stops = np.cumsum(sample.piece_lengths)
        for index in np.flatnonzero(draws[:, 0] < self.rate).tolist():
            stop, length = int(stops[index]), int(sample.piece_lengths[index])
            start, end = stop - length, stop - (next_tokens[index] == IGNORED)  # a delimiter stays where it is
            inner = end - start
            if inner <= 2 * _NUM_SENTINELS or (
                weights is not None and (weights[start : end - 1] != weights[start]).any()
            ):
                continue  # too short, or weights belong to single tokens
            low, high = sorted((draws[index, 1:3] * (inner + 1 - _NUM_SENTINELS)).astype(int).tolist())
            prefix, middle = tokens[start : start + low].copy(), tokens[start + low : start + high].copy()
            suffix = tokens[start + high + _NUM_SENTINELS : end].copy()
            pre, suf, mid = ([token] for token in (self.prefix_id, self.suffix_id, self.middle_id))
            is_spm = draws[index, 3] < self.spm_rate
            parts = (pre, suf, suffix, mid, prefix, middle) if is_spm else (pre, prefix, suf, suffix, mid, middle)
            tokens[start:end] = np.concatenate(parts)
            if end == stop:
                next_tokens[index] = IGNORED
        return replace(sample, tokens=tokens, next_tokens=next_tokens)
