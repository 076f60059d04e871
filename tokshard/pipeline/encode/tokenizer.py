"""One narrow adapter over `tokenizers` 0.2x and 1.x. Text is never control: special tokens in it get ordinary ids."""

from __future__ import annotations

import importlib.metadata
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokshard.errors import TokenizerError
from tokshard.pipeline.encode.encoder import EncodingError

_INLINE_BYTES = 8_192
"""Measured with tokenizers 1.0.0rc3. A wrong value costs nothing but speed."""


class Encoder:
    """Encodes texts in this process, on one thread.

    The ids equal those of ``tokenizers.Tokenizer.encode(text, add_special_tokens=False)`` of the installed version.
    Special tokens in the text are encoded as ordinary text.

    Raises:
        TokenizerError: the library cannot load the file.
    """

    def __init__(self, clean_path: Path) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # 0.2x: workers are the parallelism
        self._path = str(clean_path)
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
                if not _is_panic(error):
                    raise
                self._encode = self._load()  # a lock that the panic left closed would fail on other texts
            raise EncodingError(f"tokenizers {_version()} fails on the text: {_first_line(error)}") from error

    def _load(self) -> Callable[[Sequence[str]], list[NDArray[Any]]]:
        try:
            tokenizer: Any = Tokenizer.from_file(self._path)
            encode = (_encoder_02x if hasattr(tokenizer, "encode_batch_fast") else _encoder_1x)(tokenizer)
            (found,) = encode(["a b"])  # some parts are only found to be missing when they are used
        except MemoryError:
            raise
        except BaseException as error:  # the library raises bare Exception
            if not isinstance(error, Exception) and not _is_panic(error):
                raise
            raise TokenizerError(
                f"tokenizers {_version()} cannot load the tokenizer: {_first_line(error)}",
                hint="check that it is a tokenizer.json, and try another version of tokenizers",
            ) from error
        if found.dtype != np.uint32:
            raise TokenizerError(
                f"tokenizers {_version()} gives ids as {found.dtype}, expected uint32",
                hint="install another version of tokenizers",
            )
        return encode


def _is_panic(error: BaseException) -> bool:
    """Whether Rust code of the library panicked, which raises a `BaseException` that is not an `Exception`."""
    return type(error).__name__ == "PanicException"


def _version() -> str:
    return importlib.metadata.version("tokenizers")


def _first_line(error: BaseException) -> str:
    return next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)


def _encoder_1x(tokenizer: Any) -> Callable[[Sequence[str]], list[NDArray[Any]]]:
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


def inline_groups(texts: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Half-open ranges of texts, in order: one text each, or a batch that `encode_batch` of 1.x runs without threads.

    A call costs as much as 20 tokens, so a call for each short text would halve the speed. Above `_INLINE_BYTES` of
    text, a batch goes to threads, which costs up to half of the throughput per core.
    """
    # a character takes four bytes at most
    ends = list(accumulate(len(text) if text.isascii() else 4 * len(text) for text in texts))
    start, before = 0, 0
    while start < len(ends):
        stop = max(start + 1, bisect_right(ends, before + _INLINE_BYTES, start))
        yield start, stop
        start, before = stop, ends[stop - 1]


def _encoder_02x(tokenizer: Any) -> Callable[[Sequence[str]], list[NDArray[Any]]]:
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True  # pickling drops this, so tokenizers are never pickled
    encode_batch = tokenizer.encode_batch_fast

    def encode_all(texts: Sequence[str]) -> list[NDArray[Any]]:
        return [np.array(found.ids, np.uint32) for found in encode_batch(texts, add_special_tokens=False)]

    return encode_all
