"""Breaks one file of a corpus in one of many ways, and checks that the damage is reported.

Run as ``python -m tests.inspect.damage CORPUS START STOP`` for the cases of these numbers, so that a crash of the
process is seen by whoever started it. The corpus is whole again afterwards. Prints one JSON line per case.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from tokshard.errors import TokshardError
from tokshard.format.opening import open_corpus
from tokshard.inspect.verify.verification import verify_corpus
from tokshard.store.posix import PosixStore

Files = dict[str, bytes]
Changes = dict[str, bytes | None]
"""File to its new content, None where it is gone."""


def flip_a_bit(rng: random.Random, files: Files, name: str) -> Changes:
    return {name: _with(files[name], rng.randrange(len(files[name])), lambda byte: byte ^ (1 << rng.randrange(8)))}


def change_a_byte(rng: random.Random, files: Files, name: str) -> Changes:
    return {
        name: _with(files[name], rng.randrange(len(files[name])), lambda byte: (byte + rng.randrange(1, 256)) % 256)
    }


def invert_a_range(rng: random.Random, files: Files, name: str) -> Changes:
    content = files[name]
    size = min(64, len(content) // 2)
    start = rng.randrange(len(content) - size)
    return {name: content[:start] + bytes(b ^ 255 for b in content[start : start + size]) + content[start + size :]}


def zero_a_range(rng: random.Random, files: Files, name: str) -> Changes:
    content = files[name]
    size = min(64, len(content) // 2)
    start = rng.randrange(len(content) - size)
    while not any(content[start : start + size]):  # zeroing what is zero damages nothing
        start = rng.randrange(len(content) - size)
    return {name: content[:start] + bytes(size) + content[start + size :]}


def cut_while_it_is_read(rng: random.Random, files: Files, name: str) -> Changes:
    """Only a part is left when the first bytes have been read; `run_case` sees to that."""
    return {name: files[name][: rng.randrange(len(files[name]) // 2)]}


def swap_two_ranges(rng: random.Random, files: Files, name: str) -> Changes:
    content = files[name]
    half = len(content) // 2
    return {name: content[half:] + content[:half]}


def truncate(rng: random.Random, files: Files, name: str) -> Changes:
    return {name: files[name][: rng.randrange(len(files[name]))]}


def append(rng: random.Random, files: Files, name: str) -> Changes:
    return {name: files[name] + rng.choice([b"\0", b"\n", rng.randbytes(9), files[name]])}


def delete(rng: random.Random, files: Files, name: str) -> Changes:
    return {name: None}


def swap_with_another(rng: random.Random, files: Files, name: str) -> Changes:
    other = rng.choice([other for other in files if other != name])
    return {name: files[other], other: files[name]}


def replace_by_another(rng: random.Random, files: Files, name: str) -> Changes:
    return {name: files[rng.choice([other for other in files if other != name])]}


def add_a_foreign_file(rng: random.Random, files: Files, name: str) -> Changes:
    return {rng.choice(["notes.txt", "shard-00-0000000-000000-0099.arrow", ".hidden", f"{name}.bak"]): files[name]}


DAMAGES: list[Callable[[random.Random, Files, str], Changes]] = [
    flip_a_bit,
    flip_a_bit,
    change_a_byte,
    change_a_byte,
    invert_a_range,
    zero_a_range,
    swap_two_ranges,
    truncate,
    cut_while_it_is_read,
    append,
    delete,
    swap_with_another,
    replace_by_another,
    add_a_foreign_file,
]
SAME_SIZE = {"flip_a_bit", "change_a_byte", "invert_a_range", "zero_a_range", "swap_two_ranges", "swap_with_another"}


def run_case(corpus: Path, number: int, files: Files, truth: list[list[int]]) -> dict[str, object]:
    """Break the corpus, verify it, read it, mend it."""
    rng = random.Random(number)
    damage = DAMAGES[number % len(DAMAGES)]
    name = sorted(files)[number // len(DAMAGES) % len(files)]
    changed = damage(rng, files, name)

    def change() -> None:
        for file, content in changed.items():
            if content is None:
                (corpus / file).unlink()
            else:
                (corpus / file).write_bytes(content)

    if damage is not cut_while_it_is_read:
        change()
    try:
        if damage is cut_while_it_is_read:
            with _at_the_first_read_of(corpus / name, change):
                report = verify_corpus(corpus, workers=1 + number % 2)
        else:
            report = verify_corpus(corpus, workers=1 + number % 2)
        return {
            "case": number,
            "damage": damage.__name__,
            "changed": sorted(changed),
            "reported": sorted({problem.file for problem in report.problems}),
            "reading": _read(corpus, truth),
        }
    finally:
        for file in changed:
            if file in files:
                (corpus / file).write_bytes(files[file])
            else:
                (corpus / file).unlink()


@contextlib.contextmanager
def _at_the_first_read_of(path: Path, change: Callable[[], None]) -> Iterator[None]:
    """Do something once the first bytes of a file have been read, while it is open."""
    changes, opened, read_bytes, get = [change], PosixStore.open, Path.read_bytes, PosixStore.get

    class Changing(io.FileIO):
        def readinto(self, buffer: Any) -> int:
            count = super().readinto(buffer)
            if changes:
                changes.pop()()
            return count or 0

    def open_and_change(store: PosixStore, name: str) -> Any:
        where = Path(store.where(name))
        return Changing(where) if where == path else opened(store, name)

    def change_and_read_bytes(read: Path) -> bytes:
        if changes and read == path:
            changes.pop()()
        return read_bytes(read)

    def change_and_get(store: PosixStore, name: str) -> bytes:
        if changes and Path(store.where(name)) == path:
            changes.pop()()
        return get(store, name)

    with (
        mock.patch.object(PosixStore, "open", open_and_change),
        mock.patch.object(Path, "read_bytes", change_and_read_bytes),
        mock.patch.object(PosixStore, "get", change_and_get),
    ):
        yield
    assert not changes, f"{path.name} was not read"


def _read(corpus: Path, truth: list[list[int]]) -> str:
    """What a reader makes of it: a refusal, the right documents, or wrong ones."""
    try:
        with open_corpus(corpus) as opened:
            documents = [document.tolist() for document in opened.documents()]
            for index in range(len(opened)):
                opened.metadata(index)
                opened.provenance(index)
            opened.sources()
    except TokshardError:
        return "refused"
    return "right" if documents == truth else "wrong"


def _with(content: bytes, position: int, change: Callable[[int], int]) -> bytes:
    return content[:position] + bytes([change(content[position])]) + content[position + 1 :]


def main(corpus: Path, start: int, stop: int) -> None:
    files = {path.name: path.read_bytes() for path in corpus.iterdir()}
    with open_corpus(corpus) as opened:
        truth = [document.tolist() for document in opened.documents()]
    for number in range(start, stop):
        sys.stdout.write(json.dumps(run_case(corpus, number, files, truth)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
