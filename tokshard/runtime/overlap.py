"""Views that share documents. In a mix these would be read more often than the weights say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from tokshard.errors import RESTORE, DamagedCorpusError, PlanError
from tokshard.format.kept import ranges_of
from tokshard.runtime.bytes.source import KeptDocuments, TokenSource


def check_apart(names: Sequence[str], sources: Sequence[TokenSource]) -> None:
    """Refuse corpora that share documents: views of one corpus, the corpus beside them, or several generations.

    Raises:
        PlanError: names the two.
        DamagedCorpusError: the table of a view lists a document twice.
    """
    wholes: dict[str, list[tuple[str, TokenSource]]] = {}
    groups: dict[str, list[tuple[str, KeptDocuments]]] = {}
    for name, source in zip(names, sources, strict=True):
        if source.kept is None:
            wholes.setdefault([*source.earlier_fingerprints, source.fingerprint][0], []).append((name, source))
        else:
            groups.setdefault(source.kept.base, []).append((name, source.kept))
    _check_generations(wholes.values())
    first = np.zeros(1, np.int64)
    for base, found in groups.items():
        for name, kept in found:
            for whole, source in wholes.get(base, ()):
                if int(kept.documents.positions[first][0]) < source.num_tokens:
                    raise _shared(whole, name, int(kept.documents.documents[first][0]))
        cells = {kept.cell for _, kept in found}
        if len(cells) == len(found) and len({kept.division for _, kept in found}) == 1 and "" not in cells:
            continue  # cells of one division: the ranges of a thousand of them need not be compared
        if len(found) > 1:
            _check_views(found)


def _check_generations(wholes: Iterable[Sequence[tuple[str, TokenSource]]]) -> None:
    """As `check_apart`, for corpora with the same first generation. The same corpus twice is read in other epochs."""
    for found in wholes:
        other = [name for name, source in found if source.fingerprint != found[0][1].fingerprint]
        if other:
            raise _shared(found[0][0], other[0], 0)


def _check_views(found: Sequence[tuple[str, KeptDocuments]]) -> None:
    """As `check_apart`, for the views of one corpus."""
    for ranges in ranges_of([kept.documents for _, kept in found]):
        starts, stops = map(np.concatenate, zip(*ranges, strict=True))
        owners = np.repeat(np.arange(len(found)), [len(of_view) for of_view, _ in ranges])
        order = np.argsort(starts, kind="stable")
        overlap = np.flatnonzero(np.maximum.accumulate(stops[order])[:-1] > starts[order][1:])
        for place in overlap[:1].tolist():
            second = int(order[place + 1])
            holds = (starts <= starts[second]) & (stops > starts[second]) & (owners != owners[second])
            if not holds.any():
                name, _ = found[int(owners[second])]
                raise DamagedCorpusError(
                    f"corpus {name!r}: its table lists document {starts[second]:,} of the base twice",
                    hint=RESTORE,
                )
            pair = sorted({int(owners[second]), int(owners[np.flatnonzero(holds)[0]])})
            one, other = (found[number][0] for number in pair)
            raise _shared(one, other, int(starts[second]))


def _shared(one: str, other: str, document: int) -> PlanError:
    return PlanError(
        f"corpora {one!r} and {other!r} share documents, such as number {document:,} of their base: these would be "
        "read more often than the weights say",
        hint="leave one out, or give allow_overlap=True",
    )
