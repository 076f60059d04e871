"""Settings from TOML, strictly: an unknown key or a wrong type is an error that names it and what was expected."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, TypeVar, get_type_hints

import msgspec

from tokshard.errors import UsageError

Settings = TypeVar("Settings")


def read_toml(path: str, *, hint: str) -> dict[str, Any]:
    """The tables of a file.

    Args:
        hint: what to give instead, if there is no such file.

    Raises:
        UsageError: no such file, or no TOML.
    """
    try:
        with open(path, "rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}", hint=hint) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} is no TOML: {error}", hint="see https://toml.io") from error


def convert(fields: Mapping[str, Any], kind: type[Settings], *, where: str, hint: str, prefix: str = "") -> Settings:
    """Tables as a dataclass, nested ones as its fields.

    Args:
        where: the file, for messages.
        hint: where the keys and their types are told.
        prefix: of the keys in messages, such as ``data.``.

    Raises:
        UsageError: an unknown key, with the nearest known one; a missing key; a wrong type, with what was expected.
    """
    check_keys(kind, fields, where=where, prefix=prefix)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", f"`{prefix}")
        if prefix and " - at " not in text:
            text += f" - at `{prefix.rstrip('.')}`"
        raise UsageError(f"{where}: {text}", hint=hint) from error


def check_keys(kind: type, fields: Any, *, where: str, prefix: str = "") -> None:
    """Refuse keys that are no fields of a dataclass.

    Raises:
        UsageError: names the key, and the nearest known one.
    """
    if not isinstance(fields, Mapping):
        raise UsageError(f"{where}: {prefix.rstrip('.')} is {fields!r}, expected a section", hint="write [section]")
    types = get_type_hints(kind)
    for key, value in fields.items():
        if key not in types:
            near = get_close_matches(key, types, n=1)
            hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(types)}"
            raise UsageError(f"{where}: no key {prefix}{key}", hint=hint)
        if dataclasses.is_dataclass(types[key]) and isinstance(types[key], type):
            check_keys(types[key], value, where=where, prefix=f"{prefix}{key}.")
