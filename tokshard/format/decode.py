"""Token ids back to text."""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray
from tokenizers import Tokenizer

from tokshard.errors import RESTORE, DamagedCorpusError, TokenizerError
from tokshard.format import names
from tokshard.format.manifest import Manifest
from tokshard.store import Store, local_file

Decode = Callable[[NDArray[Any]], str]
"""Turns token ids [tokens] into text, in which special tokens appear by their spelling."""


def load_decoder(store: Store, manifest: Manifest) -> Decode:
    """The decoder of a corpus, from the copy of its tokenizer.

    It reads files written by `tokenizers` 0.2x and 1.x with either. Costs the loading of a tokenizer, up to a second.

    Raises:
        DamagedCorpusError: the copy is missing or does not match the manifest.
        TokenizerError: the installed version of the library cannot load it.
    """
    read_tokenizer(store, manifest)  # the library may crash on a file that no build has loaded before
    try:
        with local_file(store, names.TOKENIZER) as local:
            decode: Any = Tokenizer.from_file(local).decode
    except Exception as error:  # the library raises bare Exception
        version = importlib.metadata.version("tokenizers")
        raise TokenizerError(
            f"tokenizers {version} cannot load {store.where(names.TOKENIZER)}: {error}",
            hint=f"the corpus was built with {manifest.tokenizer.library} "
            f"{manifest.tokenizer.library_version}; install that",
        ) from error
    return lambda tokens: str(decode(tokens.tolist(), skip_special_tokens=False))


def read_tokenizer(store: Store, manifest: Manifest) -> bytes:
    """The ``tokenizer.json`` of a corpus.

    Raises:
        DamagedCorpusError: the copy is missing or does not match the manifest.
    """
    path = store.where(names.TOKENIZER)
    try:
        content = store.get(names.TOKENIZER)
    except OSError as error:
        raise DamagedCorpusError(f"{path} cannot be read: {error.strerror}", hint=RESTORE) from error
    found, expected = hashlib.sha256(content).hexdigest(), manifest.files[names.TOKENIZER].sha256
    if found != expected:
        raise DamagedCorpusError(f"{path} has SHA-256 {found}, expected {expected}", hint=RESTORE)
    return content
