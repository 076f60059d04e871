"""Token ids back to text."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any

from numpy.typing import NDArray

from tokshard.errors import RESTORE, DamagedCorpusError, TokenizerError
from tokshard.extras import version_of
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
    from tokenizers import Tokenizer  # takes time, and reading tokens does not need it

    content = read_tokenizer(store, manifest)  # the library may crash on a file that no build has loaded before
    path, built = store.where(names.TOKENIZER), f"{manifest.tokenizer.library} {manifest.tokenizer.library_version}"
    if (greatest := _greatest_id(content)) >= manifest.tokenizer.vocab_size:  # the library takes memory up to it
        raise DamagedCorpusError(
            f"{path} has a token with id {greatest:,}, expected ids below {manifest.tokenizer.vocab_size:,}",
            hint=RESTORE,
        )
    with _refusing(f"cannot load {path}", built), local_file(store, names.TOKENIZER) as local:
        decode: Any = Tokenizer.from_file(local).decode

    def text_of(tokens: NDArray[Any]) -> str:
        with _refusing(f"cannot decode the tokens of a document with {path}", built):
            return str(decode(tokens.tolist(), skip_special_tokens=False))

    return text_of


def _greatest_id(content: bytes) -> int:
    """The greatest id of a ``tokenizer.json``; -1 where it has none in a known form, which the library refuses."""
    with contextlib.suppress(ValueError, RecursionError):
        parsed = _object(json.loads(content))
        added = parsed.get("added_tokens")
        ids = [*_object(_object(parsed.get("model")).get("vocab")).values()]
        ids += [_object(token).get("id") for token in (added if isinstance(added, list) else [])]
        return max((one for one in ids if isinstance(one, int)), default=-1)
    return -1


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _refusing(what: str, built: str) -> Iterator[None]:
    """Whatever the library raises becomes a `TokenizerError`.

    Args:
        what: what it then did not do.
        built: the library that built the corpus, with its version.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are none
        version = version_of("tokenizers")
        raise TokenizerError(
            f"tokenizers {version} {what}: {error}", hint=f"the corpus was built with {built}; install that"
        ) from error


def read_tokenizer(store: Store, manifest: Manifest) -> bytes:
    """The ``tokenizer.json`` of a corpus.

    Raises:
        DamagedCorpusError: the copy is missing or does not match the manifest.
    """
    path = store.where(names.TOKENIZER)
    try:
        content = store.get(names.TOKENIZER)
    except OSError as error:
        raise DamagedCorpusError(f"{path} cannot be read: {error.strerror or error}", hint=RESTORE) from error
    found, expected = hashlib.sha256(content).hexdigest(), manifest.files[names.TOKENIZER].sha256
    if found != expected:
        raise DamagedCorpusError(f"{path} has SHA-256 {found}, expected {expected}", hint=RESTORE)
    return content
