"""The keys of a recipe with their defaults and meanings, made from its types."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import re
import textwrap
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tokshard.run_files.plan_file import Mix
from tokshard.run_files.recipe import Config
from tokshard.runtime import Cache, StreamPlan

_WIDTH = 120
_ARGUMENT = re.compile(r"^    (\w+(?:, \w+)*): ")


class Key(NamedTuple):
    """A key of a table: its default as TOML, ``required``, or empty for none; and its meaning in a sentence."""

    name: str
    default: str
    meaning: str


def sections() -> dict[str, type]:
    """The tables of a recipe."""
    return dict(get_type_hints(Config))


def keys_of(kind: type) -> list[Key]:
    """The keys of a table, in the order of its fields, those without a default first."""
    meanings, types = _meanings(kind), get_type_hints(kind)
    found = [
        Key(item.name, _default(item), _meaning(meanings[item.name], types[item.name]))
        for item in dataclasses.fields(kind)
    ]
    return sorted(found, key=lambda one: one.default != "required")


def help_text() -> str:
    """All keys of a recipe, for a terminal."""
    lines = []
    for section, kind in sections().items():
        lines += ["", f"[{section}]  {_first_line(kind).replace('`', '')}"]
        for key in keys_of(kind):
            head = f"  {key.name}" + (f" = {key.default}" if key.default not in ("", "required") else "")
            head += "  (required)" if key.default == "required" else ""
            text = f"{head:<34}  {key.meaning.replace('`', '')}"
            lines += textwrap.wrap(text, _WIDTH, subsequent_indent=" " * 36, break_long_words=False)
    return "\n".join(lines[1:])


def _default(item: dataclasses.Field[Any]) -> str:
    value = item.default
    if value is dataclasses.MISSING:
        return "required" if item.default_factory is dataclasses.MISSING else ""
    if value is None or value == "":
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and value >= 1 << 30:
        return f'"{value >> 30}GiB"'
    return f'"{value}"' if isinstance(value, str) else f"{value:_}" if isinstance(value, int) else str(value)


def _meaning(text: str, kind: Any) -> str:
    """A meaning with the values that a key may have, if they are few."""
    if get_origin(kind) is not Literal:
        return text
    return f"{text.rstrip('.')}. One of {', '.join(f'`{value}`' for value in get_args(kind))}."


def _first_line(kind: type) -> str:
    return inspect.cleandoc(kind.__doc__ or "").partition("\n")[0].replace("``", "`")


def _meanings(kind: type) -> dict[str, str]:
    """The meaning of each key, from the docstrings of a dataclass, its bases, and classes that take keys as arguments.

    python -OO has none.
    """
    found = {item.name: "" for item in dataclasses.fields(kind)}
    of_plans = (Cache, StreamPlan) if issubclass(kind, Mix) else ()
    for base in (*of_plans, *reversed(kind.__mro__[:-1])):
        found |= {name: text for name, text in _arguments(inspect.cleandoc(base.__doc__ or "")) if name in found}
    return found


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    rest = text.partition("Args:\n")[2].splitlines()
    lines = itertools.takewhile(lambda line: not line or line[0].isspace(), rest)  # up to the next section
    names: list[str] = []
    words: list[str] = []
    for line in [*lines, "    end: "]:
        if match := _ARGUMENT.match(line):
            meaning = " ".join(words).replace("``", "`")
            yield from ((name, meaning) for name in names)
            names, words = match[1].split(", "), [line[match.end() :].strip()]
        elif line.startswith("        "):
            words.append(line.strip())
