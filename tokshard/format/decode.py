"""Token ids back to text."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from numpy.typing import NDArray

from tokshard.errors import DamagedCorpusError, TokenizerError
from tokshard.extras import version_of
from tokshard.format import names
from tokshard.format.files import readable
from tokshard.format.manifest import Manifest
from tokshard.store import Store, named_temporary_file

Decode = Callable[[NDArray[Any]], str]
"""Turns token ids [tokens] into text, in which special tokens appear by their spelling."""

SPACE = "\u2581"
"""The character by which SentencePiece spells a space."""


def byte_alphabet() -> dict[str, int]:
    """The characters by which byte-level vocabularies spell bytes: printable ones as themselves, others from U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


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
    with _refusing(f"cannot load {path}", built):
        parsed = parse_tokenizer(content)
    if (greatest := _greatest_id(parsed)) >= manifest.tokenizer.vocab_size:  # the library takes memory up to it
        raise DamagedCorpusError(
            f"{path} has a token with id {greatest:,}, expected ids below {manifest.tokenizer.vocab_size:,}"
        )
    with named_temporary_file() as file:
        file.write(msgspec.json.encode(parsed))  # without merges it is loaded in half the time and memory
        file.flush()
        with _refusing(f"cannot load {path}", built):
            decode: Any = Tokenizer.from_file(file.name).decode

    def text_of(tokens: NDArray[Any]) -> str:
        with _refusing(f"cannot decode the tokens of a document with {path}", built):
            return str(decode(tokens.tolist(), skip_special_tokens=False))

    return text_of


def parse_tokenizer(content: bytes) -> dict[str, Any]:
    """The fields of a ``tokenizer.json``. The merges, which only encoding needs, are empty.

    Raises:
        msgspec.MsgspecError, UnicodeDecodeError, RecursionError: it is not JSON, or it or its model is not an object.
    """
    parts_of, decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode, msgspec.json.decode
    parts = parts_of(content)
    model = {
        name: [] if name == "merges" else decode(part) for name, part in parts_of(parts.get("model", b"{}")).items()
    }
    return {**{name: decode(part) for name, part in parts.items() if name != "model"}, "model": model}


def _greatest_id(parsed: dict[str, Any]) -> int:
    """The greatest id of a ``tokenizer.json``; -1 where it has none in a known form, which the library refuses."""
    added = parsed.get("added_tokens")
    ids = [*_object(parsed["model"].get("vocab")).values()]
    ids += [_object(token).get("id") for token in (added if isinstance(added, list) else [])]
    return max((one for one in ids if isinstance(one, int)), default=-1)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


@contextlib.contextmanager
def _refusing(what: str, built: str) -> Iterator[None]:
    """Whatever the library raises becomes a `TokenizerError`.

    Args:
        what: what the library failed to do.
        built: the library that built the corpus, with its version.
    """
    try:
        yield
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # the library raises bare Exception, and its panics are not even that
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
    with readable(path):
        content = store.get(names.TOKENIZER)
    found, expected = hashlib.sha256(content).hexdigest(), manifest.files[names.TOKENIZER].sha256
    if found != expected:
        raise DamagedCorpusError(f"{path} has SHA-256 {found}, expected {expected}")
    return content
