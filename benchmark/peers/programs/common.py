"""What the programs share that run a peer in its own environment: the standard library alone, and not tokshard.

A program is ``python -m benchmark.peers.programs.PEER CASE SETTINGS``, where SETTINGS is JSON. Its last line on
stdout is a JSON object: what the case found, with the versions of the packages. With ``outs`` instead of ``out``, a
case looks at several folders.
"""

import importlib.metadata
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

Settings = dict[str, Any]
END_OF_TEXT = "<|endoftext|>"


class CannotError(Exception):
    """The peer has no way to do this; the message is one sentence that says why."""


def main(cases: Mapping[str, Callable[[Settings], Mapping[str, Any]]], packages: Sequence[str]) -> None:
    """Run the case that the command line names, and print what it returns."""
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    found: dict[str, Any] = {"versions": versions(packages)}
    try:
        if name not in cases:
            raise CannotError("It has no such function.")
        found |= _each(cases[name], settings) if "outs" in settings else cases[name](settings)
    except CannotError as error:
        found["cannot"] = str(error)
    sys.stdout.flush()
    sys.stdout.write("\n" + json.dumps(found) + "\n")


def _each(case: Callable[[Settings], Mapping[str, Any]], settings: Settings) -> dict[str, Any]:
    """``each``: what the case finds in each folder of ``outs``, or ``failed``. All share the imports of one process."""
    each: list[Mapping[str, Any]] = []
    for out in settings["outs"]:
        try:
            each.append(case(settings | {"out": out}))
        except Exception as error:  # noqa: BLE001 - a reader may fail at one folder, and read the others
            each.append({"failed": f"{type(error).__name__}: {error}"})
    return {"each": each}


def versions(packages: Sequence[str]) -> dict[str, str]:
    return {package: importlib.metadata.version(package) for package in packages}


def files(folder: str) -> list[str]:
    """The JSON Lines files of the corpus, in order."""
    return sorted(map(str, Path(folder).glob("*.jsonl*")))


def texts(paths: Sequence[str]) -> Iterator[str]:
    """The ``text`` of each line."""
    for path in paths:
        with open(path, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)["text"]


def folder_bytes(folder: str) -> int:
    return sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def batches(texts: Iterator[str], num_chars: int = 4 << 20) -> Iterator[list[str]]:
    """Consecutive texts, at least so many characters at a time."""
    batch: list[str] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= num_chars:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encoder(tokenizer: str) -> Callable[[list[str]], list[Any]]:
    """`encode_batch` of the installed `tokenizers`, special tokens as the text they are; ids without an end token.

    Ids are lists with 0.2x, and arrays with 1.x.
    """
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(Path(tokenizer) / "tokenizer.json"))
    if hasattr(loaded, "encode_batch_fast"):  # 0.2x
        loaded.encode_special_tokens = True
        return lambda batch: [found.ids for found in loaded.encode_batch_fast(batch, add_special_tokens=False)]
    options = {"add_special_tokens": False, "encode_special_tokens": True}
    return lambda batch: [found.ids_array for found in loaded.encode_batch(batch, **options)]


def end_id(tokenizer: str, text: str = END_OF_TEXT) -> int:
    """The id of the token that ends each document."""
    entries = json.loads((Path(tokenizer) / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    return next(entry["id"] for entry in entries if entry["content"] == text)
