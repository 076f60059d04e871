"""Documents that are taken out of the loss during a run: which ones, and from which sample on.

A mask belongs to the content of a corpus. It counts from a global sample on, so earlier samples do not change. It
changes only labels: ROWS.md has the rules. Documents are listed in a file, which may grow. A state holds the file's
path, and length and hash of the part that counts.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import PlanError, PlanMismatchError
from tokshard.forking import cached_property
from tokshard.runtime.bytes.source import TokenSource
from tokshard.store import absolute_location, locate

_MAX_BYTES = 1 << 30
"""The largest file of document numbers, in bytes."""

_PARTS, _MOST_IN_PART = 4, 8
"""To find masked documents, a corpus is cut into equal parts, about so many for each; where one has more than so many
borders of documents, they are found by bisection."""

_NPY = b"\x93NUMPY"
_HINT = "give a file with one document number in each line, or a .npy file of integers"
_NOT_NUMBERS = f"{_HINT}; a list of ids becomes a view with tokshard select, and numbers with tokshard diff"
_LINE = re.compile(rb"[0-9]*\r?")

Calls = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Documents of a corpus that a file takes out of the loss.

    Args:
        fingerprint: content fingerprint of the corpus.
        name: name of the corpus in the plan when they were masked, for messages.
        file: path or URI of the file that lists them.
        calls: for each call of `mask`, the first global sample in which it counts, and the bytes that the file had
            then; both ascend. Lines appended after the last call are not masked.
        sha256: hash of the file's bytes at the last call.
        documents: int64 [n], their numbers in the corpus, ascending.
        since: int64 [n], the first global sample in which each is out of the loss.
    """

    fingerprint: str
    name: str
    file: str
    calls: Calls
    sha256: str
    documents: NDArray[np.int64] = field(compare=False)
    since: NDArray[np.int64] = field(compare=False)

    def from_start(self) -> Mask:
        """The same documents, out of the loss from the first sample on."""
        return replace(self, calls=((0, self.calls[-1][1]),), since=np.zeros_like(self.since))


def masking(
    masks: tuple[Mask, ...], file: str | os.PathLike[str], *, sample: int, fingerprint: str, name: str
) -> tuple[Mask, ...]:
    """Masks with the documents that a file lists; the same masks if its whole content was masked before.

    Raises:
        PlanError: the file cannot be read, does not list documents, or has other changes than appended lines.
    """
    if not isinstance(file, str | os.PathLike):
        raise PlanError(f"{file!r:.100} is not a file of document numbers", hint=_HINT)
    path = absolute_location(file)
    content = _read(path)
    sha256 = _sha256(content)
    mine = [mask for mask in masks if mask.fingerprint == fingerprint]
    if any((mask.sha256, mask.calls[-1][1]) == (sha256, len(content)) for mask in mine):
        return masks
    before = next((mask for mask in mine if mask.file == path), None)
    if before is not None:
        num_bytes, word = before.calls[-1][1], "has other changes than appended lines"
        is_grown = _begins_with(content, num_bytes, before.sha256)
        if is_grown and not content[:num_bytes].endswith(b"\n"):
            is_grown, word = False, "has grown, but its last line had no line end when it was masked"
        if not is_grown:
            raise PlanError(
                f"{path}, which lists documents that the run masks in corpus {name!r} already, {word}",
                hint="append lines only, or list more documents in another file; masked documents stay masked",
            )
    past = () if before is None else tuple(call for call in before.calls if call[0] < sample)
    calls = (*past, (sample, len(content)))
    others = tuple(mask for mask in masks if mask is not before)
    return (*others, _mask(content, path, calls, sha256, fingerprint=fingerprint, name=name))


def load_mask(path: str, calls: Calls, sha256: str, *, fingerprint: str, name: str, others: Sequence[str] = ()) -> Mask:
    """A mask from a state; arguments as for `Mask`.

    Args:
        path: the earlier path of the list. It is known by its length and hash, so it may be one of `others` now.

    Raises:
        PlanMismatchError: none of these files begins with the list.
    """
    num_bytes, problems = calls[-1][1], []
    for location in dict.fromkeys([path, *others]):
        try:
            content = _read(location)
        except PlanError as error:
            problems.append(error.problem)
            continue
        if _begins_with(content, num_bytes, sha256):
            return _mask(content, location, calls, sha256, fingerprint=fingerprint, name=name)
        found = f"the SHA-256 of its first {num_bytes:,} bytes is {_sha256(content[:num_bytes])[:12]}"
        problems.append(f"{location} was changed: {found}" if location == path else f"{location} is another file")
    raise PlanMismatchError(
        f"the run masks documents of corpus {name!r} that were listed in {path}, a file that begins with "
        f"{num_bytes:,} bytes of SHA-256 {sha256}: {'; '.join(problems)}",
        hint=f"put the file of that run back there, or say where it is: loader.mask({name!r}, FILE) before "
        "load_state_dict, data.mask of a recipe, or tokshard trace --mask FILE",
    )


def _read(path: str) -> bytes:
    try:
        store, name = locate(path)
        num_bytes = store.stat(name).size  # refuses anything but a file, which might never end
        if num_bytes > _MAX_BYTES:
            raise PlanError(f"{path} has {num_bytes} bytes, expected at most {_MAX_BYTES}", hint=_HINT)
        return store.get(name) if num_bytes else b""
    except OSError as error:
        raise PlanError(f"{path} cannot be read: {error.strerror or error}", hint=_HINT) from error


def _begins_with(content: bytes, num_bytes: int, sha256: str) -> bool:
    """Whether a file begins with the bytes that were masked before. It may have grown, unless it is a .npy file."""
    return _sha256(content[:num_bytes]) == sha256 and not (content[num_bytes:] and content.startswith(_NPY))


def _mask(content: bytes, path: str, calls: Calls, sha256: str, *, fingerprint: str, name: str) -> Mask:
    bounds = [0, *(stop for _, stop in calls)]
    is_npy = content.startswith(_NPY)
    lists = [_listed(content[start:stop], path, is_npy=is_npy) for start, stop in pairwise(bounds)]
    documents, since = _once(np.concatenate(lists), np.repeat([sample for sample, _ in calls], list(map(len, lists))))
    if not len(documents):
        raise PlanError(f"{path} has no documents", hint=f"leave it out if there are none to mask, or {_HINT}")
    if documents[0] < 0:
        raise PlanError(
            f"{path} lists document {documents[0]} of corpus {name!r}", hint="documents are numbered from 0"
        )
    return Mask(
        fingerprint=fingerprint, name=name, file=path, calls=calls, sha256=sha256, documents=documents, since=since
    )


def _once(documents: NDArray[np.int64], since: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Each document once, ascending, with the first sample from which on it is out of the loss."""
    if (documents[1:] > documents[:-1]).all():
        return documents, since
    order = np.lexsort((since, documents))
    documents, since = documents[order], since[order]
    is_first = np.diff(documents, prepend=documents[0] - 1) > 0
    return documents[is_first], since[is_first]


def _listed(content: bytes, path: str, *, is_npy: bool) -> NDArray[np.int64]:
    """The numbers in a part of a file, which ends at the end of a line."""
    try:
        if not is_npy:
            lines = content.replace(b"\r\n", b"\n").removesuffix(b"\r").strip(b"\n")
            if lines.translate(None, b"0123456789\n"):
                wrong = next(line for line in content.split(b"\n") if not _LINE.fullmatch(line))
                raise ValueError(f"a line is {wrong[:60].decode(errors='replace')!r}, expected digits")
            numbers = np.fromstring(lines, np.int64, sep="\n")  # 20 ns each
            if numbers.max(initial=0) == np.iinfo(np.int64).max:  # or above
                raise ValueError("a number is above 2**63 - 2")
            return numbers
        found = np.load(io.BytesIO(content), allow_pickle=False)
        if found.ndim != 1 or found.dtype.kind not in "iu" or np.any(found > np.iinfo(np.int64).max):
            raise ValueError(f"it holds {found.dtype} {list(found.shape)}, expected document numbers")
        return found.astype(np.int64, copy=False)  # type: ignore[no-any-return]
    except (ValueError, OverflowError, MemoryError, EOFError, TokenError) as error:  # the last three of a .npy's header
        said = str(error).partition(": <")[0]  # numpy names objects of its parser
        raise PlanError(f"{path} is not a list of documents: {said[:120]}", hint=_NOT_NUMBERS) from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """The masks of a cursor as stretches of the corpora of a plan.

    Args:
        stretches: by the number of a corpus in the plan.
    """

    stretches: Mapping[int, MaskedStretches]

    @property
    def num_documents(self) -> int:
        """Masked documents of these corpora."""
        return sum(len(stretches.since) for stretches in self.stretches.values())

    def covers(
        self, corpora: int | NDArray[np.int64], starts: NDArray[np.int64], samples: NDArray[np.int64]
    ) -> NDArray[np.bool_]:
        """Whether pieces are out of the loss: bool [n].

        Args:
            corpora: number of the corpus in the plan: one for all pieces, or int64 [n].
            starts: int64 [n], start of each piece in its corpus; a piece lies in one document.
            samples: int64 [n], the global sample of each.
        """
        covered = np.zeros(len(starts), np.bool_)
        for number, stretches in self.stretches.items():
            mine = np.flatnonzero(np.broadcast_to(corpora == np.int64(number), len(starts)))
            covered[mine] = stretches.cover(starts[mine], samples[mine])
        return covered


@dataclass(frozen=True, eq=False, kw_only=True)
class MaskedStretches:
    """The masked documents of one corpus. Finding the one at a position takes some 40 ns, whatever their number.

    Args:
        starts, stops: int64 [n], of each document in the corpus, ascending.
        since: int64 [n], the first global sample in which it is out of the loss.
        num_tokens: of the corpus.
    """

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    since: NDArray[np.int64]
    num_tokens: int

    @cached_property
    def _latest(self) -> int:
        return int(self.since.max())

    @cached_property
    def _index(self) -> tuple[NDArray[Any], Any, NDArray[np.int32]]:
        """Starts and stops in turn; equal parts of the corpus have 2**bits tokens; how many borders are before each.

        Made in the thread that makes batches.
        """
        dtype = np.uint32 if self.num_tokens < 1 << 32 else np.int64  # with half of the memory it is twice as fast
        borders: NDArray[Any] = np.stack([self.starts, self.stops], axis=1).ravel().astype(dtype)
        bits: Any = dtype(max(1, self.num_tokens // (_PARTS * len(self.starts))).bit_length() - 1)
        passed = np.diff((borders >> bits).astype(np.int64), prepend=-1, append=(self.num_tokens >> int(bits)) + 1)
        before = np.arange(len(passed), dtype=np.int32).repeat(passed)
        return np.append(borders, np.array(np.iinfo(dtype).max, dtype)), bits, before

    def cover(self, positions: NDArray[np.int64], samples: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether tokens at positions, in samples, are out of the loss: bool [n]."""
        borders, bits, before = self._index
        places = positions.astype(borders.dtype)
        passed = before.take(places >> bits)
        passed += borders.take(passed) <= places
        more = (borders.take(passed) <= places).nonzero()[0]
        for _ in range(_MOST_IN_PART):
            if not len(more):
                break
            passed[more] += 1
            more = more[borders.take(passed[more]) <= places[more]]
        else:
            passed[more] = borders.searchsorted(places[more], "right")
        found: NDArray[np.bool_] = (passed & 1).astype(np.bool_)  # a start was passed, and its stop was not
        if len(samples) and samples.min() < self._latest:
            inside = found.nonzero()[0]
            found[inside] = samples[inside] >= self.since[passed[inside] // 2]
        return found


def masked_tokens(masks: Sequence[Mask], sources: Sequence[TokenSource]) -> MaskedTokens | None:
    """Find masked documents in the corpora of a plan. Masks of other corpora wait until these corpora come back.

    Reads the bounds of each document, which costs a request in a corpus that is read by range.

    Returns:
        None if nothing was ever masked.

    Raises:
        PlanError: a corpus has no such document.
    """
    if not masks:
        return None
    of_corpora = [[mask for mask in masks if mask.fingerprint == source.fingerprint] for source in sources]
    return MaskedTokens(
        {number: _stretches_of(sources[number], mine) for number, mine in enumerate(of_corpora) if mine}
    )


def _stretches_of(source: TokenSource, masks: Sequence[Mask]) -> MaskedStretches:
    listed = ([mask.documents for mask in masks], [mask.since for mask in masks])
    documents, since = _once(*map(np.concatenate, listed))
    try:
        starts, stops = source.spans_of(documents)
    except IndexError as error:
        listing = max(masks, key=lambda mask: int(mask.documents.max()))
        raise PlanError(
            f"{listing.file} lists a document that is not in corpus {listing.name!r}: {error}",
            hint="give the numbers that tokshard inspect and tokshard trace show",
        ) from error
    return MaskedStretches(starts=starts, stops=stops, since=since, num_tokens=source.num_tokens)
