"""The contents of a ``tokenizer.json`` and its configuration: vocabulary, delimiters, normalizer. Loads no library."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import msgspec

from tokshard.errors import SourceError, TokenizerError, UsageError
from tokshard.extras import version_of
from tokshard.forking import decodable
from tokshard.format.manifest import TokenizerInfo, canonical_json
from tokshard.format.schema import MAX_VOCABULARY
from tokshard.pipeline.sources.hub import SCHEME, fetch_tokenizer, is_model_id
from tokshard.store import Store, is_uri, locate, look_at, open_store, real_location

_FILES = ("tokenizer.json", "tokenizer.model")
"""The files that are looked for in a directory, in this order."""
_CONFIG = "tokenizer_config.json"
_SPECIAL = "special_tokens_map.json"
"""Older folders name their special tokens only here."""
_TEMPLATE = "chat_template.jinja"
_FOREIGN_SUFFIXES = (".model", ".tiktoken", ".bpe")
"""File names of SentencePiece models and tiktoken ranks."""
_LOCAL_SUFFIXES = (".json", *_FOREIGN_SUFFIXES)
"""A location with one of these endings is a file, never a model of the hub."""
BOS_FROM_TOKENIZER = "auto"
"""Value of ``--bos`` that stands for the token in the tokenizer's own configuration."""
_SPACE = "\u2581"
"""How a vocabulary of SentencePiece spells a space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer as read from disk, nothing loaded yet.

    Args:
        content: the bytes of ``tokenizer.json``.
        info: its entry in the manifest.
        notes: notes for the user, a line each.
        config: content of ``tokenizer_config.json``, with the tokens that only ``special_tokens_map.json`` names.
        template: content of the ``chat_template.jinja`` next to it; None if there is none.
        has_plain_ids: each added token has the id of the vocabulary, or the next free one, as libraries number them.
        normalizer: steps that change text before it is encoded, such as ``NFKC, Lowercase``; None if there are none.
    """

    content: bytes
    info: TokenizerInfo
    notes: tuple[str, ...]
    config: Mapping[str, Any] = field(default_factory=dict)
    template: str | None = None
    normalizer: str | None = None
    has_plain_ids: bool = True


def read_tokenizer(location: str, *, eos: str | None, bos: str | None, needs_eos: bool = True) -> TokenizerFile:
    """Read a tokenizer, and determine its delimiters.

    EOS and BOS come from `eos` and `bos`, else from ``tokenizer_config.json`` in the same directory, else from
    ``special_tokens_map.json``.

    Args:
        location: a ``tokenizer.json``, a directory that holds one, or a model of the hub. If a local path has the name
            of a model, the path is meant.
        bos: None for no BOS, a token, or `BOS_FROM_TOKENIZER`.
        needs_eos: documents end in it; else any special token is it, if the configuration names none.

    Raises:
        TokenizerError: the file cannot be read, has no EOS, lacks a token, or has an id of `MAX_VOCABULARY` or more.
    """
    path, name = _find(location)
    if path.endswith(_FOREIGN_SUFFIXES) and look_at(path) is not None:
        raise TokenizerError(
            f"{path} is not a tokenizer.json, which is all that a build reads",
            hint="make a tokenizer.json of it, as recipes/convert_tokenizer.py does",
        )
    folder, file = locate(path)
    content, parsed = _read_json(folder, file)
    vocabulary, added = _vocabulary(parsed, path)
    config, template = read_config(folder)
    ids = {**vocabulary, **{token: entry["id"] for token, entry in added.items()}}
    unknown = _unknown(parsed)  # it stands for pieces of text, so it does not control anything, however it is flagged
    flagged = {token: entry["id"] for token, entry in added.items() if entry.get("special") and token != unknown}
    if not needs_eos:
        eos = next((token for token in (_token_of(config, "eos_token"), *flagged) if token in ids), None)
    eos = eos or _configured_eos(config, location, flagged)
    notes = _notes(parsed, config, eos, bos)
    if bos == BOS_FROM_TOKENIZER:
        bos = _configured_bos(config, folder.where(_CONFIG))
    _check_known({"--eos": eos, "--bos": bos}, ids, path, flagged)
    specials = {**flagged, eos: ids[eos], **({bos: ids[bos]} if bos else {})}
    info = TokenizerInfo(
        name=name,
        sha256=hashlib.sha256(content).hexdigest(),
        canonical_sha256=hashlib.sha256(canonical_json(parsed)).hexdigest(),
        vocab_size=_vocabulary_size(path, vocabulary, {token: entry["id"] for token, entry in added.items()}),
        library="tokenizers",
        library_version=version_of("tokenizers"),
        special_ids=dict(sorted(specials.items(), key=lambda item: item[1])),
        eos=eos,
        eos_id=ids[eos],
        bos=bos,
        bos_id=ids[bos] if bos else None,
    )
    return TokenizerFile(
        content=content,
        info=info,
        notes=notes,
        config=config,
        template=template,
        normalizer=normalizer_name(parsed.get("normalizer")),
        has_plain_ids=_has_plain_ids(vocabulary, added.values()),
    )


def _has_plain_ids(vocabulary: Mapping[str, int], added: Iterable[Mapping[str, Any]]) -> bool:
    free = 1 + max(vocabulary.values(), default=-1)
    for entry in added:
        if entry["content"] in vocabulary:
            if vocabulary[entry["content"]] != entry["id"]:
                return False
        elif entry["id"] != free:
            return False
        else:
            free += 1
    return True


PARSE = "parse="
"""How a value of ``--special-tokens`` begins."""


def parsed_tokens(value: str | None) -> list[str]:
    """The tokens of a value of ``--special-tokens``."""
    return [] if value is None else value.removeprefix(PARSE).split(",")


def with_parsed(info: TokenizerInfo, value: str) -> tuple[TokenizerInfo, str]:
    """The tokenizer of texts in which some special tokens are meant.

    Args:
        value: ``parse=TOKEN,...``.

    Returns:
        The tokenizer, with these tokens allowed in text; and the value with each token once, in the order of ids.

    Raises:
        UsageError: one of them is not special, or is a delimiter, which belongs only between documents.
    """
    if not value.startswith(PARSE):
        raise UsageError(
            f"special_tokens is {value!r:.60}",
            hint=f"give the tokens that texts spell and mean, as in --special-tokens '{PARSE}<|im_start|>,<|im_end|>'",
        )
    wanted = parsed_tokens(value)
    fitting = {token: index for token, index in info.special_ids.items() if token not in (info.eos, info.bos)}
    wrong = next((token for token in wanted if token not in fitting), None)
    if wrong is not None:
        what = "delimits documents" if wrong in info.special_ids else "is no special token of the tokenizer"
        raise UsageError(
            f"special_tokens has {wrong!r}, which {what}",
            hint=f"give some of {', '.join(list(fitting)[:8])}" if fitting else "leave out --special-tokens",
        )
    others = {token: index for token, index in info.special_ids.items() if token not in wanted}
    found = ",".join(token for token in fitting if token in wanted)
    return msgspec.structs.replace(info, special_ids=others), f"{PARSE}{found}"


def parsing(content: bytes, info: TokenizerInfo, tokens: Collection[str] = ()) -> bytes:
    """A ``tokenizer.json`` whose delimiters are special, and whose given special tokens are found in text.

    Args:
        info: its EOS and BOS may lack the flag, and are never made of text.
        tokens: those that texts mean.
    """
    added = added_tokens(content)
    flags = [
        one["content"] not in tokens if one.get("special") else one["content"] in (info.eos, info.bos) for one in added
    ]
    if flags == [bool(one.get("special")) for one in added]:
        return content
    changed = [{**one, "special": flag} for one, flag in zip(added, flags, strict=True)]
    return json.dumps({**json.loads(content), "added_tokens": changed}).encode()


def read_config(folder: Store) -> tuple[dict[str, Any], str | None]:
    """The other files of a tokenizer's folder: the configuration, and the chat template.

    Raises:
        TokenizerError: one of them cannot be read.
    """
    config: dict[str, Any] = {}
    try:
        for name in (_SPECIAL, _CONFIG):
            if _has(folder, name):
                found = _read_json(folder, name)[1]
                config |= {key: value for key, value in found.items() if value is not None or key not in config}
                json.dumps(config, ensure_ascii=False).encode()
        name = _TEMPLATE
        return config, folder.get(name).decode() if _has(folder, name) else None
    except UnicodeError as error:
        raise TokenizerError(
            f"{folder.where(name)} holds characters that are not valid UTF-8: {error}", hint="correct the file"
        ) from error
    except OSError as error:
        raise TokenizerError(
            f"{folder.where(name)} cannot be read: {error.strerror or error}", hint="check the file"
        ) from error


def _has(store: Store, name: str) -> bool:
    """Whether a folder has a file. It is asked for, as web servers list nothing."""
    try:
        store.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # reading it says more
    return True


def _vocabulary_size(path: str, *ids: Mapping[str, int]) -> int:
    """The highest id plus one. A token may have one id in the model and another among the added tokens."""
    token, last = max((item for tokens in ids for item in tokens.items()), key=itemgetter(1))
    if last >= MAX_VOCABULARY:
        raise TokenizerError(
            f"{path} gives {token!r} the id {last:,}; ids up to {MAX_VOCABULARY - 1:,} are supported",
            hint="number its tokens without such a gap: a model has a row of its embedding for every id",
        )
    return 1 + last


def _configured_eos(config: Mapping[str, Any], location: str, flagged: Mapping[str, int]) -> str:
    eos = _token_of(config, "eos_token")
    if eos is None:
        raise TokenizerError(
            f"{location} names no EOS token, and every document has to end in one",
            hint="give it with --eos TOKEN" + (f"; its special tokens are {_listed(flagged)}" if flagged else ""),
        )
    return eos


def _configured_bos(config: Mapping[str, Any], config_path: str) -> str:
    bos = _token_of(config, "bos_token")
    if bos is None:
        raise TokenizerError(
            f"{config_path} names no bos_token, which --bos {BOS_FROM_TOKENIZER} asks for",
            hint="give the token with --bos TOKEN, or leave --bos out",
        )
    return bos


def _check_known(
    delimiters: Mapping[str, str | None], ids: Mapping[str, int], path: str, flagged: Mapping[str, int]
) -> None:
    """Refuse delimiters, given by their option, that are not in the vocabulary. The hint lists `flagged` tokens."""
    for option, token in delimiters.items():
        if token is not None and token not in ids:
            raise TokenizerError(
                f"token {token!r} ({option}) is not in the vocabulary of {path}",
                hint="give one of its tokens" + (f", such as {_listed(flagged)}" if flagged else ""),
            )


def _find(location: str) -> tuple[str, str]:
    """The file of a tokenizer, fetched first if it is on the hub, and the name of the tokenizer."""
    found = None if location.startswith(SCHEME) else look_at(location)
    is_file = location.endswith(_LOCAL_SUFFIXES)
    if location.startswith(SCHEME) or (found is None and is_model_id(location) and not is_file):
        try:
            files = fetch_tokenizer(location)
        except (SourceError, UsageError) as error:
            if location.startswith(SCHEME):
                raise
            raise type(error)(
                f"there is no file or folder {location}, and on the hub: {error.problem}",
                hint=f"correct the path; or, if a model of the hub is meant: {error.hint}",
            ) from error
        return open_store(files.root).where(_FILES[0]), files.label
    if found is None and not is_file and "/" not in location:
        raise TokenizerError(
            f"there is no file or folder {location}",
            hint="give a tokenizer.json, a directory that holds one, or a model of the hub with its owner, such as "
            "openai-community/gpt2",
        )
    path = location
    if (found is not None and found.name.endswith("/")) or (found is None and is_uri(location) and not is_file):
        folder = open_store(location)
        path = folder.where(next((name for name in _FILES if _has(folder, name)), _FILES[0]))
    folder, name = locate(path)
    return path, os.path.basename(real_location(folder.location if name in _FILES else path))


def _read_json(folder: Store, name: str) -> tuple[bytes, dict[str, Any]]:
    try:
        content = folder.get(name)
    except OSError as error:
        raise TokenizerError(
            f"{folder.where(name)} cannot be read: {error.strerror or error}",
            hint="give a tokenizer.json, or a directory that holds one, with --tokenizer",
        ) from error
    try:
        try:
            parsed = msgspec.json.decode(content)
        except (msgspec.MsgspecError, UnicodeError):
            parsed = json.loads(content)  # accepts lone surrogates and NaN, and says where the JSON is wrong
        if not isinstance(parsed, dict):
            raise TypeError(f"it holds a {type(parsed).__name__}, expected an object")
    except (ValueError, TypeError, RecursionError) as error:
        raise TokenizerError(
            f"{folder.where(name)} is not JSON: {error}", hint="give a Hugging Face tokenizer.json with --tokenizer"
        ) from error
    return content, parsed


def _vocabulary(parsed: Mapping[str, Any], path: str) -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Token to id of the model, and token to entry of the added tokens."""
    try:
        vocab = parsed["model"]["vocab"]
        if isinstance(vocab, dict):
            is_sound = set(map(type, vocab.values())) <= {int}
            tokens = vocab if is_sound else {token: int(index) for token, index in vocab.items()}
        else:  # Unigram: a list of (token, score)
            tokens = {str(entry[0]): index for index, entry in enumerate(vocab)}
        added = {str(entry["content"]): {**entry, "id": int(entry["id"])} for entry in parsed.get("added_tokens") or []}
        if not tokens and not added:
            raise ValueError("the vocabulary is empty")
        if min([*tokens.values(), *(entry["id"] for entry in added.values())]) < 0:
            raise ValueError("the vocabulary has a negative id")
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise TokenizerError(
            f"{path} is not a tokenizer.json: {error!r}", hint="give a Hugging Face tokenizer.json with --tokenizer"
        ) from error
    return tokens, added


def _unknown(parsed: Mapping[str, Any]) -> str | None:
    """The token that a model gives for text outside of its vocabulary."""
    model = parsed["model"]
    unknown = model.get("unk_token")
    if unknown is None and isinstance(model.get("unk_id"), int) and isinstance(model["vocab"], list):
        unknown = next((entry[0] for entry in model["vocab"][model["unk_id"] :]), None)  # Unigram
    return unknown if isinstance(unknown, str) else None


def normalizer_name(normalizer: Any) -> str | None:
    """The steps of a normalizer that decoding does not undo, in order; None if it undoes all of them.

    Args:
        normalizer: the ``normalizer`` of a ``tokenizer.json``.
    """
    names: list[str] = []
    pending = [normalizer]
    while pending:
        step = pending.pop()
        if not isinstance(step, dict):
            continue
        steps = step.get("normalizers")
        if isinstance(steps, list):
            pending += reversed(steps)
        elif not _is_undone(step):
            names.append(str(step.get("type")))
    return ", ".join(dict.fromkeys(names)) or None


def _is_undone(step: Mapping[str, Any]) -> bool:
    """Whether a step only spells text as the vocabulary does: bytes as characters, spaces as U+2581."""
    if step.get("type") == "Replace":
        return step.get("pattern") == {"String": " "} and step.get("content") == _SPACE
    return step.get("type") == "ByteLevel" or (step.get("type") == "Prepend" and step.get("prepend") == _SPACE)


@decodable
class _Blocks(msgspec.Struct, frozen=True):
    truncation: Any = None
    padding: Any = None
    added_tokens: list[dict[str, Any]] | None = None


def _blocks(content: bytes) -> _Blocks:
    """Some keys of a ``tokenizer.json``: skipping its vocabulary takes a twentieth of the time of reading it."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeError):  # `json` accepts more
        return msgspec.json.decode(content, type=_Blocks)
    parsed = json.loads(content)
    return _Blocks(*(parsed.get(name) for name in _Blocks.__struct_fields__))


def added_tokens(content: bytes) -> list[dict[str, Any]]:
    """The added tokens of a ``tokenizer.json``."""
    return _blocks(content).added_tokens or []


def without_truncation(content: bytes) -> bytes:
    """A ``tokenizer.json`` without the blocks that would silently truncate and pad documents."""
    blocks = _blocks(content)
    if not blocks.truncation and not blocks.padding:
        return content
    return json.dumps({**json.loads(content), "truncation": None, "padding": None}).encode()


def _token_of(config: Mapping[str, Any], key: str) -> str | None:
    value = config.get(key)
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) and value else None


def _notes(parsed: Mapping[str, Any], config: Mapping[str, Any], eos: str, bos: str | None) -> tuple[str, ...]:
    notes = [
        f"the tokenizer asks for {block}; documents are never truncated or padded, so this is ignored"
        for block in ("truncation", "padding")
        if parsed.get(block)
    ]
    for entry in parsed.get("added_tokens") or []:
        flags = [flag for flag in ("lstrip", "rstrip") if entry.get(flag)]
        if flags and not entry.get("special") and entry["content"] not in (eos, bos):
            notes.append(
                f"the added token {entry['content']!r} takes white space beside it out of texts ({', '.join(flags)})"
            )
    if config.get("add_bos_token") is True and bos is None and _token_of(config, "bos_token"):
        notes.append(
            f"the tokenizer's configuration asks for BOS; documents get it with --bos {BOS_FROM_TOKENIZER} only"
        )
    return tuple(notes)


def _listed(tokens: Mapping[str, int]) -> str:
    shown = list(tokens)[:5]
    return ", ".join(repr(token) for token in shown) + (", ..." if len(tokens) > 5 else "")
