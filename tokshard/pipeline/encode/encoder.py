"""From texts to one flat array of tokens with delimiters; checks that no text became a special id."""

from __future__ import annotations

import os
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokshard.errors import TokenizerError, is_panic
from tokshard.extras import version_of
from tokshard.format.manifest import TokenizerInfo
from tokshard.pipeline.encode.tokenizer_file import without_truncation
from tokshard.pipeline.sources.records import NOT_ENCODED, Problem
from tokshard.store import no_temporary_file
from tokshard.wording import first_line

TOKENIZERS, FASTOKENS = "tokenizers", "fastokens"
"""The packages that encode."""

_MAX_COMPARED_RANGES = 4
_ID_DTYPE = np.dtype(np.uint32)
"""The dtype of the ids that the library returns."""


class EncodingError(Exception):
    """The tokenizer library fails on a text. The message is the library's."""


EncodeTexts = Callable[[Sequence[str]], list[NDArray[Any]]]
"""From texts to the ids of each, without delimiters: contiguous uint32 [tokens]. It may raise `EncodingError`."""


@dataclass(frozen=True, slots=True)
class EncodedTexts:
    """Documents one after another.

    Args:
        tokens: uint32 [tokens], delimiters included. The writer narrows them when it copies them.
        ends: int64 [documents]: where each document ends in `tokens`.
        with_special: indices of the texts that were encoded to a special id. They are not among the documents.
        failed: for each text that became no document, its index, the reason and the detail.
        idle: indices of conversations without a target. They are not among the documents either.
        loss: of conversations: the columns of loss spans.
        changes: kind of change, to the indices of the changed texts.
        omitted: of conversations: as in `Documents`.
    """

    tokens: NDArray[Any]
    ends: NDArray[np.int64]
    with_special: tuple[int, ...] = ()
    failed: Mapping[int, Problem] = field(default_factory=dict)
    idle: Sequence[int] = ()
    loss: Mapping[str, Sequence[NDArray[Any]]] = field(default_factory=dict)
    changes: Mapping[str, Sequence[int]] = field(default_factory=dict)
    omitted: Sequence[Sequence[tuple[str, int]]] | None = None


class DocumentEncoder:
    """Encodes texts, ends each with the EOS of `info`, and starts each with its BOS if it has one."""

    def __init__(self, encode: EncodeTexts, info: TokenizerInfo) -> None:
        self._encode = encode
        delimiters = [info.eos_id] if info.bos_id is None else [info.eos_id, info.bos_id]
        self._between = np.array(delimiters, _ID_DTYPE).tobytes()
        self._num_delimiters = len(delimiters)
        self._special_ranges = list(_ranges(info.special_ids.values()))
        self._vocab_size = info.vocab_size
        self._is_special = np.zeros(info.vocab_size, np.bool_)
        self._is_special[list(info.special_ids.values())] = True

    def __call__(self, texts: Sequence[str]) -> EncodedTexts:
        """Encode texts. Costs 1 ns per token and 0.1 us per document in addition to the tokenizer.

        Raises:
            TokenizerError: the library returns ids that are not uint32, or are outside of the vocabulary.
        """
        failed: dict[int, Problem] = {}
        try:
            ids = dict(enumerate(self._encode(texts)))
        except EncodingError:
            ids = dict(self._one_by_one(texts, failed))
        tokens, ends = self._join(list(ids.values()))
        bad: tuple[int, ...] = ()
        # each document has exactly its delimiters: any other count means that text became control
        if self._count_special(tokens) != len(ids) * self._num_delimiters:
            bad = tuple(index for index, document in ids.items() if self._is_special[document].any())
            tokens, ends = self._join([ids[index] for index in sorted(ids.keys() - bad)])
        return EncodedTexts(tokens, ends, bad, failed)

    def _one_by_one(self, texts: Sequence[str], failed: dict[int, Problem]) -> Iterator[tuple[int, NDArray[Any]]]:
        """The ids of the texts on which the library does not fail, and the problems of the others."""
        for index, text in enumerate(texts):
            try:
                (found,) = self._encode([text])
                yield index, found
            except EncodingError as error:
                failed[index] = NOT_ENCODED, str(error)

    def _count_special(self, tokens: NDArray[Any]) -> int:
        if len(self._special_ranges) > _MAX_COMPARED_RANGES:
            return int(np.count_nonzero(self._is_special[tokens]))
        # special ids are mostly consecutive, and a comparison is ten times as fast as a look-up
        return sum(
            int(np.count_nonzero(tokens == start if stop == start + 1 else (tokens >= start) & (tokens < stop)))
            for start, stop in self._special_ranges
        )

    def _join(self, ids: Sequence[NDArray[Any]]) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """The tokens of documents, with delimiters, and where each ends in them."""
        if not ids:
            return np.empty(0, _ID_DTYPE), np.empty(0, np.int64)
        lengths = np.fromiter(map(len, ids), np.int64, len(ids)) + self._num_delimiters
        ends = np.cumsum(lengths)
        # joining bytes takes a fifth of the time of `np.concatenate` on short documents; the delimiters are the
        # separator, so there is no EOS before the first document and no BOS after the last
        parts: list[Any] = [b"", *ids, b""]
        joined = self._between.join(parts)
        num_tokens = int(ends[-1]) + self._num_delimiters
        # ids of another width would be read as other ids
        if len(joined) != num_tokens * _ID_DTYPE.itemsize:
            raise _wrong_ids(f"arrays of {', '.join(sorted({str(found.dtype) for found in ids}))}")
        tokens = np.frombuffer(joined, _ID_DTYPE)
        if (largest := int(tokens.max())) >= self._vocab_size:
            raise _wrong_ids(f"the id {largest}, and the vocabulary has {self._vocab_size} ids")
        return tokens[1 : 1 + int(ends[-1])], ends


def _wrong_ids(found: str) -> TokenizerError:
    return TokenizerError(
        f"the tokenizer library returned {found}; expected ids of the vocabulary as {_ID_DTYPE}",
        hint="install another version of tokenizers, and report this with its version",
    )


def _ranges(ids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Consecutive ids as half-open ranges."""
    ordered = np.unique(np.fromiter(ids, np.int64))
    for run in np.split(ordered, np.flatnonzero(np.diff(ordered) > 1) + 1):
        yield int(run[0]), int(run[-1]) + 1


_INLINE_BYTES = 8_192
"""Measured with tokenizers 1.0.0rc3. A wrong value costs nothing but speed."""

_FLAT_BYTES = 65_536
"""The same for fastokens 0.3.5, on one thread."""


_HINTS = {
    "Byte fallback": "tokenizers 1.0 refuses such files (Gemma 1 and 2 have them): pip install 'tokenizers<1'",
    "fancy-regex": "tokenizers 1.0 refuses patterns that look ahead or back: pip install 'tokenizers<1'",
}
"""Words in the library's errors for files that an older version loads, to the hint."""


class Encoder:
    """Encodes texts in this process, on one thread.

    The ids equal those of ``tokenizers.Tokenizer.encode(text, add_special_tokens=False)`` of the installed version.
    Special tokens in the text are encoded as ordinary text.

    Args:
        content: bytes of a ``tokenizer.json``.
        ids: tokens to the ids that they must have.
        engine: the package that encodes: `TOKENIZERS`, or one with the same ids, see `tokshard.pipeline.encode.engine`.

    Raises:
        TokenizerError: the library cannot load the file, or gives one of `ids` another id.
    """

    def __init__(self, content: bytes, ids: Mapping[str, int] | None = None, engine: str = TOKENIZERS) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # 0.2x: workers are the parallelism
        os.environ["FASTOKENS_BPE_THREADS"] = "1"
        self._content, self._ids, self._engine = content, ids or {}, engine
        self._encode = self._load()

    def __call__(self, texts: Sequence[str]) -> list[NDArray[Any]]:
        """Token ids of each text, without delimiters: contiguous uint32 [tokens].

        Raises:
            EncodingError: the library fails on one of the texts, and does not say on which.
        """
        try:
            return self._encode(texts)
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception):
                if not is_panic(error):
                    raise
                self._encode = self._load()  # a lock that the panic left closed would fail on other texts
            raise EncodingError(f"{self._library} fails on the text: {first_line(error)}") from error

    @property
    def _library(self) -> str:
        return f"{self._engine} {version_of(self._engine)}"

    def _load(self) -> EncodeTexts:
        try:
            with tempfile.NamedTemporaryFile() as file:  # the library loads files only
                file.write(without_truncation(self._content))
                file.flush()
                load: Any = Tokenizer if self._engine == TOKENIZERS else import_module(self._engine).Tokenizer
                tokenizer: Any = load.from_file(file.name)
            numbers = {token: tokenizer.encode(token, add_special_tokens=False).ids for token in self._ids}
            encode = _encoder_of(self._engine, tokenizer)
            (found,) = encode(["a b"])  # some parts are only found to be missing when they are used
        except OSError as error:
            raise no_temporary_file(error) from error
        except MemoryError:
            raise
        except BaseException as error:  # the library raises bare Exception
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise TokenizerError(
                f"{self._library} cannot load the tokenizer: {first_line(error)}",
                hint="leave out --engine"
                if self._engine != TOKENIZERS
                else next(
                    (hint for said, hint in _HINTS.items() if said in str(error)),
                    "check that it is a tokenizer.json, and try another version of tokenizers",
                ),
            ) from error
        for token, ids in numbers.items():
            if len(ids) == 1 and ids[0] != self._ids[token]:  # a token of the vocabulary alone may become others
                raise TokenizerError(
                    f"the file of the tokenizer says that {token!r} is {self._ids[token]}, and {self._library}, which "
                    f"encodes texts, gives it {ids[0]}",
                    hint="number its added_tokens as the library does: by the vocabulary, or after it without a gap",
                )
        if found.dtype != np.uint32:
            raise TokenizerError(
                f"{self._library} gives ids as {found.dtype}, expected uint32",
                hint="install another version of tokenizers",
            )
        return encode


def _encoder_of(engine: str, tokenizer: Any) -> EncodeTexts:
    if engine == FASTOKENS:
        return _encoder_fastokens(tokenizer)
    return _encoder_02x(tokenizer) if hasattr(tokenizer, "encode_batch_fast") else _encoder_1x(tokenizer)


def _encoder_fastokens(tokenizer: Any) -> EncodeTexts:
    encode_batch = tokenizer.encode_batch_flat

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        ids: list[NDArray[Any]] = []
        for start, stop in inline_groups(texts, _FLAT_BYTES):
            content, offsets = encode_batch(texts[start:stop], split_special_tokens=True)
            tokens = np.frombuffer(content, _ID_DTYPE)
            ids += [tokens[first:last] for first, last in pairwise(np.frombuffer(offsets, np.uint64).tolist())]
        return ids

    return encode_all


def _encoder_1x(tokenizer: Any) -> EncodeTexts:
    encode, encode_batch = tokenizer.encode, tokenizer.encode_batch

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        ids: list[NDArray[Any]] = []
        for start, stop in inline_groups(texts):
            if stop == start + 1:
                ids.append(encode(texts[start], add_special_tokens=False, encode_special_tokens=True).ids_array)
            else:
                group = encode_batch(texts[start:stop], add_special_tokens=False, encode_special_tokens=True)
                ids += [found.ids_array for found in group]
        return ids

    return encode_all


def inline_groups(texts: Sequence[str], most: int = _INLINE_BYTES) -> Iterator[tuple[int, int]]:
    """Half-open ranges of texts, in order: one text each, or a batch that `encode_batch` of 1.x runs without threads.

    A call costs as much as 20 tokens, so a call for each short text would halve the speed. Above `_INLINE_BYTES` of
    text, which is `most`, a batch goes to threads, which costs up to half of the throughput per core.
    """
    # a character takes four bytes at most
    ends = list(accumulate(len(text) if text.isascii() else 4 * len(text) for text in texts))
    start, before = 0, 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, before + most, start))
        yield start, stop
        start, before = stop, ends[stop - 1]


def _encoder_02x(tokenizer: Any) -> EncodeTexts:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # pickling drops this, so tokenizers are never pickled
    encode_batch = tokenizer.encode_batch_fast

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array(found.ids, np.uint32) for found in encode_batch(texts, add_special_tokens=False)]

    return encode_all
