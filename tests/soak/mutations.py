"""Changes of bytes, of JSON and of tables of Arrow, each drawn from a seeded generator."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

NUMBERS = (0, 1, -1, 2, 7, 255, 65_535, 65_536, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**53, 2**62, 2**63 - 1, -(2**63))
"""Integers at which something may overflow."""
HUGE = (2**63, 2**64, -(2**63) - 1, 10**30)
"""Those that no column of Arrow can hold."""
TEXTS = ("", "x", "../x", "/", "\0", "ä\u202e", "\ud800", "a" * 5_000, "\x1b[31m", "None", "1", "{}", "%s", "\n")
FLOATS = (0.0, -0.0, -1.0, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"), 0.5)
OTHERS: tuple[Any, ...] = (None, True, False, [], {}, [[]], {"x": 1}, [1, 2], *TEXTS[:3], *NUMBERS[:4], *HUGE, *FLOATS)

Value = Any


def other_bytes(rng: random.Random, content: bytes) -> bytes:
    """The content with one change; the same only if it is empty."""
    if not content:
        return rng.randbytes(1 + rng.randrange(8))
    for _ in range(20):
        found = rng.choice(_CHANGES)(rng, content, _at(rng, content))
        if found != content:
            return found
    return content + b"\0"


def _at(rng: random.Random, content: bytes) -> int:
    """A place, more often near an end, where files have what describes them."""
    reach = rng.randrange(min(600, len(content)))
    return rng.choice([rng.randrange(len(content)), rng.randrange(len(content)), reach, len(content) - 1 - reach])


def _set(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new[: len(content) - at] + content[at + len(new) :]


def _flip(rng: random.Random, content: bytes, at: int) -> bytes:
    return _set(content, at, bytes([content[at] ^ (1 << rng.randrange(8))]))


def _number(rng: random.Random, content: bytes, at: int) -> bytes:
    """Another number of 8, 4 or 2 bytes: a little more or less, or one at which something may overflow."""
    size = rng.choice([8, 4, 2])
    at = at // size * size
    old = int.from_bytes(content[at : at + size], "little")
    new = rng.choice([*NUMBERS, *(old + step for step in (-8, -2, -1, 1, 2, 8) * 3)])
    return _set(content, at, (new % 2 ** (8 * size)).to_bytes(size, "little"))


def _cut_out(rng: random.Random, content: bytes, at: int) -> bytes:
    return content[:at] + content[at + rng.choice([1, 16, len(content)]) :]


def _inserted(rng: random.Random, content: bytes, at: int) -> bytes:
    at = rng.choice([at, len(content)])
    return content[:at] + rng.choice([b"\0", b"\n", b'"', b"{", b"9", rng.randbytes(9), content]) + content[at:]


def _copied(rng: random.Random, content: bytes, at: int) -> bytes:
    """Bytes of another place, or zeros."""
    start = rng.randrange(len(content))
    return _set(content, at, rng.choice([content[start : start + 64], bytes(64)])[: 1 + rng.randrange(64)])


_CHANGES = [_flip, _flip, _number, _number, _cut_out, _inserted, _copied]


def other_content(rng: random.Random, content: bytes) -> bytes:
    """The content with one change; if it is JSON, often one that leaves it JSON."""
    if content[:1] in (b"{", b"[") and content.count(b"\n{") == 0 and rng.random() < 0.65:
        return json.dumps(other_json(rng, json.loads(content))).encode()
    return other_bytes(rng, content)


def other_json(rng: random.Random, value: Value) -> Value:
    """A copy of nested values with one change: of a value, a key, an order, or of what is there."""
    found = json.loads(json.dumps(value))
    holders = list(_holders(found))
    if not holders:
        return rng.choice(OTHERS)
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    act = rng.randrange(10)
    if act < 6:
        holder[key] = other_value(rng, holder[key])
    elif act == 6:
        del holder[key]
    elif act == 7 and isinstance(holder, list):
        holder.insert(key, rng.choice([holder[key], rng.choice(OTHERS)]))
    elif act == 8 and isinstance(holder, list):
        holder[:] = rng.choice([holder[::-1], holder * 2, holder[1:]])
    elif isinstance(holder, dict):
        holder[rng.choice([f"{key}_", "", "x", *map(str, holder)])] = holder[key] if act == 9 else holder.pop(key)
    return found


def other_value(rng: random.Random, value: Value) -> Value:  # noqa: PLR0911 - a case for each type
    """Another value for one, often of the same type and near it."""
    if rng.random() < 0.25:
        return rng.choice(OTHERS)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, value * 2, -value, value + 2**32, float(value), *NUMBERS, *HUGE])
    if isinstance(value, float):
        return rng.choice([value + 0.25, value / 2, -value, -0.5, *FLOATS])
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice([value[:at], value + value, value[:at] + "0" + value[at + 1 :], value.upper(), *TEXTS])
    if isinstance(value, list):
        return rng.choice([value[1:], value * 2, value[::-1], [*value, rng.choice(OTHERS)], {}])
    return rng.choice(OTHERS)


def _holders(value: Value) -> Iterator[Any]:
    waiting = [value]
    while waiting:
        found = waiting.pop()
        if isinstance(found, dict | list) and found:
            yield found
            waiting += found.values() if isinstance(found, dict) else found


def other_array(rng: random.Random, array: Any) -> Any:
    """An array of Arrow of the same type with one change: of a value, or inside a list."""
    values = array.to_pylist()
    kind = array.type
    for _ in range(20):
        found = list(values)
        at = rng.randrange(len(found))
        found[at] = _other_cell(rng, found[at], kind)
        act = rng.randrange(12)
        if act == 0 and len(found) > 1:
            other = rng.randrange(len(found))
            found[at], found[other] = values[other], values[at]
        elif act == 1:
            found[at] = values[rng.randrange(len(values))]
        try:
            changed = pa.array(found, type=kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError, UnicodeError):
            continue
        if not changed.equals(array):
            return changed
    return array


def _other_cell(rng: random.Random, value: Value, kind: Any) -> Value:  # noqa: PLR0911 - as above
    if pa.types.is_map(kind):
        return rng.choice([[], [*value, ("x", 1)], [(k, v + 1) for k, v in value], [("", -1)]])
    if pa.types.is_large_list(kind):
        numbers = list(value)
        if not numbers or rng.random() < 0.2:
            return rng.choice([[], [0], [*numbers, 0], [*numbers, *numbers], numbers[1:]])
        at = rng.randrange(len(numbers))
        numbers[at] = _other_number(rng, numbers[at], kind.value_type)
        return numbers
    if isinstance(value, bytes):
        return other_bytes(rng, value)[: len(value)]
    if isinstance(value, str):
        return rng.choice([*TEXTS, value[:-1], value.replace("0", "1", 1)])
    if value is None:
        return rng.choice([0, "", 1.5, True])
    return _other_number(rng, value, kind)


def _other_number(rng: random.Random, value: Value, kind: Any) -> Value:
    if pa.types.is_floating(kind):
        return float(np.float32(rng.choice([value / 2, -value, value + 1, *FLOATS])))
    if isinstance(value, bool):
        return not value
    return rng.choice([value + 1, value - 1, value * 2, value + rng.randrange(100), *NUMBERS])
