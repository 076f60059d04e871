"""Encoding by another library than `tokenizers`, only if it gives the same ids. That is tried before a build.

It is tried on texts made to find differences, and on the beginning of inputs.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokshard.errors import TokenizerError
from tokshard.extras import version_of
from tokshard.pipeline.encode.encoder import TOKENIZERS, Encoder, EncodingError
from tokshard.pipeline.encode.tokenizer_file import added_tokens

COMPARED_BYTES = 4 << 20
"""Approximate bytes of text of each input that are compared."""

_BULK = (range(0x3400, 0xA000), range(0xAC00, 0xF900), range(0x20000, 0x33480))
"""Ideographs, syllables and private use, which libraries treat alike: every sixteenth is tried."""

_LAST = 0x33480
"""The end of the characters of Unicode 17 but for tags, variation selectors and private use."""
_SPACES = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\u00a0", "\u2003", "\u3000", "\u200b", "\ufeff")
_WORDS = (
    *("a", "The", "don't", "I'LL", "we've", "\u2019s", "'S", "x_1", "1", "12", "1234567", "3.14", "\u0661\u0662"),
    *("\u00e9", "e\u0301", "\u212b", "\ufb01", "\u2460", "\u0130", "\u00df", "\u01c5", "\u0e01\u0e33", "\u0915\u094d"),
    *("\u65e5\u672c", "\ud55c", "\u1112\u1161", "\u05d0\u05b7", "\u0627\u064b", "\U0001f469\u200d\U0001f469", "\u2581"),
    *("\0", "\x1f", "\x7f", "\ufffd", "\ue000", "\u00ad", "!", "...", "=>", "/*", "<", ">", "</", "#", '"', "(", "_"),
)


def hard_texts(content: bytes) -> Iterator[list[str]]:
    """Texts on which libraries differ: each character beside others, and mixtures with the added tokens.

    Args:
        content: bytes of a ``tokenizer.json``.
    """
    characters = (n for n in itertools.chain(range(_LAST), range(0xE0000, 0xE0200)) if not 0xD800 <= n < 0xE000)
    tried = (chr(n) for n in characters if n % 16 == 0 or not any(n in bulk for bulk in _BULK))
    yield from _batches(f"a{c}a 1{c}1 {c}\n{c} \"{c}', {c}{c}" for c in tried)
    added = [one["content"] for one in added_tokens(content)]
    parts = [*_WORDS, *_SPACES * 2, *added[:64]]
    draw = random.Random(17)  # noqa: S311 - the same texts everywhere
    yield from _batches("".join(draw.choices(parts, k=draw.randint(1, 60))) for _ in range(4_000))
    yield [part * 5_000 for part in (" ", "\n", "a", "1", "ab", ".", "\u00e9", "\U0001f600", *added[:4])]


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    rest = iter(texts)
    while some := list(itertools.islice(rest, 1_024)):
        yield some


def check_same_ids(content: bytes, engine: str, texts: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Compare a library with `tokenizers`. Costs what `tokenizers` takes for the texts, and 4 MB of hard ones.

    Args:
        content: bytes of a ``tokenizer.json``.
        texts: texts, each group with its place.

    Raises:
        TokenizerError: one of the libraries cannot load the tokenizer, or they give a text other ids.
    """
    other, reference = Encoder(content, engine=engine), Encoder(content)
    hard = (("texts that try libraries", some) for some in hard_texts(content))
    for place, some in itertools.chain(hard, texts):
        for text, expected, found in zip(some, _ids(reference, some), _ids(other, some), strict=True):
            if expected is None or found is None or not np.array_equal(expected, found):
                if expected is found is None:
                    continue
                excerpt = repr(text[:60]) + ("..." if len(text) > 60 else "")
                raise TokenizerError(
                    f"{engine} {version_of(engine)} gives other ids than {TOKENIZERS} {version_of(TOKENIZERS)} for "
                    f"{excerpt} in {place}",
                    hint="leave out --engine; libraries that know other versions of Unicode differ in its new "
                    "characters: another version of tokenizers may agree",
                )


def _ids(encode: Encoder, texts: Sequence[str]) -> list[NDArray[Any] | None]:
    """The ids of each text; None where the library fails."""
    try:
        return list(encode(texts))
    except EncodingError:
        return [None] if len(texts) == 1 else [ids for text in texts for ids in _ids(encode, [text])]
