"""Tables of damage: what is written, what changes in it, who reads it, and what is said.

A room's table is `DAMAGE` in its ``test_damage.py``. A row changes the bytes of a file, takes it away, or does anything
else with it. A row whose change is a strategy of hypothesis tries several changes: `any_byte` stands for "whichever
byte of this file changes".
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from tokshard.errors import TokshardError

Change = Callable[[bytes], bytes]


@dataclass(frozen=True)
class Edit:
    """A change of more than the bytes of one file.

    Args:
        make: is given the path of the file, which may become another one, a folder, or have others changed with it.
    """

    make: Callable[[Path], Any]


@dataclass(frozen=True)
class Damage:
    """One kind of file, and one way in which it goes bad.

    Args:
        what: is damaged, in a few words.
        write: is given an empty directory; writes what is read, and returns the file that changes.
        change: the content of the file, before and after; a strategy of such functions: any of them; `Edit`: what
            else happens to it; None: the file goes.
        read: is given the directory and reads all that there is. It has to work before the change.
        error: what it raises after it, exactly. None: it raises nothing and returns the lines that say what is wrong,
            none before the change.
        message: the problem line, or lines. ``FILE`` stands for the path of the file, ``DIR`` for the directory, ``*``
            for what differs from change to change.
    """

    what: str
    write: Callable[[Path], Path]
    change: Change | SearchStrategy[Change] | Edit | None
    read: Callable[[Path], Any]
    error: type[TokshardError] | None
    message: str


def damaged(rows: Sequence[Damage]) -> pytest.MarkDecorator:
    """Parametrize a test with the rows of a table; it calls `check`."""
    names = [each.what for each in rows]
    assert len({*names}) == len(names), "two rows have one name"
    return pytest.mark.parametrize("damage", [pytest.param(each, id=each.what) for each in rows])


def check(damage: Damage, directory: Path) -> None:
    """Write, read, change, and compare what the reader says then."""
    file = damage.write(directory)
    found = damage.read(directory)
    assert damage.error is not None or not found
    before, change = file.read_bytes(), damage.change
    if isinstance(change, SearchStrategy):

        @given(change)
        def any_of_them(one: Change) -> None:
            _change(file, before, one)
            _compare(damage, directory, file)

        any_of_them()
    else:
        _change(file, before, change)
        _compare(damage, directory, file)


def _change(file: Path, before: bytes, change: Change | Edit | None) -> None:
    if change is None:
        file.unlink()
    elif isinstance(change, Edit):
        change.make(file)
    else:
        after = change(before)
        assert after != before
        file.write_bytes(after)


def _compare(damage: Damage, directory: Path, file: Path) -> None:
    if damage.error is None:
        said = "\n".join(damage.read(directory))
    else:
        with pytest.raises(damage.error) as caught:
            damage.read(directory)
        assert type(caught.value) is damage.error
        assert caught.value.hint
        said = caught.value.problem
    said = said.replace(str(file), "FILE").replace(str(directory), "DIR")
    assert re.fullmatch(".*".join(map(re.escape, damage.message.split("*"))), said, re.DOTALL), said


def flipped(position: float | None = None, *, seed: int = 0) -> Change:
    """One byte becomes another one, which depends on `seed`.

    Args:
        position: in [0, 1) of the content; None: anywhere, by `seed`.
    """

    def change(content: bytes) -> bytes:
        rng = random.Random(seed)
        at = int((rng.random() if position is None else position) * len(content))
        return content[:at] + bytes([content[at] ^ rng.randrange(1, 256)]) + content[at + 1 :]

    return change


any_byte = st.builds(flipped, st.floats(0, 1, exclude_max=True), seed=st.integers(0, 1 << 16))
"""Any byte becomes any other one."""


def cut(content: bytes) -> bytes:
    """The last third is missing."""
    return content[: len(content) * 2 // 3]


def grown(content: bytes) -> bytes:
    """Something follows that does not belong there."""
    return content + b"\0"


def emptied(content: bytes) -> bytes:
    """Nothing is left."""
    return b""


def replaced(old: bytes, new: bytes) -> Change:
    """Some bytes are others, of any length."""

    def change(content: bytes) -> bytes:
        assert old in content
        return content.replace(old, new)

    return change
