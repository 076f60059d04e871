"""The trained tokens, as other tools store them: a mask or labels with a value for each token.

The values are not shifted: the value of a token says whether that token is predicted. Only the packs of Megatron-Bridge
have the value of a token one place before it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import UsageError
from tokshard.interop.tokens.batches import NumberFile, companion_size, damaged
from tokshard.store import Store

LOSS_FIELDS = ("labels", "loss_mask", "assistant_masks", "completion_mask")
"""Usual names of a column of masks or labels."""

STARTS, PACKED = "seq_start_id", "loss_mask"
"""The columns of Megatron-Bridge's packs: where the documents of a row start, and the mask."""

NO_LOSS = "none"
"""The name of a column that means: do not read any masks."""

IGNORED = -100
"""The label of a token that is not trained."""

WRONG_LOSS = "loss mask or labels do not fit"
"""Reason for a record whose values say nothing about its tokens."""

_LEAVE_OUT = f"--loss-field {NO_LOSS} leaves masks and labels out: then all tokens are trained"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossField:
    """The mask or labels of a source, which say which tokens are trained.

    Args:
        name: of a column, or of a companion file in messages.
        is_weighted: its values are weights, and not only 0 and 1.
        is_shifted: the value of a token lies one place before it.
    """

    name: str
    is_weighted: bool = False
    is_shifted: bool = False

    @property
    def is_labels(self) -> bool:
        """Whether the values are ids, and `IGNORED` where nothing is trained."""
        return "label" in self.name and "mask" not in self.name


def mask_file(store: Store, name: str, *, num_ids: int) -> NumberFile:
    """The mask of a file of ids: a byte for each, 1 where it is trained and 0 elsewhere.

    Raises:
        BadSourceError: it is missing, or has another size.
    """
    size = companion_size(store, name, "the loss mask")
    if size != num_ids:
        raise damaged(store, name, f"it has {size:,} bytes for {num_ids:,} ids, expected one for each")
    return NumberFile(store=store, name=name, dtype=np.dtype("u1"), count=size)


def mask_weights(mask: NumberFile, low: int, high: int) -> NDArray[np.float32]:
    """The weights of the ids ``[low, high)``.

    Raises:
        BadSourceError: a byte is not 0 or 1.
    """
    values = mask.read(low, high)
    if int(values.max(initial=0)) > 1:
        place = int(np.argmax(values > 1))
        raise damaged(mask.store, mask.name, f"byte {low + place:,} is {int(values[place])}, expected 0 or 1")
    return values.astype(np.float32)


def find_loss(location: str, names: Collection[str], wanted: str | None) -> str | None:
    """The column that says which tokens are trained, if there is one.

    Args:
        names: the columns that may be one.
        wanted: the user's choice; None for the one with a usual name.

    Raises:
        UsageError: there is no such column, or several have usual names.
    """
    if wanted == NO_LOSS:
        return None
    found = [name for name in ((wanted,) if wanted else LOSS_FIELDS) if name in names]
    if wanted and not found:
        raise UsageError(
            f"{location} has no column {wanted!r} with a value for each token; it has {', '.join(names) or 'none'}",
            hint="give the column of the mask or labels with --loss-field, or leave the option out",
        )
    if len(found) > 1:
        raise UsageError(
            f"{location} has several columns that may say what is trained: {', '.join(found)}",
            hint=f"give one with --loss-field; {_LEAVE_OUT}",
        )
    return found[0] if found else None


def check_loss(location: str, *, has_loss: bool, is_wanted: bool, wanted: str | None) -> None:
    """Refuse a source that has a mask where others have none, or the other way round.

    Raises:
        UsageError: with the source.
    """
    if has_loss == is_wanted or (has_loss and wanted == NO_LOSS):
        return
    here, there = ("a mask or labels", "the first source has none") if has_loss else ("no mask or labels", "others do")
    raise UsageError(
        f"{location} has {here} to say what is trained, and {there}",
        hint=f"import them apart and join the corpora with tokshard copy; {_LEAVE_OUT}",
    )


def weights_of(
    field: LossField, values: NDArray[Any], tokens: NDArray[Any], ends: NDArray[np.int64]
) -> tuple[NDArray[np.float32], dict[int, tuple[str, str]]]:
    """The weight of each token in the loss, 0 where it is not trained: float32 [tokens]; and the problems.

    Args:
        values: a label or a mask for each token: [tokens].
        ends: int64 [documents]: where each document ends in the tokens.

    Returns:
        The weights, and the index of a document to the reason and detail why they cannot be read.
    """
    if field.is_labels:
        weights = (values != IGNORED).astype(np.float32)
        is_wrong = (values != IGNORED) & (values != tokens)
        expected = f"expected {IGNORED} or the id itself, {{id}}: labels are not shifted"
    else:
        with np.errstate(over="ignore"):  # infinity is refused
            weights = values.astype(np.float32)
        is_wrong = ~(np.isfinite(weights) & (weights >= 0)) if field.is_weighted else (values != 0) & (values != 1)
        expected = f"expected {'a weight of 0 or more that float32 holds' if field.is_weighted else '0 or 1'}"
    lengths = np.diff(ends, prepend=0)
    if field.is_shifted:
        lasts = ends[lengths > 0] - 1
        is_late = np.zeros(len(weights), np.bool_)
        is_late[lasts] = weights[lasts] != 0
        if is_late.any() and not is_wrong.any():
            is_wrong, expected = is_late, "expected 0 at the last token: it is shifted by one in packs"
        weights = np.concatenate([np.zeros(1, np.float32), weights])[:-1]
        weights[np.concatenate([np.zeros(1, np.int64), ends[:-1]])[lengths > 0]] = 0
    problems: dict[int, tuple[str, str]] = {}
    places = np.flatnonzero(is_wrong)
    documents, first = np.unique(np.searchsorted(ends, places, "right"), return_index=True)
    for document, place in zip(documents.tolist(), places[first].tolist(), strict=True):
        at = place - int(ends[document] - lengths[document])
        detail = f"{field.name} is {values[place].item()!r} at token {at:,}, {expected.format(id=tokens[place].item())}"
        problems[document] = WRONG_LOSS, detail
    if problems:
        weights[is_wrong] = 0
    return weights, problems
