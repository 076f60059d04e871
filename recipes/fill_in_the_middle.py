"""Fill-in-the-middle: a transform that cuts documents in three and puts the parts in another order.

    from recipes.fill_in_the_middle import FillInTheMiddle
    plan = StreamPlan(corpora, transforms=[FillInTheMiddle(prefix_id=..., suffix_id=..., middle_id=...)], seq_len=4096)

Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255 (section 3).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from tokshard.runtime import Sample, SampleRandom

NO_LABEL = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class FillInTheMiddle:
    """Turns ``a b c`` into prefix-suffix-middle or suffix-prefix-middle order, piece by piece.

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
    """

    prefix_id: int
    suffix_id: int
    middle_id: int
    rate: float = 0.5
    spm_rate: float = 0.5

    def __post_init__(self) -> None:
        ids = {self.prefix_id, self.suffix_id, self.middle_id}
        if len(ids) < 3 or min(ids) < 0 or not (0 <= self.rate <= 1 and 0 <= self.spm_rate <= 1):
            raise ValueError(f"{self!r}: the three ids must differ and be at least 0, and rates are from 0 to 1")

    def __call__(self, sample: Sample, random: SampleRandom) -> Sample:
        """Change some of the pieces. Four numbers are drawn per piece, changed or not."""
        if max(self.prefix_id, self.suffix_id, self.middle_id) > np.iinfo(sample.tokens.dtype).max:
            raise ValueError(f"{self!r}: an id does not fit {sample.tokens.dtype}, the dtype of the corpus")
        weights, pre, suf, mid = sample.loss_weights, [self.prefix_id], [self.suffix_id], [self.middle_id]
        tokens, next_tokens = sample.tokens.copy(), sample.next_tokens.copy()
        draws = random.uniform(4 * len(sample.piece_lengths)).reshape(-1, 4)
        stops = np.cumsum(sample.piece_lengths)
        for index in np.flatnonzero(draws[:, 0] < self.rate).tolist():
            stop, length = int(stops[index]), int(sample.piece_lengths[index])
            start, end = stop - length, stop - (next_tokens[index] == NO_LABEL)  # a delimiter stays where it is
            inner = end - start
            if inner <= 6 or (weights is not None and (weights[start : end - 1] != weights[start]).any()):
                continue  # too short, or weights belong to single tokens
            low, high = sorted((draws[index, 1:3] * (inner - 2)).astype(int).tolist())
            prefix, middle = tokens[start : start + low].copy(), tokens[start + low : start + high].copy()
            suffix = tokens[start + high + 3 : end].copy()
            is_spm = draws[index, 3] < self.spm_rate
            parts = (pre, suf, suffix, mid, prefix, middle) if is_spm else (pre, prefix, suf, suffix, mid, middle)
            tokens[start:end] = np.concatenate(parts)
            if end == stop:
                next_tokens[index] = NO_LABEL
        return replace(sample, tokens=tokens, next_tokens=next_tokens)
