"""Settings from TOML, strictly: an unknown key or a wrong type is an error that names it and what was expected.

Paths in a file are relative to that file, wherever a command runs.
"""

from __future__ import annotations

import dataclasses
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import IO, Any, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec

from tokshard.errors import UsageError
from tokshard.store import is_uri, joined_location, locate

Settings = TypeVar("Settings")

_KEY = re.compile(r"at `\$\.([\w.]+)")


def key(example: str, *, read: Callable[[str], int] | None = None, is_path: bool = False) -> dict[str, Any]:
    """The `metadata` of a field of settings.

    Args:
        example: a line of TOML, for the hint of an error.
        read: converts text that is given instead of a number, such as `read_count`; None: text is refused.
        is_path: it holds a path or a URI, or several.
    """
    return {"example": example, "read": read, "is_path": is_path}


def read_toml(path: str, *, hint: str) -> dict[str, Any]:
    """The tables of a file.

    Args:
        path: of the file, or its URI.
        hint: what to give instead, if the file does not exist.

    Raises:
        UsageError: the file does not exist, or is not TOML.
    """
    try:
        with _opened(path) as file:
            return tomllib.load(file)
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}", hint=hint) from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits is a ValueError, too
        raise UsageError(
            f"{path} is not valid TOML: {error}",
            hint="give a file of TOML, such as mix.toml; https://toml.io has its syntax",
        ) from error


def _opened(path: str) -> IO[bytes]:
    if not is_uri(path):
        return open(path, "rb")  # a pipe, too
    store, name = locate(path)
    return store.open(name)


def path_beside(file: str, path: str) -> str:
    """A path from a file, relative to that file, as a path for the working directory. URIs and absolute paths stay.

    Raises:
        UsageError: no file can have that path.
    """
    if "\0" in path:
        raise UsageError(f"{file}: the path {path!r:.60} has a zero byte", hint="give the path of a file or directory")
    directory = os.path.dirname(file)
    if not directory or is_uri(path) or os.path.isabs(path):
        return path
    return joined_location(directory, path)


def change_paths(fields: Mapping[str, Any], kind: type, change: Callable[[str], str]) -> dict[str, Any]:
    """Tables in which every path is changed. Empty text stays, and so do values that are not text."""

    def changed(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: changed(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [changed(item) for item in value]
        return change(value) if isinstance(value, str) and value else value

    found, types = dict(fields), get_type_hints(kind)
    for item in dataclasses.fields(kind):
        value = found.get(item.name)
        if item.metadata.get("is_path"):
            found |= {} if value is None else {item.name: changed(value)}
        elif dataclasses.is_dataclass(inner := types[item.name]) and isinstance(inner, type):
            found |= {item.name: change_paths(value, inner, change)} if isinstance(value, Mapping) else {}
    return found


def convert(fields: Mapping[str, Any], kind: type[Settings], *, where: str, hint: str, prefix: str = "") -> Settings:
    """Tables as a dataclass, nested ones as its fields.

    Args:
        where: the file, for messages.
        hint: where the keys and their types are listed.
        prefix: of the keys in messages, such as ``data.``.

    Raises:
        UsageError: an unknown key, with the nearest known one; a missing key; a wrong type, with what was expected.
    """
    ready = _ready(fields, kind, where=where, prefix=prefix)
    try:
        return msgspec.convert(ready, kind)
    except msgspec.ValidationError as error:
        text = str(error).replace("`$.", f"`{prefix}")
        found = _KEY.search(str(error))
        better = _expected(kind, *found[1].split(".")) if found else ""
        raise UsageError(f"{where}: {text}", hint=better or hint) from error


def _expected(kind: type, name: str, *rest: str) -> str:
    """A hint with the values that a key may have, or with an example; empty if its field has neither."""
    inner = get_type_hints(kind)[name]
    if rest:
        return _expected(inner, *rest)
    if get_origin(inner) is Literal:
        return f"give one of {', '.join(map(str, get_args(inner)))}"
    return f"for example: {example}" if (example := example_of(kind, name)) else ""


def example_of(kind: type, name: str) -> str:
    """An example of a key; empty if its field lacks one."""
    found = [item for item in dataclasses.fields(kind) if item.name == name]
    return str(found[0].metadata.get("example", "")) if found else ""


def _ready(fields: Any, kind: type, *, where: str, prefix: str) -> dict[str, Any]:
    """Fields that all exist, in which texts such as ``"1.5B"`` have become numbers."""
    if not isinstance(fields, Mapping):
        raise UsageError(f"{where}: {prefix.rstrip('.')} is {fields!r}, expected a section", hint="write [section]")
    found, types = dict(fields), get_type_hints(kind)
    readers = {item.name: item.metadata.get("read") for item in dataclasses.fields(kind)}
    for name, value in fields.items():
        if name not in types:
            near = [one for one in types if one.startswith(name)] + get_close_matches(name, types, n=1)
            is_section = isinstance(value, Mapping) and all(map(dataclasses.is_dataclass, types.values()))
            word, known = ("section", "[{}]") if is_section else ("key", prefix + "{}")
            hint = f"did you mean {known.format(near[0])}?" if near else f"known here: {', '.join(types)}"
            raise UsageError(f"{where}: no {word} {known.format(name)}", hint=hint)
        if isinstance(types[name], type) and dataclasses.is_dataclass(types[name]):
            found[name] = _ready(value, types[name], where=where, prefix=f"{prefix}{name}.")
        elif isinstance(value, str) and (read := readers[name]) is not None:
            try:
                found[name] = read(value)
            except UsageError as error:
                raise UsageError(f"{where}: {prefix}{name}: {error.problem}", hint=error.hint) from error
    return found
