"""Write the quickstart's raw text from what every Python installation has: JSON lines, no download.

    python recipes/quickstart_corpus.py DIR

`DIR/code.jsonl.zst` holds the sources of the standard library, one file a document. `DIR/prose.jsonl` holds
help topics, the licences and descriptions of the installed packages, and the docstrings of each module as one
document. Each record has `path` and `text`. The order is by path: the same installation gives the same bytes.
"""

import ast
import sys
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics

import msgspec
import zstandard

Document = tuple[str, str]  # path, text

STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])
SITE_PACKAGES = Path(sysconfig.get_paths()["purelib"])
INSTALLED = {"site-packages", "dist-packages"}
TESTS = {"test", "tests", "idle_test"}
CACHE = {"__pycache__"}
PROSE_NAMES = ("METADATA", "LICENSE", "LICENCE", "COPYING", "NOTICE", "AUTHORS", "README", "CHANGELOG")
PROSE_SUFFIXES = {".md", ".rst"}


def files(root: Path, *, without: set[str]) -> Iterator[tuple[str, Path]]:
    """The files below `root` in bytewise order of their path, less those in a folder named in `without`."""
    found = ((path.relative_to(root), path) for path in root.rglob("*") if path.is_file())
    kept = ((relative.as_posix(), path) for relative, path in found if without.isdisjoint(relative.parts))
    return iter(sorted(kept))


def read(path: Path, skipped: Counter[str]) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        skipped["not UTF-8"] += 1
    except OSError:
        skipped["unreadable"] += 1
    return None


def sources(skipped: Counter[str]) -> Iterator[Document]:
    for name, path in files(STANDARD_LIBRARY, without=INSTALLED | CACHE):
        if path.suffix == ".py" and (text := read(path, skipped)) is not None:
            yield name, text


def prose(skipped: Counter[str]) -> Iterator[Document]:
    yield from ((f"topics/{name}", text) for name, text in sorted(topics.items()))
    for root, without in ((STANDARD_LIBRARY, TESTS | CACHE | INSTALLED), (SITE_PACKAGES, TESTS | CACHE)):
        for name, path in files(root, without=without):
            if path.suffix == ".py":
                text = module_docstrings(read(path, skipped) or "", skipped)
            elif path.suffix in PROSE_SUFFIXES or path.name.upper().startswith(PROSE_NAMES):
                text = read(path, skipped) or ""
            else:
                continue
            if text:
                yield name, text


def module_docstrings(source: str, skipped: Counter[str]) -> str:
    try:
        module = ast.parse(source)
    except (SyntaxError, ValueError):
        skipped["not Python of this version"] += 1
        return ""
    return "\n\n".join(docstrings(module))


def docstrings(node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """The docstring of a definition, then those of the definitions in its body."""
    if text := ast.get_docstring(node):
        yield text
    for child in node.body:
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield from docstrings(child)


def write_json_lines(out: Path, documents: Iterator[Document], skipped: Counter[str]) -> None:
    encode = msgspec.json.Encoder().encode
    lines = [encode({"path": path, "text": text}) + b"\n" for path, text in documents]
    data = b"".join(lines)
    out.write_bytes(zstandard.compress(data, 3) if out.suffix == ".zst" else data)
    text_mb, disk_mb = len(data) / 1e6, out.stat().st_size / 1e6
    print(f"{out}: {len(lines):,} documents, {text_mb:.1f} MB of JSON lines, {disk_mb:.1f} MB on disk")
    for reason, count in sorted(skipped.items()):
        print(f"  left out {count:,} {'file' if count == 1 else 'files'}: {reason}")


def main() -> None:
    warnings.simplefilter("ignore", SyntaxWarning)  # escapes in other people's string literals
    warnings.simplefilter("ignore", DeprecationWarning)
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, documents in (("code.jsonl.zst", sources), ("prose.jsonl", prose)):
        skipped: Counter[str] = Counter()
        write_json_lines(directory / name, documents(skipped), skipped)


if __name__ == "__main__":
    main()
