"""What was lost and what was repeated: each token of the corpus has an id of its own, and every id read is entered.

Token k of the corpus has the id k + 1, but that the token which ends a document is the delimiter 0, as in any corpus.
So a row of ids names the places that it came from, whatever shuffled, cut and packed it. Delimiters and padding name no
place and are left out of the account.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DELIMITER = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Tokens of an epoch.

    Args:
        lost: that were never read.
        repeated: readings beyond the first of each token.
        foreign: readings of ids that no token has: padding, or damage.
    """

    lost: int
    repeated: int
    foreign: int


def account(corpus: NDArray[np.integer], readings: Iterable[NDArray[np.integer]]) -> Account:
    """Compare what was read with the corpus.

    Args:
        corpus: ids of all tokens, of which those other than `DELIMITER` are different.
        readings: what each process was given, in any order and of any shape.
    """
    expected = np.zeros(int(corpus.max()) + 1, bool)
    expected[corpus] = True
    expected[DELIMITER] = False
    counts = np.zeros(len(expected), np.int64)
    foreign = 0
    for reading in readings:
        ids = reading.reshape(-1)
        is_inside = (ids >= 0) & (ids < len(expected))
        foreign += int(np.count_nonzero(~is_inside))
        counts += np.bincount(ids[is_inside], minlength=len(expected))
    counts[DELIMITER] = 0
    return Account(
        lost=int(np.count_nonzero(expected & (counts == 0))),
        repeated=int(np.maximum(counts - 1, 0)[expected].sum()),
        foreign=foreign + int(counts[~expected].sum()),
    )


def write_corpus(folder: Path, *, num_tokens: int, document_tokens: int) -> Path:
    """``tokens.npy`` with its offsets, and a tokenizer whose words are the numbers of the places.

    Returns:
        The array of ids, int32.
    """
    folder.mkdir(parents=True, exist_ok=True)
    ids = np.arange(1, num_tokens + 1, dtype=np.int32)
    offsets = bounds(num_tokens, document_tokens)
    ids[offsets[1:] - 1] = DELIMITER
    np.save(folder / "tokens.npy", ids)
    np.save(folder / "tokens.offsets.npy", offsets)
    end = {"id": 0, "content": "<eos>", "special": True}
    end |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "version": "1.0",
        "added_tokens": [end],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {
            "type": "WordLevel",
            "vocab": {"<eos>": 0} | {str(place): place for place in range(1, num_tokens + 2)},
            "unk_token": "1",
        },
    }
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (folder / "tokenizer" / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}', encoding="utf-8")
    return folder / "tokens.npy"


def bounds(num_tokens: int, document_tokens: int) -> NDArray[np.int64]:
    """Where documents of log-normal lengths begin and end: int64 [documents + 1], from 0 to `num_tokens`."""
    rng = np.random.default_rng((num_tokens, document_tokens))
    lengths = rng.lognormal(np.log(document_tokens) - 0.32, 0.8, 2 * num_tokens // document_tokens + 8)
    ends = np.cumsum(np.maximum(2, lengths.astype(np.int64)))
    return np.concatenate([[0], ends[ends < num_tokens - 1], [num_tokens]])
