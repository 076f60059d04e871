"""Documents that are taken out of the loss in the middle of a run: which, from which sample on, and on record.

A mask belongs to the content of a corpus, and counts from a global sample on, so that earlier samples stay what they
were. It changes labels, and if asked inputs, and nothing else: STATE.md has the rules.
"""

from __future__ import annotations

import base64
import hashlib
import io
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError, PlanMismatchError
from tokshard.runtime.masking import INPUTS, LABELS
from tokshard.runtime.source import TokenSource
from tokshard.store import absolute_location, locate

MAX_LISTED = 10_000
"""So many documents are kept in a state; more have to be in a file, of which it keeps the hash."""

Inputs = Literal["keep", "eos"]

_NEVER = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Documents of a corpus that are out of the loss from a sample on.

    Args:
        sample: the first global sample in which they are.
        corpus: content fingerprint of the corpus.
        name: of the corpus in the plan when they were masked, for messages.
        inputs: ``"eos"``: their input tokens are EOS; ``"keep"``: they stay.
        path: the file that lists them; empty if the state does.
        sha256: of that file, or of the numbers as little-endian int64.
        documents: int64 [n], their numbers in the corpus, ascending.
    """

    sample: int
    corpus: str
    name: str
    inputs: Inputs
    path: str
    sha256: str
    documents: NDArray[np.int64] = field(compare=False)

    def saved(self) -> dict[str, Any]:
        """As a state holds it."""
        found = {"sample": self.sample, "fingerprint": self.corpus, "name": self.name, "inputs": self.inputs}
        if self.path:
            return {**found, "file": self.path, "sha256": self.sha256}
        return {**found, "count": len(self.documents), "documents": _packed(self.documents)}


def make_mask(
    documents: Iterable[int] | str | os.PathLike[str], *, sample: int, corpus: str, name: str, inputs: str
) -> Mask:
    """A mask of documents that are listed in a call or in a file.

    Args:
        documents: their numbers, or a file that has one in each line, or a .npy file of integers.

    Raises:
        PlanError: the documents cannot be read, are no numbers, or are too many for a state.
    """
    if inputs not in ("keep", "eos"):
        raise PlanError(f"inputs is {inputs!r:.100}", hint="give 'keep' or 'eos'")
    path, sha256 = "", ""
    if isinstance(documents, str | os.PathLike):
        path = absolute_location(documents)
        found, sha256 = _read(path)
    else:
        if not isinstance(documents, Iterable):
            raise PlanError(f"{documents!r:.100} is not a list of documents", hint="give [number, ...], or a file")
        found = _numbers(list(documents), "the list")
    found = np.unique(found)
    if len(found) and found[0] < 0:
        raise PlanError(f"document {found[0]} of corpus {name!r}", hint="documents are numbered from 0")
    if len(found) <= MAX_LISTED:
        path, sha256 = "", _hash(found)
    elif not path:
        raise PlanError(
            f"{len(found):,} documents of corpus {name!r} are listed, expected at most {MAX_LISTED:,}: every state "
            "would hold them",
            hint="write them to a file, one in each line or with numpy.save, and give its path",
        )
    return Mask(
        sample=sample,
        corpus=corpus,
        name=name,
        inputs="eos" if inputs == "eos" else "keep",
        path=path,
        sha256=sha256,
        documents=found,
    )


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
    inputs, path, start = entry["inputs"], str(entry.get("file", "")), entry["sample"]
    if inputs not in ("keep", "eos") or not isinstance(start, int) or isinstance(start, bool):
        raise ValueError(f"inputs {inputs!r:.100} of a mask from sample {start!r:.100} on")
    if path:
        documents, sha256 = _checked_file(path, str(entry["sha256"]), str(entry["name"]))
    else:
        documents = _unpacked(str(entry["documents"]), entry["count"])
        sha256 = _hash(documents)
    return Mask(
        sample=start,
        corpus=str(entry["fingerprint"]),
        name=str(entry["name"]),
        inputs=inputs,
        path=path,
        sha256=sha256,
        documents=documents,
    )


def _checked_file(path: str, sha256: str, name: str) -> tuple[NDArray[np.int64], str]:
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
    return np.unique(documents), found


def _read(path: str) -> tuple[NDArray[np.int64], str]:
    """The numbers in a file, and its SHA-256."""
    try:
        store, name = locate(path)
        content = store.get(name)
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror}", hint="give a file of document numbers") from error
    sha256 = hashlib.sha256(content).hexdigest()
    try:
        if content.startswith(b"\x93NUMPY"):
            return _numbers(np.load(io.BytesIO(content), allow_pickle=False), path), sha256
        return _numbers([int(line) for line in content.splitlines() if line.strip()], path), sha256
    except ValueError as error:
        raise PlanError(
            f"{path} is not a list of documents: {str(error)[:100]}",
            hint="give a file with one document number in each line, or a .npy file of integers",
        ) from error


def _numbers(given: Sequence[Any] | NDArray[Any], where: str) -> NDArray[np.int64]:
    try:
        found = np.asarray(given)
    except (ValueError, OverflowError):
        found = np.asarray(["?"])
    if not found.size:
        raise PlanError(f"{where} has no documents", hint="give the numbers of the documents to mask")
    if found.ndim != 1 or found.dtype.kind not in "iu" or int(found.max()) > _NEVER:
        raise PlanError(
            f"{where} holds {found.dtype} {list(found.shape)}, expected document numbers",
            hint="give integers, from 0 on: tokshard inspect and tokshard trace show the numbers of documents",
        )
    return found.astype(np.int64)


def _hash(documents: NDArray[np.int64]) -> str:
    return hashlib.sha256(documents.astype("<i8").tobytes()).hexdigest()


def _packed(documents: NDArray[np.int64]) -> str:
    """Ascending numbers as text: their differences as little-endian int64, deflated, in base64."""
    return base64.b64encode(zlib.compress(np.diff(documents, prepend=0).astype("<i8").tobytes(), 9)).decode()


def _unpacked(text: str, count: Any) -> NDArray[np.int64]:
    if not isinstance(count, int) or not 0 < count <= MAX_LISTED:
        raise ValueError(f"a mask of {count!r:.100} documents")
    try:
        content = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), 8 * count + 1)
    except zlib.error as error:
        raise ValueError(f"the documents of a mask: {error}") from error
    if len(content) != 8 * count:
        raise ValueError(f"the documents of a mask are not {count}")
    steps = np.frombuffer(content, "<i8").astype(np.int64)
    documents = np.cumsum(steps)
    if steps[0] < 0 or bool((steps[1:] <= 0).any()) or documents[-1] < documents[0]:
        raise ValueError("the documents of a mask do not ascend")
    return documents


@dataclass(frozen=True, slots=True, kw_only=True)
class _Spans:
    """Where the masked documents of a corpus lie: int64 [n] each, ascending.

    Args:
        starts, stops: tokens of the corpus.
        since: the first global sample in which each is out of the loss.
        eos_since: the first one in which its inputs are EOS.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    since: NDArray[np.int64]
    eos_since: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The masks of a cursor as stretches of the corpora of a plan.

    Args:
        spans: by the number of a corpus in the plan.
        num_documents: that are masked in these corpora.
    """

    spans: Mapping[int, _Spans]
    num_documents: int

    def flags(self, corpus: int, starts: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.uint8]:
        """What is masked of pieces: uint8 [n], bits of `tokshard.runtime.masking`.

        Args:
            corpus: its number in the plan.
            starts: int64 [n], where in the corpus each piece starts; a piece lies in one document.
            samples: int64 [n], the global sample of each.
        """
        spans = self.spans.get(corpus)
        if spans is None:
            return np.zeros(len(starts), np.uint8)
        found = np.maximum(np.searchsorted(spans.starts, starts, "right") - 1, 0)
        is_inside = (starts >= spans.starts[found]) & (starts < spans.stops[found])
        flags = (is_inside & (samples >= spans.since[found])) * np.uint8(LABELS)
        flags |= (is_inside & (samples >= spans.eos_since[found])) * np.uint8(INPUTS)
        return flags.astype(np.uint8)


def masked_tokens(masks: Sequence[Mask], sources: Sequence[TokenSource]) -> MaskedTokens | None:
    """Find masked documents in the corpora of a plan; those of other corpora wait until these come back.

    Costs a look at the bounds of each document: a request in a corpus that is read by range.

    Returns:
        None if nothing was ever masked.

    Raises:
        PlanError: a corpus has no such document, or does not say what its EOS is.
    """
    if not masks:
        return None
    spans = {}
    for number, source in enumerate(sources):
        mine = [mask for mask in masks if mask.corpus == source.fingerprint]
        if mine:
            spans[number] = _spans_of(source, mine)
    return MaskedTokens(spans, sum(len(found.starts) for found in spans.values()))


def _spans_of(source: TokenSource, masks: Sequence[Mask]) -> _Spans:
    documents = np.unique(np.concatenate([mask.documents for mask in masks]))
    since, eos_since = np.full((2, len(documents)), _NEVER)
    for mask in masks:
        mine = np.searchsorted(documents, mask.documents)
        since[mine] = np.minimum(since[mine], mask.sample)
        if mask.inputs == "eos":
            eos_since[mine] = np.minimum(eos_since[mine], mask.sample)
            if not hasattr(source, "eos_id"):
                raise PlanError(
                    f"corpus {mask.name!r} does not say which token is its EOS", hint="leave inputs='eos' out"
                )
    try:
        starts, stops = _bounds_of(source, documents)
    except IndexError as error:
        raise PlanError(
            f"a masked document is not in corpus {masks[0].name!r}: {error}",
            hint="give the numbers that tokshard inspect and tokshard trace show",
        ) from error
    return _Spans(starts=starts, stops=stops, since=since, eos_since=eos_since)


def _bounds_of(source: Any, documents: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    if hasattr(source, "spans_of"):
        starts, stops = source.spans_of(documents)
    else:
        places = [source.place_of(document) for document in documents.tolist()]
        starts, stops = np.array([(place.start, place.stop) for place in places], np.int64).T.copy()
    return starts, stops
