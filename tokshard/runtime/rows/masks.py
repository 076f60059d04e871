"""Documents that are taken out of the loss in the middle of a run: which, from which sample on, and on record.

A mask belongs to the content of a corpus, and counts from a global sample on, so that earlier samples stay what they
were. It changes labels and nothing else: STATE.md has the rules. Documents are listed in a file, of which a state holds
the path and the hash.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime.bytes.source import TokenSource
from tokshard.store import absolute_location, locate

_NEVER = np.iinfo(np.int64).max
_HINT = "give a file with one document number in each line, or a .npy file of integers"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Documents of a corpus that are out of the loss from a sample on.

    Args:
        sample: the first global sample in which they are.
        corpus: content fingerprint of the corpus.
        name: of the corpus in the plan when they were masked, for messages.
        path: the file that lists them.
        sha256: of that file.
        documents: int64 [n], their numbers in the corpus, ascending.
    """

    sample: int
    corpus: str
    name: str
    path: str
    sha256: str
    documents: NDArray[np.int64] = field(compare=False)

    def saved(self) -> dict[str, Any]:
        """As a state holds it."""
        found = {"sample": self.sample, "fingerprint": self.corpus, "name": self.name}
        return {**found, "file": self.path, "sha256": self.sha256}


def make_mask(file: str | os.PathLike[str], *, sample: int, corpus: str, name: str) -> Mask:
    """A mask of the documents that are listed in a file.

    Raises:
        PlanError: it cannot be read, or does not list documents.
    """
    if not isinstance(file, str | os.PathLike):
        raise PlanError(f"{file!r:.100} is not a file of document numbers", hint=_HINT)
    path = absolute_location(file)
    documents, sha256 = _read(path)
    if documents[0] < 0:
        raise PlanError(f"document {documents[0]} of corpus {name!r}", hint="documents are numbered from 0")
    return Mask(sample=sample, corpus=corpus, name=name, path=path, sha256=sha256, documents=documents)


def load_masks(saved: Any, sample: int) -> tuple[Mask, ...]:
    """The masks of a state.

    Args:
        sample: of the state.

    Raises:
        PlanMismatchError: the file of a mask is gone or was changed.
        ValueError, KeyError, TypeError: they are damaged.
    """
    found = tuple(_loaded(entry) for entry in saved)
    starts = [0, *(mask.sample for mask in found), sample]
    if starts != sorted(starts):
        raise ValueError(f"masks that start at {starts[1:-1]} do not fit the sample")
    return found


def _loaded(entry: Mapping[str, Any]) -> Mask:
    start, path, sha256, name = entry["sample"], str(entry["file"]), str(entry["sha256"]), str(entry["name"])
    if not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(  # noqa: TRY004 - of what is saved
            f"a mask from sample {start!r:.100} on"
        )
    documents = _checked_file(path, sha256, name)
    return Mask(
        sample=start, corpus=str(entry["fingerprint"]), name=name, path=path, sha256=sha256, documents=documents
    )


def _checked_file(path: str, sha256: str, name: str) -> NDArray[np.int64]:
    try:
        documents, found = _read(path)
    except PlanError as error:
        raise PlanMismatchError(
            f"the run masks documents of corpus {name!r} that are listed in {path}: {error.problem}",
            hint="put the file of that run back there; without it, the documents would be in the loss again",
        ) from error
    if found != sha256:
        raise PlanMismatchError(
            f"{path}, which lists the documents of corpus {name!r} that the run masks, was changed: its SHA-256 is "
            f"{found[:12]}, expected {sha256[:12]}",
            hint="put the file of that run back, and mask further documents with loader.mask and another file",
        )
    return documents


def _read(path: str) -> tuple[NDArray[np.int64], str]:
    """The numbers in a file, ascending, and its SHA-256."""
    try:
        store, name = locate(path)
        content = store.get(name)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}", hint=_HINT) from error
    try:
        if content.startswith(b"\x93NUMPY"):
            found = np.load(io.BytesIO(content), allow_pickle=False)
        else:
            found = np.array([int(line) for line in content.splitlines() if line.strip()])
    except (ValueError, OverflowError) as error:
        raise PlanError(f"{path} is not a list of documents: {str(error)[:100]}", hint=_HINT) from error
    if not found.size:
        raise PlanError(f"{path} has no documents", hint=_HINT)
    if found.ndim != 1 or found.dtype.kind not in "iu" or int(found.max()) > _NEVER:
        raise PlanError(f"{path} holds {found.dtype} {list(found.shape)}, expected document numbers", hint=_HINT)
    return np.unique(found.astype(np.int64)), hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The masks of a cursor as stretches of the corpora of a plan.

    Args:
        spans: by the number of a corpus in the plan, for each masked document by ascending position: where its tokens
            start and stop, and the first global sample in which it is out of the loss: int64 [3, n].
    """

    spans: Mapping[int, NDArray[np.int64]]

    @property
    def num_documents(self) -> int:
        """Documents of these corpora that are masked."""
        return sum(spans.shape[1] for spans in self.spans.values())

    def covers(
        self, corpora: int | NDArray[np.int64], starts: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether pieces are out of the loss: bool [n].

        Args:
            corpora: the number in the plan, of the corpus of all or int64 [n] of each.
            starts: int64 [n], where in the corpus each piece starts; a piece lies in one document.
            samples: int64 [n], the global sample of each.
        """
        covered = np.zeros(len(starts), np.bool_)
        for number, (firsts, stops, since) in self.spans.items():
            mine = np.flatnonzero(np.broadcast_to(corpora == np.int64(number), len(starts)))
            positions = starts[mine]
            found = np.maximum(np.searchsorted(firsts, positions, "right") - 1, 0)
            is_inside = (positions >= firsts[found]) & (positions < stops[found])
            covered[mine] = is_inside & (samples[mine] >= since[found])
        return covered


def masked_tokens(masks: Sequence[Mask], sources: Sequence[TokenSource]) -> MaskedTokens | None:
    """Find masked documents in the corpora of a plan; those of other corpora wait until these come back.

    Costs a look at the bounds of each document: a request in a corpus that is read by range.

    Returns:
        None if nothing was ever masked.

    Raises:
        PlanError: a corpus has no such document.
    """
    if not masks:
        return None
    of_corpora = [[mask for mask in masks if mask.corpus == source.fingerprint] for source in sources]
    return MaskedTokens({number: _spans_of(sources[number], mine) for number, mine in enumerate(of_corpora) if mine})


def _spans_of(source: TokenSource, masks: Sequence[Mask]) -> NDArray[np.int64]:
    documents = np.unique(np.concatenate([mask.documents for mask in masks]))
    since = np.full(len(documents), _NEVER)
    for mask in masks:
        mine = np.searchsorted(documents, mask.documents)
        since[mine] = np.minimum(since[mine], mask.sample)
    try:
        starts, stops = source.spans_of(documents)
    except IndexError as error:
        raise PlanError(
            f"a masked document is not in corpus {masks[0].name!r}: {error}",
            hint="give the numbers that tokshard inspect and tokshard trace show",
        ) from error
    return np.stack([starts, stops, since])
