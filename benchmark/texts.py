"""The texts that the benchmark measures: real source code and prose of this machine, and the code cut short.

    python -m benchmark.texts OUT --megabytes 220 --short-megabytes 60

`OUT/code.jsonl.zst` holds each source file once, `OUT/prose.jsonl.zst` each file of documentation or translations (as
much as of short text), `OUT/short.jsonl.zst` pieces of code of about 40 tokens, `OUT/quarter.jsonl.zst` and
`OUT/half.jsonl.zst` every fourth and second document of the code. No text is repeated: where the machine has less than
is asked for, the texts are smaller. The same machine gives the same bytes. Prints one line of JSON that says what was
taken from where.
"""

import argparse
import hashlib
import json
import os
import sys
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import msgspec
import zstandard

SHORT_BYTES = 175
"""Lines are gathered up to this size, and longer ones cut to it: about 40 tokens of code."""

MAX_DOCUMENT_BYTES = 16 << 20  # what `tokshard build` takes unless told otherwise

_PYTHON = (".py", ".pyi")
_OTHER = (
    *(".c", ".cc", ".cpp", ".h", ".hh", ".hpp", ".rs", ".go", ".js", ".ts", ".css", ".sql"),
    *(".el", ".lua", ".pl", ".pm", ".rb", ".sh", ".tcl", ".vim"),
)
_PROSE = (".md", ".rst", ".txt", ".html", ".pod", ".tex", ".po")
_CODE = {"Python": _PYTHON, "other languages": _OTHER}
_CACHES = {"__pycache__", ".git", "node_modules"}


class Root(NamedTuple):
    """A folder to take files from, and what to call it: no path of a user is printed."""

    name: str
    path: str


class Text(NamedTuple):
    """What is in one of the files."""

    documents: int
    text_bytes: int
    compressed_bytes: int
    largest_bytes: int


def roots() -> list[Root]:
    """Where to look, in order."""
    paths = sysconfig.get_paths()
    candidates = [
        Root("the interpreter's lib", paths["stdlib"]),
        Root("site-packages", paths["purelib"]),
        Root("site-packages", paths["platlib"]),
        *(Root(folder, folder) for folder in ("/usr/lib", "/usr/share", "/usr/include", "/usr/local")),
    ]
    seen: set[str] = set()
    found = []
    for root in candidates:
        real = os.path.realpath(root.path)
        if os.path.isdir(real) and real not in seen:
            seen.add(real)
            found.append(Root(root.name, real))
    return found


def files(root: Root, suffixes: tuple[str, ...]) -> list[str]:
    """The files with one of the suffixes, in bytewise order of their path; links are not followed."""
    found = []
    for folder, folders, names in os.walk(root.path):
        folders[:] = [name for name in folders if name not in _CACHES]
        found += [os.path.join(folder, name) for name in names if name.endswith(suffixes)]
    return sorted(path for path in found if os.path.isfile(path) and not os.path.islink(path))


def documents(
    left_out: Counter[str], kinds: Mapping[str, tuple[str, ...]] = MappingProxyType(_CODE)
) -> Iterator[tuple[str, str, str]]:
    """Each source file once: where from, name, text. Python comes first, other languages only where that ends."""
    seen: set[bytes] = set()
    for kind, suffixes in kinds.items():
        for root in roots():
            for path in files(root, suffixes):
                try:
                    content = Path(path).read_bytes()
                    text = content.decode("utf-8")
                except (OSError, UnicodeDecodeError):
                    left_out["unreadable or not UTF-8"] += 1
                    continue
                digest = hashlib.sha256(content).digest()
                if digest in seen:
                    left_out["equal to an earlier file"] += 1
                elif not text.strip():
                    left_out["empty"] += 1
                elif len(content) > MAX_DOCUMENT_BYTES:
                    left_out["over 16 MiB"] += 1
                else:
                    seen.add(digest)
                    yield f"{root.name}, {kind}", os.path.relpath(path, root.path), text


def pieces(text: str) -> Iterator[str]:
    """Cut a text into documents of about `SHORT_BYTES`, at ends of lines where there are any."""
    piece = ""
    for line in text.splitlines(keepends=True):
        if len(piece) + len(line) > SHORT_BYTES:
            if piece.strip():
                yield piece
            piece = ""
        *cuts, rest = (line[start : start + SHORT_BYTES] for start in range(0, len(line), SHORT_BYTES))
        yield from (cut for cut in cuts if cut.strip())
        piece += rest
    if piece.strip():
        yield piece


class JsonLines:
    """One zstd file of JSON lines, written as a stream."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._stream = zstandard.ZstdCompressor(level=3).stream_writer(self._file)
        self._encode = msgspec.json.Encoder().encode
        self.documents = self.text_bytes = self.largest_bytes = 0

    def write(self, path: str, text: str) -> None:
        self._stream.write(self._encode({"path": path, "text": text}) + b"\n")
        num_bytes = len(text.encode())
        self.documents += 1
        self.text_bytes += num_bytes
        self.largest_bytes = max(self.largest_bytes, num_bytes)

    def close(self) -> Text:
        self._stream.close()
        self._file.close()
        return Text(self.documents, self.text_bytes, self._path.stat().st_size, self.largest_bytes)


def write_texts(out: Path, *, code_bytes: int, short_bytes: int) -> dict[str, object]:
    """Write the texts and say what is in them."""
    texts = {name: JsonLines(out / f"{name}.jsonl.zst") for name in ("code", "prose", "short", "quarter", "half")}
    code, short = texts["code"], texts["short"]
    taken: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for number, (origin, path, text) in enumerate(documents(left_out)):
        before = code.text_bytes
        code.write(path, text)
        taken[origin] += code.text_bytes - before
        if number % 4 == 0:
            texts["quarter"].write(path, text)
        if number % 2 == 0:
            texts["half"].write(path, text)
        if short.text_bytes * code_bytes < short_bytes * code.text_bytes:  # documents from everywhere, not the first
            for piece in pieces(text):
                short.write(path, piece)
        if code.text_bytes >= code_bytes:
            break
    for origin, path, text in documents(left_out, {"prose": _PROSE}):
        before = texts["prose"].text_bytes
        texts["prose"].write(path, text)
        taken[origin] += texts["prose"].text_bytes - before
        if texts["prose"].text_bytes >= short_bytes:
            break
    return {
        "texts": {name: written.close()._asdict() for name, written in texts.items()},
        "taken_bytes": dict(taken),
        "left_out_files": dict(left_out),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--short-megabytes", type=float, required=True)
    arguments = parser.parse_args()
    said = write_texts(
        arguments.out, code_bytes=int(arguments.megabytes * 1e6), short_bytes=int(arguments.short_megabytes * 1e6)
    )
    json.dump(said, sys.stdout)


if __name__ == "__main__":
    main()
