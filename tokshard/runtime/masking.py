"""Masked documents in rows: which pieces and labels, and what becomes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokshard.runtime.batches import Packed

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


def is_masked(packed: Packed) -> NDArray[np.bool_]:
    """Whether the labels of each piece are all ignored: bool [pieces]."""
    if packed.masked is None:
        return np.zeros(len(packed.piece_lengths), np.bool_)
    found: NDArray[np.bool_] = packed.masked & LABELS > 0
    return found


def num_masked_tokens(packed: Packed) -> int:
    """Inputs of masked documents."""
    return 0 if packed.masked is None else int(packed.piece_lengths[is_masked(packed)].sum())


def mask_rows(packed: Packed, eos_id: int | None, ignored: int) -> Packed:
    """Rows without the last labels of masked pieces, and with EOS where inputs are masked. `widen` does the rest."""
    assert packed.masked is not None
    if not packed.masked.any():
        return packed
    next_tokens = np.where(packed.masked & (LABELS | LAST_LABEL) > 0, ignored, packed.next_tokens)
    are_eos = packed.masked & INPUTS > 0
    if are_eos.any():
        assert eos_id is not None
        inputs = packed.tokens[:, :-1]
        inputs[np.repeat(are_eos, packed.piece_lengths).reshape(inputs.shape)] = eos_id
    return replace(packed, next_tokens=next_tokens)
