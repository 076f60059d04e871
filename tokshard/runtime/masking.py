"""Masked documents in rows: which pieces and labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

LABELS, INPUTS, LAST_LABEL = 1, 2, 4
"""Bits: no token of the piece has a label; its inputs are EOS; the label of its last token is of a masked document."""


def flags_of_pieces(
    flags: NDArray[np.uint8],
    pieces: NDArray[np.int64],
    is_piece: NDArray[np.bool_],
    is_label_next: NDArray[np.bool_],
    num_pieces: int,
) -> NDArray[np.uint8]:
    """What is masked of the pieces of rows, those of padding included.

    Args:
        flags: uint8 [reads], of what is read, in the order of rows.
        pieces: int64 [reads], numbers of the pieces.
        is_piece: bool [reads], whether it has inputs.
        is_label_next: bool [reads], whether the label of its last input is the first token of what is read next.
    """
    of_read = flags.copy()
    of_read[:-1] |= (is_label_next[:-1] & (flags[1:] & LABELS > 0)) * np.uint8(LAST_LABEL)
    found = np.zeros(num_pieces, np.uint8)
    found[pieces[is_piece]] = of_read[is_piece]
    return found
